"""Ranks whose copies come apart are told which tensor and which ranks, and no mixture is saved."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.manifest import read_manifest
from paceline.comm import api
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.train import replicas
from paceline.train.job import Job

from support.ranks import run_ranks

FOUR = torch.tensor([1.0, -2.0, 3.0, -4.0])
LONG = torch.arange(300_001)
CHANGED = {
    "a swap": (FOUR, FOUR[[1, 0, 2, 3]]),
    "every sign": (FOUR, -FOUR),
    "the sign of two": (FOUR.double(), FOUR.double() * torch.tensor([-1, 1, -1, 1])),
    "the last bit": (FOUR, torch.nextafter(FOUR, FOUR + 1)),
    "bfloat16": (FOUR.bfloat16(), FOUR.bfloat16() * torch.tensor([1, 1, 1, -1], dtype=torch.bfloat16)),
    "an imaginary part": (torch.complex(FOUR, FOUR), torch.complex(FOUR, -FOUR)),
    "zero and minus one": (torch.zeros(4, dtype=torch.int64), torch.full((4,), -1)),
    "one of seven bytes": (torch.zeros(7, dtype=torch.bool), torch.arange(7) == 6),
    "far apart": (LONG, LONG.index_copy(0, torch.tensor([0, 300_000]), torch.tensor([300_000, 0]))),
    "permuted rows": (torch.eye(1024), torch.eye(1024).roll(1, 0)),
    "an order of tensors": (torch.cat([FOUR, FOUR[:1]]), torch.cat([FOUR[:1], FOUR])),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_digest_sees_each_bit_and_its_place(kind):
    before, after = CHANGED[kind]
    assert replicas.digest_of(before) == replicas.digest_of(before.clone())
    assert replicas.digest_of(before) != replicas.digest_of(after)


def test_a_digest_is_of_values_not_of_their_layout():
    values = torch.randn(2, 3, 4, 5)
    for other in (values.to(memory_format=torch.channels_last), torch.cat([values, values])[2:]):
        assert replicas.digest_of(other) == replicas.digest_of(values)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.last = nn.Linear(256, 2)
        self.register_buffer("scale", torch.ones(256))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu() * self.scale)


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def declared(**parts):
    whole = {"model": Net, "loss": loss, "optimizer": adam, "data": torch.randn(40, 64), "batch_size": 8, **parts}
    torch.manual_seed(0)
    return paceline.Workload(**whole)


def add_to_weight(model, optimizer):
    next(model.parameters()).data.add_(1.0)


def add_to_bias(model, optimizer):
    with torch.no_grad():
        model.norm.bias.add_(1e-6)


def write_buffer(model, optimizer):
    model.scale.mul_(2)


def change_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def change_moment(model, optimizer):
    optimizer.state[model.last.bias]["exp_avg"].add_(1.0)


def nan_everywhere(model, optimizer):
    model.scale.fill_(torch.nan)


CHANGES = [add_to_weight, add_to_bias, write_buffer, change_rate, change_moment]


def train_declared(rank, mesh, changes, at, folder=None, changing=(1,)):
    """Return for each change the error and the step after which it came, and whether something was saved."""
    api.init()
    answers = []
    for number, change in enumerate(changes):
        job = Job(declared(), Plan.parse(mesh))
        try:
            for batch in job.batches():
                job.step(batch)
                if job.step_number == at and job.rank in changing:
                    change(job.model, job.optimizer)
                if folder is not None:
                    job.save(f"{folder}/{number}")
        except PacelineError as error:
            answers.append((str(error), job.step_number))
        else:
            answers.append(("", job.step_number))
    return answers


NAMES = ["first.weight differs", "norm.bias differs", "scale differs", "lr of the", "exp_avg of the optimizer's state"]


@pytest.mark.parametrize(
    ("size", "mesh", "changes"),
    [
        (2, "replicate=2", CHANGES),
        (4, "replicate=2,shard=2", [add_to_weight, write_buffer, change_rate]),
        (2, "shard=2", [write_buffer, change_rate]),
        (2, "shard=2,zero=1", [change_rate]),
        (2, "tensor=2", [add_to_bias, write_buffer, change_rate]),
        (4, "replicate=2,tensor=2", [add_to_weight]),
        (4, "pipeline=2,replicate=2", [change_rate]),
    ],
)
def test_a_change_by_one_rank_ends_the_first_steps(size, mesh, changes):
    for answers in run_ranks(size, train_declared, mesh, changes, 2):
        for change, (text, step) in zip(changes, answers, strict=True):
            assert NAMES[CHANGES.index(change)] in text
            assert step == 2


def test_what_all_ranks_do_is_no_difference():
    for answers in run_ranks(2, train_declared, "replicate=2", [*CHANGES, nan_everywhere], 2, None, (0, 1)):
        assert [step for _, step in answers[:-1]] == [5] * len(CHANGES)
        assert "the loss should be a finite number" in answers[-1][0]


def test_a_later_change_is_told_at_the_end(tmp_path):
    for answers in run_ranks(2, train_declared, "replicate=2", [add_to_weight], 4):
        assert "after step 5 first.weight differs between rank 0 and rank 1" in answers[0][0]


def test_no_mixture_is_saved(tmp_path):
    for answers in run_ranks(2, train_declared, "replicate=2", [add_to_weight], 4, str(tmp_path)):
        assert "after step 4 first.weight differs" in answers[0][0]
    assert read_manifest(tmp_path / "0")["step"] == 3


def train_loop(rank, mesh, changes, at):
    answers = []
    for change in changes:
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(mesh)))
        torch.manual_seed(0)
        model = Net()
        loader = torch.utils.data.DataLoader(torch.randn(40, 64), batch_size=8)
        job, model, optimizer, loader = paceline.prepare(model, adam(model), loader)
        try:
            for batch in loader:
                optimizer.zero_grad()
                job.backward(model(batch).square().mean())
                optimizer.step()
                if job.step_number == at and job.rank == 1:
                    change(model, optimizer)
            job.end_step()
        except PacelineError as error:
            answers.append((str(error), job.step_number))
        else:
            answers.append(("", job.step_number))
    return answers


@pytest.mark.parametrize(
    ("size", "mesh", "changes"),
    [
        (2, "replicate=2", CHANGES),
        (2, "shard=2", [write_buffer, change_rate]),
        (2, "shard=2,zero=1", [add_to_weight, change_rate]),
        (4, "replicate=2,shard=2", [add_to_bias]),
        (2, "tensor=2", [add_to_bias, change_rate]),
    ],
)
def test_a_change_by_one_rank_ends_a_loop_too(size, mesh, changes):
    for answers in run_ranks(size, train_loop, mesh, changes, 2):
        for change, (text, step) in zip(changes, answers, strict=True):
            if change is not write_buffer:  # the step's end makes buffers equal
                assert NAMES[CHANGES.index(change)] in text
                assert step == 2


def compared_later(rank):
    """A change after the first steps is told at the next comparison, which is the step's own without a device."""
    replicas.COMPARED_EVERY = 5
    return train_loop(rank, "replicate=2", [add_to_weight], 4)


def test_a_loop_is_compared_every_so_many_steps():
    for answers in run_ranks(2, compared_later):
        assert "after step 5 first.weight differs between rank 0 and rank 1" in answers[0][0]


class Copied:
    """`HostCopy` without a device."""

    def __init__(self, numel, dtype, device):
        pass

    def begin(self, make):
        self.numbers = make().clone()

    def read(self):
        return self.numbers.tolist()


def test_a_device_is_read_a_step_later(monkeypatch):
    monkeypatch.setattr(replicas, "HostCopy", Copied)
    monkeypatch.setattr(replicas, "_is_host", lambda device: False)
    seen = []

    class Two:
        size, peers = 2, (0, 1)

        def all_gather(self, rows):
            seen.append(rows)
            return [rows, rows]

    compared = replicas.Replicas(Two(), lambda: [replicas.Shared("weight", FOUR, (0, 1))])
    due = []
    for step in range(1, 103):
        due.append(compared.is_due(step, step))
        compared.after_step(step, step)
        if step == 1:
            assert seen == []
    assert [step for step, is_due in enumerate(due, 1) if is_due] == [1, 2, 3, 4, 100, 101]
    assert len(seen) == 4
