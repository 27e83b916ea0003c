"""Decide, by the job's mode, when gradients become an update and when a worker may begin its next step.

A worker's clock is the number of the step it computes. `sync` waits for everybody (BSP); `quorum` for the first q, and
drops what comes later (Chen et al. 2016); `deadline` for those who come in time after the first; `stale` lets the
fastest be s clocks ahead of the slowest (SSP, Ho et al. 2013); `async` waits for nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline.nouns.errors import PlanError, did_you_mean
from paceline.nouns.plan import MODES
from paceline.server.protocol.messages import Worker


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode of a job: how far workers may run apart.

    Args:
        kind: one of the plan's MODES.
        quorum: of `quorum`, how many gradients make an update.
        staleness: of `stale`, how many clocks the fastest may be ahead.
        deadline_s: of `deadline`, how long the first gradient of a round waits for the others.

    Raises:
        PlanError: a value is none that a mode can have.
    """

    kind: str = "sync"
    quorum: int = 0
    staleness: int = 0
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in MODES:
            raise PlanError(
                f"the server's mode is {self.kind!r}",
                f"the choices are {', '.join(MODES)}",
                did_you_mean(self.kind, MODES, "write mode=sync"),
            )
        if self.kind == "quorum" and self.quorum < 1:
            raise PlanError(
                "a quorum should be a whole number above 0", f"it is {self.quorum}", "write quorum=1 or more"
            )
        if self.staleness < 0:
            raise PlanError(
                "a bound on staleness should be 0 or more", f"it is {self.staleness}", "write staleness=0 or more"
            )
        if (self.kind == "deadline") != (self.deadline_s > 0):
            raise PlanError(
                "a deadline goes with mode=deadline alone",
                f"the mode is {self.kind} and the deadline {self.deadline_s:g} s",
                "write mode=deadline,deadline=1",
            )

    @property
    def is_by_rounds(self) -> bool:
        """True if several workers' gradients make one update."""
        return self.kind in ("sync", "quorum", "deadline")

    def is_complete(self, present: Collection[Worker], active: Collection[Worker]) -> bool:
        """Return True if a round may be closed with the gradients of the workers `present`."""
        if not present:
            return False
        # Fewer active workers than the quorum: all of them are enough, else no round would close again.
        if self.kind == "quorum" and len(present) >= min(self.quorum, len(active)):
            return True
        return all(worker in present for worker in active)

    def may_read(self, clock: int, rounds: Collection[int], applied: Mapping[Worker, int]) -> bool:
        """Return True if a worker may begin its step `clock`.

        Args:
            clock: the worker's clock.
            rounds: for every segment, the number of closed rounds.
            applied: for every active worker, the last clock of which every segment is applied; -1 before the first.
        """
        if self.kind == "async":
            return True
        if self.is_by_rounds:
            return min(rounds, default=clock) >= clock
        # The slowest has applied its step `clock - staleness - 1`: this one is at most `staleness` steps ahead of it.
        return min(applied.values(), default=clock) >= clock - self.staleness - 1
