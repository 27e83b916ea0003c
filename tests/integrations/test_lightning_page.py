"""docs/lightning.md: its example runs as the page says, and its tables have every argument and refused hook."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys

import pytest

from paceline.integrations.lightning_arguments import ARGUMENTS, REFUSED, WITHOUT_EFFECT
from paceline.integrations.lightning_hooks import REFUSED as REFUSED_HOOKS

from support.jobs import events, paceline
from support.shown import ROOT

PAGE = (ROOT / "docs" / "lightning.md").read_text()
EXAMPLE = ROOT / "examples" / "lightning" / "lightning_module.py"
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
STOPPED = """
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 11 and "--stop" in __import__("sys").argv:
            raise SystemExit(7)
"""


def names(cell):
    return re.findall(r"`(\w+)`", cell)


def test_the_table_of_arguments_says_what_is_done_with_each():
    said = {name: text for cell, text in ROWS for name in names(cell) if name in ARGUMENTS}
    assert said.keys() == ARGUMENTS.keys()
    for name, argument in ARGUMENTS.items():
        assert (argument.way == REFUSED) == said[name].startswith("refused"), name
        assert (argument.way == WITHOUT_EFFECT) == said[name].startswith("without effect"), name


def test_the_table_of_hooks_has_those_that_are_refused():
    assert {name for cell, _ in ROWS for name in names(cell) if name not in ARGUMENTS} == set(REFUSED_HOOKS)


def changed_lines(before, after):
    found = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in found)


def as_of_lightning(text):
    """The example as it is written for Lightning."""
    return re.sub(r"^from paceline.*# (.*)$", r"\1", text, flags=re.MULTILINE)


def test_one_line_of_the_example_differs_from_lightnings(tmp_path):
    before = as_of_lightning(EXAMPLE.read_text())
    assert "paceline" not in before
    assert changed_lines(before, EXAMPLE.read_text()) == 1
    ported = (ROOT / "docs" / "migrate" / "lightning_trainer.py").read_text().split('"""', 2)[2]
    by_ddp = (ROOT / "docs" / "migrate" / "lightning_before.py").read_text().split('"""', 2)[2]
    assert changed_lines(by_ddp, ported) <= 5  # one of them empty; devices and strategy go to the command


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-n", "2"], ["--plan", "shard=2"]], ids=" ".join)
def test_the_example_trains(tmp_path, words):
    done = paceline(tmp_path, "run", *words, "--job", "a", EXAMPLE)
    assert done.code == 0, done.err
    accuracy = float(re.search(r"\[0\] accuracy ([\d.]+)", done.out).group(1))
    assert accuracy > 0.6
    assert len(events(tmp_path / "runs" / "a", "evaluation")) == 4


@pytest.mark.slow
def test_the_script_of_the_migration_page_ends_as_the_one_by_ddp(tmp_path):
    done = paceline(tmp_path, "run", "-n", "2", ROOT / "docs" / "migrate" / "lightning_trainer.py")
    assert done.code == 0, done.err
    # RESULT of tests/examples/test_migrate.py, where the script by DDP ends.
    assert float(re.search(r"result ([\d.]+)", done.out).group(1)) == pytest.approx(24.172092311368083, rel=1e-12)


@pytest.mark.slow
@pytest.mark.complete
def test_the_example_is_the_same_without_the_command(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"accuracy ([\d.]+)", done.stdout).group(1)) > 0.6


@pytest.mark.slow
@pytest.mark.complete
def test_a_killed_example_goes_on(tmp_path):
    text = EXAMPLE.read_text().replace("\n    def configure_optimizers", f"{STOPPED}\n    def configure_optimizers")
    (tmp_path / "train.py").write_text(text)
    whole = paceline(tmp_path, "run", "-n", "2", "--job", "whole", "train.py")
    words = ("run", "-n", "2", "--job", "a", "--checkpoint-every", "5")
    assert paceline(tmp_path, *words, "train.py", "--stop").code != 0
    again = paceline(tmp_path, "run", "-n", "2", "--job", "a", "--resume", "train.py")
    assert again.code == 0, again.err
    found = [event for event in events(tmp_path / "runs" / "a", "logged") if event["epoch"] == 3]
    expected = [event for event in events(tmp_path / "runs" / "whole", "logged") if event["epoch"] == 3]
    assert found[-1]["loss"] == expected[-1]["loss"]
    assert re.findall("accuracy .*", again.out) == re.findall("accuracy .*", whole.out)


@pytest.mark.slow
def test_the_example_is_verified(tmp_path):
    done = paceline(tmp_path, "verify", "-n", "2", EXAMPLE)
    assert done.code == 0, done.out + done.err
    assert "step float64  ok " in done.out
