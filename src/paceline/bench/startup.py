"""How long it takes from the command to the end of the first step of two ranks, against torchrun."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.nouns import module_names
from paceline.nouns.errors import UsageError

_FILE = Path(__file__).with_name("first_step.py")


def time_starts(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds to the first step under each launcher, in turn, after one start of each that is not counted.

    Raises:
        UsageError: a launcher did not get to its first step.
    """
    mark = folder / "mark"
    workload = [str(_FILE), str(folder), str(mark)]
    runs = ["--runs", str(folder / "runs"), "--checkpoint-every", "0"]
    commands = {
        "paceline": [sys.executable, "-m", module_names.COMMAND, "run", "-n", "2", *runs, *workload],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *workload],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            tell(f"start-up, round {turn} of {rounds}: {name}")
            taken = _time(name, command, mark)
            if turn:
                seconds[name].append(taken)
    return seconds


def _time(name: str, command: list[str], mark: Path) -> float:
    mark.unlink(missing_ok=True)
    began = time.time_ns()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "TORCHELASTIC"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not mark.exists():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(
            f"{name} should take a first step", f"it did not: {last}", "run it alone: " + " ".join(command)
        )
    return (int(mark.read_text()) - began) / 1e9


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of ours over theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
