"""A file that kills a rank at step $KILL_AT, and prints its end as "ends at ..."."""

from __future__ import annotations

import re
from pathlib import Path

from support.jobs import paceline

TESTS = {"PYTHONPATH": str(Path(__file__).parents[1])}  # the file may use `support`


def check_goes_on(folder: Path, file: Path) -> None:
    """Two ranks killed at step 8 and resumed end as two that ran undisturbed, bit for bit."""
    every = ("--checkpoint-every", "3")
    whole = paceline(folder, "run", "-n", "2", "--job", "a", *every, file, **TESTS)
    assert whole.code == 0, whole.err
    killed = paceline(folder, "run", "-n", "2", "--job", "b", *every, file, KILL_AT="8", **TESTS)
    assert killed.code == 1
    again = paceline(folder, "run", "-n", "2", "--job", "b", "--resume", file, **TESTS)
    assert again.code == 0, again.err
    expected = sorted(re.findall(r"ends at (.*)", whole.out))
    assert len(expected) == 2
    assert sorted(re.findall(r"ends at (.*)", again.out)) == expected


def check_verified(folder: Path, file: Path) -> None:
    """`paceline verify` finds the step of two ranks equal in float64."""
    verified = paceline(folder, "verify", "-n", "2", file, **TESTS)
    assert verified.code == 0, verified.out + verified.err
    assert re.search(r"^step float64 +ok ", verified.out, re.MULTILINE), verified.out
