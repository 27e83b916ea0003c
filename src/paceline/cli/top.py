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
from paceline.run import summary, times
from paceline.run.summary import Run, find_folder, read_run
from paceline.run.supervise.progress import decoded, duration, speed

_EVERY_S = 1.0
_TAIL_BYTES = 2**16
_WINDOW = 50
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
        if job.status not in (summary.RUNNING, summary.SILENT):
            return 0
        time.sleep(_EVERY_S)


def _lines(folder: Path, job: Run, most: int = 1000) -> list[str]:
    """Return what is shown."""
    steps = f"step {job.step}/{job.total_steps}" if job.total_steps else f"step {job.step}"
    parts = [job.name, job.status, job.plan, steps]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4f}")
    rate, left_s = _speed(folder, job)
    if rate:
        parts.append(f"{rate:.1f} samples/s")
    quiet_s = _quiet_s(folder)
    steps_left = max(job.total_steps - job.step, 1)
    if left_s is not None and job.status == summary.RUNNING:
        is_still = quiet_s > max(_STILL_S, _LONG_STEPS * left_s / steps_left)
        parts.append(f"nothing for {quiet_s:.0f} s: see `paceline why`" if is_still else f"{duration(left_s)} left")
    lines = ["  ".join(part for part in parts if part)]
    splits = times.recent_splits(folder, job.ranks)
    if not splits:
        return [*lines, "", "no rank has written the times of a step yet"]
    lines += ["", *times.table(splits, max(most, 1))]
    slow = None if "server=" in job.plan else times.slow_rank(splits)  # workers of servers go at their own pace
    if slow is not None:
        lines += ["", times.sentence(slow)]
    return lines


def _quiet_s(folder: Path) -> float:
    """Return the seconds since the newest event."""
    try:
        return time.time_ns() / 1e9 - (folder / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _facts(folder: Path) -> dict[str, Any]:
    job = read_run(folder)
    splits = times.recent_splits(folder, job.ranks)
    slow = None if "server=" in job.plan else times.slow_rank(splits)
    rate, left_s = _speed(folder, job)
    return {
        **job.to_json(),
        "samples_per_s": rate,
        "left_s": left_s,
        "times": [split.to_json() for split in splits],
        "slow": None if slow is None else {"rank": slow.rank, "kind": slow.kind, "excess_s": slow.own_excess_s},
    }


def _speed(folder: Path, job: Run) -> tuple[float | None, float | None]:
    """Return the samples of a second over the newest steps, and the seconds that are left."""
    try:
        with (folder / "events.jsonl").open("rb") as file:
            file.seek(max((folder / "events.jsonl").stat().st_size - _TAIL_BYTES, 0))
            events = list(decoded(file.read()))
    except OSError:
        return None, None
    # Of this process: between two there is time without a step, and steps are taken again.
    begins = [number for number, event in enumerate(events) if event["event"] in ("start", "resumed")]
    records = [event for event in events[begins[-1] if begins else 0 :] if event["event"] == "step"][-_WINDOW:]
    if len(records) < 2 or records[-1]["at"] <= records[0]["at"]:
        return speed(records), None
    a_step_s = (records[-1]["at"] - records[0]["at"]) / (len(records) - 1)
    left_s = a_step_s * (job.total_steps - job.step) if job.total_steps >= job.step else None
    return speed(records), left_s
