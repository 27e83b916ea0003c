"""A loop that makes its own batches: no data set, its own count, on any number of ranks what one would do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.profile.describe import describe
from paceline.run.supervise.progress import Progress
from paceline.train import prepare
from paceline.train.job import Job, train_workload

from support.ranks import run_ranks

STEPS = 6
BATCHES = torch.randn(STEPS, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = {1: [slice(0, 5)], 2: [slice(0, 2), slice(2, 5)]}  # uneven: a rank's part counts by its weight


def make(data=None, **parts):
    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        loss=lambda model, batch: ((model(batch) - 1).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        data=data,
        precision="float64",
        **parts,
    )


def job_of(mesh=None, workload=None, **plan):
    api.init()
    return Job(workload or make(), Plan(mesh=mesh or f"replicate={api.size()}", **plan))


def step(job, number):
    return job.step(BATCHES[number][PARTS[job.size][job.rank]])


def train_all(rank, mesh):
    job = job_of(mesh)
    return [step(job, number) for number in range(STEPS)], job.step_number, job.total_steps


@pytest.fixture(scope="module")
def alone():
    """The losses of one rank."""
    losses, steps, total = run_ranks(1, train_all, None)[0]
    assert (steps, total) == (STEPS, 0)
    return losses


@pytest.mark.parametrize("mesh", ["replicate=2", pytest.param("shard=2", marks=pytest.mark.slow)])
def test_ranks_that_share_a_batch_do_what_one_does(alone, mesh):
    for losses, *_ in run_ranks(2, train_all, mesh):
        assert losses == pytest.approx(alone, rel=1e-12)


def save_half(rank, folder):
    job = job_of()
    for number in range(STEPS // 2):
        step(job, number)
    job.save(folder)


def resume(rank, folder, workload_steps):
    told = []
    job = job_of(workload=make(steps=workload_steps))
    job.notice = lambda text, everywhere=False: told.append(text)
    job.load(folder)
    losses = [step(job, number) for number in range(job.step_number, STEPS)]
    try:
        step(job, 0)
    except WorkloadError as error:
        return losses, told, str(error)
    return losses, told, None


def test_a_loop_that_begins_at_the_jobs_step_goes_on(alone, tmp_path):
    folder = str(tmp_path / "saved")
    run_ranks(1, save_half, folder)
    losses, told, error = run_ranks(1, resume, folder, STEPS)[0]
    assert losses == alone[STEPS // 2 :]
    assert len(told) == 1
    assert "goes on after step 3 with batches of your own" in told[0]
    assert f"the workload has steps={STEPS}, which are done" in error
    assert "for step in range(job.step_number, job.total_steps)" in error
    assert run_ranks(1, resume, folder, None)[0][2] is None, "without steps the loop's end is its own"


def test_what_needs_samples_says_that_there_are_none():
    job = job_of()
    for call in (lambda: next(job.batches()), lambda: train_workload(make()), lambda: describe(make())):
        with pytest.raises(WorkloadError, match="the workload's data is needed here\n  found: it is None"):
            call()
    with pytest.raises(WorkloadError, match="the workload has no batch_size"):
        job.evaluate([torch.ones(4)])


def test_evaluation_has_a_batch_size_of_its_own():
    job = job_of(workload=make(batch_size=3, evaluation=[torch.ones(4)] * 7))
    assert job.evaluate()["loss"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "tensor=2",
        "pipeline=2",
        "replicate=2,server=1",
        "replicate=3,server=1,mode=quorum,quorum=2",
        "replicate=2,server=1,mode=deadline,deadline=1",
    ],
)
def test_a_plan_that_must_see_a_batch_first_or_again_is_refused(text):
    plan = Plan.parse(text)
    with pytest.raises(PlanError, match="found: the workload's data is None"):
        prepare.check_plan_without_data(make(steps=3), plan, Mesh.parse(plan.mesh))
    prepare.check_plan_without_data(make(data=[1], batch_size=2), plan, Mesh.parse(plan.mesh))


@pytest.mark.parametrize("text", ["replicate=2,server=1,mode=async", "replicate=2,server=1,mode=stale,staleness=2"])
def test_own_batches_work_under_async_and_stale_if_steps_are_set(text):
    plan = Plan.parse(text)
    prepare.check_plan_without_data(make(steps=3), plan, Mesh.parse(plan.mesh))
    with pytest.raises(PlanError, match="so is its steps\n  fix: write steps="):
        prepare.check_plan_without_data(make(), plan, Mesh.parse(plan.mesh))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"micro_batch_size": 2}, "leave it out: job.step takes each batch whole"),
        ({"epochs": 3}, "write steps="),
        ({"batch_size": -1}, "batch_size should be a whole number"),
        ({"data": [torch.ones(4)]}, "batch_size is missing"),
    ],
)
def test_parts_that_do_not_apply_are_refused(parts, said):
    with pytest.raises(WorkloadError, match=said):
        make(**parts)


@pytest.mark.parametrize(
    ("parts", "plan"), [({"micro_batch_size": 2}, {}), ({"batch_size": 5}, {"micro_batches": 2, "mesh": "pipeline=1"})]
)
def test_what_cuts_the_workloads_batches_does_not_cut_own_ones(parts, plan):
    job = job_of(workload=make(data=list(BATCHES[0]), **{"batch_size": 5, **parts}), **plan)
    job.step(next(job.batches()))
    with pytest.raises(WorkloadError, match=r"job\.step got a batch that does not come from job\.batches"):
        step(job, 0)


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ({}, ["step 1", "step 2"]),
        ({"steps": 2}, ["step 1/2", "step 2/2"]),
        ({"data": list(BATCHES[0]), "batch_size": 5}, ["step 1", "step 2"]),
    ],
)
def test_the_progress_counts_the_loops_steps(tmp_path, monkeypatch, parts, lines):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    progress = Progress(tmp_path)
    job = job_of(workload=make(**parts))
    shown = []
    for number in range(2):
        step(job, number)
        progress.read()
        shown.append(progress.line().partition("  ")[0])
    job.close()
    assert shown == lines


def test_the_command_accepts_a_file_without_data(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import paceline\nworkload = paceline.Workload(model=a, loss=b, optimizer=c, data=None)\n")
    assert read_workload_file(str(path), 2).path == path
    path.write_text("import paceline\nworkload = paceline.Workload(model=a, loss=b, optimizer=c, data=d)\n")
    with pytest.raises(WorkloadError, match="batch_size is missing"):
        read_workload_file(str(path), 2)
