"""What the ranks did in a few steps, as bars on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from paceline.run.timeline import make_trace
from paceline.run.times import files_of, read_steps

MOST_BARS = 4000  # more are slow to draw
MOST_STEPS = 50


def detailed_steps(run_dir: Path) -> list[int]:
    """Return the steps of which it is kept what was done in them, as far as the first rank's file says at its end."""
    for path in files_of(run_dir).values():
        return sorted({step.step for step in read_steps(path, tail_only=True) if step.step is not None and step.spans})
    return []


def spans(run_dir: Path, first: int, last: int) -> dict[str, Any]:
    """Return the bars of some steps, by kind of work.

    Args:
        run_dir: of the run.
        first, last: the steps.

    Returns:
        `rows`, the names of the tracks; `kinds`, of each kind the bars' rows, begins and lengths in milliseconds, and
        names; `is_cut`, whether there are more than MOST_BARS.
    """
    trace = make_trace(run_dir, first, last, tail_only=True)
    tracks = {}
    for event in trace.events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
    bars = sorted((event for event in trace.events if event["ph"] == "X"), key=lambda event: event["ts"])
    steps = [event for event in bars if event["cat"] == "step"]
    begin = min((event["ts"] for event in steps), default=0.0)
    kinds: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"row": [], "begin": [], "length": [], "name": []})
    rows = set()
    shown = [event for event in bars if event["cat"] not in ("step", "job")]
    for event in [*steps, *shown[:MOST_BARS]]:
        track = tracks.get((event["pid"], event["tid"]), "")
        rows.add((event["pid"], event["tid"], f"rank {event['pid']} {track}"))
        of_kind = kinds[event["cat"]]
        of_kind["row"].append(f"rank {event['pid']} {track}")
        of_kind["begin"].append(round((event["ts"] - begin) / 1000, 4))
        of_kind["length"].append(round(event["dur"] / 1000, 4))
        of_kind["name"].append(event["name"])
    return {
        "rows": [name for _, _, name in sorted(rows)],
        "kinds": dict(sorted(kinds.items(), key=lambda item: item[0] != "step")),
        "steps": [first, last],
        "is_cut": len(shown) > MOST_BARS,
    }
