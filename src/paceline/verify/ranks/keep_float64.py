"""While float64 is verified, nothing is narrowed: `logits.float()` in a loss would round as float32 does.

Layers that narrow on purpose (RMSNorm in float32, a softmax with `dtype=torch.float32`) are exact in float32's digits
alone; split over ranks they differ by 1e-7, and that is no bug. So in float64 runs, in the reference and on the ranks
alike, a narrower floating dtype asked of a float64 tensor stays float64.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import paceline

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = ("float", "half", "bfloat16")
_WITH_DTYPE = ("to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum", "prod")
# What is judged must do what it does: only the person's code, and torch's and transformers', is kept wide.
_PACKAGES = ("parallel", "deferred_init", "comm", "train", "checkpoint")
_JUDGED = tuple(str(Path(paceline.__file__).parent / name) + os.sep for name in _PACKAGES)


@contextmanager
def kept_wide(is_on: bool) -> Iterator[None]:
    """Let narrower dtypes be ignored where a float64 tensor is asked for one."""
    places: list[tuple[Any, str, Any]] = [(torch.Tensor, name, _cast) for name in _CASTS]
    places += [(torch.Tensor, name, _asked) for name in _WITH_DTYPE]
    places += [(where, name, _asked) for where in (F, torch) for name in ("softmax", "log_softmax")]
    kept = [(where, name, vars(where).get(name), getattr(where, name)) for where, name, _ in places]
    try:
        if is_on:
            for (where, name, wrap), (_, _, _, plain) in zip(places, kept, strict=True):
                setattr(where, name, wrap(plain))
        yield
    finally:
        for where, name, own, _ in kept if is_on else []:
            if own is None:
                delattr(where, name)
            else:
                setattr(where, name, own)


def _cast(plain: Callable[..., Any]) -> Callable[..., Any]:
    def same(tensor: Any, *arguments: Any, **named: Any) -> Any:
        return tensor if _is_kept(tensor) else plain(tensor, *arguments, **named)

    return same


def _asked(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and _is_kept(tensor):
            arguments = tuple(_widened(one) for one in arguments)
            named = {key: _widened(one) for key, one in named.items()}
        return plain(tensor, *arguments, **named)

    return call


def _is_kept(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 and not sys._getframe(2).f_code.co_filename.startswith(_JUDGED)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.double()  # x.to(other): other's dtype is what is asked for
    return value
