"""`scripts/bench step`: samples per second of a BERT under Paceline and its peers, in turn in one run.

Every contestant's processes start once and wait; each round gives each contestant a turn, so that a change in
the machine's speed hits all of them. A ratio is the median over the rounds of that round's ratio.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from compare.pool import Pool
from compare.startup import median_ratio, progress, time_starts
from paceline.launch.local import rank_environment
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

# Of the made-up data, in the form of the demo's prepared text. The vocabulary is that of the default BertConfig.
SEQUENCES = 4096
LENGTH = 64
VOCABULARY = 4096
BATCH = 8  # samples of a process and step
_FIRST_TOKEN = 5  # the demo's special tokens are 0 to 4
SLICES = 5  # turns of a contestant in a round: short ones, so that all meet the same moods of the machine
STOCK = "ddp_stock_allocator"  # DDP as torchrun starts it, without the allocator setting that all others get
TWO_RANKS = (
    "paceline",
    "paceline_gloo",
    "paceline_prepare",
    "ddp",
    "flat_all_reduce",
    "no_communication",
    "accelerate",
    "lightning",
)
ONE_RANK = ("plain", "paceline_alone")
_SERVED = "compare.contestants"
INSTALL = "pip install -e '.[transformers,lightning]'"  # brings the other frameworks
_NEEDS = {"accelerate": "accelerate", "lightning": "lightning"}


def run_bench(folder: Path, rounds: int, startup_rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the whole benchmark in `folder`.

    Args:
        folder: an empty folder for made-up data.
        rounds: turns of each contestant.
        startup_rounds: starts of each launcher.
        tell: called with progress lines.

    Returns:
        `rows` (name, ranks, samples_per_s by round, median), `ratios`, and the machine and versions.

    Raises:
        UsageError: a contestant's package is missing, or one of them failed.
    """
    for name, package in _NEEDS.items():
        if not version(package):
            raise UsageError(f"can't measure {name}", f"{package} is not installed", INSTALL)
    make_data(folder)
    load_before = os.getloadavg()[0]
    names = ["alone", *TWO_RANKS]
    pool = Pool(_SERVED, folder, names, rank_environment(2))
    # glibc reads its allocator setting as a process starts: DDP without it needs a pool of its own.
    stock_pool = Pool(_SERVED, folder, ["ddp"], _stock_environment())
    seconds: dict[str, list[float]] = {name: [] for name in [*ONE_RANK, *TWO_RANKS, STOCK]}
    began_s = time.monotonic()
    try:
        for number in range(rounds):
            tell(progress("step", number, rounds, time.monotonic() - began_s))
            for name, values in _round(names, pool, stock_pool).items():
                seconds[name].append(statistics.mean(values))
    finally:
        pool.close()
        stock_pool.close()
    starts = time_starts(folder, startup_rounds, tell)
    return {
        "rows": [_row(name, values) for name, values in seconds.items()],
        "startup_s": starts,
        "ratios": ratios(seconds, starts),
        "rounds": rounds,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch", "accelerate", "lightning")},
    }


def _round(names: list[str], pool: Pool, stock_pool: Pool) -> dict[str, list[float]]:
    """Give each contestant SLICES turns, and return its seconds per step in each turn."""
    turns: dict[str, list[float]] = {name: [] for name in [*ONE_RANK, *TWO_RANKS, STOCK]}
    order = [*names, STOCK]
    for _ in range(SLICES):
        for name in order:
            if name == STOCK:
                turns[STOCK] += stock_pool.turn("ddp").seconds.values()
                continue
            for contestant, value in pool.turn(name).seconds.items():  # "alone" has both of ONE_RANK
                turns[contestant].append(value)
        order = order[::-1]  # forwards and backwards, so that nobody always follows the same neighbour
    return turns


def ratios(seconds: dict[str, list[float]], starts: dict[str, list[float]]) -> dict[str, float]:
    """Return ratios of throughputs; `overhead_over_plain` and `startup_over_torchrun` are ratios of times."""

    def speedup(ours: str, theirs: str) -> float:
        return round(median_ratio(seconds[theirs], seconds[ours]), 4)

    return {
        "paceline_over_ddp": speedup("paceline", "ddp"),
        "paceline_over_ddp_stock_allocator": speedup("paceline", STOCK),
        "paceline_over_flat_all_reduce": speedup("paceline", "flat_all_reduce"),
        "paceline_over_accelerate": speedup("paceline", "accelerate"),
        "paceline_over_lightning": speedup("paceline", "lightning"),
        "paceline_over_ceiling": speedup("paceline", "no_communication"),
        "paceline_prepare_over_paceline": speedup("paceline_prepare", "paceline"),
        "paceline_prepare_over_ddp": speedup("paceline_prepare", "ddp"),
        "paceline_gloo_over_ddp": speedup("paceline_gloo", "ddp"),
        "paceline_gloo_over_flat_all_reduce": speedup("paceline_gloo", "flat_all_reduce"),
        "ceiling_over_ddp": speedup("no_communication", "ddp"),
        # Against twice the speed of one process, which two ranks could have at best.
        "paceline_over_one_process": round(2 * median_ratio(seconds["paceline_alone"], seconds["paceline"]), 4),
        "overhead_over_plain": round(median_ratio(seconds["paceline_alone"], seconds["plain"]), 4),
        "startup_over_torchrun": round(median_ratio(starts["paceline"], starts["torchrun"]), 4),
    }


def make_data(folder: Path) -> None:
    """Write made-up tokens in the form of the demo's prepared text."""
    import numpy as np

    rows = np.random.default_rng(0).integers(_FIRST_TOKEN, VOCABULARY, (SEQUENCES, LENGTH)).astype(np.uint16)
    np.save(folder / "train.npy", rows)
    np.save(folder / "held_out.npy", rows[:64])
    # The demo's workload reads this one value of the summary.
    (folder / "corpus.json").write_text(json.dumps({"most_frequent_id": _FIRST_TOKEN}))


def table(result: dict[str, Any]) -> str:
    """Return the result of `bench step` as aligned lines."""
    rows = [("", "ranks", "samples/s", "min", "max")]
    for row in result["rows"]:
        rates = (f"{row['samples_per_s']:.1f}", f"{row['min']:.1f}", f"{row['max']:.1f}")
        rows.append((row["name"], row["ranks"], *rates))
    ratios = [(name, f"{value:.3f}") for name, value in result["ratios"].items()]
    return "\n".join([*aligned(rows, "{:<24}{:>6}{:>12}{:>10}{:>10}"), "", *aligned(ratios, "{:<40}{:>8}")])


def _stock_environment() -> dict[str, str]:
    environment = dict(rank_environment(2))
    if "GLIBC_TUNABLES" not in os.environ:  # else it is the user's own setting, which torchrun would keep, too
        environment.pop("GLIBC_TUNABLES", None)
    return environment


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    ranks = 1 if name in ONE_RANK else 2
    rates = [ranks * BATCH / value for value in seconds]
    return {
        "name": name,
        "ranks": ranks,
        "samples_per_s": round(statistics.median(rates), 2),
        "min": round(min(rates), 2),
        "max": round(max(rates), 2),
        "rounds": [round(rate, 2) for rate in rates],
    }


def machine(load_before: float) -> dict[str, Any]:
    """Return the machine that was measured on, and its load before and after."""
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
