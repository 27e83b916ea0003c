"""Run a job of two ranks in which contestants take turns in the same two processes, and show what it measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compare.startup import BENCHMARKS, alone
from compare.step import machine, version
from paceline.launch.local import rank_environment
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

TURNS = 5  # of each contestant, for each round

Seconds = dict[str, list[float]]


def run_by_turns(
    job: Path,
    folder: Path,
    rounds: int,
    tell: Callable[[str], None],
    ratios: Callable[[Seconds], dict[str, float]],
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a comparison.

    Args:
        job: the file of a rank; its arguments are the number of turns and the file to write the seconds to.
        folder: a folder for its files.
        rounds: each has five turns of each contestant.
        tell: called with progress lines.
        ratios: returns the ratios of the seconds of all contestants.
        packages: the packages whose versions are given beside those of Paceline and torch.

    Returns:
        `rows` (name, median, least and most seconds), `ratios`, and the machine.

    Raises:
        UsageError: no round is asked for, or the job has failed.
    """
    if rounds < 1:
        raise UsageError("can't measure without rounds", f"--rounds is {rounds}", "write --rounds 1 or more")
    load_before = os.getloadavg()[0]
    tell(f"{job.stem.removesuffix('_job')}: two ranks take {rounds * TURNS} turns, load {load_before:.1f}")
    output = folder / "seconds.json"
    options = ["run", "-n", "2", "--runs", str(folder / "runs")]
    command = [sys.executable, "-m", module_names.COMMAND, *options, str(job), str(rounds * TURNS), str(output)]
    environment = {**rank_environment(2), "PYTHONPATH": str(BENCHMARKS)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode != 0:
        raise UsageError("can't measure", f"the job failed: {ended.stderr[-1000:]}", alone(command))
    seconds: Seconds = json.loads(output.read_text())
    return {
        "rows": [_row(name, taken) for name, taken in seconds.items()],
        "ratios": ratios(seconds),
        "rounds": rounds,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch", *packages)},
    }


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    return {"name": name, "seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned lines."""
    rows = [("", "ms", "min", "max")]
    for row in result["rows"]:
        rows.append((row["name"], *[f"{1000 * row[name]:.1f}" for name in ("seconds", "min", "max")]))
    lines = [*aligned(rows, "{:<20}{:>12}{:>10}{:>10}"), ""]
    lines += aligned([(name, f"{value:.3f}") for name, value in result["ratios"].items()], "{:<32}{:>8}")
    where = result["machine"]
    lines += ["", "speed over speed: above 1 Paceline is faster"]
    lines.append(f"{where['cores']} cores, load {where['load_before']:.1f} before, {where['load_after']:.1f} after")
    return "\n".join(lines)
