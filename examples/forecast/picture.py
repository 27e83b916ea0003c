"""Draws a few forecasts: the median and the central 50 and 90 % of the sampled paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from series import Panel


def draw(path: Path, panel: Panel, chosen: Sequence[tuple[int, int]], paths: np.ndarray, title: str) -> None:
    """Write the picture.

    Args:
        path: of the file.
        panel: the series.
        chosen: the windows.
        paths: (windows, paths, horizon).
        title: above all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = 2
    rows = -(-len(chosen) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(8, 2.1 * rows + 0.5), squeeze=False, layout="constrained")
    for axis in axes.flat[len(chosen) :]:
        axis.axis("off")
    task = panel.task
    for axis, (number, start), sampled in zip(axes.flat, chosen, paths, strict=False):
        before = min(start, 2 * task.horizon)
        shown = np.arange(-before, task.horizon)
        ahead = np.arange(task.horizon)
        axis.plot(shown, panel.values[number][start - before : start + task.horizon], color="black", lw=1)
        for low, high, shade in ((5, 95, 0.2), (25, 75, 0.4)):
            lower, upper = np.percentile(sampled, [low, high], axis=0)
            axis.fill_between(ahead, lower, upper, color="C0", alpha=shade, lw=0, label=f"{high - low} %")
        axis.plot(ahead, np.median(sampled, axis=0), color="C0", lw=1.2, label="median")
        axis.axvline(-0.5, color="grey", lw=0.6, ls=":")
        axis.set_title(f"series {panel.names[number]}, from position {start:,}", fontsize=8)
        axis.tick_params(labelsize=7)
    axes.flat[0].plot([], [], color="black", lw=1, label="true")
    axes.flat[0].legend(fontsize=7, loc="upper left", framealpha=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("steps ahead", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=64)
    plt.close(figure)
