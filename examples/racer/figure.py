"""The picture: driven lines on four held-out tracks, coloured by speed, and what was earned over the rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import car
import matplotlib
import numpy as np
import tasks
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection

SHOWN = 4


def draw(
    path: Path,
    task: tasks.Task,
    policy: torch.nn.Module,
    results: Mapping[int, Mapping[str, Any]],
    curve: Sequence[tuple[int, float, float | None]],
) -> None:
    """Draw the picture.

    Args:
        path: where to.
        task: of cars.
        policy: whole on this rank.
        results: of the test episodes.
        curve: number of a rollout, its mean reward of a step, and its episodes' mean return.
    """
    first = task.groups["learned"]
    chosen = np.unique(np.linspace(first, task.episodes - 1, SHOWN).astype(int)).tolist()
    driven = tasks.test(policy, task, chosen, next(policy.parameters()).device)
    figure, axes = plt.subplots(1, len(chosen) + 1, figsize=(3 * (len(chosen) + 1), 3.1), layout="constrained", dpi=72)
    fastest = car.SPEEDS_M_S[-1]
    for axis, number, result in zip(axes, chosen, driven, strict=False):
        draw_track(axis, task.tracks[number])
        places = np.array(result["path"])
        pieces = np.stack([places[:-1, :2], places[1:, :2]], axis=1)
        line = LineCollection(pieces, array=places[1:, 2], cmap="viridis", clim=(0, fastest), linewidths=2)
        axis.add_collection(line)
        seconds = result["steps"] * car.STEP_S
        end = f"lap in {seconds:.1f} s" if result["progress"] >= 100 else f"left it after {result['progress']:.0f} %"
        axis.set_title(f"{task.tracks[number].name}\n{end}", fontsize=9)
        axis.set_aspect("equal", anchor="N")
        axis.set_axis_off()
    figure.colorbar(line, ax=axes[: len(chosen)], label="speed, m/s", shrink=0.7, pad=0.01, aspect=30)
    axis = axes[-1]
    axis.plot([row[0] for row in curve], [row[1] for row in curve], color="tab:blue")
    axis.set_xlabel("rollout")
    axis.set_title("mean reward of a step", fontsize=9)
    axis.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)


def draw_track(axis: Any, track: Any) -> None:
    """Draw a track's surface and its start."""
    left = track.centre + track.normal * track.left[:, None]
    right = track.centre - track.normal * track.right[:, None]
    surface = np.concatenate([left, left[:1], right[:1], right[::-1]])
    axis.fill(*surface.T, color="0.88", linewidth=0)
    for border in (left, right):
        axis.plot(*np.concatenate([border, border[:1]]).T, color="0.55", linewidth=0.8)
    axis.plot(*np.stack([left[0], right[0]]).T, color="tab:red", linewidth=2)
