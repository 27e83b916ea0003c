"""Forecasts of statsmodels to compare with: STL with ARIMA, and a trend with Fourier terms as Prophet's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scores
from series import Panel

from paceline.nouns.errors import UsageError

HISTORY = 672  # the last values that a baseline is fitted to: four weeks of hours


def score_baselines(panel: Panel, chosen: Sequence[tuple[int, int]]) -> dict[str, scores.Sums]:
    """Return each baseline's sums: it is fitted anew to what precedes each window."""
    methods = {"STL + ARIMA(2,1,1)": arima, "trend + Fourier": trend_and_fourier}
    found: dict[str, scores.Sums] = {}
    for name, method in methods.items():
        total: scores.Sums = {}
        for number, start in chosen:
            history = panel.values[number][max(0, start - HISTORY) : start]
            point = _quietly(method, history, panel.task.period, panel.task.horizon)
            total = scores.add(total, scores.score_points(panel, number, start, point, point))
        found[name] = total
    return found


def check_installed() -> None:
    """Raise UsageError where statsmodels is not installed."""
    try:
        import statsmodels.api
        import statsmodels.tsa.api  # noqa: F401 - the first import shows its warnings again, if they were switched off
    except ImportError:
        raise UsageError(
            "--baselines fits models of statsmodels", "it is not installed", "pip install statsmodels, or leave it out"
        ) from None


def arima(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Take the season off by STL where there is one, and forecast the rest by ARIMA(2, 1, 1)."""
    from statsmodels.tsa.api import ARIMA, STLForecast

    if period > 1:
        model: Any = STLForecast(history, ARIMA, model_kwargs={"order": (2, 1, 1)}, period=period)
    else:
        model = ARIMA(history, order=(2, 1, 1))
    return np.asarray(model.fit().forecast(horizon))


def trend_and_fourier(history: np.ndarray, period: int, horizon: int) -> np.ndarray:
    """Fit a trend that may change its slope at five places, and waves of a day and a week, by least squares.

    That is Prophet's model without its priors. A series without a period has the trend alone.
    """
    from statsmodels.api import OLS
    from statsmodels.tsa.deterministic import DeterministicProcess, Fourier, TimeTrend

    ahead = np.arange(len(history) + horizon)
    terms: list[Any] = [TimeTrend(constant=True, order=1)]
    if period > 1:
        terms.append(Fourier(period, 4))
    if len(history) >= 4 * 7 * period > 7:
        terms.append(Fourier(7 * period, 3))
    index = np.arange(len(history))
    process = DeterministicProcess(_as_index(index), additional_terms=terms)
    inside, outside = process.in_sample().to_numpy(), process.out_of_sample(horizon).to_numpy()
    places = np.linspace(0, 0.8 * len(history), 7)[1:-1]
    bends = np.maximum(ahead[:, None] - places, 0) / len(history)
    design = np.concatenate([inside, bends[: len(history)]], axis=1)
    fitted = OLS(history, design).fit()
    return fitted.predict(np.concatenate([outside, bends[len(history) :]], axis=1))


def _as_index(index: np.ndarray) -> Any:
    import pandas as pd

    return pd.RangeIndex(len(index))


def _quietly(method: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
    """Call it without the warnings of fits that have not converged: they are part of a baseline's score."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method(*arguments)
