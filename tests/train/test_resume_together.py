"""Ranks that would not go on from the same checkpoint say so instead of waiting for each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_job import workload

from paceline.comm import api
from paceline.nouns.errors import CheckpointError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks


def start(rank, folders, told):
    """A rank of a job whose run directory is, on this rank's host, `folders[rank]`."""
    api.init()
    Path(folders[rank]).mkdir(exist_ok=True)
    os.environ["PACELINE_RUN_DIR"] = folders[rank]
    if told[rank]:
        os.environ["PACELINE_RESUME"] = str(Path(folders[rank], "checkpoints"))
    try:
        job = Job(workload(), Plan(mesh="replicate=2"))
    except CheckpointError as error:
        return str(error)
    step = job.step_number
    for batch in job.batches():
        job.step(batch)
    job.close()
    return step


@pytest.fixture
def saved(tmp_path):
    """A run directory with the checkpoint of step 4."""
    assert run_ranks(2, start, [str(tmp_path / "a")] * 2, (False, False)) == [0, 0]
    return str(tmp_path / "a")


@pytest.mark.parametrize(
    ("told", "of_rank_1"), [((True, False), "was told of no checkpoint"), ((True, True), "finds no checkpoint")]
)
def test_a_host_that_sees_another_run_directory(tmp_path, saved, told, of_rank_1):
    texts = run_ranks(2, start, [saved, str(tmp_path / "b")], told, timeout_s=60)
    for text in texts:
        assert f"rank 0 finds step 4, rank 1 {of_rank_1}" in text
        assert "one file system" in text


def test_all_go_on(saved):
    assert run_ranks(2, start, [saved] * 2, (True, True)) == [4, 4]
