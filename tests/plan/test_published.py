"""What torchtitan published of its eager steps, without anything fitted to it."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import titan

from paceline.nouns.device import Device
from paceline.plan.allocator import OutOfMemoryError, play

pytestmark = pytest.mark.integration
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_measurements.csv"
OFF = 0.03
COMMUNICATORS = 1
HAS_TIME = os.environ.get("PACELINE_PUBLISHED") == "all"  # with three rows more that ran, two minutes


def rows(metric):
    """Eager rows on GPUs of one model, sharded only."""
    if not PUBLISHED.exists():
        return []
    with PUBLISHED.open() as file:
        found = [row for row in csv.DictReader(file) if row["source"] == "torchtitan" and row["metric"] == metric]
    found = [row for row in found if row["strategy"] in ("FSDP", "FSDP2")]
    return [row for row in found if HAS_TIME or metric != "MFU" or row["model"] == "Llama-2-13B"]


def recorded(row):
    recording = titan.recorded(row)
    return recording.events, [block.nbytes for block in recording.blocks], [block.stream for block in recording.blocks]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the table of published measurements is not here")
@pytest.mark.parametrize("row", rows("peak_reserved_memory"), ids=lambda row: f"{row['model']} on {row['gpus']}")
def test_reserved_memory(row):
    reserved = play(*recorded(row)).peak_reserved / 2**30
    assert abs(reserved / float(row["value"]) - 1) < OFF, reserved


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the table of published measurements is not here")
@pytest.mark.parametrize(
    "row", rows("MFU") + rows("fits"), ids=lambda row: f"{row['model']} {row['micro_batch']} {row['act_ckpt']}"
)
def test_what_ran_fits_and_what_did_not_does_not(row):
    capacity = Device.parse("A100-80GB").capacity(COMMUNICATORS)
    is_published_oom = row["value"] == "OOM"
    try:
        play(*recorded(row), capacity)
        is_oom = False
    except OutOfMemoryError:
        is_oom = True
    assert is_oom == is_published_oom
