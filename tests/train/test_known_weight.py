"""Backward passes of loops whose loader says what a loss weighs: ranks do not wait for each other before them.

A loss that is not finite is known after the backward pass then. The loop may go on all the same: gradients are as they
were.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.nouns.errors import CollectiveError, LossError, PeerLostError
from paceline.nouns.plan import Plan
from paceline.parallel.replicate.replicate_strategy import Replicate

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
BATCH, STEPS, BAD = 6, 8, 5  # the step whose loss is NaN: sums begin in backward passes by then
DATA = torch.randn(STEPS * BATCH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def prepared(plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))
    model = net()
    return paceline.prepare(model, sgd(model), DataLoader(DATA, BATCH))


def loss(model, batch):
    return (model(batch) - 1).square().mean()


def clears(rank, number):
    return True


def keeps_zeros(rank, number):
    """Gradients are there on all ranks, so all wait before the backward pass of the bad step."""
    return number != BAD


def clears_on_rank_1(rank, number):
    """Rank 0 alone waits."""
    return number != BAD or rank == 1


def with_a_bad_step(rank, plan, to_none, passes):
    """Train, leave out the step whose last loss is NaN on rank 1, and say where the loop ended."""
    begun = []
    begin = Replicate.begin_last_backward
    Replicate.begin_last_backward = lambda sums: begun.append(job.step_number) or begin(sums)
    job, model, optimizer, loader = prepared(plan)
    seen = []
    for number, batch in enumerate(loader):
        optimizer.zero_grad(set_to_none=to_none(rank, number))
        for each in range(passes):
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            is_bad = number == BAD and each == passes - 1
            try:
                job.backward(loss(model, batch) * (torch.nan if is_bad and rank == 1 else 1))
            except LossError as error:
                seen.append(str(error))
                after = [p.grad for p in model.parameters()]
                assert all(
                    torch.equal(a, b) if b is not None else a is None for a, b in zip(after, before, strict=True)
                )
        if number != BAD or passes > 1:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], seen, begun


def alone(passes):
    """Train in one process."""
    model = net()
    optimizer = sgd(model)
    for number, batch in enumerate(DATA.split(BATCH)):
        optimizer.zero_grad()
        for each in range(passes):
            if number != BAD or each < passes - 1:
                loss(model, batch).backward()
        if number != BAD or passes > 1:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "mesh",
    [
        "replicate=2,bucket_bytes=64",
        "replicate=3,bucket_bytes=64",
        "replicate=2",
        "replicate=2,transport=gloo,bucket_bytes=64",
        "shard=2,zero=1",
    ],
)
@pytest.mark.parametrize(
    ("to_none", "passes"),
    [(clears, 1), (keeps_zeros, 1), (clears_on_rank_1, 1), (clears, 2), (keeps_zeros, 2), (clears_on_rank_1, 2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_loop_goes_on_after_a_bad_loss(mesh, to_none, passes):
    plan = Plan.parse(mesh)
    expected = alone(passes)
    for found, seen, begun in run_ranks(plan.world_size, with_a_bad_step, plan, to_none, passes):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert len(seen) == 1
        assert "it is NaN or infinite on rank 1" in seen[0]
        assert BAD in begun  # all ranks take part in sums that nobody wants, whether they wait before them or not


def waits_for_the_other(rank, folder):
    """Rank 1 calls backward once rank 0's backward pass runs."""
    job, model, optimizer, loader = prepared(Plan.parse("replicate=2"))
    sign = folder / "runs"
    if rank == 0:
        model[0].weight.register_hook(lambda gradient: sign.touch())
    batch = next(iter(loader))
    mean = loss(model, batch)
    until = time.monotonic() + 20
    while rank == 1 and not sign.exists():
        if time.monotonic() > until:
            return "rank 0 waits"
        time.sleep(0.01)
    job.backward(mean)
    optimizer.step()
    return "trained"


def test_a_rank_does_not_wait_before_its_backward_pass(tmp_path):
    assert run_ranks(2, waits_for_the_other, tmp_path) == ["trained", "trained"]


def weighs_otherwise(rank, weight):
    job, model, optimizer, loader = prepared(Plan.parse("replicate=2"))
    try:
        for batch in loader:
            optimizer.zero_grad()
            job.backward(loss(model, batch), weight=weight if rank == 1 else None)
            optimizer.step()
    except (CollectiveError, PeerLostError) as error:
        return type(error), str(error), [p.grad for p in model.parameters()]
    return "no error"


def test_known_weights_that_do_not_add_up_are_an_error():
    kind, text, gradients = run_ranks(2, weighs_otherwise, 4)[0]
    assert kind is CollectiveError
    assert "add up to 7, and the batch has 6 samples" in text
    assert "on every rank, or on none" in text
    assert gradients == [None] * 6


def test_known_weight_may_be_passed_on_one_rank_if_it_is_right():
    assert run_ranks(2, weighs_otherwise, 3) == ["no error", "no error"]
