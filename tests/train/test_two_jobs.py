"""A run directory has one job; where there is none, a process may make several."""

from __future__ import annotations

import signal

import pytest
import torch
from test_job import workload

import paceline as paceline_api
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.plan import Plan
from paceline.train import open_jobs as jobs

from support.jobs import events, losses, paceline, write_workload

TWO_AT_ONCE = """
if __name__ == "__main__":
    first, job = paceline.distribute(workload), paceline.distribute(workload)
"""
ONE_AFTER_THE_OTHER = """
if __name__ == "__main__":
    for _ in range(2):
        job = paceline.distribute(workload)
        for batch in job.batches():
            job.step(batch)
        job.close()
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run directory, as `paceline run` gives it to one rank."""
    Plan(mesh="replicate=1").write(tmp_path / "plan.json")
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    jobs.close_open_jobs()
    signal.signal(signal.SIGTERM, before)


def train(job):
    return [job.step(batch) for batch in job.batches()]


def test_a_second_job_of_a_run_is_refused(run_dir):
    first = paceline_api.distribute(workload())
    with pytest.raises(UsageError, match="a second job was asked for"):
        paceline_api.distribute(workload())
    train(first)
    first.close()
    with pytest.raises(UsageError, match=f"{run_dir} has those of the first"):
        paceline_api.distribute(workload())


def test_a_job_that_could_not_begin_is_no_job(run_dir):
    (run_dir / "checkpoints").touch()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(CheckpointError, match="can't be written"):
        paceline_api.distribute(workload())
    assert signal.getsignal(signal.SIGTERM) is handler, "a job that is not there would be asked to stop"
    with pytest.raises(paceline_api.PacelineError):
        paceline_api.distribute(workload(scheduler=lambda optimizer: None))
    (run_dir / "checkpoints").unlink()
    job = paceline_api.distribute(workload())
    train(job)
    jobs.close_open_jobs()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]


def test_when_a_run_has_ended_its_process_may_begin_another(run_dir, tmp_path, monkeypatch):
    train(paceline_api.distribute(workload()))
    jobs.close_open_jobs()
    monkeypatch.setenv("PACELINE_RESUME", str(run_dir / "checkpoints"))
    job = paceline_api.distribute(workload())
    assert job.step_number == 4


@pytest.mark.parametrize("is_run", [True, False])
def test_a_closed_job_takes_no_step(run_dir, monkeypatch, is_run):
    if not is_run:
        monkeypatch.delenv("PACELINE_RUN_DIR")
    job = paceline_api.distribute(workload(evaluation=workload().data))
    batches = job.batches()
    job.step(next(batches))
    before = job.model.weight.detach().clone()
    job.close()
    with pytest.raises(
        UsageError, match=r"step 2\] can't take step 2 of the job\n  found: the job is closed.*after step 1"
    ):
        job.step(next(batches))
    assert torch.equal(job.model.weight, before)
    job.save(run_dir / "out")
    job.load(run_dir / "out")
    assert set(job.evaluate()) >= {"loss"}
    job.close()
    jobs.close_open_jobs()
    if is_run:
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000001"]
        assert [event["step"] for event in events(run_dir, "end")] == [1]


def test_without_a_run_jobs_share_nothing(monkeypatch):
    """A cell of a notebook that is run again, or a generator and a critic with a job each."""
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    alone = train(paceline_api.distribute(workload()))
    first, second = paceline_api.distribute(workload()), paceline_api.distribute(workload(seed=1))
    mixed = [
        (first.step(one), second.step(other)) for one, other in zip(first.batches(), second.batches(), strict=True)
    ]
    assert [one for one, _ in mixed] == alone
    assert [other for _, other in mixed] != alone


@pytest.mark.slow
@pytest.mark.parametrize("loop", [TWO_AT_ONCE, ONE_AFTER_THE_OTHER])
def test_a_file_with_two_jobs_is_told_once(tmp_path, loop):
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, loop=loop))
    assert ended.code == 2
    assert "a second job was asked for in this process" in ended.err
    assert ended.err.count("fix: ") == 1
    assert "Traceback" not in ended.err
    run = tmp_path / "runs" / "a"
    assert len(events(run, "start")) == 1
    assert len(losses(run)) == (0 if loop == TWO_AT_ONCE else 20)
