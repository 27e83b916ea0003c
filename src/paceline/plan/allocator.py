"""Simulate torch's CUDA caching allocator on a recording: what it reserves for what is asked of it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes rounded up to 512 bytes; up to 1 MiB from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, more from a segment of its own in steps of 2 MiB; the smallest free block
that is large enough, of the same stream; the rest of a block is split off; neighbours that are free become one. When
the device is full, segments that are wholly free go back, and then it is out of memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# Bytes; the names in CUDACachingAllocator.cpp.
ROUND_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 2**20  # kSmallSize
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer
SEGMENT_STEP = 2 * 2**20  # kRoundLarge

Pool = tuple[bool, int]  # for small blocks or not, and the stream
Key = tuple[int, int, int]  # size, segment and place: the order in which free blocks are tried


class OutOfMemoryError(Exception):
    """There is no room for an allocation.

    Attributes:
        event: number of the event in the recording that asked for it.
        nbytes: its size.
    """

    def __init__(self, event: int, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes at event {event}")
        self.event = event
        self.nbytes = nbytes


@dataclass(slots=True, eq=False)
class _Block:
    """A block of a segment, in use or free.

    `before` and `after` are its neighbours in the segment, at lower and higher addresses. Two free blocks are never
    neighbours: `give_back` joins them.
    """

    nbytes: int
    segment: int
    at: int  # bytes from the segment's begin
    pool: Pool
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False

    @property
    def key(self) -> Key:
        return self.nbytes, self.segment, self.at


def _key_of(item: tuple[Key, _Block]) -> Key:
    key, _ = item
    return key


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state.

    Args:
        capacity: bytes that segments may have together; None for any number.

    Attributes:
        reserved, allocated: bytes in segments, and of those in use.
        peak_reserved, peak_allocated: their largest so far.
        flushes: times that cached segments were given back for want of room.
    """

    capacity: int | None = None
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    flushes: int = 0
    segments: int = 0
    free: dict[Pool, list[tuple[Key, _Block]]] = field(default_factory=dict)  # sorted by key
    used: dict[int, _Block] = field(default_factory=dict)

    def take(self, key: int, nbytes: int, stream: int = 0, event: int = 0) -> None:
        """Allocate a block, by whose `key` it is freed.

        Raises:
            OutOfMemoryError: there is no room for it.
        """
        if not nbytes:  # torch allocates nothing for an empty tensor
            return
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        pool = (size <= SMALL_BYTES, stream)
        free = self.free.setdefault(pool, [])
        index = bisect.bisect_left(free, (size, -1, -1), key=_key_of)  # the smallest that is large enough
        if index < len(free):
            _, block = free.pop(index)
            block.is_free = False
        else:
            block = self._new_segment(size, pool, event)
        self._split(block, size)
        self.used[key] = block
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def give_back(self, key: int) -> None:
        """Free the block of `key`."""
        block = self.used.pop(key, None)
        if block is None:  # of no bytes
            return
        self.allocated -= block.nbytes
        if block.before is not None and block.before.is_free:
            self._remove_free(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            self._remove_free(block.after)
            block = self._join(block, block.after)
        block.is_free = True
        bisect.insort(self.free.setdefault(block.pool, []), (block.key, block), key=_key_of)

    def _new_segment(self, size: int, pool: Pool, event: int) -> _Block:
        nbytes = segment_bytes(size)
        # As torch does when cudaMalloc fails: give everything cached back, and try once more.
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self._flush()
            if self.reserved + nbytes > self.capacity:
                raise OutOfMemoryError(event, size)
        self.segments += 1
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Block(nbytes, self.segments, 0, pool)

    def _split(self, block: _Block, size: int) -> None:
        """Cut a block to `size`, unless what is left would be too small to be of use."""
        # torch's should_split: a large block keeps a rest of up to 1 MiB, which counts as allocated with it.
        rest = block.nbytes - size
        is_small, _ = block.pool
        if is_small and rest < ROUND_BYTES:
            return
        if not is_small and rest <= SMALL_BYTES:
            return
        free = _Block(rest, block.segment, block.at + size, block.pool, block, block.after, is_free=True)
        if block.after is not None:
            block.after.before = free
        block.after = free
        block.nbytes = size
        bisect.insort(self.free[block.pool], (free.key, free), key=_key_of)

    def _remove_free(self, block: _Block) -> None:
        free = self.free[block.pool]
        del free[bisect.bisect_left(free, block.key, key=_key_of)]

    @staticmethod
    def _join(left: _Block, right: _Block) -> _Block:
        left.nbytes += right.nbytes
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        left.is_free = False
        return left

    def _flush(self) -> None:
        """Give back segments that are wholly free."""
        self.flushes += 1
        for pool, free in self.free.items():
            remaining = []
            for key, block in free:
                # No neighbour on either side: the block is its segment.
                is_whole_segment = block.before is None and block.after is None
                if is_whole_segment:
                    self.reserved -= block.nbytes
                else:
                    remaining.append((key, block))
            self.free[pool] = remaining


def segment_bytes(size: int) -> int:
    """Return how large a segment is made for a block of `size` rounded bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT
    if size < LARGE_BYTES:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP


def play(
    events: Iterable[int], sizes: Sequence[int], streams: Sequence[int], capacity: int | None = None
) -> CachingAllocator:
    """Return the allocator after a recording's events: n+1 allocates block n, -(n+1) frees it.

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
