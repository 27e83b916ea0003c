"""A rank that ends its loop, or saves alone, while others step: an error at once, not a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
from test_job import workload

import paceline
from paceline.comm import api
from paceline.nouns.errors import CollectiveError
from paceline.nouns.plan import Plan
from paceline.train import step_board
from paceline.train.job import Job

from support.ranks import run_ranks

BATCH = torch.ones(3, 4)


def apart(rank, folder, how, mesh):
    os.environ["PACELINE_RUN_DIR"] = folder
    api.init()
    job = Job(workload(evaluation=[torch.ones(4)] * 4), Plan(mesh=mesh))
    for _ in range(3):
        job.step(BATCH)
    if how == "evaluate and save" and rank == 1:
        job.evaluate()
    elif rank == 1:
        step_once_more(job)
    elif how == "end":
        job.close()
    elif how == "evaluate":
        job.evaluate()
    elif how == "load":
        job.load(folder)
    else:
        job.save(folder + "/out")


def step_once_more(job):
    """Blocks until this process is killed: nobody else takes the step."""
    job.step(BATCH)


@pytest.mark.parametrize(
    ("how", "mesh"),
    [
        ("save", "replicate=2"),
        *(
            pytest.param(how, mesh, marks=pytest.mark.slow)
            for how, mesh in [
                ("end", "replicate=2"),
                ("end", "shard=2"),
                ("evaluate", "shard=2"),
                ("load", "replicate=2"),
            ]
        ),
    ],
)
def test_a_rank_that_does_not_step_with_the_others_is_told(tmp_path, how, mesh):
    with pytest.raises(AssertionError, match="rank 0 is there after step 3, and rank 1 is in step 4"):
        run_ranks(2, apart, str(tmp_path), how, mesh)


@pytest.mark.slow
def test_ranks_at_other_calls_are_told(tmp_path):
    with pytest.raises(AssertionError, match=r"rank [01] is there after step 3, and rank [01] is at job"):
        run_ranks(2, apart, str(tmp_path), "evaluate and save", "replicate=2")


def late(rank):
    api.init()
    job = Job(workload(evaluation=[torch.ones(4)] * 4), Plan(mesh="replicate=2"))
    for number in range(3):
        job.step(BATCH)
        time.sleep(0.2 * (rank == number % 2))
        job.evaluate()
    step_board.WAIT_S = 0.1
    if rank == 0:
        job.board.meet("job.save", 3)  # the other never comes: after some time the collective itself waits
    return job.step_number


def test_a_rank_that_is_late_is_waited_for():
    assert run_ranks(2, late) == [3, 3]


def agree(rank):
    """What the error advises, with 3 batches on one rank and 5 on the other."""
    api.init()
    job = Job(workload(), Plan(mesh="replicate=2"))
    left = 3 + 2 * rank
    while int(paceline.all_reduce(torch.tensor(int(left > 0)), "min")):
        job.step(BATCH)
        left -= 1
    job.close()
    return job.step_number


def test_what_the_error_advises_works():
    assert run_ranks(2, agree) == [3, 3]


def alone(rank, method):
    api.init()
    try:
        job = Job(workload(), Plan(mesh="replicate=1"))
        job.board.meet("job.save", 0)
    except CollectiveError:
        return "error"
    return job.board.memory


def test_one_rank_has_no_board():
    assert run_ranks(1, alone, None) == [None]
