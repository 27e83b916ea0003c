"""Take this rank's part out of a DTensor, or all of it, and make a DTensor of a part, as FSDP2's parameters are.

torch.distributed.tensor takes 0.6 s to import, so it is imported only where a plan shards. Before that no tensor is a
DTensor, and these functions find out without an import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch


def _dtensor() -> type | None:
    """Return the class of DTensors; None before it is imported, also while another thread imports it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_part(value: object) -> bool:
    """True if `value` is a tensor that is spread over ranks."""
    dtensor = _dtensor()
    return dtensor is not None and isinstance(value, dtensor)


def has_parts(types: Sequence[type]) -> bool:
    """True if one of these types is a DTensor: its operation is dispatched once more, on local parts."""
    dtensor = _dtensor()
    return dtensor is not None and any(issubclass(kind, dtensor) for kind in types)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that is spread over ranks; any other tensor itself. Collective, and not in the ledger."""
    if not is_part(tensor):
        return tensor
    whole: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is spread over ranks, sharing its memory; any other tensor itself."""
    if not is_part(tensor):
        return tensor
    with torch.no_grad():  # else autograd would hand out a copy of the part's identity, not the part
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def like_parameter(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `part` as this rank's part of a DTensor with the mesh and placements of `parameter`."""
    if not is_part(parameter):
        return part
    from torch.distributed.tensor import DTensor

    like: DTensor = parameter  # type: ignore[assignment]
    # run_check=True would communicate, outside of the ledger. Without shape and stride, from_local assumes equal parts.
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
