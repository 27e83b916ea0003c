"""Two jobs in one run directory, as processes: the first trains on unharmed, and a dead one keeps nobody off."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import psutil
import pytest

from paceline.checkpoint.owner import LOCK, RECORD, _keepers, take

from support.jobs import (
    STEPS,
    events,
    leftovers,
    losses,
    paceline,
    rank_pids,
    start,
    start_ranks,
    wait_for,
    write_workload,
)

pytestmark = pytest.mark.slow
BEGUN_S = 90


def begun(tmp_path, *words, pause="0.3"):
    """A job under way, with checkpoints."""
    file = write_workload(tmp_path)
    job = start(tmp_path, "run", "-n", "2", "--job", "a", "--checkpoint-every", "2", *words, file, TEST_PAUSE=pause)
    assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 3, BEGUN_S)
    return file, job


def steps(folder):
    return [event["step"] for event in events(folder, "step")]


def test_a_resume_beside_the_job_is_refused_and_changes_nothing(tmp_path):
    file, job = begun(tmp_path)
    assert {job.pid, *rank_pids(job)} <= set(_keepers(tmp_path / "runs" / "a" / LOCK))
    for words in (("--resume",), ("--resume-or-start",), ()):
        other = start(tmp_path, "run", "-n", "2", "--job", "a", *words, file)
        _, told = other.communicate(timeout=BEGUN_S)
        assert other.returncode == 2
        assert f"process {job.pid} on " in told or (words == () and "it exists" in told)
        assert told.count("fix: ") == 1
    _, told = job.communicate(timeout=BEGUN_S)
    assert job.returncode == 0, told
    assert steps(tmp_path / "runs" / "a") == list(range(1, STEPS + 1))
    assert len(events(tmp_path / "runs" / "a", "start")) == 1
    assert not leftovers(tmp_path)
    again = paceline(tmp_path, "run", "--job", "a", "--resume", file)
    assert again.code == 0, again.err


@pytest.mark.parametrize("trial", [0, pytest.param(1, marks=pytest.mark.complete)])
def test_of_three_new_jobs_of_one_name_one_trains(tmp_path, trial):
    file = write_workload(tmp_path)
    jobs = [start(tmp_path, "run", "--job", "a", "--checkpoint-every", "5", file) for _ in range(3)]
    told = [job.communicate(timeout=BEGUN_S)[1] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2, 2], told
    assert steps(tmp_path / "runs" / "a") == list(range(1, STEPS + 1))
    assert len(events(tmp_path / "runs" / "a", "start")) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


@pytest.mark.parametrize("who", [pytest.param("all", marks=pytest.mark.complete), "the command"])
def test_a_killed_job_keeps_nobody_off(tmp_path, who):
    file, job = begun(tmp_path)
    pids = rank_pids(job) if who == "all" else []
    job.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    again = start(tmp_path, "run", "-n", "2", "--job", "a", "--resume", file)
    _, told = again.communicate(timeout=BEGUN_S)
    job.communicate()
    assert again.returncode == 0, told
    assert max(steps(tmp_path / "runs" / "a")) == STEPS
    assert wait_for(lambda: not leftovers(tmp_path))


def test_job_that_lost_its_folder_ends_without_changing_it(tmp_path):
    _, job = begun(tmp_path)
    run = tmp_path / "runs" / "a"
    taken = {**json.loads((run / RECORD).read_text()), "token": "other", "host": "h2"}
    (run / "draft").write_text(json.dumps(taken))
    (run / "draft").rename(run / RECORD)
    _, told = job.communicate(timeout=BEGUN_S)
    assert job.returncode == 1, told
    assert f"another start has taken it: process {job.pid} on h2" in told
    assert told.count("fix: ") == 1, told
    assert "Last checkpoint" not in told
    assert not (run / "result.json").exists()
    assert not list((run / "failures").iterdir())
    assert json.loads((run / RECORD).read_text()) == taken
    assert max(steps(run)) < STEPS


def test_ranks_of_another_launcher_are_refused_too(tmp_path):
    file = write_workload(tmp_path)
    first = start_ranks(tmp_path, file, TEST_PAUSE="0.3")
    run = tmp_path / "runs" / "a"
    assert wait_for(lambda: len(losses(run)) >= 2, BEGUN_S)
    marks = {rank: (run / "ended" / rank).read_text() for rank in ("0", "1")}
    second = start_ranks(tmp_path, file, "--resume-or-start", PMIX_NAMESPACE="second")
    _, told = second[0].communicate(timeout=BEGUN_S)
    assert second[0].returncode == 2
    assert f"another job has it: process {first[0].pid} on " in told
    second[1].terminate()  # as a launcher does when a rank has failed
    second[1].communicate(timeout=BEGUN_S)
    assert {rank: (run / "ended" / rank).read_text() for rank in ("0", "1")} == marks
    for rank in first:
        _, told = rank.communicate(timeout=BEGUN_S)
        assert rank.returncode == 0, told
    assert steps(run) == list(range(1, STEPS + 1))
    assert json.loads((run / "result.json").read_text())["status"] == "done"


def sleeping(pid):
    """The children of a process that are the program `sleep`."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if child.name() == "sleep" else []
    return found


def test_mpirun_outlives_a_killed_command_and_keeps_the_folder(tmp_path, monkeypatch):
    """A program in mpirun's place: it starts no rank, and does not end with the command."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n[ $# -gt 1 ] && exec sleep 120\n")
    mpirun.chmod(0o755)
    file = write_workload(tmp_path)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = start(tmp_path, "run", "--on", "mpi", "-n", "2", "--job", "a", file, **path)
    # The command asks the program for its version first, in a process that ends at once.
    assert wait_for(lambda: sleeping(job.pid), BEGUN_S)
    (program,) = sleeping(job.pid)
    try:
        job.kill()
        job.communicate()
        monkeypatch.setattr("paceline.checkpoint.owner._ENDING_S", 0.5)
        with pytest.raises(Exception, match=f"others of its job have not\n.*`kill {program.pid}`"):
            take(tmp_path / "runs" / "a", print, "another --job than a")
    finally:
        program.kill()
    assert wait_for(lambda: not leftovers(tmp_path))
    take(tmp_path / "runs" / "a", print, "").release()
