"""Reading the ranks' times: splits, the slow rank, the table, and the trace of a run."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.run.read.times import KINDS, RankSplit, recent_splits, sentence, slow_rank, table
from paceline.run.timeline import make_trace

MS = 1_000_000


def process(rank, boot="b", monotonic_ns=0, wall_ns=10**18, host="h", pid=1):
    clocks = {"monotonic_ns": monotonic_ns, "wall_ns": wall_ns}
    return {"version": 1, "rank": rank, "host": host, "pid": pid, "boot": boot, **clocks}


def step(number, begin_ms, spans=(), **milliseconds):
    by_kind = {name.replace("_", " "): ms * MS for name, ms in milliseconds.items()}
    line = {"step": number, "begin_ns": begin_ms * MS, "ns": by_kind}
    if spans:
        line["spans"] = [[kind, name, begin * MS, end * MS, peer, tag] for kind, name, begin, end, peer, tag in spans]
    return line


def write(run_dir: Path, rank: int, *lines) -> Path:
    (run_dir / "times").mkdir(parents=True, exist_ok=True)
    (run_dir / "job.json").write_text(json.dumps({"version": 1, "script": "a.py", "ranks": 2}))
    path = run_dir / "times" / f"{rank}.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_the_first_step_is_left_out_and_axes_are_added_up(tmp_path):
    steps = [step(1, 0, data=500)]
    steps += [step(number, 10 * number, data=2, communication_shard=3, communication_replicate=1) for number in (2, 3)]
    write(tmp_path, 0, process(0), *steps, {"step": None, "begin_ns": 0, "ns": {"other": 5}})
    (split,) = recent_splits(tmp_path, 2)
    assert (split.rank, split.steps, split.last_step) == (0, 2, 3)
    assert split.by_kind["communication"] == pytest.approx(0.004)
    assert split.by_axis == {"shard": pytest.approx(0.003), "replicate": pytest.approx(0.001)}
    assert split.seconds == pytest.approx(0.006)
    assert split.own_s == pytest.approx(0.002)


def test_only_the_newest_process_and_the_newest_steps_count(tmp_path):
    old = [step(number, number, data=900) for number in range(1, 9)]
    new = [step(number, number, data=number) for number in range(3, 200)]
    write(tmp_path, 0, process(0, pid=1), *old, process(0, pid=2), *new)
    (split,) = recent_splits(tmp_path, 2, 10)
    assert (split.steps, split.last_step) == (10, 199)
    assert split.seconds == pytest.approx(0.1945)
    assert split.median_s == pytest.approx(0.1945)


def test_ranks_of_an_earlier_start_do_not_count(tmp_path):
    for rank in (0, 1, 2):
        write(tmp_path, rank, process(rank), step(1, 0, data=1))
    assert [split.rank for split in recent_splits(tmp_path, 2)] == [0, 1]
    assert [split.rank for split in recent_splits(tmp_path, 0)] == [0, 1, 2]


# Lines that a file may have, of which none is a step.
ODD = {
    "torn": '{"step": 3, "begin_ns": 1',
    "no object": "[1, 2]\n",
    "another form": '{"step": "3", "begin_ns": 1, "ns": {}}\n',
    "too deep": "[" * 100_000 + "\n",
    "a number that is too large": '{"step": 3, "begin_ns": 1, "ns": {"data": 1' + "0" * 400 + "}}\n",
    "no numbers": '{"step": 3, "begin_ns": 1, "ns": {"data": "x"}}\n',
    "not text": "\udcff",
}


@pytest.mark.parametrize("case", ODD)
def test_odd_lines_are_passed_over(case, tmp_path):
    path = write(tmp_path, 0, process(0), step(1, 0, data=1), step(2, 1, data=1))
    with path.open("ab") as file:
        file.write(ODD[case].encode("utf-8", "surrogateescape"))
    (split,) = recent_splits(tmp_path, 2)
    assert split.last_step == 2


def test_a_file_of_a_newer_version_is_passed_over(tmp_path):
    write(tmp_path, 0, {**process(0), "version": 2}, step(1, 0, data=1))
    assert recent_splits(tmp_path, 2) == []
    assert recent_splits(tmp_path / "nowhere", 2) == []


def split(rank, **milliseconds):
    by_kind = {kind: milliseconds.get(kind, 0) / 1000 for kind in KINDS}
    seconds = sum(by_kind.values())
    return RankSplit(rank, 50, 60, seconds, by_kind, seconds)


def test_only_steps_that_all_ranks_have_written_are_compared(tmp_path):
    """Rank 1 has not written its steps 8 to 10 yet, in one of which rank 0 evaluates."""
    write(tmp_path, 0, process(0), *(step(n, 100 * n, data=10, evaluation=500 * (n == 9)) for n in range(1, 11)))
    write(tmp_path, 1, process(1), *(step(n, 100 * n, data=10) for n in range(1, 8)))
    splits = recent_splits(tmp_path, 2)
    assert [(split.steps, split.last_step) for split in splits] == [(6, 7), (6, 7)]
    assert slow_rank(splits) is None


# Milliseconds of rank 1's own work in each step, beside 100 of rank 0; whether it is called slow.
STEPS = {
    "always": ([115] * 10, True),
    "now and then": ([100, 100, 300, 100, 100, 100, 280, 100, 100, 100] * 5, True),
    "once": ([100] * 20 + [900] + [100] * 20, False),
    "up and down": ([60, 170] * 5, False),
}


@pytest.mark.parametrize("case", STEPS)
def test_chance_is_no_slowness(case, tmp_path):
    milliseconds, is_slow = STEPS[case]
    for rank in (0, 1):
        lines = [step(1, 0, data=1)]
        for number, ms in enumerate(milliseconds, 2):
            lines.append(step(number, 0, data=ms if rank else 100))
        write(tmp_path, rank, process(rank), *lines)
    assert (slow_rank(recent_splits(tmp_path, 2)) is not None) == is_slow


def test_who_takes_longest_alone_is_waited_for():
    splits = [
        split(0, forward=10, communication=50),
        split(1, forward=10, data=50),
        split(2, forward=12, communication=48),
    ]
    slow = slow_rank(splits)
    assert (slow.rank, slow.kind) == (1, "data")
    assert slow.own_excess_s == pytest.approx(0.049)
    assert (
        sentence(slow)
        == "rank 1 is waited for 49.0 ms of a step (82%): its data takes 50.0 ms longer than on the others"
    )


@pytest.mark.parametrize(
    "splits",
    [
        [],
        [split(0, forward=10)],
        [replace(split(0, forward=10), steps=4), replace(split(1, forward=90), steps=4)],
        [split(0, forward=100, communication=5), split(1, forward=105)],  # 5 %
        [split(0, forward=1, communication=0.5), split(1, forward=1.5)],  # half a millisecond
        [split(0, bubble=90, forward=10), split(1, communication=90, forward=10)],
    ],
)
def test_small_differences_and_waits_are_no_slowness(splits):
    assert slow_rank(splits) is None


def test_the_table_aligns_and_leaves_out_what_none_has():
    lines = table([split(rank, forward=10 * rank, data=20_000) for rank in range(20)])
    assert lines[0].split() == ["ms", "of", "a", "step", "data", "forward", "all"]
    assert lines[2].split() == ["rank", "1", "20000", "10.0", "20010"]
    assert lines[-1].strip() == "and 4 more"
    assert len({len(line) for line in lines}) == 1
    assert table([]) == []


# The trace


def spans_of(rank, number, start):
    peer = 1 - rank
    own = ("communication pipeline", "send", start + 2, start + 3, peer, 7)
    if rank == 1:
        own = ("bubble", "receive", start, start + 4, peer, 7)
    return [
        ("forward", "", start, start + 2, -1, -1),
        own,
        ("communication step", "all_reduce", start + 5, start + 6, -1, -1),
    ]


def two_ranks(run_dir, boots=("b", "b"), monotonic_ms=(0, 0), wall_ms=(0, 0)):
    for rank in (0, 1):
        shift = monotonic_ms[rank]
        clocks = {"monotonic_ns": shift * MS, "wall_ns": 10**18 + wall_ms[rank] * MS}
        head = {**process(rank, boot=boots[rank], host=f"host-{rank}"), **clocks}
        lines = []
        for number in range(1, 6):
            start = shift + 10 * number
            lines.append(step(number, start, spans_of(rank, number, start), forward=2, other=8))
        write(run_dir, rank, head, *lines)


def ends(trace, rank):
    found = [event for event in trace.events if event.get("name") == "all_reduce" and event["pid"] == rank]
    return [event["ts"] + event["dur"] for event in found]


def test_a_trace_has_steps_work_axes_and_arrows(tmp_path):
    two_ranks(tmp_path)
    checkpoint = {"event": "checkpoint", "path": "x", "step": 4, "seconds": 0.5, "at": 10**9 + 0.05}
    (tmp_path / "events.jsonl").write_text(json.dumps(checkpoint) + "\n")
    trace = make_trace(tmp_path)
    assert (trace.steps, trace.detailed, trace.ranks, trace.messages) == (10, 10, (0, 1), 5)
    by_name = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in trace.events if event["name"] == "thread_name"
    }
    assert {name for (rank, _), name in by_name.items() if rank == 1} == {"steps", "work"}
    begins = {event["id"]: event for event in trace.events if event["ph"] == "s"}
    for end in (event for event in trace.events if event["ph"] == "f"):
        begin = begins[end["id"]]
        assert (begin["pid"], end["pid"]) == (0, 1)
    (saved,) = [event for event in trace.events if event["name"] == "checkpoint"]
    assert saved["dur"] == 500_000
    assert saved["ts"] == pytest.approx(1e15 - 450_000)
    assert all(event.get("dur", 0) >= 0 for event in trace.events)
    assert ends(trace, 0) == ends(trace, 1)


def test_clocks_of_two_hosts_are_aligned_by_their_collectives(tmp_path):
    # Host 1 booted later, and its wall clock is 3 s ahead.
    two_ranks(tmp_path, boots=("b", "c"), monotonic_ms=(5000, 70), wall_ms=(0, 3000))
    trace = make_trace(tmp_path)
    assert trace.matched == ("host-1",)
    assert ends(trace, 0) == pytest.approx(ends(trace, 1), abs=1)


def test_without_collectives_the_wall_clock_counts(tmp_path):
    two_ranks(tmp_path, boots=("b", ""), monotonic_ms=(5000, 70), wall_ms=(0, 3000))
    trace = make_trace(tmp_path)
    assert trace.matched == ()
    assert ends(trace, 1)[0] - ends(trace, 0)[0] == pytest.approx(3_000_000)


def test_spans_of_another_form_are_passed_over(tmp_path):
    odd = step(1, 0, forward=2)
    odd["spans"] = ["x", [1, 2], ["forward", "", 1, 2, "a", 3], ["forward", "", MS, 2 * MS, -1, -1]]
    write(tmp_path, 0, process(0), odd)
    trace = make_trace(tmp_path)
    assert len([event for event in trace.events if event.get("cat") == "forward"]) == 1


def test_the_command_writes_the_wanted_steps(tmp_path, capsys, monkeypatch):
    two_ranks(tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", "a", "--steps", "2:3"]) == 0
    assert (
        capsys.readouterr().out
        == "a-timeline.json: 4 steps of 2 ranks, 4 of them in detail; open it in ui.perfetto.dev\n"
    )
    events = json.loads(Path("a-timeline.json").read_text())["traceEvents"]
    assert sorted({event["name"] for event in events if event.get("cat") == "step"}) == ["step 2", "step 3"]
    assert main(["timeline", "a", "--json", "-o", "b.json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "output": "b.json",
        "steps": 10,
        "detailed": 10,
        "ranks": 2,
        "messages": 5,
    }


# Words, and what the error says.
REFUSED = {
    "no range": (["--steps", "x"], "it is no range of steps"),
    "three": (["--steps", "1:2:3"], "it is no range of steps"),
    "backwards": (["--steps", "5:2"], "it is no range of steps"),
    "step 0": (["--steps", "0:2"], "it is no range of steps"),
    "no such steps": (["--steps", "70:80"], "there are no such steps"),
    "no folder": (["-o", "nowhere/a.json"], "there is no folder nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_error(case, tmp_path, capsys, monkeypatch):
    words, found = REFUSED[case]
    two_ranks(tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", "a", *words]) == 2
    assert found in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_top_prints_once_into_a_pipe(tmp_path, capsys):
    two_ranks(tmp_path / "runs/a")
    steps = [
        {"event": "step", "step": n, "position": 8 * n, "loss": 0.5, "samples": 8, "memory_bytes": 1, "at": 10.0 + n}
        for n in range(1, 6)
    ]
    begin = {"event": "start", "total_steps": 25, "at": 10.0}
    text = "".join(json.dumps(event) + "\n" for event in (begin, *steps))
    (tmp_path / "runs/a/events.jsonl").write_text(text)
    assert main(["top", "a", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "step 5/25  loss 0.5000  8.0 samples/s  0:20 left" in shown
    old_s = time.time_ns() / 1e9 - 60
    os.utime(tmp_path / "runs/a/events.jsonl", (old_s, old_s))
    assert main(["top", "a", "--runs", str(tmp_path / "runs")]) == 0
    assert "8.0 samples/s  nothing for 60 s: see `paceline why`" in capsys.readouterr().out
    assert "rank 1" in shown
    assert main(["top", "a", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["left_s"] == pytest.approx(20.0)
    assert [each["rank"] for each in said["times"]] == [0, 1]


def test_top_without_times_says_so(tmp_path, capsys):
    folder = tmp_path / "runs/a"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"version": 1, "script": "a.py", "ranks": 2}))
    assert main(["top", "a", "--runs", str(tmp_path / "runs")]) == 0
    assert "no rank has written the times of a step yet" in capsys.readouterr().out


def test_times_trace_tail_has_only_the_last_of_a_repeated_step(tmp_path):
    write(tmp_path, 0, process(0), step(5, 0, data=7), process(0, pid=2), step(5, 9000, data=3))
    both = [event["dur"] for event in make_trace(tmp_path).events if event.get("cat") == "step"]
    last = [event["dur"] for event in make_trace(tmp_path, tail_only=True).events if event.get("cat") == "step"]
    assert (both, last) == ([7000, 3000], [3000])
