"""Ranks that another launcher started: how each of them ended is known, and the job's end says so."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from paceline.launch.rank_command import STOPPED_CODE
from paceline.nouns.errors import LossError
from paceline.run.ends import Ends, first_of
from paceline.run.failures import EXITED_EARLY, in_one_line, lost_server
from paceline.run.rank.external_rank import JoinedRank

from support.jobs import LOOP, STEPS, command, leftovers, losses, marked, start_ranks, wait_for, write_workload

SETTLED_S = 90


def end_of(jobs):
    """Exit codes and what was written on stderr, once all have ended."""
    told = [job.communicate(timeout=SETTLED_S)[1] for job in jobs]
    return [job.returncode for job in jobs], told


def result(folder):
    return json.loads((folder / "runs" / "a" / "result.json").read_text())


def children(job):
    return psutil.Process(job.pid).children()


LATE = LOOP + "    job.close()\n    if job.rank == 1: os._exit(0)\n"
EARLY = "    if job and job.step_number == 6 and job.rank in {ranks}: os._exit(0)\n"
NAMED = "rank {rank}'s process ended with exit code 0 before the end of its file; did the file call os._exit(0)?"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "loop", "who"),
    [
        (EARLY.format(ranks=(1,)), LOOP, [1]),
        (EARLY.format(ranks=(0,)), LOOP, [0]),
        (EARLY.format(ranks=(0, 1)), LOOP, [0, 1]),
        ("", LATE, [1]),
    ],
    ids=["rank 1", "rank 0", "both", "after its last step"],
)
def test_joined_rank_that_leaves_before_the_end_fails_the_job(tmp_path, hook, loop, who):
    codes, told = end_of(start_ranks(tmp_path, write_workload(tmp_path, hook, loop)))
    assert all(codes[rank] == 1 for rank in {0, *who}), (codes, told)
    ended = result(tmp_path)
    assert (ended["status"], ended["exit_code"]) == ("failed", 1)
    assert ended["failure"]["rank"] in who
    assert NAMED.format(rank=ended["failure"]["rank"]) in ended["failure"]["message"]
    for rank in who:
        assert told[rank].count(NAMED.format(rank=rank)) == 1, told
    assert wait_for(lambda: not leftovers(tmp_path))


@pytest.mark.slow
def test_ranks_that_end_well_are_done(tmp_path):
    codes, told = end_of(start_ranks(tmp_path, write_workload(tmp_path)))
    assert codes == [0, 0], told
    ended = result(tmp_path)
    assert (ended["status"], ended["exit_code"], ended["steps"], ended["failure"]) == ("done", 0, STEPS, None)
    assert not (tmp_path / "runs" / "a" / "ended").exists()
    assert wait_for(lambda: not leftovers(tmp_path))


@pytest.mark.slow
def test_rank_0_waits_for_what_another_does_after_the_last_step(tmp_path):
    after = "    job.close()\n    if job.rank == 1:\n        time.sleep(12)\n        raise ValueError('late')\n"
    codes, told = end_of(start_ranks(tmp_path, write_workload(tmp_path, loop=LOOP + after)))
    assert codes == [1, 1], told
    assert result(tmp_path)["status"] == "failed"
    assert result(tmp_path)["failure"]["message"] == "late"
    assert told[1].count("ValueError: late") == 2  # its traceback and the line that names rank and step
    assert "Traceback" not in told[0]
    assert told[0].count("rank 0 has ended, and waits for rank 1") == 1


@pytest.mark.slow
def test_a_signal_to_the_launchers_process_saves_and_stops(tmp_path):
    jobs = start_ranks(tmp_path, write_workload(tmp_path), TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 2, SETTLED_S)
    jobs[0].send_signal(signal.SIGTERM)
    codes, told = end_of(jobs)
    assert codes == [STOPPED_CODE, STOPPED_CODE], told
    steps = max(losses(tmp_path / "runs" / "a"))
    assert steps < STEPS
    assert (tmp_path / "runs" / "a" / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert result(tmp_path)["status"] == "stopped"


@pytest.mark.slow
def test_joined_signal_names_its_rank_and_reaches_its_launcher(tmp_path):
    jobs = start_ranks(tmp_path, write_workload(tmp_path), TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 2, SETTLED_S)
    (rank,) = children(jobs[1])
    rank.kill()
    codes, told = end_of(jobs)
    assert codes == [1, -signal.SIGKILL], told
    assert "rank 1's process was ended by SIGKILL" in result(tmp_path)["failure"]["message"]


@pytest.mark.slow
def test_when_the_launchers_process_is_killed_its_rank_ends(tmp_path):
    jobs = start_ranks(tmp_path, write_workload(tmp_path), ranks=1, TEST_PAUSE="0.5", PACELINE_RANK="")
    jobs[0].kill()
    jobs[0].communicate()
    assert wait_for(lambda: not leftovers(tmp_path))


def under_torchrun(tmp_path, file):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    line = [*torchrun, *command("run", "--job", "a", file)]
    env = marked(tmp_path, {})
    return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=SETTLED_S, env=env)


@pytest.mark.slow
def test_a_named_job_under_torchrun(tmp_path):
    done = under_torchrun(tmp_path, write_workload(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (result(tmp_path)["status"], result(tmp_path)["steps"]) == ("done", STEPS)


@pytest.mark.slow
def test_torchrun_sees_that_a_rank_has_left(tmp_path):
    done = under_torchrun(tmp_path, write_workload(tmp_path, loop=LATE))
    assert done.returncode != 0
    assert NAMED.format(rank=1) in done.stderr
    assert result(tmp_path)["status"] == "failed"
    assert result(tmp_path)["failure"]["rank"] == 1


@pytest.mark.slow
def test_joined_error_on_all_ranks_is_told_once_with_first_rank(tmp_path):
    codes, told = end_of(start_ranks(tmp_path, write_workload(tmp_path, LATER)))
    assert codes == [1, 1], told
    assert result(tmp_path)["failure"]["rank"] == 1
    assert told[0].count("Traceback") == 0, told
    assert told[1].count("Traceback") == 1, told
    assert "paceline run: rank 0, step 7 failed: ValueError: both" in told[0]
    assert "rank 1, step 7 failed: ValueError: both" in told[1]
    assert told[0].count("rank 1, step 7 failed first: ValueError: both") == 1
    assert "first" not in told[1]


LATER = """
    if job and job.step_number == 6:
        time.sleep(0 if job.rank else 2)
        raise ValueError("both")
