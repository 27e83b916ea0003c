"""A job that its loop has let go of keeps no parameter: the next model finds the memory free."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from dataclasses import asdict

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.comm import api
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.run.rank.watchdog import standing
from paceline.train import open_jobs
from paceline.train.job import Job

from support.models import mlp, vector_loss, workload
from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")

ANY = {
    "replicate": Plan(mesh="replicate=2"),
    "gloo": Plan(mesh="replicate=2", transport="gloo"),
    "topk": Plan(mesh="replicate=2", compression="topk"),
    "zero=1": Plan(mesh="shard=2", zero=1),
    "shard": Plan(mesh="shard=2"),
}
OF_WORKLOADS = {
    "powersgd": Plan(mesh="replicate=2", compression="powersgd"),
    "tensor": Plan(mesh="tensor=2"),
    "pipeline": Plan(mesh="pipeline=2", micro_batches=2),
    "compiled": Plan(mesh="replicate=2", compile="on"),
}


def held_after_workload(plan, is_closed):
    job = Job(workload("mlp"), plan)
    for batch in job.batches():
        job.step(batch)
    if is_closed:
        job.close()
    return references_to(job.model)


def held_after_loop(plan, is_closed):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    model = mlp()
    data = DataLoader(workload("mlp").data, 4)
    job, model, optimizer, loader = paceline.prepare(model, torch.optim.AdamW(model.parameters()), data)
    for _, batch in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        total, count = vector_loss(model, batch)
        job.backward(total / count)
        job.clip(1.0)
        optimizer.step()
    if is_closed:
        job.close()
    return references_to(model)


def references_to(model):
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    assert references
    return references


def still_there(rank, train, plan):
    """Return how many parameters are there once nothing of the test names them, closed and left open."""
    api.init()
    counts = []
    for is_closed in (True, False):
        references = train(plan, is_closed)
        gc.collect()
        counts.append(sum(reference() is not None for reference in references))
    return counts


@pytest.mark.parametrize("plan", [*ANY.values(), *OF_WORKLOADS.values()], ids=[*ANY, *OF_WORKLOADS])
def test_a_workload_leaves_no_parameter(plan):
    assert run_ranks(2, still_there, held_after_workload, plan) == [[0, 0]] * 2


@pytest.mark.parametrize("plan", ANY.values(), ids=ANY)
def test_a_loop_leaves_no_parameter(plan):
    assert run_ranks(2, still_there, held_after_loop, plan) == [[0, 0]] * 2


def test_a_closed_job_of_a_run_leaves_no_parameter(tmp_path, monkeypatch):
    """The run remembers that it had a job, and hears signals; neither needs the model."""
    Plan(mesh="replicate=1").write(tmp_path / "plan.json")
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    api.init()
    try:
        references = held_after_workload(Plan(), is_closed=True)
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)
        signal.raise_signal(signal.SIGTERM)  # nothing is left to stop
        assert standing()["steps_done"] == 3
        with pytest.raises(UsageError, match=r"those of the first \(at step 3\)"):
            paceline.distribute(workload("mlp"))
    finally:
        open_jobs.close_open_jobs()
        signal.signal(signal.SIGTERM, before)
