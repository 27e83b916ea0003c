"""What is promised of an update of whole parameters, the ledger counts: call by call, byte by byte, on every rank."""

from __future__ import annotations

import functools

import pytest

from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.plan.step_traffic import step_traffic
from paceline.plan.traffic import TensorFacts
from paceline.plan.traffic_whole import whole_updates
from paceline.profile.describe import describe
from paceline.train.job import Job

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
        found.append({(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in job.ledger.rows()})
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
    mesh = Mesh.parse(plan.mesh)
    for rank, found in enumerate(found_on(plan.world_size)[kind, text]):
        at = mesh.coordinate(rank)
        facts = describe(workload(kind), plan, at["tensor"], mesh.data_part(rank))
        predicted = step_traffic(plan, facts, at["shard"], at["tensor"])
        rows = predicted[at["pipeline"] if len(predicted) > 1 else 0]
        promised = {(row.collective, row.axis): (row.calls, row.payload_bytes) for row in rows}
        assert found == promised, rank
        assert any(collective == "all_to_all" for collective, _ in promised)


def test_counted_by_hand():
    """A matrix of 6 by 4, of which `tensor` leaves 6 by 2 and `shard` of that 3 by 2; its owner is rank (1, 0)."""
    piece = TensorFacts("matrix", (6, 2), "float32", 12, 4)
    rows = TensorFacts("matrix", (3, 2), "float32", 6, 4)
    other = TensorFacts("vector", (6,), "float32", 6, 4)  # the optimizer updates it in parts

    def sent(shard, tensor):
        at = {"shard": shard, "tensor": tensor}
        owners = {"matrix": {"shard": 1, "tensor": 0}}
        traffic = whole_updates(owners, {"matrix": 24, "vector": 6}, [(piece, rows), (other, other)], at)
        return {row.axis: (row.calls, row.payload_bytes) for row in traffic}

    assert sent(0, 0) == {"shard": (2, 2 * 6 * 4)}
    assert sent(1, 1) == {"shard": (2, 2 * 6 * 4 + 12 * 4), "tensor": (2, 2 * 12 * 4)}
    assert sent(1, 0) == {"shard": (2, 2 * 6 * 4 + 12 * 4), "tensor": (2, 2 * 12 * 4 + 24 * 4)}


def test_a_plan_whose_optimizer_is_refused_is_refused_when_it_is_described():
    coupled = workload("lamb", optimizer=lambda model: GlobalStep(model.parameters()))
    with pytest.raises(PlanError, match="updates a parameter from the others"):
        describe(coupled, Plan.parse("shard=2"))
