"""What `bench strategies` makes of the times and losses that its contestants report."""

from __future__ import annotations

import pytest

from compare.startup import progress
from compare.strategies import COMPARED, STRATEGIES, check_losses, ratios, table
from paceline.nouns.errors import CollectiveError

TIMES = {"shard": (1.0, 2.0), "tensor": (3.0, 3.0), "gpipe": (1.0, 2.0), "1f1b": (2.0, 2.0)}  # ours and theirs


def seconds(turns=3):
    sides = {"paceline": 0, "raw": 1}
    return {f"{side}_{name}": [both[at]] * turns for name, both in TIMES.items() for side, at in sides.items()}


def losses(change=0.0):
    told = [8.0 + step / 10 for step in range(COMPARED)]
    result = {f"{side}_{name}": list(told) for name in STRATEGIES for side in ("paceline", "raw")}
    result["paceline_tensor"][2] *= 1 + change
    return result


def test_strategies_divide_our_time_by_raw_per_pipeline_schedule():
    assert ratios(seconds()) == {
        "shard_over_raw": 0.5,
        "tensor_over_raw": 1.0,
        "pipeline_over_raw": 0.75,
        "pipeline_gpipe_over_raw": 0.5,
        "pipeline_1f1b_over_raw": 1.0,
    }


def test_one_slow_turn_does_not_move_a_ratio():
    times = seconds()
    times["paceline_shard"][1] = 100.0
    assert ratios(times)["shard_over_raw"] == 0.5


def test_losses_that_agree_up_to_rounding_pass():
    assert check_losses(losses(1e-5))["tensor"] == pytest.approx(1e-5)


@pytest.mark.parametrize("change", [1e-3, -1e-3, float("nan")])
def test_losses_that_differ_void_the_comparison(change):
    with pytest.raises(CollectiveError, match="both sides of tensor"):
        check_losses(losses(change))


def test_a_side_that_says_no_losses_voids_the_comparison():
    silent = losses()
    silent["raw_shard"] = silent["paceline_shard"] = []
    with pytest.raises(CollectiveError, match="both sides of shard"):
        check_losses(silent)


def test_progress_says_how_long_the_rest_takes():
    assert progress("strategies", 0, 4, 0.0) == "strategies, 0 of 4 done"
    assert progress("strategies", 1, 4, 20.0) == "strategies, 1 of 4 done: 1:00 left"
    assert progress("strategies", 4, 4, 80.0).endswith(": 0:00 left")


def test_the_table_aligns():
    row = {"ranks": 2, "step_s": 0.1234, "min": 0.1, "max": 1.5}
    shown = table(
        {
            "rows": [{"name": name, **row} for name in seconds()],
            "ratios": ratios(seconds()),
            "loss_differences": check_losses(losses()),
            "machine": {"cores": 2, "load_before": 0.25, "load_after": 2.0},
        }
    )
    lines = shown.splitlines()
    assert len({len(line) for line in lines[: 1 + len(seconds())]}) == 1
    assert len({len(line) for line in lines if "_over_raw" in line}) == 1
    assert lines[-1] == "2 cores, load 0.2 before, 2.0 after"
