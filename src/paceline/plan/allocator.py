"""torch's CUDA caching allocator, played on a recording: what it reserves for what is asked of it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes rounded up to 512 bytes; up to 1 MiB from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, more from a segment of its own in steps of 2 MiB; the smallest free block
that is large enough, of the same stream; the rest of a block is split off; neighbours that are free become one. When
the device is full, segments that are wholly free go back, and then it is out of memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROUND_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT = 2**20, 2 * 2**20
LARGE_BYTES, LARGE_SEGMENT, SEGMENT_STEP = 10 * 2**20, 20 * 2**20, 2 * 2**20


class OutOfMemoryError(Exception):
    """What was asked for fits nowhere.

    Attributes:
        event: which event of the recording asked.
        nbytes: for how many.
    """

    def __init__(self, event: int, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes at event {event}")
        self.event, self.nbytes = event, nbytes


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a segment."""

    nbytes: int
    segment: int
    at: int
    pool: tuple[bool, int]
    before: _Piece | None = None
    after: _Piece | None = None
    is_free: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        return self.nbytes, self.segment, self.at


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state.

    Args:
        capacity: bytes that segments may have together; None for any number.

    Attributes:
        reserved, allocated: bytes in segments, and of those in use.
        peak_reserved, peak_allocated: their largest so far.
        flushes: how often cached segments were given back for want of room.
    """

    capacity: int | None = None
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    flushes: int = 0
    segments: int = 0
    free: dict[tuple[bool, int], list[tuple[tuple[int, int, int], _Piece]]] = field(default_factory=dict)
    used: dict[int, _Piece] = field(default_factory=dict)

    def take(self, key: int, nbytes: int, stream: int = 0, event: int = 0) -> None:
        """Find room.

        Raises:
            OutOfMemoryError: there is none.
        """
        if not nbytes:
            return
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        pool = (size <= SMALL_BYTES, stream)
        waiting = self.free.setdefault(pool, [])
        found = bisect.bisect_left(waiting, (size, -1, -1), key=lambda item: item[0])
        if found < len(waiting):
            piece = waiting.pop(found)[1]
            piece.is_free = False
        else:
            piece = self._new_segment(size, pool, event)
        self._split(piece, size)
        self.used[key] = piece
        self.allocated += piece.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def give_back(self, key: int) -> None:
        """Free what `key` took."""
        piece = self.used.pop(key, None)
        if piece is None:
            return
        self.allocated -= piece.nbytes
        if piece.before is not None and piece.before.is_free:
            self._out(piece.before)
            piece = self._join(piece.before, piece)
        if piece.after is not None and piece.after.is_free:
            self._out(piece.after)
            piece = self._join(piece, piece.after)
        piece.is_free = True
        bisect.insort(self.free.setdefault(piece.pool, []), (piece.key, piece), key=lambda item: item[0])

    def _new_segment(self, size: int, pool: tuple[bool, int], event: int) -> _Piece:
        whole = segment_bytes(size)
        if self.capacity is not None and self.reserved + whole > self.capacity:
            self._flush()
            if self.reserved + whole > self.capacity:
                raise OutOfMemoryError(event, size)
        self.segments += 1
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Piece(whole, self.segments, 0, pool)

    def _split(self, piece: _Piece, size: int) -> None:
        rest = piece.nbytes - size
        if rest < ROUND_BYTES if piece.pool[0] else rest <= SMALL_BYTES:
            return
        other = _Piece(rest, piece.segment, piece.at + size, piece.pool, piece, piece.after, is_free=True)
        if piece.after is not None:
            piece.after.before = other
        piece.after, piece.nbytes = other, size
        bisect.insort(self.free[piece.pool], (other.key, other), key=lambda item: item[0])

    def _out(self, piece: _Piece) -> None:
        waiting = self.free[piece.pool]
        del waiting[bisect.bisect_left(waiting, piece.key, key=lambda item: item[0])]

    @staticmethod
    def _join(left: _Piece, right: _Piece) -> _Piece:
        left.nbytes += right.nbytes
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        left.is_free = False
        return left

    def _flush(self) -> None:
        self.flushes += 1
        for pool, waiting in self.free.items():
            kept = [item for item in waiting if item[1].before is not None or item[1].after is not None]
            self.reserved -= sum(item[1].nbytes for item in waiting) - sum(item[1].nbytes for item in kept)
            self.free[pool] = kept


def segment_bytes(size: int) -> int:
    """How large a segment is made for a block of `size` rounded bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT
    if size < LARGE_BYTES:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP


def play(
    events: Iterable[int], sizes: Sequence[int], streams: Sequence[int], capacity: int | None = None
) -> CachingAllocator:
    """The allocator after a recording's events: n+1 takes block n, -(n+1) gives it back.

    Raises:
        OutOfMemoryError: `capacity` is not enough.
    """
    allocator = CachingAllocator(capacity)
    for number, event in enumerate(events):
        if event > 0:
            allocator.take(event, sizes[event - 1], streams[event - 1], number)
        else:
            allocator.give_back(-event)
    return allocator
