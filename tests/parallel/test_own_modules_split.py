"""Models with a module that runs by its own code, split by every axis, against one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api

from support.looped_experts import LoopedExperts
from support.rank_comparisons import compare, train, two_steps
from support.ranks import run_ranks

WORDS, WIDTH = 32, 32
PLANS = (
    "tensor=2",
    "pipeline=2",
    "pipeline=2,micro_batches=4",
    "pipeline=2,schedule=zero_bubble,micro_batches=4",
    "pipeline=2,checkpointing=full",
    "context=2",
    "expert=2",
)
BY_PIECES = ("pipeline=2,micro_batches=4", "pipeline=2,schedule=zero_bubble,micro_batches=4")
REFUSED = {
    **{(name, "expert=2"): "no grouped matrix products" for name in ("branch", "inner", "counter", "recomputed")},
    **{("counter", plan): "the model writes into part.large in every forward pass" for plan in BY_PIECES},
    # Its branch depends on all samples together.
    **{("recomputed", plan): "should be the sum of its samples' losses" for plan in BY_PIECES},
}


class Branch(nn.Module):
    """Longer samples go another way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.one(row) if row.sum() > 0 else self.other(row).tanh() for row in x])


class Inner(nn.Module):
    """Takes a gradient on the way: that of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x - 0.1 * torch.autograd.grad(self.energy(x).sin().sum(), x, create_graph=True)[0]


class Counter(nn.Module):
    """Writes into a buffer how often it had a large value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("large", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.large += (x > 0.1).sum((0, 1))
        return x * (1.1 if self.large.sum() > 9 else 0.9)


class Recomputed(nn.Module):
    """A branch that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.utils.checkpoint.checkpoint(self._made, x, use_reentrant=False)
        return made

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() if x.sum() > 0 else self.linear(x)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "experts": functools.partial(LoopedExperts, WIDTH),
    "branch": Branch,
    "inner": Inner,
    "counter": Counter,
    "recomputed": Recomputed,
}


class Reader(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words, self.part, self.again = nn.Embedding(WORDS, WIDTH), part(), part()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + self.part(x)
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.down(F.gelu(self.up(x)))
        return self.last(x + self.again(x))


def loss(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    scores = model(ids[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def workload(name: str, **parts: Any) -> paceline.Workload:
    ids = torch.randint(WORDS, (16, 9), generator=torch.Generator().manual_seed(0))
    return two_steps(
        **{"model": functools.partial(Reader, PARTS[name]), "loss": loss, "data": list(ids), "batch_size": 8, **parts}
    )


def train_all(rank: int, cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    api.init()
    return {cell: train(workload(cell[0]), cell[1]) for cell in cells}


@functools.cache
def results(ranks: int, plans: tuple[str, ...]) -> list[dict[tuple[str, str], Any]]:
    return run_ranks(ranks, train_all, [(name, plan) for name in PARTS for plan in plans], timeout_s=300)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PARTS)
def test_a_plan_is_one_rank_or_is_refused(name: str, plan: str):
    alone = results(1, ("replicate=1",))[0][name, "replicate=1"]
    said = compare(alone, [rank[name, plan] for rank in results(2, PLANS)])
    expected = REFUSED.get((name, plan))
    assert said == "equal" if expected is None else said.startswith("refused: ") and expected in said, said
