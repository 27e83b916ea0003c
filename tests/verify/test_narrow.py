"""In narrow precisions a gradient near zero may turn: an optimizer then makes a whole step the other way."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.verify.judge.compare import RankResult, Reference, differences
from paceline.verify.ranks import reference
from paceline.verify.ranks.reference_step import Variation, take_steps

from support.verifier_models import SUBJECTS

pytestmark = pytest.mark.slow
STEPS, OTHER_ROUNDINGS = 3, range(2, 6)


def as_arrays(taken):
    return {key: values.numpy() for key, values in taken.tensors.items()}


def test_what_rounding_turns_is_no_bug_and_a_wrong_update_is_one():
    workload = dataclasses.replace(SUBJECTS["decoder"](), precision="bf16")
    taken, facts = reference.with_noise(workload, "bf16", STEPS, list(reference.VARIATIONS))
    facts |= {"modules": taken.modules, "epsilon": taken.epsilon}

    def found(other, turned):
        right = Reference(as_arrays(taken), facts["noise"], facts, "bf16", turned)
        return differences(right, [RankResult(0, as_arrays(other), {"placements": {}, "has_gradient": {}})])

    others = [take_steps(workload, "bf16", STEPS, Variation(noise_seed=seed)) for seed in OTHER_ROUNDINGS]
    assert any(found(other, {}) for other in others), "no gradient turns: the test is void"
    assert not any(found(other, facts["turned"]) for other in others)

    thrice = take_steps(dataclasses.replace(workload, optimizer=lambda m: thrice_as_fast(workload, m)), "bf16", STEPS)
    assert found(thrice, facts["turned"])


def thrice_as_fast(workload, model):
    optimizer = workload.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    return optimizer


def test_gradients_are_as_they_were_after_a_nudge():
    """What is written down of a step is what was computed, not what the update was given."""
    workload = dataclasses.replace(SUBJECTS["decoder"](), precision="float32")
    plain = take_steps(workload, "float32", 1)
    nudges = {name.split("/", 2)[2]: 1.0 for name in plain.tensors if name.startswith("1/gradient/")}
    moved = take_steps(workload, "float32", 1, Variation(nudges=nudges))
    gradients = [key for key in plain.tensors if key.startswith("1/gradient/")]
    assert all(plain.tensors[key].equal(moved.tensors[key]) for key in gradients)
    assert any(not plain.tensors[key].equal(moved.tensors[key]) for key in plain.tensors if "/parameter/" in key)
