"""What ranks agree on is read while the backward pass runs, as on a GPU: the same is done at the same steps.

On CPUs the numbers are read once gradients are sums. Here they are also read from a copy that was taken before the
backward pass, and both runs are compared, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import LossError
from paceline.nouns.plan import Plan
from paceline.parallel.step_stats import StepStatsReducer
from paceline.train.job import Job

from support.ranks import preload, run_ranks

preload("paceline.train.job", "paceline.parallel.shard.fsdp_adapter", "paceline.parallel.graph_adapter")
WIDTH = 64


class Copied:
    """`HostCopy` without a device."""

    def begin(self, make):
        self.numbers = make().clone()

    def hold_device(self):
        pass

    def read(self):
        return self.numbers.tolist()


def read_early():
    make = StepStatsReducer.__init__

    def init(reducer, *arguments, **named):
        make(reducer, *arguments, **named)
        reducer.copy = Copied()

    StepStatsReducer.__init__ = init


class Net(nn.Module):
    """Two layers, one of which some samples leave out; a mean that is kept, and batch norm."""

    def __init__(self, may_leave_out=False):
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.may_leave_out = may_leave_out

    def forward(self, x):
        hidden = self.norm(self.first(x))
        if not self.may_leave_out or x[0, 0] > 0.5:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden.tanh())


def loss(model, batch):
    return model(batch["x"]).square().sum() * batch["times"].max(), batch["weight"].sum()


def rows(change=None):
    random = torch.Generator().manual_seed(0)
    found = [
        {"x": torch.randn(8, generator=random), "times": torch.tensor(1.0), "weight": torch.tensor(1.0)}
        for _ in range(22)
    ]
    if change is not None:
        change(found)
    return found


def not_finite(rows):
    rows[13]["x"][2] = torch.nan


def weightless(rows):
    for row in rows:
        row["weight"].zero_()


def too_large(rows):
    rows[5]["times"] += 1e30


CASES = {
    "usual": {},
    "uneven": {"batch_size": 9},
    "micro-batches": {"micro_batch_size": 2, "data": rows()[:16], "epochs": 2},
    "not finite": {"data": rows(not_finite)},
    "weightless": {"data": rows(weightless)},
    "overflow": {"data": rows(too_large), "precision": "fp16", "batch_size": 4},
    "unused": {"model": lambda: Net(may_leave_out=True)},
    "stopped": {},
    "clipped": {"clip_norm": 0.1},
}
CELLS = [(case, plan) for case in CASES for plan in ("replicate=1", "replicate=2", "replicate=4")]
CELLS += [(case, "shard=2") for case in ("not finite", "overflow", "stopped")]
CELLS += [(case, "tensor=2") for case in ("not finite", "uneven", "stopped")]


def trained(rank, case, line, is_early):
    if is_early:
        read_early()
    api.init()
    workload = paceline.Workload(
        **{
            "model": Net,
            "loss": loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            "data": rows(),
            "batch_size": 8,
            "precision": "float64",
            **CASES[case],
        }
    )
    job = Job(workload, Plan.parse(line))
    job.saves_late = True  # `late` has whether the job is to stop
    steps = []
    for batch in job.batches():
        if case == "stopped" and job.step_number == 1 and rank == job.size - 1:
            job.is_stopping.set()
        try:
            steps.append((job.step(batch), job.last.gradient_norm, job.last.is_skipped, job.last.weight, job.late))
        except LossError as error:
            steps.append(str(error))
            break
        job.late = None
    state = []
    for tensor in (*job.model.parameters(), *job.model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        state.append(local.detach().clone())
    return steps, state


@pytest.mark.slow
@pytest.mark.parametrize(("case", "line"), CELLS)
def test_the_same_is_done_at_the_same_steps(case, line):
    size = Plan.parse(line).world_size
    usual = run_ranks(size, trained, case, line, False)
    early = run_ranks(size, trained, case, line, True)
    for (steps, state), (expected_steps, expected_state) in zip(early, usual, strict=True):
        assert repr(steps) == repr(expected_steps)
        for tensor, expected in zip(state, expected_state, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
    steps = usual[0][0]
    if case in ("not finite", "weightless"):
        assert "a finite number" in steps[-1] if case == "not finite" else "can't take the mean" in steps[-1]
    elif case == "overflow":
        assert any(is_skipped for _, _, is_skipped, _, _ in steps)
        assert not all(is_skipped for _, _, is_skipped, _, _ in steps)
    elif case == "stopped":
        assert [is_stopping for *_, is_stopping in steps] == [False, True, *[True] * (len(steps) - 2)]
    else:
        assert len(steps) >= 3
