"""The benchmark runs whole and prints what programs read. Speeds are not judged here: CI's machines are shared."""

from __future__ import annotations

import json

import pytest

from support.jobs import paceline

pytestmark = pytest.mark.integration

ROWS = {
    "plain", "paceline_alone", "paceline", "paceline_gloo", "ddp", "flat_all_reduce", "no_communication",
    "accelerate", "lightning", "ddp_stock_allocator",
}  # fmt: skip
RATIOS = {
    "paceline_over_ddp", "paceline_over_accelerate", "paceline_over_lightning", "paceline_over_ceiling",
    "overhead_over_plain", "startup_over_torchrun",
}  # fmt: skip


def test_bench_step_prints_one_object(tmp_path):
    ended = paceline(tmp_path, "bench", "step", "--rounds", "1", "--startup-rounds", "1", "--json", timeout=600)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert {row["name"] for row in result["rows"]} == ROWS
    assert result["ratios"].keys() >= RATIOS
    assert all(0.2 < ratio < 5 for ratio in result["ratios"].values())
    assert all(row["samples_per_s"] > 0 for row in result["rows"])


def test_bench_strategies_compares_sides_that_compute_the_same(tmp_path):
    ended = paceline(tmp_path, "bench", "strategies", "--rounds", "1", "--json", timeout=600)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert {row["name"] for row in result["rows"]} == {
        f"{side}_{strategy}" for side in ("paceline", "raw") for strategy in ("shard", "tensor", "gpipe", "1f1b")
    }
    assert result["ratios"].keys() == {
        "shard_over_raw", "tensor_over_raw", "pipeline_over_raw", "pipeline_gpipe_over_raw", "pipeline_1f1b_over_raw",
    }  # fmt: skip
    assert all(0.2 < ratio < 5 for ratio in result["ratios"].values())
    assert all(row["step_s"] > 0 and row["side"] in ("paceline", "raw") for row in result["rows"])
    assert all(difference < 1e-4 for difference in result["loss_differences"].values())


def test_bench_jobs_runs_every_library_alone_and_beside_busy_processes(tmp_path):
    ended = paceline(tmp_path, "bench", "jobs", "--rounds", "1", "--steps", "10", "--busy", "1", "--json", timeout=600)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert len(result["rows"]) == 8
    assert all(row["samples_per_s"] > 0 and row["whole_s"] > 0 for row in result["rows"])
    assert len(result["ratios"]) == 6