"""
CLOSED = "    if job and job.step_number == 6 and job.rank == 1: sys.exit(0)\n"


@pytest.mark.slow
def test_joined_hang_is_ended_without_supervisor_or_notices(tmp_path, monkeypatch):
    file = write_workload(tmp_path, CLOSED)
    codes, told = end_of(start_ranks(tmp_path, file, PACELINE_STALL_NOTICE="0"))
    assert codes[0] == 1, told  # above 128 the scheduler would start it again, to the same end
    ended = result(tmp_path)
    assert (ended["exit_code"], ended["failure"]["rank"]) == (1, 1)
    said = "rank 1 should take as many steps as the other ranks"
    assert said in ended["failure"]["message"]
    assert told[0].count(said) == 1


def test_the_process_above_a_rank_has_no_torch():
    line = "import paceline.run.rank.external_rank, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """The process above a rank of two, by rank."""
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "2")
    monkeypatch.delenv("PACELINE_SUPERVISED", raising=False)

    def make(rank):
        monkeypatch.setenv("PACELINE_RANK", str(rank))
        return JoinedRank(tmp_path, 0.0)

    return make


def waited_for(one, seconds):
    """The status that `one` finds of a rank that takes so long."""
    wake, written = os.pipe()
    one.pid = os.posix_spawnp("sleep", ["sleep", str(seconds)], os.environ)
    try:
        return one._wait(wake)
    finally:
        os.close(wake)
        os.close(written)


@pytest.fixture
def ends(tmp_path):
    made = Ends(tmp_path, 3)
    for rank in range(3):
        made.begin(rank)
    return made


def test_an_end_is_known_once_it_is_written(ends):
    assert ends.read(range(3)) == {}
    ends.write(1, 0)
    ends.write(2, -9)
    assert ends.read(range(3)) == {1: 0, 2: -9}
    ends.begin(1)
    assert ends.read(range(3)) == {2: -9}, "of an earlier attempt"


def test_joined_rank_may_begin_before_the_run_directory_exists(tmp_path):
    ends = Ends(tmp_path / "runs" / "a", 2)
    ends.begin(1)
    assert ends.silent({}) == []


def test_a_mark_that_could_not_be_written_is_written_later(tmp_path, joined):
    (tmp_path / "ended").write_text("in the way")
    one = joined(1)
    one.ends.begin(1)
    (tmp_path / "ended").unlink()
    waited_for(one, 1.5)
    assert (tmp_path / "ended" / "1").exists()


def test_a_rank_whose_host_has_another_folder_is_silent(tmp_path):
    ends = Ends(tmp_path, 3)
    ends.begin(0)
    ends.begin(1)
    assert ends.silent({}) == [2]
    cause = first_of(tmp_path, {0: 0, 1: 0}, 3, None)
    assert cause["rank"] == 2
    assert "all hosts share that folder" in cause["message"]


def test_joined_rank_with_an_old_mark_is_not_waited_for(ends, monkeypatch):
    now = itertools.count(1000)
    monkeypatch.setattr("paceline.run.ends.time.monotonic", lambda: next(now))
    ends.write(2, 0)
    for second in range(50):
        assert ends.silent({2: 0}) == [], second
    os.utime(ends.folder / "1", (5, 5))
    quiet = [ends.silent({2: 0}) for _ in range(70)]
    assert quiet[55] == []
    assert quiet[-1] == [1]


def test_joined_suspension_of_rank_0_makes_no_rank_silent(ends, monkeypatch):
    now = itertools.count(1000, 600)
    monkeypatch.setattr("paceline.run.ends.time.monotonic", lambda: next(now))
    assert [ends.silent({}) for _ in range(5)] == [[]] * 5


def test_joined_mark_on_a_failing_file_system_is_waited_for(ends, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", stale)
        patch.setattr("pathlib.Path.stat", stale)
        assert ends.silent({}) == []
    assert ends.silent({}) == []


def test_the_end_takes_the_place_of_the_beginning_on_the_disk(ends):
    before = (ends.folder / "1").stat()
    for status in (0, EXITED_EARLY, -64):
        ends.write(1, status)
        after = (ends.folder / "1").stat()
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
        assert ends.read([1]) == {1: status}


def test_the_process_above_a_rank_touches_its_mark(ends, joined, monkeypatch):
    monkeypatch.setattr("paceline.run.rank.external_rank.HEARTBEAT_S", 0.5)
    one = joined(1)
    one.has_begun = True
    os.utime(ends.folder / "1", (5, 5))
    waited_for(one, 2.5)
    assert (ends.folder / "1").stat().st_mtime > 5


def lost_peer(tmp_path, rank):
    (tmp_path / "failures").mkdir(exist_ok=True)
    own = {"type": "PeerLostError", "message": "rank 1 has gone", "traceback": "", "where": None}
    own |= {"rank": rank, "step": 3, "at": 5.0, "is_peer_loss": True, "is_paceline": True, "exit_code": 1}
    (tmp_path / "failures" / f"{rank}.json").write_text(json.dumps(own))


def test_a_rank_that_ended_well_is_the_peer_that_the_others_lost(tmp_path):
    lost_peer(tmp_path, 0)
    cause = first_of(tmp_path, {0: 1, 1: 0}, 2, {"step": 2})
    assert cause["rank"] == 1
    assert "should take as many steps" in cause["message"]


def test_a_rank_that_left_comes_before_the_loss_of_it(tmp_path):
    lost_peer(tmp_path, 0)
    cause = first_of(tmp_path, {0: 1, 1: EXITED_EARLY}, 2, {"step": 2})
    assert (cause["rank"], cause["step"], cause["type"]) == (1, 3, "ProcessDied")


def test_a_failure_in_one_line_says_what_was_found():
    """An error of ours by its first two lines, whoever wrote the message; anything else by its first."""
    lost = lost_server(-9, 0.0)
    assert in_one_line(lost) == "the fork server should live as long as its ranks: it was ended by SIGKILL"
    error = LossError("the loss should be a finite number", "it is NaN", "lower the learning rate").at(rank=1, step=3)
    line = "[rank 1, step 3] the loss should be a finite number: it is NaN"
    assert in_one_line({"message": str(error)}) == line
    assert in_one_line({"message": "first\nsecond"}) == "first"
    assert in_one_line({"message": ""}) == ""
