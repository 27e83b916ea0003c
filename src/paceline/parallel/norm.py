"""Compute the norm of the whole gradient, whichever ranks have its parts, and scale gradients to clip by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.squared_norm import square_norm, square_norm_of
from paceline.parallel.replicate.bucket import local_gradient
from paceline.torch_private.optim import foreach_mul_


def global_norm(
    parameters: Iterable[torch.nn.Parameter], counted: Mapping[torch.nn.Parameter, bool], comms: Iterable[AxisComm]
) -> torch.Tensor:
    """Return the Euclidean norm of the gradient of all parameters, equal on every rank.

    Args:
        parameters: the parameters with gradients here, whole or in part.
        counted: whether this rank counts a parameter's part: of the ranks that hold the same part only one does.
        comms: the axes over which parts are spread; empty where every rank has everything.
    """
    # In float64, so that it does not depend on how tensors are cut. On the gradients' device from the start: the host
    # would wait for a copy.
    parameters = list(parameters)
    device = next((parameter.device for parameter in parameters if not parameter.is_meta), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    together: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = local_gradient(parameter)
        if gradient is None or not counted.get(parameter, True):
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.device.type == "cpu":
            total = total.to(values.device) + square_norm(values)
        elif values.numel():
            together.setdefault(values.device, []).append(values)
    for of_device in together.values():
        total = total.to(device) + square_norm_of(of_device).to(device)
    # Squares add up over axes one after another: each part is counted by one rank only.
    for comm in comms:
        total = total.reshape(1)
        comm.all_reduce(total)
    return total.reshape(()).sqrt()


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient by a scalar, in place."""
    dense = []
    sparse = []
    for parameter in parameters:
        gradient = local_gradient(parameter)
        if gradient is None:
            continue
        if gradient.is_sparse:
            sparse.append(gradient)
        elif gradient.numel():
            dense.append(gradient)
    if dense:
        foreach_mul_(dense, factor.to(dense[0].device))
    for gradient in sparse:
        gradient.mul_(factor.to(gradient.dtype))
