"""The table: twelve unmodified models under twelve plans, each held against one rank after three steps.

Equal means: every step's loss and gradient norm, and of every parameter, gradient and buffer the part that each
rank holds against the same part of the one-rank result, to 1e-10 in float64. No plan of the table may be refused.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard, ShardSpec

from support.models import MODELS, STORIES, workload
from support.rank_comparisons import compare, differences, train
from support.ranks import run_ranks
from support.sample import COMPLETE, INTEGRATION, SLOW, is_sampled

TWO = ("replicate=2", "shard=2", "tensor=2", "pipeline=2")
FOUR = (
    "shard=4",
    "tensor=4",
    "pipeline=4",
    "replicate=2,tensor=2",
    "replicate=2,shard=2",
    "pipeline=2,tensor=2",
    "pipeline=2,shard=2",
)
PAIR, TRIPLE = "shard=2,tensor=2", "replicate=2,pipeline=2,tensor=2"
ON_EIGHT = ("mlp", "encoder")  # eight ranks on two cores take their time; the others have the pair
# What is run in one set of processes: importing a model's code takes longer than training it.
GROUPS = (
    ("mlp", "encoder", "resnet"),
    ("bert", "distilbert", "roberta"),
    ("gpt2", "llama", "qwen2"),
    ("t5", "vit", "stories"),
)
FAST_MODELS, FAST_PLANS = ("mlp", "encoder", "resnet"), TWO
# A third layer adds nothing but the time to capture it: pipeline=4 cuts two layers, too.
TWO_LAYERS = ("bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "vit", "stories")

needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"the story model's weights are not at {STORIES}")


def plans_of(name: str) -> tuple[str, ...]:
    return (*TWO, *FOUR, TRIPLE if name in ON_EIGHT else PAIR)


CELLS = [(name, plan) for name in MODELS for plan in plans_of(name)]


def is_fast(name: str, plan: str) -> bool:
    return name in FAST_MODELS and plan in FAST_PLANS


def is_long(name: str, plan: str) -> bool:
    """Four ranks with a large package's models: minutes on two cores."""
    return name not in FAST_MODELS and Plan.parse(plan).world_size > 2


def is_sampled_cell(name: str, plan: str) -> bool:
    """True if CI runs the cell: of the long ones a fifth, of the others a quarter; every model and plan has some."""
    place = list(MODELS).index(name), plans_of(name).index(plan)
    if plan == TRIPLE:
        return is_sampled(*place)  # of its two models one
    return is_fast(name, plan) or is_sampled(*place, of=5 if is_long(name, plan) else 4)


def marks_of(name: str, plan: str) -> list[Any]:
    long = INTEGRATION if is_long(name, plan) else SLOW
    marks = [] if is_fast(name, plan) else [long if is_sampled_cell(name, plan) else COMPLETE]
    return [*marks, needs_stories] if name == "stories" else marks


def train_all(rank: int, cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """One job after another in the same processes: what it gave, or why it was refused."""
    api.init()
    return {cell: train(make(cell[0]), cell[1]) for cell in cells}


def make(name: str) -> paceline.Workload:
    model = functools.partial(MODELS[name][0], 2) if name in TWO_LAYERS else MODELS[name][0]
    return workload(name, model=model, clip_norm=0.5)


@functools.cache
def results(ranks: int, cells: tuple[tuple[str, str], ...]) -> list[dict[tuple[str, str], Any]]:
    return run_ranks(ranks, train_all, list(cells), timeout_s=600)


def cells_together(name: str, plan: str) -> tuple[tuple[str, str], ...]:
    """The cells that one set of processes runs, this one among them."""
    if is_fast(name, plan):
        return tuple((n, p) for n in FAST_MODELS for p in FAST_PLANS)
    size = Plan.parse(plan).world_size
    group = next(group for group in GROUPS if name in group)
    return tuple(
        (n, p)
        for n in group
        if n != "stories" or STORIES.exists()
        for p in plans_of(n)
        if Plan.parse(p).world_size == size and not is_fast(n, p)
        if is_sampled_cell(n, p) == is_sampled_cell(name, plan)
    )


def alone(name: str) -> Any:
    group = next(group for group in GROUPS if name in group)
    cells = tuple((n, "replicate=1") for n in group if n != "stories" or STORIES.exists())
    return results(1, cells)[0][name, "replicate=1"]


def verdict(name: str, plan: str) -> str:
    """`equal`, `refused: ...`, or what is wrong."""
    ranks = [every[name, plan] for every in results(Plan.parse(plan).world_size, cells_together(name, plan))]
    return compare(alone(name), ranks)


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param(*cell, marks=marks_of(*cell), id="-".join(cell)) for cell in CELLS]
)
def test_a_plan_is_one_rank(name, plan):
    assert verdict(name, plan) == "equal"


def test_a_part_that_differs_is_seen():
    """The comparison itself: a value, a gradient, a shape, a missing gradient."""
    full = torch.arange(1.0, 9.0, dtype=torch.float64)
    shard_spec = ShardSpec((8,))
    held = LocalShard(shard_spec, (0,))
    assert differences((full, full), (full.clone(), full.clone(), held)) == []
    assert differences((full, full), (full * (1 + 1e-9), full, held)) == ["value: off by 1.0e-09"]
    assert differences((full, full), (full, full + 8e-8, None)) == ["gradient: off by 1.0e-08"]
    assert differences((full, full), (full, None, None)) == ["gradient: one of the two has none"]
    assert "shape (4,)" in differences((full, None), (full[:4], None, None))[0]
    assert differences((full, None), (full * float("nan"), None, None)) == ["value: off by nan"]
