"""Optimizers that need whole parameters, under plans that cut them, end where one process does."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train import snapshot
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import OPTIMIZERS, workload

TOLERANCE = 1e-10
PLANS = {
    2: ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2"),
    4: ("replicate=2,shard=2", "shard=2,tensor=2", "pipeline=2,shard=2"),
}
CELLS = [
    (optimizer, plan)
    for optimizer in OPTIMIZERS
    for plans in PLANS.values()
    for plan in plans
    # An optimizer made of others has no parameters of one stage alone.
    if not (optimizer == "muon and adamw" and "pipeline" in plan)
]


def state_of(job):
    """What this rank holds of the model and of the optimizer's state, and which part it is."""
    held = job.parallel.held()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, _ = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    return {name: (part.tensor.clone(), part.held.shard_spec) for name, part in {**parts, **more}.items()}


def train_all(rank, cells):
    """One job after another in the same processes: loss and norm of each step, and the state at the end."""
    api.init()
    results = {}
    for optimizer, plan in cells:
        job = Job(workload(optimizer), Plan.parse(plan))
        steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
        results[optimizer, plan] = steps, state_of(job)
        job.close()
    return results


@functools.cache
def results(size):
    if size == 1:
        cells = [(optimizer, "replicate=1") for optimizer in OPTIMIZERS]
    else:
        cells = [cell for cell in CELLS if cell[1] in PLANS[size]]
    return run_ranks(size, train_all, cells, timeout_s=300)


@pytest.mark.parametrize(("optimizer", "plan"), CELLS)
def test_it_ends_where_one_process_does(optimizer, plan):
    steps, whole = results(1)[0][optimizer, "replicate=1"]
    seen = set()
    for answers in results(Plan.parse(plan).world_size):
        other_steps, state = answers[optimizer, plan]
        for step, other_step in zip(steps, other_steps, strict=True):
            assert other_step == pytest.approx(step, rel=TOLERANCE)
        for name, (tensor, shard_spec) in state.items():
            expected = take(whole[name][0], shard_spec)
            torch.testing.assert_close(tensor, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: n + m)
        seen |= state.keys()
    assert seen == whole.keys()
