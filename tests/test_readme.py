"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import paceline

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow
def test_the_first_example_runs_alone_and_with_two_ranks(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1))
    alone = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    two = paceline(tmp_path, "run", "-n", "2", file)
    assert two.code == 0, two.err
    said = re.search(r"last loss ([\d.]+)", alone.stdout).group(1)
    assert f"[0] last loss {said}" in two.out
    assert (tmp_path / "out" / "manifest.json").exists()


def test_every_command_it_names_exists():
    from paceline.cli.main import VERBS

    assert set(re.findall(r"paceline (run|plan|demo|bench|verify|doctor|dashboard|export)\b", README)) <= set(VERBS)
