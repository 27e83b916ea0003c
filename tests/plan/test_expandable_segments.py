"""Expandable segments: hand-worked traces of the allocator's rules, and a second model of them that scans addresses."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.plan.allocator import (
    LARGE_SEGMENT,
    ROUND_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT,
    CachingAllocator,
    OutOfMemoryError,
    play,
)
from paceline.plan.expandable_segments import ADDRESSES, ExpandableSegments, page_bytes

KIB, MIB = 2**10, 2**20


def expanded(events, sizes_mib, streams=None, capacity_mib=None):
    """Return the allocator after the events; sizes and capacity are in MiB."""
    sizes = [round(nbytes * MIB) for nbytes in sizes_mib]
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return play(events, sizes, streams or [0] * len(sizes), capacity, ExpandableSegments)


def places(allocator):
    """Return where each block in use is in its segment: begin and end in MiB."""
    return {key: (block.at / MIB, (block.at + block.nbytes) / MIB) for key, block in allocator.used.items()}


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, SMALL_SEGMENT),
        (MIB, SMALL_SEGMENT),
        (MIB + 1, LARGE_SEGMENT),
        (10 * MIB, LARGE_SEGMENT),
        (20 * MIB, LARGE_SEGMENT),
        (20 * MIB + 1, 2 * LARGE_SEGMENT),
        (33 * MIB, 2 * LARGE_SEGMENT),
    ],
)
def test_expandable_segments_map_whole_pages_and_free_the_rest(asked, reserved):
    allocator = play([1], [asked], [0], kind=ExpandableSegments)
    assert allocator.reserved == reserved
    assert allocator.allocated == math.ceil(asked / ROUND_BYTES) * ROUND_BYTES  # a rest is split off, however small


def test_the_segment_grows_behind_a_free_block():
    """15 MiB take a page of 20; the next 15 begin in its rest, so one more page is enough."""
    allocator = expanded([1, 2], [15, 15])
    assert places(allocator) == {1: (0, 15), 2: (15, 30)}
    assert allocator.reserved == 40 * MIB
    assert play([1, 2], [15 * MIB] * 2, [0, 0]).reserved == 32 * MIB  # which is more than without


def test_what_is_freed_holds_a_larger_block():
    """Two blocks of 30 MiB leave one free block of 60, where segments of their own leave two of 30."""
    events, sizes = [1, 2, -1, -2, 3], [30, 30, 60]
    allocator = expanded(events, sizes)
    assert (allocator.reserved, places(allocator)) == (60 * MIB, {3: (0, 60)})
    assert play(events, [nbytes * MIB for nbytes in sizes], [0] * 3).reserved == 120 * MIB


def test_a_hole_is_taken_before_what_can_grow():
    """The rest of the last page, 16 to 20, is the smaller one; but the hole of 6 MiB can't grow."""
    events, sizes = [1, 2, 3, -2, 4], [5, 6, 5, 3]
    assert places(expanded(events, sizes)) == {1: (0, 5), 3: (11, 16), 4: (5, 8)}


def test_of_blocks_that_can_grow_the_one_that_can_grow_least():
    """Free are 56 to 60, which ends the segment; 15 to 20, before a page that was unmapped; and 45 to 51."""
    events, streams = [1, 2, 3, 4, 5, -2, -4, 6], [0, 0, 0, 0, 0, 1, 0]
    sizes = [15, 25, 5, 6, 5, 20]
    assert places(expanded([*events, 7], [*sizes, 3], streams, 60))[7] == (45, 48)
    assert places(expanded([*events, 7, 8], [*sizes, 6, 4], [*streams, 0], 60))[8] == (15, 19)


def test_expandable_segments_are_separate_by_size_and_by_stream():
    allocator = expanded([1, 2, 3, 4], [1, 1, 5, 5], [0, 0, 0, 1])
    assert allocator.reserved == SMALL_SEGMENT + 2 * LARGE_SEGMENT
    assert places(allocator) == {1: (0, 1), 2: (1, 2), 3: (0, 5), 4: (0, 5)}
    assert expanded([1, -1, 2], [5, 5], [0, 1]).reserved == 2 * LARGE_SEGMENT


