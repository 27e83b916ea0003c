"""How often a steady step reads a number of the device, for which the host waits on a GPU.

Tensors of the CPU pass the same operations to the dispatcher. The numbers that all ranks agree on are read by one copy
of all of them (`StepStatsReducer.read`), which is none of these.
"""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default)


class Reads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def loss(model, batch):
    return model(batch).float().square().sum(), len(batch)


@pytest.mark.parametrize(
    ("parts", "reads"),
    [
        ({}, 0),
        ({"precision": "bf16"}, 0),
        ({"micro_batch_size": 1}, 0),
        ({"clip_norm": 1.0}, 1),  # the norm, once: whether it is finite, and for the record
        ({"precision": "fp16"}, 1),  # whether gradients overflow
        ({"precision": "fp16", "clip_norm": 1.0}, 2),
    ],
)
def test_a_steady_step_reads_so_many_numbers(parts, reads):
    api.init()
    workload = paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))),
        batch_size=4,
        **parts,
    )
    job = Job(workload, Plan())
    batches = job.batches()
    job.step(next(batches))
    batch = next(batches)
    with Reads() as seen:
        job.step(batch)
    assert seen.count.total() == reads, seen.count
