"""What the plan promises, the ledger counts, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import models
import paceline
from paceline.comm import words
from paceline.nouns.buckets import group_parameters
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.plan.step_traffic import step_traffic
from paceline.plan.traffic import Tensor, replicate
from paceline.train.describe import describe
from paceline.train.job import Job

from ranks import run_ranks

SLOW = pytest.mark.slow


def workload():
    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4)),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(32, 8)),
        batch_size=8,
    )


def replicated_traffic(rank, plan):
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
    for calls, sent in run_ranks(ranks, replicated_traffic, plan):
        assert (calls, sent) == (predicted.calls, predicted.payload_bytes)


ANY_MESH = (
    "shard=2,zero=3", "tensor=2,sequence=on", "pipeline=2,schedule=1f1b", "pipeline=2,schedule=interleaved",
    "replicate=2,shard=2", "pipeline=2,tensor=2", "pipeline=2,shard=2", "shard=2,tensor=2", "replicate=2,pipeline=2",
    "replicate=2,tensor=2",
)  # fmt: skip


def rows_of_first_step(rank, plan):
    words.init()
    job = Job(models.workload("encoder", clip_norm=0.5), plan)
    batch = next(iter(job.batches()))
    job.ledger.calls.clear()
    job.ledger.payload_bytes.clear()
    job.step(batch)
    return job.ledger.rows()


@pytest.mark.parametrize("text", [pytest.param(t, marks=() if t.startswith("tensor") else SLOW) for t in ANY_MESH])
def test_every_axis_sends_what_was_predicted(text):
    """Embedding, attention, norms and a head under each axis and their mixes, clipped: call by call, byte by byte."""
    plan = Plan.parse(text)
    predicted = step_traffic(plan, describe(models.workload("encoder", clip_norm=0.5), plan))
    for rank, found in enumerate(run_ranks(plan.world_size, rows_of_first_step, plan)):
        rows = predicted[Mesh.parse(plan.mesh).coordinate(rank)["pipeline"] if len(predicted) > 1 else 0]
        promised = {(row.collective, row.axis): (row.calls, row.payload_bytes) for row in rows}
        assert {(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in found} == promised


def test_one_rank_sends_nothing():
    assert replicate(Plan(), [], 0) == []


def test_buckets_are_filled_last_first_and_hold_one_kind():
    sizes = [(10, "a"), (10, "a"), (90, "b"), (10, "b"), (200, "b")]
    assert group_parameters(sizes, 100) == [[4], [3, 2], [1, 0]]
    assert group_parameters([], 100) == []
