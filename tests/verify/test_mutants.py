"""Every seeded bug is caught, and the module and the collective that are named are the right ones."""

from __future__ import annotations

import re

import pytest

from support.mutants import MUTANTS
from support.sample import INTEGRATION, sampled
from support.verified_workloads import verify

LEAST = 110


def mark_of(plan):
    """Graphs are captured anew in each process: seconds per mutant."""
    is_graph = "tensor" in plan or "pipeline" in plan or "context" in plan or "expert" in plan
    return INTEGRATION if is_graph else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(n, marks=mark_of(one.plan)) for n, one in MUTANTS.items()])
def test_a_seeded_bug_is_caught_and_named(name):
    mutant = MUTANTS[name]
    verdict = verify(mutant.subject, mutant.plan, name, mutant.what, mutant.precision, mutant.steps)
    table = "\n".join(verdict.lines())
    assert verdict.word == "bug", table
    if mutant.says:
        first = next(check for check in verdict.checks if not check.passed)
        assert re.search(mutant.says, first.message), table
    if mutant.culprit:
        assert verdict.culprit is not None, table
        assert re.search(mutant.culprit, verdict.culprit.message), table
    if mutant.module:
        assert verdict.culprit is not None, table
        named = verdict.culprit.module
        assert any(named.startswith(start) if start else not named for start in mutant.module), table
    if mutant.collective:
        assert verdict.culprit is not None, table
        assert mutant.collective in verdict.culprit.collective, table


PAIRS = sorted({(mutant.subject, mutant.plan) for mutant in MUTANTS.values()})


@pytest.mark.parametrize(
    ("subject", "plan"),
    [pytest.param(*both, marks=sampled(row, 0, of=6, mark=mark_of(both[1]))) for row, both in enumerate(PAIRS)],
)
def test_without_its_bug_the_same_is_right(subject, plan):
    """Else a mutant could be caught for another reason."""
    verdict = verify(subject, plan, what=("step", "draws"))
    assert verdict.word != "bug", "\n".join(verdict.lines())


def test_there_are_enough():
    assert len(MUTANTS) >= LEAST
