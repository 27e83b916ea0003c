"""Count what this rank's memory holds, by kind, once the optimizer has its state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from paceline.comm.dtensor_parts import local
from paceline.comm.step_times import peak_memory_bytes
from paceline.parallel.low_precision_states import memory_of
from paceline.parallel.optimizer_parts import parts_of


def count_memory(
    models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int | str]:
    """Return bytes by kind, the peak, and the device with its name, as `write_memory` takes them.

    A storage that several tensors share counts once, as the first kind that has it.

    Args:
        models: the models that this rank trains, or its parts of them.
        optimizer: the optimizer of these models.
        device: the device whose memory is counted: tensors on others, such as offloaded state, are left out.
    """
    counted: set[int] = set()
    parameters = list(itertools.chain.from_iterable(model.parameters() for model in models))
    buffers = list(itertools.chain.from_iterable(model.buffers() for model in models))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [part.state for part in parts_of(optimizer)]
    is_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if is_gpu else peak_memory_bytes()
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if is_gpu else "",
        "parameters": _nbytes(parameters, device, counted),
        "buffers": _nbytes(buffers, device, counted),
        "gradients": _nbytes(gradients, device, counted),
        "optimizer state": _nbytes(_tensors(states), device, counted),
        "peak": peak,
    }


def _nbytes(tensors: Iterable[torch.Tensor], device: torch.device, counted: set[int]) -> int:
    total = 0
    for tensor in tensors:
        part = local(tensor.detach())
        if part.device.type != device.type or part.layout != torch.strided:
            continue
        try:
            storage = part.untyped_storage()
            place = storage.data_ptr()
        except (RuntimeError, NotImplementedError):  # a class of tensors that has no storage of its own
            continue
        if place not in counted:
            counted.add(place)
            total += storage.nbytes()
    return total


def _tensors(value: object, depth: int = 8) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from memory_of(value)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
