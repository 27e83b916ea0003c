"""The trial of architectures, in small; and that it would see a wrong one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TRIALS = Path(__file__).parents[2] / "benchmarks" / "trials"


@pytest.fixture(scope="module")
def trial():
    spec = importlib.util.spec_from_file_location("architectures", TRIALS / "architectures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["architectures"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.complete  # such models are verified by tests/verify/test_unusual.py
def test_a_model_that_is_split_and_one_that_is_refused(trial, tmp_path, capsys):
    words = ["--names", "weight-norm", "physics", "nosuch", "--plans", "tensor=2", "--json", str(tmp_path / "a.json")]
    assert trial.main(words) == 0
    said = capsys.readouterr().out
    assert "tensor=2      2         1        1      0    50%" in said
    assert "physics under tensor=2: refused: " in said
    assert "1 left out" in said
    cells = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert [(cell["name"], cell["outcome"]) for cell in cells] == [("weight-norm", "verified"), ("physics", "refused")]


WRONG = {
    "a bug": ('{"verdict": "bug", "seconds": 1.0}', 1),
    "a traceback": ("Traceback (most recent call last):", 1),
    "an answer without a verdict": ("{}", 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(trial, monkeypatch, capsys, name):
    printed, code = WRONG[name]
    done = trial.subprocess.CompletedProcess([], code, stdout=printed, stderr="")
    monkeypatch.setattr(trial.subprocess, "run", lambda *arguments, **named: done)
    assert trial.main(["--names", "lstm", "--plans", "tensor=2"]) == 1
    assert "lstm under tensor=2: wrong" in capsys.readouterr().out


def test_a_second_run_goes_on_where_the_first_was(trial, monkeypatch, tmp_path):
    asked = []

    def verified(name, model, plan):
        asked.append((name, plan))
        return trial.Cell(name, model, plan, trial.VERIFIED, "equal", 1.0)

    monkeypatch.setattr(trial, "_verify", verified)
    kept = ["--json", str(tmp_path / "a.json"), "--names", "lstm", "flow", "--plans"]
    assert trial.main([*kept, "tensor=2"]) == 0
    assert trial.main([*kept, "tensor=2", "pipeline=2"]) == 0
    assert asked == [("lstm", "tensor=2"), ("flow", "tensor=2"), ("lstm", "pipeline=2"), ("flow", "pipeline=2")]
