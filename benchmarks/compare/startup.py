"""Time the start of two ranks, from the command to the end of their first step, against torchrun."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.run.shown import duration

_FILE = Path(__file__).with_name("first_step.py")


BENCHMARKS = Path(__file__).parents[1]  # processes find this package there


def alone(command: Sequence[str]) -> str:
    """Return what a person types to run a benchmark's process alone."""
    return f"run it alone: PYTHONPATH={BENCHMARKS} {shlex.join(command)}"


def progress(what: str, done: int, total: int, elapsed_s: float) -> str:
    """Return a line with what is done, and how long the rest takes at this speed."""
    left = f": {duration(elapsed_s / done * (total - done))} left" if done else ""
    return f"{what}, {done} of {total} done{left}"


def time_starts(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the seconds to the first step under each launcher, which take turns.

    One start of each is not counted: it may read torch from the disk and compile modules, the others from memory.

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
    began_s = time.monotonic()
    num_done = 0
    for turn in range(rounds + 1):
        for name, command in commands.items():
            tell(progress("start-up", num_done, (rounds + 1) * len(commands), time.monotonic() - began_s))
            num_done += 1
            taken = _time(name, command, mark)
            if turn > 0:
                seconds[name].append(taken)
    return seconds


def _time(name: str, command: list[str], mark: Path) -> float:
    mark.unlink(missing_ok=True)
    # A benchmark that a launcher started must not make its jobs ranks of that launcher. Both may keep what Python
    # compiles, as installed packages do: the start that is not counted writes it.
    left_out = ("PACELINE_", "TORCHELASTIC", "PYTHONDONTWRITEBYTECODE")
    began_ns = time.time_ns()  # since the epoch, as the other process writes it
    environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not mark.exists():
        lines = done.stderr.strip().splitlines()
        last_line = lines[-1] if lines else "it said nothing"
        raise UsageError(f"{name} should take a first step", f"it did not: {last_line}", alone(command))
    return (int(mark.read_text()) - began_ns) / 1e9


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the rounds of our number over theirs.

    The two of a round are measured one after the other, so that a change in the machine's speed hits both.
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
