"""Temporary files of a job go with it, also when its processes are killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from paceline.run.private import make_private, sweep

from support.jobs import STEPS, leftovers, losses, paceline, rank_pids, start, wait_for, write_workload

HOLD = """
import sys, time
from paceline.run.private import make_private
print(make_private(sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def test_leftover_folder_is_removed_only_after_its_process_ended(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        sweep(tmp_path)
        assert os.path.isdir(folder)
        process.kill()
    made = make_private(str(tmp_path))
    assert not os.path.exists(folder)
    assert list(tmp_path.iterdir()) == [made.path]
    assert made.path.stat().st_mode & 0o077 == 0
    made.remove()
    assert not list(tmp_path.iterdir())


def test_only_our_own_folders_are_swept(tmp_path):
    (tmp_path / "paceline-other").mkdir()  # no lock in it
    (tmp_path / "paceline-file").write_text("")
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody" / "lock").write_text("")
    (tmp_path / "paceline-link").symlink_to(tmp_path / "somebody")
    (tmp_path / "paceline-linked").mkdir()
    (tmp_path / "paceline-linked" / "lock").symlink_to(tmp_path / "somebody" / "lock")
    before = sorted(tmp_path.rglob("*"))
    sweep(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS])
def test_where_a_file_system_has_no_locks_a_job_goes_on_without(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as without:
        without.setattr("fcntl.flock", refuse)
        made = make_private(str(tmp_path))
        assert make_private(str(tmp_path)).path != made.path
        assert made.path.is_dir(), "the second job has removed it"
    sweep(tmp_path)  # with locks again, as from another client of the same file system
    assert made.path.is_dir()
    made.remove()
    assert not made.path.exists()


def test_a_folder_that_can_not_be_finished_does_not_stay(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        make_private(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_job_runs_where_there_are_no_locks(short_path, monkeypatch):
    from paceline.cli.main import main

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    file = write_workload(short_path)
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("fcntl.flock", refuse)
    assert main(["run", "-n", "2", "--runs", str(short_path / "runs"), "--job", "a", str(file)]) == 0
    assert not [path for path in short_path.iterdir() if "paceline-" in path.name]


def with_loader_worker(tmp_path):
    file = write_workload(tmp_path)
    file.write_text(file.read_text().replace("batch_size=8,", "batch_size=8, loader_workers=1,"))
    return file


@pytest.fixture
def short_path():
    """A folder whose own `tmp` holds the job's private folder: where the path is long, that goes to /tmp."""
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as name:
        yield Path(name)


def children(pid):
    return [child.pid for child in psutil.Process(pid).children()]


def begun(tmp_path, file):
    """A job of two ranks with a loader's process each, under way."""
    job = start(tmp_path, "run", "-n", "2", "--job", "a", "--checkpoint-every", "2", file, TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 3, 60)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_of_a_data_loader_is_killed(tmp_path, number):
    job = begun(tmp_path, with_loader_worker(tmp_path))
    ranks = [pid for pid in rank_pids(job) if children(pid)]
    os.kill(children(ranks[-1])[0], number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "a data loader's process should live as long as its rank\n  found: DataLoader worker (pid" in err
    assert "Traceback" not in err
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)


@pytest.mark.slow
def test_a_rank_with_a_data_loader_is_killed(tmp_path):
    job = begun(tmp_path, with_loader_worker(tmp_path))
    os.kill(rank_pids(job)[0], signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)


@pytest.mark.slow
def test_leftovers_of_killed_processes_are_removed_by_next_job(short_path):
    tmp_path = short_path
    file = with_loader_worker(tmp_path)
    job = begun(tmp_path, file)
    server = children(job.pid)[0]
    os.kill(server, signal.SIGSTOP)  # so that it can't clear up when the supervisor has gone
    os.kill(job.pid, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    job.communicate(timeout=60)
    assert wait_for(lambda: not any("process" in one for one in leftovers(tmp_path)))
    assert [path.name for path in (tmp_path / "tmp").glob("paceline-*")], "nothing is left: the test is void"
    assert not list((tmp_path / "tmp").glob("pymp-*"))
    ended = paceline(tmp_path, "run", "-n", "2", "--resume", "--job", "a", file)  # looks for leftovers itself
    assert ended.code == 0, ended.err
    assert len(losses(tmp_path / "runs" / "a")) == STEPS
