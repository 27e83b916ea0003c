"""A job whose ranks make no progress: where they stand is told, and nothing is ended that may go on."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
import threading
import weakref
from pathlib import Path

import pytest

import paceline as paceline_package
from paceline.nouns.errors import UsageError
from paceline.run.rank.watchdog import Watchdog, stacks, waits_in
from paceline.run.rank.worker import run_rank
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.stall_verdict import Verdict
from paceline.run.supervise.stalls import AT_START, Stalls, notice_time, process_state
from paceline.run.supervise.supervisor import JobRequest, Supervisor

from support.jobs import LOOP, STEPS, losses, paceline, start, wait_for, write_workload

HOUR_S = 3600.0


def report(rank, **changes):
    """What a rank writes down that sleeps in step 7."""
    plain = {"rank": rank, "at": 1000.0, "stalled_s": 50.0, "cpu_s": 0.1, "step": 7, "steps_done": 6, "waits_in": None}
    own = {"is_in_step": True, "is_closing": False, "line": "train.py:8", "stack": [["train.py", 8, "loss"]]}
    return {**plain, **own, **changes}


def waiting(rank, **changes):
    return report(rank, waits_in="all_reduce", line="train.py:20", **changes)


def closing(rank):
    return report(rank, is_in_step=False, is_closing=True, step=None, waits_in="the writing of a checkpoint")


@pytest.fixture
def stalls(tmp_path):
    """A job of two ranks; called with reports it has these and no others."""
    made = Stalls(tmp_path, 60.0, 2)

    def write(*reports):
        (tmp_path / "stalls").mkdir(exist_ok=True)
        for old in (tmp_path / "stalls").iterdir():
            old.unlink()
        for one in reports:
            (tmp_path / "stalls" / f"{one['rank']}.json").write_text(json.dumps(one))
        return made

    return write


def test_who_waits_in_what_and_what_the_missing_rank_does(stalls):
    text = "\n".join(stalls(waiting(0), report(1)).look(1001.0, {}))
    assert "no progress for 50 s" in text
    assert "rank 0: step 7, waiting in all_reduce, called at train.py:20" in text
    assert "rank 1: step 7, at train.py:8, idle" in text
    assert "No process was ended" in text


def test_a_rank_that_computes_is_not_called_idle(stalls):
    assert "train.py:8, computing" in "\n".join(stalls(waiting(0), report(1, cpu_s=45.0)).look(1001.0, {}))


def test_different_calls_are_told_as_such(stalls):
    text = "\n".join(stalls(waiting(0), report(1, waits_in="broadcast")).look(1001.0, {}))
    assert "They wait in different calls" in text


def test_ranks_that_all_compute_are_no_hang(stalls):
    text = "\n".join(stalls(report(0), report(1)).look(1001.0, {}))
    assert "ranks 0, 1: step 7, at train.py:8" in text
    assert "None waits for another" in text


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_rank_that_writes_nothing_is_looked_at_from_outside(stalls):
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        text = "\n".join(stalls(waiting(0)).look(1001.0, {1: pid}))
        assert "rank 1: nothing reported" in text
        os.kill(pid, signal.SIGSTOP)
        assert wait_for(lambda: process_state(pid) == "T")
        made = stalls(waiting(0))
        made.notices.clear()
        assert "rank 1: its process is stopped" in "\n".join(made.look(1001.0, {1: pid}))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_it_is_told_within_the_notice_time_and_then_rarely(stalls):
    made = stalls(waiting(0, stalled_s=15.0), report(1, stalled_s=15.0))
    assert made.look(1000.0, {}) == []
    at = [second for second in range(1000, 1000 + 4 * 3600) if made.look(float(second), {})]
    assert at[0] - 1000 + 15 <= 60
    assert len(at) <= 6, "in four hours"
    assert all(later - sooner >= 600 for sooner, later in itertools.pairwise(at))


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, 0.0])
def test_stall_duration_does_not_depend_on_the_clock_of_a_host(stalls, jump_s):
    made = stalls(waiting(0, at=1000.0 + jump_s, stalled_s=15.0))
    assert made.look(5.0, {}) == []
    assert made.look(34.0, {}) == []
    assert "no progress for 45 s" in "\n".join(made.look(35.0, {}))
    made = stalls(waiting(0, at=1000.0 - jump_s, stalled_s=52.0))
    made.notices.clear()
    assert "no progress for 52 s" in "\n".join(made.look(42.0, {}))


class Asked(Verdict):
    """A verdict whose ranks answer when the test says so."""

    def begin(self):
        self.thread = threading.Thread(target=ANSWERED.wait)
        self.lines = ["paceline: rank 1 sleeps"]
        self.thread.start()


ANSWERED = threading.Event()


@pytest.mark.parametrize("goes_on", [False, True], ids=["it stands", "it goes on before they answer"])
def test_the_cause_is_told_once_when_the_ranks_have_answered(stalls, tmp_path, goes_on):
    ANSWERED.clear()
    made = stalls(waiting(0))
    made.verdict = Asked(tmp_path)
    assert made.look(1001.0, {})
    thread = made.verdict.thread
    if goes_on:
        stalls()
        assert made.look(1002.0, {}) == ["paceline: the job goes on"]
        stalls(waiting(0))
    assert made.look(1002.0, {}) == []
    ANSWERED.set()
    thread.join()
    assert made.look(1003.0, {}) == ([] if goes_on else ["paceline: rank 1 sleeps"])
    assert made.look(1004.0, {}) == []


def test_the_same_slow_rank_in_every_step_is_told_rarely(stalls):
    made, told = stalls(), 0
    for step in range(100):  # a minute and a half each
        now = 1000.0 + 90 * step
        stalls(waiting(0, at=now, step=step), report(1, at=now, step=step))
        told += bool(made.look(now + 1, {}))
        stalls()
        made.look(now + 2, {})
    assert 1 <= told <= 5


def test_progress_ends_the_notice(stalls):
    made = stalls(waiting(0))
    assert made.look(1001.0, {})
    stalls()
    assert made.look(1002.0, {}) == ["paceline: the job goes on"]
    assert made.look(1003.0, {}) == []


def test_no_notice_where_none_is_wanted(stalls):
    made = stalls(waiting(0))
    made.notice_s = 0.0
    assert made.look(10 * HOUR_S, {}) == []


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"rank": 0}', "\x00"])
def test_a_file_that_is_no_report_is_passed_over(stalls, tmp_path, torn):
    made = stalls(waiting(0))
    (tmp_path / "stalls" / "1.json").write_text(torn)
    assert "rank 0: step 7" in "\n".join(made.look(1001.0, {}))


def test_stall_finds_the_rank_that_closed_while_another_waits(stalls):
    made = stalls(waiting(0), closing(1))
    made.look(1001.0, {})
    assert made.who_left() == 1


@pytest.mark.parametrize(
    "reports",
    [
        (waiting(0), report(1)),  # slow
        (closing(0), closing(1)),  # both write the last checkpoint
        (waiting(0, is_in_step=False), closing(1)),  # it may still come to a call outside a step
        (report(0), closing(1)),  # it may be slow, and leave too
        (waiting(0, step=6), closing(1)),  # the last step that the other has done
    ],
)
def test_nobody_has_left_as_long_as_they_may_come(stalls, reports):
    made = stalls(*reports)
    made.look(1001.0, {})
    assert made.who_left() is None


def test_stall_finds_the_rank_whose_file_ended_before_the_start(stalls):
    made = stalls(report(0, waits_in=AT_START, step=None, is_in_step=False))
    made.look(1001.0, {})
    assert made.who_left([1, 2]) == 1
    assert made.who_left() is None
    made = stalls(waiting(0))  # in a step, where the ended one is a peer that was lost
    made.look(1001.0, {})
    assert made.who_left([1]) is None


def test_who_has_left_is_known_where_no_notice_is_wanted(stalls):
    made = stalls(waiting(0), closing(1))
    made.notice_s = 0.0
    assert made.look(1001.0, {}) == []
    assert made.who_left() == 1


@pytest.mark.parametrize("notice_s", [0.0, 3600.0])
def test_a_rank_reports_whatever_the_notice_time_is(tmp_path, monkeypatch, notice_s):
    monkeypatch.setattr("paceline.run.rank.watchdog.DEFAULT_S", 0.2)
    watchdog = Watchdog(tmp_path, 0, notice_s)
    watchdog.start()
    try:
        assert wait_for((tmp_path / "stalls" / "0.json").exists, 10)
    finally:
        watchdog.stop()


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0", 0.0), ("", 60.0)])
def test_the_notice_time_of_the_environment(text, seconds):
    assert notice_time({"PACELINE_STALL_NOTICE": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_stall_notice_time_that_is_no_number_is_refused(text):
    with pytest.raises(UsageError, match=f"PACELINE_STALL_NOTICE={text}\n  found: it is no number of seconds"):
        notice_time({"PACELINE_STALL_NOTICE": text})


@pytest.mark.parametrize(("notice_s", "again"), [(60.0, "in 10 min at"), (4.0, "in 40 s at")])
def test_when_the_same_is_told_again(stalls, notice_s, again):
    made = stalls(waiting(0))
    made.notice_s = notice_s
    *_, more, last = made.look(1001.0, {})
    assert again in last
    assert more == f"  More: paceline why {made.run_dir}"


def test_a_nodes_supervisor_misses_ranks_of_other_nodes_too(tmp_path):
    request = JobRequest(Path("x"), (), 2, tmp_path, world_size=4)
    stalls = Supervisor(request, Screen(io.StringIO(), io.StringIO())).stalls
    (tmp_path / "stalls").mkdir()
    for rank in range(3):
        (tmp_path / "stalls" / f"{rank}.json").write_text(json.dumps(waiting(rank)))
    assert "rank 3: nothing reported" in "\n".join(stalls.look(1001.0, {}))


def looked_at_by(look):
    """Whether a value lives on after the function that made it, when another thread has looked at that function."""

    class Value:
        pass

    looks = []

    def make():
        value = Value()
        thread = threading.Thread(target=lambda: looks.append(look()))
        thread.start()
        thread.join()
        return weakref.ref(value)

    is_alive = make()() is not None
    assert looks[0]
    return is_alive


def test_looking_at_stacks_keeps_no_value_alive():
    """A graph that is being captured would take a tensor that lives on for a result."""
    assert looked_at_by(sys._current_frames), "frames keep nothing alive: the test is void"
    assert not looked_at_by(stacks)


def test_stacks_are_found_by_thread():
    frames = stacks()[threading.get_ident()]
    assert frames[0][2] == "stacks" or frames[0][2] == "test_stacks_are_found_by_thread"
    assert any(name == "test_stacks_are_found_by_thread" for _, _, name in frames)


OURS = os.path.dirname(paceline_package.__file__)
C10D = "torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (
            [("comm/shared_memory.py", "_read"), ("comm/shared_memory.py", "finish"), ("comm/reducer.py", "finish")],
            "all_reduce",
        ),
        (
            [("comm/collectives.py", "wait"), ("comm/reducer.py", "finish"), ("parallel/step_stats.py", "finish")],
            "all_reduce",
        ),
        ([("comm/collectives.py", "wait"), ("parallel/pipeline/pipeline_strategy.py", "run")], "a collective"),
        ([(C10D, "broadcast"), ("torch/distributed/c10d_logger.py", "wrapper")], "broadcast"),
        ([(C10D, "_helper"), (C10D, "all_reduce")], "all_reduce"),
        ([(C10D, "reduce"), ("comm/collectives.py", "reduce")], "reduce"),
        ([("lib/threading.py", "wait"), ("server/link.py", "step")], "an answer of the parameter servers"),
        ([("lib/threading.py", "join"), ("checkpoint/save.py", "wait")], "the writing of a checkpoint"),
        ([("torch/nn/linear.py", "forward"), ("comm/fully_shard.py", "shard")], None),
        ([("<frozen importlib._bootstrap>", "_load"), ("comm/collectives.py", "wait")], None),
        ([("/home/me/comm/shared_memory.py", "_read")], None),
        ([], None),
    ],
)
def test_a_wait_is_named_after_the_call(frames, name):
    own = ("comm/", "server/", "checkpoint/", "parallel/")
    named = [(os.path.join(OURS, file) if file.startswith(own) else file, 1, function) for file, function in frames]
    assert waits_in(named) == name


def test_long_imports_are_told_once(stalls):
    made = stalls()
    for line in range(50):
        stalls(report(0, at=1000.0 + line, line=f"x.py:{line}"), report(1, at=1000.0 + line, line=f"y.py:{line}"))
        told = made.look(1001.0 + line, {})
        assert bool(told) == (line == 0)


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_notice_time_that_is_none_is_refused(tmp_path, value):
    ended = paceline(tmp_path, "run", f"--stall-notice={value}", write_workload(tmp_path))
    assert ended.code == 2
    assert "is no number of seconds" in ended.err


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}])
def test_stall_notice_variable_is_refused_before_the_start(tmp_path, rank):
    ended = paceline(tmp_path, "run", "--job", "a", write_workload(tmp_path), PACELINE_STALL_NOTICE="abc", **rank)
    assert ended.code == 2
    assert "PACELINE_STALL_NOTICE=abc\n  found: it is no number of seconds" in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("more", [[], ["--stall-notice", "30"]], ids=["", "beside the flag"])
def test_stall_notice_time_for_ranks_is_refused_before_the_start(tmp_path, more):
    words = ["run", "-n", "2", "--job", "a", "-x", "PACELINE_STALL_NOTICE=abc", *more]
    ended = paceline(tmp_path, *words, write_workload(tmp_path))
    assert ended.code == 2, ended.err
    assert "PACELINE_STALL_NOTICE=abc\n  found: it is no number of seconds" in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_rank_that_finds_no_notice_time_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_STALL_NOTICE", "abc")
    assert run_rank("nosuch.py", []) == 2
    failure = json.loads((tmp_path / "failures" / "0.json").read_text())
    assert "PACELINE_STALL_NOTICE=abc\n  found: it is no number of seconds" in failure["message"]


@pytest.mark.parametrize("words", [["--on", "ray"], ["--on", "mpi", "-H", "h1:1,h2:1"]], ids=["ray", "mpi"])
def test_the_notice_time_goes_to_ranks_on_other_hosts(tmp_path, words):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1'\n")
    program.chmod(0o755)
    words = ["run", "--dry-run", *words, "-n", "2", "--stall-notice", "0", write_workload(tmp_path)]
    ended = paceline(tmp_path, *words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert ended.code == 0, ended.err
    named = "-x PACELINE_STALL_NOTICE " if "mpi" in words else '"PACELINE_STALL_NOTICE": "0.0"'
    assert named in ended.out


@pytest.mark.parametrize("target", ["slurm", "kubernetes"])
def test_a_notice_time_is_refused_where_nothing_supervises(tmp_path, target):
    ended = paceline(tmp_path, "submit", target, "--stall-notice", "30", write_workload(tmp_path))
    assert ended.code == 2
    assert "--stall-notice" in ended.err
    assert not (tmp_path / "runs").exists()


MIXED = """
        if job.step_number == 6 and job.rank == 0:
            paceline.broadcast(torch.ones(3))
        elif job.step_number == 6:
            paceline.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
