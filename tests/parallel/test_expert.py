"""Mixtures of experts under `expert` and `context`, alone and beside each other axis, against one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.train.job import Job
from paceline.verify.ranks.keep_float64 import kept_wide

from support.expert_models import BATCH, MODELS, Mixture, Reader, rows, workload
from support.rank_comparisons import compare, train
from support.ranks import run_ranks
from support.sample import COMPLETE, INTEGRATION, is_sampled

# A router's loss compares samples that other ranks have.
REFUSED = {
    (name, f"{axis}=2,expert=2")
    for name in ("counted", "binned", "mixtral", "looped")
    for axis in ("replicate", "shard")
}
REFUSED.add(("looped", "expert=4"))  # five experts leave one of four ranks without any
TWO = ("expert=2", "context=2")
FOUR = (
    "expert=4",
    "replicate=2,expert=2",
    "shard=2,expert=2",
    "expert=2,tensor=2",
    "expert=2,context=2",
    "pipeline=2,expert=2",
)
# Without those that are much the same as others.
FEWER = [name for name in MODELS if name not in ("mixture", "counted_after", "binned_after", "olmoe")]
CELLS = [(name, plan) for plan in TWO for name in MODELS]
CELLS_OF_FOUR = [(name, plan) for plan in FOUR for name in FEWER]


def train_all(rank: int, cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    api.init()
    with kept_wide(True):  # routers compute in float32 whatever they get
        return {cell: train(workload(cell[0]), cell[1]) for cell in cells}


def is_sampled_cell(name: str, plan: str) -> bool:
    """True if CI runs the cell: of two ranks half, of four a sixth; every model and plan has some."""
    if plan in TWO:
        names = ("mixture", *FEWER)
        return name in names and is_sampled(names.index(name), TWO.index(plan), of=2)
    return is_sampled(FEWER.index(name), FOUR.index(plan), of=6)


@functools.cache
def alone() -> dict[tuple[str, str], Any]:
    """What each model ends with on one rank."""
    return run_ranks(1, train_all, [(name, "replicate=1") for name in MODELS])[0]


@functools.cache
def results(plans: tuple[str, ...], is_sample: bool) -> list[dict[tuple[str, str], Any]]:
    """What models end with under plans of equally many ranks, in the cells that CI runs or in the others."""
    cells = [cell for cell in (*CELLS, *CELLS_OF_FOUR) if cell[1] in plans and is_sampled_cell(*cell) == is_sample]
    return run_ranks(Plan.parse(plans[0]).world_size, train_all, cells, timeout_s=600)


def verdict(name: str, plan: str) -> str:
    plans = (plan,) if plan in FOUR else TWO
    ranks = [every[name, plan] for every in results(plans, is_sampled_cell(name, plan))]
    return compare(alone()[name, "replicate=1"], ranks)


def cell(name: str, plan: str) -> Any:
    """Four ranks take minutes on two cores."""
    mark = INTEGRATION if plan in FOUR else pytest.mark.slow
    return pytest.param(name, plan, marks=mark if is_sampled_cell(name, plan) else COMPLETE, id=f"{name}-{plan}")


def summed_in_order(rank: int) -> tuple[list[str], list[str]]:
    """Which parameters of experts are summed, and those of the model."""
    api.init()
    job = Job(workload("mixture", precision="float32"), Plan.parse("expert=2"))
    assert job.parallel.experts is not None
    names = [name for name, _ in job.model.named_parameters() if name in job.parallel.placed.of_experts()]
    summed = list(job.parallel.experts.parameters)
    job.close()
    return summed, names


@pytest.mark.slow
def test_expert_gradients_are_summed_in_model_order_on_all_ranks():
    """In that of a set each process would have its own."""
    for summed, names in run_ranks(2, summed_in_order):
        assert len(names) == 3
        assert summed == names


@pytest.mark.parametrize(("name", "plan"), [cell(*both) for both in (*CELLS, *CELLS_OF_FOUR)])
def test_a_plan_is_one_rank_or_is_refused(name, plan):
    said = verdict(name, plan)
    assert said.startswith("refused: ") if (name, plan) in REFUSED else said == "equal", said


def first_words(model, batch):
    """A score that leaves the experts out."""
    return {"size": (model.words(batch["ids"]).square().sum(), batch["ids"].numel())}


def evaluated(rank: int, plan: str) -> dict[str, float]:
    api.init()
    with kept_wide(True):
        job = Job(workload("mixture"), Plan.parse(plan))
        for batch in job.batches():
            job.step(batch)
        return job.evaluate(job.workload.data, first_words)


@pytest.mark.slow
def test_an_evaluation_may_leave_the_experts_out():
    (alone,) = run_ranks(1, evaluated, "replicate=1")
    assert run_ranks(2, evaluated, "expert=2") == [pytest.approx(alone, rel=1e-10)] * 2


class DropsInTraining(nn.Module):
    """A layer of experts in an evaluation, and none in training: rows meet dropout there."""

    def __init__(self):
        super().__init__()
        self.mixture, self.second = Reader(Mixture), Mixture()

    def dropping(self, layer, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        expert, order = layer.router(x).argmax(1).sort(stable=True)
        ends = torch.histc(expert.float(), layer.experts, 0, layer.experts - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(x[order], layer.up, offs=ends)
        if layer.training:
            made = F.dropout(made, 0.1)
        made = F.grouped_mm(made, layer.down, offs=ends)
        return torch.zeros_like(x).index_add(0, order, made).view(shape)

    def forward(self, ids):
        x = self.mixture.words(ids)
        return self.mixture(ids) + self.mixture.head(self.dropping(self.second, x))


def evaluated_otherwise(rank: int) -> str:
    api.init()
    with kept_wide(True):
        job = Job(workload("mixture", model=DropsInTraining), Plan.parse("expert=2"))
        job.step(next(job.batches()))
        try:
            job.evaluate(job.workload.data)
        except PlanError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_layers_that_an_evaluation_sees_otherwise_are_refused():
    for said in run_ranks(2, evaluated_otherwise):
        assert "should be used in the same way in every batch, in training and in evaluation" in said


def saved_and_continued(rank: int, plan: str, folder: str, is_second: bool) -> tuple[list[float], list[str]]:
    """The losses of the steps that this job takes, of four, and the parameters that this rank holds."""
    api.init()
    optimizer = functools.partial(adamw, lr=0.01)
    with kept_wide(True):
        job = Job(workload("switch", steps=4, optimizer=optimizer, data=rows(4 * BATCH)), Plan.parse(plan))
        if is_second:
            job.load(folder)
        losses = []
        for batch in job.batches():
            losses.append(job.step(batch))
            if not is_second and len(losses) == 2:
                job.save(folder)
    return losses, [name for name, tensor in job.model.named_parameters() if not tensor.is_meta]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "following"), [("expert=2", "replicate=1"), ("replicate=1", "expert=2"),
                                                  ("expert=2", "tensor=2")])  # fmt: skip
def test_expert_loop_checkpoint_loads_whole_under_any_plan(tmp_path, plan, following):
    """Each rank has the weights and AdamW's state of its own experts alone."""
    folder = str(tmp_path / "saved")
    first = run_ranks(Plan.parse(plan).world_size, saved_and_continued, plan, folder, False)
    for losses, _ in run_ranks(Plan.parse(following).world_size, saved_and_continued, following, folder, True):
        assert losses == pytest.approx(first[0][0][2:], rel=1e-10)
    if plan == "expert=2":
        held = [{name for name in names if ".expert_" in name} for _, names in first]
        assert {name.split(".expert_")[1][0] for name in held[0]} == {"0", "1"}
        assert {name.split(".expert_")[1][0] for name in held[1]} == {"2", "3"}
