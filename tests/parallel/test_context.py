"""Models with attention of every kind under `context`, alone and beside each other axis, against one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm import api
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.attention_models import LENGTH, MODELS, WORDS, shallow_workload, workload
from support.rank_comparisons import compare, train, two_steps
from support.ranks import run_ranks
from support.sample import COMPLETE, INTEGRATION, SLOW, is_sampled

REFUSED = {
    (name, f"context={ranks},context_by=heads") for name, ranks in (("drops", 2), ("drops", 4), ("rotary", 4))
}  # as docs/context.md says
TWO = ("context=2,context_by=ring", "context=2,context_by=heads", "context=2")
FOUR = (
    "context=4,context_by=ring",
    "context=4,context_by=heads",
    "context=4",
    "replicate=2,context=2",
    "shard=2,context=2",
    "context=2,tensor=2",
    "pipeline=2,context=2,context_by=ring",
)


def models_of(plan: str) -> list[str]:
    """The models under a plan: where ranks see other samples or other layers, they drop other values."""
    draws_apart = set(Mesh.parse(Plan.parse(plan).mesh).used()) - {"context", "tensor"}
    return [name for name in MODELS if name != "drops" or not draws_apart]


CELLS = [(name, plan) for plan in (*TWO, *FOUR) for name in models_of(plan)]


def is_shallow(plan: str) -> bool:
    """True for four ranks without a pipeline: a second layer adds nothing but the time to capture it."""
    return plan in FOUR and "pipeline" not in plan


def train_all(rank: int, cells: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], Any]:
    api.init()
    made = {}
    for name, plan, shallow in cells:
        made[name, plan, shallow] = train((shallow_workload if shallow else workload)(name), plan)
    return made


@functools.cache
def alone() -> dict[tuple[str, str, bool], Any]:
    """What each model ends with on one rank."""
    cells = [(name, "replicate=1", shallow) for name in MODELS for shallow in (False, True)]
    return run_ranks(1, train_all, cells)[0]


def is_sampled_cell(name: str, plan: str) -> bool:
    """True if CI runs the cell: of two ranks a third, of four a fifth; every model and plan has some."""
    row = list(MODELS).index(name)
    return is_sampled(row, TWO.index(plan)) if plan in TWO else is_sampled(row, FOUR.index(plan), of=5)


@functools.cache
def results(plans: tuple[str, ...], is_sample: bool) -> list[dict[tuple[str, str, bool], Any]]:
    """What models end with under plans of equally many ranks, in the cells that CI runs or in the others."""
    cells = [(name, plan, is_shallow(plan)) for plan in plans for name in models_of(plan)]
    cells = [cell for cell in cells if is_sampled_cell(*cell[:2]) == is_sample]
    return run_ranks(Plan.parse(plans[0]).world_size, train_all, cells, timeout_s=600)


def verdict(name: str, plan: str) -> str:
    plans = (plan,) if plan in FOUR else TWO
    ranks = [every[name, plan, is_shallow(plan)] for every in results(plans, is_sampled_cell(name, plan))]
    return compare(alone()[name, "replicate=1", is_shallow(plan)], ranks)


def cell(name: str, plan: str) -> Any:
    """Four ranks take minutes on two cores."""
    mark = INTEGRATION if plan in FOUR else SLOW
    return pytest.param(name, plan, marks=mark if is_sampled_cell(name, plan) else COMPLETE, id=f"{name}-{plan}")


@pytest.mark.parametrize(("name", "plan"), [cell(*both) for both in CELLS])
def test_a_plan_is_one_rank_or_is_refused(name, plan):
    said = verdict(name, plan)
    assert said.startswith("refused: ") if (name, plan) in REFUSED else said == "equal", said


class Uncommon(nn.Module):
    """Attention, an embedding whose gradient counts words, and soft labels or a plain score."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, scale_grad_by_freq=True)
        self.inward, self.last = nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, ids):
        query, key, value = self.inward(self.words(ids)).chunk(3, -1)
        angles = torch.linspace(0, 1, ids.shape[1])[:, None]  # float32, as of rotary positions, whatever runs beside it
        return self.last(F.scaled_dot_product_attention(query * angles, key * angles, value, is_causal=True))


