"""Cuts windows out of series: inputs, values and scale, as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from series import Panel
from torch.utils.data import Dataset


def width(panel: Panel) -> int:
    """Return how many inputs the model has at each step: lagged values, which of them there are, covariates, scale."""
    return len(panel.task.lags) + 1 + panel.covariates[0].shape[1] + 1


def scale_of(panel: Panel, number: int, start: int) -> float:
    """Return what a window's values are divided by: 1 and the mean of the context's absolute values."""
    context = panel.values[number][max(0, start - panel.task.context) : start]
    return 1.0 + float(np.abs(context).mean())


def lagged(panel: Panel, number: int, positions: np.ndarray) -> np.ndarray:
    """Return the lagged values of positions (positions, lags); 0 before the series begins."""
    before = positions[:, None] - np.array(panel.task.lags)
    return np.where(before >= 0, panel.values[number][np.maximum(before, 0)], 0.0)


def known(panel: Panel, number: int, positions: np.ndarray, scale: float) -> np.ndarray:
    """Return the inputs that need no value: whether there is one before, the covariates, the scale's logarithm."""
    within = np.maximum(positions, 0)
    is_real = (positions > 0)[:, None].astype(float)
    return np.concatenate(
        [is_real, panel.covariates[number][within], np.full((len(positions), 1), np.log10(scale) / 3)], axis=1
    )


def window(panel: Panel, number: int, start: int, counted_from: int = 0) -> dict[str, torch.Tensor]:
    """Return a window with the values that are to be forecast, for teacher forcing.

    Args:
        panel: the series.
        number: which series.
        start: the first position that is forecast; the context lies before it, and may begin before the series.
        counted_from: the first position of the window that counts in the loss.

    Returns:
        `inputs` (length, width), `target` (length), `counts` (length): 1 for a real position that counts in the loss,
        and `scale`.
    """
    positions = np.arange(start - panel.task.context, start + panel.task.horizon)
    scale = scale_of(panel, number, start)
    inputs = np.concatenate([lagged(panel, number, positions) / scale, known(panel, number, positions, scale)], axis=1)
    is_real = positions >= 0
    target = np.where(is_real, panel.values[number][np.maximum(positions, 0)], 0.0)
    counts = is_real & (np.arange(len(positions)) >= counted_from)
    parts = {"inputs": inputs, "target": target, "counts": counts, "scale": np.array(scale)}
    return {name: torch.from_numpy(part.astype(np.float32)) for name, part in parts.items()}


class TrainingWindows(Dataset):
    """Random windows of the training parts: which one depends on the seed and the window's position alone.

    A context may begin before its series does; these positions do not count.

    Args:
        panel: the series.
        count: how many windows.
        seed: of the choice.
    """

    def __init__(self, panel: Panel, count: int, seed: int) -> None:
        self.panel = panel
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def place(self, position: int) -> tuple[int, int]:
        """Return the series and the first position that is forecast."""
        random = np.random.default_rng([self.seed, position])
        number = int(random.integers(len(self.panel.values)))
        horizon = self.panel.task.horizon
        last = self.panel.ends[number] - horizon
        return number, int(random.integers(min(horizon, last), last + 1))

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return window(self.panel, *self.place(position))


class ForecastWindows(Dataset):
    """The windows of the test part, of which the forecast positions count."""

    def __init__(self, panel: Panel, windows: Sequence[tuple[int, int]]) -> None:
        self.panel = panel
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        return window(self.panel, *self.windows[position], counted_from=self.panel.task.context)
