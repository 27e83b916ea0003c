"""A model without repeated blocks trains under activation checkpointing as it does without, and the person is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.cli import plan_memory
from paceline.comm import api
from paceline.nouns.device import Device
from paceline.nouns.plan import Plan
from paceline.nouns.profile import NOTHING_TO_RECOMPUTE
from paceline.plan.oom_advice import ways
from paceline.profile.simulate import simulate
from paceline.train.job import Job

from support.ranks import run_ranks


class Small(nn.Sequential):
    def __init__(self, norm):
        super().__init__(nn.Linear(20, 64, dtype=torch.float64), norm, nn.Tanh(), nn.Linear(64, 2, dtype=torch.float64))


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(*(Small(nn.BatchNorm1d(64, dtype=torch.float64)) for _ in range(2)))
        self[0].append(nn.Linear(2, 20, dtype=torch.float64))


MODELS = {
    "no blocks": lambda: Small(nn.Identity()),
    "no blocks, batch norm": lambda: Small(nn.BatchNorm1d(64, dtype=torch.float64)),
    "blocks with batch norm": Deep,
}


def workload(name):
    def loss(model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

    torch.manual_seed(0)
    return paceline.Workload(
        model=MODELS[name],
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=TensorDataset(torch.randn(16, 20, dtype=torch.float64)),
        batch_size=8,
        precision="float64",
    )


def train(rank, cases):
    """The losses of each model under each plan, and what was said of it."""
    api.init()
    found = []
    for name, line in cases:
        job = Job(workload(name), Plan.parse(line))
        found.append(([job.step(batch) for batch in job.batches()], list(job.parallel.placed.notices)))
    return found


CASES = [(name, f"replicate=1,checkpointing={mode}") for name in MODELS for mode in ("none", "full", "selective")]


def test_one_process():
    (found,) = run_ranks(1, train, CASES)
    by_case = dict(zip(CASES, found, strict=True))
    for (name, line), (losses, notices) in by_case.items():
        assert losses == by_case[name, "replicate=1,checkpointing=none"][0]
        mode = line.split("=")[-1]
        assert [f"checkpointing={mode} {NOTHING_TO_RECOMPUTE}" in notice for notice in notices] == [True] * (
            mode != "none"
        )


@pytest.mark.slow
def test_two_ranks():
    ((alone, _),) = run_ranks(1, train, [("no blocks", "replicate=1")])[0]
    lines = [f"{axis}=2,checkpointing=full" for axis in ("shard", "replicate", "tensor", "pipeline")]
    for found in run_ranks(2, train, [("no blocks", line) for line in lines]):
        for losses, _ in found:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-12, atol=0)


@pytest.mark.parametrize("plan", ["replicate=1", "shard=2", "tensor=2", "pipeline=2"])
def test_a_simulation_says_so_too(plan):
    profile = simulate(workload("no blocks, batch norm"), Plan.parse(f"{plan},checkpointing=full"))
    assert [notice for notice in profile.notices if NOTHING_TO_RECOMPUTE in notice]


def test_checkpointing_that_saves_nothing_is_no_way_out(monkeypatch):
    candidates = [way for way in ways(Plan(), 8, "float32") if way.kind in ("checkpointing", "micro-batch", "both")]
    plain = simulate(workload("no blocks"), Plan())
    same = simulate(workload("no blocks"), Plan.parse("checkpointing=full"))
    memory = SimpleNamespace(is_too_large=False, reserved=1)
    answers = [same if "checkpointing" in way.text else plain for way in candidates]
    simulators = SimpleNamespace(ask=lambda *_: answers)
    monkeypatch.setattr(plan_memory, "memory_of", lambda *_: memory)
    found = plan_memory._tried(candidates, simulators, None, Device.parse("16GB"))
    assert {way.kind for way, _, _ in found} == {"micro-batch"}
