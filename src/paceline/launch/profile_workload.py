"""Ask a child process what a workload's step takes: the asking side has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.nouns import module_names
from paceline.nouns.errors import ReadError, WorkloadError, last_error_of
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile
from paceline.nouns.reading import COUNT, parse_json

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
    """

    plan: dict[str, Any]
    rank: int
    device: str
    micro_batch_size: int = 0
    precision: str = ""
    is_brief: bool = False


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


def profile_workload(
    requests: Sequence[ProfileRequest], command_line: Sequence[str], done: Callable[[int], None] = lambda number: None
) -> list[Profile | WorkloadError]:
    """Return the profile of each request, or why there is none.

    Args:
        requests: the steps to simulate.
        command_line: the user's file and its arguments.
        done: told the number of each request as it is done.

    Raises:
        WorkloadError: the file can't be loaded, or its process failed.
    """
    return ask(module_names.PROFILE_WORKLOAD, requests, command_line, Profile.read, done)


def ask(
    module: str,
    requests: Sequence[ProfileRequest],
    command_line: Sequence[str],
    read: Callable[[Path], Answer],
    done: Callable[[int], None] = lambda number: None,
) -> list[Answer | WorkloadError]:
    """Start a module as a child process, hand it requests, and return its answers.

    Args:
        module: such as `profile/profile_workload.py`.
        requests: the steps to simulate.
        command_line: the user's file and its arguments.
        read: reads the file that the child has written for a request.
        done: told the number of each request as it is done.

    Raises:
        WorkloadError: the file can't be loaded, or its process failed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as name:
        folder = Path(name)
        requests_file = folder / "requests.json"
        requests_file.write_text(json.dumps([asdict(request) for request in requests]))
        command = [sys.executable, "-m", module, str(requests_file), name, *command_line]
        # A file, not a pipe: one that nobody reads would stop the child as soon as it is full.
        with (folder / "errors.txt").open("w+", errors="replace") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
            assert process.stdout is not None
            answers: list[Answer | WorkloadError] = []
            try:
                for line in process.stdout:
                    answer = _read_answer(line)
                    if answer is None:
                        continue
                    if error := answer.get("error"):
                        answers.append(WorkloadError(**error))
                    else:
                        answers.append(read(Path(answer["path"])))
                    done(answer["number"])
                status = process.wait()
            finally:
                process.kill()  # nothing where it has ended; whoever interrupts the asking ends the work too
                process.wait()
            if status or not answers:
                errors.seek(0)
                reason = last_error_of(errors.read(), "it printed nothing")
                raise WorkloadError(
                    f"can't simulate a step of {command_line[0]}",
                    f"its process failed: {reason}",
                    "run it alone with python first",
                )
    return answers


def _read_answer(line: str) -> dict[str, Any] | None:
    """Read the child's answer; None where it is a line that the user's code wrote below Python, as a library may."""
    try:
        return dict(parse_json(line, "an answer", _ANSWER))
    except ReadError:
        return None
