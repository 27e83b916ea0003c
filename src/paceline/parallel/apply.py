"""The one place where strategies meet: it says which strategy fills which moment of a step, in what order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel import local
from paceline.parallel.replicate import Replicate
from paceline.parallel.sums import Sums


@dataclass(frozen=True, slots=True)
class Parallel:
    """The moments of a step, as this rank's strategies fill them."""

    replicate: Replicate
    forward_backward: Callable[[Sequence[Any], bool], bool]
    reduce_gradients: Callable[[bool], Sums]


def parallelize(
    model: torch.nn.Module,
    workload: Workload,
    comms: Mapping[str, AxisComm],
    plan: Plan,
    device: torch.device,
) -> Parallel:
    """Place the model on the mesh and say what each moment of a step is.

    `forward_backward(microbatches, is_stopping)` returns whether gradients are those of the mean already;
    `reduce_gradients` wants to know.
    """
    replicate = Replicate(model, comms["replicate"], plan, device)
    autocast = functools.partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"
    )

    def forward_backward(microbatches: Sequence[Any], is_stopping: bool) -> bool:
        local.forward_backward(model, workload.loss, microbatches, replicate, autocast, is_stopping)
        return local.is_scaled_before(replicate, microbatches)

    def reduce_gradients(is_mean: bool) -> Sums:
        sums = replicate.reduce_gradients()
        if replicate.comm.size == 1 and not is_mean and sums.weight:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1 / sums.weight
        return sums

    return Parallel(replicate, forward_backward, reduce_gradients)
