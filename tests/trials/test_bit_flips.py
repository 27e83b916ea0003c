"""The trial of flipped bits, in small; and that it would see wrong weights and a checkpoint used without a word."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

TRIALS = Path(__file__).parents[2] / "benchmarks" / "trials"


@pytest.fixture(scope="module")
def trial():
    spec = importlib.util.spec_from_file_location("bit_flips", TRIALS / "bit_flips.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bit_flips"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_no_flip_is_without_a_word(tmp_path):
    command = [sys.executable, str(TRIALS / "bit_flips.py"), "--count", "2", "--ranks", "1"]
    done = subprocess.run([*command, "--json", str(tmp_path / "a.json")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    flips = json.loads((tmp_path / "a.json").read_text())["flips"]
    assert len(flips) == 2


REFUSED = (
    "paceline export: error: the checkpoint x should be whole\n  found: a file was altered\n  fix: use an earlier one"
)
FLIPPED = "checkpoints/step-00000012/manifest.json"
PASSED_OVER = "paceline: step-00000012 is passed over: it was altered"
RESUMES = {
    "a refusal": (2, REFUSED, "end", FLIPPED, "refused"),
    "a refusal without a fix": (1, "it broke", "end", FLIPPED, "wrong"),
    "a traceback": (1, f"Traceback (most recent call last):\n{REFUSED}", "end", FLIPPED, "wrong"),
    "an earlier checkpoint": (0, PASSED_OVER, "end", FLIPPED, "noticed"),
    "other weights": (0, PASSED_OVER, "other", FLIPPED, "wrong"),
    "nothing said of the newest": (0, "done", "end", FLIPPED, "wrong"),
    "nothing said of an older one": (0, "done", "end", "checkpoints/step-00000004/manifest.json", "same"),
}


@pytest.mark.parametrize("case", RESUMES)
def test_how_a_resume_is_judged(trial, case, tmp_path, monkeypatch):
    code, text, weights, file, word = RESUMES[case]
    of = {"end": {"w": np.ones(3)}, "other": {"w": np.ones(3) + 1e-16 * np.arange(3) + 1e-12}}
    good = trial.Undisturbed(tmp_path, 1, {4: {}, 8: {}, 12: {}}, of["end"])
    monkeypatch.setattr(trial, "paceline", lambda *words: subprocess.CompletedProcess(words, code, text))
    monkeypatch.setattr(trial, "exported", lambda folder, run: of[weights])
    assert trial.judge_resume(tmp_path, tmp_path, file, good, [])[0] == word


EXPORTS = {
    "a refusal": (2, REFUSED, 12, 12, "refused"),
    "the flipped one": (0, "", 12, 12, "wrong"),
    "the one before": (0, "", 8, 8, "noticed"),
    "another's weights": (0, "", 8, 4, "wrong"),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_how_an_export_is_judged(trial, case, tmp_path, monkeypatch):
    code, text, said, written, word = EXPORTS[case]
    by_step = {step: {"w": np.full(3, float(step))} for step in (4, 8, 12)}
    good = trial.Undisturbed(tmp_path, 1, by_step, by_step[12])
    (tmp_path / "out").mkdir()
    safetensors.numpy.save_file(by_step[written], tmp_path / "out" / "model.safetensors")
    text = text or json.dumps({"step": said})
    monkeypatch.setattr(trial, "paceline", lambda *words: subprocess.CompletedProcess(words, code, text))
    assert trial.judge_export(tmp_path, tmp_path, FLIPPED, good)[0] == word


def test_a_flip_is_one_bit(trial, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    bit = trial.flip(path, random.Random(0))
    assert int.from_bytes(path.read_bytes(), "little") == 1 << bit
