"""Many small cases on the same ranks: these are started once, and each case is a test of its own."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable

from support.ranks import run_ranks


def outcomes(cases: dict[str, Callable[[int, int], None]], size: int, setup: Callable[[], None]) -> dict[str, str]:
    """Run each case as `case(rank, size)` on `size` ranks, in order; the traceback of each that failed on a rank."""
    by_rank = run_ranks(size, functools.partial(_run_all, cases=cases, size=size, setup=setup))
    return {
        name: "\n".join(f"rank {rank}:\n{failed[name]}" for rank, failed in enumerate(by_rank) if name in failed)
        for name in cases
    }


def _run_all(rank: int, cases: dict[str, Callable[[int, int], None]], size: int, setup: Callable[[], None]):
    setup()
    failed = {}
    for name, case in cases.items():
        try:
            case(rank, size)
        except BaseException:
            failed[name] = traceback.format_exc()
    return failed
