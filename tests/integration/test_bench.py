"""The benchmark runs whole and prints what programs read. Speeds are not judged here: CI's machines are shared."""

from __future__ import annotations

import json

import pytest

from jobs import paceline

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
