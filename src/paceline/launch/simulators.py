"""Ask child processes to describe a model or to simulate a step: the asking process does not import torch."""

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
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, ReadError, WorkloadError, last_error_of
from paceline.nouns.loop_profile import LoopProfile
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import COUNT, parse_json, read_json

STEP, MODEL, TRAFFIC = "step", "model", "traffic"  # kinds of requests
_MOST_BYTES = 2**30  # the largest description: it has a row for each parameter
MOST_CHILDREN = 2  # each holds torch, the file's data and a model without values
Answer = TypeVar("Answer")
_ANSWER = (
    {"number": COUNT, "error": {"asked": str, "found": str, "fix": str}},
    {"number": COUNT, "path": str},
)


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A step to simulate, or a model to describe.

    Args:
        plan: the plan's fields.
        rank: the rank whose step is simulated.
        device: the word "cpu" or "cuda".
        micro_batch_size: the samples of a micro-batch, in place of those in the workload; 0: as the workload has it.
        precision: the dtype of the computation, in place of that in the workload; "": as the workload has it.
        is_brief: True where two of many micro-batches are enough.
        capacity: the bytes of the device, if a step that does not fit need not be taken to its end.
        name: the name of the request, where progress is shown.
        what: the kind of the request: STEP; MODEL for the model's parts under the plan; TRAFFIC for these and a step's
            traffic.
    """

    plan: dict[str, Any]
    rank: int
    device: str
    micro_batch_size: int = 0
    precision: str = ""
    is_brief: bool = False
    capacity: int | None = None
    name: str = ""
    what: str = STEP


def ranks_to_profile(plan: Plan) -> list[int]:
    """Return one rank of each stage of the pipeline: where sizes don't divide, the first along an axis has most."""
    # Along the other axes ranks do the same work on shards of equal or smaller size.
    mesh = Mesh.parse(plan.mesh)
    ranks = []
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(rank)
        if not any(coordinate[axis] for axis in AXES if axis != "pipeline"):
            ranks.append(rank)
    return ranks


class Watcher(Protocol):
    """The receiver of progress: it is told of each request's begin and end, and about once a second in between."""

    def begins(self, part: str, number: int) -> None:
        """Show that work on a request begins."""

    def ends(self, number: int) -> None:
        """Show that a request is done."""

    def shows(self) -> None:
        """Show the current state."""


class Simulators(Generic[Answer]):
    """Child processes that simulate steps of one file, as a context: each imports torch and loads the file once.

    Args:
        module: the module that the children run, such as `profile/profile_workload.py`.
        command_line: the user's file and its arguments.
        read: a function that reads the file which a child has written for a request.
        most: the largest number of children at once.
        asked: the beginning of the error's first line where a child fails.
    """

    def __init__(
        self,
        module: str,
        command_line: Sequence[str],
        read: Callable[[Path], Answer],
        most: int = MOST_CHILDREN,
        asked: str = "can't simulate a step of",
    ) -> None:
        self.module = module
        self.asked = asked
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
        """Return the answer to each request, or the error in place of it.

        Args:
            requests: the steps to simulate.
            watcher: the receiver of progress.
            more: True where other requests may follow, so that it pays to start all children now.

        Raises:
            WorkloadError: the process of a child failed.
        """
        while len(self.children) < (self.most if more else min(len(requests), self.most)):
            self.children.append(_Child(self, len(self.children)))
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
        simulators: the context that the child belongs to.
        number: the number of the child among its siblings.
    """

    def __init__(self, simulators: Simulators[Any], number: int) -> None:
        folder = Path(simulators.folder.name)
        self.asked = f"{simulators.asked} {simulators.command_line[0]}"
        # A file, not a pipe: one that nobody reads would stop the child as soon as it is full.
        self.errors = (folder / f"errors-{number}.txt").open("w+", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", simulators.module, str(folder), *simulators.command_line],
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
        """Hand the child a request."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `answer` says
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def answer(self) -> dict[str, Any] | None:
        """Read the child's next line: an answer, or None for output of the user's code below Python.

        Raises:
            WorkloadError: the child has ended.
        """
        line = self.stdout.readline()
        if line:
            return _read_answer(line.decode(errors="replace"))
        self.process.wait()
        self.errors.seek(0)
        reason = last_error_of(self.errors.read(), "it printed nothing")
        raise WorkloadError(self.asked, f"its process failed: {reason}", "run it alone with python first")

    def end(self) -> None:
        """End the child: whoever interrupts the asking process ends the work too."""
        self.process.kill()  # nothing where it has ended
        self.process.wait()
        self.process.__exit__(None, None, None)  # closes its pipes
        self.errors.close()


