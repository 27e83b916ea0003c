"""Batches of nested tensors, whose samples differ in size and are not padded."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm import api

from support.rank_comparisons import compare, train, two_steps
from support.ranks import run_ranks

RANKS = ("replicate=2", "shard=2")


class Net(nn.Module):
    """Attention within each sample of a jagged batch."""

    def __init__(self):
        super().__init__()
        self.query, self.value, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        query, value = (layer(x).unflatten(-1, [2, 4]).transpose(1, 2) for layer in (self.query, self.value))
        return self.last(F.scaled_dot_product_attention(query, value, value).transpose(1, 2).flatten(-2))


def samples():
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 7, (16,), generator=random).tolist()
    return [(torch.randn(n, 4, generator=random), torch.randn(n, 3, generator=random)) for n in sizes]


def collated(layout, rows):
    return tuple(torch.nested.nested_tensor(list(part), layout=layout) for part in zip(*rows, strict=True))


def jagged_loss(model, batch):
    return (model(batch[0]).values() - batch[1].values()).square().sum(), len(batch[1].values())


def strided_loss(model, batch):
    made, wanted = (nested.unbind() for nested in (model(batch[0]), batch[1]))
    total = sum((one - other).square().sum() for one, other in zip(made, wanted, strict=True))
    return total, sum(len(other) for other in wanted)


def mean(model, batch):
    return jagged_loss(model, batch)[0] / jagged_loss(model, batch)[1], 1


def declared(**parts):
    return two_steps(**{"model": Net, "loss": jagged_loss, "data": samples(), "batch_size": 8, **parts})


WORKLOADS = {
    "jagged": functools.partial(declared, collate=functools.partial(collated, torch.jagged)),
    "strided": functools.partial(
        declared,
        model=functools.partial(nn.Linear, 4, 3),
        loss=strided_loss,
        collate=functools.partial(collated, torch.strided),
    ),
    "mean": functools.partial(declared, loss=mean, collate=functools.partial(collated, torch.jagged)),
}


def train_all(rank, plans):
    api.init()
    return {(name, plan): train(make(), plan) for name, make in WORKLOADS.items() for plan in plans}


@functools.cache
def results(size, plans):
    return run_ranks(size, train_all, plans)


@pytest.mark.parametrize("name", ["jagged", "strided"])
@pytest.mark.parametrize("plan", RANKS)
def test_a_nested_batch_trains_as_one_rank(name, plan):
    alone = results(1, ("replicate=1",))[0][name, "replicate=1"]
    assert compare(alone, [rank[name, plan] for rank in results(2, (*RANKS, "tensor=2"))]) == "equal"


def test_what_is_no_sum_or_would_be_split_is_refused():
    for rank in results(2, (*RANKS, "tensor=2")):
        assert "should be the sum of its samples' losses" in rank["mean", "replicate=2"]
        assert "the batch has a nested one, whose samples differ in size" in rank["jagged", "tensor=2"]
