"""Ask a child process what a workload's step takes: the asking side has no torch."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from paceline.nouns.errors import ReadError, WorkloadError, last_error_of
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import COUNT, parse_json

MOST_CHILDREN = 2  # each holds torch, the file's data and a model without values
Answer = TypeVar("Answer")
_ANSWER = (
    {"number": COUNT, "error": {"asked": str, "found": str, "fix": str}},
    {"number": COUNT, "path": str},
)


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """One step to simulate.

    Args:
        plan: the plan's fields.
        rank: whose step.
        device: "cpu" or "cuda".
        micro_batch_size: in place of the workload's.
        precision: in place of the workload's.
        is_brief: of many micro-batches, two are enough.
        capacity: bytes of the device, if a step that does not fit need not be taken to its end.
        name: of it, where progress is shown.
    """

    plan: dict[str, Any]
    rank: int
    device: str
    micro_batch_size: int = 0
    precision: str = ""
    is_brief: bool = False
    capacity: int | None = None
    name: str = ""


def ranks_to_profile(plan: Plan) -> list[int]:
    """Return one rank of each stage of the pipeline: where sizes don't divide, the first along an axis has most."""
    # Along the other axes ranks do the same work on pieces of equal or smaller size.
    mesh = Mesh.parse(plan.mesh)
    ranks = []
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(rank)
        if not any(coordinate[axis] for axis in AXES if axis != "pipeline"):
            ranks.append(rank)
    return ranks


class Watcher(Protocol):
    """What shows progress: it is told which request is begun and ended, and about once a second in between."""

    def begins(self, part: str, number: int) -> None:
        """Show that a request is worked at."""

    def ends(self, number: int) -> None:
        """Show that it is done."""

    def shows(self) -> None:
        """Bring what is shown up to date."""


class Simulators(Generic[Answer]):
    """Child processes that try out steps of one file, as a context: each imports torch and loads the file once.

    Args:
        module: what they run, such as `profile/profile_workload.py`.
        command_line: the user's file and its arguments.
        read: reads the file that a child has written for a request.
        most: of them at once.
    """

    def __init__(
        self, module: str, command_line: Sequence[str], read: Callable[[Path], Answer], most: int = MOST_CHILDREN
    ) -> None:
        self.module = module
        self.command_line = command_line
        self.read = read
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.most = min(most, cores)
        self.folder = tempfile.TemporaryDirectory(prefix="paceline-profile-")
        self.children: list[_Child] = []

    def __enter__(self) -> Simulators[Answer]:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.end()
        self.folder.cleanup()

    def ask(
        self, requests: Sequence[ProfileRequest], watcher: Watcher, more: bool = False
    ) -> list[Answer | WorkloadError]:
        """Return the answer to each request, or why there is none.

        Args:
            requests: the steps to try out.
            watcher: shows progress.
            more: other requests may follow, so that it pays to start all children now.

        Raises:
            WorkloadError: the process of a child failed.
        """
        while len(self.children) < (self.most if more else min(len(requests), self.most)):
            self.children.append(_Child(self.module, self.command_line, Path(self.folder.name), len(self.children)))
        waiting = deque(enumerate(requests))
        answers: dict[int, Answer | WorkloadError] = {}
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                self._hand(child, waiting, watcher)
            while len(answers) < len(requests):
                for key, _ in selector.select(1.0):
                    answer = key.data.answer()
                    if answer is None:
                        continue
                    number = answer["number"]
                    watcher.ends(number)
                    self._hand(key.data, waiting, watcher)  # before its answer is read, which takes time too
                    error = answer.get("error")
                    answers[number] = WorkloadError(**error) if error else self.read(Path(answer["path"]))
                watcher.shows()
        return [answers[number] for number in range(len(requests))]

    def _hand(self, child: _Child, waiting: deque[tuple[int, ProfileRequest]], watcher: Watcher) -> None:
        """Hand a child the next request, if there is one."""
        if waiting:
            number, request = waiting.popleft()
            watcher.begins(request.name, number)
            child.hand({**asdict(request), "number": number})


class _Child:
    """One child process.

    Args:
        module: what it runs.
        command_line: the user's file and its arguments.
        folder: for what it writes.
        number: of it, among its siblings.
    """

    def __init__(self, module: str, command_line: Sequence[str], folder: Path, number: int) -> None:
        self.script = command_line[0]
        # A file, not a pipe: one that nobody reads would stop the child as soon as it is full.
        self.errors = (folder / f"errors-{number}.txt").open("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(folder), *command_line],
            bufsize=0,  # `selectors` sees what is in a pipe, and not what is in a buffer
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def hand(self, request: dict[str, Any]) -> None:
        """Hand it a request."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `answer` says
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self) -> dict[str, Any] | None:
        """Read its next line: an answer, or None for what the user's code wrote below Python.

        Raises:
            WorkloadError: it has ended.
        """
        line = self.stdout.readline()
        if line:
            return _read_answer(line.decode(errors="replace"))
        self.process.wait()
        self.errors.seek(0)
        reason = last_error_of(self.errors.read(), "it printed nothing")
        raise WorkloadError(
            f"can't simulate a step of {self.script}",
            f"its process failed: {reason}",
            "run it alone with python first",
        )

    def end(self) -> None:
        """End it: whoever interrupts the asking ends the work too."""
        self.process.kill()  # nothing where it has ended
        self.process.wait()
        self.process.__exit__(None, None, None)  # closes its pipes
        self.errors.close()


def handed_requests() -> Iterator[dict[str, Any]]:
    """Return the requests that a child is handed. From now on its standard input is empty, for the user's file."""
    requests = os.fdopen(os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    return (parse_json(line, "a request", dict) for line in requests)


def _read_answer(line: str) -> dict[str, Any] | None:
    """Read the child's answer; None where it is a line that the user's code wrote below Python, as a library may."""
    try:
        return dict(parse_json(line, "an answer", _ANSWER))
    except ReadError:
        return None