def soft_loss(model, batch):
    soft = 0.9 * F.one_hot(batch["ids"], WORDS) + 0.1 / WORDS
    scores = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(scores, soft.flatten(0, 1).to(scores.dtype)) * len(batch["ids"]), len(batch["ids"])


def train_uncommon(rank, plan, precision):
    api.init()
    ids = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(5))
    data = [{"ids": row} for row in ids % 7]  # words come several times
    return train(two_steps(model=Uncommon, loss=soft_loss, data=data, batch_size=4, precision=precision), plan)


@pytest.mark.slow
def test_context_row_means_and_scaled_gradients_match_one_rank():
    alone = run_ranks(1, train_uncommon, "replicate=1", "float64")[0]
    assert compare(alone, run_ranks(2, train_uncommon, "context=2", "float64")) == "equal"


class Hidden(nn.Module):
    """Two masks fill one after the other, so that some rows see nothing; then queries that all samples share."""

    def __init__(self, fill):
        super().__init__()
        self.fill = fill
        self.words, self.inward, self.last = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(32, WORDS)
        self.shared = nn.Parameter(torch.randn(1, 2, 16))

    def forward(self, ids):
        query, key, value = self.inward(self.words(ids)).chunk(3, -1)
        places = torch.arange(ids.shape[1])
        least = torch.finfo(query.dtype).min if self.fill is None else self.fill
        scores = (query @ key.transpose(1, 2) / 4).masked_fill(places[:, None] < places, least)
        scores = scores.masked_fill((ids == 0)[:, None], least)
        seen = scores.softmax(-1) @ value
        summary = F.scaled_dot_product_attention(self.shared, key, value).mean(1, keepdim=True)
        return self.last(torch.cat([seen, summary.expand_as(seen)], -1))


def next_word(model, batch):
    ids = batch["ids"]
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel()


def cut_to_one(samples):
    """A batch with the word 1 is too short for two ranks."""
    ids = torch.stack([sample["ids"] for sample in samples])
    return {"ids": ids[:, -1:] if (ids == 1).any() else ids}


def train_hidden(rank, plan, fill):
    api.init()
    ids = torch.randint(2, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(5))
    ids[6, 3] = 1
    ids[::2, :2] = 0  # causal rows that see padding alone
    ids[1, :] = 0
    data = [{"ids": row} for row in ids]
    short = [{"ids": row[-1:]} for row in ids]  # too short for two ranks
    workload = two_steps(
        model=functools.partial(Hidden, fill), loss=next_word, data=data, batch_size=4, collate=cut_to_one
    )
    job = Job(workload, Plan.parse(plan))
    scored = [job.evaluate(short)["loss"]]
    means = [job.step(batch) for batch in job.batches()]
    return means + scored + [job.evaluate(short)["loss"], job.evaluate(data)["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "fill"), [("", None), (",context_by=ring", None), (",context_by=ring", -1e9)])
def test_context_empty_rows_and_short_evaluations_match_one_rank(way, fill):
    (alone,) = run_ranks(1, train_hidden, "replicate=1", fill)
    assert run_ranks(2, train_hidden, "context=2" + way, fill) == [pytest.approx(alone, rel=1e-10)] * 2


@pytest.mark.slow
def test_positions_in_float32_beside_bf16():
    """Autocast gives query and key another dtype than the value; torch's own attention casts them."""
    ((alone, _),) = run_ranks(1, train_uncommon, "replicate=1", "bf16")
    for steps, _ in run_ranks(2, train_uncommon, "context=2", "bf16"):
        for one, other in zip(alone, steps, strict=True):
            assert other == pytest.approx(one, rel=1e-2)
