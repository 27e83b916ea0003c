"""The documentation is built from the repository as it is, and faults fail the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.documented_commands import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs")

FAULTY_PAGE = """# Faulty

[gone](gone.md) [no such heading](design.md#no-such-heading) [no such name][paceline.no_such_name]

::: paceline.faulty.halve
"""
FAULTY_MODULE = '''"""A module."""


def halve(rate, pace: float) -> float:
    """Return half of it.

    Args:
        rate: steps per second.
        speed: steps per second.
    """
'''
REPORTED = (
    'not included in the "nav" configuration:\n  - docs/faulty.md',
    "contains a link 'gone.md'",
    "contains a link 'design.md#no-such-heading'",
    "Could not find cross-reference target 'paceline.no_such_name'",
    "No type or annotation for parameter 'rate'",
    "Parameter 'speed' does not appear in the function signature",
)


@pytest.fixture
def copy(tmp_path):
    """What the build reads, in a folder of its own."""
    for name in ("docs", "examples", "benchmarks", "scripts"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "published", "trials")
        )
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml"]:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "tests" / "launch" / "golden", tmp_path / "tests" / "launch" / "golden")
    (tmp_path / "src").mkdir()
    shutil.copytree(ROOT / "src" / "paceline", tmp_path / "src" / "paceline")
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [folder / "scripts" / "docs"], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )


def test_the_site_has_every_page_and_links_between_them(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "build" / "site"
    assert 'href="docs/reference/index.html"' in (site / "index.html").read_text()
    training = (site / "docs" / "reference" / "training.html").read_text()
    assert 'id="paceline.Job.step"' in training
    assert 'id="paceline.Job.save"' in training  # of a base that the page does not show
    assert 'href="errors.html#paceline.nouns.errors.LossError"' in training
    # A link to a folder of the repository, which the site does not have: its text remains.
    page = (site / "docs" / "kubernetes.html").read_text()
    assert "tests/launch/golden" in page
    assert 'launch/golden"' not in page


def test_faults_fail_the_build(copy):
    (copy / "docs" / "faulty.md").write_text(FAULTY_PAGE)
    (copy / "src" / "paceline" / "faulty.py").write_text(FAULTY_MODULE)
    done = build(copy)
    assert done.returncode == 1
    assert [report for report in REPORTED if report not in done.stderr] == []
