"""A plan that somebody wrote is one error where a value is none that it can have."""

from __future__ import annotations

import json

import pytest

from paceline.nouns.errors import MeshError, PacelineError, PlanError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan

DIGITS = "9" * 5000
VALUES = {
    "mesh": [None, 2, ["replicate=2"], f"replicate={DIGITS}", "replicate=2000000"],
    "transport": [None, 1, ["gloo"], "glooo"],
    "bucket_bytes": [None, "25", 1.5, True, 10**30],
    "checkpoint_every": [None, "100", -1, 10**30, False],
    "zero": [True, "3", 4, 10**40],
    "micro_batches": [[], 10**30],
    "server": ["2", 10**9, None],
    "deadline": [None, "x", [1], True],
    "compile": [True, None, "yes"],
    "version": [2, "1", None],
}
CASES = [(name, value) for name, values in VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_value_of_another_kind_is_refused(name, value, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({name: value}))
    with pytest.raises((PlanError, MeshError)) as caught:
        Plan.read(tmp_path / "plan.json")
    assert name in str(caught.value) or name == "mesh"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"[" * 100_000, DIGITS.encode(), b'"\xff"', b'{"keep": 3, "keep": 4}', b"[]", b""])
def test_a_file_that_holds_no_plan_is_refused(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match="plan"):
        Plan.read(tmp_path / "plan.json")


LINES = [
    f"replicate={DIGITS}",
    f"zero={DIGITS}",
    f"deadline={DIGITS}",
    "server=1,mode=deadline,deadline=nan",
    "server=1,mode=deadline,deadline=inf",
    "server=1,mode=deadline,deadline=1_0",
    "replicate=\u0663",
    "replicate=1000,shard=1001",
    "x" * 10**5,
    f"server={10**9}",
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_with_numbers_beyond_measure_is_refused(line):
    with pytest.raises(PacelineError) as caught:
        Plan.parse(line)
    assert len(str(caught.value)) < 1000


def test_the_largest_mesh():
    assert Mesh.parse("replicate=1000,shard=1000").world_size == 10**6
    assert Plan.parse("server=1,mode=deadline,deadline=0.5").deadline == 0.5
