"""A job that makes no progress for as long as --stall-timeout says is ended, and no other job is."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import threading
from pathlib import Path

import pytest

from paceline.launch.rank_command import STALLED_CODE
from paceline.nouns.errors import UsageError
from paceline.run.causes import Cause
from paceline.run.failures import format_failure, made_no_progress
from paceline.run.job_facts import Facts, RankFacts
from paceline.run.read.runs import Run
from paceline.run.request import stall_timeout_of
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.stalls import Timeout
from paceline.run.supervise.supervisor import JobRequest, Supervisor

from support.jobs import losses, paceline, start, write_workload

RUN = Run(folder=Path("runs/a"), status="running", started=0.0, ranks=2)
SLEEP = Cause("idle", (1,), "rank 1 in step 7 sleeps at train.py:8; rank 0 waits for it in all_reduce", "look there")
LIMIT_S = 60.0
FIVE_S = 5.0  # one look counts no more


def answer(**changes):
    """What a rank answers that has waited in step 7 for two minutes."""
    plain = {
        "stalled_s": 120.0,
        "cpu_s": 0.1,
        "step": 7,
        "steps_done": 6,
        "waits_in": "all_reduce",
        "line": "train.py:20",
    }
    return {**plain, "is_closing": False, "stack": [["train.py", 20, "main"]], **changes}


STANDS = [RankFacts(0, answer()), RankFacts(1, answer(waits_in=None, line="train.py:8"))]
SILENT = [RankFacts(0, answer()), RankFacts(1, None, pid=7, state="stopped")]


class Told:
    """A verdict for which the ranks answer at once, each time what stands next in a list; the last stays."""

    def __init__(self, *answers, found=(SLEEP,), **facts):
        self.left = list(answers)
        self.found = list(found)
        self.facts = facts
        self.asked = 0

    def drop(self):
        pass

    def answers(self):
        self.asked += 1
        ranks = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return Facts(run=RUN, ranks=ranks, **self.facts)


def after(folder, verdict, looks, seconds=LIMIT_S, ended=(), pids=None):
    """The failure after so many looks, five seconds from each other, the first of which counts nothing."""
    timeout = Timeout(folder, seconds)
    timeout.verdict = verdict
    failure = None
    for look in range(looks + 1):
        failure = failure or timeout.look(1000.0 + FIVE_S * look, 2e9, ended, pids or {})
    return failure


def test_stall_timeout_failure_says_where_each_rank_is(tmp_path):
    verdict = Told(STANDS)
    assert after(tmp_path, verdict, 11) is None
    assert verdict.asked == 0, "nobody is asked before the time is over"
    failure = after(tmp_path, verdict, 12)
    assert (failure["rank"], failure["step"], failure["exit_code"]) == (1, 7, STALLED_CODE)
    text = format_failure(failure, 1)
    assert text.startswith(
        "[rank 1, step 7] the job should make progress within 60 s (--stall-timeout)\n  found: rank 1"
    )
    assert "rank 0: step 7, waiting in all_reduce, called at train.py:20; rank 1: step 7, at train.py:8, idle" in text
    assert f"fix: look at the stacks in {tmp_path}/stalls/ended-1, or raise --stall-timeout" in text
    saved = {path.name: json.loads(path.read_text()) for path in (tmp_path / "stalls" / "ended-1").iterdir()}
    assert saved.keys() == {"0.json", "1.json"}
    assert saved["1.json"]["line"] == "train.py:8"


def test_a_second_end_keeps_the_stacks_of_the_first(tmp_path):
    for number in (1, 2):
        assert f"stalls/ended-{number}," in after(tmp_path, Told(STANDS), 12)["message"]
    assert {path.name for path in (tmp_path / "stalls").iterdir()} == {"ended-1", "ended-2"}


def test_stall_timeout_names_no_rank_unless_one_is_waited_for(tmp_path):
    deadlock = Cause("different calls", (0,), "ranks wait for each other in different calls", "mend them")
    both = Cause("same call", (), "all ranks wait in all_reduce", "print the shapes")
    assert after(tmp_path, Told(STANDS, found=[both]), 12)["rank"] is None
    assert after(tmp_path, Told(STANDS, found=[]), 12)["rank"] is None
    assert after(tmp_path, Told(STANDS, found=[deadlock]), 12)["rank"] == 0


def test_a_job_with_a_rank_that_makes_progress_goes_on(tmp_path):
    going = [RankFacts(0, answer()), RankFacts(1, answer(stalled_s=20.0))]
    verdict = Told(going)
    assert after(tmp_path, verdict, 40) is None
    assert 2 <= verdict.asked <= 6, "it is asked again once its newest progress is long ago, and not before"


def test_a_rank_that_gives_no_answer_is_asked_twice(tmp_path):
    assert after(tmp_path, Told(SILENT), 12) is None
    failure = after(tmp_path, Told(SILENT), 13)
    assert "rank 1: no answer, stopped" in failure["message"]
    assert after(tmp_path, Told(SILENT, [RankFacts(0, answer()), RankFacts(1, answer(stalled_s=1.0))]), 20) is None


def test_ranks_of_which_nothing_is_known_here_end_no_job(tmp_path):
    nobody = [RankFacts(0), RankFacts(1)]
    assert after(tmp_path, Told(nobody), 60) is None
    assert after(tmp_path, Told([]), 60) is None
    assert after(tmp_path, Told(STANDS, not_asked="runs/a can't be written"), 60) is None
    # On this host the processes are known, also before they have written anything.
    assert after(tmp_path, Told(nobody), 13, pids={0: 7, 1: 8}) is not None


def test_ranks_that_have_ended_do_not_count(tmp_path):
    one_ended = [RankFacts(0, answer(waits_in="the writing of a checkpoint")), RankFacts(1, state="ended")]
    failure = after(tmp_path, Told(one_ended, found=[]), 12, ended={1: 0})
    assert "rank 1" not in failure["message"]


def test_time_in_which_this_process_was_suspended_does_not_count(tmp_path):
    timeout = Timeout(tmp_path, LIMIT_S)
    timeout.verdict = Told(STANDS)
    assert timeout.look(0.0, 2e9, (), {}) is None
    assert timeout.look(3600.0, 2e9, (), {}) is None
    assert timeout.verdict.asked == 0


def test_progress_begins_the_time_anew(tmp_path):
    timeout = Timeout(tmp_path, LIMIT_S)
    timeout.verdict = Told(STANDS)
    for look in range(100):
        if look % 10 == 0:
            timeout.progress()
        assert timeout.look(FIVE_S * look, 2e9, (), {}) is None
    assert timeout.verdict.asked == 0


def test_answers_from_before_some_progress_do_not_count(tmp_path, monkeypatch):
    asked, answered = threading.Event(), threading.Event()

    def collect(*_):
        asked.set()
        answered.wait(30)
        return Facts(run=RUN, ranks=STANDS)

    monkeypatch.setattr("paceline.run.job_facts.collect", collect)
    timeout = Timeout(tmp_path, LIMIT_S)
    looks = itertools.count(0, 5)
    while not asked.is_set():
        assert timeout.look(float(next(looks)), 2e9, (), {}) is None
    thread = timeout.verdict.thread
    timeout.progress()
    answered.set()
    thread.join()
    asked.clear()
    while not asked.is_set():
        assert timeout.look(float(next(looks)), 2e9, (), {}) is None
    timeout.verdict.thread.join()
    assert timeout.look(float(next(looks)), 2e9, (), {}) is not None


def test_a_job_without_the_option_is_never_ended(tmp_path):
    verdict = Told(STANDS)
    assert after(tmp_path, verdict, 1000, seconds=0.0) is None
    assert verdict.asked == 0


@pytest.mark.parametrize("rank", [None, 1])
def test_other_hosts_may_do_better_whoever_stood(rank, tmp_path):
    screen = Screen(io.StringIO(), io.StringIO())
    supervisor = Supervisor(JobRequest(Path("x"), (), 2, tmp_path), screen)
    assert supervisor._is_host_failure(made_no_progress(LIMIT_S, 1.0, (rank, None), "a", "b"))


@pytest.mark.parametrize("seconds", [-1.0, float("inf")])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(UsageError, match="it is no number of seconds"):
        stall_timeout_of(seconds, 60.0, "--stall-notice")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "--stall-timeout", "60"], "PACELINE_STALL_NOTICE"),
        (["run", "--stall-timeout", "30", "--stall-notice", "60"], "--stall-notice"),
        (["submit", "slurm", "--stall-timeout", "60"], "PACELINE_STALL_NOTICE"),
        (["submit", "slurm", "--stall-timeout", "6", "-x", "PACELINE_STALL_NOTICE=9"], "PACELINE_STALL_NOTICE"),
        (
            ["submit", "kubernetes", "--stall-timeout", "30", "--image", "i", "--cpu", "1", "--memory", "2Gi"],
            "PACELINE_STALL_NOTICE",
        ),
    ],
)
def test_a_job_is_not_ended_before_the_notice(words, name, tmp_path):
    more = {"PACELINE_STALL_NOTICE": "5"} if "kubernetes" in words else {}  # this process's, not the pods'
    ended = paceline(tmp_path, *words, write_workload(tmp_path), **more)
    assert ended.code == 2
    assert "the notice of where each rank is comes after" in ended.err
    assert ended.err.rstrip().endswith(f"or a smaller {name}")
    assert not (tmp_path / "runs").exists()


def test_a_submitted_job_has_the_option_in_its_own_command(tmp_path):
    file = write_workload(tmp_path)
    ended = paceline(
        tmp_path, "submit", "slurm", "--dry-run", "-n", "2", "--job", "a", "--stall-timeout", "1234567.5", file
    )
    assert ended.code == 0, ended.err
    assert " --stall-timeout 1234567.5 " in ended.out
    pods = ("--image", "i", "--cpu", "1", "--memory", "2Gi")
    ended = paceline(tmp_path, "submit", "kubernetes", "--dry-run", *pods, "--stall-timeout", "600", "train.py")
    assert ended.code == 0, ended.err
    assert re.search(r"--stall-timeout\n\s*- '?600'?\n", ended.out)


# --- whole jobs

WORDS = ("run", "-n", "2", "--job", "a", "--checkpoint-every", "4", "--stall-notice", "3", "--stall-timeout", "9")
ONCE = "os.environ.get('PACELINE_RESTART') is None"
IN_STEP = f"    if job and job.step_number == 6 and job.rank == 1 and {ONCE}: "
DATA = f"""
        if index == 3 and {ONCE} and os.path.exists("runs/a/checkpoints/step-00000004"): time.sleep(600)
