"""`paceline runs`: what it lists, shows, compares and removes, of runs that ended in every way."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import asdict

import pytest

from paceline.checkpoint.owner import take
from paceline.cli.main import main
from paceline.nouns.plan import Plan
from paceline.nouns.step_record import elapsed_s, samples_per_s
from paceline.run.read import runs as summary
from paceline.run.read.runs import speed_of
from paceline.run.supervise.progress import Progress


def plan_of(text):
    return {**asdict(Plan.parse(text)), "version": 1}


def step(number, loss, **more):
    return {
        "event": "step", "step": number, "position": 8 * number, "loss": loss, "weight": 8.0, "samples": 8,
        "seconds": 0.1 * number, "sent_bytes": 4, "gradient_norm": None, "memory_bytes": 2**20 * number,
        "at": 1000.0 + number, **more,
    }  # fmt: skip


START = {
    "event": "start",
    "version": 1,
    "total_steps": 6,
    "samples": 48,
    "batch_size": 8,
    "world_size": 2,
    "at": 1000.0,
}
TRAINED = [
    START,
    *[step(number, 4.0 - number / 2) for number in (1, 2, 3, 4)],
    START,
    {"event": "resumed", "step": 3, "position": 24, "path": "step-3", "at": 1010.0},
    *[step(number, 3.0 - number / 4) for number in (4, 5, 6)],
    {"event": "evaluation", "step": 6, "loss": 1.25, "accuracy": 0.5, "at": 1020.0},
    {"event": "logged", "step": 5, "lr": 0.125, "at": 1019.0},
    {"event": "logged", "step": 6, "lr": 0.0625, "temperature": 2.0, "at": 1020.0},
    {"event": "end", "step": 6, "ledger": [], "at": 1021.0},
]


def make(runs, name, events=TRAINED, status="done", plan="replicate=2", quiet_s=0.0, **job):
    """A run directory, last changed `quiet_s` ago."""
    folder = runs / name
    folder.mkdir(parents=True)
    at = time.time_ns() / 1e9 - quiet_s
    files = {
        "plan.json": json.dumps(plan_of(plan)),
        "job.json": json.dumps(
            {"version": 1, "script": "/home/me/train.py", "arguments": ["--lr", "0.1"], "ranks": 2, **job}
        ),
        "events.jsonl": "".join(json.dumps(event) + "\n" for event in events),
    }
    if status is not None:
        failure = None
        if status == "failed":
            cause = {
                "rank": 1,
                "step": 4,
                "type": "ValueError",
                "traceback": "...",
                "is_paceline": False,
                "where": None,
            }
            failure = {**cause, "message": "the cause\nmore"}
        files["result.json"] = json.dumps({"job": name, "status": status, "failure": failure})
    for number, (file, text) in enumerate(files.items()):
        (folder / file).write_text(text)
        os.utime(folder / file, (at + number / 100, at + number / 100))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    make(folder, "old", quiet_s=4000)
    make(folder, "broken", TRAINED[:5], status="failed", quiet_s=3000)
    make(folder, "gone", TRAINED[:4], status=None, quiet_s=2000)
    make(folder, "training", TRAINED[:3], status=None, quiet_s=20)
    checkpoint = folder / "old" / "checkpoints" / "step-00000006"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return folder


def test_the_list_has_the_newest_first(runs, capsys):
    assert main(["runs"]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["job", "status", "started", "steps", "loss", "evaluation", "ranks", "plan"]
    assert [row[0] for row in rows] == ["training", "gone", "broken", "old"]
    assert rows[1][1] == "silent"
    assert rows[0][1] == "running"
    assert rows[2][1] == "failed"
    assert (rows[3][1], rows[3][4:6]) == ("done", ["6/6", "1.5"])
    assert rows[3][-6:] == ["loss", "1.25,", "accuracy", "0.5", "2", "replicate=2"]


def test_a_run_that_goes_on_after_a_result_is_running(runs, capsys):
    now = time.time_ns() / 1e9
    with (runs / "old" / "events.jsonl").open("a") as file:
        file.write(json.dumps(START) + "\n")
    os.utime(runs / "old" / "job.json", (now, now))
    assert main(["runs", "--json"]) == 0
    newest, *_ = json.loads(capsys.readouterr().out)
    assert (newest["job"], newest["status"]) == ("old", "running")


def test_the_list_for_programs(runs, capsys):
    assert main(["runs", "--json"]) == 0
    found = {row["job"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == ["training", "gone", "broken", "old"]
    assert found["old"]["evaluation"] == {"loss": 1.25, "accuracy": 0.5}
    assert found["old"]["script"] == ["/home/me/train.py", "--lr", "0.1"]
    assert (found["gone"]["step"], found["gone"]["total_steps"], found["gone"]["loss"]) == (3, 6, 2.5)


def test_a_long_list_is_cut_and_says_so(runs, capsys):
    for number in range(20):
        make(runs, f"many-{number}", quiet_s=5000 + number)
    assert main(["runs"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 21
    assert "4 older ones; --all lists them" in printed.err
    assert main(["runs", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 25


def test_show_counts_steps_that_were_taken_again_once(runs, capsys):
    assert main(["runs", "show", "old"]) == 0
    out = capsys.readouterr().out
    facts = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["starts"] == "2"
    assert facts["file"] == "/home/me/train.py --lr 0.1"
    assert (facts["loss, first"], facts["loss, last"], facts["loss, lowest"]) == ("3.5", "1.5", "1.5")
    assert facts["a step"] == "550.0 ms", "the median of the last attempt's steps, without its first"
    assert facts["samples/s"] == "14.5", "16 samples in 1.1 s"
    assert facts["memory of rank 0"] == "6.0 MiB"
    assert facts["checkpoints"] == "steps 6 (3.0 MiB)"
    assert "evaluation at step 6  loss 1.25, accuracy 0.5" in out
    assert "logged at step 6  lr 0.0625" in out
    assert "█" in facts["loss over the steps"]


def test_show_for_programs_and_by_path(runs, capsys):
    assert main(["runs", "show", "runs/broken", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["job"], shown["failure"], shown["loss_lowest"]) == (
        "broken",
        "rank 1, step 4 failed first: ValueError: the cause",
        2.0,
    )
    assert main(["runs", "show", "old", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["evaluations"] == [{"step": 6, "loss": 1.25, "accuracy": 0.5}]
    assert shown["logged"]["temperature"] == {"step": 6, "value": 2.0}
    assert shown["checkpoints"] == [6]


def test_compare_has_what_differs_in_the_plans(runs, capsys):
    make(runs, "other", plan="shard=2,compression=bf16")
    assert main(["runs", "compare", "old", "other"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["old", "other"]
    assert [line.split()[-2:] for line in lines if line.startswith("plan: mesh")] == [["replicate=2", "shard=2"]]
    assert any(line.startswith("plan: compression") for line in lines)
    assert not any(line.startswith("plan: keep") for line in lines)
    assert main(["runs", "compare", "old", "other", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["job"] for run in shown["runs"]] == ["old", "other"]
    assert shown["plans_differ"]["mesh"] == ["replicate=2", "shard=2"]


def test_rm_removes_what_it_said(runs, capsys):
    words = ["runs", "rm", "old", "broken", str(runs.absolute() / "old")]
    assert main([*words, "--dry-run"]) == 0
    assert "2 would be removed, 3.0 MiB" in capsys.readouterr().err
    assert (runs / "old").is_dir()
    assert main([*words, "--yes"]) == 0
    assert "2 removed, 3.0 MiB" in capsys.readouterr().err
    assert sorted(path.name for path in runs.iterdir()) == ["gone", "training"]


def test_rm_for_programs(runs, capsys):
    assert main(["runs", "rm", "old", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["removed"], told["found"][0]["run_dir"]) == ([], "runs/old")
    assert main(["runs", "rm", "old", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"][0]["bytes"] > 3 * 2**20
    assert not (runs / "old").exists()


def test_programs_are_not_asked(runs, capsys, monkeypatch):
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["runs", "rm", "old", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["status"] == "refused"
    assert (runs / "old").is_dir()


def test_rm_leaves_a_run_that_a_job_has_taken(runs, capsys):
    with take(runs / "old", print, ""):  # it has a result still, of the last attempt
        assert main(["runs", "rm", "old", "--yes"]) == 2
        assert f"another job has it: process {os.getpid()} on " in capsys.readouterr().err
        assert (runs / "old" / "result.json").exists()
    assert main(["runs", "rm", "old", "--yes"]) == 0


def test_what_rm_can_not_remove_is_named(runs, capsys, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder / "events.jsonl"))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert main(["runs", "rm", "old", "--yes"]) == 2
    assert "runs/old/events.jsonl can't be removed (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "is_there"), [("n\n", True), ("", True), ("y\n", False), ("yes\n", False)])
def test_rm_asks(runs, capsys, monkeypatch, answer, is_there):
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["runs", "rm", "old"]) == int(is_there)
    told = capsys.readouterr().err
    assert "with the checkpoints? [y/N]" in told
    assert ("nothing was removed" in told) == is_there
    assert (runs / "old").is_dir() == is_there


# The words, and what the error says: asked, found, fix.
REFUSED = {
    "no such run": (["show", "odl"], "the run 'odl' in runs", "there is no such run", "old"),
    "no such folder": (["--runs", "nowhere"], "runs in nowhere", "there is no such folder", "--runs"),
    "no folder of runs": (["--runs", "nowhere", "show", "a"], "'a' in nowhere", "no folder nowhere", "paceline runs"),
    "no run": (["show", "empty"], "'empty'", "it has no job.json", "paceline runs"),
    "one run": (["compare", "old"], "compare old", "that is one run", "two or more"),
    "a run that trains": (["rm", "training", "--yes"], "rm runs/training", "within the last 120 s", "stop it first"),
    "a long step": (["rm", "gone", "--yes"], "rm runs/gone", "it may be in a long step", "rm -r runs/gone"),
    "another project": (["rm", "other", "--yes"], "rm runs/other", "not that of a run", "rm -r runs/other"),
    "both": (["rm", "old", "--yes", "--dry-run"], "--dry-run with --yes", "removes nothing", "choose one"),
    "a question in JSON": (["rm", "old", "--json"], "without --yes", "--json is for programs", "--yes"),
    "a link": (["rm", "link", "--yes"], "rm runs/link", "a link to another folder", "remove the link"),
    "nobody to ask": (["rm", "old"], "without --yes", "no terminal", "--yes"),
    "all of one": (["--all", "show", "old"], "--all", "names its runs", "leave --all out"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_done_is_refused_and_nothing_is_lost(case, runs, capsys, monkeypatch):
    words, asked, found, fix = REFUSED[case]
    (runs / "empty").mkdir()
    (runs / "other").mkdir()
    (runs / "other" / "job.json").write_text('{"name": "of another program"}')
    (runs / "link").symlink_to(runs / "old", target_is_directory=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    before = sorted(runs.iterdir())
    assert main(["runs", *words]) == 2
    first, second, third = capsys.readouterr().err.splitlines()[:3]
    assert asked in first
    assert found in second
    assert fix in third
    assert sorted(runs.iterdir()) == before


def write_torn(folder):
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 7, "lo')


DAMAGE = {
    "a torn last line": write_torn,
    "no events": lambda folder: (folder / "events.jsonl").unlink(),
    "no plan": lambda folder: (folder / "plan.json").unlink(),
    "a plan of a later version": lambda folder: (folder / "plan.json").write_text('{"version": 99}'),
    "a torn result": lambda folder: (folder / "result.json").write_text('{"status"'),
    "a torn job.json": lambda folder: (folder / "job.json").write_text("{"),
    "lines of another program": lambda folder: (folder / "events.jsonl").write_text("hello\n[1]\n\x00\n"),
    "events of an older version": lambda folder: (folder / "events.jsonl").write_text(
        json.dumps({"event": "start", "total_steps": 6, "at": 1.0}) + "\n" + json.dumps(step(1, 2.0)) + "\n"
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run_is_listed_and_shown_with_what_can_be_read(case, runs, capsys):
    DAMAGE[case](runs / "old")
    for words in (["runs", "--json"], ["runs"], ["runs", "show", "old"], ["runs", "compare", "old", "broken"]):
        assert main(words) == 0
        assert "old" in capsys.readouterr().out
    if case == "a torn last line":
        assert summary.read_run(runs / "old").step == 6


def test_runs_copy_has_ended_regardless_of_its_file_times(runs, capsys):
    now = time.time_ns() / 1e9
    os.utime(runs / "old" / "job.json", (now, now))
    assert summary.read_run(runs / "old").status == "done"
    capsys.readouterr()


def test_an_evaluation_far_from_the_end_is_shown_and_compared(runs, capsys):
    later = [step(number, 1.0) for number in range(7, 700)]
    make(runs, "long", [*TRAINED[:-1], *later], quiet_s=1)
    assert main(["runs", "show", "long"]) == 0
    assert "evaluation        loss 1.25, accuracy 0.5" in capsys.readouterr().out
    assert main(["runs", "compare", "long", "old"]) == 0
    assert capsys.readouterr().out.count("loss 1.25, accuracy 0.5") == 2


def test_losses_that_are_not_finite_are_no_lowest(runs, capsys):
    make(runs, "nan", [START, step(1, float("nan")), step(2, 2.0), step(3, float("-inf"))], status="failed")
    assert main(["runs", "show", "nan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss_lowest"] == 2.0
    assert main(["runs", "show", "nan"]) == 0
    assert "loss over the steps  2.00" in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_not_printed(runs, capsys):
    name = "ba\x1b[31md"
    make(runs, name, [*TRAINED, {"event": "logged", "step": 6, "\x1b[2Jname": 1.0, "at": 1.0}], arguments=["\x1b[31m"])
    (runs / name / "result.json").write_text(json.dumps({"status": "\x1b[2J"}))
    os.utime(runs / name / "result.json", (2e9, 2e9))
    for words in ([], ["show", name], ["compare", name, "old"], ["rm", name, "--dry-run"]):
        assert main(["runs", *words]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_a_thousand_runs_are_listed_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(1000):
        make(tmp_path / "runs", f"run-{number}", quiet_s=number)
    began = time.process_time()
    assert main(["runs"]) == 0
    assert time.process_time() - began < 2.0
    assert "980 older ones" in capsys.readouterr().err


def test_an_empty_folder_has_none(tmp_path, capsys):
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    assert f"there is none in {tmp_path}" in capsys.readouterr().err


JUMPS = {"forward": 3600.0, "back": -3600.0}


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_that_is_set_while_a_job_runs_changes_no_speed(jump, tmp_path):
    times = {"forward": 0.25, "backward": 0.25, "data": 0.5}
    steps = [step(number, 1.0, times=times) for number in (1, 2, 3, 4)]
    for late in steps[2:]:
        late["at"] += JUMPS[jump]
    folder = make(tmp_path, "a", [START, *steps])
    found = speed_of(folder, summary.read_run(folder))
    assert (found.samples_per_s, found.left_s) == (pytest.approx(8.0), pytest.approx(2.0))
    assert samples_per_s(steps) == pytest.approx(8.0)
    told = Progress(folder)
    for event in (START, *steps):
        told._take(event)
    assert "8.0 samples/s  0:02 left" in told.line()


@pytest.mark.parametrize("times", [None, {}, {"data": "x"}, {"data": float("nan")}, [1.0]])
def test_runs_elapsed_time_without_valid_times_is_between_events(times):
    steps = [step(1, 1.0), step(2, 1.0, times=times)]
    assert elapsed_s(steps) == (0.0 if times and times != [1.0] and times["data"] != "x" else 1.0)
    assert elapsed_s(steps[:1]) == elapsed_s([]) == 0.0


def test_a_long_text_after_the_last_step_hides_no_step(tmp_path):
    text = {"event": "text", "step": 6, "name": "sample", "text": "word " * 50_000, "at": 1030.0}
    folder = make(tmp_path, "a", [*TRAINED, text])
    run = summary.read_run(folder)
    assert (run.step, run.loss, run.total_steps) == (6, 1.5, 6)
    assert speed_of(folder, run).samples_per_s == pytest.approx(8.0)
