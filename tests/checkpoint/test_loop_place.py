"""A manifest of a loop's job says where in the data it was; what is no such place is refused."""

from __future__ import annotations

import pytest

from paceline.checkpoint.manifest_schema import fault_of_form

MANIFEST = {
    "step": 1,
    "position": 1,
    "seed": 0,
    "samples": 0,
    "world_size": 1,
    "files": [],
    "tensors": {},
    "optimizer": {"class": "SGD", "groups": [], "numbers": {}},
    "scheduler": None,
}


@pytest.mark.parametrize("place", [None, {"pass": 0, "batch": 0}, {"pass": 3, "batch": 10**6, "batches_a_step": 2}])
def test_a_place_is_taken(place):
    assert fault_of_form({**MANIFEST, "loop": place}) is None


@pytest.mark.parametrize(
    "place",
    [
        {"pass": -1, "batch": 0},
        {"pass": 10**12, "batch": 0},
        {"pass": "1", "batch": 0},
        {"pass": 1.5, "batch": 0},
        {"pass": True, "batch": 0},
        {"pass": 1},
        {"batch": 1},
        {"pass": 1, "batch": -1},
        {"pass": 1, "batch": 10**30},
        {"pass": 1, "batch": 1, "batches_a_step": 0},
        {"pass": 1, "batch": 1, "batches_a_step": 10**15},
        {"pass": 1, "batch": 1, "batches_a_step": "2"},
        [1, 2],
        7,
    ],
    ids=str,
)
def test_anything_else_is_refused(place):
    assert "wrong form" in fault_of_form({**MANIFEST, "loop": place})
