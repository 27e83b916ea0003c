"""Random numbers and modules outside of the model: what the trial of the loss can't hold fixed, and what it undoes."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.errors import LossError
from paceline.nouns.plan import Plan
from paceline.parallel.model_adapter import EagerAdapter
from paceline.train import additive
from paceline.train.additive import check_loss_adds_up
from paceline.train.data import RankLoader, open_data
from paceline.train.job import Job

from support.ranks import run_ranks

WIDTH, CLASSES = 6, 4


def data(count=16):
    drawn = torch.Generator().manual_seed(3)
    return [(torch.randn(WIDTH, generator=drawn), torch.randint(0, CLASSES, (), generator=drawn)) for _ in range(count)]


class Net(nn.Module):
    """A classifier with statistics, and `disturb` before its last layer."""

    def __init__(self, disturb=None):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.numpy, self.python, self.disturb = np.random.default_rng(1), random.Random(1), disturb

    def forward(self, x):
        self.calls += 1
        hidden = self.norm(self.first(x))
        return self.last(hidden if self.disturb is None else self.disturb(self, hidden))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def plain_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), 1


def penalty(model, batch):
    total, weight = cross_entropy(model, batch)
    return total + 1e-3 * model.last.weight.square().sum(), weight


def try_out(model, loss, **parts):
    """The model and the notices of a trial."""
    torch.manual_seed(0)
    work = paceline.Workload(
        **{
            "model": model,
            "loss": loss,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            "data": data(),
            "batch_size": 10,
            **parts,
        }
    )
    made, notices = work.model().train(), []
    loader = RankLoader(open_data("data", work.data), work, 0, 2, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    kept = {name: (one.grad, copy.deepcopy(one.grad)) for name, one in made.named_parameters()}
    try:
        check_loss_adds_up(EagerAdapter(made, torch.no_grad), work, loader, notices.append)
    finally:
        for name, tensor in made.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        for name, parameter in made.named_parameters():
            assert parameter.grad is kept[name][0], name
            assert parameter.grad is None or torch.equal(parameter.grad, kept[name][1]), name
    return notices


def numpy_mask(net, x):
    return x * torch.from_numpy(np.random.rand(*x.shape) < 0.5)


def numpy_mixing(net, x):
    share = np.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x.flip(0)


def python_scale(net, x):
    return torch.stack([row * random.choice((0.5, 1.0)) for row in x])


def own_numpy(net, x):
    return x * torch.from_numpy(net.numpy.random(x.shape))


def own_python(net, x):
    return torch.stack([row * net.python.random() for row in x])


DISTURBED = [numpy_mask, numpy_mixing, python_scale, own_numpy, own_python]


@pytest.mark.parametrize("disturb", DISTURBED)
def test_draws_that_are_not_torchs_are_not_taken_for_a_coupling(disturb):
    notices = try_out(lambda: Net(disturb), cross_entropy)
    assert len(notices) == 1
    assert "random numbers that the trial can't hold fixed" in notices[0]


@pytest.mark.parametrize("disturb", DISTURBED)
def test_a_weight_that_does_not_depend_on_draws_is_still_refused(disturb):
    with pytest.raises(LossError, match=r"its weight is 1, for 2 and 3 of them 1 \+ 1"):
        try_out(lambda: Net(disturb), plain_mean)


def dropping(net, x):
    return F.dropout(x, 0.3) * torch.rand(len(x), 1)


def test_a_penalty_beside_torchs_draws_is_refused():
    assert not try_out(lambda: Net(dropping), cross_entropy)
    with pytest.raises(LossError, match="together it is"):
        try_out(lambda: Net(dropping), penalty)


def stacked(samples):
    return [torch.stack(part) for part in zip(*samples, strict=True)]


def torch_masks(samples):
    x, y = stacked(samples)
    return [x * torch.bernoulli(torch.full(x.shape, 0.5)), y]


def numpy_mixes(samples):
    x, y = stacked(samples)
    share = np.random.beta(0.4, 0.4)
    return [share * x + (1 - share) * x.roll(1, 0), y]


def with_a_generator():
    own = np.random.default_rng(1)

    def mask(samples):
        x, y = stacked(samples)
        return [x * torch.from_numpy(own.random(x.shape)).float(), y]

    return mask


@pytest.mark.parametrize("collate", [torch_masks, numpy_mixes, with_a_generator()], ids=["torch", "numpy", "own"])
def test_a_collate_that_draws_is_not_taken_for_a_coupling(collate):
    assert not try_out(Net, cross_entropy, collate=collate)
    with pytest.raises(LossError, match="together it is"):
        try_out(Net, penalty, collate=collate)


def counted(samples):
    """Padded to the longest, with the number of samples beside."""
    return [nn.utils.rnn.pad_sequence([x[: 2 + int(y)] for x, y in samples], True), len(samples)]


def test_a_number_of_samples_in_the_batch_is_not_cut():
    def total(model, batch):
        return model.first.weight.sum() * batch[0].sum(), batch[1]

    notices = try_out(Net, total, collate=counted)
    assert not notices or "can't be cut" in notices[0]


def patched(is_leaf):
    """A model whose forward is a closure over it: a copy's computes with the model itself."""

    def make():
        net = nn.Linear(WIDTH, CLASSES) if is_leaf else Net()
        own = net.forward
        net.forward = lambda x: own(x) * 1.0
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        return net

    return make


