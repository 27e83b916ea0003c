"""torch's SyncBatchNorm, and batch norm where ranks can't share statistics."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job", "paceline.parallel.split_forward", "paceline.parallel.shard.sharded_loop_models")
DATA = list(torch.randn(11, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


class Frozen(nn.SyncBatchNorm):
    """A norm that uses its running statistics in training too."""

    def train(self, mode=True):
        return super().train(False)


def converted():
    norms = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8))
    last = nn.Linear(8, 2)
    return nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(norms), nn.Tanh(), last)


def made_directly():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.SyncBatchNorm(4, affine=False),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.SyncBatchNorm(8, track_running_stats=False),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        Frozen(8),
        nn.Linear(8, 2),
    )


def workload(make, **parts):
    return paceline.Workload(
        model=make,
        loss=lambda model, batch: ((model(batch) - 1).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        precision="float64",
        **{"data": DATA, "batch_size": 4, "steps": 5, **parts},
    )


def train(rank, make, lines):
    """The losses under each plan."""
    api.init()
    found = []
    for line in lines:
        job = Job(workload(make), Plan.parse(line))
        losses = [job.step(batch) for batch in job.batches()]
        if make is converted:  # the other one's evaluation depends on how the samples are cut
            losses.append(job.evaluate(DATA)["loss"])
        found.append(losses)
    return found


@pytest.mark.parametrize("make", [converted, made_directly])
def test_sync_batch_norm_is_batch_norm(make):
    """Of 11 samples in batches of 4, on every kind of plan."""
    ((alone,),) = run_ranks(1, train, make, ["replicate=1"])
    lines = ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2"]
    for found in run_ranks(2, train, make, lines):
        for line, losses in zip(lines, found, strict=True):
            assert losses == pytest.approx(alone, rel=1e-10), line


def loop(rank, line):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    torch.manual_seed(0)
    model = converted().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        job.backward((model(batch) - 1).square().mean())
        optimizer.step()
        job.end_step()
        losses.append(job.last.loss)
    return losses


def test_sync_batch_norm_in_a_loop():
    (alone,) = run_ranks(1, loop, "replicate=1")
    for line in ("replicate=2", "shard=2", "tensor=2"):
        for losses in run_ranks(2, loop, line):
            assert losses == pytest.approx(alone, rel=1e-10), line


def of_some_ranks():
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4), dist.new_group([dist.get_rank()]))
    return nn.Sequential(nn.Linear(4, 4), norm)


def of_all_ranks():
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4), dist.group.WORLD)
    return nn.Sequential(nn.Linear(4, 4), norm)


def norm_of_batches():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def refused(rank, make, line, parts):
    api.init()
    try:
        Job(workload(make, data=[torch.ones(4)] * 8, **parts), Plan.parse(line))
    except (WorkloadError, PlanError) as error:
        return error.found
    return None


@pytest.mark.parametrize(
    ("make", "line", "parts", "found"),
    [
        (of_some_ranks, "replicate=2", {}, "1 is a SyncBatchNorm with a process_group of 1 of 2 ranks"),
        (of_all_ranks, "replicate=2", {}, None),
        (norm_of_batches, "replicate=2,server=1", {}, "the model has a BatchNorm1d, and 2 workers"),
        (norm_of_batches, "replicate=2,server=1,mode=async", {}, None),
        (norm_of_batches, "replicate=2,server=1", {"micro_batch_size": 2}, None),
        (norm_of_batches, "pipeline=2,micro_batches=2", {}, "the model has a BatchNorm1d, which would take"),
        (norm_of_batches, "pipeline=2,micro_batches=2", {"micro_batch_size": 2}, None),
    ],
)
def test_batch_norm_that_can_not_share(make, line, parts, found):
    for said in run_ranks(2, refused, make, line, parts):
        assert (said is None) if found is None else (said or "").startswith(found)
