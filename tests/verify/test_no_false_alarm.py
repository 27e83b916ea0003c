"""What is right is never called a bug: random models on random meshes, in float64 and in narrow precisions."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from paceline.nouns.errors import PacelineError

from kit import verify
from random_jobs import jobs, plans

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
RANDOM = settings(deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck), derandomize=True)


def assert_no_alarm(facts, plan, precision):
    what = ("step", "traffic", "draws")
    for one in ("float64", precision):
        try:
            verdict = verify(facts, plan, what=what, precision=one)
        except PacelineError as error:
            note(f"refused: {error}")
            return
        except AssertionError as error:
            if "paceline.nouns.errors" in str(error):
                note("refused by the ranks")
                return
            raise
        assert verdict.word != "bug", "\n".join(verdict.lines())
        what = ("step",)


@pytest.mark.slow
@given(jobs, plans(), st.sampled_from(["float32", "bf16"]))
@settings(RANDOM, max_examples=8)
def test_what_is_right_is_not_called_a_bug(facts, plan, precision):
    assert_no_alarm(facts, plan, precision)


@pytest.mark.integration
@given(jobs, plans(), st.sampled_from(["float32", "bf16"]))
@settings(RANDOM, max_examples=int(os.environ.get("PACELINE_EXAMPLES", "25")))
def test_many_of_them(facts, plan, precision):
    assert_no_alarm(facts, plan, precision)
