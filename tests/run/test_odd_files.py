"""A FIFO, a socket or a device in the place of any file: whoever reads it goes on at once, or says what it is."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.checkpoint.manifest import MANIFEST, file_name, read_manifest
from paceline.checkpoint.tensor_file import TensorFile
from paceline.cli.main import main
from paceline.launch.hosts import read_hostfile
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import read_json, regular
from paceline.run.cluster_file import read_cluster_file
from paceline.run.directory import RunChoice, choose_run
from paceline.run.ends import Ends
from paceline.run.failures import read_failures
from paceline.run.job_facts import collect
from paceline.run.plain_values import read_value
from paceline.run.prediction import read_predictions
from paceline.run.rank_output import OutputLog, last_lines, read_lines
from paceline.run.read import times
from paceline.run.read.runs import read_details, read_run
from paceline.run.read.standing import ask, read_reports
from paceline.run.supervise.elastic import last_generation
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervise_servers import ServerNews
from paceline.run.timeline import make_trace
from paceline.server.coordinator.decision_log import Log
from paceline.train.event_log import Events
from paceline.train.memory_file import read_memory

from support.dashboards import dashboard, make_run

LONGEST_S = 20  # a reader that waits for the other end of a FIFO waits for ever


@contextmanager
def without_waiting():
    def stop(*_):
        raise AssertionError("it waits for a FIFO's other end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_socket(path: Path) -> None:
    there = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(there)


KINDS = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}
FILES = (
    *("job.json", "plan.json", "result.json", "events.jsonl", "output.log", "servers.jsonl", "generation"),
    *("times/0.jsonl", "times/1.jsonl", "failures/0.json", "stalls/0.json", "memory/0.json", "predicted/0.json"),
    *("profiles/0.json.gz", "ended/1", f"checkpoints/step-00000001/{MANIFEST}"),
    f"checkpoints/step-00000001/{file_name(0)}",
)


def replaced(runs: Path, name: str, make=os.mkfifo) -> Path:
    """Return a run directory in which all files of these names are something else."""
    folder = make_run(runs, name, status=None)
    for file in FILES:
        path = folder / file
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    return folder


READERS = {
    "a run": read_run,
    "its events": read_details,
    "its times": lambda folder: times.recent_splits(folder, 2),
    "a process": lambda folder: times.newest_process(folder / "times/0.jsonl"),
    "output": lambda folder: list(read_lines(folder / "output.log")),
    "the end of its output": lambda folder: last_lines(folder / "output.log", 9),
    "a timeline": make_trace,
    "why": collect,
    "failures": read_failures,
    "stalls": lambda folder: read_reports(folder / "stalls"),
    "memory": lambda folder: read_memory(folder, 2),
    "predictions": lambda folder: read_predictions(folder, "replicate=2"),
    "a generation": last_generation,
    "how ranks ended": lambda folder: Ends(folder, 2).read([0, 1]),
    "silent ranks": lambda folder: Ends(folder, 2).silent([]),
    "the start of a rank": lambda folder: Ends(folder, 2).begin(1),
    "progress": lambda folder: Progress(folder).read(),
    "the servers' news": lambda folder: ServerNews(folder, print, print).read(),
    "new output": lambda folder: OutputLog(folder).add(0, "a line"),
    "answers": lambda folder: ask(folder, 0, 0.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_passed_over(reader, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 0.0)
    monkeypatch.setattr("paceline.run.read.standing._POLL_S", 0.0)
    folder = replaced(tmp_path, "a", KINDS[kind])
    with without_waiting():
        READERS[reader](folder)


REFUSED = {
    "JSON": read_json,
    "a plan": Plan.read,
    "a cluster file": read_cluster_file,
    "a hostfile": read_hostfile,
    "a workload file": lambda path: read_workload_file(str(path), 1),
    "tensors": TensorFile.open,
    "what a function returned": read_value,
    "a coordinator's log": Log.open,
    "a checkpoint": lambda path: read_manifest(path.parent),
    "events to go on with": lambda path: Events(path.parent),
}
NAMES = {
    "a workload file": "train.py",
    "a checkpoint": f"step-00000001/{MANIFEST}",
    "events to go on with": "events.jsonl",
    "a plan": "plan.json",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", REFUSED)
def test_what_is_no_file_is_refused_by_name(reader, kind, tmp_path):
    path = tmp_path / NAMES.get(reader, "file")
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    with without_waiting(), pytest.raises(PacelineError) as error:
        REFUSED[reader](path)
    if kind != "a folder":
        assert "not a regular file" in str(error.value)


@pytest.mark.parametrize(
    "words", [["runs"], ["runs", "show", "a"], ["logs", "a"], ["top", "a", "--once"], ["why", "a"]]
)
def test_commands_show_the_other_runs(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.run.job_facts.ANSWER_S", 0.0)
    folder = make_run(tmp_path / "runs", "a")
    (folder / "output.log").write_text("1.0 0\tsaid\n")
    replaced(tmp_path / "runs", "odd")
    with without_waiting():
        assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("file", ["events.jsonl", "plan.json", "job.json", "result.json"])
def test_a_run_goes_on_past_what_is_no_file(file, tmp_path):
    folder = make_run(tmp_path, "a")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with without_waiting():
        choice = RunChoice(runs=tmp_path, job="a", resume=True)
        owned, resume = choose_run(choice, Path("/home/ada/train.py"), print)
    assert (owned.folder, resume) == (folder, None)
    owned.release()


def test_a_run_does_not_go_on_from_what_is_no_manifest(tmp_path):
    folder = replaced(tmp_path, "a")
    for file in ("plan.json", "job.json"):
        (folder / file).unlink()
        (folder / file).write_text("{}")
    with without_waiting(), pytest.raises(PacelineError, match="whole"):
        choose_run(RunChoice(runs=tmp_path, job="a", resume=True), Path("/home/ada/train.py"), print)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "there").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert read_json(tmp_path / "link") == {}


def test_a_file_that_is_made_has_the_usual_rights(tmp_path):
    before = os.umask(0o022)
    try:
        with open(tmp_path / "new", "ab", opener=regular):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644


def test_a_fifo_whose_other_end_is_open_is_refused_too(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    other = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises(OSError, match="not a regular file"):
                os.close(regular(str(tmp_path / "fifo"), mode))
    finally:
        os.close(other)


def test_the_dashboard_answers_and_ends(tmp_path):
    make_run(tmp_path / "runs", "good")
    folder = replaced(tmp_path / "runs", "odd")
    (folder / "job.json").unlink()
    (folder / "job.json").write_text(json.dumps({"ranks": 2}))
    pages = ("", "/time", "/timeline", "/plan", "/memory", "/events", "/output", "/data/curves", "/trace.json")
    with dashboard(tmp_path / "runs") as served:  # it must end at Ctrl-C
        for path in ("/", "/compare?run=odd&run=good", *(f"/run/odd{page}" for page in pages), "/run/good"):
            assert served.ask(path).status == 200, path


def test_odd_file_for_events_ends_the_job_before_its_first_step(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with without_waiting(), pytest.raises(UsageError, match=r"write its events to .*\n  found: .*\n  fix: move away"):
        Events(tmp_path)
