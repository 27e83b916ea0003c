"""`bench observe`: what it makes of its times, and how it is refused."""

from __future__ import annotations

import pytest

from compare.observe import overhead, run_observe, table
from paceline.nouns.errors import UsageError


def test_the_overhead_is_the_median_of_the_pairs():
    assert overhead({"with": [1.02, 3.0, 2.02], "without": [1.0, 1.0, 2.0]}) == pytest.approx(0.02)


def test_the_table_says_the_overhead():
    result = {
        "ratios": {"overhead": 0.0042},
        "step_s": {"with": 0.0151, "without": 0.015},
        "pairs": 40,
        "machine": {"cores": 2, "load_before": 0.25, "load_after": 2.0},
    }
    lines = table(result).splitlines()
    assert [line.split() for line in lines[1:3]] == [["with", "15.100"], ["without", "15.000"]]
    assert lines[-2] == "overhead +0.42%, the median of 40 pairs of 10 steps"


def test_no_round_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--rounds 1 or more"):
        run_observe(tmp_path, 0, print)
