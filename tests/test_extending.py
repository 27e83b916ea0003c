"""The examples of docs/extending.md work as they stand there."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import STEPS, losses, paceline, write_workload

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"^<!-- test: ([^\n]*) -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
# The command line with one more folder of schedulers, as if the example's file lay among the others.
WITH_SCHEDULERS = """
import sys
from paceline.launch.kubernetes import schedulers
schedulers.__path__.append(sys.argv.pop(1))
from paceline.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
RUN = ["run", "--on", "kubernetes", "--image", "bert:1", "--cpu", "4", "--memory", "8Gi", "-j", "2x1", "-n", "2"]


@pytest.fixture
def with_scheduler(tmp_path):
    """Runs `paceline` with the example's scheduler."""
    (tmp_path / "schedulers").mkdir()
    (tmp_path / "schedulers" / "example.py").write_text(EXAMPLES["schedulers/example.py"])
    write_workload(tmp_path, name="train.py")

    def run(*words):
        line = [sys.executable, "-c", WITH_SCHEDULERS, str(tmp_path / "schedulers"), *words]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_the_scheduler_renders_a_job_that_its_own_check_accepts(with_scheduler, tmp_path):
    done = with_scheduler(*RUN, "--gang", "example", "--queue", "ml", "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "# the queue ml must be open" in done.stdout
    assert "schedulerName: example-scheduler" in done.stdout
    assert "example.org/queue: ml" in done.stdout
    assert "example.org/members: '2'" in done.stdout
    (tmp_path / "job.yaml").write_text(done.stdout)
    assert with_scheduler("run", "--on", "kubernetes", "--check", "job.yaml").returncode == 0
    (tmp_path / "job.yaml").write_text(done.stdout.replace("example.org/members: '2'", "example.org/members: '3'"))
    refused = with_scheduler("run", "--on", "kubernetes", "--check", "job.yaml")
    assert refused.returncode == 2
    assert "the annotation example.org/members says '3' and there are 2 pods" in refused.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "no queue is named"),
        (["--queue", "M L"], "example has no such names"),
        (["--queue", "ml", "--kind", "rayjob"], "its operator replaces the pods' annotations"),
    ],
)
def test_the_scheduler_refuses_what_it_says(with_scheduler, words, found):
    done = with_scheduler(*RUN, "--gang", "example", *words, "--dry-run", "train.py")
    assert done.returncode == 2
    assert f"found: {found}" in done.stderr


@pytest.mark.slow
def test_the_sink_keeps_the_losses(tmp_path):
    file = write_workload(tmp_path)
    text = EXAMPLES["a workload file begins with this"] + file.read_text()
    file.write_text(text.replace("    clip_norm=1.0,\n", "    clip_norm=1.0,\n    sinks=[LossFile],\n"))
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", file)
    assert ended.code == 0, ended.err
    run_dir = tmp_path / "runs" / "a"
    with (run_dir / "losses.csv").open() as rows:
        kept = {int(step): float(loss) for step, loss in csv.reader(rows)}
    assert kept == losses(run_dir)
    assert len(kept) == STEPS


def test_the_examples_keep_the_rules_of_the_source(tmp_path):
    for number, text in enumerate(EXAMPLES.values()):
        (tmp_path / f"example_{number}.py").write_text(text)
    assert len(EXAMPLES) == 2
    lint = [sys.executable, "-m", "ruff", "check", "--ignore", "D100,D102", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*lint, "--no-cache", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
