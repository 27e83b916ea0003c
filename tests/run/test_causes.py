"""`paceline why`: what is injected into a job is named, and each rule of the judgement by made-up facts."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from paceline.cli.why_command import page
from paceline.run import causes as judgement
from paceline.run.causes import Cause, causes
from paceline.run.job_facts import ENDED, Facts, RankFacts, collect
from paceline.run.read.runs import Run
from paceline.run.read.standing import FOLDER, ask
from paceline.run.read.times import KINDS, RankSplit

from support.jobs import paceline, start, wait_for, write_workload

RUNNING = Run(folder=Path("runs/a"), status="running", started=0.0, step=5, total_steps=9, ranks=4, plan="replicate=4")
OF_SERVERS = replace(RUNNING, plan="replicate=4, server=1")
ALL_REDUCE = "all_reduce"


def answer(**facts):
    """What a rank says that waits in an all_reduce in step 6."""
    usual = {
        "step": 6, "steps_done": 5, "stalled_s": 60.0, "cpu_s": 0.1, "waits_in": ALL_REDUCE, "line": "train.py:9",
        "stack": [["comm/reducer.py", 3, "finish"], ["train.py", 9, "main"]], "is_closing": False, "cores": 4,
    }  # fmt: skip
    return {**usual, **facts}


def ranks(*last, size=4):
    """Facts of ranks that wait, but for the last ones."""
    waiting = [RankFacts(rank, answer()) for rank in range(size - len(last))]
    return [*waiting, *(replace(each, rank=size - len(last) + number) for number, each in enumerate(last))]


def own(**facts):
    """A rank that does not wait in a collective."""
    return RankFacts(0, answer(**{"waits_in": None, "step": 6, "stack": [["train.py", 12, "main"]], **facts}))


def splits(*changes):
    """Splits of ranks whose steps take 100 ms: one rank for each dict of milliseconds by kind."""
    usual = {"data": 5, "forward": 20, "backward": 40, "communication": 25, "optimizer": 5, "other": 5}
    found = []
    for rank, change in enumerate(changes):
        by_kind = {kind: {**usual, **change}.get(kind, 0) / 1000 for kind in KINDS}
        found.append(RankSplit(rank, 50, 60, sum(by_kind.values()), by_kind, sum(by_kind.values())))
    return found


def still(*last, **facts):
    return Facts(**{"run": RUNNING, "ranks": ranks(*last), "stands_s": 60.0, **facts})


def slow(*changes, cores=(4, 4), **facts):
    going_on = [RankFacts(rank, answer(stalled_s=0.0, cores=count)) for rank, count in enumerate(cores)]
    return Facts(**{"run": RUNNING, "ranks": going_on, "splits": splits(*changes), **facts})


LOADER = [["lib/torch/utils/data/dataloader.py", 1318, "_try_get_data"], ["train.py", 12, "main"]]
# Facts; the names of the causes with their ranks; words of the first one's text.
RULES = {
    "a failure": (still(failure="rank 1, step 3 failed first: ValueError"), [("failed", ())], ["rank 1, step 3"]),
    "a process that is stopped": (
        still(RankFacts(0, None, 7, "here", True, "stopped")),
        [("stopped", (3,))], ["rank 3: the process is stopped", "SIGSTOP"],
    ),
    "a debugger": (still(RankFacts(0, None, 7, "here", True, "tracing-stop")), [("traced", (3,))], ["debugger"]),
    "a process that has gone": (still(RankFacts(0, None, 7, "here", True, "gone")), [("gone", (3,))], ["has gone"]),
    "a file system that does not answer": (
        still(RankFacts(0, None, 7, "here", True, "disk-sleep")), [("disk wait", (3,))], ["network file system"],
    ),
    "native code that computes": (
        still(RankFacts(0, None, 7, "here", True, "running", 0.9)), [("native code", (3,))], ["computes", "GIL"],
    ),
    "native code that waits": (
        still(RankFacts(0, None, 7, "here", True, "sleeping", 0.0)), [("native code", (3,))], ["waits", "GIL"],
    ),
    "a peer that died on another host": (
        still(RankFacts(0, None, 7, "node-9")), [("no answer", (3,))], ["rank 3 (on node-9) did not answer"],
    ),
    "two hosts": (
        still(RankFacts(0, None, 7, "node-8"), RankFacts(0, None, 7, "node-9")),
        [("no answer", (2, 3))], ["ranks 2, 3 (on node-8, node-9)"],
    ),
    "a rank that skips a collective": (
        still(RankFacts(0, answer(waits_in="broadcast", line="train.py:20"))),
        [("different calls", (3,))], ["rank 3 in broadcast at train.py:20; ranks 0, 1, 2 in all_reduce at train.py:9"],
    ),
    "one call at two lines": (
        still(RankFacts(0, answer(line="train.py:30"))), [("different calls", (3,))], ["in all_reduce at train.py:30"],
    ),
    "shapes that differ": (still(), [("same call", ())], ["all ranks wait in all_reduce, at train.py:9", "shapes"]),
    "a rank that left the loop": (
        still(RankFacts(0, answer(waits_in=None, is_closing=True, step=None, steps_done=4))),
        [("left", (3,))], ["rank 3 left the loop after step 4"],
    ),
    "a loader that is stuck": (
        still(own(stack=LOADER, children=[{"state": "stopped"}, {"state": "sleeping"}])),
        [("data loader", (3,))], ["rank 3 in step 6 waits for its data loader", "1 of its processes stopped"],
    ),
    "a rank that is not yet at the end of the file": (
        Facts(
            run=RUNNING,
            stands_s=60.0,
            ranks=[
                own(step=None, steps_done=9),
                RankFacts(1, answer(waits_in="barrier", is_closing=True, step=None, steps_done=9)),
            ],
        ),
        [("idle", (0,))],
        ["rank 0 sleeps, reads or writes at train.py:9; rank 1 waits for it in barrier"],
    ),
    "ranks that start": (
        Facts(run=RUNNING, ranks=[RankFacts(0), RankFacts(1)], stands_s=0.0, age_s=2.0),
        [],
        [],
    ),
    "a long first step": (
        Facts(run=RUNNING, ranks=[own(cpu_s=30.0), own(cpu_s=30.0)], stands_s=30.0, is_first_step=True),
        [],
        [],
    ),
    "a very long first step": (
        Facts(run=RUNNING, ranks=[own(cpu_s=90.0)], stands_s=90.0, is_first_step=True),
        [("computing", (0,))],
        ["rank 0 in step 6 computes"],
    ),
    "an evaluation": (
        Facts(run=RUNNING, ranks=[own(work="evaluation", stack=LOADER)], stands_s=300.0),
        [],
        [],
    ),
    "a loader's processes that are stopped": (
        still(own(stack=[["resource_sharer.py", 1, "x"]] * 9 + LOADER, children=[{"state": "stopped"}])),
        [("data loader", (3,))],
        ["waits for its data loader (1 of its processes stopped)"],
    ),
    "two with native code": (
        still(RankFacts(0, None, 7, "here", True, "running", 0.9), RankFacts(0, None, 7, "here", True, "running", 0.9)),
        [("native code", (2, 3))],
        ["ranks 2, 3 compute in native code"],
    ),
    "ranks that can't be asked": (
        Facts(run=RUNNING, ranks=[RankFacts(0), RankFacts(1)], not_asked="runs/a can't be written (File exists)"),
        [("not asked", ())],
        ["the ranks can't be asked: runs/a can't be written"],
    ),
    "one rank's disk holds up the others": (
        still(RankFacts(0, answer(waits_in="the writing of a checkpoint", line="train.py:30"))),
        [("checkpoint", (3,))],
        ["rank 3 waits until a checkpoint is written, and the others for that"],
    ),
    "a rank that has ended its job": (
        Facts(run=RUNNING, ranks=[own(states="RRRR"), RankFacts(1, None, 7, "here", True, ENDED)], stands_s=9.0),
        [],
        [],
    ),
    "a restart": (
        still(RankFacts(0, None, 7, "here", True, "gone"), run=replace(RUNNING, quiet_s=3.0)),
        [],
        [],
    ),
    "one worker's data alone": (slow({"data": 1}, {"data": 500}, run=OF_SERVERS), [], []),
    "a lock in Python": (
        still(own(source="with self.lock:", line="train.py:12")),
        [("lock", (3,))], ["a lock", "train.py:12: with self.lock:"],
    ),
    "a queue": (still(own(source="item = work.get()")), [("lock", (3,))], ["a lock or an event"]),
    "an event": (
        still(own(stack=[["/usr/lib/python3.11/threading.py", 327, "wait"]])), [("lock", (3,))], ["a lock or an event"],
    ),
    "a rank that computes": (
        still(own(cpu_s=59.0)),
        [("computing", (3,))], ["computes at train.py:9", "ranks 0, 1, 2 wait for it in all_reduce"],
    ),
    "a rank that gets little of a core": (
        still(own(cpu_s=1.0, states="RRRSRRRRRR")), [("computing", (3,))], ["computes at"],
    ),
    "a rank that waits, with busy threads": (
        still(own(cpu_s=99.0, states="SSSSRSSSSS")), [("idle", (3,))], ["sleeps, reads or writes"],
    ),
    "a rank that sleeps": (still(own(step=None)), [("idle", (3,))], ["rank 3 sleeps, reads or writes at train.py:9"]),
    "servers that don't answer": (
        Facts(
            run=OF_SERVERS, stands_s=60.0,
            ranks=[RankFacts(0, answer(waits_in="an answer of the parameter servers"))],
        ),
        [("servers", ())], ["all workers wait for an answer of the parameter servers"],
    ),
    "a checkpoint that is waited for": (
        Facts(run=RUNNING, stands_s=60.0, ranks=[RankFacts(0, answer(waits_in="the writing of a checkpoint"))]),
        [("checkpoint", (0,))], ["rank 0 waits until a checkpoint is written"],
    ),
    "a full disk": (slow({}, {}, free_bytes=4096), [("full disk", ())], ["the disk of runs/a is full"]),
    "a checkpoint that failed": (
        slow({}, {}, checkpoint_fault="permission denied"), [("checkpoint failed", ())], ["permission denied"],
    ),
    "a clock that jumped": (
        slow({}, {}, clock_jumps=[(-3600.0, 8)]), [("clock jump", (0,))], ["jumped by -3600 s at step 8"],
    ),
    "a slow loader": (
        slow({"communication": 105}, {"data": 85}), [("slow data", (1,))],
        ["rank 1 is waited for 80.0 ms of a step (44%): its data takes 80.0 ms longer"],
    ),
    "half of the cores": (
        slow({"communication": 85}, {"forward": 40, "backward": 80}, cores=(4, 2)), [("fewer cores", (1,))],
        ["it may use 2 cores, the others 4"],
    ),
    "a slower device": (
        slow({"communication": 85}, {"forward": 40, "backward": 80}), [("slow compute", (1,))],
        ["forward and backward take 2.0 times as long"],
    ),
    "an uneven batch": (
        slow({"communication": 85}, {"forward": 22, "backward": 90}),
        [("uneven work", (1,))], ["its backward takes 50.0 ms"],
    ),
    "a loop that is slow on one rank": (
        slow({"communication": 85}, {"other": 65}),
        [("slow loop", (1,))], ["its own code takes 60.0 ms longer"],
    ),
    "a slow disk of checkpoints": (
        slow({"communication": 85}, {"checkpoint": 60}),
        [("slow checkpoint", (1,))], ["its checkpoint takes 60.0 ms"],
    ),
    "data on every rank": (
        slow({"data": 200}, {"data": 200}), [("much data", ())], ["68% of each step is waiting for data"],
    ),
    "checkpoints that starve training": (
        slow({"checkpoint": 100}, {"checkpoint": 100}),
        [("much checkpoint", ())], ["50% of each step is waiting for checkpoints"],
    ),
    "a network that is slow": (
        slow({"communication": 125}, {"communication": 125}),
        [("much communication", ())], ["62% of each step", "overlap"],
    ),
    "a bubble": (
        slow({"bubble": 100}, {"bubble": 100}), [("much bubble", ())], ["50% of each step is waiting of pipeline"],
    ),
    "evaluations": (
        slow({"evaluation": 100}, {"evaluation": 100}), [("much evaluation", ())], ["50% of each step is evaluation"],
    ),
    "the loop's own code": (slow({"other": 105}, {"other": 105}), [("much other", ())], ["the loop's own code"]),
    "workers of servers go at their own pace": (slow({}, {"forward": 90}, run=OF_SERVERS), [], []),
    "nothing": (slow({}, {}), [], []),
    "a long step is no standstill": (
        Facts(run=RUNNING, ranks=[own(cpu_s=60.0)], stands_s=60.0, splits=splits({"forward": 30_000})), [], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_a_rule(case):
    facts, expected, words = RULES[case]
    found = causes(facts)
    assert [(cause.name, cause.ranks) for cause in found] == expected
    for word in words:
        assert word in found[0].text
    text = "\n".join(page(facts, found))
    assert all(cause.text in text and cause.fix in text for cause in found)


LOOP = """
if __name__ == "__main__":
    import ctypes
    from pathlib import Path
    wanted = Path(os.environ["TEST_WANTED"])
    lock = threading.Lock()
    lock.acquire()

    def is_wanted(name):
        return wanted.exists() and wanted.read_text() == name

    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.rank != 1:
            continue
        while is_wanted("sleep"):
            time.sleep(0.05)
        while is_wanted("compute"):
            for _ in range(10**7): pass
        while is_wanted("lock"):
            lock.acquire(timeout=0.5)
        if is_wanted("native"):
            ctypes.PyDLL(None).sleep(8)
            wanted.unlink(missing_ok=True)
        if is_wanted("slow"):
            time.sleep(0.03)
        if is_wanted("skip"):
            paceline.barrier()
