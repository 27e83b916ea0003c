"""Scripts with Lightning's Trainer whose ranks Lightning or torchrun starts: several fits, and where ranks listen."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.documented_commands import ROOT

pytest.importorskip("lightning")

SCRIPT = ROOT / "tests" / "support" / "lightning_twice.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def start(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=200)
    return done, sorted(re.findall(r"seen: (\S+) (\d)/2 2 (.*)", done.stdout))


@pytest.mark.slow
def test_lightning_starts_ranks_for_two_fits_on_loopback(tmp_path):
    done, seen = start(tmp_path, SCRIPT, "replicate=2", "shard=2")
    assert done.returncode == 0, done.stderr
    assert [line[:2] for line in seen] == [
        ("replicate=2", "0"),
        ("replicate=2", "1"),
        ("shard=2", "0"),
        ("shard=2", "1"),
    ]
    assert {line[2] for line in seen} == {"['127.0.0.1']"}


@pytest.mark.slow
def test_a_second_fit_on_fewer_ranks_is_refused(tmp_path):
    done, seen = start(tmp_path, SCRIPT, "replicate=2", "replicate=1")
    assert done.returncode != 0
    assert len(seen) == 2
    assert "the plan has 1, and it has joined 2" in done.stderr
    assert "fix: give all Strategies of a file plans of as many ranks" in done.stderr


@pytest.mark.slow
def test_torchrun_starts_ranks_for_two_fits(tmp_path):
    done, seen = start(tmp_path, *TORCHRUN, SCRIPT, "replicate=2", "shard=2")
    assert done.returncode == 0, done.stderr
    assert [line[:2] for line in seen] == [
        ("replicate=2", "0"),
        ("replicate=2", "1"),
        ("shard=2", "0"),
        ("shard=2", "1"),
    ]
