"""The precision of a workload as a context of torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype in which matrix products are computed; None for that of the parameters."""
    return _AUTOCAST.get(precision)


def autocast_of(precision: str, device_type: str) -> Callable[[], torch.autocast]:
    """Return what makes the context in which a model of this precision is called.

    Args:
        precision: of the workload.
        device_type: "cpu" or "cuda".
    """
    dtype = autocast_dtype(precision)
    return partial(torch.autocast, device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def autocast(precision: str, device_type: str) -> torch.autocast:
    """Return the context in which a model of this precision is called."""
    return autocast_of(precision, device_type)()
