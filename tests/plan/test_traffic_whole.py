"""What is promised of an update of whole parameters, the ledger counts: call by call, byte by byte, on every rank."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.profile.simulate import step_traffic
from paceline.train.job import Job

from support.closed_traffic import by_operation
from support.ranks import run_ranks
from support.whole_optimizers import GlobalStep, workload

CELLS = [
    (kind, plan)
    for kind in ("lamb", "muon")
    for plan in ("shard=2", "shard=2,zero=1", "tensor=2", "replicate=2,shard=2", "shard=2,tensor=2")
] + [("lamb", "pipeline=2,shard=2"), ("adafactor", "pipeline=2,tensor=2")]


def rows_of_first_steps(rank, cells):
    api.init()
    found = []
    for kind, text in cells:
        job = Job(workload(kind), Plan.parse(text))
        batch = next(iter(job.batches()))
        job.ledger.calls.clear()
        job.ledger.payload_bytes.clear()
        job.step(batch)
        found.append(by_operation(job.ledger.rows()))
        job.close(save=False)
    return found


@functools.cache
def found_on(ranks):
    cells = [cell for cell in CELLS if Plan.parse(cell[1]).world_size == ranks]
    found = run_ranks(ranks, rows_of_first_steps, cells, timeout_s=200)
    return {cell: [rows[number] for rows in found] for number, cell in enumerate(cells)}


@pytest.mark.parametrize(("kind", "text"), CELLS)
def test_the_ledger_counts_what_was_predicted(kind, text):
    plan = Plan.parse(text)
    for rank, found in enumerate(found_on(plan.world_size)[kind, text]):
        promised = by_operation(step_traffic(workload(kind), plan, rank))
        assert found == promised, rank
        assert any(collective in ("all_to_all", "broadcast") for collective, _ in promised)


class Matrix(torch.nn.Module):
    """6 by 4, of which each of two ranks has 3 rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, 4))

    def forward(self, rows):
        return rows @ self.weight.T


def test_counted_by_hand():
    """A value and its gradient go to the owner, the value comes back."""
    small = workload(
        "lamb",
        model=Matrix,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        data=list(torch.ones(8, 4)),
        precision="float32",
    )
    rows = [by_operation(step_traffic(small, Plan.parse("shard=2"), rank)) for rank in (0, 1)]
    assert sorted(row["all_to_all", "shard"] for row in rows) == [(2, 2 * 12 * 4), (2, 2 * 12 * 4 + 24 * 4)]


def test_traffic_prediction_refuses_plans_with_unfit_optimizers():
    coupled = workload("lamb", optimizer=lambda model: GlobalStep(model.parameters()))
    with pytest.raises(PlanError, match="updates a parameter from the others"):
        step_traffic(coupled, Plan.parse("shard=2"))
