"""Leave an update out by what the device alone knows, without the host waiting for it.

A gradient whose norm is not finite must change nothing. The host would have to read the norm before it gives the device
the update, and the device, which has then done all else, would wait for the host. torch's fused kernels read a flag on
the device instead, `found_inf`, as `torch.amp.GradScaler` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Fused SGD is none of them: left out in its first step, it keeps momentum of memory that nobody has written to.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def can_leave_out(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """True if an update can be left out on a device, which the host would wait for otherwise."""
    return device.type != "cpu" and is_fused_on(optimizer, device)


def is_fused_on(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """True if the optimizer is Adam or AdamW with fused=True, and all that it updates is on the device.

    The flag would be copied to the host for parameters that are there, and read before it has come.
    """
    if type(optimizer) not in _FUSED:
        return False
    for group in optimizer.param_groups:
        if not group["fused"] or any(parameter.device.type != device.type for parameter in group["params"]):
            return False
    return True


@contextmanager
def left_out_if(optimizer: torch.optim.Optimizer, is_bad: torch.Tensor) -> Iterator[None]:
    """Have `optimizer.step()` change neither parameters nor its state where `is_bad`, one number, is not zero."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = is_bad.to(torch.float32)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
