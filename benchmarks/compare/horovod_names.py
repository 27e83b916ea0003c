"""`scripts/bench horovod`: sums by Horovod's names on two ranks, beside the same sums by torch.distributed.

The tensors are the 100 largest of a ResNet-50, 102 MB in float32. All contestants run in the same two processes, by
turns, and each result is checked. `drop_in_over_raw` is the speed by names over that of torch.distributed with a call
for each tensor of one list, or with one flat copy, whichever is faster: the median over the turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.startup import BENCHMARKS, alone, median_ratio
from compare.step import machine, version
from paceline.launch.local import rank_environment
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

JOB = Path(__file__).with_name("horovod_job.py")
RAW = ("raw_calls", "raw_flat")
TURNS = 5  # of each contestant, for each round

Seconds = dict[str, list[float]]


def run_horovod(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the comparison.

    Args:
        folder: a folder for its files.
        rounds: each has five turns of each contestant.
        tell: called with progress lines.

    Returns:
        `rows` (name, median, least and most seconds), `ratios`, and the machine.

    Raises:
        UsageError: no round is asked for, or the job has failed.
    """
    if rounds < 1:
        raise UsageError("can't measure without rounds", f"--rounds is {rounds}", "write --rounds 1 or more")
    load_before = os.getloadavg()[0]
    tell(f"horovod: two ranks take {rounds * TURNS} turns, load {load_before:.1f}")
    output = folder / "seconds.json"
    options = ["run", "-n", "2", "--runs", str(folder / "runs")]
    command = [sys.executable, "-m", module_names.COMMAND, *options, str(JOB), str(rounds * TURNS), str(output)]
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
        "versions": {name: version(name) for name in ("paceline", "torch")},
    }


def ratios(seconds: Seconds) -> dict[str, float]:
    """Return the speed by names, and in a group, over that of the faster way by torch.distributed."""
    raw = min((seconds[name] for name in RAW), key=statistics.median)
    ours = {"drop_in_over_raw": "names", "group_over_raw": "group"}
    return {ratio: round(median_ratio(raw, seconds[name]), 4) for ratio, name in ours.items()}


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
