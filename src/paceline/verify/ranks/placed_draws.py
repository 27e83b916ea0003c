"""Random numbers of a model's forward pass that depend on where they are drawn, so that no layout can change them.

While verifying, `torch.rand` in a forward pass (stochastic depth, random masks, noise) can't come from a stream: the
order of draws and the samples of a rank are the plan's. A number is then a hash of the module and the line that draw it
and of its place in the tensor, the first dimension left out: that is the batch, of which a rank has a part. So all
samples draw the same, in every step.

Dropout has values to depend on instead: see `randomness.py`.
"""

from __future__ import annotations

import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint

from paceline.nouns.patching import patched

_MOST = 1 << 16  # numbers of places
_TORCH = str(Path(torch.__file__).parent) + os.sep
_CHECKPOINT = torch.utils.checkpoint.__file__
_FOLDER = str(Path(__file__).parent) + os.sep
_CLOSE = 1e-9  # to 0 and 1, where a normal number would be infinite


class Places:
    """Where a forward pass draws.

    Attributes:
        names: the names of the modules of the models that a loss was called with.
        copies: the names of modules that run in the place of the model's, as a rank that splits the model has some.
        is_in_loss: True while a loss is being called.
        has_drawn: True if a number has been drawn by place.
    """

    def __init__(self) -> None:
        self.names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.copies: Mapping[torch.nn.Module, str] = {}
        self.is_in_loss = False
        self.has_drawn = False

    def number(self) -> int | None:
        """Return a number of the place that draws now; None: it draws from the stream, as a data set's modules do.

        Of a module it is the module and the lines of its code; else the lines of the loss, or of a function that
        activation checkpointing calls: in a backward pass it is called by nobody else.
        """
        lines: list[str] = []
        frame: FrameType | None = sys._getframe(2)  # above this function and the replacement
        while frame is not None:
            file = frame.f_code.co_filename
            module = frame.f_locals.get("self")
            name = None
            if isinstance(module, torch.nn.Module):
                name = self.names.get(module, self.copies.get(module))
            if name is not None:
                return self._number(name, [*lines, f"{file} {frame.f_lineno}"])
            if file == _CHECKPOINT:
                return self._number("", lines)
            if file.startswith(_FOLDER):
                break
            if not file.startswith(_TORCH):
                lines.append(f"{file} {frame.f_lineno}")
            frame = frame.f_back
        return self._number("", lines) if self.is_in_loss else None

    def _number(self, name: str, lines: list[str]) -> int:
        self.has_drawn = True
        return zlib.crc32("\n".join([name, *lines]).encode()) % _MOST


PLACES = Places()  # of this process


@contextmanager
def call_of_the_loss(model: torch.nn.Module) -> Iterator[None]:
    """Call the loss of a model inside."""
    for name, module in model.named_modules():
        PLACES.names.setdefault(module, name)
    before, PLACES.is_in_loss = PLACES.is_in_loss, True
    try:
        yield
    finally:
        PLACES.is_in_loss = before


@contextmanager
def drawn_by_place() -> Iterator[None]:
    """Replace torch's functions that draw by those that draw by place, for the models that a loss is called with."""
    with ExitStack() as stack:
        for name, values in (("rand", _uniform), ("randn", _normal)):
            draw = _making(getattr(torch, name), values)
            alike = _making_alike(getattr(torch, f"{name}_like"), values)
            stack.enter_context(patched(torch, **{name: draw, f"{name}_like": alike}))
        stack.enter_context(patched(torch, bernoulli=_chosen(torch.bernoulli)))
        for name, change in _CHANGES.items():
            original = getattr(torch.Tensor, name)
            stack.enter_context(patched(torch.Tensor, **{name: _changing(original, change)}))
        yield


def _uniform(shape: tuple[int, ...], place: int, device: Any) -> torch.Tensor:
    """Return numbers between 0 and 1, in float64: a sine's digits as a hash, as shaders make noise."""
    inner = shape[1:]
    index = torch.arange(math.prod(inner), dtype=torch.float64, device=device)
    mixed = torch.sin(index * 12.9898 + place * 0.7548776662 + 0.5) * 43758.5453
    return (mixed - torch.floor(mixed)).reshape(1, *inner).expand(shape) if shape else (mixed - torch.floor(mixed))[0]


def _normal(shape: tuple[int, ...], place: int, device: Any) -> torch.Tensor:
    values: torch.Tensor = torch.special.ndtri(_uniform(shape, place, device).clamp(_CLOSE, 1 - _CLOSE))
    return values


Values = Callable[[tuple[int, ...], int, Any], torch.Tensor]


def _making(original: Callable[..., Any], values: Values) -> Callable[..., Any]:
    """Replace `torch.rand(size, ...)`."""

    def draw(*size: Any, **named: Any) -> Any:
        place = None if named.get("generator") is not None or named.get("out") is not None else PLACES.number()
        if place is None:
            return original(*size, **named)
        shape = tuple(named["size"]) if "size" in named else _shape_of(size)
        dtype = named.get("dtype") or torch.get_default_dtype()
        drawn = values(shape, place, named.get("device")).to(dtype).contiguous()
        return drawn.requires_grad_() if named.get("requires_grad") else drawn

    return draw


def _shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], list | tuple) else tuple(size)


def _making_alike(original: Callable[..., Any], values: Values) -> Callable[..., Any]:
    """Replace `torch.rand_like(tensor, ...)`."""

    def draw(tensor: torch.Tensor, **named: Any) -> Any:
        place = PLACES.number()
        if place is None:
            return original(tensor, **named)
        device = named.get("device") or tensor.device
        return values(tuple(tensor.shape), place, device).to(named.get("dtype") or tensor.dtype).contiguous()

    return draw


def _chosen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch.bernoulli(probabilities)`."""

    def draw(input: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        place = None if arguments or named else PLACES.number()
        if place is None:
            return original(input, *arguments, **named)
        return (_uniform(tuple(input.shape), place, input.device) < input).to(input.dtype)

    return draw


def _changing(original: Callable[..., Any], change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Replace `tensor.uniform_(...)` and the like."""

    def draw(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        place = None if named.get("generator") is not None else PLACES.number()
        if place is None:
            return original(tensor, *arguments, **named)
        named.pop("generator", None)
        return tensor.copy_(change(tuple(tensor.shape), place, tensor.device, *arguments, **named))

    return draw


def _between(
    shape: tuple[int, ...], place: int, device: Any, low: float = 0.0, high: float = 1.0, **bounds: float
) -> torch.Tensor:
    low, high = bounds.get("from", low), bounds.get("to", high)
    return low + (high - low) * _uniform(shape, place, device)


def _around(shape: tuple[int, ...], place: int, device: Any, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return mean + std * _normal(shape, place, device)


def _bernoulli(shape: tuple[int, ...], place: int, device: Any, p: Any = 0.5) -> torch.Tensor:
    is_one: torch.Tensor = _uniform(shape, place, device) < p
    return is_one


def _waiting(shape: tuple[int, ...], place: int, device: Any, lambd: float = 1.0) -> torch.Tensor:
    waited: torch.Tensor = -torch.log1p(-_uniform(shape, place, device).clamp(_CLOSE, 1 - _CLOSE)) / lambd
    return waited


_CHANGES: dict[str, Callable[..., torch.Tensor]] = {
    "uniform_": _between, "normal_": _around, "bernoulli_": _bernoulli, "exponential_": _waiting,
}  # fmt: skip
