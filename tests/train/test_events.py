"""What is written down while a job runs, when it can't be, and when it can't be read."""

from __future__ import annotations

import json
import resource
import signal
import sys

import pytest

from paceline.nouns.errors import UsageError
from paceline.run.directory import find_run
from paceline.run.progress import Progress
from paceline.train.events import Events


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
    from paceline.run.worker import run_rank

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


@pytest.mark.parametrize("damaged", ["", "{", "[]", b"\xff"])
def test_a_run_that_cant_be_read_is_not_the_one_to_resume(tmp_path, damaged):
    script = tmp_path / "train.py"
    for name, content in (("a", json.dumps({"script": str(script)})), ("b", damaged)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert find_run(tmp_path, None, script) == tmp_path / "a"
    with pytest.raises(UsageError, match="has none"):
        find_run(tmp_path, None, tmp_path / "other.py")
