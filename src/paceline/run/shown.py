"""Write the state of a run as users read it; `-` where nothing is known."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.run.read.runs import Details, Run

_MOST_RANKS = 8
_LONGEST_S = 1e12  # seconds; a damaged event may have times from which follows anything


def when(at: float) -> str:
    """Write seconds since 1970 as a date and a time of this host."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "-"


def duration(seconds: float) -> str:
    """Write `73` as `1:13`; `?` where it is no time."""
    if not 0 <= seconds < _LONGEST_S:
        return "?"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds_left:02d}"
    return f"{minutes}:{seconds_left:02d}"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{1000 * seconds:.1f}" if seconds < 10 else f"{1000 * seconds:.0f}"


def steps(run: Run) -> str:
    """Write the last step, and the steps of the whole job."""
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def number(value: Any) -> str:
    """Write a number with four digits."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def scores(values: Mapping[str, float]) -> str:
    """Write the ratios of an evaluation."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items()) or "-"


def nbytes(count: Any) -> str:
    """Write a number of bytes with its unit."""
    if not isinstance(count, int | float) or not math.isfinite(count):
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def rank_names(ranks: Sequence[int]) -> str:
    """Write ranks as they stand in a sentence: the first eight, and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_RANKS]))}{more}"


def left_out(unreadable: int) -> str:
    """Return the sentence about lines of a run's events that are no events; "" where there are none."""
    if unreadable == 0:
        return ""
    if unreadable == 1:
        return "1 line of events.jsonl can't be read: it is left out"
    return f"{unreadable} lines of events.jsonl can't be read: they are left out"


def facts_of(run: Run, details: Details) -> dict[str, str]:
    """Return the facts about a run, by the names that are shown."""
    finite = details.finite_losses
    saved = "-"
    if details.checkpoints:
        saved = f"steps {', '.join(map(str, details.checkpoints))} ({nbytes(details.checkpoint_bytes)})"
    seconds, speed = details.seconds_per_step, details.samples_per_s
    return {
        "status": run.status,
        "failure": details.failure if details.failure and not run.is_open else "-",
        "started": when(run.started),
        "starts": str(details.starts or "-"),
        "file": " ".join(run.script) or "-",
        "plan": run.plan or "-",
        "ranks": str(run.ranks or "-"),
        "steps": steps(run),
        "loss, first": number(finite[0] if finite else None),
        "loss, last": number(run.loss),
        "loss, lowest": number(min(finite, default=None)),
        "evaluation": scores(run.evaluation or (details.evaluations[-1][1] if details.evaluations else {})),
        "a step": "-" if seconds is None else f"{1000 * seconds:.1f} ms",
        "samples/s": "-" if speed is None else f"{speed:,.1f}",
        "memory of rank 0": nbytes(details.memory_bytes) if details.memory_bytes else "-",
        "events": left_out(details.unreadable) or "-",
        "checkpoints": saved,
    }


def compared(facts: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return a row for each fact that is known of one of the runs: its name, and the values of all."""
    rows = [(name, *(run_facts[name] for run_facts in facts)) for name in (facts[0] if facts else ())]
    return [row for row in rows if any(value != "-" for value in row[1:])]
