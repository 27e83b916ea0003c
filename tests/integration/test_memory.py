"""What a rank of `shard` holds, against theory, on a model of 100 million parameters."""

from __future__ import annotations

import resource
import sys

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import words
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from ranks import run_ranks

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux tells it"),
]
WIDTH, LAYERS, RANKS = 2048, 24, 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def peak_bytes(rank, plan):
    words.init()
    workload = paceline.Workload(
        model=Deep,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=list(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))),
        batch_size=8,
        steps=2,
    )

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    job = Job(workload, Plan.parse(plan))
    for batch in job.batches():
        job.step(batch)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def test_shard_holds_a_quarter_and_what_is_gathered():
    """Parameters, gradients and AdamW's two moments by quarters; two layers gathered, each with its message."""
    theory = 4 * LAYERS * LAYER_BYTES / RANKS + 4 * LAYER_BYTES
    for held in run_ranks(RANKS, peak_bytes, f"shard={RANKS}"):
        assert 0.9 * theory < held < 1.1 * theory, f"{held / 2**20:.0f} MiB, in theory {theory / 2**20:.0f}"
