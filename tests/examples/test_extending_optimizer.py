"""The optimizers that the page on extending shows run under every axis, and end where one process does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
HEADING = "## An optimizer beyond one element\n"
PLANS = ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2")


def shown():
    """What the page defines."""
    (text,) = [page.read_text() for page in DOCS.glob("extending*.md") if HEADING in page.read_text()]
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    return names


def train_all(rank, plans):
    api.init()
    names = shown()
    workload = dataclasses.replace(names["workload"], precision="float64", clip_norm=1.0)
    found = {}
    for plan in plans:
        for kind, optimizer in {"lamb": workload.optimizer, "muon": names["MuonAdamW"]}.items():
            job = Job(dataclasses.replace(workload, optimizer=optimizer), Plan.parse(plan))
            found[kind, plan] = [job.step(batch) for batch in job.batches()]
            job.close()
    return found


def test_they_train_as_in_one_process_under_every_axis():
    alone = run_ranks(1, train_all, ["replicate=1"])[0]
    for found in run_ranks(2, train_all, PLANS):
        assert len(found) == 2 * len(PLANS)
        for (kind, _), losses in found.items():
            assert losses == pytest.approx(alone[kind, "replicate=1"], rel=1e-10)
    assert all(losses[-1] < losses[0] for losses in alone.values())
    assert torch.tensor(list(alone.values())).isfinite().all()
