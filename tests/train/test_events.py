"""What is written down while a job runs, when it can't be, and when it can't be read."""

from __future__ import annotations

import json
import resource
import signal
import sys

import pytest

from paceline.nouns.errors import UsageError
from paceline.run.directory import find_run
from paceline.run.failures import first_cause, format_failure, read_failures, silent_death
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervised_job import result_of
from paceline.run.supervise.supervisor import Ending
from paceline.train.event_log import Events


@pytest.fixture
def limit(monkeypatch):
    """Sets how large files of this process may become: a disk that is full, as far as `write` can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def numbers(path):
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["number"])
        except ValueError:
            continue
    return found


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path, limit, capsys):
    events = Events(tmp_path)
    events.write({"event": "x", "number": 0})
    limit((tmp_path / "events.jsonl").stat().st_size + 20)
    for number in (1, 2, 3):
        events.write({"event": "x", "number": number})
    limit(10**6)
    events.write({"event": "x", "number": 4})
    events.close()
    assert numbers(tmp_path / "events.jsonl") == [0, 4]
    told = capsys.readouterr().err
    assert told.count("events.jsonl") == 1
    assert "training goes on" in told


def test_a_failure_that_cant_be_written_down_is_shown(tmp_path, monkeypatch, capsys):
    from paceline.run.rank.worker import run_rank

    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path / "no-such-folder"))
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "train.py").write_text("raise KeyError('the cause')\n")
    assert run_rank(str(tmp_path / "train.py"), []) == 1
    assert "KeyError: 'the cause'" in capsys.readouterr().err


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "x", "num')
    events = Events(tmp_path)
    events.write({"event": "x", "number": 1})
    events.close()
    assert numbers(tmp_path / "events.jsonl") == [1]


def test_progress_passes_over_what_is_no_event(tmp_path):
    progress = Progress(tmp_path)
    saved = tmp_path / "step-00000001"
    whole = ['{"event": "stopped", "step": 1}', json.dumps({"event": "checkpoint", "path": str(saved)})]
    lines = ['{"event": "che', "", "7", "{}", *whole]
    (tmp_path / "events.jsonl").write_bytes("\n".join([*lines, ""]).encode() + b"\xff\n")
    assert progress.read()
    assert progress.has_stopped
    assert progress.checkpoint is None, "it is not there"
    saved.mkdir()
    assert progress.checkpoint == str(saved)


STEP = {"event": "step", "step": 1, "position": 8, "loss": 0.5, "samples": 8, "at": 2.0, "memory_bytes": 1}
NO_EVENTS = [
    {"event": "start"},
    {"event": "start", "total_steps": None},
    {"event": "own_batches"},
    {"event": "start", "total_steps": "9"},
    {"event": "checkpoint"},
    {"event": "checkpoint", "path": None},
    {"event": "evaluation"},
    {"event": "resumed", "step": "4", "position": 1},
    {"event": ["step"]},
    *[{key: value for key, value in STEP.items() if key != left} for left in STEP if left != "event"],
    {**STEP, "loss": "x"},
    {**STEP, "loss": 10**400},
    {**STEP, "samples": -1},
    {**STEP, "at": None},
    {**STEP, "step": 10**30},
]


@pytest.mark.parametrize(
    ("there", "loaded", "steps"),
    [
        ([4, 2], [4], 4),
        ([4, 2], [4, 2], 4),  # it went on from its newest, and then loaded its best
        ([4, 2], [2], 2),  # its newest is damaged
        ([4, 2], [], 4),  # it failed before it could load one
        ([4], [4, 9], 4),  # another run's
        ([], [], 0),
    ],
)
def test_a_job_that_took_no_step_is_where_it_was(tmp_path, there, loaded, steps):
    progress = Progress(tmp_path)
    for step in there:
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    lines = [json.dumps({"event": "resumed", "step": step, "position": 8 * step}) + "\n" for step in loaded]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    progress.read()
    result = result_of(tmp_path, Ending("done", 0), progress)
    assert (result["steps"], result["position"]) == (steps, 8 * steps if loaded else 0)
    assert result["checkpoint"] == (str(tmp_path / "checkpoints" / f"step-{steps:08d}") if there else None)


def test_progress_passes_over_events_without_their_keys(tmp_path):
    progress = Progress(tmp_path)
    lines = [json.dumps(event) for event in NO_EVENTS] + ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
    last = {**STEP, "step": 2, "at": 3.0, "loss": float("nan")}
    lines += [json.dumps(STEP), json.dumps(last)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert progress.read()
    assert [record["step"] for record in progress.records] == [1, 2]
    assert "loss nan  8.0 samples/s" in progress.line()
    assert progress.checkpoint is None
    assert progress.evaluation is None


@pytest.mark.parametrize(
    ("total", "loaded", "line"),
    [
        (6, [], "first step"),
        (6, [4], "first step"),
        (6, [6], "step 6/6  all were taken before"),
        (0, [6], "first step"),  # a loop that does not say how many it takes
    ],
)
def test_a_resumed_job_that_was_done_announces_no_step(tmp_path, total, loaded, line):
    progress = Progress(tmp_path)
    assert progress.line() == "starting"
    lines = [{"event": "start", "total_steps": total}]
    lines += [{"event": "resumed", "step": step, "position": 8 * step} for step in loaded]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    progress.read()
    assert progress.line() == line


def test_a_time_that_is_none_is_shown_as_one_that_is_not_known(tmp_path):
    progress = Progress(tmp_path)
    steps = [{"event": "start", "total_steps": 2**62}, {**STEP, "at": 0.0}, {**STEP, "at": 1e300}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    assert progress.read()
    assert "? left" in progress.line()


FAILURE = {
    "rank": 1,
    "step": 3,
    "at": 5.0,
    "type": "KeyError",
    "message": "'x'",
    "is_peer_loss": False,
    "is_paceline": False,
    "where": None,
    "traceback": "Traceback ...\nKeyError: 'x'\n",
    "exit_code": 1,
    "parts": None,
}
TORN = [
    "",
    json.dumps(FAILURE)[:50],
    "[" * 100_000,
    "[]",
    json.dumps({**FAILURE, "at": "x"}),
    json.dumps({**FAILURE, "exit_code": 10**30}),
    json.dumps({key: value for key, value in FAILURE.items() if key != "traceback"}),
]


@pytest.mark.parametrize("content", TORN, ids=range(len(TORN)))
def test_a_failure_that_is_torn_is_still_a_failure(content, tmp_path):
    folder = tmp_path / "failures"
    folder.mkdir()
    (folder / "1.json").write_text(content)
    for name in ("x", "\u0661", "-1", "9" * 200):  # no rank's
        (folder / f"{name}.json").write_text(content)
    failures = read_failures(tmp_path)
    assert list(failures) == [1]
    said = format_failure(first_cause(failures.values()), 1)
    assert "rank 1 failed" in said
    assert "1.json" in said


def test_a_failure_without_a_message_is_told(tmp_path):
    """As of a bare `assert`."""
    bare = {**FAILURE, "type": "AssertionError", "message": ""}
    assert format_failure(bare, 0).splitlines()[-1] == "rank 1, step 3 failed first: AssertionError"


def test_a_signal_without_a_name_has_a_number():
    assert "signal 40" in silent_death(0, -40, 0.0)["message"]
    assert "SIGKILL" in silent_death(0, -9, 0.0)["message"]


@pytest.mark.parametrize("damaged", ["", "{", "[]", b"\xff", "[" * 100_000])
def test_a_run_that_cant_be_read_is_not_the_one_to_resume(tmp_path, damaged):
    script = tmp_path / "train.py"
    for name, content in (("a", json.dumps({"script": str(script)})), ("b", damaged)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert find_run(tmp_path, None, script) == tmp_path / "a"
    with pytest.raises(UsageError, match="has none"):
        find_run(tmp_path, None, tmp_path / "other.py")


TAKEN = {"event": "step", "position": 8, "samples": 8, "loss": 1.0, "memory_bytes": 1, "at": 1.0}
START = {"event": "start", "total_steps": 20}
RESUMED = {"event": "resumed", "position": 8}


@pytest.mark.parametrize(
    ("written", "last"),
    [
        ([], 0),
        ([START], 0),
        ([START, {**TAKEN, "step": 1}, {**TAKEN, "step": 2}, {"event": "checkpoint", "step": 2}], 2),
        ([START, {**TAKEN, "step": 15}, START], 0),
        ([{**TAKEN, "step": 15}, START, {**RESUMED, "step": 10}], 10),
        ([{**RESUMED, "step": 10}, {**TAKEN, "step": 12}, {**RESUMED, "step": 10, "takes_over": True}], 12),
    ],
)
def test_which_step_is_the_last_that_is_written_down(tmp_path, monkeypatch, written, last):
    """Also where a block of the file ends within a line, and after a line that a kill cut off."""
    monkeypatch.setattr("paceline.nouns.reading._BLOCK", 50)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in written) + '{"event": "st')
    events = Events(tmp_path, takes_over=True)
    assert events.last_step() == last
    events.write(START)
    assert events.last_step() == last
    events.write({**TAKEN, "step": last + 1})
    assert events.last_step() == last + 1
    events.close()
    assert Events(None).last_step() == 0
