"""A step of one rank runs the code of a step of several ranks: a mistake there shows in one process too."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.train import step as train_step
from paceline.train.job import distribute

from support.ranks import run_ranks

STEP = Path(train_step.__file__)
PARTS = (str(STEP), str(STEP.parents[1] / "parallel" / "engine" / "declared.py"))


def make():
    generator = torch.Generator().manual_seed(0)
    return paceline.Workload(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(16, 4, generator=generator)),
        batch_size=8,
        micro_batch_size=2,
        clip_norm=1.0,
    )


def functions_of_a_step(rank):
    """Return the functions of `PARTS` that the second step calls."""
    job = distribute(make())
    batches = job.batches()
    job.step(next(batches))
    batch = next(batches)
    called = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename in PARTS:
            called.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        job.step(batch)
    finally:
        sys.setprofile(None)
    job.close()
    return called


def test_one_rank_takes_a_step_as_two_do():
    (of_one,) = run_ranks(1, functions_of_a_step)
    of_two = run_ranks(2, functions_of_a_step)
    assert len(of_one) > 10
    assert of_two == [of_one, of_one]
