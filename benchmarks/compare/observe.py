"""`scripts/bench observe`: what it costs to measure where a step's time goes.

One job of the small GPT on two ranks measures and doesn't, ten steps each, in turn. The overhead is the median over
pairs of neighbouring blocks of the time with over the time without, less 1; a step of this model takes some 15 ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.jobs import last_lines_of
from compare.startup import alone, progress
from compare.step import machine, version
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

_FILE = Path(__file__).with_name("observe_job.py")
RANKS = 2
STEPS = 10  # of a block: see observe_job.py
BLOCKS = 20  # pairs of blocks in a round


def run_observe(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure in `folder`.

    Args:
        folder: an empty folder.
        rounds: jobs, each of BLOCKS pairs of blocks.
        tell: called with progress lines.

    Returns:
        `ratios` (overhead: the share by which a step takes longer), `step_s` with and without, the machine, versions.

    Raises:
        UsageError: a number is too small, or the job failed.
    """
    if rounds < 1:
        raise UsageError("can't measure the overhead", f"--rounds is {rounds}", "write --rounds 1 or more")
    load_before = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    began_s = time.monotonic()
    for number in range(rounds):
        for name, blocks in _run_job(folder).items():
            seconds[name] += blocks
        tell(progress("observe", number + 1, rounds, time.monotonic() - began_s))
    return {
        "ratios": {"overhead": round(overhead(seconds), 5)},
        "step_s": {name: round(statistics.median(blocks) / STEPS, 6) for name, blocks in seconds.items()},
        "pairs": len(seconds["with"]),
        "rounds": rounds,
        "ranks": RANKS,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch")},
    }


def overhead(seconds: dict[str, list[float]]) -> float:
    """Return the median over pairs of blocks of the time with over the time without, less 1."""
    pairs = zip(seconds["with"], seconds["without"], strict=True)
    return statistics.median(measured / plain for measured, plain in pairs) - 1


def table(result: dict[str, Any]) -> str:
    """Return the result as lines."""
    where = result["machine"]
    rows = [(name, f"{1000 * seconds:.3f}") for name, seconds in result["step_s"].items()]
    return "\n".join(
        [
            *aligned([("ms of a step", ""), *rows], "{:<16}{:>10}"),
            "",
            f"overhead {result['ratios']['overhead']:+.2%}, the median of {result['pairs']} pairs of {STEPS} steps",
            f"{where['cores']} cores, load {where['load_before']:.1f} before, {where['load_after']:.1f} after",
        ]
    )


def _run_job(folder: Path) -> dict[str, list[float]]:
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    run = [
        "-m",
        module_names.COMMAND,
        "run",
        "-n",
        str(RANKS),
        "--runs",
        str(folder / "runs"),
        "--checkpoint-every",
        "0",
    ]
    command = [sys.executable, *run, str(_FILE), str(BLOCKS), str(mark)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if ended.returncode or not mark.exists():
        raise UsageError(
            f"the job should train on {RANKS} ranks",
            f"it did not: {last_lines_of(ended.stderr)}",
            alone(command),
        )
    found: dict[str, list[float]] = json.loads(mark.read_text())
    return found
