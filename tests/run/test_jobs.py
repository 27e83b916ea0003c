"""Whole jobs: they train, they fail as one, they stop when asked, they go on where they were."""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from support.jobs import (
    LOOP,
    STEPS,
    command,
    events,
    leftovers,
    losses,
    paceline,
    rank_pids,
    send,
    start,
    wait_for,
    write_workload,
)

pytestmark = pytest.mark.slow


def run_of(tmp_path, name="a"):
    return tmp_path / "runs" / name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses, and the (step, sample) pairs, of a job of two ranks that nobody disturbs; by the share of dropout."""

    @functools.cache
    def run(dropout="0"):
        folder = tmp_path_factory.mktemp("whole")
        file, seen = write_workload(folder), folder / "seen.txt"
        ended = paceline(folder, "run", "-n", "2", "--job", "a", file, TEST_SEEN=str(seen), TEST_DROPOUT=dropout)
        assert ended.code == 0, ended.err
        return losses(run_of(folder)), steps_seen(seen)

    return run


def test_the_same_file_runs_alone_and_as_a_job(tmp_path):
    file = write_workload(tmp_path)
    alone = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert not (tmp_path / "runs").exists()
    one = paceline(tmp_path, "run", "--job", "one", file)
    two = paceline(tmp_path, "run", "-n", "2", "--job", "two", "--json", file)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    first, second = losses(run_of(tmp_path, "one")), losses(run_of(tmp_path, "two"))
    assert list(first) == list(range(1, STEPS + 1))
    assert second == pytest.approx(first, rel=1e-12)
    result = json.loads(two.out)
    assert result["status"] == "done"
    assert result["steps"] == STEPS
    assert result["loss_last"] == second[STEPS]
    assert {"plan.json", "events.jsonl", "result.json", "checkpoints"} <= {
        path.name for path in run_of(tmp_path, "two").iterdir()
    }


def test_job_without_a_loop_gets_the_plain_loop_and_keep_limit(tmp_path):
    file = write_workload(tmp_path, loop="")
    text = file.read_text().replace("hook(job if", "hook(None if").replace("if SEEN and", "if False and")
    file.write_text(text)
    words = ("-n", "2", "--job", "a", "--checkpoint-every", "3", "--keep", "2")
    assert paceline(tmp_path, "run", *words, file).code == 0
    assert len(losses(run_of(tmp_path))) == STEPS
    names = sorted(path.name for path in (run_of(tmp_path) / "checkpoints").iterdir())
    assert names == ["step-00000018", "step-00000020"]


def test_output_is_prefixed_with_the_rank(tmp_path):
    file = write_workload(tmp_path, loop="print('hello from', paceline.__version__)\npaceline.init()\n")
    ended = paceline(tmp_path, "run", "-n", "2", file)
    assert sorted(ended.out.split("\n")[:2]) == ["[0] hello from 0.1.0", "[1] hello from 0.1.0"]


RAISE = "    if job and job.step_number == 6 and job.rank == 1: raise KeyError('the cause')\n"
EXIT = "    if job and job.step_number == 6 and job.rank == 1: os._exit(7)\n"
KILL = "    if job and job.step_number == 6 and job.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
CRASH = "    if job and job.step_number == 6 and job.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (RAISE, "rank 1, step 7 failed first: KeyError: 'the cause'"),
        (EXIT, "rank 1's process ended with exit code 7"),
        (KILL, "rank 1's process was ended by SIGKILL"),
        (CRASH, "rank 1's process was ended by SIGSEGV"),
    ],
    ids=["raise", "exit", "kill", "crash"],
)
def test_job_ends_when_a_rank_dies_and_tells_its_cause_once(tmp_path, hook, said, transport):
    file = write_workload(tmp_path, hook)
    ended = paceline(tmp_path, "run", "-n", "3", "--job", "a", "--plan", f"transport={transport}", "--json", file)
    assert ended.code == 1
    assert ended.err.count(said) == 1, ended.err
    assert "(and 2 ranks that ended with it)" in ended.err
    assert ended.err.count("Traceback (most recent call last)") == (hook is RAISE)
    result = json.loads(ended.out)
    assert result["failure"]["rank"] == 1
    last = max(event["at"] for event in events(run_of(tmp_path), "step"))
    written = (run_of(tmp_path) / "result.json").stat().st_mtime
    assert written - last < 15, "the others lived on"  # a collective waits half an hour


def test_a_rank_that_the_supervisor_kills_is_not_the_cause(tmp_path):
    hook = (
        "    if job and job.step_number == 3 and job.rank == 1: os._exit(0)\n"
        "    if job and job.step_number == 3 and job.rank == 2: time.sleep(60)\n"
    )
    file = write_workload(tmp_path, hook)
    ended = paceline(tmp_path, "run", "-n", "3", "--job", "a", "--plan", "transport=shared_memory", "--json", file)
    assert ended.code == 1
    assert "SIGKILL" not in ended.err
    failure = json.loads(ended.out)["failure"]
    assert (failure["rank"], failure["type"]) == (1, "ProcessDied"), ended.err


LEAVE = "    if job and job.step_number == 6 and job.rank == {rank}: {leave}\n"


@pytest.mark.parametrize(
    ("rank", "leave", "said"),
    [
        (
            1,
            "sys.exit(0)",
            "rank 1 should take as many steps as the other ranks\n  found: it",
        ),
        (1, "os._exit(0)", "rank 1's process ended with exit code 0 before the end of its file"),
        (0, "os._exit(0)", "rank 0's process ended with exit code 0 before the end of its file"),
    ],
)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_that_leaves_with_exit_code_0_is_the_first_cause(tmp_path, rank, leave, said, transport):
    file = write_workload(tmp_path, LEAVE.format(rank=rank, leave=leave))
    words = ("-n", "2", "--job", "a", "--plan", f"transport={transport}", "--stall-notice", "8", "--json", file)
    ended = paceline(tmp_path, "run", *words)
    assert ended.code == 1
    assert ended.err.count(said) == 1, ended.err
    assert "look for the rank that failed first" not in ended.err
    assert json.loads(ended.out)["failure"]["rank"] == rank


def test_one_process_that_leaves_with_exit_code_0_is_not_done(tmp_path):
    ended = paceline(tmp_path, "run", "--job", "a", write_workload(tmp_path, LEAVE.format(rank=0, leave="os._exit(0)")))
    assert ended.code == 1
    assert "rank 0's process ended with exit code 0 before the end of its file" in ended.err


ARGUMENTS = """
if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.parse_args()
    sys.exit(os.environ.get("TEST_WORDS") or int(os.environ["TEST_CODE"]))
