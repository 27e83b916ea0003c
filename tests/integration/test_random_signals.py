"""The trial of random signals: a few of them, and that it would find what is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trials" / "random_signals.py"


@pytest.fixture(scope="module")
def trials():
    spec = importlib.util.spec_from_file_location("random_signals", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["random_signals"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_dir(tmp_path):
    """Of a job that failed at step 12, with one checkpoint."""
    folder = tmp_path / "runs" / "a"
    (folder / "checkpoints" / "step-00000012").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000012" / "manifest.json").write_text("{}")
    (folder / "events.jsonl").write_text("")
    write_result(folder)
    return folder


def write_result(folder, **changes):
    plain = {"exit_code": 1, "status": "failed", "stop_sent_to": None, "checkpoint": None, "failure": {"rank": 1}}
    (folder / "result.json").write_text(json.dumps({**plain, **changes}))


def trial_of(trials, target="rank 1"):
    return trials.Trial(0, "KILL", "rank", 1.0, target)


TRUE = "paceline run: rank 1's process was ended by SIGKILL\n  Last checkpoint: runs/a/checkpoints/step-00000012; go on"


def test_true_words_are_not_objected_to(trials, run_dir):
    assert trials.judged(TRUE, 1, run_dir, trial_of(trials)) == []


@pytest.mark.parametrize(
    ("output", "code", "target"),
    [
        (TRUE + "\nTraceback (most recent call last):\n", 1, "rank 1"),
        (TRUE.replace("00012", "00015"), 1, "rank 1"),
        (TRUE.replace("SIGKILL", "SIGTERM"), 1, "rank 1"),
        (TRUE, 1, "supervisor"),
        (TRUE, 0, "rank 1"),
        ("paceline run: done; runs/a", 1, "rank 1"),
        ("paceline run: stopped; nothing was saved; --resume --job a starts it again", 1, "rank 1"),
    ],
)
def test_untrue_words_are_found(trials, run_dir, output, code, target):
    assert trials.judged(output, code, run_dir, trial_of(trials, target))


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (0, {"exit_code": 0, "status": "done"}),  # the last step is not saved
        (1, {"status": "done"}),
        (0, {"exit_code": 0}),
        (1, {"checkpoint": "/nowhere"}),
        (1, {"failure": None}),
    ],
)
def test_an_untrue_result_is_found(trials, run_dir, code, changes):
    write_result(run_dir, **changes)
    assert trials.judged("", code, run_dir, trial_of(trials))


def test_a_missing_result_is_found(trials, run_dir):
    (run_dir / "result.json").unlink()
    assert trials.judged("", 1, run_dir, trial_of(trials))
    assert not trials.judged("", -9, run_dir, trial_of(trials, "supervisor"))


@pytest.mark.integration
def test_a_few_random_signals_find_nothing(tmp_path):
    made = []
    for seed in (3, 4, 5):  # where a machine's load changes, signals may come after the ends of both jobs
        words = [sys.executable, str(SCRIPT), "--count", "2", "--seed", str(seed), "--json", str(tmp_path / "a.json")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        made += json.loads((tmp_path / "a.json").read_text())
        if any(trial["resumes"] for trial in made):
            break
    assert any(trial["resumes"] for trial in made), "no job was disturbed: the test is void"
    assert len(made) % 2 == 0
    assert not any(trial["problems"] for trial in made)
