"""Parameters that are frozen, or trained again, between steps: the same losses as on one rank."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import Small, workload


class Frozen(Small):
    """A scalar and a vector that no rank has in parts, and a matrix, are frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gain.requires_grad_(False)
        self.row.requires_grad_(False)


def train(rank, plan):
    """The losses, and a scalar at the end if it is here, where other parameters are trained in each step."""
    api.init()
    optimizer = torch.optim.AdamW
    job = Job(workload("lamb", model=Frozen, optimizer=lambda model: optimizer(model.parameters())), Plan.parse(plan))
    parameters = dict(job.model.named_parameters())
    losses = []
    for batch in job.batches():
        step = job.step_number
        parameters["first.weight"].requires_grad_(step != 1)
        for name in ("second.weight", "second.bias"):
            parameters[name].requires_grad_(step > 1)  # trained when the job was made, and not in the first step
        for name in ("gain", "row", "frozen.weight"):
            parameters[name].requires_grad_(step == 2)
        losses.append(job.step(batch))
    gain = parameters["gain"]
    return losses, None if gain.is_meta else float(gain.detach())


@pytest.mark.parametrize(
    "plan", ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "shard=2,tensor=2", "shard=2,pipeline=2"]
)
def test_freezing_and_unfreezing_between_steps_equals_one_rank(plan):
    losses, gain = run_ranks(1, train, "replicate=1")[0]
    for other_losses, other_gain in run_ranks(Plan.parse(plan).world_size, train, plan):
        assert other_losses == pytest.approx(losses, rel=1e-10)
        assert other_gain is None or other_gain == pytest.approx(gain, rel=1e-10)
