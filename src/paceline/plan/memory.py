"""What a recording says of a rank's memory: how much, when, and whose."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.nouns.profile import BUFFERS, KINDS, PARAMETERS, Profile, Recording
from paceline.plan.allocator import OutOfMemoryError, play

HOLDERS = 10


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds memory at the peak: a module or parameter, and what for."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory in a step, in bytes.

    Attributes:
        rank: whose.
        peak: largest sum of live tensors in a step after the first.
        phase: when: forward, backward, reduce or update.
        at_peak: by kind, what lives then.
        between: by kind, what lives when the step begins.
        holders: the largest at the peak.
        reserved: what torch's caching allocator takes from a GPU for it; None on CPUs.
        is_too_large: the device's memory is not enough.
        shared: what ranks of one host share, besides.
        host: with offload=on, what the host holds for a GPU's rank.
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

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def memory_of(profile: Profile, capacity: int | None = None) -> Memory:
    """A profile's memory.

    Args:
        profile: of one rank's step.
        capacity: bytes that the caching allocator may reserve; only for a profile of a GPU's operations.
    """
    recording = profile.recording
    live, peak, at = 0, -1, 0
    for number, event in enumerate(recording.events):
        size = recording.blocks[abs(event) - 1].nbytes
        live += size if event > 0 else -size
        if number >= recording.last_step and live > peak:
            peak, at = live, number + 1
    reserved, is_too_large = _reserved(profile, capacity)
    alive = living(recording, at)
    return Memory(
        profile.rank,
        peak,
        phase_at(recording, at - 1),
        _by_kind(recording, alive),
        _by_kind(recording, living(recording, recording.last_step)),
        _holders(recording, alive),
        reserved,
        is_too_large,
        profile.shared_bytes,
        profile.host_bytes,
    )


def activations_of(recording: Recording) -> int:
    """The most bytes that a forward pass of the last step has left beside parameters and buffers."""
    ends = [event for event, phase in recording.phases if phase == "backward" and event >= recording.last_step]
    beside = (PARAMETERS, BUFFERS)
    blocks = recording.blocks
    return max(sum(blocks[i].nbytes for i in living(recording, end) if blocks[i].kind not in beside) for end in ends)


def living(recording: Recording, count: int) -> list[int]:
    """The blocks that live after so many events."""
    alive: dict[int, None] = {}
    for event in recording.events[:count]:
        if event > 0:
            alive[event - 1] = None
        else:
            alive.pop(-event - 1, None)
    return list(alive)


def phase_at(recording: Recording, event: int) -> str:
    """The phase in which an event lies."""
    index = bisect.bisect_right(recording.phases, event, key=lambda mark: mark[0]) - 1
    return recording.phases[index][1] if index >= 0 else "start"


def _reserved(profile: Profile, capacity: int | None) -> tuple[int | None, bool]:
    if profile.device == "cpu":
        return None, False
    recording = profile.recording
    sizes = [block.nbytes for block in recording.blocks]
    streams = [block.stream for block in recording.blocks]
    try:
        return play(recording.events, sizes, streams, capacity).peak_reserved, False
    except OutOfMemoryError:
        return play(recording.events, sizes, streams).peak_reserved, True


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
