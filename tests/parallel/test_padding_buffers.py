"""A micro-batch that only keeps step with other ranks leaves the model's buffers as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks


class Model(nn.Module):
    """Buffers written in every way, of what does not depend on the parameters."""

    def __init__(self, has_norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64) if has_norm else nn.Identity()
        self.layer = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("unseen", torch.zeros(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        now = x.detach().mean((0, 1))
        self.mean.lerp_(now, 0.5)
        self.assigned = 0.5 * self.assigned + 0.5 * now
        self.unseen.data.lerp_(now, 0.5)
        self.calls += 1
        return self.layer(self.norm(x))


def workload(has_norm, count, micro):
    random = torch.Generator().manual_seed(5)
    return paceline.Workload(
        model=lambda: Model(has_norm),
        loss=lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=TensorDataset(torch.randn(count, 2, 3, generator=random) * torch.arange(1, count + 1)[:, None, None]),
        batch_size=4,
        micro_batch_size=micro,
        epochs=2,
        precision="float64",
    )


def train(rank, cases):
    """The buffers of every case after training, and the losses."""
    api.init()
    found = []
    for has_norm, count, micro, line in cases:
        job = Job(workload(has_norm, count, micro), Plan.parse(line))
        losses = [job.step(batch) for batch in job.batches()]
        found.append(({name: tensor.clone() for name, tensor in job.model.named_buffers()}, losses))
    return found


@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_buffers_equal_those_of_one_process(axis):
    """Of 9 samples in batches of 4: in the last batch of an epoch the second rank has none."""
    cases = [(False, 9, None), (True, 9, None), (False, 9, 4)]
    (alone,) = run_ranks(1, train, [(*case, "replicate=1") for case in cases])
    for found in run_ranks(2, train, [(*case, f"{axis}=2") for case in cases]):
        for (buffers, losses), (buffers_alone, losses_alone) in zip(found, alone, strict=True):
            assert losses == pytest.approx(losses_alone, rel=1e-12)
            for name, tensor in buffers_alone.items():
                torch.testing.assert_close(buffers[name], tensor, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: n + m)


def test_batch_norm_of_each_micro_batch_does_not_count_it():
    """Where statistics are not shared, the mean over equal halves of a batch is that of the batch."""
    ((alone, _),) = run_ranks(1, train, [(True, 9, 4, "replicate=1")])[0]
    for ((buffers, _),) in run_ranks(2, train, [(True, 9, 4, "shard=2")]):
        for name in ("norm.running_mean", "norm.num_batches_tracked", "mean", "calls"):
            torch.testing.assert_close(buffers[name], alone[name], rtol=1e-12, atol=1e-14)
