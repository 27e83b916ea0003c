"""DeepAR (Salinas et al. 2017): an LSTM that gives the distribution of the next value, from which paths are sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import windows
from series import Panel
from torch import nn
from torch.nn import functional as F

LIKELIHOODS = ("gaussian", "student-t", "negative-binomial")
_LEAST = 1e-4  # a deviation of 0 would have no logarithm
State = list[tuple[torch.Tensor, torch.Tensor]]


class DeepAR(nn.Module):
    """LSTM layers and a linear head of the distribution's parameters.

    Each layer is an nn.LSTM of its own: `pipeline` cuts between operations, and several layers in one are one.

    Args:
        width: inputs of a step.
        hidden: units of a layer.
        layers: how many.
        likelihood: one of LIKELIHOODS.
    """

    def __init__(self, width: int, hidden: int, layers: int, likelihood: str) -> None:
        super().__init__()
        sizes = [width, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in sizes)
        self.head = nn.Linear(hidden, 3 if likelihood == "student-t" else 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the raw parameters of every step (batch, length, parameters)."""
        for layer in self.layers:
            inputs = layer(inputs)[0]
        return self.head(inputs)

    def advance(self, inputs: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the same for steps that follow `state`, and the state after them."""
        after = []
        for number, layer in enumerate(self.layers):
            inputs, end = layer(inputs, None if state is None else state[number])
            after.append(end)
        return self.head(inputs), after


def parameters_of(raw: torch.Tensor, scale: torch.Tensor, likelihood: str) -> list[torch.Tensor]:
    """Return the distribution's parameters in the units of the data.

    Mean and deviation; for Student's t with the degrees of freedom; mean and dispersion of the negative binomial, whose
    variance is mean + dispersion * mean^2.
    """
    first, second, *third = raw.unbind(-1)
    if likelihood == "negative-binomial":
        return [scale * (F.softplus(first) + _LEAST), (F.softplus(second) + _LEAST) / scale.sqrt()]
    spread = [2 + F.softplus(each) for each in third]
    return [scale * first, scale * (F.softplus(second) + _LEAST), *spread]


def negative_log_likelihood(raw: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Return -log p of each value (batch, length)."""
    mean, spread, *more = parameters_of(raw, scale[:, None], kind)
    if kind == "negative-binomial":
        shape = 1 / spread
        total = mean + shape
        log_p = torch.lgamma(target + shape) - torch.lgamma(shape) - torch.lgamma(target + 1)
        return -(log_p + shape * (shape / total).log() + target * (mean / total).log())
    error = (target - mean) / spread
    if kind == "gaussian":
        return 0.5 * error.square() + spread.log() + 0.5 * math.log(2 * math.pi)
    (freedom,) = more
    log_p = torch.lgamma((freedom + 1) / 2) - torch.lgamma(freedom / 2) - 0.5 * (freedom * math.pi).log()
    return (freedom + 1) / 2 * torch.log1p(error.square() / freedom) + spread.log() - log_p


def draw(random: np.random.Generator, parameters: Sequence[np.ndarray], kind: str) -> np.ndarray:
    """Return one value for each path of one series."""
    mean, spread, *more = parameters
    if kind == "negative-binomial":
        shape = 1 / spread
        return random.negative_binomial(shape, shape / (shape + mean)).astype(float)
    if kind == "gaussian":
        return mean + spread * random.standard_normal(len(mean))
    # Bailey 1994: a t variate of any degrees of freedom from two uniform numbers, as Box and Muller's normal one.
    (freedom,) = more
    radius, angle = 1 - random.random(len(mean)), random.random(len(mean))
    return mean + spread * np.sqrt(freedom * (radius ** (-2 / freedom) - 1)) * np.cos(2 * np.pi * angle)


@torch.no_grad()
def sample_paths(model: DeepAR, panel: Panel, chosen: Sequence[tuple[int, int]], paths: int, seed: int) -> np.ndarray:
    """Return sampled futures (windows, paths, horizon): each value is drawn, and is an input of the next steps.

    Each window draws from a generator of its own, so that its paths depend neither on the other windows nor on how many
    ranks share them.

    Args:
        model: whole, in evaluation mode.
        panel: the series.
        chosen: the windows.
        paths: how many of each window.
        seed: of the generators.
    """
    task, kind = panel.task, panel.task.likelihood
    like = next(model.parameters())
    scales = np.array([windows.scale_of(panel, *each) for each in chosen])
    context = torch.stack([windows.window(panel, *each)["inputs"][: task.context] for each in chosen]).to(like)
    _, state = model.advance(context, None)
    state = [tuple(part.repeat_interleave(paths, dim=1) for part in pair) for pair in state]
    random = [np.random.default_rng([seed, *each]) for each in chosen]
    reach = max(task.lags)
    history = np.stack([_before(panel, *each, reach) for each in chosen])
    # (windows, paths, values before and after): what is drawn is written behind the history.
    values = np.concatenate(
        [np.repeat(history[:, None], paths, axis=1), np.zeros((len(chosen), paths, task.horizon))], 2
    )
    ahead = np.arange(task.horizon)
    covariates = np.stack(
        [
            windows.known(panel, number, start + ahead, scale)
            for (number, start), scale in zip(chosen, scales, strict=True)
        ]
    )
    scale = torch.from_numpy(scales).to(like).repeat_interleave(paths)
    for step in range(task.horizon):
        lags = values[:, :, [reach + step - lag for lag in task.lags]] / scales[:, None, None]
        more = np.repeat(covariates[:, None, step], paths, axis=1)
        inputs = torch.from_numpy(np.concatenate([lags, more], axis=2)).to(like).flatten(0, 1)
        raw, state = model.advance(inputs[:, None], state)
        parameters = parameters_of(raw[:, 0], scale, kind)
        rows = [each.double().cpu().numpy().reshape(len(chosen), paths) for each in parameters]
        for at, generator in enumerate(random):
            values[at, :, reach + step] = draw(generator, [each[at] for each in rows], kind)
    return values[:, :, reach:]


def _before(panel: Panel, number: int, start: int, reach: int) -> np.ndarray:
    """Return the `reach` values before `start`; 0 before the series begins."""
    values = panel.values[number][max(0, start - reach) : start]
    return np.concatenate([np.zeros(reach - len(values)), values])
