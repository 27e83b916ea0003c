"""Run programs that a model wrote, each shut off from this machine and within limits. This is a security boundary.

    with Executor(Limits(), mode="python") as executor:
        answers = executor.run([Run("def f(a):\\n    return a + 1", ("1",))])

Two processes of `sandboxed.py` run every program, so that one whose value changes from run to run is found. They are
started by `python -I -S`, with an empty environment, no file descriptor of this process, a session of their own and a
folder that is removed as theirs, in namespaces without a network where the kernel lets them. Each fork that runs a
program has limits of memory, time and output, no right to write a file, and may make no system call but those that
computing needs: no open, socket, fork, exec or kill. Where the kernel can't filter calls, only programs of the strict
grammar (`expression`) run; all others are refused.

Answers come back as JSON and are checked to be what they should be; nothing that a program returns is ever unpickled or
evaluated in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.nouns.errors import UsageError

MODES = ("expression", "python", "unchecked")
_FILE = Path(__file__).with_name("sandboxed.py")
_START_S = 60  # of a process, on a machine that does much else


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Args:
        cpu_s: seconds of the processor. They don't depend on what else the machine does.
        wall_s: seconds after which it is killed, whatever it waits for.
        memory: bytes of address space.
        longest: characters of a program, and of each of its values.
    """

    cpu_s: int = 2
    wall_s: float = 30.0
    memory: int = 512 * 2**20
    longest: int = 4000


@dataclass(frozen=True)
class Run:
    """A program and what it is called with.

    Args:
        program: an expression of x, or Python that defines f.
        inputs: for each call the arguments, as Python writes them.
        wanted: what each call should return, as Python writes it; None: it is not compared.
    """

    program: str
    inputs: tuple[str, ...]
    wanted: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a run.

    Args:
        outputs: the value of each call, as Python writes it; empty after an error.
        equal: whether each is what is wanted; empty if nothing was, and after an error.
        error: None, or "refused", "raised", "time", "memory", "output", "died" or "differs": from run to run.
        message: more about the error.
    """

    outputs: tuple[str, ...] = ()
    equal: tuple[bool, ...] = ()
    error: str | None = None
    message: str = ""

    @property
    def is_right(self) -> bool:
        """True if every call returned what is wanted."""
        return bool(self.equal) and all(self.equal)


class Executor:
    """Two processes that run programs; close it, or use it in a `with`.

    Args:
        limits: of each program.
        mode: "expression": x and calls of `operations`; "python": functions of plain data without files, processes,
            attributes that begin with _, or imports beyond a few modules; "unchecked": any Python, for tests of the
            limits behind these checks.
        operations: of expressions: by name, a Python expression of x. They are trusted.
        group: how many expressions one fork runs; if one of them ends it, the next begins in another.

    Raises:
        UsageError: there is no such mode, or no such operating system.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        mode: str = "expression",
        operations: Mapping[str, str] | None = None,
        group: int = 64,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"an executor for {mode!r}", f"it takes {', '.join(MODES)}", "name one of these")
        if not hasattr(os, "fork"):
            raise UsageError("an executor of programs", "this system has no fork", "run it on Linux")
        self.limits = limits or Limits()
        limited = asdict(self.limits)
        self.setting = {"mode": mode, "operations": dict(operations or {}), "group": group, **limited}
        self.processes: list[_Process] = []
        try:
            for _ in range(2):
                self.processes.append(_Process(self.setting))
        except BaseException:
            self.close()
            raise

    @property
    def kernel_limits(self) -> dict[str, bool]:
        """What the kernel does: `refuses_calls` (seccomp), and `namespaces` without a network."""
        return self.processes[0].kernel_limits

    def run(self, runs: Sequence[Run]) -> list[Answer]:
        """Return what came of each, in their order."""
        different = list(dict.fromkeys(runs))
        jobs = [{"program": run.program, "inputs": run.inputs, "wanted": run.wanted} for run in different]
        if not jobs:
            return []
        for process in self.processes:  # both compute at once
            process.ask(jobs)
        first, second = (
            [_checked(each, run) for each, run in zip(process.answers(), different, strict=True)]
            for process in self.processes
        )
        found = {}
        for run, one, other in zip(different, first, second, strict=True):
            differs = one.error is None and other.error is None and one != other
            message = "two runs returned different values"
            found[run] = Answer(error="differs", message=message) if differs else (other if other.error else one)
        return [found[run] for run in runs]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.end()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Process:
    """One process of `sandboxed.py`, which is started anew if it ends or stays silent."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self._start()

    def _start(self) -> None:
        self.received = b""
        folder = tempfile.mkdtemp(prefix="paceline-programs-")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            close_fds=True,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        self._send(self.setting)
        line = self._line(_START_S)
        os.rmdir(folder)  # nothing can be made in it, and nothing is left if this process is killed
        if line is None:
            self.end()
            raise UsageError(
                "a process that runs programs should start",
                f"{sys.executable} -I -S {_FILE.name} said nothing within {_START_S} s",
                "run that command, and see what it prints",
            )
        self.kernel_limits: dict[str, bool] = json.loads(line)

    def ask(self, jobs: list[dict[str, Any]]) -> None:
        """Send jobs; `answers` returns what comes of them."""
        self.jobs = jobs
        with contextlib.suppress(BrokenPipeError):  # `answers` finds that it has ended
            self._send(jobs)

    def answers(self) -> list[dict[str, Any]]:
        """Return one for each job; a job during which the process itself ended or hung has an error."""
        found: list[dict[str, Any]] = []
        while len(found) < len(self.jobs):
            # The process has its own limit for each program. This one is for the process itself.
            line = self._line(2 * self.setting["wall_s"] + 10)
            if line is not None:
                found.append(json.loads(line))
                continue
            self.end()
            found.append({"error": "died", "message": "the process that runs programs ended"})
            self._start()
            rest = self.jobs[len(found) :]
            if rest:
                self._send(rest)
        return found

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        left = memoryview(json.dumps(value).encode() + b"\n")
        while left:
            left = left[self.process.stdin.write(left) :]

    def _line(self, seconds: float) -> bytes | None:
        """Return the next line; None if none comes."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not part:
                return None
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill it with its whole group; forks of it are killed by the kernel then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _checked(answer: Any, run: Run) -> Answer:
    """Return an answer whose parts are what they should be; what a program has made of it is not trusted."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return Answer(error=answer["error"][:20], message=str(answer.get("message", ""))[:300])
    outputs, equal = (answer.get(name) if isinstance(answer, dict) else None for name in ("outputs", "equal"))
    if not isinstance(outputs, list) or not isinstance(equal, list):
        return Answer(error="died", message="the answer is none")
    counts = len(outputs), len(equal)
    is_whole = counts == (len(run.inputs), len(run.inputs) if run.wanted else 0)
    if is_whole and all(isinstance(each, str) for each in outputs) and all(isinstance(each, bool) for each in equal):
        return Answer(tuple(outputs), tuple(equal))
    return Answer(error="died", message="the answer is none")
