"""Messages that are asked for early arrive where they belong: losses are those of one rank under every schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks


class Residual(nn.Module):
    """Tanh of a linear map, added."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.map(x))


def losses(rank, plan):
    data = [(torch.arange(6.0) * (index % 5) / 10, torch.tensor(float(index % 3))) for index in range(24)]
    api.init()
    workload = paceline.Workload(
        model=lambda: nn.Sequential(*[Residual() for _ in range(6)], nn.Linear(6, 1)),
        loss=lambda model, batch: (((model(batch[0])[:, 0] - batch[1]) ** 2).sum(), len(batch[1])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=data,
        batch_size=12,
        epochs=2,
    )
    job = Job(workload, Plan.parse(plan))
    result = [job.step(batch) for batch in job.batches()]
    result.append(float(job.evaluate(data)["loss"]))
    job.close()
    return result


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_schedule_computes_what_one_rank_does(schedule, ranks):
    (alone,) = run_ranks(1, losses, "replicate=1")
    for result in run_ranks(ranks, losses, f"pipeline={ranks},schedule={schedule},micro_batches=6"):
        assert result == pytest.approx(alone, rel=1e-5)
