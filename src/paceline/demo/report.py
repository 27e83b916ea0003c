"""Show the demo's results: a short table and the loss curve, on the terminal and as a picture."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.nouns.table import aligned
from paceline.run.supervise.progress import decoded

_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60


def read_events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind that a run wrote."""
    events = decoded((run_dir / "events.jsonl").read_bytes())
    return [event for event in events if event.get("event") == kind]


def terminal_curve(losses: Sequence[float], columns: int = _COLUMNS) -> str:
    """Return the losses as one line of blocks, each the mean of a stretch of steps."""
    width = min(columns, len(losses))
    edges = [round(index * len(losses) / width) for index in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0  # all losses alike: the lowest block
    blocks = ""
    for mean in means:
        level = int((mean - low) / span * len(_LEVELS))
        blocks += _LEVELS[min(len(_LEVELS) - 1, level)]  # the highest mean would be one level more
    return f"{high:.2f} {blocks} {low:.2f}"


def draw_curve(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write the training and held-out loss as a PNG; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # needs no display; chosen before pyplot is imported
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    numbers = [step["step"] for step in steps]
    losses = [step["loss"] for step in steps]
    axes.plot(numbers, losses, color="#9db4c0", linewidth=1, label="training batch")
    numbers = [evaluation["step"] for evaluation in evaluations]
    losses = [evaluation["loss"] for evaluation in evaluations]
    axes.plot(numbers, losses, color="#c1440e", marker="o", markersize=4, label="held-out text")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("masked-token loss (nats)")
    axes.set_title("A small BERT on Python's own source, two processes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows as two aligned columns."""
    return "\n".join(aligned(rows, "  {:<}  {}"))


def summary(first: dict[str, Any], last: dict[str, Any], speeds: dict[int, float], word: str) -> list[tuple[str, str]]:
    """Return the rows of the closing table.

    Args:
        first: the evaluation before the first step.
        last: the one after the last.
        speeds: samples per second by number of processes.
        word: the most frequent token.
    """
    rows = [
        ("held-out loss, before", f"{first['loss']:.3f}"),
        ("held-out loss, after", f"{last['loss']:.3f}"),
        ("masked tokens right", f"{100 * last['accuracy']:.1f} %"),
        (f"always guessing {word!r}", f"{100 * last['baseline']:.1f} %"),
    ]
    for ranks, rate in sorted(speeds.items()):
        plural = "es" if ranks > 1 else ""
        value = f"{rate:.1f}"
        if ranks > 1 and 1 in speeds:
            value += f"  ({rate / speeds[1]:.2f} times one process)"
        rows.append((f"samples/s, {ranks} process{plural}", value))
    return rows


def can_show_blocks() -> bool:
    """Return True if the terminal's encoding has block characters."""
    try:
        _LEVELS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
