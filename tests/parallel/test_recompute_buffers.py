"""Blocks that write into buffers train under activation checkpointing as they do without."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.profile import NOTHING_TO_RECOMPUTE
from paceline.parallel.recompute import recompute_blocks
from paceline.parallel.replicate.buffers import EarlierPasses, KeptBuffers
from paceline.train.job import Job

from support.ranks import run_ranks


class Block(nn.Module):
    """Reads its running mean and then writes it; `how` says by which way."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        old = self.mean.clone()
        with torch.no_grad():
            self.calls += 1
            if self.how == "in place":
                self.mean.mul_(0.5).add_(0.5 * x.mean(0))
            elif self.how == "data":
                self.mean.data.mul_(0.5).add_(0.5 * x.mean(0))
            else:
                self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return F.relu(self.layer(x - old)) * (1 + old)


class Spectral(nn.Module):
    """A power iteration in every forward pass, on torch's own buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.layer(x).tanh()


class Seen(nn.Module):
    """Saves for the backward pass the buffer that it has just written."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        with torch.no_grad():
            self.scale.lerp_(x.std(0), 0.5)
        return self.layer(x * self.scale).tanh()


class Table(nn.Module):
    """A large buffer that every second call writes unseen, and a large one that nothing writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("table", torch.ones(5000, 6))
        self.register_buffer("mask", torch.ones(5000, 6))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        now = self.table[0] * self.mask[0] * 1
        self.calls += 1
        if self.calls % 2:
            self.table.data[0] = 0.5 * x.detach().mean(0)
        return (self.layer(x) * now).tanh()


class SetOnce(nn.Module):
    """Fills a buffer from its first batch, and says so in an attribute (ActNorm)."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_set, self.seen = nn.Linear(6, 6), False, []
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
            self.is_set = True
            x = x * 2
        self.seen.append(len(x))
        return (self.layer(x - self.shift) * len(self.seen)).tanh()


class Growing(nn.Module):
    """A cached table, and an attribute that says how long it is (rotary embeddings)."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(6, 6), 1
        self.register_buffer("table", torch.zeros(1, 6, dtype=torch.float64), persistent=False)

    def forward(self, x):
        if len(x) > self.rows:
            self.rows = len(x)
            self.table = torch.arange(6.0, dtype=torch.float64).repeat(len(x), 1)
        return (self.layer(x) * self.table[: len(x)]).tanh()


BLOCKS = {
    "set once": SetOnce,
    "growing": Growing,
    "table": Table,
    "in place": lambda: Block("in place"),
    "data": lambda: Block("data"),
    "assigned": lambda: Block("assigned"),
    "spectral norm": Spectral,
    "saved": Seen,
}


class Model(nn.Module):
    def __init__(self, block, times):
        super().__init__()
        self.times = times
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.out(x)


def workload(name, times, micro):
    torch.manual_seed(0)
    return paceline.Workload(
        model=lambda: Model(BLOCKS[name], times),
        loss=lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(24, 6)),
        batch_size=8,
        micro_batch_size=micro,
        precision="float64",
    )


def train(rank, cases):
    """Losses, state and notices of every case."""
    api.init()
    found = []
    for name, times, micro, line in cases:
        job = Job(workload(name, times, micro), Plan.parse(line))
        losses = [job.step(batch) for batch in job.batches()]
        buffers = {name: tensor.clone() for name, tensor in job.model.named_buffers()}
        found.append((losses, buffers, list(job.parallel.placed.notices)))
    return found


def test_large_buffers_that_nothing_wrote_are_not_held_twice():
    block = Table().double()
    kept = KeptBuffers([block])
    block(torch.randn(2, 6, dtype=torch.float64))
    kept.drop_constants(EarlierPasses())
    ((_, before),) = kept.before
    assert before["mask"] is block.mask
    assert before["table"] is not block.table
    assert before["table"].eq(1).all()
    assert int(before["calls"]) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recompute_compares_gpu_buffers_only_in_the_first_passes(device, monkeypatch):
    """The host would wait for them. One that was written unseen in these passes stays copied."""
    compared = []

    def same(tensor, copy):
        compared.append(tensor is block.table)
        return tensor is not block.table or len(compared) > 2

    monkeypatch.setattr("paceline.parallel.replicate.buffers._same", same)
    earlier = EarlierPasses()
    with FakeTensorMode(), torch.device(device):
        block = nn.Module()
        block.register_buffer("table", torch.ones(5000, 6))
        block.register_buffer("mask", torch.ones(5000, 6))
        for number in range(5):
            compared.clear()
            kept = KeptBuffers([block])
            kept.drop_constants(earlier)
            ((_, before),) = kept.before
            assert before["mask"] is block.mask
            assert before["table"] is not block.table
            assert len(compared) == (2 if device == "cpu" or number < 3 else 0)


def cases(plan):
    """Every block once, one block twice in a forward pass, and in two micro-batches."""
    return [
        *[(name, 1, None, plan) for name in BLOCKS],
        ("in place", 2, None, plan),
        ("assigned", 1, 4, plan),
    ]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_one_process(mode):
    (plain,) = run_ranks(1, train, cases("replicate=1"))
    (found,) = run_ranks(1, train, cases(f"replicate=1,checkpointing={mode}"))
    for (losses, buffers, notices), (losses_without, buffers_without, _) in zip(found, plain, strict=True):
        assert not [notice for notice in notices if NOTHING_TO_RECOMPUTE in notice], "nothing recomputed: void"
        assert losses == losses_without
        for name, tensor in buffers_without.items():
            assert torch.equal(buffers[name], tensor), name
    by_name = dict(zip(BLOCKS, found, strict=False))
    assert int(by_name["in place"][1]["blocks.0.calls"]) == 3


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_two_ranks_equal_one_process(axis):
    """Of running means over equal halves of each batch, whose mean over the ranks is what one process has."""
    means = [("in place", 1, None), ("data", 1, None), ("assigned", 1, None)]
    (alone,) = run_ranks(1, train, [(*case, "replicate=1") for case in means])
    for found in run_ranks(2, train, [(*case, f"{axis}=2,checkpointing=full") for case in means]):
        for (losses, buffers, _), (losses_alone, buffers_alone, _) in zip(found, alone, strict=True):
            assert losses == pytest.approx(losses_alone, rel=1e-12)
            for name, tensor in buffers_alone.items():
                torch.testing.assert_close(buffers[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_compiled_blocks_own_forward_can_be_found():
    """What copies a model must give the copy its class's forward."""
    model = Model(BLOCKS["in place"], 1)
    assert recompute_blocks(model, "full", is_compiled=True) == 3
    assert model.blocks[0].forward.__wrapped__.__func__ is Block.forward


@pytest.mark.slow
def test_compiled_blocks_write_once_too():
    (plain,) = run_ranks(1, train, [("in place", 1, None, "replicate=1")])[0]
    (found,) = run_ranks(1, train, [("in place", 1, None, "replicate=1,checkpointing=full,compile=on")])[0]
    assert found[0] == pytest.approx(plain[0], rel=1e-12)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-12, atol=1e-14)
