"""Optimizers that need whole parameters, under plans that cut them, end where one process does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from paceline.checkpoint.reshard import take
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import ShardSpec
from paceline.train import snapshot
from paceline.train.job import Job

from support import models
from support.ranks import run_ranks
from support.whole_optimizers import OPTIMIZERS, WIDTH, Small, workload

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


class WithUnused(Small):
    """Has a layer that no loss uses: it has no gradient, and must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


WITH_UNUSED = {1: ("replicate=1",), 2: ("shard=2", "tensor=2"), 4: ("shard=2,tensor=2",)}


def state_of(job):
    """What this rank holds of the model and of the optimizer's state, and which part it is."""
    held = job.parallel.local_shards()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, description = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    state = {name: (part.tensor.clone(), part.shard.shard_spec) for name, part in {**parts, **more}.items()}
    for name, number in description["numbers"].items():
        state[name] = (torch.tensor(number), ShardSpec(()))
    return state


def train_all(rank, cells):
    """One job after another in the same processes: loss and norm of each step, and the state at the end."""
    api.init()
    results = {}
    for optimizer, plan in cells:
        parts = ("lamb", {"model": WithUnused}) if optimizer == "unused" else (optimizer, {})
        job = Job(workload(parts[0], **parts[1]), Plan.parse(plan))
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
    return run_ranks(size, train_all, cells + [("unused", plan) for plan in WITH_UNUSED[size]], timeout_s=300)


@pytest.mark.parametrize(("optimizer", "plan"), CELLS + [("unused", p) for n in (2, 4) for p in WITH_UNUSED[n]])
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


def train_gpt2(rank, plan):
    """GPT-2, whose matrix for queries, keys and values is cut in each of its three blocks."""
    api.init()
    make = functools.partial(models.MODELS["gpt2"][0], 2)
    optimizer = OPTIMIZERS["lamb"]
    job = Job(models.workload("gpt2", model=make, optimizer=optimizer, clip_norm=0.5), Plan.parse(plan))
    steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
    update = getattr(job.parallel.placed, "whole_update", None)
    blocks = {len(parameter.cut.blocks) for parameter in update.parameters.values()} if update else set()
    return steps, blocks, state_of(job)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", "shard=2,tensor=2"])
def test_a_fused_matrix_is_put_together_block_by_block(plan):
    steps, _, whole = run_ranks(1, train_gpt2, "replicate=1")[0]
    for other_steps, blocks, state in run_ranks(Plan.parse(plan).world_size, train_gpt2, plan):
        assert blocks == {1, 3}
        for step, other_step in zip(steps, other_steps, strict=True):
            assert other_step == pytest.approx(step, rel=TOLERANCE)
        for name, (tensor, shard_spec) in state.items():
            torch.testing.assert_close(tensor, take(whole[name][0], shard_spec), rtol=TOLERANCE, atol=TOLERANCE)
