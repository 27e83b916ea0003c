"""docs/lightning.md: its example runs as the page says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.documented_commands import ROOT
from support.jobs import paceline

EXAMPLE = ROOT / "examples" / "lightning" / "lightning_module.py"


def accuracy(text):
    return max(float(found) for found in re.findall(r"accuracy ([\d.]+)", text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["-n", "2"], pytest.param(["--plan", "shard=2"], marks=pytest.mark.complete)], ids=" ".join
)
def test_the_example_trains(tmp_path, words):
    done = paceline(tmp_path, "run", *words, "--job", "a", EXAMPLE)
    assert done.code == 0, done.err
    assert accuracy(done.out) > 0.6


@pytest.mark.slow
@pytest.mark.complete  # a module ends as under DDP: test_lightning.py
def test_the_script_of_the_migration_page_ends_as_the_one_by_ddp(tmp_path):
    done = paceline(tmp_path, "run", "-n", "2", ROOT / "docs" / "migrate" / "lightning_trainer.py")
    assert done.code == 0, done.err
    # RESULT of tests/examples/test_migrate.py, where the script by DDP ends.
    assert float(re.search(r"result ([\d.]+)", done.out).group(1)) == pytest.approx(24.172092311368083, rel=1e-12)


@pytest.mark.slow
def test_lightning_starts_the_ranks_of_the_plan(tmp_path):
    text = EXAMPLE.read_text().replace("Strategy()", 'Strategy(plan="shard=2")')
    text = text.replace('print(f"accuracy', 'print(trainer.world_size, f"ranks; accuracy')
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 ranks;" in done.stdout
    assert accuracy(done.stdout) > 0.6
