"""Buffers that a forward pass writes in every way: on two ranks they become what one process has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.parallel.replicate import buffers as replicated
from paceline.parallel.replicate.buffers import Buffers
from paceline.train.job import Job

from support.ranks import run_ranks


class Kept(nn.Module):
    """Keeps something of the mean of its input, which is that of the whole batch where the ranks have equal parts."""

    start = torch.zeros(3)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0
        self.register_buffer("kept", self.start.clone(), persistent=True)

    def forward(self, x):
        self.calls += 1
        self.keep(x.detach().mean(0))
        return self.layer(x)


class LateData(Kept):
    """Writes through `.data` from the third step on."""

    def keep(self, now):
        if self.calls > 2:
            self.kept.data.lerp_(now, 0.5)


class Replaced(Kept):
    """Gets other memory through `.data`."""

    def keep(self, now):
        if self.calls > 1:
            self.kept.data = 0.5 * self.kept + 0.5 * now


class Large(Kept):
    """Writes one element of many, unseen."""

    start = torch.zeros(50_000)

    def keep(self, now):
        if self.calls > 1:
            self.kept.data[self.calls * 1000] = now[0]


class Grows(Kept):
    """Keeps the mean of every batch, in one row each."""

    start = torch.zeros(0, 3)

    def keep(self, now):
        self.kept = torch.cat([self.kept, now[None]])


class Turns(Kept):
    """Holds whole numbers at first, then others."""

    start = torch.tensor(1)

    def keep(self, now):
        self.kept = self.kept * 0.5 + now.sum()


class Complex(Kept):
    start = torch.zeros(3, dtype=torch.complex128)

    def keep(self, now):
        self.kept += torch.complex(now, 2 * now)


class Unset(Kept):
    """Is no number until there is something to keep."""

    start = torch.full((3,), torch.nan)

    def keep(self, now):
        self.kept.copy_(torch.where(self.kept.isnan(), now, 0.5 * self.kept + 0.5 * now))


class Expanded(Kept):
    start = torch.zeros(4, 3)

    def keep(self, now):
        self.kept = (0.5 * self.kept[0] + 0.5 * now).expand(4, 3)


class Removed(Kept):
    """Has nothing any more after the second batch."""

    def keep(self, now):
        self.kept = self.kept + now if self.calls < 2 else None


MODELS = {model.__name__: model for model in Kept.__subclasses__()}


def workload(model, count):
    random = torch.Generator().manual_seed(3)
    return paceline.Workload(
        model=model,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=[(index + 1) * torch.randn(3, generator=random) for index in range(count)],
        batch_size=4,
        steps=6,
        precision="float64",
    )


def train(rank, cases):
    """The buffer of each case after training, and the losses."""
    api.init()
    found = {}
    for name, count, line in cases:
        job = Job(workload(MODELS[name], count), Plan.parse(line))
        losses = [job.step(batch) for batch in job.batches()]
        kept = job.model.kept
        found[name, count] = losses, kept if kept is None else kept.clone()
    return found


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_ranks_equal_one_process(axis):
    """Of 8 samples both ranks always have two; of 5 the second has none of the second batch, of 1 it never has any."""
    cases = [(name, count) for name in MODELS for count in (8, 5, 1)]
    (alone,) = run_ranks(1, train, [(*case, "replicate=1") for case in cases])
    for found in run_ranks(2, train, [(*case, f"{axis}=2") for case in cases]):
        for case, (losses, kept) in alone.items():
            if case[0] in ("LateData", "Replaced", "Large", "Removed") and case[1] < 8:
                continue  # the ranks' own counts of calls differ from one process's
            assert found[case][0] == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(found[case][1], kept, rtol=1e-12, atol=1e-14, msg=lambda m, c=case: f"{c}: {m}")
    changed = [kept for _, kept in alone.values() if kept is not None]
    assert len(changed) == len(cases) - 3
    assert all(kept.abs().sum() > 0 for kept in changed), "nothing was kept: the test is void"


class Rotary(nn.Module):
    """A table of positions that grows to the longest sequence seen."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.register_buffer("table", self.made(2), persistent=False)

    def made(self, length):
        return torch.cos(torch.arange(length, dtype=torch.float64))[:, None]

    def forward(self, x):
        if x.shape[1] > len(self.table):
            self.table = self.made(x.shape[1])
        return self.out(self.words(x) * self.table[: x.shape[1]])


class Cleared(Rotary):
    """Puts its table away in every forward pass."""

    def forward(self, x):
        self.table = None
        return self.out(self.words(x) * self.made(x.shape[1]))


class OnlyLong(Rotary):
    """Has a table for long sequences alone: one rank has it, the other has none."""

    def forward(self, x):
        self.table = self.made(x.shape[1]) if x.shape[1] > 8 else None
        return self.out(self.words(x) * self.made(x.shape[1]))


