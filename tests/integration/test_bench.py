"""The benchmark runs whole and prints what programs read. Speeds are not judged here: CI's machines are shared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.benchmarks import ENVIRONMENT
from support.jobs import leftovers, marked, wait_for

pytestmark = pytest.mark.integration

ROWS = {
    "plain", "paceline_alone", "paceline", "paceline_gloo", "paceline_prepare", "ddp", "flat_all_reduce",
    "no_communication", "accelerate", "lightning", "ddp_stock_allocator",
}  # fmt: skip
RATIOS = {
    "paceline_over_ddp", "paceline_over_accelerate", "paceline_over_lightning", "paceline_over_ceiling",
    "overhead_over_plain", "startup_over_torchrun", "paceline_prepare_over_paceline",
}  # fmt: skip

# The command, with one turn of each contestant in a round: more only make its numbers steadier.
SHORT = """
import sys
from compare import step, strategies
from compare.command import main
step.SLICES = strategies.SLICES = 1
sys.exit(main(sys.argv[1:]))
"""


def measured(folder, *words):
    """The object that `scripts/bench` prints; nothing of it is left."""
    line = [sys.executable, "-c", SHORT, *words, "--rounds", "1", "--json"]
    done = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=600, env=marked(folder, ENVIRONMENT)
    )
    assert done.returncode == 0, done.stderr
    assert wait_for(lambda: not leftovers(folder)), f"left behind: {leftovers(folder)}"
    return json.loads(done.stdout)


@pytest.mark.complete
def test_bench_step_prints_one_object(tmp_path):
    result = measured(tmp_path, "step", "--startup-rounds", "1")
    assert {row["name"] for row in result["rows"]} == ROWS
    assert result["ratios"].keys() >= RATIOS
    assert all(0.2 < ratio < 5 for ratio in result["ratios"].values())
    assert all(row["samples_per_s"] > 0 for row in result["rows"])


@pytest.mark.complete
def test_bench_strategies_compares_sides_that_compute_the_same(tmp_path):
    result = measured(tmp_path, "strategies")
    assert {row["name"] for row in result["rows"]} == {
        f"{side}_{strategy}" for side in ("paceline", "raw") for strategy in ("shard", "tensor", "gpipe", "1f1b")
    }
    assert result["ratios"].keys() == {
        "shard_over_raw", "tensor_over_raw", "pipeline_over_raw", "pipeline_gpipe_over_raw", "pipeline_1f1b_over_raw",
    }  # fmt: skip
    assert all(0.2 < ratio < 5 for ratio in result["ratios"].values())
    assert all(row["step_s"] > 0 and row["side"] in ("paceline", "raw") for row in result["rows"])
    assert all(difference < 1e-4 for difference in result["loss_differences"].values())


@pytest.mark.complete
def test_bench_jobs_runs_each_library_with_and_without_busy_cpus(tmp_path):
    result = measured(tmp_path, "jobs", "--steps", "10", "--busy", "1")
    assert len(result["rows"]) == 8
    assert all(row["samples_per_s"] > 0 and row["whole_s"] > 0 for row in result["rows"])
    assert len(result["ratios"]) == 6


def test_bench_observe_measures_what_the_times_cost(tmp_path):
    result = measured(tmp_path, "observe")
    assert result["pairs"] == 20
    assert -0.2 < result["ratios"]["overhead"] < 0.2
    assert result["step_s"].keys() == {"with", "without"}
