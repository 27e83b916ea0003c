"""A loss that compares samples is refused where the batch is split; every plan that is named trains as one rank."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm import api
from paceline.train.precision import grouped_products_in_float64

from support.expert_models import workload as experts
from support.rank_comparisons import compare, train, two_steps
from support.ranks import run_ranks


class Pairs(nn.Module):
    """Two towers and a temperature, as CLIP has them."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.scale.exp()


def contrastive(model, batch):
    image, text, scale = model(*batch)
    scores = scale * image @ text.T
    labels = torch.arange(len(image))
    total = F.cross_entropy(scores, labels, reduction="sum") + F.cross_entropy(scores.T, labels, reduction="sum")
    return total / 2, len(image)


def decorrelated(model, batch):
    """As Barlow Twins: the features' correlation over the batch."""
    image, text, _ = model(*batch)
    image, text = ((each - each.mean(0)) / each.std(0) for each in (image, text))
    correlation = image.T @ text / len(image)
    return (correlation - torch.eye(16)).square().sum() * len(image), len(image)


def normalised(model, batch):
    """A batch norm of one's own."""
    image, text, _ = model(*batch)
    image = (image - image.mean(0)) / (image.var(0, unbiased=False) + 1e-5).sqrt()
    return (image - text).square().sum(), len(image)


def pairs(loss):
    random = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 12, generator=random), torch.randn(16, 10, generator=random))
    return two_steps(model=Pairs, loss=loss, data=rows, batch_size=8)


WORKLOADS = {
    "contrastive": functools.partial(pairs, contrastive),
    "decorrelated": functools.partial(pairs, decorrelated),
    "own batch norm": functools.partial(pairs, normalised),
    "router": functools.partial(experts, "counted"),
}


def train_all(rank, plans):
    api.init()
    with grouped_products_in_float64():
        return {name: {plan: train(make(), plan) for plan in plans} for name, make in WORKLOADS.items()}


@functools.cache
def refused_and_named():
    """What each rank finds under replicate and shard, and under the plans that the first refusal names."""
    refused = run_ranks(2, train_all, ("replicate=2", "shard=2"))
    named = dict.fromkeys(re.findall(r"\b(\w+)=N", refused[0]["contrastive"]["replicate=2"]))
    trained = run_ranks(2, train_all, tuple(f"{axis}=2" for axis in named), timeout_s=300)
    return refused, trained, run_ranks(1, train_all, ("replicate=1",))[0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_that_the_refusal_names_train_as_one_rank(name):
    refused, trained, alone = refused_and_named()
    for plan in ("replicate=2", "shard=2"):
        assert all("should be the sum of its samples' losses" in rank[name][plan] for rank in refused)
    plans = [*trained[0][name]]
    assert {"tensor=2", "pipeline=2", "expert=2"} == {*plans}
    if name != "router":
        plans.remove("expert=2")  # named for routers alone
    for plan in plans:
        assert compare(alone[name]["replicate=1"], [rank[name][plan] for rank in trained]) == "equal", plan


def test_the_refusal_names_the_collective_and_its_page():
    text = refused_and_named()[0][0]["contrastive"]["shard=2"]
    assert "job.all_gather(embeddings, grad=True), as docs/collectives.md shows" in text
