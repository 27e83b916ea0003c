"""DTensors, as FSDP2 makes parameters of: this rank's part in and out.

torch.distributed.tensor takes over a second to import, so it is left alone until a plan shards.
"""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def like_parameter(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`part` as this rank's part of a DTensor that lies as `parameter` does."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    whole: DTensor = parameter  # type: ignore[assignment]
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
