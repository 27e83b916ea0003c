"""The precision of a workload as a context of torch.autocast."""

from __future__ import annotations

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype in which matrix products are computed; None for that of the parameters."""
    return _AUTOCAST.get(precision)


def autocast(precision: str, device_type: str) -> torch.autocast:
    """Return the context in which a model of this precision is called.

    Args:
        precision: of the workload.
        device_type: "cpu" or "cuda".
    """
    dtype = autocast_dtype(precision)
    return torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
