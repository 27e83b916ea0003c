"""Hold a simulated step against a real one: what each rank holds at most, and what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compare import planner_peaks
from paceline.nouns.plan import Plan
from paceline.plan.memory import memory_of
from paceline.profile.simulate import simulate

from support.ranks import run_ranks

OFF = 0.005  # of the measured peak; most are equal to the byte
TRIES = 3  # what another thread frees the profiler does not hear: on a busy machine it may measure too much

Make = Callable[..., Any]


def measure(rank: int, plan: Plan, make: Make, name: str, parts: dict[str, Any]) -> Any:
    planner_peaks.with_time_to_let_go()
    planner_peaks.workload = make
    return planner_peaks.measured(plan, name, parts)


def check_simulation(make: Make, name: str, line: str, parts: dict[str, Any] | None = None) -> None:
    """Each rank's peak and ledger, of a real job of `make(name, **parts)` and of its simulations."""
    plan = Plan.parse(line)
    parts = parts or {}
    torch.set_num_threads(1)  # as the ranks have; kernels' scratch memory depends on it
    profiles = [simulate(make(name, **parts), plan, rank) for rank in range(plan.world_size)]
    expected = [memory_of(profile).peak for profile in profiles]
    for _ in range(TRIES):
        answers = run_ranks(plan.world_size, measure, plan, make, name, parts)
        if all(peak <= own * (1 + OFF) for own, (peak, _, _) in zip(expected, answers, strict=True)):
            break
    for own, profile, (peak, _, rows) in zip(expected, profiles, answers, strict=True):
        assert abs(own / peak - 1) < OFF, (profile.rank, own, peak)
        assert _sorted(profile.traffic) == _sorted(rows)


def _sorted(rows: Any) -> list[tuple[Any, ...]]:
    return sorted((row["collective"], row["axis"], row["calls"], row["bytes"]) for row in rows)