def ask_one(simulators: Simulators[Answer], request: ProfileRequest, watcher: Watcher) -> Answer:
    """Return the answer of a child to a single request.

    Raises:
        WorkloadError: there is no answer.
    """
    with simulators:
        (answer,) = simulators.ask([request], watcher)
    if isinstance(answer, WorkloadError):
        raise answer
    return answer


def describe_workload(
    plan: Plan, command_line: Sequence[str], watcher: Watcher, with_traffic: bool = False
) -> dict[str, Any]:
    """Return the description of a model that `profile/describe.py` makes of a file and its arguments under a plan.

    Args:
        plan: the plan under which the model may be split.
        command_line: the user's file and its arguments.
        watcher: the receiver of progress.
        with_traffic: True to simulate a step, too, and return its traffic.

    Raises:
        WorkloadError: the file can't be loaded, or its model can't be split so.
    """
    request_kind = TRAFFIC if with_traffic else MODEL
    request = ProfileRequest(asdict(plan), 0, "cpu", name=f"loading {Path(command_line[0]).name}", what=request_kind)
    read = partial(read_json, form=dict, most_bytes=_MOST_BYTES)
    return ask_one(Simulators(module_names.PROFILE_WORKLOAD, command_line, read, asked="can't load"), request, watcher)


def profile_loop(plan: Plan, command_line: Sequence[str], device: str, watcher: Watcher) -> list[LoopProfile]:
    """Return the profiles of a few steps of a loop on its first rank, and on the one that updates most.

    Each is a process of its own: the loop's file runs in it.

    Args:
        plan: the plan under which the loop is trained.
        command_line: the user's file and its arguments.
        device: the word "cpu" or "cuda".
        watcher: the receiver of progress.

    Raises:
        WorkloadError: the file failed, or took no step.
    """
    found = [_recorded(plan, 0, command_line, device, watcher)]
    owned = found[0].owned
    # Optimizer state is where a parameter is updated. All else is equal, but for sizes that don't divide: there the
    # first rank has most.
    if owned and max(owned) > owned[0]:
        rank = Mesh.parse(plan.mesh).peers(0, "shard")[owned.index(max(owned))]
        found.append(_recorded(plan, rank, command_line, device, watcher))
    return found


def _recorded(plan: Plan, rank: int, command_line: Sequence[str], device: str, watcher: Watcher) -> LoopProfile:
    request = ProfileRequest(asdict(plan), rank, device, name=f"rank {rank} under {plan.line()}")
    # A process for each: the file runs in it.
    return ask_one(Simulators(module_names.PROFILE_LOOP, command_line, LoopProfile.read), request, watcher)


def handed_requests() -> Iterator[dict[str, Any]]:
    """Return the requests that a child is handed. From now on its standard input is empty, for the user's file."""
    requests = os.fdopen(os.dup(0))
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)
    return (parse_json(line, "a request", dict) for line in requests)


def answered(number: int, folder: Path, write: Callable[[Path], None]) -> str:
    """Return a child's line for a request: the path of the answer that `write` wrote, or the error that it raised."""
    path = folder / f"answer-{number}.json"
    try:
        write(path)
    except PacelineError as error:
        refused = {"asked": error.asked, "found": error.found, "fix": error.fix}
        return json.dumps({"number": number, "error": refused})
    return json.dumps({"number": number, "path": str(path)})


def _read_answer(line: str) -> dict[str, Any] | None:
    """Read the child's answer; None where it is a line that the user's code wrote below Python, as a library may."""
    try:
        return dict(parse_json(line, "an answer", _ANSWER))
    except ReadError:
        return None
