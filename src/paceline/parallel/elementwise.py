"""Check that an optimizer can work on a part of a parameter, by trying it, whatever its class.

An optimizer that updates each element by that element's own history (SGD, Adam and their kin) gives the
same on rows as on the whole. One that looks at the whole matrix (a norm in LAMB and LARS, factors in
Adafactor, an orthogonalisation in Muon) gives something else, without a word. So it is tried on a small
matrix, once whole and once in two halves, before the first step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from paceline.nouns.errors import PlanError

ROWS = 6
COLUMNS = 4
STEPS = 2
TOLERANCE = 1e-12  # relative, in float64; what depends on other elements is off by percents
LEARNING_RATE = 0.1  # a schedule may begin at 0, where every optimizer agrees with every other
# Want a CUDA device, or compute the same by another kernel.
_OFF = ("capturable", "fused", "foreach")


def check_optimizer(optimizer: torch.optim.Optimizer, axis: str) -> None:
    """Raise unless `optimizer`, with the settings of each of its groups, updates element by element.

    Args:
        optimizer: the person's.
        axis: that cuts parameters, for the error.

    Raises:
        PlanError: it does not, or it can't be tried.
    """
    # Groups that differ in sizes of numbers alone take the same path through the optimizer's code.
    settings = {repr(_kind(group)): group for group in optimizer.param_groups}  # one group of each kind
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        for group in settings.values():
            try:
                uncut = _try(optimizer, group, [ROWS])
                halves = _try(optimizer, group, [ROWS // 2] * 2)
            except Exception as error:  # whatever a person's class may raise
                raise PlanError(
                    f"the axis {axis} gives the optimizer a part of each parameter, and checks beforehand whether "
                    f"{type(optimizer).__name__} can work on parts",
                    f"it can't be tried on a small matrix ({type(error).__name__}: {error})",
                    f"make it constructible from its defaults, or write replicate in place of {axis}",
                ) from error
            if not torch.allclose(uncut, halves, rtol=TOLERANCE, atol=TOLERANCE * float(uncut.abs().max())):
                raise PlanError(
                    f"the axis {axis} gives the optimizer a part of each parameter",
                    f"{type(optimizer).__name__} updates an element from the others of its parameter: "
                    f"two halves of a matrix end {_distance(uncut, halves):.1g} away from the whole matrix",
                    "take an optimizer that updates element by element, such as AdamW, or write replicate",
                )


def _kind(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, where two numbers differ only if one of them is 0."""
    kind = {}
    for key, value in group.items():
        if key in ("params", "lr", "initial_lr"):
            continue
        is_number = isinstance(value, float | torch.Tensor) and not _is_long(value)
        kind[key] = value != 0 if is_number else value
    return kind


def _is_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1


def _try(optimizer: torch.optim.Optimizer, group: dict[str, Any], rows: list[int]) -> torch.Tensor:
    """Return what a fixed random matrix, cut by `rows`, becomes in a few steps; each piece has its own optimizer."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    gradients = torch.randn(STEPS, ROWS, COLUMNS, generator=random, dtype=torch.float64)
    pieces = []
    first = 0
    for count in rows:
        piece = torch.nn.Parameter(start[first : first + count].clone())
        twin = _twin(optimizer, group, piece)
        for gradient in gradients:
            piece.grad = gradient[first : first + count].clone()
            twin.step()
        pieces.append(piece.detach())
        first += count
    return torch.cat(pieces)


def _twin(optimizer: torch.optim.Optimizer, group: dict[str, Any], piece: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings for one small parameter."""
    make: Any = type(optimizer)
    arguments = inspect.signature(make).parameters
    defaults = optimizer.defaults
    # A class may keep more defaults than its constructor takes.
    if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        defaults = {key: value for key, value in defaults.items() if key in arguments}
    settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    twin: torch.optim.Optimizer = make([{"params": [piece], **_plain(settings)}], **_plain(defaults))
    return twin


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for a small tensor on the CPU, with a learning rate that moves it."""
    plain = {}
    for key, value in settings.items():
        plain[key] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    for key in _OFF:
        if plain.get(key):
            plain[key] = False
    if plain.get("lr") is not None:
        plain["lr"] = LEARNING_RATE
    return plain


def _distance(uncut: torch.Tensor, halves: torch.Tensor) -> float:
    return float((uncut - halves).abs().max() / uncut.abs().max())
