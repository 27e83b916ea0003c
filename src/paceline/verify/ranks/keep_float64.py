"""Keep float64 tensors wide while float64 is verified: `logits.float()` in a loss would round as float32 does.

Layers that narrow on purpose (RMSNorm in float32, a softmax with `dtype=torch.float32`) are exact only in float32's
digits; split over ranks they differ by 1e-7, and that is no bug. So in float64 runs, in the reference and on the ranks
alike, a narrower floating dtype asked of a float64 tensor stays float64.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F

import paceline
from paceline.comm.dtypes import wide_dtype
from paceline.nouns.patching import patched
from paceline.train.precision import grouped_products_in_float64

_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_CASTS = ("float", "half", "bfloat16")
# Make complex numbers of float32's digits where code written for float32 asks for them by dtype.
_FACTORIES = ("zeros", "ones", "empty", "full")
# Functions with a dtype among their arguments.
_WITH_DTYPE = ("to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum", "prod")
# What is judged must do what it does: only the user's code, and torch's and transformers', is kept wide.
_PACKAGES = ("parallel", "deferred_init", "comm", "train", "checkpoint")
_JUDGED = tuple(str(Path(paceline.__file__).parent / name) + os.sep for name in _PACKAGES)


_is_suspended = False


@contextmanager
def dtypes_as_asked() -> Iterator[None]:
    """Give every tensor the dtype that is asked for, within `kept_wide` too: a model is made as for training."""
    global _is_suspended
    before, _is_suspended = _is_suspended, True
    try:
        yield
    finally:
        _is_suspended = before


@contextmanager
def kept_wide(is_on: bool) -> Iterator[None]:
    """Let narrower dtypes be ignored where a float64 tensor is asked for one; do nothing unless `is_on`."""
    if not is_on:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(grouped_products_in_float64())
        for owner, name, wrap in _replacements():
            stack.enter_context(patched(owner, **{name: wrap(getattr(owner, name))}))
        yield


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions of torch that are replaced: the owner, the name, and the wrapper of the original."""
    replacements: list[tuple[Any, str, Callable[..., Any]]] = []
    replacements += [(torch.Tensor, name, _without_cast) for name in _CASTS]
    replacements += [(torch.Tensor, name, _with_wide_dtype) for name in _WITH_DTYPE]
    for owner in (F, torch):
        replacements += [(owner, name, _with_wide_dtype) for name in ("softmax", "log_softmax")]
    replacements.append((torch.Tensor, "cfloat", _as_wide_complex))
    replacements.append((torch, "full", _with_room))
    replacements += [(torch, name, _with_wide_complex) for name in _FACTORIES]
    return replacements


def _with_room(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `torch.full((), torch.finfo(float64).min)` hold its number, which a float32, the default, can't."""

    def full(size: Any, fill_value: Any, *arguments: Any, **named: Any) -> Any:
        largest = torch.finfo(torch.get_default_dtype()).max
        if isinstance(fill_value, float) and named.get("dtype") is None and largest < abs(fill_value) < math.inf:
            named["dtype"] = torch.float64
        return original(size, fill_value, *arguments, **named)

    return full


def _with_wide_complex(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `torch.zeros(..., dtype=torch.cfloat)` hold what is computed of float64 tensors."""

    def make(*arguments: Any, **named: Any) -> Any:
        if named.get("dtype") is torch.complex64 and _is_kept_wide(sys._getframe(1)):
            named["dtype"] = torch.complex128
        return original(*arguments, **named)

    return make


def _as_wide_complex(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(tensor: Any, *arguments: Any, **named: Any) -> Any:
        return tensor.cdouble(*arguments, **named) if _stays_wide(tensor) else original(tensor, *arguments, **named)

    return cast


def _without_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def same(tensor: Any, *arguments: Any, **named: Any) -> Any:
        return tensor if _stays_wide(tensor) else original(tensor, *arguments, **named)

    return same


def _with_wide_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and _stays_wide(tensor):
            arguments = tuple(_widened(argument) for argument in arguments)
            named = {name: _widened(argument) for name, argument in named.items()}
        return original(tensor, *arguments, **named)

    return call


def _stays_wide(tensor: torch.Tensor) -> bool:
    """True for a wide tensor, unless the caller of the replaced function is code that is judged."""
    # The caller is above this function and the replacement.
    return tensor.dtype in (torch.float64, torch.complex128) and _is_kept_wide(sys._getframe(2))


def _is_kept_wide(caller: FrameType) -> bool:
    return not _is_suspended and not caller.f_code.co_filename.startswith(_JUDGED)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return wide_dtype(value) if value in _NARROW else value
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.to(wide_dtype(value.dtype))  # x.to(other): other's dtype is what is asked for
    return value