def test_expandable_segments_release_free_pages_before_oom():
    """Of a hole from 10 to 50 MiB, the page from 20 to 40 goes to another stream, and comes back."""
    events, sizes, streams = [1, 2, 3, -2, 4], [10, 40, 10, 20, 30], [0, 0, 0, 1, 0]
    allocator = expanded(events, sizes, streams, 60)
    assert (allocator.reserved, allocator.flushes) == (60 * MIB, 1)
    free = sorted((block.at // MIB, block.nbytes // MIB) for items in allocator.free.values() for _, block in items)
    assert free == [(10, 10), (40, 10)]
    allocator = expanded([*events, -4, 5], sizes, streams, 60)
    assert (allocator.reserved, allocator.flushes) == (60 * MIB, 2)
    assert places(allocator) == {1: (0, 10), 3: (50, 60), 5: (10, 40)}
    without = [nbytes * MIB for nbytes in sizes]
    assert play(events, without, streams, 60 * MIB).flushes == 1  # the segment of 40 was free as a whole


@pytest.mark.parametrize(("asked", "place", "reserved"), [(15, (20, 35), 60), (20, (20, 40), 60), (25, (60, 85), 80)])
def test_the_lowest_addresses_with_room_are_mapped_again(asked, place, reserved):
    """The page from 20 to 40 was unmapped for another stream, which has no use for it any more."""
    events, sizes, streams = [1, 2, 3, -2, 4, -4, 5], [20, 20, 20, 60, asked], [0, 0, 0, 1, 0]
    allocator = expanded(events, sizes, streams, 100)
    assert places(allocator) == {1: (0, 20), 3: (40, 60), 5: place}
    assert (allocator.reserved, allocator.flushes) == (reserved * MIB, 2)


def test_a_segment_that_is_wholly_free_goes():
    allocator = expanded([1, -1, 2], [15, 50], [0, 1], 60)
    assert (allocator.reserved, allocator.flushes) == (60 * MIB, 1)
    assert [len(blocks) for blocks in allocator.unmapped.values()] == [0, 1]


def test_memory_runs_out():
    with pytest.raises(OutOfMemoryError) as error:
        expanded([1, 2], [40, 40], None, 64)
    assert (error.value.event, error.value.nbytes) == (1, 40 * MIB)
    assert expanded([1, 2], [40, 40], None, 80).reserved == 80 * MIB


class Scanned:
    """The same rules on pages and intervals: what is free is found anew each time, by a scan of the addresses."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.used = {}  # by pool: by key, begin and end
        self.mapped = {}  # by pool: numbers of pages

    @property
    def reserved(self):
        return sum(len(pages) * page_bytes(pool) for pool, pages in self.mapped.items())

    def gaps(self, pool):
        """Yield where no block is in use: the runs of addresses there that have memory or have none."""
        ends = [0, *(end for _, end in sorted(self.used[pool].values()))]
        begins = [*(begin for begin, _ in sorted(self.used[pool].values())), ADDRESSES]
        page, pages = page_bytes(pool), self.mapped[pool]
        for begin, end in zip(ends, begins, strict=True):
            last = max(pages, default=-1) + 1
            inner = [number * page for number in range(begin // page + 1, last + 1) if begin < number * page < end]
            pieces = [(a, b, a // page in pages) for a, b in itertools.pairwise([begin, *inner, end]) if a < b]
            runs = []
            for is_mapped, parts in itertools.groupby(pieces, key=lambda piece: piece[2]):
                parts = list(parts)
                runs.append((parts[0][0], parts[-1][1], is_mapped))
            yield runs

    def take(self, key, nbytes, stream):
        size = math.ceil(nbytes / ROUND_BYTES) * ROUND_BYTES
        pool = (size <= SMALL_BYTES, stream)
        self.used.setdefault(pool, {})
        self.mapped.setdefault(pool, set())
        begin = self.cached(pool, size)
        if begin is None:
            begin = self.grown(pool, size)
        if begin is None:
            for other in self.mapped:
                self.unmap(other)
            begin = self.grown(pool, size)
        if begin is None:
            raise OutOfMemoryError(key, size)
        self.used[pool][key] = (begin, begin + size)

    def cached(self, pool, size):
        found = []
        for runs in self.gaps(pool):
            for (begin, end, is_mapped), (_, limit, _) in zip(runs, [*runs[1:], *runs[-1:]], strict=True):
                if is_mapped and end - begin >= size:
                    found.append((end - begin, begin, limit - begin))
        if not found:
            return None
        found.sort()
        best = 0
        while best + 1 < len(found) and found[best + 1][2] < found[best][2]:
            best += 1
        return found[best][1]

    def grown(self, pool, size):
        page = page_bytes(pool)
        for runs in self.gaps(pool):
            if not runs or all(is_mapped for _, _, is_mapped in runs) or runs[-1][1] - runs[0][0] < size:
                continue
            start = runs[0][0]
            for begin, end, is_mapped in runs:
                if is_mapped or begin >= start + size:
                    continue
                wanted = range(begin // page, math.ceil(min(end, start + size) / page))
                if self.reserved + len(wanted) * page > self.capacity:
                    return None
                self.mapped[pool].update(wanted)
            return start
        raise AssertionError("the last gap is without end")

    def unmap(self, pool):
        page = page_bytes(pool)
        for runs in list(self.gaps(pool)):
            for begin, end, is_mapped in runs:
                if is_mapped:
                    self.mapped[pool] -= set(range(math.ceil(begin / page), end // page))

    def give_back(self, key):
        for blocks in self.used.values():
            blocks.pop(key, None)


def check(allocator):
    """Assert that the blocks of each segment lie side by side, and are those that the lists have."""
    free = {id(block) for items in allocator.free.values() for _, block in items}
    unmapped = {id(block) for blocks in allocator.unmapped.values() for block in blocks}
    used = {id(block) for block in allocator.used.values()}
    nbytes = 0
    for blocks in allocator.unmapped.values():
        if not blocks:
            continue
        block, at = blocks[0], 0
        while block.before is not None:
            block = block.before
        while block is not None:
            assert block.at == at
            at += block.nbytes
            assert [id(block) in kind for kind in (free, unmapped, used)].count(True) == 1
            assert block.is_free == (id(block) in free)
            assert block.is_mapped == (id(block) not in unmapped)
            if not block.is_mapped:
                assert block.at % page_bytes(block.pool) == 0
                assert at % page_bytes(block.pool) == 0 or at == ADDRESSES
            if block.after is not None:
                assert block.after.before is block
                assert not (block.is_free and block.after.is_free)
                assert block.is_mapped or block.after.is_mapped
            nbytes += block.nbytes if block.is_mapped else 0
            block = block.after
        assert at == ADDRESSES
    assert nbytes == allocator.reserved
    assert allocator.reserved >= allocator.allocated == sum(block.nbytes for block in allocator.used.values())


@pytest.mark.parametrize("seed", range(8))
def test_random_traces_against_a_scan_of_the_addresses(seed):
    draws = random.Random(seed)
    capacity = draws.choice((120, 200, 300)) * MIB
    allocator, scanned, live, key = ExpandableSegments(capacity), Scanned(capacity), [], 0
    refused = 0
    for _ in range(300):
        if live and draws.random() < 0.48:
            last = live.pop(draws.randrange(len(live)))
            allocator.give_back(last)
            scanned.give_back(last)
        else:
            key += 1
            nbytes = draws.choice((700, 600 * KIB, 3 * MIB, 15 * MIB, 41 * MIB)) + draws.randrange(5000)
            stream = draws.choice((0, 0, 1))
            results = []
            for each in (allocator, scanned):
                try:
                    each.take(key, nbytes, stream)
                    results.append(True)
                except OutOfMemoryError:
                    results.append(False)
            assert results[0] == results[1]
            if results[0]:
                live.append(key)
            refused += not results[0]
        check(allocator)
        assert allocator.reserved == scanned.reserved <= capacity
        held = {key: (block.at, block.at + block.nbytes) for key, block in allocator.used.items()}
        assert held == {key: place for blocks in scanned.used.values() for key, place in blocks.items()}
    assert allocator.flushes > refused, "some blocks had room only after pages were unmapped"


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_never_larger_than_without(seed):
    """Without expandable segments a large block may keep a rest, so no less is allocated at any time."""
    draws = random.Random(seed)
    mixed, plain, live, key = ExpandableSegments(), CachingAllocator(), [], 0
    for _ in range(1000):
        if live and draws.random() < 0.48:
            last = live.pop(draws.randrange(len(live)))
            mixed.give_back(last)
            plain.give_back(last)
        else:
            key += 1
            nbytes = draws.choice((700, MIB, 3 * MIB, 15 * MIB, 41 * MIB)) + draws.randrange(5000)
            mixed.take(key, nbytes)
            plain.take(key, nbytes)
            live.append(key)
        assert mixed.allocated <= plain.allocated <= plain.reserved
        assert mixed.reserved >= mixed.allocated
    assert mixed.allocated < plain.peak_allocated
