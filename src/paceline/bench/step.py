"""`paceline bench step`: samples per second of the demo's BERT under Paceline and its peers, in turn in one run.

Every contestant's processes start once and wait; each round gives each contestant a turn, so that a change in
the machine's speed hits all of them. A ratio is the median over the rounds of that round's ratio.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.bench.pool import Pool
from paceline.bench.startup import median_ratio, time_starts
from paceline.launch.local import rank_environment
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError

SEQUENCES, LENGTH, VOCABULARY = 4096, 64, 4096
BATCH = 8  # samples of a process and step
SLICES = 5  # turns of a contestant in a round: short ones, so that all meet the same moods of the machine
STOCK = "ddp_stock_allocator"  # DDP as torchrun starts it, without the allocator setting that all others get
TWO_RANKS = ("paceline", "paceline_gloo", "ddp", "flat_all_reduce", "no_communication", "accelerate", "lightning")
ONE_RANK = ("plain", "paceline_alone")
_SERVED = module_names.CONTESTANTS
_NEEDS = {"accelerate": "accelerate", "lightning": "lightning"}


def run_bench(folder: Path, rounds: int, startup_rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the whole benchmark in `folder`.

    Args:
        folder: an empty folder for made-up data.
        rounds: turns of each contestant.
        startup_rounds: starts of each launcher.
        tell: told what is going on.

    Returns:
        `rows` (name, ranks, samples_per_s by round, median), `ratios`, and the machine and versions.

    Raises:
        UsageError: a contestant's package is missing, or one of them failed.
    """
    for name, package in _NEEDS.items():
        if not version(package):
            raise UsageError(f"can't measure {name}", f"{package} is not installed", "pip install 'paceline[bench]'")
    make_data(folder)
    load_before = os.getloadavg()[0]
    names = ["alone", *TWO_RANKS]
    pools = [Pool(_SERVED, folder, names, rank_environment(2)), Pool(_SERVED, folder, ["ddp"], _stock_environment())]
    seconds: dict[str, list[float]] = {name: [] for name in [*ONE_RANK, *TWO_RANKS, STOCK]}
    try:
        for number in range(rounds):
            tell(f"step, round {number + 1} of {rounds}")
            turns: dict[str, list[float]] = {name: [] for name in seconds}
            for slice_ in range(SLICES):
                # Forwards and backwards, so that nobody always follows the same neighbour.
                for name in [*names, STOCK][:: 1 if slice_ % 2 == 0 else -1]:
                    answer = pools[name == STOCK].turn("ddp" if name == STOCK else name)
                    for which, value in answer.seconds.items():
                        turns[STOCK if name == STOCK else which].append(value)
            for name, values in turns.items():
                seconds[name].append(statistics.mean(values))
    finally:
        for pool in pools:
            pool.close()
    starts = time_starts(folder, startup_rounds, tell)
    return {
        "rows": [_row(name, values) for name, values in seconds.items()],
        "startup_s": starts,
        "ratios": ratios(seconds, starts),
        "rounds": rounds,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch", "accelerate", "lightning")},
    }


def ratios(seconds: dict[str, list[float]], starts: dict[str, list[float]]) -> dict[str, float]:
    """Throughputs over throughputs, except `overhead_over_plain` and `startup_over_torchrun`: times over times."""

    def faster(ours: str, theirs: str) -> float:
        return round(median_ratio(seconds[theirs], seconds[ours]), 4)

    return {
        "paceline_over_ddp": faster("paceline", "ddp"),
        "paceline_over_ddp_stock_allocator": faster("paceline", STOCK),
        "paceline_over_flat_all_reduce": faster("paceline", "flat_all_reduce"),
        "paceline_over_accelerate": faster("paceline", "accelerate"),
        "paceline_over_lightning": faster("paceline", "lightning"),
        "paceline_over_ceiling": faster("paceline", "no_communication"),
        "paceline_gloo_over_ddp": faster("paceline_gloo", "ddp"),
        "paceline_gloo_over_flat_all_reduce": faster("paceline_gloo", "flat_all_reduce"),
        "ceiling_over_ddp": faster("no_communication", "ddp"),
        "paceline_over_one_process": round(2 * median_ratio(seconds["paceline_alone"], seconds["paceline"]), 4),
        "overhead_over_plain": round(median_ratio(seconds["paceline_alone"], seconds["plain"]), 4),
        "startup_over_torchrun": round(median_ratio(starts["paceline"], starts["torchrun"]), 4),
    }


def make_data(folder: Path) -> None:
    """Write made-up tokens in the form of the demo's prepared text."""
    import numpy as np

    rows = np.random.default_rng(0).integers(5, VOCABULARY, (SEQUENCES, LENGTH)).astype(np.uint16)
    np.save(folder / "train.npy", rows)
    np.save(folder / "held_out.npy", rows[:64])
    (folder / "corpus.json").write_text(json.dumps({"most_frequent_id": 5}))


def _stock_environment() -> dict[str, str]:
    environment = {**rank_environment(2)}
    if "GLIBC_TUNABLES" not in os.environ:
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
    """What the numbers were measured on, and how busy others kept it."""
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


def version(package: str) -> str | None:
    """What is installed of a package; None where nothing is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
