"""`job.copy_weights`: a student that begins as layers of its teacher ends under every plan as in one process."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
INPUTS = torch.randn(6, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Some layers, batch statistics and a head that is tied to the first matrix."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(layers)])
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4, bias=False)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, inputs):
        hidden = self.first(inputs) + self.tied(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(self.norm(hidden))


def copy_plainly(source, target):
    target.load_state_dict(source.state_dict())


def train(teacher, student, optimizers, backward, copy_from, rows=slice(None)):
    """Two steps of the teacher; the student becomes its layers 1 and 3 and takes two steps towards it."""
    for number, inputs in enumerate(INPUTS[:4]):
        inputs = inputs[rows]
        if number == 2:
            teacher.requires_grad_(False).eval()
            for part in ("first", "norm", "last", "tied"):
                copy_from(getattr(teacher, part), getattr(student, part))
            for layer, its in enumerate(student.layers):
                copy_from(teacher.layers[2 * layer + 1], its)
        if number < 2:
            loss = (teacher(inputs) - inputs.flip(1)).square().mean()
        else:
            with torch.no_grad():
                wanted = teacher(inputs)
            loss = (student(inputs) - wanted).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(loss)
        optimizers[number // 2].step()


def nets():
    torch.manual_seed(0)
    teacher, student = Net(4).double(), Net(2).double()
    return teacher, student, [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (teacher, student)]


def train_on_rank(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    teacher, student, optimizers = nets()
    job, *_ = paceline.prepare(teacher, student, *optimizers)
    each = len(INPUTS[0]) // job.data_size
    rows = slice(job.data_rank * each, (job.data_rank + 1) * each)
    train(teacher, student, optimizers, lambda loss: job.backward(loss, weight=each), job.copy_weights, rows)
    return [
        job.parallel.models.full_tensor(parameter).clone() for parameter in job.model.parameters()
    ], student.norm.running_mean


@pytest.fixture(scope="module")
def alone():
    teacher, student, optimizers = nets()
    train(teacher, student, optimizers, lambda loss: loss.backward(), copy_plainly)
    return [*teacher.parameters(), *student.parameters()], student.norm.running_mean


@pytest.mark.parametrize(
    "plan", ["replicate=1", "replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2"]
)
def test_the_student_ends_as_in_one_process(alone, plan):
    for parameters, mean in run_ranks(Plan.parse(plan).world_size, train_on_rank, plan):
        torch.testing.assert_close(parameters, [each.detach() for each in alone[0]], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(mean, alone[1], rtol=1e-9, atol=1e-11)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["replicate=2,shard=2", "replicate=2,tensor=2"])
def test_four_ranks_end_as_one_process(alone, plan):
    for parameters, _ in run_ranks(4, train_on_rank, plan):
        torch.testing.assert_close(parameters, [each.detach() for each in alone[0]], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (lambda own, other: other, lambda own, other: own.layers[0], r"this Linear is in none of them"),
        (lambda own, other: own.layers[0], lambda own, other: other, r"this Linear is in none of them"),
        (
            lambda own, other: own.first,
            lambda own, other: own.layers[0],
            r"weight is \(6, 4\) in the source and \(6, 6\) in the target",
        ),
        (lambda own, other: own.first, lambda own, other: own.last, r"bias is \(6,\) in the source and missing in"),
    ],
)
def test_what_is_refused(source, target, found):
    model = Net(1)
    before = copy.deepcopy(model.state_dict())
    job, *_ = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Linear(6, 6)
    with pytest.raises(UsageError, match=found):
        job.copy_weights(source(model, other), target(model, other))
    torch.testing.assert_close(model.state_dict(), before)
