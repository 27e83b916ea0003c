"""A path that depends on the batch is the loss's fault, with its line; a loop over samples is none."""

from types import SimpleNamespace

import pytest

from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.verify.judge.checks import check_branches

LINE = "model.py:8"


def call(true, false=0, read=0):
    """Return what a line saw in one call of the loss."""
    return [[LINE, True]] * true + [[LINE, False]] * false + [[LINE, None]] * read


def check(expected, *of_ranks, plan="replicate=2"):
    reference = SimpleNamespace(facts={"branches": expected})
    ranks = [SimpleNamespace(rank=rank, facts={"branches": calls}) for rank, calls in enumerate(of_ranks)]
    check_branches(reference, ranks, Plan.parse(plan))


@pytest.mark.parametrize(
    ("whole", "parts", "says"),
    [
        ([call(1)], ([call(1)], [call(0, 1)]), "True for the whole batch and False on rank 1"),
        ([call(8, 1)], ([call(8, 1)], [call(7, 1)]), "8 times True and 1 times False for the whole batch and 7 times"),
        ([call(7), call(8)], ([call(7), call(7)], [call(7), call(8)]), "8 times True for the whole batch and 7 times"),
        ([call(0, 0, 5)], ([call(0, 0, 4)], [call(0, 0, 5)]), "5 times read for the whole batch and 4 times read"),
    ],
)
def test_a_path_that_depends_on_the_batch_is_refused(whole, parts, says):
    with pytest.raises(WorkloadError) as caught:
        check(whole, *parts)
    assert f"the condition at {LINE} is {says}" in caught.value.found


@pytest.mark.parametrize(
    ("whole", "parts", "plan"),
    [
        ([call(2)], ([call(2)], [call(2)]), "replicate=2"),
        ([call(5, 3)], ([call(3, 1)], [call(2, 2)]), "replicate=2"),  # once for each sample
        ([call(5, 3)], ([call(3, 1)], [call(3, 1)], [call(2, 2)], [call(2, 2)]), "replicate=2,tensor=2"),
        ([call(1)], ([call(1), call(1)], [call(1), call(1)]), "replicate=2"),  # two micro-batches
        ([[["other.py:1", True]]], ([call(1)], [call(2)]), "replicate=2"),
    ],
)
def test_what_does_not_depend_on_it_is_none(whole, parts, plan):
    check(whole, *parts, plan=plan)
