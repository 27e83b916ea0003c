"""What the plan promises, the ledger counts, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import words
from paceline.nouns.buckets import group_parameters
from paceline.nouns.plan import Plan
from paceline.plan.traffic import Tensor, replicate
from paceline.train.describe import describe
from paceline.train.job import Job

from ranks import run_ranks


def workload():
    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4)),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(32, 8)),
        batch_size=8,
    )


def step_traffic(rank, plan):
    words.init()
    job = Job(workload(), plan)
    ledger = job.ledger
    before = dict(ledger.calls), dict(ledger.payload_bytes)
    for batch in job.batches():
        job.step(batch)
    key = ("all_reduce", "replicate")
    steps = job.step_number
    return (ledger.calls[key] - before[0].get(key, 0)) / steps, (
        ledger.payload_bytes[key] - before[1].get(key, 0)
    ) / steps


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"transport": "gloo"}, {"bucket_bytes": 300}, {"compression": "bf16"}], ids=str
)
def test_the_ledger_counts_what_the_plan_predicts(ranks, options):
    plan = Plan(mesh=f"replicate={ranks}", **options)
    model = describe(workload())
    trained = [Tensor(**{**sizes, "shape": tuple(sizes["shape"])}) for sizes in model["parameters"]]
    (predicted,) = replicate(plan, trained, len(model["buffers"]))
    for calls, sent in run_ranks(ranks, step_traffic, plan):
        assert (calls, sent) == (predicted.calls, predicted.payload_bytes)


def test_one_rank_sends_nothing():
    assert replicate(Plan(), [], 0) == []


def test_buckets_are_filled_last_first_and_hold_one_kind():
    sizes = [(10, "a"), (10, "a"), (90, "b"), (10, "b"), (200, "b")]
    assert group_parameters(sizes, 100) == [[4], [3, 2], [1, 0]]
    assert group_parameters([], 100) == []
