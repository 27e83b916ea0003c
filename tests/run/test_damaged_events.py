"""Events that are damaged or forged: every reader goes on, shows the others, and says how many lines were none."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from starlette.requests import Request

from paceline.cli.main import main
from paceline.dashboard.app import Dashboard
from paceline.dashboard.charts import curves_of
from paceline.nouns.events import FORMS, decoded, newest_first
from paceline.nouns.reading import COUNT, LONGEST_LINE
from paceline.run.job_facts import collect
from paceline.run.read import runs as summary
from paceline.run.read.event_columns import STEP_FIELDS, EventIndex, decode_event
from paceline.run.read.runs import speed_of
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervise_servers import ServerNews
from paceline.run.timeline import make_trace
from paceline.train.event_log import Events

from support.dashboards import make_run, start_event, step_event, write_events

PAGES = ("overview", "time", "timeline", "plan", "memory", "events", "output", "explain", "curves", "spans")
WHOLE = {
    "start": start_event(20), "step": step_event(21), "own_batches": {"total_steps": 20},
    "checkpoint": {"path": "a", "step": 2, "seconds": 0.5}, "resumed": {"step": 2, "position": 64, "path": "a"},
    "servers_started": {"mode": "async"}, "coordinator_back": {"mode": "async"},
    "waiting": {"worker": 1, "step": 2, "silent_s": 1.5, "is_connected": True}, "back": {"worker": 1, "waited_s": 2.5},
    "left_out": {"worker": 1}, "joined_again": {"worker": 1}, "given_up": {"pid": 5, "silent_s": 1.0, "worker": 1},
    "notice": {"text": "a"}, "servers_ended": {"counted": 5, "gradients": 6}, "evaluation": {"step": 2, "loss": 1.0},
}  # fmt: skip


def damaged() -> dict[str, str]:
    """A line for every field of every kind of event, in which it has another type."""
    lines = {}
    for kind, form in FORMS.items():
        for name, of_field in form.items():
            event = {"event": kind, "at": 5.0, **WHOLE.get(kind, {})}
            for wrong in [{"x": [1]}, -1.5] if of_field in (COUNT, (COUNT, None)) else [{"x": [1]}]:
                lines[f"{kind}, {name}: {wrong}"] = json.dumps({**event, name.removesuffix("?"): wrong})
    more = {
        "a step that is a text": '{"event": "text", "step": "x"}',
        "a text of bytes": b'{"event": "text", "name": "\xff", "step": 1}',
        "a kind of bytes": b'{"event": "text\xff", "step": 1, "at": 5.0}',
        "a kind that is long": json.dumps({"event": "x" * 5000}),
        "half of a character": '{"event": "text", "name": "\\ud800", "text": "\\udfff", "step": 1, "at": 5.0}',
        "a kind of half a character": '{"event": "\\ud800", "at": 5.0}',
        "rows of a ledger": '{"event": "end", "ledger": [{"collective": [], "axis": {}, "calls": "x", "bytes": 5}, 3]}',
        "a large number": '{"event": "logged", "step": 2, "lr": 1' + 250 * "0" + "}",
        "deep": '{"event": "text", "x": ' + 5000 * "[" + 5000 * "]" + "}",
        "a time that is infinite": '{"event": "checkpoint", "path": "a", "at": 1e999, "seconds": 1e999}',
        "a path with a null character": '{"event": "checkpoint", "path": "a\\u0000b", "step": 3, "at": 5.0}',
    }
    return lines | {name: line if isinstance(line, str) else line.decode("latin-1") for name, line in more.items()}


DAMAGED = damaged()


def damage(runs: Path, *lines: str) -> Path:
    folder = make_run(runs, "a")
    content = (folder / "events.jsonl").read_bytes() + "".join(f"{line}\n" for line in lines).encode("latin-1")
    (folder / "events.jsonl").write_bytes(content + json.dumps(step_event(21, loss=0.5)).encode() + b"\n")
    return folder


def ask(pages: Dashboard, page: str) -> str:
    scope = {
        "type": "http", "method": "GET", "path": "/run/a", "query_string": b"", "headers": [],
        "path_params": {"job": "a"},
    }  # fmt: skip
    return getattr(pages, page)(Request(scope)).body.decode()


@pytest.mark.parametrize("case", DAMAGED)
def test_every_reader_goes_on(case, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 0.0)
    folder = damage(tmp_path, DAMAGED[case])
    (folder / "servers.jsonl").write_bytes((folder / "events.jsonl").read_bytes())
    assert summary.read_run(folder).step == 21
    assert summary.read_details(folder).losses[-1] == 0.5
    make_trace(folder)
    speed_of(folder, summary.read_run(folder))
    collect(folder)
    progress, news = Progress(folder), ServerNews(folder, lambda text: None, lambda *_: None)
    progress.follower.offset = news.follower.offset = 0
    progress.read()
    assert progress.last["step"] == 21
    progress.line()
    news.read()
    news.say_end()
    events = Events(folder)
    assert events.last_step() == 21
    events.close()
    index = EventIndex(folder / "events.jsonl")
    index.read_on(9.0)
    assert curves_of(index, 99)["loss"].step[-1] == 21


def test_every_page_and_command_shows_the_others(tmp_path, capsys):
    folder = damage(tmp_path, *DAMAGED.values())
    pages = Dashboard(tmp_path)
    for page in PAGES:
        assert ask(pages, page), page
    assert json.loads(ask(pages, "curves"))["curves"][0]["step"][-1] == 21
    for words in (["show", "a"], ["show", "a", "--json"], ["compare", "a", str(folder)]):
        assert main(["runs", "--runs", str(tmp_path), *words]) == 0
        assert "0.5" in capsys.readouterr().out


def test_lines_that_are_no_events_are_counted_and_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage(
        tmp_path / "runs", '{"event": "text", "step": "x"}', "{torn", "", '{"event": "text", "name": "b", "step": 2}'
    )
    assert main(["runs", "show", "a"]) == 0
    assert capsys.readouterr().out.count("2 lines of events.jsonl can't be read") == 1
    assert main(["runs", "show", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable_events"] == 2
    times = tmp_path / "runs/a/times"
    times.mkdir()
    (times / "0.jsonl").write_text('{"version":1,"rank":0}\n{"step":1,"begin_ns":0,"ns":{"forward":5}}\n')
    assert main(["timeline", "a"]) == 0
    assert capsys.readouterr().err == "paceline timeline: 2 lines of events.jsonl can't be read: they are left out\n"
    pages = Dashboard(tmp_path / "runs")
    for page in ("overview", "events"):
        assert ask(pages, page).count("2 lines of events.jsonl can&#39;t be read") == 1


def test_nothing_is_told_of_a_run_without_such_lines(tmp_path, capsys):
    folder = make_run(tmp_path, "a")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # it is being written
    assert main(["runs", "--runs", str(tmp_path), "show", "a"]) == 0
    assert "can't be read" not in capsys.readouterr().out
    assert "be read" not in ask(Dashboard(tmp_path), "overview")


def test_a_step_is_the_same_to_both_readers(tmp_path):
    """The fast one reads what is JSON for it, the other one NaN; what one refuses the other one refuses."""
    nan = json.dumps(step_event(3, loss=math.nan, gradient_norm=2.0)).encode()
    values = dict(zip(STEP_FIELDS, decode_event(nan)[0], strict=True))
    assert math.isnan(values["loss"])
    assert (values["step"], values["gradient_norm"]) == (3, 2.0)
    for wrong in (
        {},
        {"position": -1},
        {"samples": "x"},
        {"at": None},
        {"loss": True},
        {"seconds": "x"},
        {"step": 2**70},
    ):
        line = json.dumps(step_event(3, **wrong)).encode()
        assert (decode_event(line) == ((), None)) == (list(decoded(line)) == []), wrong


def test_a_long_line_is_passed_over(tmp_path, monkeypatch):
    """Nobody decodes a part of it, and the dashboard reads past it piece by piece."""
    folder = damage(tmp_path, '{"event": "text", "text": "' + "a" * (3 * LONGEST_LINE) + '"}')
    tried = []
    monkeypatch.setattr(
        "paceline.run.read.event_columns.decode_event", lambda line: tried.append(len(line)) or decode_event(line)
    )
    assert summary.read_details(folder).unreadable == 1
    assert next(newest_first(folder / "events.jsonl"))["step"] == 21
    assert summary.read_run(folder).step == 21
    index = EventIndex(folder / "events.jsonl")
    while index.unreadable == 0 or not index.is_complete:
        index.read_on(0.01)
        curves_of(index, 10)
    assert index.unreadable == 1
    assert curves_of(index, 99)["loss"].step[-1] == 21
    assert max(tried) < 1000
    events = Events(folder)
    assert events.last_step() == 21
    events.close()


def test_damaged_events_unfinished_long_line_is_read_only_once(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [start_event(2), step_event(1), "x" * (2 * LONGEST_LINE + 5)])
    index = EventIndex(path)
    for _ in range(3):
        index.read_on(9.0)
    assert index.follower.offset >= 2 * LONGEST_LINE
    with path.open("a") as file:
        file.write('"}\n' + json.dumps(step_event(2)) + "\n")
    index.read_on(9.0)
    assert curves_of(index, 9)["loss"].step.tolist() == [1, 2]
    assert index.unreadable == 1


def calls_of(function, *arguments) -> int:
    """Return how many functions a call calls, of Python's own and of those in C."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def mixed(steps: int) -> list[dict[str, object]]:
    events = [start_event(steps)]
    for number in range(1, steps + 1):
        events.append(step_event(number, times={"forward": 0.1, "backward": 0.2}))
        if number % 10 == 0:
            events.append({"event": "logged", "at": 1.0, "step": number, "lr": 0.1})
    return events


