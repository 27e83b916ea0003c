"""Write what is known of a run as people read it; `-` where nothing is."""

from __future__ import annotations

import time
from collections.abc import Mapping

from paceline.run.summary import Run


def when(at: float) -> str:
    """Write seconds since 1970 as a date and a time of this host."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "-"


def steps(run: Run) -> str:
    """Write the last step, and the steps of the whole job."""
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def number(value: float | None) -> str:
    """Write a number with four digits."""
    return "-" if value is None else f"{value:.4g}"


def scores(values: Mapping[str, float]) -> str:
    """Write the ratios of an evaluation."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items()) or "-"


def left_out(unreadable: int) -> str:
    """Say how many lines of a run's events are no events; "" where all are."""
    if unreadable == 0:
        return ""
    if unreadable == 1:
        return "1 line of events.jsonl can't be read: it is left out"
    return f"{unreadable} lines of events.jsonl can't be read: they are left out"


def nbytes(count: int) -> str:
    """Write a number of bytes with its unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
