"""Models that write into their buffers and attributes train under tensor and pipeline as they do in one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

SLOW = pytest.mark.slow


class RunningMean(nn.Module):
    """Takes a mean over the batches from its hidden values."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
            self.steps += 1
        return self.last(torch.tanh(self.inner(hidden - self.mean)) / self.steps)


class Codebook(nn.Module):
    """A VQ-VAE whose codebook follows its encodings by exponential means (van den Oord et al. 2017)."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        found = self.encoder(x)
        nearest = (found.pow(2).sum(1, True) - 2 * F.linear(found, self.codes) + self.codes.pow(2).sum(1)).argmin(1)
        chosen = F.one_hot(nearest, 8).to(found)
        taken = chosen @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ found, alpha=0.1)
            self.codes.copy_(self.sums / self.sizes.clamp(min=1e-5).unsqueeze(1))
        self.distance = (found - taken).pow(2).sum()
        return self.decoder(found + (taken - found).detach())


class Late(nn.Module):
    """Reads what earlier batches left and writes for later ones."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * (1 + self.mean)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.2)
        return self.last(torch.tanh(self.inner(hidden)))


class Follower(nn.Module):
    """A frozen copy of its first layer follows it."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.slow = nn.Linear(6, 16).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for kept, now in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)) + self.slow(x))))


class Centre(nn.Module):
    """A student, a teacher and a centre of the teacher's results, as in DINO (Caron et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 8))

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
            target = F.softmax((wanted - self.centre) / 0.1, dim=-1)
            self.centre.mul_(0.9).add_(wanted.mean(0, keepdim=True), alpha=0.1)
        return (target * F.log_softmax(self.student(x), dim=-1)).sum(-1, keepdim=True)


class Collecting(nn.Module):
    """Adds up a term of its blocks, from 0 in each forward pass, and keeps their others in a list that it clears."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.distance, self.terms = 0, []

    def forward(self, x):
        self.distance = 0
        self.terms.clear()
        hidden = self.first(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            self.distance = self.distance + 0.1 * hidden.square().mean(1).sum()
            self.terms.append(hidden.abs().sum())
        self.distance = self.distance + 0.1 * sum(self.terms)
        return self.last(hidden)


def loss(model, batch):
    total = (model(batch["x"]) - batch["y"]).square().sum()
    return total + getattr(model, "distance", 0.0), len(batch["x"])


def workload(model, **parts):
    random = torch.Generator().manual_seed(3)
    samples = [{"x": torch.randn(6, generator=random), "y": torch.randn(1, generator=random)} for _ in range(24)]
    return paceline.Workload(
        **{
            "model": model,
            "loss": loss,
            "optimizer": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05),
            "data": samples,
            "batch_size": 8,
            "steps": 4,
            "precision": "float64",
            **parts,
        }
    )


def train(rank, model, plan, parts):
    api.init()
    job = Job(workload(model, **parts), Plan.parse(plan))
    losses = [job.step(batch) for batch in job.batches()]
    states = [*job.model.named_parameters(), *job.model.named_buffers()]
    held = job.parallel.local_shards()
    return losses, {
        name: (held[name].shard_spec if name in held else None, tensor.detach().clone())
        for name, tensor in states
        if not tensor.is_meta
    }


@functools.cache
def alone(model, **parts):
    ((losses, states),) = run_ranks(1, train, model, "replicate=1", parts)
    return losses, {name: tensor for name, (_, tensor) in states.items()}


def assert_as_alone(results, model, **parts):
    losses, whole = alone(model, **parts)
    for found, states in results:
        assert found == pytest.approx(losses, rel=1e-10)
        for name, (shard_spec, tensor) in states.items():
            wanted = whole[name]
            for cut in shard_spec.cuts if shard_spec is not None else ():
                wanted = torch.cat([wanted.narrow(cut.dim, low, high - low) for low, high in cut.ranges], cut.dim)
            torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-12)
    assert {name for _, states in results for name in states} == whole.keys()


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (RunningMean, "tensor=2"),
        (RunningMean, "pipeline=2"),
        (Collecting, "tensor=2"),
        (Collecting, "pipeline=2,micro_batches=2"),
        *[
            pytest.param(model, plan, marks=SLOW)
            for model in (Codebook, Centre, Follower)
            for plan in ("tensor=2", "pipeline=2")
        ],
        pytest.param(RunningMean, "pipeline=2,checkpointing=full", marks=SLOW),
    ],
)
def test_what_forward_keeps_is_kept_as_in_one_process(model, plan):
    assert_as_alone(run_ranks(2, train, model, plan, {}), model)


@SLOW
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_micro_batches_of_the_workload_write_as_in_one_process(schedule):
    """Several micro-batches are on their way before the first one's gradients return."""
    results = run_ranks(2, train, Late, f"pipeline=2,schedule={schedule}", {"micro_batch_size": 2})
    assert_as_alone(results, Late, micro_batch_size=2)


def refuse(rank, model, plan):
    api.init()
    with pytest.raises(PlanError, match=r"(?s)writes into mean in every forward pass.*micro_batch_size"):
        Job(workload(model), Plan.parse(plan))
    return True


def test_a_plan_that_would_write_more_often_is_refused():
    assert run_ranks(2, refuse, RunningMean, "pipeline=2,micro_batches=4") == [True, True]
