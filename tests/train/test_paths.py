"""A path that depends on the batch, and buffers that forward writes, are said once, with line and name."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

# One sample wants many rounds, and the trial before the first step sees five others.
INPUTS = torch.full((16, 4), 0.5)
INPUTS[15] = 8.0


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.path(self.layer(x), x)


class Halting(Base):
    def path(self, h, x):
        for _ in range(20):
            h = h.tanh()
            if bool((h.abs().sum(1) * 4 > x.sum(1)).all()):  # line: halts
                break
        return h


class Equilibrium(Base):
    def path(self, h, x):
        left = x.sum(1)
        while left.max() > 1:  # line: settles
            left = left / 2
            h = h * 0.9
        return h


class ByItem(Base):
    def path(self, h, x):
        for _ in range(int(x.max())):
            h = h.sin()
        rest = x.max().item()
        while rest > 1:
            rest = (x.max() / 2).item() if rest > 4 else 0.0  # line: reads
            h = h * 0.9
        return h


class Harmless(Base):
    def path(self, h, x):
        if torch.isnan(h).any():
            raise ValueError("NaN")
        self.seen = h.mean().item()
        return h * int(x.shape[1] > 0)


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def notices_of(rank, kinds, mesh, form):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(mesh)))
    api.init()
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        told = []
        try:
            if form == "declared":
                data = None
                job = Job(paceline.Workload(model=kind, loss=loss, optimizer=sgd, data=data, steps=2), Plan.parse(mesh))
                job.notice = job.paths.notice = lambda text, everywhere=False, told=told: told.append(text)
                for _ in range(2):
                    job.step(INPUTS[rank * 8 :][:8])
                job._finish_step()
            else:
                model = kind()
                job, model, optimizer = paceline.prepare(model, sgd(model))
                job.notice = job.paths.notice = lambda text, everywhere=False, told=told: told.append(text)
                for _ in range(2):
                    optimizer.zero_grad()
                    job.backward(model(INPUTS[rank * 8 :][:8]).square().mean(), weight=8)
                    optimizer.step()
                job.end_step()
        except PacelineError as error:
            told.append(str(error))
        found.append([text for text in told if "it was not checked that" not in text])
    return found


@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("form", ["declared", "loop"])
def test_a_path_that_depends_on_the_batch_is_said_with_its_line(mesh, form):
    kinds = [Halting, Equilibrium, ByItem, Harmless]
    marks = ["line: halts", "line: settles", "line: reads", None]
    source = Path(__file__).read_text().splitlines()
    for found in run_ranks(2, notices_of, kinds, mesh, form):
        for told, mark in zip(found, marks, strict=True):
            lines = re.findall(r"test_paths.py:(\d+)", " ".join(told))
            assert [source[int(line) - 1].partition("# ")[2] for line in lines] == ([mark] if mark else [])


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        self.queue = x[0].detach().clone()
        self.table = torch.arange(4.0)
        return self.norm(self.layer(x))


@pytest.mark.parametrize("mesh", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("form", ["declared", "loop"])
def test_buffers_that_forward_writes_are_named(mesh, form):
    for (told,) in run_ranks(2, notices_of, [Writes], mesh, form):
        said = [text for text in told if "writes into buffers of its state" in text]
        assert len(said) == 1
        assert "seen (the largest), " in said[0] or "queue (the mean), " in said[0]
        assert "table" not in said[0]
        assert "running" not in said[0]