class Persistent(Rotary):
    """As Rotary, and the table is part of the model's state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", self.made(2))


def sequences(model):
    def loss(model, x):
        weight = (x != 0).double()
        losses = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none")
        return (losses.view(x.shape) * weight).sum(), weight.sum()

    random = torch.Generator().manual_seed(3)
    return paceline.Workload(
        model=model,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[torch.randint(1, 50, (3 + (index * 7) % 9,), generator=random) for index in range(33)],
        collate=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True),
        batch_size=4,
        epochs=2,
        precision="float64",
    )


def train_on_sequences(rank, models, line):
    """Losses, or the error, of every model, and how many gathers each step took."""
    api.init()
    found = []
    for model in models:
        job = Job(sequences(model), Plan.parse(line))
        losses, gathers = [], []
        try:
            for batch in job.batches():
                before = job.ledger.calls.get(("all_gather", "replicate"), 0)
                losses.append(job.step(batch))
                gathers.append(job.ledger.calls.get(("all_gather", "replicate"), 0) - before)
        except paceline.PacelineError as error:
            found.append(str(error))
        else:
            found.append((losses, gathers))
    return found


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_derived_tables_may_have_another_shape_on_every_rank(axis):
    models = [Rotary, Cleared, OnlyLong]
    (alone,) = run_ranks(1, train_on_sequences, models, "replicate=1")
    ranks = run_ranks(2, train_on_sequences, models, f"{axis}=2")
    for found in ranks:
        for (losses, _), (losses_alone, _) in zip(found, alone, strict=True):
            assert losses == pytest.approx(losses_alone, rel=1e-12)
        assert not any(found[0][1][-8:]), "both tables are as long as they get, and shapes are still sent"
    if axis == "replicate":
        assert ranks[0][0][1][0] == 2, "shapes were not sent: the test is void"


def test_state_of_different_shapes_is_refused_by_name():
    for (text,) in run_ranks(2, train_on_sequences, [Persistent], "replicate=2"):
        assert "step 1] the buffer table, which the forward pass changes" in text
        assert "rank 0 has one of shape (" in text
        assert "rank 1 has one of shape (" in text
        assert "persistent=False" in text


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_a_new_tensor_at_a_freed_ones_address_is_a_change(micro):
    model = Average()
    buffers = Buffers(model, SimpleNamespace(size=2))
    for _ in range(100):
        buffers.begin_step()
        buffers.prints = {}  # values are compared too: not here
        for _ in range(micro):
            model(torch.randn(8, 4))
        assert buffers.find_changed() == [1]


def test_what_nothing_wrote_is_not_sent():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    model.register_buffer("mask", torch.ones(200, 200))
    buffers = Buffers(model, SimpleNamespace(size=2))
    for _ in range(3):
        buffers.begin_step()
        model(torch.randn(4, 3))
        changed = [name for name, flag in zip(buffers.names, buffers.find_changed(), strict=True) if flag]
        assert changed == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def steps_of(model, write, count):
    """Whether each step was found to have changed a buffer."""
    buffers, found = Buffers(model, SimpleNamespace(size=2)), []
    for step in range(count):
        buffers.begin_step()
        write(step)
        found.append(any(buffers.find_changed()))
    return found


def with_table(size):
    model = nn.Module()
    model.register_buffer("table", torch.zeros(size))
    return model


@pytest.mark.parametrize("first", [0, 2])
def test_buffers_with_early_unseen_writes_are_always_compared(first):
    model = with_table(2**18 + 1)

    def write(step):
        if step == first or step > 5:
            model.table.data[step] += 1

    assert steps_of(model, write, 9) == [step == first or step > 5 for step in range(9)]


@pytest.mark.parametrize(("size", "is_found"), [(2**18, True), (2**18 + 1, False)])
def test_buffers_up_to_one_mebibyte_show_a_late_unseen_write(size, is_found):
    model = with_table(size)

    def write(step):
        if step == 5:
            model.table.data[1] += 1
        if step == 7:
            model.table[1] += 1

    assert steps_of(model, write, 9) == [step == 7 or (step == 5 and is_found) for step in range(9)]


def test_buffers_are_read_once_a_step_and_large_ones_only_early(monkeypatch):
    model, read = nn.Module(), []
    model.register_buffer("small", torch.zeros(4))
    model.register_buffer("large", torch.zeros(2**19))
    from_values = replicated._print_of
    monkeypatch.setattr(replicated, "_print_of", lambda tensor: read.append(tensor.numel()) or from_values(tensor))
    buffers, counts = Buffers(model, SimpleNamespace(size=2)), []
    for step in range(6):
        read.clear()
        if step == 5:
            model.small += 1  # between steps: it is read anew
        buffers.begin_step()
        assert buffers.find_changed() == [0, 0]
        counts.append((read.count(4), read.count(2**19)))
    assert counts == [(2, 2), (1, 1), (1, 1), (1, 0), (1, 0), (2, 0)]
