"""Scores of sampled paths and of point forecasts, as sums and counts that add up over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from series import Panel, Task, naive_error

QUANTILES = np.arange(1, 10) / 10
BANDS = {"coverage_50": (0.25, 0.75), "coverage_90": (0.05, 0.95)}
POINTS = ("mse", "rmse", "mae", "smape", "mase")
LOSSES = ("quantile_loss", "quantile_loss_0.5", "quantile_loss_0.9")
NAMES = (*POINTS, "crps", *LOSSES, *BANDS, "nll")  # in the order in which they are shown
Sums = dict[str, tuple[float, float]]


def add(total: Sums, more: Sums) -> Sums:
    """Return the sums of both."""
    names = [*total, *(name for name in more if name not in total)]
    none = (0.0, 0.0)
    return {
        name: tuple(a + b for a, b in zip(total.get(name, none), more.get(name, none), strict=True)) for name in names
    }


def ratios(total: Sums, task: Task) -> dict[str, float]:
    """Return each score that is reported of the task."""
    found = {name: over / under for name, (over, under) in total.items() if under}
    found |= {"rmse": found["mse"] ** 0.5} if "mse" in found else {}
    left_out = {*POINTS} - {*task.points}
    if "rmse" not in task.points:  # there the two quantiles are
        left_out |= {"quantile_loss_0.5", "quantile_loss_0.9"}
    return {name: value for name, value in found.items() if name not in left_out}


def score_points(panel: Panel, number: int, start: int, mean: np.ndarray, median: np.ndarray) -> Sums:
    """Return the scores of one window's point forecasts.

    The squared error is of the mean and the others of the median, which minimise them. MSE and MAE are in the panel's
    units, sMAPE in per cent and MASE as in M4.
    """
    truth = panel.values[number][start : start + panel.task.horizon]
    unit = panel.units[number]
    size = np.abs(truth) + np.abs(median)
    error = np.abs(truth - median)
    smape = np.divide(200 * error, size, out=np.zeros_like(error), where=size > 0)
    base = naive_error(panel.task, panel.values[number][: panel.ends[number]])
    found = {
        "mse": (float(np.square((truth - mean) / unit).sum()), len(truth)),
        "mae": (float((error / unit).sum()), len(truth)),
        "smape": (float(smape.mean()), 1),
        "mase": (float(error.mean() / base), 1) if base > 0 else (0.0, 0),
    }
    return {name: (over, float(under)) for name, (over, under) in found.items()}


def score_paths(panel: Panel, number: int, start: int, paths: np.ndarray) -> Sums:
    """Return the scores of one window's paths (paths, horizon).

    Besides the point forecasts': the share of true values inside the central 50 and 90 % of the paths; the continuous
    ranked probability score in the panel's units; and the quantile losses 0.1 to 0.9, twice their sum over the sum of
    the absolute values, as the mean of the nine.
    """
    truth = panel.values[number][start : start + panel.task.horizon]
    found = score_points(panel, number, start, paths.mean(0), np.median(paths, axis=0))
    for name, (low, high) in BANDS.items():
        lower, upper = np.quantile(paths, [low, high], axis=0)
        found[name] = (float(((lower <= truth) & (truth <= upper)).sum()), float(len(truth)))
    found["crps"] = (float(crps(paths, truth).sum() / panel.units[number]), float(len(truth)))
    above = truth - np.quantile(paths, QUANTILES, axis=0)
    losses = np.maximum(QUANTILES[:, None] * above, (QUANTILES[:, None] - 1) * above).sum(1)
    size = float(np.abs(truth).sum())
    found["quantile_loss"] = (float(2 * losses.mean()), size)
    for at, name in ((4, "quantile_loss_0.5"), (8, "quantile_loss_0.9")):
        found[name] = (float(2 * losses[at]), size)
    return found


def crps(paths: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return E|X - y| - E|X - X'| / 2 of each step, over the sampled X; the second without a path's distance to itself.

    Args:
        paths: (paths, horizon).
        truth: (horizon).
    """
    count = len(paths)
    ordered = np.sort(paths, axis=0)
    weights = 2 * np.arange(1, count + 1) - count - 1
    between = (weights[:, None] * ordered).sum(0) / (count * max(1, count - 1))
    return np.abs(paths - truth).mean(0) - between


def score_naive(panel: Panel, chosen: Sequence[tuple[int, int]], period: int) -> Sums:
    """Return the scores of the naive forecast, which repeats the last `period` values."""
    total: Sums = {}
    ahead = np.arange(panel.task.horizon)
    for number, start in chosen:
        point = panel.values[number][start - period + ahead % period]
        total = add(total, score_points(panel, number, start, point, point))
    return total
