"""Run programs that a model wrote, each shut off from this machine and within limits. This is a security boundary.

    with Executor(Limits(), mode="python") as executor:
        answers = executor.run([Run("def f(a):\\n    return a + 1", ("1",))])

Two processes of `sandboxed.py` run every program, so that one whose value changes from run to run is found; a third
compares values with those that are wanted, which no program is to know. They are started by `python -I -S`, with an
empty environment, no file descriptor of this process, a session of their own and a folder that is removed as theirs, in
namespaces without a network where the kernel lets them. Each fork that runs a program has limits of memory, time and
output, no right to write a file, and may make no system call but those that computing needs: no open, socket, fork,
exec or kill. Where the kernel can't filter calls, only programs of the strict grammar (`expression`) run; all others
are refused. The check of Python's syntax is a filter before that, and no boundary by itself.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.nouns.errors import UsageError

MODES = ("expression", "python", "unchecked")
COMPARE = "compare"  # of the process that compares values with those that are wanted, and runs no program
_FILE = Path(__file__).with_name("sandboxed.py")
_ERRORS = ("refused", "raised", "time", "memory", "output", "died", "differs")
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
    """Two processes that run programs, and one that compares values; close it, or use it in a `with`.

    The kernel ends them with the thread that makes it, so make it in one that lives as long.

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
            for each in (mode, mode, COMPARE):
                self.processes.append(_Process({**self.setting, "mode": each}))
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
        jobs = [{"program": run.program, "inputs": run.inputs} for run in different]
        if not jobs:
            return []
        programs = self.processes[:2]
        for process in programs:  # both compute at once
            process.ask(jobs)
        first, second = (
            [_checked(each, run, self.limits.longest) for each, run in zip(process.answers(), different, strict=True)]
            for process in programs
        )
        found = {}
        for run, one, other in zip(different, first, second, strict=True):
            differs = one.error is None and other.error is None and one != other
            message = "two runs returned different values"
            found[run] = Answer(error="differs", message=message) if differs else (other if other.error else one)
        self._compare(found)
        return [found[run] for run in runs]

    def _compare(self, found: dict[Run, Answer]) -> None:
        """Say of each answer whether it is what is wanted. No process that runs programs is told what that is."""
        compared = [run for run, answer in found.items() if run.wanted and answer.error is None]
        if not compared:
            return
        comparer = self.processes[2]
        for _ in range(2):  # again where it was killed meanwhile
            comparer.ask([{"outputs": found[run].outputs, "wanted": run.wanted} for run in compared])
            answers = zip(compared, comparer.answers(), strict=True)
            equal = {run: _equal_of(answer, len(run.inputs)) for run, answer in answers}
            found |= {run: replace(found[run], equal=each) for run, each in equal.items() if each is not None}
            compared = [run for run, each in equal.items() if each is None]
            if not compared:
                return
        found |= dict.fromkeys(compared, Answer(error="died", message="the values could not be compared"))

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
        self.is_asked = False
        folder = tempfile.mkdtemp(prefix="paceline-programs-")
        try:
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
        finally:
            os.rmdir(folder)  # it is in it by now, and nothing can be made in it
        self._send(self.setting)
        line = self._line(_START_S)
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
        if self.is_asked:  # a run was broken off: its answers are not those of this one
            self.end()
            self._start()
        self.is_asked = True
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
                found.append(_read(line))
                continue
            self.end()
            found.append({"error": "died", "message": "the process that runs programs ended"})
            self._start()
            rest = self.jobs[len(found) :]
            self.is_asked = True
            if rest:
                with contextlib.suppress(BrokenPipeError):
                    self._send(rest)
        self.is_asked = False
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
        if self.process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _read(line: bytes) -> Any:
    """Return what a line of JSON holds; None if it is none, or nested more deeply than this process can read."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _checked(answer: Any, run: Run, longest: int) -> Answer:
    """Return an answer whose parts are what they should be; what a program has made of it is not trusted."""
    if isinstance(answer, dict) and answer.get("error") is not None:
        error, message = answer["error"], answer.get("message")
        if error not in _ERRORS or not isinstance(message, str):
            return Answer(error="died", message="the answer is none")
        return Answer(error=error, message="".join(each if each.isprintable() else "?" for each in message[:300]))
    outputs = answer.get("outputs") if isinstance(answer, dict) else None
    is_whole = isinstance(outputs, list) and len(outputs) == len(run.inputs)
    if is_whole and all(_is_value(each, longest) for each in outputs):
        return Answer(tuple(outputs))
    return Answer(error="died", message="the answer is none")


def _equal_of(answer: Any, count: int) -> tuple[bool, ...] | None:
    """Return which values are what is wanted; None where that is not known."""
    equal = answer.get("equal") if isinstance(answer, dict) else None
    if not isinstance(equal, list) or len(equal) != count:
        return None
    return tuple(each is True for each in equal)


def _is_value(text: Any, longest: int) -> bool:
    """Return whether it may be what `repr` writes of plain data: that has no line breaks and no lone surrogates."""
    return isinstance(text, str) and len(text) <= longest and text.isprintable()
