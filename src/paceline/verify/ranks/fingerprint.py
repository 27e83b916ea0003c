"""Make fingerprints: a few numbers that stand for a tensor, and that add up over its pieces.

Two weighted sums with fixed weights by place, and the sum of squares. The weighted sums are linear: those of a split
tensor's pieces, each weighted by its places in the whole, add up to that of the whole.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm.pytree import dense_tensors_in
from paceline.verify.judge.fingerprints import Print

# Of the weights' cosines: two weightings by place, so that what cancels in one sum shows in the other.
_PHASES = (1.2345678, 0.7071067)


def fingerprint(values: torch.Tensor, places: torch.Tensor | None = None) -> Print:
    """Return the fingerprint of a tensor or of a piece of one.

    Args:
        values: a tensor, or a piece of one.
        places: of each element in the flattened whole, in the shape of `values`; None: it is whole.
    """
    flat = values.detach().reshape(-1).to(torch.float64)
    if places is None:
        places = torch.arange(flat.numel(), dtype=torch.float64)
    angles = places.reshape(-1).double()
    sums = [float((flat * torch.cos(angles * phase + 0.3)).sum()) for phase in _PHASES]
    return [*sums, float((flat * flat).sum()), float(flat.numel())]


def prints_of(batch: Any) -> list[Print]:
    """Return the fingerprints of a batch's tensors, complex ones apart."""
    return [fingerprint(tensor.to_dense()) for tensor in dense_tensors_in(batch) if not tensor.is_complex()]


def is_shown(value: Any) -> bool:
    """True if a value is a tensor that can be fingerprinted: dense, with floating numbers and memory."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    return value.is_floating_point() and not value.is_meta and not value.is_sparse
