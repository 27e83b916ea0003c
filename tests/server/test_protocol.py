"""The parameter server's protocol under faults: thousands of seeds, and bugs that the simulator must find."""

from __future__ import annotations

import os

import pytest

from paceline.nouns.errors import PlanError
from paceline.server.admission import Mode

from protocol_mutants import MUTANTS
from simulator import Simulator

WITHIN = 400  # seeds in which each must be found
FEW, MANY = 60, int(os.environ.get("PACELINE_SEEDS", "1500"))


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.slow)])
def test_no_promise_is_broken(seeds):
    for seed in seeds:
        try:
            Simulator(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_seed_runs_again_exactly():
    first, second = (Simulator(7).run() for _ in range(2))
    assert first.events == second.events
    assert [r.store.values for r in first.replicas.values()] == [r.store.values for r in second.replicas.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_of_the_protocol_is_found(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    for seed in range(WITHIN):
        try:
            Simulator(seed).run(600.0)
        except Exception as error:
            print(f"{name}: seed {seed}: {type(error).__name__}: {error}")
            return
    raise AssertionError(f"{name} survives {WITHIN} seeds")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"kind": "synch"}, "did you mean 'sync'"),
        ({"kind": "quorum"}, "write quorum=1"),
        ({"kind": "stale", "staleness": -1}, "write staleness=0"),
    ],
)
def test_a_mode_that_cannot_be(parts, says):
    with pytest.raises(PlanError) as error:
        Mode(**parts)
    assert says in str(error.value)
