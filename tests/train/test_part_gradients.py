"""What a loop reads of gradients, and writes into them, where ranks have parts of them: as in one process."""

import json
import math
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan

from support.ranks import run_ranks

INPUTS = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
READ = {
    "norm": lambda first, last: first.norm(),
    "a vector norm": lambda first, last: torch.linalg.vector_norm(first, 1),
    "the largest": lambda first, last: torch.linalg.vector_norm(first, math.inf),
    "sum": lambda first, last: first.sum(),
    "mean": lambda first, last: first.mean(),
    "max": lambda first, last: first.max(),
    "amin of a dimension": lambda first, last: first.amin(0).sum(),
    "std": lambda first, last: first.std(),
    "var of a dimension": lambda first, last: first.var(0).max(),
    "any": lambda first, last: (first > 0).any().float() + (last > 0).any(),
    "all": lambda first, last: torch.isfinite(first).all(),
    "count": lambda first, last: (first > 0).count_nonzero(),
    "product with itself": lambda first, last: (first * first).sum().sqrt(),
    "norms of columns": lambda first, last: first.norm(dim=0).sum(),
    "norms of rows": lambda first, last: first.norm(dim=1).max(),
    "norms added up": lambda first, last: torch.stack([first.norm(), last.norm()]).sum(),
    "norm of norms": lambda first, last: torch.stack([first.norm(), last.norm()]).norm(),
    "foreach norms": lambda first, last: torch.stack(torch._foreach_norm([first, last])).sum(),
    "a ratio": lambda first, last: first.norm() / last.abs().max(),
    "total norm": lambda first, last: torch.nn.utils.get_total_norm([first, last]),
    "a mean of uneven rows": lambda first, last: mse_loss(first, torch.zeros_like(first)),
    "a row": lambda first, last: first[-1].sum(),
    "text": lambda first, last: float(f"{first.norm():.6f}"),
    "a whole number": lambda first, last: int(1000 * first.abs().sum()),
}
CHANGED = {
    "scaled": lambda first: first.mul_(0.5),
    "clamped": lambda first: first.clamp_(-0.01, 0.01),
    "by its norm": lambda first: first.div_(first.norm()),
    "by a number": lambda first: first.mul_(1 / first.norm().item()),
    "centred": lambda first: first.sub_(first.mean(dim=1, keepdim=True)),
    "centred by columns": lambda first: first.sub_(first.mean(dim=0, keepdim=True)),
    "foreach": lambda first: torch._foreach_mul_([first], 2),
    "masked": lambda first: first.masked_fill_(first > 0, 0.0),
    "a column": lambda first: first[:, 0].zero_(),
}
LOST = {
    "a row": lambda first: first[0].zero_(),
    "rows": lambda first: first[1:3].mul_(2),
    "a part": lambda first: first.split(4)[0].zero_(),
    "a diagonal": lambda first: first.diagonal().zero_(),
}


def model_and_gradients(plan):
    """Return the job, the model, its optimizer and two gradients of one batch."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = len(INPUTS) // job.data_size
    own = INPUTS[job.data_rank * share :][:share].double()
    job.backward(model(own).square().mean(), weight=share)
    gradients = job.gradients()
    return job, model, optimizer, (gradients["0.weight"], gradients["2.bias"])


def read_all(rank, plan):
    *_, (first, last) = model_and_gradients(plan)
    return {name: float(read(first, last)) for name, read in READ.items()}


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=2", "shard=2,zero=1", "replicate=2,shard=2"])
def test_numbers_that_are_read_are_those_of_the_whole(plan):
    (expected,) = run_ranks(1, read_all, "replicate=1")
    for found in run_ranks(Plan.parse(plan).world_size, read_all, plan):
        assert found == pytest.approx(expected, rel=1e-6)


def change_all(rank, plan, changes):
    answers = {}
    for name, change in changes.items():
        job, model, optimizer, (first, _) = model_and_gradients(plan)
        change(first)
        try:
            optimizer.step()
        except PacelineError as error:
            answers[name] = str(error)
            continue
        job.end_step()
        with job.gathered():
            answers[name] = model[0].weight.detach().clone()
    return answers


def change_by_name(rank, plan, kind):
    return change_all(rank, plan, {"changed": CHANGED, "lost": LOST}[kind])


@pytest.mark.parametrize(
    ("plan", "kind"), [("shard=2", "changed"), ("shard=2,zero=1", "changed"), ("shard=2,zero=1", "lost")]
)
def test_a_change_in_place_is_that_of_one_process(plan, kind):
    (expected,) = run_ranks(1, change_by_name, "replicate=1", kind)
    for found in run_ranks(2, change_by_name, plan, kind):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_a_write_that_would_be_lost_is_refused():
    for found in run_ranks(2, change_by_name, "shard=2", "lost"):
        for name in LOST:
            assert "add zero=1 to the plan" in found[name]


def read_on_rank_0(rank):
    *_, optimizer, (first, _) = model_and_gradients("shard=2")
    try:
        if rank == 0:
            float(first.norm())
        optimizer.step()
    except PacelineError as error:
        return str(error)
    return ""


def test_a_number_that_one_rank_reads_is_told_on_both():
    for text in run_ranks(2, read_on_rank_0):
        assert "reads a number of a parameter or gradient" in text
        assert "read it on every rank" in text
