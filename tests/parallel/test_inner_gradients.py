"""A loss that takes gradients itself (a penalty, a differential equation, forces) trains on N ranks as on one."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.autograd import grad as imported_grad

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(3, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16) if norm else nn.LayerNorm(16), nn.Tanh())
            for _ in range(3)
        )
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.into(x))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(hidden)


class Nets(nn.Module):
    """A critic, and a generator that the critic's loss does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = Net(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)


def equation(model, x):
    """Second derivatives with respect to the input, as in physics-informed networks."""
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, :1] + first[:, 1:2] - u).square().sum(), len(x)


def penalty(model, x):
    """WGAN-GP: the critic is called three times, the last time for the slope of its score."""
    fake = model.generator(x.flip(1))
    between = (0.3 * x + 0.7 * fake.detach()).requires_grad_()
    (slope,) = imported_grad(model.critic(between).sum(), between, create_graph=True)
    scores = model.critic(fake) - model.critic(x)
    return scores.sum() + 10 * (slope.norm(dim=1) - 1).square().sum(), len(x)


def forces(model, x):
    """Energies and forces; then the model is called once more."""
    x = x.clone().requires_grad_()
    energy = model(x)
    force = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return (force - x.detach().sin()).square().sum() + model(-x.detach()).square().sum(), len(x)


def watched(model, x):
    """A gradient that is only looked at."""
    total = model(x).square().sum()
    slopes = torch.autograd.grad(total, [p for p in model.out.parameters()], retain_graph=True)
    assert all(torch.isfinite(slope).all() for slope in slopes)
    return total, len(x)


LOSSES = {"equation": (Net, equation), "penalty": (Nets, penalty), "forces": (Net, forces), "watched": (Net, watched)}
PLANS = ("replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3")
RUNS = [
    *((name, plan, {}) for name in LOSSES for plan in PLANS),
    ("equation", "replicate=2", {"micro_batch_size": 2}),
    ("equation", "shard=2", {"micro_batch_size": 2}),
    ("penalty", "shard=2,checkpointing=full", {}),
]


def workload(model, loss, **parts):
    return paceline.Workload(
        model=model,
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        data=list(torch.randn(21, 3, generator=torch.Generator().manual_seed(0))),
        batch_size=8,
        epochs=2,
        precision="float64",
        clip_norm=1.0,
        **parts,
    )


def train(plan, model, loss, parts):
    job = Job(workload(model, loss, **parts), Plan.parse(plan))
    steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
    whole = {name: _whole(parameter) for name, parameter in job.model.named_parameters()}
    job.close()
    return steps, whole


def _whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def train_all(rank, runs):
    api.init()
    return [train(plan, *LOSSES[name], parts) for name, plan, parts in runs]


@functools.cache
def results(ranks):
    runs = RUNS if ranks == 2 else [(name, "replicate=1", {}) for name in LOSSES]
    return run_ranks(ranks, train_all, runs, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{name}-{plan}-{len(parts)}" for name, plan, parts in RUNS])
def test_ranks_equal_one_rank(number):
    alone = results(1)[0][list(LOSSES).index(RUNS[number][0])]
    for steps, whole in (every[number] for every in results(2)):
        assert torch.allclose(torch.tensor(steps), torch.tensor(alone[0]), rtol=1e-11, atol=0)
        for name, value in whole.items():
            assert torch.allclose(value, alone[1][name], rtol=1e-9, atol=1e-12), name


def refused(rank, plan, norm, loss):
    api.init()
    try:
        train(plan, functools.partial(Net, norm), loss, {})
    except PacelineError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
def test_shared_batch_norm_has_no_second_derivative():
    for text in run_ranks(2, refused, "replicate=2", True, equation):
        assert "batch norm" in text
        assert "set micro_batch_size" in text


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2"])
def test_a_split_model_refuses_however_the_gradient_is_called(plan):
    for text in run_ranks(2, refused, plan, False, equation if plan == "tensor=2" else imported_equation):
        assert "takes gradients itself" in text
        assert "Fix: train it by replicate or shard" in text


def imported_equation(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = imported_grad(u.sum(), x, create_graph=True)
    return (first.sum(1, keepdim=True) - u).square().sum(), len(x)
