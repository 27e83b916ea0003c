"""`scripts/bench strategies`: the step of each strategy on two ranks, against the same by hand in raw torch.

Both sides train the same BERT from the same values on the same batches with the same optimizer, so their losses
must agree: a comparison in which they don't is void, and an error. As in `bench step` all processes start once and
wait; the two sides of a strategy take their turns one after the other, the first of them by turns, so that both meet
the same moods of the machine. A ratio is Paceline's time over the other's: the median over the turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.pool import Pool
from compare.startup import median_ratio, progress
from compare.step import machine, make_data, version
from paceline.launch.local import rank_environment
from paceline.nouns.errors import CollectiveError, UsageError
from paceline.nouns.table import aligned

STRATEGIES = {"shard": "shard", "tensor": "tensor", "gpipe": "pipeline", "1f1b": "pipeline"}  # and their axes
SIDES = ("paceline", "raw")
SLICES = 3  # turns of a contestant in a round
TOLERANCE = 1e-4  # of a loss, relative: float32 sums in another order, over some steps of AdamW
COMPARED = 8  # steps: later ones drift apart as any two orders of summation do

Seconds = dict[str, list[float]]


def run_strategies(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the whole comparison in `folder`.

    Args:
        folder: an empty folder for made-up data.
        rounds: each has SLICES turns of each contestant.
        tell: called with progress lines.

    Returns:
        `rows` (name, strategy, side, step_s by turn and its median), `ratios`, `loss_differences`, and the machine.

    Raises:
        UsageError: no round is asked for, or a contestant failed.
        CollectiveError: the two sides of a strategy don't compute the same.
    """
    if rounds < 1:
        raise UsageError("can't measure without rounds", f"--rounds is {rounds}", "write --rounds 1 or more")
    load_before = os.getloadavg()[0]
    make_data(folder)
    names = []
    for strategy in STRATEGIES:
        names += [f"{side}_{strategy}" for side in SIDES]
    tell(f"strategies: {len(names)} contestants of two ranks start, load {load_before:.1f}")
    pool = Pool("compare.contestants_strategies", folder, names, rank_environment(2))
    seconds: Seconds = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    began_s = time.monotonic()
    turns = rounds * SLICES
    try:
        for turn in range(turns):
            # Neither side always goes first: the machine may slow down between the two.
            sides = SIDES if turn % 2 == 0 else SIDES[::-1]
            for strategy in STRATEGIES:
                for side in sides:
                    name = f"{side}_{strategy}"
                    answer = pool.turn(name)
                    seconds[name] += answer.seconds.values()
                    losses[name] += answer.losses
            if turn == 0:  # a comparison of different computations must not take hours first
                differences = check_losses(losses)
            tell(progress("strategies", turn + 1, turns, time.monotonic() - began_s))
    finally:
        pool.close()
    rows = []
    for strategy in STRATEGIES:
        rows += [_row(strategy, side, seconds) for side in SIDES]
    return {
        "rows": rows,
        "ratios": ratios(seconds),
        "loss_differences": differences,
        "rounds": rounds,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch")},
    }


def ratios(seconds: Seconds) -> dict[str, float]:
    """Return Paceline's seconds over raw torch's, by axis; for `pipeline` of its schedules together, and of each."""
    ours: Seconds = {axis: [] for axis in STRATEGIES.values()}
    theirs: Seconds = {axis: [] for axis in STRATEGIES.values()}
    for strategy, axis in STRATEGIES.items():
        ours[axis] += seconds[f"paceline_{strategy}"]
        theirs[axis] += seconds[f"raw_{strategy}"]
    result = {f"{axis}_over_raw": median_ratio(ours[axis], theirs[axis]) for axis in ours}
    for strategy, axis in STRATEGIES.items():
        if strategy != axis:  # an axis with several strategies: its schedules
            name = f"{axis}_{strategy}_over_raw"
            result[name] = median_ratio(seconds[f"paceline_{strategy}"], seconds[f"raw_{strategy}"])
    return {name: round(ratio, 4) for name, ratio in result.items()}


def check_losses(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest relative difference between the two sides' losses in their first steps, by strategy.

    Raises:
        CollectiveError: it is more than rounding explains.
    """
    differences = {}
    for strategy in STRATEGIES:
        ours = losses[f"paceline_{strategy}"][:COMPARED]
        theirs = losses[f"raw_{strategy}"][:COMPARED]
        errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
        # Not `any(error > TOLERANCE)`: that is false for NaN.
        agree = bool(errors) and all(error <= TOLERANCE for error in errors)
        if not agree:
            raise CollectiveError(
                f"both sides of {strategy} should compute the same losses, up to {TOLERANCE:g} of them",
                f"they are {_shown(ours)} and {_shown(theirs)}",
                "compare each with one process (`paceline verify`); the times say nothing until they agree",
            )
        differences[strategy] = max(errors)
    return differences


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned lines."""
    rows = [("", "ranks", "step ms", "min", "max")]
    for row in result["rows"]:
        times_ms = [f"{1000 * row[name]:.1f}" for name in ("step_s", "min", "max")]
        rows.append((row["name"], row["ranks"], *times_ms))
    ratios = [(name, f"{value:.3f}") for name, value in result["ratios"].items()]
    lines = [*aligned(rows, "{:<20}{:>6}{:>12}{:>10}{:>10}"), "", *aligned(ratios, "{:<32}{:>8}")]
    where = result["machine"]
    worst = max(result["loss_differences"].values())
    lines += ["", f"time over time: below 1 Paceline is faster; losses agree to {worst:.0e}"]
    lines.append(f"{where['cores']} cores, load {where['load_before']:.1f} before, {where['load_after']:.1f} after")
    return "\n".join(lines)


def _row(strategy: str, side: str, seconds: Seconds) -> dict[str, Any]:
    taken = seconds[f"{side}_{strategy}"]
    return {
        "name": f"{side}_{strategy}",
        "strategy": strategy,
        "axis": STRATEGIES[strategy],
        "side": side,
        "ranks": 2,
        "step_s": round(statistics.median(taken), 6),
        "min": round(min(taken), 6),
        "max": round(max(taken), 6),
        "turns": [round(value, 6) for value in taken],
    }


def _shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.5f}" for loss in losses) or "none"
