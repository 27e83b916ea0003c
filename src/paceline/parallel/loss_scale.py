"""The factor of the loss under fp16, which keeps small gradients above float16's smallest number.

Gradients are made of the loss times the scale and divided by it before the update (Micikevicius et al. 2018, "Mixed
Precision Training"). Where a gradient is infinite or NaN on some rank, every rank leaves the update out and halves the
scale; after 2,000 updates it is doubled. These are the numbers of torch.amp.GradScaler.

An update can also be left out by a flag that only the device knows (`left_out_if`), under any precision: a gradient
whose norm is not finite must change nothing. Otherwise the host would have to read the norm before it gives the device
the update, and the device, which has then done all else, would wait for the host. torch's fused kernels read a flag on
the device, `found_inf`, as GradScaler uses it.

Traffic: one all_reduce of 4 bytes per step over each axis that gives ranks different parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import LossError, PlanError
from paceline.nouns.plan import Plan
from paceline.parallel.replicate.bucket import local_gradient
from paceline.torch_private.optim import foreach_unscale_

LARGEST_OF_A_MEAN = 2.0**16  # where training begins, as torch.amp.GradScaler does
SMALLEST = 2.0**-40
UPDATES_UNTIL_DOUBLED = 2000
_RESIDUES = ("topk", "powersgd")
# Without fused SGD: where its first step is left out, its momentum is memory that nothing has written to.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


def check_fits_plan(plan: Plan, has_gradients: bool) -> None:
    """Raise PlanError where an overflow on one rank could not be undone on all.

    Args:
        plan: the job's plan, with its compression.
        has_gradients: whether the gradients of the whole batch come to the ranks.
    """
    asked = 'the precision "fp16", which leaves out the update of a step whose gradients overflow'
    if not has_gradients:
        raise PlanError(
            asked,
            "under server the update is done on servers, by gradients that come from one worker after another",
            "write replicate, shard, tensor or pipeline in place of server; or leave precision out",
        )
    if plan.compression in _RESIDUES:
        raise PlanError(
            asked,
            f"compression={plan.compression} adds what it left out to the next step's gradients, where an overflow "
            "would stay",
            "write compression=bf16 or none; or leave precision out",
        )


def unscale(
    parameters: Iterable[torch.nn.Parameter], inverse: float, device: torch.device, comms: Iterable[AxisComm]
) -> torch.Tensor:
    """Multiply all gradients by `inverse`; return one number, above 0 if one is infinite or NaN. Collective.

    Args:
        parameters: the parameters that this rank updates.
        inverse: 1 divided by the scale.
        device: the device where this rank computes.
        comms: the axes over which gradients are spread; empty where every rank has the same.
    """
    # The kernel wants gradients of one device and one dtype.
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = local_gradient(parameter)
        if gradient is None:
            continue
        values = gradient._values() if gradient.is_sparse else gradient
        if values.numel():
            alike.setdefault((values.device, values.dtype), []).append(values)
    flag = torch.zeros(1, device=device)
    for gradients in alike.values():
        found = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        # That of torch.amp.GradScaler: both in one pass over the gradients.
        foreach_unscale_(gradients, found, torch.full_like(found, inverse))
        flag += found.to(device)
    for comm in comms:
        comm.all_reduce(flag)
    return flag


class LossScale:
    """The scale of the loss's sum, the same on every rank.

    Args:
        samples: the number of a batch's samples. Their sum is so many times the mean, so the scale begins so much
            lower.
        device: the device where this rank computes.

    Attributes:
        value: the scale, a power of two.
        updates: the number of updates since the scale was changed last.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        # Powers of two change no digit of a gradient.
        self.value = LARGEST_OF_A_MEAN / 2.0 ** round(math.log2(max(samples, 1)))
        self.updates = 0
        self.device = device

    def unscale(self, parameters: Iterable[torch.nn.Parameter], comms: Iterable[AxisComm]) -> torch.Tensor:
        """Divide all gradients by the scale; return one number, above 0 if one is infinite or NaN. Collective.

        Args:
            parameters: the parameters that this rank updates.
            comms: the axes over which gradients are spread; empty where every rank has the same.
        """
        return unscale(parameters, 1.0 / self.value, self.device, comms)

    def update(self, has_overflown: bool) -> None:
        """Choose the next step's scale.

        Raises:
            LossError: gradients overflow at every scale.
        """
        if not has_overflown:
            self.updates += 1
            if self.updates == UPDATES_UNTIL_DOUBLED:
                self.value *= 2.0
                self.updates = 0
            return
        self.value /= 2.0
        self.updates = 0
        if self.value < SMALLEST:
            raise LossError(
                "gradients should be finite at some scale of the loss",
                f"they overflow float16 at every one, down to {self.value:.1e}; the parameters were left as they were",
                "use precision float32 or bf16, or look for operations whose gradient is infinite, such as sqrt(0)",
            )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's scale."""
        self.value = float(state["value"])
        self.updates = int(state["updates"])


def can_leave_out(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return True if an update can be left out by a flag on the device; the CPU needs none."""
    return device.type != "cpu" and is_fused_on(optimizer, device)


def is_fused_on(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return True if the optimizer is Adam or AdamW with fused=True, and all of its parameters are on the device.

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
