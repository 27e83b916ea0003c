"""Graphs by shape of batch: as many as there is room for, and a line for the person where making them takes long."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.parallel import programs
from paceline.parallel.programs import Programs
from paceline.train.job import Job

from support.rank_comparisons import compare, held_here
from support.ranks import preload, run_ranks

preload("paceline.train.job", "paceline.train.loop_job", "paceline.parallel.split_forward")
LENGTHS = (3, 5, 4)


@dataclass
class Program:
    nodes: int


def test_the_one_used_last_stays():
    kept = Programs(most_nodes=100)
    made = []

    def find(key, nodes=40):
        return kept.find(key, lambda: made.append(key) or Program(nodes))

    for key in (1, 2, 1, 3, 1, 2):
        find(key)
    assert made == [1, 2, 3, 2]
    assert list(kept.kept) == [1, 2]
    find(4, 1000)  # larger than all the room: it runs, alone
    assert list(kept.kept) == [4]
    find(4)
    assert made == [1, 2, 3, 2, 4]


def test_an_error_keeps_nothing():
    kept = Programs()
    with pytest.raises(ZeroDivisionError):
        kept.find(1, lambda: 1 // 0)
    assert not kept.kept
    assert kept.find(1, lambda: Program(1)).nodes == 1


def test_many_shapes_that_take_long_are_told_once(monkeypatch):
    monkeypatch.setattr(programs, "_SAID_FROM_S", 0.01)
    kept = Programs()
    for key in range(20):
        kept.find(key, lambda: time.sleep(0.001) or Program(1))
        assert bool(kept.notices) == (key >= 11)
    (notice,) = kept.notices
    assert notice.startswith("the model was captured 12 times so far, in 0 s")


def test_shapes_that_come_again_and_quick_ones_are_not_told():
    kept = Programs()
    for key in range(20):
        kept.find(key % 3, lambda: Program(1))
        kept.find((), lambda: Program(1))
    assert (kept.made, kept.notices) == (4, [])


def loss(model, batch):
    return model(batch).square().sum(), batch.shape[0]


def padded(samples):
    return torch.stack([sample[: LENGTHS[int(samples[0][0, 0].abs() * 1000) % 3]] for sample in samples])


WORKLOAD = paceline.Workload(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    data=list(torch.randn(48, 5, 8, generator=torch.Generator().manual_seed(0))),
    batch_size=4,
    collate=padded,
    precision="float64",
    clip_norm=0.5,
    steps=10,
)


def trained(rank, plan, most_nodes):
    programs._SAID_FROM_S = 0.0
    programs._SAID_FROM_TIMES = 3
    api.init()
    job = Job(WORKLOAD, Plan.parse(f"{plan},check=off"))
    told = []
    job.notice = told.append
    kept = getattr(job.parallel.placed, "split", job.parallel.placed)
    if plan != "replicate=1":
        kept.programs.most_nodes = most_nodes
    steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
    made = (kept.programs.made, len(kept.programs.kept)) if plan != "replicate=1" else None
    result = steps, held_here(job)
    job.close()
    return result, made, told


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,micro_batches=1", "context=2"])
def test_a_graph_that_is_made_again_trains_as_before(plan):
    (alone, _, _) = run_ranks(1, trained, "replicate=1", 0)[0]
    for most_nodes in (1, 10**6):
        ranks = run_ranks(2, trained, plan, most_nodes)
        assert compare(alone, [result for result, _, _ in ranks]) == "equal"
        for _, (made, kept), told in ranks:
            assert (made, kept) == ((5, 1) if most_nodes == 1 else (3, 3))  # the length changes five times
            assert len(told) == 1, told
            assert "pad batches to fewer lengths" in told[0]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


def looped(rank):
    programs._SAID_FROM_S = 0.0
    programs._SAID_FROM_TIMES = 3
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse("tensor=2,check=off")))
    model = nn.Sequential(nn.Linear(8, 16), Branching(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(WORKLOAD.data, 4, collate_fn=padded))
    told = []
    job.notice = told.append
    for batch in loader:
        optimizer.zero_grad()
        job.backward(model(batch).square().mean())
        optimizer.step()
    job.close()
    return told


def test_a_loop_of_its_own_is_told():
    for told in run_ranks(2, looped):
        assert len(told) == 2, told
        assert told[0].startswith("1 runs by its own code")
        assert "pad batches to fewer lengths" in told[1]
