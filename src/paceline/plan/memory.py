"""Compute from a recording how much memory a rank needs, when, and for what."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.nouns.profile import BUFFERS, KINDS, PARAMETERS, Profile, Recording
from paceline.plan.allocator import CachingAllocator, OutOfMemoryError, play
from paceline.plan.expandable_segments import ExpandableSegments

HOLDERS = 10  # are listed


@dataclass(frozen=True, slots=True)
class Holder:
    """A module or parameter that holds memory at the peak, and what for."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory in a step, in bytes.

    Attributes:
        rank: the rank whose memory it is.
        peak: the largest sum of live tensors in a step after the first.
        phase: the phase of the step in which the peak is: forward, backward, reduce or update.
        at_peak: the bytes that live at the peak, by kind.
        between: the bytes that live when the step begins, by kind.
        holders: the modules and parameters that hold most at the peak.
        reserved: the bytes that torch's caching allocator takes from a GPU for it; None on CPUs.
        is_too_large: the device's memory is not enough.
        shared: the bytes of shared memory that the ranks of one host use in addition.
        host: with offload=on or checkpointing=offload, the bytes that the host holds for a GPU's rank.
        copied: with checkpointing=offload, the bytes that a step copies between device and host.
    """

    rank: int
    peak: int
    phase: str
    at_peak: dict[str, int]
    between: dict[str, int]
    holders: list[Holder]
    reserved: int | None
    is_too_large: bool
    shared: int
    host: int = 0
    copied: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def memory_of(profile: Profile, capacity: int | None = None, expandable_segments: bool = False) -> Memory:
    """Return the memory of a profile.

    Args:
        profile: the profile of one rank's step.
        capacity: the bytes that the caching allocator may reserve; only for a profile of a GPU's operations.
        expandable_segments: the caching allocator has them; a profile of a CPU's operations has no such allocator.
    """
    recording = profile.recording
    peak = -1
    peak_event = -1
    for number, live in live_bytes(recording):
        if live > peak:
            peak = live
            peak_event = number
    reserved, is_too_large = _reserved(profile, capacity, expandable_segments)
    at_peak = living(recording, peak_event + 1)
    between_steps = living(recording, recording.last_step)
    return Memory(
        profile.rank,
        peak,
        phase_at(recording, peak_event),
        _by_kind(recording, at_peak),
        _by_kind(recording, between_steps),
        _holders(recording, at_peak),
        reserved,
        is_too_large,
        profile.shared_bytes,
        profile.host_bytes,
        profile.copied_bytes,
    )


def live_bytes(recording: Recording) -> Iterator[tuple[int, int]]:
    """Yield the number of each event of the last step, and the bytes that live after it.

    Blocks of the steps before count as live. The first of these steps makes the optimizer's state, and is not like
    those that follow.
    """
    live = 0
    for number, event in enumerate(recording.events):
        nbytes = recording.blocks[abs(event) - 1].nbytes
        live += nbytes if event > 0 else -nbytes
        if number >= recording.last_step:
            yield number, live


def activations_of(recording: Recording) -> int:
    """Return the most bytes that a forward pass of the last step has left beside parameters and buffers."""
    most = []
    for event, phase in recording.phases:
        if phase == "backward" and event >= recording.last_step:  # where a forward pass ends
            blocks = [recording.blocks[index] for index in living(recording, event)]
            most.append(sum(block.nbytes for block in blocks if block.kind not in (PARAMETERS, BUFFERS)))
    return max(most)


def living(recording: Recording, count: int) -> list[int]:
    """Return the indices of the blocks that live after so many events, in the order of their allocation."""
    alive: dict[int, None] = {}  # a set that keeps the order
    for event in recording.events[:count]:
        if event > 0:
            alive[event - 1] = None
        else:
            alive.pop(-event - 1, None)
    return list(alive)


def phase_at(recording: Recording, event: int) -> str:
    """Return the phase in which an event is."""
    index = bisect.bisect_right(recording.phases, event, key=lambda phase: phase[0]) - 1
    if index < 0:
        return "start"
    _, name = recording.phases[index]
    return name


def _reserved(profile: Profile, capacity: int | None, expandable_segments: bool) -> tuple[int | None, bool]:
    """Return the bytes that the allocator reserves on a GPU without a limit, and True if `capacity` is not enough."""
    if profile.device == "cpu":
        return None, False
    recording = profile.recording
    sizes = [block.nbytes for block in recording.blocks]
    streams = [block.stream for block in recording.blocks]
    kind = ExpandableSegments if expandable_segments else CachingAllocator
    try:
        return play(recording.events, sizes, streams, capacity, kind).peak_reserved, False
    except OutOfMemoryError:  # once more without a limit: users want to know by how much it is too large
        return play(recording.events, sizes, streams, None, kind).peak_reserved, True


def _by_kind(recording: Recording, alive: Sequence[int]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for index in alive:
        sums[recording.blocks[index].kind] += recording.blocks[index].nbytes
    return {kind: sums[kind] for kind in KINDS if sums[kind]}


def _holders(recording: Recording, alive: Sequence[int]) -> list[Holder]:
    sums: Counter[tuple[str, str]] = Counter()
    for index in alive:
        block = recording.blocks[index]
        sums[block.holder, block.kind] += block.nbytes
    return [Holder(name, kind, nbytes) for (name, kind), nbytes in sums.most_common(HOLDERS)]
