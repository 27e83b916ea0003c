"""Loops that use, write or load whole parameters between the models' calls, where ranks have parts of them."""

from __future__ import annotations

import copy
import json
import os
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job", "paceline.parallel.split_forward", "paceline.parallel.shard.sharded_loop_models")
INPUTS = torch.randn(5, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {1: [slice(0, 6)], 2: [slice(0, 2), slice(2, 6)]}
MASK = (torch.rand(16, 8, generator=torch.Generator().manual_seed(5)) > 0.5).double()


class Alone:
    data_rank, data_size = 0, 1
    gathered = staticmethod(nullcontext)

    def backward(self, loss, weight):
        loss.backward()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 6)).double()


def prepared(plain):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return (Alone(), model, optimizer) if plain else paceline.prepare(model, optimizer)


def update(job, model, optimizer, step, penalty=None):
    batch = INPUTS[step][PARTS[job.data_size][job.data_rank]]
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    job.backward(loss if penalty is None else loss + penalty, weight=len(batch))
    optimizer.step()


def values(job, model):
    with job.gathered():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def penalties(plain):
    """Before the first call, when `tensor` has not split the model, and after it."""
    job, model, optimizer = prepared(plain)
    with job.gathered():
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(5):
        with job.gathered():
            size = sum(parameter.abs().sum() for parameter in model.parameters())
            moved = sum((parameter - before[name]).square().sum() for name, parameter in model.named_parameters())
            weight = model[0].weight
            tied = F.linear(INPUTS[0], weight).square().mean() + torch.linalg.vector_norm(weight)
            apart = (weight.T @ weight - torch.eye(8)).square().sum()
        update(job, model, optimizer, step, 0.01 * (size + moved + tied + apart))
    return values(job, model)


def written(plain):
    job, model, optimizer = prepared(plain)
    for step in range(5):
        update(job, model, optimizer, step)
        with torch.no_grad(), job.gathered():
            model[0].weight.mul_(MASK)
            model[0].weight[:3].mul_(0.1)
            model[0].bias.data[2:5] = 0.5  # past the counter of writes
            model[3].weight /= model[3].weight.norm()
            if step == 2:
                nn.init.xavier_uniform_(model[3].weight, generator=torch.Generator().manual_seed(3))
    return values(job, model)


def written_by_element(plain):
    """As WGAN clips its weights: right on parts too."""
    job, model, optimizer = prepared(plain)
    for step in range(5):
        update(job, model, optimizer, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3).mul_(0.99)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.29, 0.29)
    return values(job, model)


def loaded(plain):
    """A file of the user's at once; back to the best; an optimizer's whole state."""
    first = {name: 0.5 * value for name, value in net().state_dict().items()}
    other = torch.optim.Adam(net().parameters(), lr=0.02)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = parameter.detach().cos()
    other.step()
    job, model, optimizer = prepared(plain)
    model.load_state_dict(first)
    for step in range(5):
        update(job, model, optimizer, step)
        if step == 1:
            with job.gathered():
                best = copy.deepcopy(model.state_dict())
        if step == 2:
            model.load_state_dict(best)
            optimizer.load_state_dict(other.state_dict())
        if step == 3:
            assert model[3].load_state_dict({"weight": best["3.weight"]}, strict=False).missing_keys == ["bias"]
    return values(job, model)


def in_ranks(rank, loop, line):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    return loop(plain=False)


@pytest.mark.parametrize("loop", [penalties, written, written_by_element, loaded])
@pytest.mark.parametrize("line", ["shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2", "replicate=2,tensor=2"])
def test_whole_tensors_between_calls_are_those_of_one_process(line, loop):
    alone = loop(plain=True)
    for found in run_ranks(Plan.parse(line).world_size, in_ranks, loop, line):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


def no_grad(function):
    return torch.no_grad()(function)


REFUSED = {
    "penalty": (lambda weight: weight.abs(), "abs on one, with gradients"),
    "logged norm": (lambda weight: weight.norm().item(), "norm on one, which is not by element"),
    "rows": (no_grad(lambda weight: weight[:4].mul_(0.1)), "__getitem__ on one, which is not by element"),
    "mask": (no_grad(lambda weight: weight.mul_(MASK)), "tensor of shape (16, 8), which is not cut so"),
    "average": (no_grad(lambda weight: torch.zeros(16, 8).lerp_(weight, 0.1)), "lerp_ on one, together with"),
    "transposed": (no_grad(lambda weight: weight.T.mul_(2)), "T on one, which is not by element"),
    "drawn": (nn.init.xavier_uniform_, "uniform_ on one, which is not by element"),
}


def refused(rank, line):
    """What is said of each; it is tried on a model that has taken a step."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    job, model, optimizer = prepared(plain=False)
    found = {}
    try:
        sum(parameter.square().sum() for parameter in model.parameters())
    except PacelineError as error:
        found["before the first step"] = error.fix
    update(job, model, optimizer, 0)
    for name, (use, _) in REFUSED.items():
        try:
            use(model[0].weight)
        except PacelineError as error:
            found[name] = error.found
    return found


@pytest.mark.parametrize("line", ["shard=2", "tensor=2"])
def test_uses_of_parts_as_if_they_were_whole_are_refused(line):
    for found in run_ranks(2, refused, line):
        assert "with job.gathered():" in found["before the first step"]
        for name, (_, said) in REFUSED.items():
            assert said in found[name], name
