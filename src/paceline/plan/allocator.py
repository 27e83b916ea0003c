"""Simulate torch's CUDA caching allocator on a recording: what it reserves for what is asked of it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes rounded up to 512 bytes; up to 1 MiB from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, more from a segment of its own in steps of 2 MiB; the smallest free block
that is large enough, of the same stream; the rest of a block is split off; neighbours that are free become one. When
the device is full, segments that are wholly free go back, and then it is out of memory. With expandable segments other
rules decide: `expandable_segments.py`.
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
        nbytes: the size of the allocation, in bytes.
    """

    def __init__(self, event: int, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes at event {event}")
        self.event = event
        self.nbytes = nbytes


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment, in use or free.

    `before` and `after` are its neighbours in the segment, at lower and higher addresses. Two free blocks are never
    neighbours: `give_back` joins them. Only an expandable segment has blocks that are not mapped: addresses without
    memory, which are neither free nor in use.
    """

    nbytes: int
    segment: int
    at: int  # bytes from the segment's begin
    pool: Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False
    is_mapped: bool = True

    @property
    def key(self) -> Key:
        """Its place in the order in which free blocks are tried."""
        return self.nbytes, self.segment, self.at


def _key_of(item: tuple[Key, Block]) -> Key:
    key, _ = item
    return key


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state.

    Args:
        capacity: the bytes that all segments may have together; None for any number.

    Attributes:
        reserved, allocated: the bytes in segments, and the bytes of them in use.
        peak_reserved, peak_allocated: the largest `reserved` and `allocated` so far.
        flushes: the number of times that cached segments were given back for want of room.
    """

    capacity: int | None = None
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    flushes: int = 0
    segments: int = 0
    free: dict[Pool, list[tuple[Key, Block]]] = field(default_factory=dict)  # sorted by key
    used: dict[int, Block] = field(default_factory=dict)

    def take(self, key: int, nbytes: int, stream: int = 0, event: int = 0) -> None:
        """Allocate a block, by whose `key` it is freed.

        Raises:
            OutOfMemoryError: there is no room for it.
        """
        if not nbytes:  # torch allocates nothing for an empty tensor
            return
        size = -(-nbytes // ROUND_BYTES) * ROUND_BYTES
        pool = (size <= SMALL_BYTES, stream)
        block = self._take_free(size, pool) or self._new_segment(size, pool, event)
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
        self._add_free(self._join_free(block))

    def _take_free(self, size: int, pool: Pool) -> Block | None:
        """Take the smallest free block that is large enough out of the free ones; None if there is none."""
        free = self.free.setdefault(pool, [])
        index = bisect.bisect_left(free, (size, -1, -1), key=_key_of)
        if index == len(free):
            return None
        _, block = free.pop(self._best_fit(free, index))
        block.is_free = False
        return block

    def _best_fit(self, free: Sequence[tuple[Key, Block]], index: int) -> int:
        """Return the index of the free block to take; all blocks from `index` on are large enough."""
        return index

    def _new_segment(self, size: int, pool: Pool, event: int) -> Block:
        nbytes = segment_bytes(size)
        # As torch does when cudaMalloc fails: give everything cached back, and try once more.
        if not self._has_room(nbytes):
            self._flush()
            if not self._has_room(nbytes):
                raise OutOfMemoryError(event, size)
        self.segments += 1
        self._reserve(nbytes)
        return Block(nbytes, self.segments, 0, pool)

    def _has_room(self, nbytes: int) -> bool:
        return self.capacity is None or self.reserved + nbytes <= self.capacity

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        """Cut a block to `size`, unless what is left would be too small to be of use."""
        if block.nbytes - size >= self._smallest_rest(block.pool):
            self._add_free(self._cut(block, size))

    def _smallest_rest(self, pool: Pool) -> int:
        """Return the bytes of the smallest remainder that is split off (torch's should_split)."""
        # A large block keeps a remainder of up to 1 MiB, which counts as allocated with it.
        is_small, _ = pool
        return ROUND_BYTES if is_small else SMALL_BYTES + ROUND_BYTES

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self.free.setdefault(block.pool, []), (block.key, block), key=_key_of)

    def _remove_free(self, block: Block) -> None:
        free = self.free[block.pool]
        del free[bisect.bisect_left(free, block.key, key=_key_of)]

    def _join_free(self, block: Block) -> Block:
        """Join a block, and its neighbours where they are free, which are no longer among the free ones then."""
        if block.before is not None and block.before.is_free:
            self._remove_free(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.is_free:
            self._remove_free(block.after)
            block = self._join(block, block.after)
        return block

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Shorten a block to `size`, and return the remainder as its neighbour; the remainder is in no list."""
        remainder = Block(block.nbytes - size, block.segment, block.at + size, block.pool, block, block.after)
        if block.after is not None:
            block.after.before = remainder
        block.after = remainder
        block.nbytes = size
        return remainder

    @staticmethod
    def _join(lower: Block, upper: Block) -> Block:
        lower.nbytes += upper.nbytes
        lower.after = upper.after
        if upper.after is not None:
            upper.after.before = lower
        lower.is_free = False
        return lower

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
    """Return the bytes of the segment that is made for a block of `size` rounded bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT
    if size < LARGE_BYTES:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP


def play(
    events: Iterable[int],
    sizes: Sequence[int],
    streams: Sequence[int],
    capacity: int | None = None,
    kind: type[CachingAllocator] = CachingAllocator,
) -> CachingAllocator:
    """Return the allocator after a recording's events: n+1 allocates block n, -(n+1) frees it.

    Args:
        events: the allocations and frees, in the order in which they happened.
        sizes: the bytes that were asked for, for each block.
        streams: the stream of each block.
        capacity: the bytes that the allocator may reserve; None for any number.
        kind: the class of the allocator.

    Raises:
        OutOfMemoryError: `capacity` is not enough.
    """
    allocator = kind(capacity)
    for number, event in enumerate(events):
        if event > 0:
            allocator.take(event, sizes[event - 1], streams[event - 1], number)
        else:
            allocator.give_back(-event)
    return allocator
