"""What the demo shows at its end: a short table and the loss curve, on the terminal and as a picture."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.run.supervise.progress import decoded

_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60


def read_events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that a run wrote."""
    return [event for event in decoded((run_dir / "events.jsonl").read_bytes()) if event.get("event") == kind]


def terminal_curve(losses: Sequence[float], columns: int = _COLUMNS) -> str:
    """The losses as one line of blocks, each the mean of its stretch."""
    width = min(columns, len(losses))
    edges = [round(index * len(losses) / width) for index in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    blocks = "".join(_LEVELS[min(7, int((mean - low) / span * 8))] for mean in means)
    return f"{high:.2f} {blocks} {low:.2f}"


def draw_curve(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write the training and held-out loss as a PNG; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [s["step"] for s in steps], [s["loss"] for s in steps], color="#9db4c0", linewidth=1, label="training batch"
    )
    axes.plot(
        [e["step"] for e in evaluations],
        [e["loss"] for e in evaluations],
        color="#c1440e",
        marker="o",
        markersize=4,
        label="held-out text",
    )
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
    """Two aligned columns."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"  {name:<{width}}{value}" for name, value in rows)


def summary(first: dict[str, Any], last: dict[str, Any], speeds: dict[int, float], word: str) -> list[tuple[str, str]]:
    """The rows of the closing table.

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
        beside = f"  ({rate / speeds[1]:.2f} times one process)" if ranks > 1 and 1 in speeds else ""
        rows.append((f"samples/s, {ranks} process{'es' if ranks > 1 else ''}", f"{rate:.1f}{beside}"))
    return rows


def can_show_blocks() -> bool:
    """Whether the terminal's encoding has block characters."""
    try:
        _LEVELS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
