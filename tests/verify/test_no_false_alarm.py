"""What is right is never called a bug: random models on random meshes, in float64 and in narrow precisions."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from paceline.nouns.errors import PacelineError

from support.random_jobs import jobs, plans
from support.verified_workloads import verify

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
LEAST_VERIFIED = 0.6  # others are refused: nothing to split, fewer samples than ranks
RANDOM = settings(deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck), derandomize=True)


def verified(facts, plan, precision) -> bool:
    """Whether the job could be verified; an alarm is an error."""
    what = ("step", "traffic", "draws")
    for one in ("float64", precision):
        try:
            verdict = verify(facts, plan, what=what, precision=one)
        except PacelineError as error:
            note(f"refused: {error}")
            return False
        except AssertionError as error:
            if "paceline.nouns.errors" in str(error):
                note("refused by the ranks")
                return False
            raise
        assert verdict.word != "bug", "\n".join(verdict.lines())
        what = ("step",)
    return True


def run_many(examples):
    found = []

    @given(jobs, plans(), st.sampled_from(["float32", "bf16", "fp16"]))
    @settings(RANDOM, max_examples=examples)
    def one(facts, plan, precision):
        found.append(verified(facts, plan, precision))

    one()
    assert sum(found) >= LEAST_VERIFIED * len(found), f"{len(found) - sum(found)} of {len(found)} were refused"


@pytest.mark.slow
def test_what_is_right_is_not_called_a_bug():
    run_many(8)


@pytest.mark.integration
@pytest.mark.complete
def test_many_of_them():
    run_many(int(os.environ.get("PACELINE_EXAMPLES", "25")))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["replicate=2", "pipeline=2"])
def test_a_step_in_fp16_is_compared_without_its_loss_scale(plan):
    assert verify("encoder", plan, what=("step",), precision="fp16").word == "rounding"
