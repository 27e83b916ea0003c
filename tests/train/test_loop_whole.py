"""Models of a loop that stay whole while the plan cuts the others, by `paceline.prepare(..., whole=[critic])`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn

import paceline
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job", "paceline.parallel.split_forward", "paceline.parallel.shard.sharded_loop_models")
STEPS = 4
INPUTS = torch.randn(STEPS, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {1: [slice(0, 6)], 2: [slice(0, 2), slice(2, 6)], 4: [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6)]}
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "replicate=2,shard=2", "tensor=2"]
PLANS += ["replicate=2,tensor=2"]


class Critic(nn.Module):
    """A model that no graph can run: its loss looks at its own weights, and the loop calls parts of it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 1)

    def score(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def train(plain):
    """The model's outputs are judged by the critic; one optimizer has parameters of both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    critic = Critic().double()
    both = torch.optim.AdamW([*model.parameters(), *critic.parameters()], lr=0.01)
    alone = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    job = None
    if not plain:
        job, model, critic, both, alone = paceline.prepare(model, critic, both, alone, whole=[critic])
    norms = []
    for batch in INPUTS:
        if job is not None:
            batch = batch[PARTS[job.data_size][job.data_rank]]
        for optimizer in (both, alone):
            optimizer.zero_grad()
            penalty = sum(weight.square().sum() for weight in critic.parameters())
            loss = critic.score(model(batch)).square().mean() + critic.last(critic.first(batch)).mean() + penalty
            if job is None:
                loss.backward()
                parameters = [each for group in optimizer.param_groups for each in group["params"]]
                norms.append(nn.utils.clip_grad_norm_(parameters, 0.1))
            else:
                job.backward(loss, weight=len(batch))
                norms.append(torch.tensor(job.clip(0.1, optimizer), dtype=torch.float64))
            optimizer.step()
    if job is None:
        whole = [each.detach() for each in (*model.parameters(), *critic.parameters())]
    else:
        whole = [job.parallel.models.full_tensor(each) for each in (*model.parameters(), *critic.parameters())]
    sizes = [
        sum(getattr(each, "to_local", lambda own=each: own)().numel() for each in part.parameters())
        for part in (model, critic)
    ]
    return [each.clone() for each in (*whole, *critic.buffers(), *norms)], sizes


def in_ranks(rank, line):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    return train(plain=False)


@pytest.mark.parametrize("line", PLANS)
def test_a_whole_model_trains_beside_one_that_is_cut(line):
    expected, (numel, critics) = train(plain=True)
    plan = Plan.parse(line)
    is_cut = "tensor" in line or ("shard" in line and plan.zero > 1)
    for found, (own, of_critic) in run_ranks(plan.world_size, in_ranks, line):
        assert of_critic == critics
        assert (own < 0.6 * numel) == is_cut
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def refused(rank, line, make):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    model, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    both = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
    try:
        paceline.prepare(model, critic, both, **make(model, critic))
    except WorkloadError as error:
        return error.asked, error.found, error.fix
    return None


def all_of_them(model, critic):
    return {"whole": [model, critic]}


def another(model, critic):
    return {"whole": [nn.Linear(2, 2)]}


def no_list(model, critic):
    return {"whole": critic}


def a_name(model, critic):
    return {"whole": ["critic"]}


def whole_and_frozen(model, critic):
    critic.requires_grad_(False)
    return {"whole": [critic], "shard_frozen": True}


@pytest.mark.parametrize(
    ("line", "make", "found"),
    [
        ("shard=2", all_of_them, "whole has all of these"),
        ("tensor=2", all_of_them, "whole has all of these"),
        ("replicate=2", another, "it has Linear(in_features=2"),
        ("replicate=2", no_list, "it is Linear(in_features=8"),
        ("replicate=2", a_name, "it has 'critic'"),
        ("replicate=2", whole_and_frozen, "every model has one, or stays whole"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_whole_can_not_be(line, make, found):
    for said in run_ranks(2, refused, line, make):
        assert said is not None
        assert found in said[1]
        assert said[2]


def test_whole_has_no_effect_where_nothing_is_cut():
    assert run_ranks(2, refused, "replicate=2", all_of_them) == [None, None]
