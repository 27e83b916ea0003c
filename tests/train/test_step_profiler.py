"""`--profile`: which steps torch's profiler records, where they are in the timeline, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from paceline.cli.main import main
from paceline.nouns.errors import UsageError
from paceline.run.timeline import make_trace
from paceline.train.profile_files import path_of, read_profile, wanted_steps
from paceline.train.step_profiler import StepProfiler

from support.jobs import paceline, write_workload


@pytest.mark.parametrize(("text", "steps"), [("20:25", (20, 25)), ("7", (7, 7)), ("1:100", (1, 100))])
def test_steps_are_read(text, steps):
    assert wanted_steps(text, "--profile") == steps


@pytest.mark.parametrize("text", ["", "0", "0:3", "3:1", "a", "1:2:3", "1-2", "-1", "1.5", "1:101", ":", "1:"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(UsageError, match="--profile"):
        wanted_steps(text, "--profile")


def profiler(folder, text, said):
    return StepProfiler(folder, 0, {"PACELINE_PROFILE": text}, said.append)


def steps(profiler, first, last):
    for number in range(first, last + 1):
        profiler.step_ended(number)
        torch.ones(2 + number) + 1
    profiler.close(last)


def sizes(folder):
    """The steps whose operation was recorded."""
    content = json.loads(gzip.decompress(path_of(folder, 0).read_bytes()))
    return sum(event.get("name") == "aten::add" for event in content["traceEvents"])


@pytest.mark.parametrize(
    ("text", "first", "last", "recorded"),
    [("3:4", 0, 9, 2), ("1", 0, 9, 1), ("1:3", 0, 9, 3), ("5:90", 0, 9, 6), ("3:8", 5, 9, 3), ("6:6", 5, 9, 1)],
)
def test_the_steps_that_are_wanted_are_recorded(tmp_path, text, first, last, recorded):
    said = []
    steps(profiler(tmp_path, text, said), first, last)
    assert sizes(tmp_path) == recorded
    assert said == []


def test_a_job_that_ends_before_says_so(tmp_path):
    said = []
    steps(profiler(tmp_path, "20:25", said), 0, 5)
    assert said == ["nothing was profiled: steps 20 to 25 were asked for, and this process ended with 5"]
    assert not (tmp_path / "profiles").exists()


def test_a_job_that_goes_on_after_them_says_so(tmp_path):
    said = []
    steps(profiler(tmp_path, "2:3", said), 7, 9)
    assert said == ["nothing was profiled: steps 2 to 3 were asked for, and this process ended with 9"]


def test_a_job_without_a_run_directory_says_that_it_keeps_none():
    said = []
    steps(profiler(None, "2:3", said), 0, 5)
    assert said == ["PACELINE_PROFILE has no effect: a job without a run directory keeps no profile"]


def test_a_profiler_of_the_file_itself_is_left_alone(tmp_path):
    said = []
    with torch.profiler.profile() as own:
        steps(profiler(tmp_path, "2:3", said), 0, 5)
        torch.ones(3) * 2
    assert said
    assert "keeps no profile" in said[0]
    assert any(event.key == "aten::mul" for event in own.key_averages())


def test_a_folder_that_cant_be_written_ends_no_job(tmp_path):
    said = []
    (tmp_path / "profiles").write_text("")
    steps(profiler(tmp_path, "2:3", said), 0, 5)
    assert "keeps no profile" in said[0]


# Compressed in the test: gzip writes the time, and test processes must have the same names.
DAMAGED = {"empty": b"", "no gzip": b"no gzip", "torn": b"{", "a number": b'{"traceEvents": 3}'}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_passed_over(tmp_path, name):
    content = gzip.compress(DAMAGED[name]) if name in ("torn", "a number") else DAMAGED[name]
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_bytes(content)
    assert list(read_profile(tmp_path, 0)) == []


@pytest.mark.slow
def test_operations_are_within_the_passes_that_ran_them(tmp_path):
    done = paceline(tmp_path, "run", "-n", "2", "--job", "a", "--profile", "5:6", write_workload(tmp_path))
    assert done.code == 0
    assert "USDT" not in done.out
    events = make_trace(tmp_path / "runs/a", 5, 6).events
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        forward = [event for event in mine if event["cat"] == "forward"]
        products = [event for event in mine if event["name"] == "aten::addmm"]
        assert len(products) == 4, "two layers in each of two steps"
        for product in products:
            # The profiler's clock is the wall clock: it may be off by some microseconds.
            assert any(each["ts"] - 200 <= product["ts"] <= each["ts"] + each["dur"] + 200 for each in forward), product
    assert not [event for event in make_trace(tmp_path / "runs/a", 8, 9).events if event.get("cat") == "cpu_op"]


def test_the_command_refuses_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--profile", "9:3", str(write_workload(tmp_path))]) == 2
    assert "--profile 9:3" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
