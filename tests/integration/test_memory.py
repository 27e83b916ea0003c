"""What a rank holds at most, and a model that one rank may not hold.

A step of `shard` over R ranks, all in the same dtype, holds on each rank at its peak

    P / R        its rows of the parameters
    P / R        the gradients of its rows
    2 P / R      AdamW's two moments of them
    4 G          of the largest block: two gathered (one computes, the next is fetched), the gradient of a whole
                 one, and the copy of it that is sent
    A            activations

where P is all parameters, and G the largest block's.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

pytestmark = pytest.mark.integration

WIDTH, DEPTH, BATCH = 2048, 12, 8
BLOCK = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
PARAMETERS = DEPTH * BLOCK  # about 50 million of them
ALLOWED = int(2.5 * PARAMETERS)  # parameters, gradients and half of AdamW's state


SEQUENCE, NARROW = 4096, 64
LONG_ALLOWED = 50 * 2**20  # a layer keeps about ten values of SEQUENCE * NARROW float32 numbers, of 1 MiB each


class Long(nn.Module):
    """Attention over one long sequence: activations, and next to no parameters."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, NARROW)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(NARROW, 3 * NARROW), nn.Linear(NARROW, NARROW)])
                                     for _ in range(depth)])  # fmt: skip

    def forward(self, x):
        x = self.first(x)
        for inward, outward in self.layers:
            parts = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in inward(x).chunk(3, -1)]
            made = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + torch.tanh(outward(made.transpose(1, 2).flatten(2)))
        return x


def long_workload(depth=8, length=SEQUENCE):
    random = torch.Generator().manual_seed(0)
    return paceline.Workload(
        model=lambda: Long(depth),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=[torch.randn(length, 4, generator=random) for _ in range(2)],
        batch_size=1,
        steps=2,
    )


class Deep(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def workload(depth=DEPTH):
    random = torch.Generator().manual_seed(0)
    return paceline.Workload(
        model=lambda: Deep(depth),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        data=[torch.randn(WIDTH, generator=random) for _ in range(2 * BATCH)],
        batch_size=BATCH,
        steps=2,
    )


def status_bytes(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def train(plan, depth=DEPTH):
    return train_job(workload(depth), plan)


def train_job(work, plan):
    job = Job(work, Plan.parse(plan))
    losses = [job.step(batch) for batch in job.batches()]
    job.close()
    return losses


def peak(rank, plan):
    """How much more memory was resident at the most than before, imports and a small job done."""
    api.init()
    train(plan, 2)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    train(plan)
    return status_bytes("VmHWM") - before


def test_memory_of_a_shard_rank_is_its_part_and_gathered_blocks():
    ranks = 4
    theory = 4 * PARAMETERS / ranks + 4 * BLOCK
    for measured in run_ranks(ranks, peak, f"shard={ranks}", timeout_s=400):
        print(f"{measured / 2**20:.0f} MiB, theory {theory / 2**20:.0f} MiB")
        assert measured == pytest.approx(theory, rel=0.1)


def train_within(rank, plan, allowed):
    """Train with no more than `allowed` bytes of data beyond what imports and a small job take."""
    api.init()
    train(plan, 4)
    limit = status_bytes("VmData") + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return train(plan)
    except (MemoryError, RuntimeError) as error:
        return str(error)


@pytest.fixture(scope="module")
def losses():
    return run_ranks(1, train_within, "replicate=1", 10 * PARAMETERS, timeout_s=400)[0]


def test_one_rank_may_not_hold_it(losses):
    assert losses[1] < losses[0]
    (said,) = run_ranks(1, train_within, "replicate=1", ALLOWED, timeout_s=400)
    assert "can't allocate memory" in said


@pytest.mark.parametrize("plan", ["shard=4", "pipeline=4"])
def test_four_ranks_train_what_one_may_not_hold(plan, losses):
    for found in run_ranks(4, train_within, plan, ALLOWED, timeout_s=400):
        assert found == pytest.approx(losses, rel=1e-4)


def train_long_within(rank, plan, allowed):
    """The same of long sequences."""
    api.init()
    train_job(long_workload(1, 64), plan)
    limit = status_bytes("VmData") + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return train_job(long_workload(), plan)
    except (MemoryError, RuntimeError) as error:
        return str(error)


def test_four_ranks_train_on_sequences_that_one_may_not_hold():
    (alone,) = run_ranks(1, train_long_within, "replicate=1", 2**32, timeout_s=400)
    assert alone[1] != alone[0]
    (said,) = run_ranks(1, train_long_within, "replicate=1", LONG_ALLOWED, timeout_s=400)
    assert "can't allocate memory" in said
    for way in ("ring", "heads"):
        for found in run_ranks(4, train_long_within, f"context=4,context_by={way}", LONG_ALLOWED, timeout_s=400):
            assert found == pytest.approx(alone, rel=1e-4)
