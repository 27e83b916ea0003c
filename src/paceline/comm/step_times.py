"""Measure what a rank's training thread spends its time on, and its memory; keep what it did for a timeline.

Every moment of the thread belongs to one kind of work, so the kinds add up to the time that has passed. A collective
that is waited for inside of a backward pass is `communication`, not `backward`: it is the time that does not overlap.

Times are those of the host. On a GPU kernels run later than they are launched: what is waited for there shows where the
host first waits, mostly in `communication` and `other`.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, TypeVar

OTHER = "other"  # the loop's own code, and all that is none of the others
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION = "communication"  # followed by the axis: "communication replicate"
BUBBLE = "bubble"  # a stage of the pipeline waits for another
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
MOST_SPANS = 10_000  # of a step: a loop may send any number of messages in one
# What is waited for inside of these belongs to them.
_OUTER_KINDS = (CHECKPOINT, EVALUATION)
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux


class Span(NamedTuple):
    """Something that the thread did.

    Attributes:
        kind: the kind of work.
        name: the name of the collective; "" for other work.
        begin_ns, end_ns: the times on the clock `time.perf_counter_ns`.
        peer: the rank to which a message goes, or from which it comes; -1 for none.
        tag: the tag of a message.
    """

    kind: str
    name: str
    begin_ns: int
    end_ns: int
    peer: int = -1
    tag: int = -1


class StepTimes:
    """The times of one process's training thread.

    Attributes:
        kind: of the work that the thread does now.
        by_kind: nanoseconds since `take` was called, by kind, without the work that is under way.
        spans: what was done, where it is kept; None: it is not.
        is_on: False measures nothing; `benchmarks/compare/observe_job.py` sets it.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.kind = OTHER
        self.since_ns = time.perf_counter_ns()
        self.by_kind: dict[str, int] = {}
        self.spans: list[Span] | None = None
        self.is_on = True

    def enter(self, kind: str) -> str | None:
        """Begin work of a kind, and return the kind of what it interrupts; None: it belongs to that."""
        before = self.kind
        if not self.is_on or before in _OUTER_KINDS or threading.get_ident() != self.thread:
            return None
        self._go_to(kind)
        return before

    def leave(self, before: str) -> None:
        """Go back to the kind that `enter` returned."""
        self._go_to(before)

    def switch(self, kind: str) -> None:
        """Go on with work of another kind, which nothing encloses."""
        if self.kind not in _OUTER_KINDS and threading.get_ident() == self.thread:
            self._go_to(kind)

    def _go_to(self, kind: str) -> None:
        now_ns = time.perf_counter_ns()
        self.by_kind[self.kind] = self.by_kind.get(self.kind, 0) + now_ns - self.since_ns
        self.kind = kind
        self.since_ns = now_ns

    def restart(self, kind: str = OTHER) -> None:
        """Begin to measure here, in the thread that calls."""
        self.thread = threading.get_ident()
        self.by_kind = {}
        self.kind = kind
        self.since_ns = time.perf_counter_ns()

    def take(self) -> dict[str, int]:
        """Return the nanoseconds by kind since the last call, up to now."""
        self._go_to(self.kind)
        by_kind = self.by_kind
        self.by_kind = {}
        return by_kind


TIMES = StepTimes()  # of this process


class Timed:
    """A `with` whose inside is work of one kind.

    Args:
        kind: the kind of work.
        name, peer, tag: the fields of a Span of these names.
    """

    __slots__ = ("_before", "_begin_ns", "_kind", "_name", "_peer", "_tag")

    def __init__(self, kind: str, name: str = "", peer: int = -1, tag: int = -1) -> None:
        self._kind = kind
        self._name = name
        self._peer = peer
        self._tag = tag

    def __enter__(self) -> None:
        self._before = TIMES.enter(self._kind)
        self._begin_ns = TIMES.since_ns

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        TIMES.leave(self._before)
        if TIMES.spans is not None and len(TIMES.spans) < MOST_SPANS:
            TIMES.spans.append(Span(self._kind, self._name, self._begin_ns, TIMES.since_ns, self._peer, self._tag))


_Item = TypeVar("_Item")


def timed_data(batches: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the batches; the time in which each comes is that of data."""
    while True:
        with Timed(DATA):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def peak_memory_bytes() -> int:
    """Return the largest resident set that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT
