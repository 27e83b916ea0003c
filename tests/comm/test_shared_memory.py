"""Sums through shared memory: right, alike on every rank, and quick to notice a death."""

from __future__ import annotations

import os
import time

import torch

from paceline.comm import api
from paceline.comm.shared_memory import open_shared_memory, open_slot
from paceline.nouns.errors import CollectiveError, PeerLostError

from support.ranks import run_ranks


def sums(rank, turns):
    api.init()
    shared = open_shared_memory(api.world().comm)
    slots = [open_slot(shared, numel, torch.float32) for numel in (1, 70_000)]
    results = []
    for turn in range(turns):
        for slot in slots:
            random = torch.Generator().manual_seed(100 * turn + rank)
            slot.inboxes[slot.turn % 2].copy_(torch.randn(slot.inboxes[0].numel(), generator=random))
            slot.begin()
        for slot in slots:
            out = torch.empty_like(slot.inboxes[0])
            slot.finish(out, torch.tensor(0.5))
            results.append(out)
    return results


def test_sums_are_right_and_bit_equal_everywhere():
    for ranks in (2, 3):
        turns = 5
        answers = run_ranks(ranks, sums, turns)
        for number, first in enumerate(answers[0]):
            seeds = [100 * (number // 2) + rank for rank in range(ranks)]
            parts = [torch.randn(first.numel(), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            torch.testing.assert_close(first, sum(parts[1:], parts[0]) / 2)
            assert all(torch.equal(first, other[number]) for other in answers)


def die_in_a_sum(rank):
    api.init()
    shared = open_shared_memory(api.world().comm)
    slot = open_slot(shared, 4, torch.float32)
    if rank == 1:
        time.sleep(0.3)
        api.shutdown = lambda: None
        os.close(shared.to_peer[0])  # what the kernel does when the process ends
        return None
    slot.begin()
    began = time.monotonic()
    try:
        slot.finish(torch.empty(4), torch.tensor(1.0))
    except PeerLostError as error:
        return str(error), time.monotonic() - began
    return "no error", 0


def test_a_dead_peer_is_noticed_at_once():
    text, seconds = run_ranks(2, die_in_a_sum)[0]
    assert "waits for rank 1" in text
    assert seconds < 1.5


def disagree(rank):
    api.init()
    shared = open_shared_memory(api.world().comm)
    slots = [open_slot(shared, 4, torch.float32) for _ in range(2)]
    slots[rank].begin()
    try:
        slots[rank].finish(torch.empty(4), torch.tensor(1.0))
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_ranks_at_different_sums_are_told_apart():
    first, second = run_ranks(2, disagree)
    assert "sum 1 of turn 0" in first
    assert "is at sum 2 of turn 0" in first
    assert "is at sum 1 of turn 0" in second
