"""A whole copy of the model on every rank, under every plan, and training as if it had not been made."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import api
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

PLANS = ["replicate=2", "shard=2", "shard=2,zero=1", "shard=2,zero=2", "tensor=2", "pipeline=2"]
INPUTS = torch.linspace(-1, 1, 3 * 16, dtype=torch.float64).view(3, 16)


class Net(nn.Module):
    """Two layers, wide enough for `tensor` to split them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 256), nn.Linear(256, 16)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x):
        return self.second(self.drop(F.gelu(self.first(x)))) + self.shift


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()


def workload(**parts):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 16, generator=random, dtype=torch.float64)
    given = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
        "data": TensorDataset(rows, rows.flip(1)),
        "batch_size": 16,
        "steps": 6,
        "precision": "float64",
    }
    return paceline.Workload(**given | parts)


def train(plan, at, dropout=True):
    """Losses, and the copy of step `at`."""
    job = Job(workload(model=Net if dropout else without_dropout), Plan.parse(plan))
    losses, copy = [], None
    for batch in job.batches():
        losses.append(job.step(batch))
        if job.step_number == at:
            copy = job.whole_model()
    assert all(not parameter.is_meta for parameter in (copy or nn.Module()).parameters())
    job.close()
    return losses, copy


def without_dropout():
    model = Net()
    model.drop.p = 0.0
    return model


def train_all(rank, plan):
    api.init()
    _, copy = train(plan, 3, dropout=False)
    assert not copy.training
    with torch.no_grad():
        for _ in range(1 + rank):  # no collective: ranks may call it unequally often
            outputs = copy(INPUTS)
    with_copy, _ = train(plan, 3)
    without, _ = train(plan, 0)
    return {name: value.numpy() for name, value in copy.state_dict().items()}, outputs.numpy(), with_copy, without


@functools.cache
def alone():
    return train_all(0, "replicate=1")


@pytest.mark.parametrize("plan", PLANS)
def test_the_copy_is_the_model_of_one_process(plan):
    state, outputs, *_ = alone()
    for found, here, with_copy, without in run_ranks(2, train_all, plan):
        assert {*found} == {*state}
        for name, value in state.items():
            assert abs(found[name] - value).max() < 1e-12, name
        assert abs(here - outputs).max() < 1e-12
        assert with_copy == without, "the copy changed the training"


def test_it_does_not_follow_later_steps():
    api.init()
    job = Job(workload(), Plan())
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 1:
            copy = job.whole_model()
            before = copy.first.weight.clone()
    assert torch.equal(copy.first.weight, before)
    assert not torch.equal(job.model.first.weight, before)


def test_a_workload_that_returns_one_model_is_refused():
    api.init()
    model = Net()
    job = Job(workload(model=lambda: model), Plan())
    with pytest.raises(WorkloadError, match=r"returns one and the same model each time\n  fix: write model=lambda"):
        job.whole_model()


def test_a_loop_of_ones_own_is_refused():
    model = Net()
    job, *_ = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="handed a model that is made already"):
        job.whole_model()


def ask_for_state(rank, plan):
    api.init()
    job = Job(workload(), Plan.parse(plan))
    for batch in job.batches():
        job.step(batch)
    try:
        found = job.model.state_dict()
    except WorkloadError as error:
        found = error.fix
    whole = job.whole_model().state_dict()
    job.close()
    return found, whole


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,zero=1", "shard=2", "tensor=2", "pipeline=2"])
def test_a_state_dict_is_whole_or_refused(plan):
    """Parts of parameters would be written to a file as if they were the model's."""
    is_whole = plan == "replicate=2"
    for found, whole in run_ranks(2, ask_for_state, plan):
        assert {name: tuple(value.shape) for name, value in whole.items()} == {
            name: tuple(value.shape) for name, value in Net().state_dict().items()
        }
        if is_whole:
            assert all(torch.equal(value, whole[name]) for name, value in found.items())
        else:
            assert "write job.whole_model().state_dict()" in found