"""
# The file's arguments, variables; the exit code, and what is said.
EXITS = {
    "a bad argument": (
        ["--rate", "x"],
        {},
        2,
        ["argument --rate: invalid float value: 'x'", "ended by sys.exit(2) at"],
    ),
    "a code": ([], {"TEST_CODE": "75"}, 1, ["ended by sys.exit(75) at"]),
    "a text": ([], {"TEST_WORDS": "no licence"}, 1, ["ended by sys.exit('no licence') at"]),
}


@pytest.mark.parametrize("case", EXITS)
def test_a_file_that_ends_itself_is_told_without_a_traceback(case, tmp_path):
    arguments, variables, code, said = EXITS[case]
    file = write_workload(tmp_path, loop=ARGUMENTS)
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", file, *arguments, **variables)
    assert ended.code == code, ended.err
    for text in said:
        assert text in ended.out + ended.err
    assert "Traceback" not in ended.err + ended.out


def test_all_ranks_may_leave_together_by_exit_code_0(tmp_path):
    loop = LOOP + "        if job.step_number == 6: sys.exit(0)\n"
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", "--json", write_workload(tmp_path, loop=loop))
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["status"] == "done"
    assert (run_of(tmp_path) / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.parametrize("plan", ["replicate=2", "server=1,replicate=2"])
def test_sigterm_to_one_rank_stops_the_job_and_says_which(tmp_path, plan):
    hook = "    if job and job.step_number == 6 and job.rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
    file = write_workload(tmp_path, hook)
    ended = paceline(tmp_path, "run", "--plan", plan, "--job", "a", "--json", file)
    result = json.loads(ended.out)
    assert (ended.code, result["status"], result["exit_code"]) == (143, "stopped", 143), ended.err
    assert 6 < result["steps"] < STEPS
    who = "rank 1" if plan == "replicate=2" else "a rank"
    assert result["stop_sent_to"] == who
    assert f"stopped, since {who} was sent SIGTERM; saved as " in ended.err
    assert f"checkpoints/step-{result['steps']:08d}; go on with --resume --job a" in ended.err


def test_an_error_without_a_message_is_told_like_any_other(tmp_path):
    file = write_workload(tmp_path, "    assert job is None or job.step_number < 3\n")
    ended = paceline(tmp_path, "run", "--job", "a", file)
    assert ended.code == 1
    assert "rank 0, step 4 failed first: AssertionError\n" in ended.err
    assert ended.err.count("Traceback") == 1


def test_a_stop_before_anything_is_saved_promises_no_checkpoint(tmp_path):
    hook = "    if job and job.step_number == 2: time.sleep(60)\n"
    job = start(tmp_path, "run", "--job", "a", "--grace", "0.5", write_workload(tmp_path, hook))
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 2, 30)
    send(job, signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 143, err
    assert "stopped; nothing was saved; --resume --job a starts it again at step 0" in err


def test_job_stop_by_force_names_the_newest_checkpoint(tmp_path):
    hook = "    if job and job.step_number == 5: time.sleep(60)\n"
    words = ("--job", "a", "--grace", "0.5", "--checkpoint-every", "4")
    job = start(tmp_path, "run", *words, write_workload(tmp_path, hook))
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 5, 30)
    send(job, signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 143, err
    assert "its last steps are not saved, the newest checkpoint is runs/a/checkpoints/step-00000004; go on with" in err


def test_ranks_that_wait_for_something_else_are_ended_too(tmp_path):
    hook = "    if job and job.step_number == 3:\n        time.sleep(60) if job.rank == 0 else job.no_such_thing\n"
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, hook))
    assert ended.code == 1
    assert "rank 1, step 4 failed first: AttributeError" in ended.err
    last = max(event["at"] for event in events(run_of(tmp_path), "step"))
    assert (run_of(tmp_path) / "result.json").stat().st_mtime - last < 2


def test_a_failure_between_steps_names_no_step(tmp_path):
    file = write_workload(tmp_path, loop=LOOP + "    raise OSError('after the last step')\n")
    ended = paceline(tmp_path, "run", "--job", "a", file)
    assert ended.code == 1
    assert "rank 0 failed first: OSError: after the last step" in ended.err


def test_nan_on_one_rank_names_rank_and_step(tmp_path):
    bad = "[p.data.fill_(float('nan')) for p in job.model.parameters()]"
    hook = f"    if job and job.step_number == 2 and job.rank == 1: {bad}\n"
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, hook))
    assert ended.code == 1
    assert "[rank 1, step 3] the loss should be a finite number" in ended.err
    assert "fix: " in ended.err


@pytest.fixture
def hang_up():
    """SIGHUP does what it does by default: under nohup it is ignored, and a job then goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_stop_saves_and_resume_goes_on(tmp_path, whole, number, code):
    file = write_workload(tmp_path)
    job = start(tmp_path, "run", "-n", "2", "--job", "a", file, TEST_PAUSE="0.1")
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 4, 30)
    send(job, number)
    _, err = job.communicate(timeout=30)
    assert job.returncode == code, err
    assert "saved as" in err
    assert wait_for(lambda: not leftovers(tmp_path))
    done = len(losses(run_of(tmp_path)))
    assert done < STEPS
    assert paceline(tmp_path, "run", "-n", "2", "--resume", "--job", "a", file).code == 0
    assert losses(run_of(tmp_path)) == whole()[0], "not bit for bit"
    assert len(events(run_of(tmp_path), "step")) == STEPS, "a step was taken twice"


