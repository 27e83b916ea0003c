"""Models as people write them: masks of -inf, layers in float32, optimizers of a part, buffers touched in passing."""

from __future__ import annotations

import pytest

from paceline.nouns.errors import PacelineError

from support.sample import SLOW, sampled
from support.unusual_models import REFUSED, UNUSUAL
from support.verified_workloads import verify

# Sparse gradients and own code that can't be a graph: replicate alone, or shard.
EAGER_ONLY = (
    "zoo",
    "sparse",
    "touch",
    "huge",
    "hugemask",
    "infmask",
    "nostats",
    "bnrms",
    "bnada",
    "dataclass",
    "partial",
)


def plans_of(name):
    if name == "mixture":
        return "replicate=2", "tensor=2", "pipeline=2", "replicate=2,tensor=2", "shard=2"
    if name in ("depth", "ownbackward", "ctc", "complex"):
        return "replicate=2", "tensor=2", "pipeline=2"
    if name == "skipping":
        return "replicate=2", "pipeline=2"
    if name == "recurrent":
        return "replicate=2", "shard=2", "pipeline=2"
    if name == "noisy":
        return "replicate=2", "shard=2,checkpointing=full", "pipeline=2"
    return ("replicate=2",) if name in EAGER_ONLY else ("replicate=2", "tensor=2")


CASES = [
    pytest.param(name, plan, marks=SLOW if name in EAGER_ONLY else sampled(row, column, of=2, mark=SLOW))
    for row, name in enumerate(UNUSUAL)
    for column, plan in enumerate(plans_of(name))
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_what_is_unusual_is_no_bug(name, plan):
    for precision in ("float64", "float32"):
        # Traffic and draws are of a run in float32 of their own, the same for both.
        what = ("step", "traffic", "draws") if precision == "float64" else ("step",)
        verdict = verify(name, plan, what=what, precision=precision)
        assert verdict.word != "bug", "\n".join(verdict.lines())


@SLOW
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused(name):
    _, plan, says = REFUSED[name]
    # An AssertionError is what a rank's refusal becomes in the process that started it.
    with pytest.raises((PacelineError, RuntimeError, ValueError, AssertionError)) as error:
        verify((name,), plan)
    from paceline.verify.ranks.child import as_workload_error

    is_said = isinstance(error.value, PacelineError | AssertionError)
    shown = error.value if is_said else as_workload_error(error.value)
    assert says in str(shown)
