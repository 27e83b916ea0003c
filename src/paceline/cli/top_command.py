"""Show a job live: steps, speed, time left, and where each rank's time goes.

paceline top JOB             redraws every second until Ctrl-C, or the job's end; one that was killed is silent
paceline top JOB --once      prints it once; so does a pipe

JOB is a run's name in the folder of --runs, or the path of its run directory. All of it is read from files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from paceline.nouns.table import printable
from paceline.run.read import times
from paceline.run.read.runs import RUNNING, Run, find_folder, read_run, speed_of
from paceline.run.shown import duration, steps

_EVERY_S = 1.0
_STILL_S = 3.0  # and so many steps' time without an event: the job stands still, or does something else than steps
_LONG_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a run's name, or its run directory")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept")
    parser.add_argument("--once", action="store_true", help="print it once, and return")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, once")


def run(arguments: argparse.Namespace) -> int:
    """Show the job."""
    folder = find_folder(arguments.runs, arguments.job)
    if arguments.json:
        print(json.dumps(_facts(folder)))
        return 0
    if arguments.once or not sys.stdout.isatty():
        print("\n".join(map(printable, _lines(folder, read_run(folder)))))
        return 0
    while True:
        if not (folder / "job.json").exists():
            print(f"paceline top: {folder} has gone", file=sys.stderr)
            return 1
        job = read_run(folder)
        size = shutil.get_terminal_size()
        lines = [printable(line)[: size.columns - 1] for line in _lines(folder, job, size.lines - 6)][: size.lines - 1]
        # Home, each line with the rest of it cleared, then the rest of the screen: it does not flicker.
        print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", flush=True)
        if not job.is_open:
            return 0
        time.sleep(_EVERY_S)


def _lines(folder: Path, job: Run, most: int = 1000) -> list[str]:
    """Return the lines to show."""
    parts = [job.name, job.status, job.plan, f"step {steps(job)}"]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4f}")
    speed = speed_of(folder, job)
    rate, left_s = speed.samples_per_s, speed.left_s
    if rate:
        parts.append(f"{rate:.1f} samples/s")
    steps_left = max(job.total_steps - job.step, 1)
    if left_s is not None and job.status == RUNNING:
        is_still = job.quiet_s > max(_STILL_S, _LONG_STEPS * left_s / steps_left)
        parts.append(f"nothing for {job.quiet_s:.0f} s: see `paceline why`" if is_still else f"{duration(left_s)} left")
    lines = ["  ".join(part for part in parts if part)]
    splits = times.recent_splits(folder, job.ranks)
    if not splits:
        return [*lines, "", "no rank has written the times of a step yet"]
    lines += ["", *times.table(splits, max(most, 1))]
    slow = None if job.has_servers else times.slow_rank(splits)
    if slow is not None:
        lines += ["", times.sentence(slow)]
    return lines


def _facts(folder: Path) -> dict[str, Any]:
    job = read_run(folder)
    splits = times.recent_splits(folder, job.ranks)
    slow = None if job.has_servers else times.slow_rank(splits)
    speed = speed_of(folder, job)
    return {
        **job.to_json(),
        "samples_per_s": speed.samples_per_s,
        "left_s": speed.left_s,
        "times": [split.to_json() for split in splits],
        "slow": None if slow is None else {"rank": slow.rank, "kind": slow.kind, "excess_s": slow.own_excess_s},
    }
