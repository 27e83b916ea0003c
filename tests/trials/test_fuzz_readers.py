"""The trial of all readers, in small; and that it would see a reader that is wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.nouns.errors import UsageError

TRIALS = Path(__file__).parents[2] / "benchmarks" / "trials"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_readers", TRIALS / "fuzz_readers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_readers"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_no_reader_is_wrong(tmp_path):
    command = [sys.executable, str(TRIALS / "fuzz_readers.py"), "--count", "600", "--json", str(tmp_path / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "600 inputs to" in done.stdout
    assert (tmp_path / "a.json").exists()


def spin(content, folder):
    while True:
        pass


def swallow(content, folder):
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def raise_key_error(content, folder):
    raise KeyError("step")


def recurse(content, folder):
    return recurse(content, folder)


class LongError(UsageError):
    def __str__(self):
        return "x" * 10_000


def say_too_much(content, folder):
    raise LongError("a plan", "it is long", "write less")


@pytest.mark.parametrize("read", [spin, swallow, raise_key_error, recurse, say_too_much])
def test_a_wrong_reader_is_seen(fuzz, read, tmp_path):
    target = fuzz.Target("wrong", "disk", [b"x"], read)
    assert fuzz.try_input(target, b"x", tmp_path / "input", 0.3)[0] == "wrong"


def test_what_its_caller_handles_is_no_fault(fuzz, tmp_path):
    target = fuzz.Target("right", "disk", [b"x"], raise_key_error, (KeyError,))
    assert fuzz.try_input(target, b"x", tmp_path / "input")[0] == "refused"


def test_the_same_number_gives_the_same_input(fuzz):
    target = fuzz.Target("any", "disk", [b'{"a": [1, 2], "b": "x"}', b"a=1,b=2"], raise_key_error)
    inputs = [fuzz.input_of(target, 0, number) for number in range(300)]
    assert inputs == [fuzz.input_of(target, 0, number) for number in range(300)]
    assert len(set(inputs)) > 200
    assert max(map(len, inputs)) > 5000