def test_a_slow_rank_is_told_and_the_job_trains_on(tmp_path):
    hook = "    if job and job.step_number == 6 and job.rank == 1: time.sleep(10)\n"
    ended = paceline(
        tmp_path,
        "run",
        "-n",
        "2",
        "--job",
        "a",
        "--stall-notice",
        "4",
        write_workload(tmp_path, hook),
        TEST_PAUSE="0.2",
    )
    assert ended.code == 0, ended.err
    line = (tmp_path / "tiny.py").read_text().splitlines().index(hook.rstrip()) + 1
    assert "rank 0: step 7, waiting in all_reduce, called at " in ended.err
    assert f"rank 1: step 7, at {tmp_path}/tiny.py:{line}, idle" in ended.err
    cause = f"paceline: rank 1 in step 7 sleeps, reads or writes at {tmp_path}/tiny.py:{line}: "
    assert cause in ended.err
    assert ended.err.index(cause) < ended.err.index("paceline: the job goes on")
    assert len(losses(tmp_path / "runs" / "a")) == STEPS
    assert not (tmp_path / "runs" / "a" / "stalls").exists()


@pytest.mark.slow
def test_stall_deadlock_is_told_and_a_second_ctrl_c_ends_the_job(tmp_path):
    words = ("-n", "2", "--job", "a", "--checkpoint-every", "5")
    with (tmp_path / "err").open("w") as err:
        job = start(
            tmp_path, "run", *words, write_workload(tmp_path, loop=LOOP + MIXED), stderr=err, PACELINE_STALL_NOTICE="2"
        )
        assert wait_for(lambda: "wait in different calls" in (tmp_path / "err").read_text(), 60)
        text = (tmp_path / "err").read_text()
        assert "rank 0: waiting in broadcast" in text
        assert "rank 1: waiting in all_reduce" in text
        job.send_signal(signal.SIGINT)
        assert wait_for(lambda: "once more to kill" in (tmp_path / "err").read_text())
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=15)
    assert job.returncode == 130
    assert "the newest checkpoint is runs/a/checkpoints/step-00000005" in (tmp_path / "err").read_text()


SHORTER = """
import paceline.run.supervise.stalls as stalls
stalls.DEFAULT_S = 8.0  # seconds instead of 60: the ranks' first reports come after a quarter of it
"""


@pytest.mark.slow
@pytest.mark.parametrize("notice_s", ["4", "0", "3600"])
def test_rank_0_that_leaves_its_loop_is_the_first_cause(tmp_path, notice_s):
    (tmp_path / "sitecustomize.py").write_text(SHORTER)
    hook = "    if job and job.step_number == 6 and job.rank == 0: sys.exit(0)\n"
    words = ("run", "-n", "2", "--job", "a", "--stall-notice", notice_s)
    ended = paceline(tmp_path, *words, write_workload(tmp_path, hook), timeout=60, PYTHONPATH=str(tmp_path))
    assert ended.code == 1
    assert "rank 0 should take as many steps as the other ranks\n  found: it left its loop" in ended.err
    assert ended.seconds < 30  # far below the 60 s after which any stall is told of
