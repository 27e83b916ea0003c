"""Load a user's file for its `workload`, without running its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import paceline
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import Workload


class _Reached(BaseException):
    """The file has come to its loop."""

    def __init__(self, workload: Any) -> None:
        super().__init__("the loop begins")
        self.workload = workload


def find_workload(program: UserProgram) -> Workload:
    """Return the `workload` that a program declares at its top level, or hands to `paceline.distribute`.

    Raises:
        WorkloadError: it declares none, or fails when it is loaded.
    """
    try:
        with _stopped_at_the_loop():
            workload = program.run("paceline_workload").get("workload")
    except _Reached as reached:
        workload = reached.workload
    except PacelineError:
        raise
    except BaseException as error:
        raise WorkloadError(
            f"can't load {program.script}",
            f"it raised {type(error).__name__}: {error}",
            "mend it; `python FILE` shows more",
        ) from error
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{program.script} should declare its workload at the top level",
            "it has no variable `workload` that is a paceline.Workload",
            "write workload = paceline.Workload(...) outside of functions",
        )
    return workload


@contextmanager
def _stopped_at_the_loop() -> Iterator[None]:
    """End the file at `paceline.distribute`: a loop outside of `if __name__ == "__main__"` is not to run here."""
    plain = paceline.distribute, paceline.prepare

    def reached(workload: Any) -> NoReturn:
        raise _Reached(workload)

    def reached_own_loop(*objects: Any, **options: Any) -> NoReturn:
        raise WorkloadError(
            "this command needs the loss, the model and the data, each declared in a paceline.Workload",
            "the file trains by a loop of its own, with paceline.prepare",
            "write a Workload for it; such a file is trained by `paceline run`, `paceline plan` says what its steps "
            "hold and send, and `paceline verify` compares them with those of one process",
        )

    paceline.distribute = reached  # type: ignore[assignment]
    paceline.prepare = reached_own_loop
    try:
        yield
    finally:
        paceline.distribute, paceline.prepare = plain
