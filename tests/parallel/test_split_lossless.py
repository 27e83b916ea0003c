"""What a graph of forward operations would lose is refused, and what it holds is computed as one rank does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.graph.capture import capture
from paceline.graph.skeleton import skeleton
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.models import WORDS, _images, _rows, plain_loss, vector_loss
from support.ranks import run_ranks

Change = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class Changed(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(32, 48), nn.Linear(48, 10), change
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.change(self, self.first(x)))


def _hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 3)
    return x


REFUSED: dict[str, tuple[Change, str]] = {
    "autograd function with an object": (lambda m, x: Applied.apply(m.last, x), "called with a Linear"),
    "hook": (_hooked, "tensor hook"),
    "reentrant checkpoint": (
        lambda m, x: torch.utils.checkpoint.checkpoint(F.relu, x, use_reentrant=True),
        "use_reentrant=False",
    ),
    "autograd.grad": (lambda m, x: x + torch.autograd.grad(x.sum(), m.first.weight)[0].sum(), "autograd.grad"),
    "mask": (lambda m, x: x * x[x > 0].mean(), "looks at values"),
    "numpy": (lambda m, x: x * float(x.detach().numpy().sum()), "test_split_lossless.py"),
    "generator": (lambda m, x: x + torch.randn(x.shape, generator=m.generator), "Generator"),
    "torch.func": (lambda m, x: torch.func.grad(lambda row: row.sin().sum())(x), "takes gradients itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused(name: str):
    change, said = REFUSED[name]
    batch = {"vector": torch.randn(8, 32), "label": torch.zeros(8, dtype=torch.long)}
    with pytest.raises(WorkloadError, match=said):
        capture(skeleton(Changed(change)), vector_loss, batch, torch.device("cpu"))
    assert "apply" in vars(torch.autograd.Function)
    assert Straight.apply(torch.ones(1, requires_grad=True)).requires_grad


class Fourier(nn.Module):
    """Complex values cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + self.b(F.gelu(self.a(x)))
        return self.head(torch.fft.fft2(x).real)


class Written(nn.Module):
    """A counter, a plain tensor, a vector written through `out=`, pooled and squeezed pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.utils.spectral_norm(nn.Linear(32, 64))
        self.b, self.c, self.d = nn.Linear(32, 2), nn.Linear(2, 48), nn.Linear(48, 10)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale = torch.linspace(0.5, 1.5, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = F.adaptive_avg_pool1d(F.relu(self.a(x)), 32)
        return self.d(F.relu(self.c(self.b(x).squeeze(1))) * self.scale.to(x.dtype))


def _train(rank: int, plan: str, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    api.init()
    torch.set_num_threads(1)
    make, loss, data = {"Fourier": (Fourier, plain_loss, _rows), "Written": (Written, vector_loss, _images)}[name]
    workload = paceline.Workload(
        model=make,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=data(),
        batch_size=8,
        steps=3,
        precision="float64",
    )
    job = Job(workload, Plan.parse(plan))
    losses = [job.step(batch) for batch in job.batches()]
    return losses, {name: b.clone() for name, b in job.model.named_buffers() if not b.is_meta}


@pytest.mark.parametrize("name", ["Fourier", "Written"])
@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2", "pipeline=3", "shard=2"])
def test_losses_are_those_of_one_rank(name: str, plan: str):
    ((losses, buffers),) = run_ranks(1, _train, "replicate=1", name)
    for found, here in run_ranks(Plan.parse(plan).world_size, _train, plan, name):
        assert found == pytest.approx(losses, rel=1e-12)
        for key, value in here.items():
            torch.testing.assert_close(value, buffers[key], rtol=1e-12, atol=1e-12)


def _evaluate(rank: int, plan: str) -> dict[str, float]:
    api.init()

    def score(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"loss": vector_loss(model, batch)}

    workload = paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10)),
        loss=vector_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=_images(),
        evaluation=_images()[:17],
        score=score,
        batch_size=8,
        steps=1,
        precision="float64",
    )
    return Job(workload, Plan.parse(plan)).evaluate()


@pytest.mark.parametrize("plan", ["pipeline=2,shard=2", "shard=2,tensor=2"])
def test_split_evaluation_with_uneven_batches_equals_one_rank(plan: str):
    (one,) = run_ranks(1, _evaluate, "replicate=1")
    assert all(result == pytest.approx(one, rel=1e-12) for result in run_ranks(4, _evaluate, plan))
