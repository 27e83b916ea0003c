"""A verification that this host has no room for is refused before anything computes."""

from __future__ import annotations

import pytest

from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.verify.ranks.dry_run import check_fits, needed_bytes

MODEL = {"parameters": [{"numel": 1000}], "frozen": [{"numel": 24}]}


def test_ranks_hold_their_part_and_with_zero_1_all_of_it():
    needed = {line: needed_bytes(MODEL, Plan.parse(line)) for line in ("replicate=2", "shard=2,zero=1", "shard=2")}
    assert needed["shard=2"] < needed["shard=2,zero=1"] == needed["replicate=2"]


def test_what_does_not_fit_is_refused():
    plan = Plan.parse("replicate=2")
    check_fits(MODEL, plan, available=needed_bytes(MODEL, plan))
    with pytest.raises(WorkloadError, match="can't verify on 2 ranks of this host"):
        check_fits(MODEL, plan, available=needed_bytes(MODEL, plan) - 1)
