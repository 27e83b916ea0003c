"""A person's file is loaded for its workload; its loop never runs."""

from __future__ import annotations

import pytest

import paceline
from paceline.nouns.errors import WorkloadError
from paceline.nouns.user_program import UserProgram
from paceline.train.find_workload import find_workload

WORKLOAD = "workload = paceline.Workload(model=list, loss=print, optimizer=list, data=[1], batch_size=1)\n"


@pytest.mark.parametrize(
    "loop",
    [
        "",
        "if __name__ == '__main__':\n    raise RuntimeError('the loop ran')\n",
        "job = paceline.distribute(workload)\nraise RuntimeError('the loop ran')\n",
        "def main(work):\n    paceline.distribute(work)\n    raise RuntimeError('ran')\nmain(workload)\n",
    ],
)
def test_the_loop_does_not_run(loop, tmp_path):
    before = paceline.distribute
    path = tmp_path / "train.py"
    path.write_text(f"import paceline\n{WORKLOAD}{loop}")
    assert find_workload(UserProgram(str(path))).batch_size == 1
    assert paceline.distribute is before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import paceline\n", "no variable `workload`"),
        ("import paceline\nworkload = 3\n", "no variable `workload`"),
        ("import paceline\n1 / 0\n", "ZeroDivisionError"),
        ("import paceline\npaceline.distribute(3)\n", "no variable `workload`"),
        ("raise SystemExit(3)\n", "SystemExit"),
    ],
)
def test_a_file_without_one_says_so(text, says, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        find_workload(UserProgram(str(path)))