"""
SAVING = f"""
import time, os
import paceline.checkpoint.save as save
write = save._write_rank
def slow(partial, rank, *more):
    if rank == 1 and partial.name.endswith("8") and {ONCE}:
        time.sleep(600)
    return write(partial, rank, *more)
save._write_rank = slow
"""
SLOW_IMPORT = """
import os, sys, time
if "paceline.run.rank.forkserver" in sys.orig_argv and not os.path.exists("once"):
    open("once", "w").close()
    time.sleep(600)
"""
HANGS = {
    "a sleep beside a collective": IN_STEP + "time.sleep(600)\n",
    "native code that holds Python's lock": IN_STEP + "__import__('ctypes').PyDLL(None).sleep(600)\n",
    "a stopped process": IN_STEP + "os.kill(os.getpid(), signal.SIGSTOP)\n",
    "different collectives": IN_STEP + "paceline.broadcast(torch.ones(3))\n",
    "the data": "",
    "a checkpoint": "",
    "before the first step": "",
    "before the first step, in what starts the ranks": "",
}


def file_that_hangs(folder, case):
    file = write_workload(folder, HANGS[case])
    text = file.read_text()
    if case == "the data":
        text = text.replace("    def __getitem__(self, index):\n", f"    def __getitem__(self, index):{DATA}")
    elif case == "a checkpoint":
        text = SAVING + text
    elif "starts the ranks" in case:
        (folder / "sitecustomize.py").write_text(SLOW_IMPORT)
    elif case == "before the first step":
        text = f"import os, time\nif os.environ['PACELINE_RANK'] == '1' and {ONCE}: time.sleep(600)\n{text}"
    file.write_text(text)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS)
def test_stall_timeout_ends_a_hung_job_that_resumes_by_itself(case, tmp_path):
    ended = paceline(
        tmp_path,
        *(*WORDS, "--max-restarts", "1", "--json", file_that_hangs(tmp_path, case)),
        TEST_PAUSE="0.1",
        PYTHONPATH=str(tmp_path),
    )
    assert ended.code == 0, ended.err
    assert "the job should make progress within 9 s (--stall-timeout)" in ended.err
    assert json.loads(ended.out)["restarts"] == 1
    whole = "before the first step" in case
    assert ("restart 1 of 1, from the beginning" if whole else "restart 1 of 1, from step-0000000") in ended.err
    assert len(losses(tmp_path / "runs" / "a")) == 20
    assert list((tmp_path / "runs" / "a" / "stalls").glob("ended-1/*.json")) or "starts the ranks" in case


@pytest.mark.slow
def test_stall_timeout_has_its_exit_code_and_names_a_checkpoint(tmp_path):
    ended = paceline(tmp_path, *WORDS, "--json", file_that_hangs(tmp_path, "a stopped process"), TEST_PAUSE="0.1")
    assert ended.code == STALLED_CODE
    result = json.loads(ended.out)
    assert (result["status"], result["exit_code"], result["failure"]["rank"]) == ("failed", STALLED_CODE, 1)
    assert "rank 1: the process is stopped (SIGSTOP)" in ended.err
    assert "Last checkpoint: runs/a/checkpoints/step-00000004; go on with --resume --job a" in ended.err


@pytest.mark.slow
def test_stall_timeout_spares_long_evaluations_that_communicate(tmp_path):
    loop = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 3:
            for _ in range(30):
                time.sleep(0.5)
                paceline.all_reduce(torch.ones(1))
"""
    words = ("run", "-n", "2", "--job", "a", "--stall-notice", "3", "--stall-timeout", "8")
    ended = paceline(tmp_path, *words, write_workload(tmp_path, loop=loop))
    assert ended.code == 0, ended.err
    assert "(--stall-timeout)" not in ended.err


@pytest.mark.slow
def test_stall_timeout_has_the_same_code_under_another_launcher(tmp_path):
    file = file_that_hangs(tmp_path, "a sleep beside a collective")
    jobs = []
    for rank in range(2):  # as Open MPI's mpirun would start them
        own = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        place = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        place |= {"PMIX_NAMESPACE": f"stall-{os.getpid()}", "PACELINE_STALL_NOTICE": "3"}
        words = ("run", "--job", "a", "--checkpoint-every", "4", "--stall-timeout", "9", file)
        jobs.append(start(tmp_path, *words, TEST_PAUSE="0.1", **place))
    _, told = jobs[0].communicate(timeout=120)
    jobs[1].kill()  # its launcher ends it after rank 0
    jobs[1].communicate()
    assert jobs[0].returncode == STALLED_CODE, told
    assert "the job should make progress within 9 s (--stall-timeout)" in told
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert (result["exit_code"], result["failure"]["rank"], result["failure"]["type"]) == (STALLED_CODE, 1, "Stalled")
