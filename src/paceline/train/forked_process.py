"""A process forked from a rank that computes on with what the rank has, and leaves no trace.

It has the rank's objects as they were, without a copy: memory is shared until it is written. What it shares with the
rank besides is taken from it first: connections (a message on one would be taken for the rank's), the places in open
files, and the right to write to files. Tensors come and go in memory that both see.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

_ALIGNMENT = 64  # bytes: of a cache line
_OUTPUTS = (0, 1, 2)


class SharedTensors:
    """Tensors in memory that a process and its forks share, by name.

    Args:
        forms: the name, shape and dtype of each tensor.
    """

    def __init__(self, forms: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        places = []
        end = 0
        for name, shape, dtype in forms:
            count = int(torch.Size(shape).numel())
            places.append((name, shape, dtype, end, count))
            end += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        self.tensors: dict[str, torch.Tensor] = {}
        memory = mmap.mmap(-1, max(end, 1))
        for name, shape, dtype, offset, count in places:
            if count:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            self.tensors[name] = flat.view(shape)


class ForkedProcess:
    """A process forked from this one, which it outlives by nothing.

    Args:
        main: the function that runs there, is handed `wait`, and returns the answer. None: the process goes on where
            this one does, with `is_here` set, until it calls `reply`.

    Attributes:
        is_here: True in the forked process.
    """

    def __init__(self, main: Callable[[Callable[[], str]], dict[str, Any]] | None = None) -> None:
        answers, own_answers = os.pipe()
        own_go, go = os.pipe()
        self.pid = os.fork()
        self.is_here = self.pid == 0
        if not self.is_here:
            os.close(own_go)
            os.close(own_answers)
            self._answers, self._go = answers, go
            self._text = b""
            return
        self._answers, self._go = own_answers, own_go
        try:
            _isolate({own_go, own_answers})
            if main is not None:
                self.reply(main(self.wait))
        except BaseException:
            os._exit(1)

    def go(self, letter: str = "g") -> None:
        """Let `wait` return one letter in the process; it has all that it needs from this one."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._go, letter.encode())

    def wait(self) -> str:
        """In the process: wait for `go`, and return its letter."""
        letter = os.read(self._go, 1)
        if not letter:  # the rank has ended
            os._exit(0)
        return letter.decode()

    def reply(self, answer: dict[str, Any]) -> NoReturn:
        """In the process: give the answer, and end. No handler of the rank's runs, and no buffer is written twice."""
        try:
            os.write(self._answers, json.dumps(answer).encode())
        finally:
            os._exit(0)

    def answer(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return the answer; None if there is none yet."""
        while select.select([self._answers], [], [], timeout_s)[0]:
            part = os.read(self._answers, 1 << 16)
            if not part:
                self.end()
                return dict(json.loads(self._text)) if self._text else {"reason": "one process could not take it"}
            self._text += part
        return None

    def cpu_s(self) -> float:
        """Return the seconds that the process has computed."""
        import psutil

        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def end(self) -> None:
        """End the process, if it has not ended."""
        if not self.pid:
            return
        pid, self.pid = self.pid, 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(self._go)
        os.close(self._answers)


def _isolate(open_fds: set[int]) -> None:
    """Leave to this process none of the rank's connections and places in files, and nothing that it could write to."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in open_fds or fd == null:
            continue
        with contextlib.suppress(OSError):  # that of the listing is closed
            _take_from(fd, null)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # Threads of OpenMP do not come along: a second thread would be waited for in vain.
    torch.set_num_threads(1)


def _take_from(fd: int, null: int) -> None:
    mode = os.fstat(fd).st_mode
    if fd in _OUTPUTS or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
        os.dup2(null, fd, inheritable=False)
    elif stat.S_ISREG(mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        # Opened anew: reading on moves the place of this process only.
        place = os.lseek(fd, 0, os.SEEK_CUR)
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.lseek(opened, place, os.SEEK_SET)
        os.dup2(opened, fd, inheritable=False)
        os.close(opened)


def wait_for(process: ForkedProcess, limit_s: float, stuck_s: float) -> dict[str, Any] | None:
    """Wait for a process's answer; None where it takes longer.

    Args:
        process: the forked process.
        limit_s: the most seconds that it may compute.
        stuck_s: the most seconds in which it may compute nothing.
    """
    computed_s = -1.0
    looked_s = 0.0
    while True:
        answer = process.answer(timeout_s=0.02)
        if answer is not None:
            return answer
        now_s = time.monotonic()
        if now_s - looked_s < stuck_s:
            continue
        before_s, computed_s = computed_s, process.cpu_s()
        looked_s = now_s
        if computed_s > limit_s or computed_s == before_s:
            return None
