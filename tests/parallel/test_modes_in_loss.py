"""Losses that call the model in evaluation mode too: pseudo labels, consistency, frozen statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import preload, run_ranks

preload("paceline.parallel.shard.fsdp_adapter", "paceline.parallel.graph_adapter")
DATA = list(torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


def make():
    return nn.Sequential(nn.Linear(4, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 4))


def pseudo_labels(model, batch):
    model.eval()
    with torch.no_grad():
        target = model(batch)
    model.train()
    out = model(batch)
    return (out - batch).square().sum() + (out - target).square().sum(), len(batch)


def one_module_after(model, batch):
    """With gradients in both modes, and the mode put back as it was."""
    out = model(batch)
    was_training = model[1].training
    model[1].eval()
    frozen = model(batch)
    model[1].train(was_training)
    return (out - batch).square().sum() + 0.5 * (frozen - batch).square().sum(), len(batch)


def one_module_before(model, batch):
    """The statistics that the first call takes are written by the second one, before its gradient is taken."""
    model[1].eval()
    frozen = model(batch)
    model[1].train()
    return (model(batch) - batch).square().sum() + 0.5 * (frozen - batch).square().sum(), len(batch)


def workload(loss):
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    return paceline.Workload(make, loss, optimizer, data=DATA, batch_size=4, steps=4, precision="float64")


def train(rank, loss, lines):
    """The losses under each plan; what was found where it is refused."""
    api.init()
    found = []
    for line in lines:
        try:
            job = Job(workload(loss), Plan.parse(line))
            found.append([job.step(batch) for batch in job.batches()])
        except WorkloadError as error:
            found.append(error.found)
    return found


@pytest.mark.parametrize("loss", [pseudo_labels, one_module_after, one_module_before])
def test_a_loss_that_calls_the_model_in_both_modes(loss):
    ((alone,),) = run_ranks(1, train, loss, ["replicate=1"])
    lines = ["replicate=2", "shard=2", "tensor=2", "pipeline=2"]
    for found in run_ranks(2, train, loss, lines):
        for line, losses in zip(lines, found, strict=True):
            if loss is one_module_before and line in ("tensor=2", "pipeline=2"):
                assert losses.startswith("that of batch norm 1 depends on its running statistics")
                continue
            assert losses == pytest.approx(alone, rel=1e-10), line
