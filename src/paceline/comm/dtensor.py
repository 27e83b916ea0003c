"""Take this rank's part out of a DTensor, and make a DTensor of a part, as FSDP2's parameters are.

torch.distributed.tensor takes over a second to import, so it is left alone until a plan shards.
"""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part: torch.Tensor = tensor.to_local()
    return part


def like_parameter(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `part` as this rank's part of a DTensor with the mesh and placements of `parameter`."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    like: DTensor = parameter  # type: ignore[assignment]
    # run_check=True would communicate, outside of the ledger. Without shape and stride, from_local assumes equal parts.
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