"""
IMPORTS = "import os, threading, time\n"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("why")
    file = write_workload(folder, loop=LOOP)
    file.write_text(IMPORTS + file.read_text().replace("epochs=4", "epochs=100_000"))
    process = start(
        folder, "run", "-n", "2", "--job", "a", "--checkpoint-every", "0", file, TEST_WANTED=str(folder / "wanted")
    )
    # Rank 0 writes the one, rank 1 the other, and either may be later.
    written = [folder / "runs/a/events.jsonl", folder / "runs/a/times/1.jsonl"]
    assert wait_for(lambda: all(file.exists() for file in written), 30), process.stderr.read()
    yield folder
    process.send_signal(signal.SIGKILL)
    process.communicate()


def inject(folder, name):
    draft = folder / "draft"
    draft.write_text(name)
    draft.replace(folder / "wanted")


# What rank 1 does, the name of the cause, and what its text says.
INJECTED = {
    "sleep": ("idle", ["rank 1 sleeps", "time.sleep(0.05)", "rank 0 waits for it in all_reduce"]),
    "compute": ("computing", ["rank 1 computes at", "for _ in range(10**7): pass"]),
    "lock": ("lock", ["rank 1 waits for a lock", "lock.acquire(timeout=0.5)"]),
    "native": ("native code", ["rank 1 waits in native code"]),
    "slow": ("slow loop", ["rank 1 is waited for", "its own code takes"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_cause_is_named(name, job, monkeypatch):
    monkeypatch.setattr(judgement, "_STILL_S", 0.5)
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 1.5)
    expected, words = INJECTED[name]
    inject(job, name)
    time.sleep(2.0 if name == "slow" else 1.5)
    cause = Cause("", (), "", "")
    try:
        for _ in range(3):  # beside busy processes a rank may answer late
            (cause,) = causes(collect(job / "runs/a")) or [cause]
            if cause.name == expected:
                break
    finally:
        (job / "wanted").unlink(missing_ok=True)
        let_go_on(job, steps=60)  # the next cause is not to be judged by this one's steps
    assert (cause.name, cause.ranks) == (expected, (1,))
    for word in words:
        assert word in cause.text
    assert not (job / "runs/a" / FOLDER).exists()


def let_go_on(folder, steps):
    """Wait until the job has taken more steps."""
    path = folder / "runs/a/events.jsonl"
    before = path.read_text().count("\n")
    assert wait_for(lambda: path.read_text().count("\n") >= before + steps, 20)


@pytest.mark.slow
def test_a_stopped_process_is_named(job):
    process = json.loads((job / "runs/a/times/1.jsonl").read_text().splitlines()[0])
    os.kill(process["pid"], signal.SIGSTOP)
    try:
        assert wait_for(lambda: psutil.Process(process["pid"]).status() == "stopped")
        (cause,) = causes(collect(job / "runs/a"))
    finally:
        os.kill(process["pid"], signal.SIGCONT)
    assert (cause.name, cause.ranks) == ("stopped", (1,))


@pytest.mark.slow
def test_a_job_that_goes_on_has_no_cause_and_answers_quickly(job, capsys):
    let_go_on(job, steps=1)
    began_s = time.monotonic()
    assert main(["why", str(job / "runs/a"), "--json"]) == 0
    assert time.monotonic() - began_s < 4
    said = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in said["causes"] if each["name"] in ("idle", "computing", "no answer")] == []
    assert all(rank["answer"]["pid"] for rank in said["ranks_now"])


@pytest.mark.slow
def test_two_may_ask_at_once(job):
    let_go_on(job, steps=1)
    found = []
    threads = [threading.Thread(target=lambda: found.append(ask(job / "runs/a", 2, 4.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert [sorted(answers) for answers in found] == [[0, 1]] * 3
    assert not (job / "runs/a" / FOLDER).exists()


@pytest.mark.slow
def test_calls_that_differ_are_named_last_as_they_end_the_job(job, monkeypatch):
    monkeypatch.setattr(judgement, "_STILL_S", 0.5)
    inject(job, "skip")
    time.sleep(1.5)
    (cause,) = causes(collect(job / "runs/a"))
    assert cause.name == "different calls"
    assert "rank 1 in barrier at" in cause.text
    assert "rank 0 in all_reduce at" in cause.text


@pytest.mark.slow
def test_a_job_that_failed_says_why(tmp_path, capsys):
    loop = 'if __name__ == "__main__":\n    job = paceline.distribute(workload)\n    raise ValueError("too cold")\n'
    assert paceline(tmp_path, "run", "--job", "a", write_workload(tmp_path, loop=loop)).code == 1
    assert main(["why", "a", "--runs", str(tmp_path / "runs")]) == 0
    assert "the job has ended: rank 0 failed first: ValueError: too cold" in capsys.readouterr().out


# What the folder is, what the error says.
REFUSED = {
    "no run": (lambda folder: (folder / "runs/a").mkdir(parents=True), "it is no run"),
    "no such run": (lambda folder: (folder / "runs").mkdir(), "there is no such run"),
    "no folder": (lambda folder: None, "there is no folder"),
}


@pytest.mark.parametrize("command", ["why", "top", "timeline"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_run_is_refused(case, command, tmp_path, capsys):
    make, found = REFUSED[case]
    make(tmp_path)
    assert main([command, "a", "--runs", str(tmp_path / "runs")]) == 2
    assert found in capsys.readouterr().err


def write_times(folder, *lines, started_s=0.0):
    (folder / "times").mkdir()
    (folder / "times/0.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    (folder / "job.json").write_text(json.dumps({"version": 1, "script": "a.py", "ranks": 1}))
    os.utime(folder / "job.json", (started_s, started_s))


# Lines of a rank's times, when the job was started, and what is known of its process, which has gone.
GONE = 2**22 + 1  # no process has such a number
PROCESS = {"version": 1, "rank": 0, "host": socket.gethostname(), "pid": GONE, "monotonic_ns": 0, "wall_ns": 10**18}
PROCESSES = {
    "of this start": ([PROCESS], 1e9 - 1, (GONE, "gone")),
    "of an earlier start": ([PROCESS], 1e9 + 60, (0, "")),
    "that has ended": ([PROCESS, {"step": None, "ns": {}}], 1e9 - 1, (GONE, ENDED)),
    "that began anew": ([PROCESS, {"step": None, "ns": {}}, PROCESS], 1e9 - 1, (GONE, "gone")),
    "of which nothing is known": ([], 1e9, (0, "")),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_the_process_of_a_rank(case, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 0.0)
    lines, started_s, (pid, state) = PROCESSES[case]
    write_times(tmp_path, *lines, started_s=started_s)
    (rank,) = collect(tmp_path).ranks
    assert (rank.pid, rank.state) == (pid, state)


def test_every_command_that_a_fix_names_is_there():
    """Of paceline's own commands, and with the numbers of processes in place of PID."""
    for facts, _, _ in RULES.values():
        for cause in causes(facts):
            for words in re.findall(r"`paceline ([^`]*)`", cause.fix):
                read_words(words.split())
            if cause.name == "stopped":
                assert "kill -CONT 7" in cause.fix


def read_words(words):
    verb = importlib.import_module(f"paceline.cli.{words[0]}_command")
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    parser.parse_args(["train.py" if word == "FILE" else word for word in words[1:]])


def test_an_answer_of_another_question_does_not_count(tmp_path):
    (tmp_path / FOLDER / "other").mkdir(parents=True)
    (tmp_path / FOLDER / "other/0.json").write_text(json.dumps(answer()))
    assert ask(tmp_path, 1, 0.2) == {}
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["other"]


def test_a_run_that_cant_be_written_is_said(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps({"version": 1, "script": "a.py", "ranks": 2}))
    (tmp_path / FOLDER).write_text("")
    (cause,) = causes(collect(tmp_path))
    assert cause.name == "not asked"
    assert "the ranks can't be asked" in cause.text
