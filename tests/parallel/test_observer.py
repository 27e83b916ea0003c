"""Observers follow a step under every strategy, in the order in which they were added, and change nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.parallel.observer import StepObserver
from paceline.train.job import Job

from support.models import workload
from support.ranks import run_ranks


class Notes(StepObserver):
    """Writes down what it is told; `lines` may be shared."""

    def __init__(self, lines, name=""):
        self.lines = lines
        self.name = name

    def phase_begins(self, phase):
        self.lines.append(f"{self.name}{phase}")

    def block_gathered(self, prefix, module):
        self.lines.append(f"{self.name}gathered {prefix}")

    def backward_ended(self, model):
        self.lines.append(f"{self.name}backward")

    def gradients_reduced(self, parameters):
        counts = [parameter.grad is not None for parameter in parameters.values()]
        self.lines.append(f"{self.name}{sum(counts)} of {len(counts)} have gradients")

    def parameters_updated(self, parameters, optimizer):
        counts = [parameter in optimizer.state for parameter in parameters.values()]
        self.lines.append(f"{self.name}{sum(counts)} of {len(counts)} have states")


def watched(rank, line, observers):
    api.init()
    job = Job(workload("mlp"), Plan.parse(line))
    lines: list[str] = []
    for name in observers:
        job.parallel.observe(Notes(lines, name))
    losses = [job.step(batch) for batch in job.batches()]
    sums = [float(parameter.detach().double().sum()) for parameter in job.parallel.placed.updated().values()]
    job.close()
    return lines, losses, sums


PARAMETERS = len(list(workload("mlp").model().parameters()))


@pytest.mark.parametrize("line", ["replicate=2", "tensor=2", "shard=2", "pipeline=2"])
def test_a_step_is_followed_and_not_changed(line):
    watched_ranks = run_ranks(2, watched, line, ["", "again "])
    for rank, (_, losses, sums) in enumerate(run_ranks(2, watched, line, [])):
        lines = watched_ranks[rank][0]
        assert watched_ranks[rank][1:] == (losses, sums)
        assert lines[1::2] == [f"again {text}" for text in lines[::2]]
        step = lines[: len(lines) // 3 : 2]
        phases = [text for text in step if text in ("gather", "forward", "reduce", "update")]
        assert phases == ["gather", "forward", "reduce", "update"]
        parameters = len(sums)
        assert step[-3:] == [
            f"{parameters} of {parameters} have gradients",
            "update",
            f"{parameters} of {parameters} have states",
        ]
        gathered = [text for text in step if text.startswith("gathered")]
        assert bool(gathered) == (line == "shard=2")
    if line in ("replicate=2", "shard=2"):
        assert parameters == PARAMETERS


def watched_loop(rank, line, is_watched):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(line)))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    job, model, optimizer = paceline.prepare(model, torch.optim.AdamW(model.parameters()))
    lines: list[str] = []
    if is_watched:
        job.parallel.observe(Notes(lines))
    for step in range(2):
        job.backward(model(torch.full((2, 4), 1.0 + step + rank)).square().mean(), weight=2)
        optimizer.step()
        optimizer.zero_grad()
    job.end_step()
    with job.gathered():
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    return lines, sums


@pytest.mark.parametrize("line", ["replicate=2", "shard=2"])
def test_a_step_of_a_loop_is_followed_and_not_changed(line):
    plain = run_ranks(2, watched_loop, line, False)
    for rank, (lines, sums) in enumerate(run_ranks(2, watched_loop, line, True)):
        assert sums == plain[rank][1]
        gathered = [text for text in lines if text.startswith("gathered")]
        assert bool(gathered) == (line == "shard=2")
        step = ["backward", "reduce", "4 of 4 have gradients", "update", "reduce", "4 of 4 have states"]
        assert [text for text in lines if text not in gathered] == step * 2


def raising(rank):
    api.init()
    job = Job(workload("mlp"), Plan())
    before = [parameter.detach().clone() for parameter in job.model.parameters()]

    class Fails(StepObserver):
        def phase_begins(self, phase):
            if phase == "update":
                raise RuntimeError("the disk of the timeline is full")

    job.parallel.observe(Fails())
    with pytest.raises(RuntimeError, match="the disk of the timeline is full"):
        job.step(next(iter(job.batches())))
    return all(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))


def test_observer_error_ends_the_step_before_any_update():
    assert run_ranks(1, raising) == [True]
