"""The plans that are tried for a loop are those that it can have."""

from __future__ import annotations

import pytest

from paceline.nouns.errors import PlanError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.nouns.profile import COMMUNICATION, OPTIMIZER, PARAMETERS
from paceline.plan.loop_plans import PlanRow, changes_of_loop, plans_of_loop, plans_table
from paceline.plan.memory import Memory


def lines(plans):
    return [plan.line() for plan in plans]


def allowed(line):
    try:
        check_plan_of_loop(Plan.parse(line))
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_plans_of_as_many_ranks(ranks):
    asked = Plan.parse(f"replicate={ranks}")
    levels = [f"shard={ranks},zero=1", f"shard={ranks},zero=2", f"shard={ranks}", f"tensor={ranks}"]
    assert lines(plans_of_loop(asked, ranks)) == [f"replicate={ranks}", *filter(allowed, levels)]
    assert plans_of_loop(asked, ranks)[0] == asked


def test_options_of_the_plan_stay_where_they_have_an_effect():
    asked = Plan.parse("replicate=2,compression=bf16,transport=gloo")
    assert plans_of_loop(asked, 2)[0] == asked
    for plan in plans_of_loop(asked, 2):
        assert Plan.parse(plan.line()) == plan


def test_one_process_is_its_own_plan():
    assert plans_of_loop(Plan.parse("replicate=1"), 1) == [Plan.parse("replicate=1")]
    assert plans_of_loop(Plan.parse("replicate=2"), 1) == []


@pytest.mark.parametrize(
    ("asked", "tried"),
    [
        ("replicate=1", ["shard=2,zero=1", "shard=4,zero=1", "shard=8,zero=1"]),
        ("replicate=4", ["shard=4,zero=1"]),
        ("replicate=2,shard=2,zero=1", ["shard=4,zero=1"]),
        ("shard=4,zero=1", []),
    ],
)
def test_what_is_tried_where_memory_is_short(asked, tried):
    changes = changes_of_loop(Plan.parse(asked))
    moments, changes = changes[:2], changes[2:]
    assert [change.plan.line() for change in moments] == [f"{asked},optimizer_states={bits}bit" for bits in (8, 4)]
    assert [change.plan.line() for change in changes if change.plan.zero == 1] == tried
    assert all(change.text == f"{change.plan.line()} as the plan" for change in changes)
    assert all(allowed(change.plan.line()) for change in [*moments, *changes])


def test_the_table_marks_the_plan_that_was_asked_for():
    mib = 2**20
    held = {PARAMETERS: 2 * mib, COMMUNICATION: 3 * mib, OPTIMIZER: 4 * mib}
    memory = Memory(0, 10 * mib, "update", held, {}, [], None, False, 0)
    plans = [Plan.parse("replicate=2"), Plan.parse("shard=2,zero=1")]
    title, first, second = plans_table([PlanRow(plan, memory, 5 * mib) for plan in plans], plans[1])
    assert title.split()[:4] == ["plan", "peak", "parameters", "gradients"]
    assert first.split() == ["replicate=2", *("10.0", "MiB", "2.0", "MiB", "3.0", "MiB", "4.0", "MiB", "5.0", "MiB")]
    assert second.startswith("shard=2,zero=1 (asked for)")