@pytest.mark.parametrize(
    "read", [summary.read_details, lambda folder: EventIndex(folder / "events.jsonl").read_on(99.0)]
)
def test_events_take_no_more_work_each_in_a_large_file(read, tmp_path):
    work = {}
    for steps in (100, 1000, 2000):
        folder = make_run(tmp_path, f"r{steps}")
        write_events(folder / "events.jsonl", mixed(steps))
        read(folder)  # what is imported at first
        work[steps] = calls_of(read, folder)
    per_step = (work[2000] - work[1000]) / 1000
    assert per_step <= 1.1 * (work[1000] - work[100]) / 900
    assert per_step < 60, "a step is read in C: it takes few calls"


def test_kinds_of_events_without_end_are_kept_as_one(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, [{"event": f"kind{number}", "at": 1.0} for number in range(1000)])
    index = EventIndex(path)
    index.read_on(9.0)
    assert len(index.kinds) == 255
    assert index.count(None) == 1000


def test_long_fields_are_cut_in_the_list_of_events(tmp_path):
    damage(tmp_path, *[json.dumps({"event": "text", "step": 1, "at": 5.0, "text": "a" * 100_000})] * 100)
    text = ask(Dashboard(tmp_path), "events")
    assert len(text) < 400_000
    assert "more characters" in text