@pytest.mark.parametrize("is_leaf", [False, True])
def test_additive_trial_uses_a_model_reached_by_copies_unchanged(is_leaf):
    assert not try_out(patched(is_leaf), cross_entropy)
    with pytest.raises(LossError, match="its weight is 1"):
        try_out(patched(is_leaf), plain_mean)


def test_a_loss_with_a_model_of_its_own_leaves_it_as_it_was():
    nets = []

    def make():
        nets.append(Net())
        return nets[-1]

    assert not try_out(make, lambda _, batch: cross_entropy(nets[0], batch))
    with pytest.raises(LossError, match="its weight is 1"):
        try_out(make, lambda _, batch: plain_mean(nets[-1], batch))


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_teacher_outside_of_the_model_is_left_as_it_was(is_copied, monkeypatch):
    if not is_copied:
        monkeypatch.setattr("paceline.train.additive._COPIED_BYTES", 0)

    def note(module, x):
        module.seen.add_(x.detach().sum())

    teacher = Net()
    teacher.norm.eval()
    teacher.last.register_buffer("seen", torch.zeros(CLASSES))
    teacher.last.register_forward_pre_hook(lambda module, given: note(module, given[0]))
    teacher.first.weight.grad = kept = torch.ones(WIDTH, WIDTH)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}

    def taught(model, batch):
        return (model(batch[0]) - teacher(batch[0])).square().sum(), len(batch[0])

    assert not try_out(Net, taught)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert teacher.first.weight.grad is kept
    assert torch.equal(kept, torch.ones(WIDTH, WIDTH))
    assert teacher.last.weight.grad is None


class Growing(nn.Module):
    """A table that is made anew for a larger batch, and attributes that say how large it is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, CLASSES)
        self.rows, self.sizes = 1, []
        self.register_buffer("table", torch.zeros(1, CLASSES), persistent=False)

    def forward(self, x):
        if len(x) > self.rows:
            self.rows = len(x)
            self.sizes.append(len(x))
            self.table = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        self.newest = len(self.sizes)
        return self.first(x) + self.table[: len(x)]


@pytest.mark.parametrize("is_copied", [True, False])
def test_additive_trial_restores_attributes_with_their_buffers(is_copied, monkeypatch):
    if not is_copied:
        monkeypatch.setattr("paceline.train.additive._COPIED_BYTES", 0)
    made = Growing()
    assert not try_out(lambda: made, cross_entropy)
    assert (made.rows, made.sizes, made.table.shape) == (1, [], (1, CLASSES))
    assert not hasattr(made, "newest")


def only_large_parts(model, batch):
    answer = model(batch)
    if len(batch) < 4:
        raise ValueError("the trial's batches are smaller than the job's")
    return answer.square().sum(), len(batch)


def train_split(rank, line):
    api.init()
    additive._COPIED_BYTES = additive._MADE_BYTES = 0
    work = paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)),
        loss=only_large_parts,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        data=[x for x, _ in data()],
        batch_size=8,
        steps=3,
        precision="float64",
    )
    job = Job(work, Plan.parse(line))
    return [job.step(batch) for batch in job.batches()]


def test_a_trial_that_raises_leaves_a_split_model_as_it_was():
    shard, replicate = (run_ranks(2, train_split, f"{axis}=2")[0] for axis in ("shard", "replicate"))
    assert shard == pytest.approx(replicate, rel=1e-12)
