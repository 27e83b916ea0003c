"""Simulate torch's CUDA caching allocator with PYTORCH_ALLOC_CONF=expandable_segments:True.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (ExpandableSegment, try_allocate_expandable_block, map_block,
unmap_block). Small and large blocks have one segment for each stream. It is a range of addresses, of which some have
memory: it is mapped page by page, of 2 MiB for small blocks and 20 MiB for large ones. A free block is chosen as
without them, but one that can grow into addresses without memory counts as large as it can get. Where no free block
is large enough, pages are mapped at the lowest address with room for it, behind a free block that ends there. What is
left of a block is always split off. When the device is full, pages that are wholly free are unmapped, also between
blocks in use.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.plan.allocator import (
    LARGE_SEGMENT,
    ROUND_BYTES,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    Key,
    OutOfMemoryError,
    Pool,
)

# Of a segment, in bytes: more than is ever used. torch's has 9/8 of the GPU's memory; more is needed only where so much
# was unmapped between blocks in use, and a second segment would begin.
ADDRESSES = 2**60


def page_bytes(pool: Pool) -> int:
    """Return the bytes of a page of a pool's segment."""
    is_small, _ = pool
    return SMALL_SEGMENT if is_small else LARGE_SEGMENT


@dataclass(slots=True)
class ExpandableSegments(CachingAllocator):
    """The state of an allocator with expandable segments; arguments and attributes are those of `CachingAllocator`.

    Attributes:
        unmapped: the blocks of addresses without memory of each pool, by address. The last goes to the segment's end.
    """

    unmapped: dict[Pool, list[Block]] = field(default_factory=dict)

    def _best_fit(self, free: Sequence[tuple[Key, Block]], index: int) -> int:
        # As torch does, no further than to the first block that is not smaller.
        while index + 1 < len(free) and _can_grow_to(free[index + 1][1]) < _can_grow_to(free[index][1]):
            index += 1
        return index

    def _smallest_rest(self, pool: Pool) -> int:
        return ROUND_BYTES

    def _new_segment(self, size: int, pool: Pool, event: int) -> Block:
        """Return a block of at least `size` bytes, for which pages are mapped."""
        block = self._expand(size, pool)
        if block is None:
            self._flush()
            block = self._expand(size, pool)
        if block is None:
            raise OutOfMemoryError(event, size)
        return block

    def _expand(self, size: int, pool: Pool) -> Block | None:
        """Map pages until a free block has `size` bytes, and take it; None if the device is full."""
        block = self._lowest_with_room(size, pool)
        if not block.is_mapped:
            mapped = self._map(block, min(size, block.nbytes))
            if mapped is None:
                return None
            block = mapped
        while block.nbytes < size:
            unmapped = block.after  # `_lowest_with_room` has seen that it is there
            assert unmapped is not None
            mapped = self._map(unmapped, min(size - block.nbytes, unmapped.nbytes))
            if mapped is None:  # pages that were mapped for it before stay, as free ones
                return None
            block = mapped
        self._remove_free(block)
        block.is_free = False
        return block

    def _lowest_with_room(self, size: int, pool: Pool) -> Block:
        """Return the first of adjacent blocks that have room together and are not in use (find_expandable_block)."""
        waiting = self.unmapped.setdefault(pool, [])
        for block in waiting:
            start = block
            if block.before is not None and block.before.is_free:
                start = block.before
            if _has_room(start, size):
                return start
        self.segments += 1
        segment = Block(ADDRESSES, self.segments, 0, pool, is_mapped=False)
        waiting.append(segment)
        return segment

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map the first pages of a block, so many that they have `nbytes`, and join them with free neighbours.

        Return the free block that they are then part of; None if the device has no room for them.
        """
        page = page_bytes(block.pool)
        mapped_bytes = -(-nbytes // page) * page
        if not self._has_room(mapped_bytes):
            return None
        self._reserve(mapped_bytes)
        waiting = self.unmapped[block.pool]
        index = waiting.index(block)
        if mapped_bytes < block.nbytes:
            waiting[index] = self._cut(block, mapped_bytes)
            waiting[index].is_mapped = False
        else:
            del waiting[index]
        block.is_mapped = True
        block = self._join_free(block)
        self._add_free(block)
        return block

    def _flush(self) -> None:
        """Unmap pages that are wholly free."""
        self.flushes += 1
        for free in self.free.values():
            for _, block in list(free):
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Unmap the pages that lie wholly in a free block; what is left of it on either side stays free."""
        page = page_bytes(block.pool)
        begin = -(-block.at // page) * page
        end = (block.at + block.nbytes) // page * page
        if begin >= end:
            return
        self._remove_free(block)
        block.is_free = False
        if begin > block.at:
            head = block
            block = self._cut(head, begin - head.at)
            self._add_free(head)
        if end < block.at + block.nbytes:
            self._add_free(self._cut(block, end - block.at))
        block.is_mapped = False
        self.reserved -= block.nbytes
        waiting = self.unmapped[block.pool]
        if block.before is not None and not block.before.is_mapped:
            waiting.remove(block.before)
            block = self._join(block.before, block)
        if block.after is not None and not block.after.is_mapped:
            waiting.remove(block.after)
            block = self._join(block, block.after)
        if block.before is not None or block.after is not None:  # else the segment is empty, and goes
            bisect.insort(waiting, block, key=lambda unmapped: unmapped.at)


def _can_grow_to(block: Block) -> int:
    """Return the bytes that a free block would have if the addresses behind it had memory."""
    if block.after is None or block.after.is_mapped:
        return block.nbytes
    return block.nbytes + block.after.nbytes


def _has_room(start: Block, size: int) -> bool:
    """Return whether a block and those behind it have `size` bytes up to the first that is in use."""
    nbytes = 0
    block: Block | None = start
    while block is not None and nbytes < size and (block.is_free or not block.is_mapped):
        nbytes += block.nbytes
        block = block.after
    return nbytes >= size
