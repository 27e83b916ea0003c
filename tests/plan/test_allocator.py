"""The caching allocator's rules, one by one, and that it never lends a byte twice."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.plan.allocator import (
    LARGE_SEGMENT,
    ROUND_BYTES,
    SMALL_SEGMENT,
    CachingAllocator,
    OutOfMemoryError,
    play,
    segment_bytes,
)

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, SMALL_SEGMENT),
        (MIB, SMALL_SEGMENT),
        (MIB + 1, LARGE_SEGMENT),
        (10 * MIB - ROUND_BYTES, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_what_is_reserved_for_a_block(asked, reserved):
    allocator = play([1], [asked], [0])
    assert allocator.reserved == reserved == segment_bytes(-(-asked // ROUND_BYTES) * ROUND_BYTES)
    assert asked <= allocator.allocated <= asked + MIB  # as small a rest is no block of its own


def test_small_blocks_share_a_segment_and_large_ones_another():
    assert play([1, 2, 3], [MIB, MIB, 5 * MIB], [0] * 3).reserved == SMALL_SEGMENT + LARGE_SEGMENT


def test_streams_share_nothing():
    assert play([1, -1, 2], [5 * MIB] * 2, [0, 0]).reserved == LARGE_SEGMENT
    assert play([1, -1, 2], [5 * MIB] * 2, [0, 1]).reserved == 2 * LARGE_SEGMENT


def test_the_smallest_that_is_large_enough_is_taken():
    """Of free blocks of 30 and 20 MiB, 18 MiB come from the second; then 25 fit into the first."""
    events, sizes = [1, 2, -1, -2, 3, 4], [30 * MIB, 20 * MIB, 18 * MIB, 25 * MIB]
    assert play(events, sizes, [0] * 4).reserved == 50 * MIB


def test_a_large_rest_is_split_off_and_a_small_one_stays():
    assert play([1, -1, 2, 3], [20 * MIB, 18 * MIB, 2 * MIB], [0] * 3).reserved == 20 * MIB
    kept = play([1, -1, 2], [20 * MIB, 20 * MIB - 512 * KIB], [0] * 2)
    assert kept.allocated == 20 * MIB  # half a MiB is no block of its own
    assert play([1], [33 * MIB], [0]).allocated == 34 * MIB  # nor is one


def test_free_neighbours_become_one():
    """Three parts of one segment, given back in any order, hold a block of all of it."""
    for order in ([-2, -3, -4], [-3, -2, -4], [-4, -2, -3], [-2, -4, -3]):
        events = [1, -1, 2, 3, 4, *order, 5]
        allocator = play(events, [60 * MIB, 20 * MIB, 20 * MIB, 20 * MIB, 60 * MIB], [0] * 5)
        assert allocator.reserved == 60 * MIB


def test_what_is_cached_goes_back_before_memory_runs_out():
    sizes = [40 * MIB, 60 * MIB]
    assert play([1, -1, 2], sizes, [0, 0], capacity=64 * MIB).flushes == 1
    with pytest.raises(OutOfMemoryError) as error:
        play([1, 2], sizes, [0, 0], capacity=64 * MIB)
    assert error.value.event == 1


def test_no_byte_is_lent_twice():
    """Blocks in use never overlap, and segments hold just what is used and what is free."""
    draws = random.Random(0)
    allocator, live, key = CachingAllocator(), [], 0
    for _ in range(4000):
        if live and draws.random() < 0.48:
            allocator.give_back(live.pop(draws.randrange(len(live))))
        else:
            key += 1
            allocator.take(key, draws.choice((1, 700, 40_000, MIB, 3 * MIB, 15 * MIB)) + draws.randrange(5000))
            live.append(key)
        taken = sorted((p.segment, p.at, p.nbytes) for p in allocator.used.values())
        assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in itertools.pairwise(taken))
        free = sum(item[1].nbytes for waiting in allocator.free.values() for item in waiting)
        assert allocator.allocated + free == allocator.reserved
