"""Draws accuracy against steps, and the speeds side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {"teacher": "teacher", "student": "student of the teacher", "alone": "student without a teacher"}
COLORS = {"teacher": "#555555", "student": "#0072b2", "alone": "#d55e00"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.4), width_ratios=[3, 1], layout="constrained")
    for name, label in NAMES.items():
        points = [(point["step"], 100 * point[name]) for point in result["curve"] if name in point]
        if points:
            left.plot(*zip(*points, strict=True), "o-", markersize=3, color=COLORS[name], label=label)
    if "teacher" in result["scores"]:
        left.axhline(100 * result["scores"]["teacher"], color=COLORS["teacher"], linewidth=0.8, linestyle=":")
    left.axvline(result["teacher_steps"], color="#bbbbbb", linewidth=0.8)
    left.set_xlabel("steps of the job")
    left.set_ylabel("accuracy on the dev set, %")
    left.set_title(result["data"], fontsize="medium")
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize="small")
    speeds = result["sentences_per_s"]
    bars = right.bar(list(speeds), list(speeds.values()), color=[COLORS[name] for name in speeds])
    right.bar_label(bars, fmt="{:,.0f}", fontsize="small")
    right.set_title(f"{result['faster']} times as fast", fontsize="medium")
    right.set_ylabel("sentences/s on a rank")
    right.margins(y=0.15)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)