def test_a_second_signal_kills_at_once(tmp_path):
    hook = "    if job and job.step_number == 2: time.sleep(60)\n"
    job = start(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, hook))
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 2, 30)
    send(job, signal.SIGINT)
    time.sleep(0.5)
    send(job, signal.SIGINT)
    job.communicate(timeout=15)  # a checkpoint would have 30 s, and the step takes 60
    assert job.returncode == 130
    assert wait_for(lambda: not leftovers(tmp_path))


def test_a_signal_after_the_last_step_leaves_the_job_done(tmp_path):
    loop = LOOP + "    open('last', 'w').close()\n    time.sleep(2)\n"
    job = start(tmp_path, "run", "-n", "2", "--job", "a", "--json", write_workload(tmp_path, loop=loop))
    assert wait_for((tmp_path / "last").exists, 30)
    send(job, signal.SIGTERM)
    out, err = job.communicate(timeout=30)
    assert job.returncode == 0, err
    assert json.loads(out)["status"] == "done"


@pytest.mark.parametrize(
    "place", ["paceline.run.supervise.supervised_job.finish", "paceline.cli.run_command._print_end"]
)
def test_a_signal_after_the_end_changes_no_word_of_it(tmp_path, monkeypatch, capsys, place):
    from paceline.cli.main import main

    module, _, name = place.rpartition(".")
    real = getattr(importlib.import_module(module), name)

    def with_ctrl_c(*words):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*words)

    monkeypatch.setattr(place, with_ctrl_c)
    file = write_workload(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    code = main(["run", "--runs", str(tmp_path / "runs"), "--job", "a", str(file)])
    result = json.loads((run_of(tmp_path) / "result.json").read_text())
    assert (code, result["exit_code"], result["status"]) == (0, 0, "done")
    assert "before the job started" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before


def test_job_fork_server_ignores_ctrl_c_from_its_start(tmp_path):
    import psutil

    job = start(tmp_path, "run", "--job", "a", write_workload(tmp_path))
    while not losses(run_of(tmp_path)) and job.poll() is None:
        for child in psutil.Process(job.pid).children():
            child.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "KeyboardInterrupt" not in err


def test_a_crash_while_stopping_is_a_failure(tmp_path):
    hook = "    while job and job.step_number == 3:\n        if job.is_stopping.is_set(): os._exit(7)\n"
    job = start(tmp_path, "run", "--job", "a", write_workload(tmp_path, hook))
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 3, 30)
    send(job, signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 1, err
    assert "rank 0's process ended with exit code 7" in err


def test_when_the_supervisor_is_killed_nothing_lives_on(tmp_path):
    file = write_workload(tmp_path)
    file.write_text(file.read_text().replace("epochs=4", "epochs=400"))  # minutes, if nobody ended it
    job = start(tmp_path, "run", "-n", "2", "--job", "a", file, TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 2, 30)
    ranks = rank_pids(job)
    assert len(ranks) == 2
    send(job, signal.SIGKILL)
    job.communicate()
    assert wait_for(lambda: not leftovers(tmp_path), 15)


@pytest.mark.parametrize("plan", [("-n", "2"), ("-n", "2", "--plan", "server=1")])
def test_when_the_fork_server_is_killed_the_job_fails(tmp_path, plan):
    import psutil

    job = start(tmp_path, "run", *plan, "--job", "a", write_workload(tmp_path), TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 2, 30)
    psutil.Process(job.pid).children()[0].kill()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1, err
    assert "the fork server should live as long as its ranks\n  found: it was ended by SIGKILL\n  fix: " in err
    assert "(and 2 ranks that ended with it)" in err
    assert wait_for(lambda: not leftovers(tmp_path))


@pytest.mark.parametrize("again", [1, 2, 4])
def test_killed_at_a_random_step_and_resumed_with_other_ranks(tmp_path, whole, again):
    """Each sample is seen once per epoch and the losses are those of the run that nobody disturbed."""
    dropout = {"TEST_DROPOUT": "0.2"} if again == 2 else {}  # equal ranks: bit for bit, dropout too
    file, seen = write_workload(tmp_path), tmp_path / "seen.txt"
    kill_at = random.Random(again).randrange(5, STEPS - 1)
    job = start(
        tmp_path, "run", "-n", "2", "--job", "a", "--checkpoint-every", "2", file,
        TEST_PAUSE="0.05", TEST_SEEN=str(seen), **dropout,
    )  # fmt: skip
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= kill_at, 30)
    for pid in rank_pids(job):
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode == 1
    ended = paceline(tmp_path, "run", "-n", str(again), "--resume", "--job", "a", file, TEST_SEEN=str(seen), **dropout)
    assert ended.code == 0, ended.err
    undisturbed, undisturbed_seen = whole(*dropout.values())
    resumed = losses(run_of(tmp_path))
    if again == 2:
        assert resumed == undisturbed
    else:
        assert resumed == pytest.approx(undisturbed, rel=1e-12)
    assert steps_seen(seen) == undisturbed_seen
    for epoch in range(4):
        counts = Counter(i for step, i in steps_seen(seen) if (step - 1) // 5 == epoch)
        assert counts == Counter(range(37))


def steps_seen(path):
    """(step, sample) pairs that went into the final model; a step done again after the kill counts once."""
    return {tuple(map(int, line.split())) for line in path.read_text().splitlines()}


def test_resume_falls_back_to_the_last_whole_checkpoint(tmp_path):
    file = write_workload(tmp_path)
    paceline(tmp_path, "run", "-n", "2", "--job", "a", "--checkpoint-every", "5", file)
    before = losses(run_of(tmp_path))
    newest = sorted((run_of(tmp_path) / "checkpoints").glob("step-*"))[-1]
    data = newest / "rank-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    ended = paceline(tmp_path, "run", "-n", "2", "--resume", "--job", "a", file)
    assert ended.code == 0
    assert f"{newest.name} is passed over: rank-00001.safetensors has" in ended.err
    assert "goes on at step-00000015" in ended.err
    assert losses(run_of(tmp_path)) == before


BEST_AT_THE_END = LOOP + "    job.load(os.environ['PACELINE_RUN_DIR'] + '/checkpoints/step-00000015')\n"


@pytest.mark.parametrize("loop", [LOOP, BEST_AT_THE_END], ids=["plain", "best at the end"])
def test_the_result_of_a_run_that_was_whole_is_that_of_the_run(tmp_path, loop):
    file = write_workload(tmp_path, loop=loop)
    words = ("run", "--json", "--job", "a", "--checkpoint-every", "5")
    first = json.loads(paceline(tmp_path, *words, file).out)
    ended = paceline(tmp_path, *words, "--resume", file)
    again = json.loads(ended.out)
    assert ended.code == 0
    assert len(events(run_of(tmp_path), "step")) == STEPS, "there is nothing left to do"
    for key in ("status", "steps", "position", "checkpoint"):
        assert again[key] == first[key], key
    assert again["checkpoint"] == str(run_of(tmp_path) / "checkpoints" / f"step-{STEPS:08d}")
    assert again["loss_last"] is None, "it took no step"


def test_a_failure_names_the_checkpoint_that_resume_takes(tmp_path):
    hook = "    if job and job.step_number == 7: job.save('best'); os._exit(3)\n"
    ended = paceline(tmp_path, "run", "--job", "a", "--checkpoint-every", "5", write_workload(tmp_path, hook))
    assert ended.code == 1
    assert "Last checkpoint: runs/a/checkpoints/step-00000005; go on with --resume --job a" in ended.err


def test_torchrun_starts_the_same_file(tmp_path):
    file = write_workload(tmp_path, loop='''
if __name__ == "__main__":
    job = paceline.distribute(workload)
    total = [job.step(batch) for batch in job.batches()]
    if job.rank == 0:
        print("PLAN", job.plan.transport)
        print("RESULT", job.size, total[-1])
''')  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    direct = subprocess.run([*torchrun, str(file)], cwd=tmp_path, capture_output=True, text=True)
    through = subprocess.run(
        [*torchrun, "--no-python", *command("run", "--plan", "transport=gloo", file)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "PLAN gloo" in through.stdout, through.stderr
    lines = [[line for line in done.stdout.splitlines() if "RESULT 2" in line] for done in (direct, through)]
    assert lines[0], direct.stderr
    assert lines[0] == lines[1], through.stderr


def test_a_running_job_listens_on_loopback_alone(tmp_path):
    import psutil

    job = start(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path), TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 2, 30)
    own = {job.pid, *(child.pid for child in psutil.Process(job.pid).children(recursive=True))}
    listening = [c.laddr.ip for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN and c.pid in own]
    send(job, signal.SIGTERM)
    job.communicate(timeout=30)
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    assert listening, "gloo opened no socket: the test is void"


def test_where_forking_is_unsafe_ranks_are_fresh_interpreters(tmp_path, monkeypatch, capsys):
    from paceline.cli.main import main

    file = write_workload(tmp_path)
    monkeypatch.setattr("paceline.launch.local.can_fork", lambda: False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(["run", "-n", "2", "--runs", str(tmp_path / "runs"), "--job", "a", str(file)]) == 0
    assert len(losses(run_of(tmp_path))) == STEPS
    monkeypatch.setenv("TEST_PAUSE", "0.1")
    file.write_text(
        file.read_text().replace("    job.step(batch)", "    job.step(batch); job.step_number == 3 and 1 / 0")
    )
    assert main(["run", "-n", "2", "--runs", str(tmp_path / "runs"), "--job", "b", str(file)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    file.write_text(file.read_text().replace("job.step_number == 3 and 1 / 0", "job.step_number == 3 and os._exit(0)"))
    assert main(["run", "--runs", str(tmp_path / "runs"), "--job", "c", str(file)]) == 1
    assert "process ended with exit code 0 before the end of its file" in capsys.readouterr().err
