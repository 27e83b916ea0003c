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

from paceline.launch.orphans import die_with_parent

_ALIGNMENT = 64  # bytes: of a cache line
_OUTPUTS = (0, 1, 2)


class SharedTensors:
    """Tensors in memory that a process and its forks share, by name.

    Args:
        forms: name, shape and dtype of each.
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
        main: runs there, is handed `wait`, which returns once `go` was called here, and returns what `answer` gives.
    """

    def __init__(self, main: Callable[[Callable[[], None]], dict[str, Any]]) -> None:
        answers, self._answer = os.pipe()
        go, self._go = os.pipe()
        self._answers = answers
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            _run(main, go, self._answer)
        os.close(go)
        os.close(self._answer)

    def go(self) -> None:
        """Let `wait` return in the process; it has what it needs of this one."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._go, b"1")

    def answer(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return what `main` returned there; None if it has not yet. Empty if it has ended without a word."""
        while select.select([self._answers], [], [], timeout_s)[0]:
            part = os.read(self._answers, 1 << 16)
            if not part:
                self.end()
                return dict(json.loads(self._text)) if self._text else {}
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


def _run(main: Callable[[Callable[[], None]], dict[str, Any]], go: int, answer: int) -> NoReturn:
    try:
        die_with_parent()
        _isolate({go, answer})
        content = main(lambda: _wait(go))
        os.write(answer, json.dumps(content).encode())
    finally:
        os._exit(0)  # no handler of the rank's runs, and no buffer of its output is written twice


def _wait(go: int) -> None:
    os.read(go, 1)


def _isolate(kept: set[int]) -> None:
    """Leave to this process none of the rank's connections and places in files, and nothing that it could write to."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in kept or fd == null:
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
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, fd, inheritable=False)
        os.close(own)


def wait_for(process: ForkedProcess, limit_s: float, stuck_s: float) -> dict[str, Any] | None:
    """Wait for a process's answer; None where it takes longer.

    Args:
        process: forked.
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
