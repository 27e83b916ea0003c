"""Take the first step of a job in one process, and compare what the ranks made of it.

Two comparisons, since an optimizer may make much of a gradient's rounding (Adam's first update is its sign):

gradients    of the batch's mean loss, before they are clipped: the ranks' with those of one process
updates      of parameters: what this process's optimizer makes of the ranks' gradients, with what theirs made

A difference is measured by the norm of each tensor. What it may be depends on the precision; where it is more, the step
is taken again in float64, which shows how far rounding alone is from the truth.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from paceline.checkpoint.manifest import read_manifest
from paceline.comm.batch_norm import SharedForward
from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.train import snapshot

# Of a tensor's norm. Float32 keeps six digits of a sum, of which deep models lose two or three.
TOLERANCES = {"float64": 1e-7, "float32": 2e-3, "bf16": 5e-2, "fp16": 2e-2}
_FLOOR = 1e-3  # of the norm of all gradients: a tensor whose gradient is smaller is compared with that
_ROUNDINGS = 30  # how many times as far as one process's rounding is from float64 the ranks may be
UPDATE_TOLERANCE = 1e-3  # of the update's norm: the gradients are the same
_ROUNDING_OF_VALUES = 4  # times epsilon, of the parameter's norm


@dataclass(slots=True)
class Found:
    """The first difference, or none.

    Attributes:
        kind: "gradient", "update" or "buffer".
        name: of the tensor.
        distance: the norm of the difference, relative to the tensor's.
    """

    kind: str = ""
    name: str = ""
    distance: float = 0.0


def first_gradient_difference(
    here: Mapping[str, torch.Tensor | None], ranks: Mapping[str, torch.Tensor], tolerance: float
) -> Found | None:
    """Return the largest difference of gradients that is larger than it may be.

    Args:
        here: the gradients of one process by name; None where there is none.
        ranks: those of the ranks, without those that have none.
        tolerance: relative.
    """
    largest: Found | None = None
    total = math.sqrt(sum(_norm(gradient) ** 2 for gradient in here.values() if gradient is not None))
    for name, gradient in here.items():
        other = ranks.get(name)
        expected = 0.0 if gradient is None else _norm(gradient)
        distance = _norm(_difference(gradient, other))
        scale = max(expected, _FLOOR * total)
        if not distance <= tolerance * scale and (largest is None or not distance / scale <= largest.distance):
            largest = Found("gradient", name, distance / scale if scale else math.inf)
    return largest


def first_update_difference(
    values: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    tolerance: float,
    floor: float,
) -> Found | None:
    """Return the largest difference of parameters after the update that is larger than it may be.

    Args:
        values: by name, before the step; after it in one process; and on the ranks.
        tolerance: of the norm of a parameter's update.
        floor: of the norm of all updates: a smaller update is compared with that.
    """
    before, here, ranks = values
    largest: Found | None = None
    updates = {name: _norm(_wide(value) - _wide(before[name])) for name, value in here.items()}
    total = math.sqrt(sum(update**2 for update in updates.values()))
    for name, value in here.items():
        scale = max(updates[name], floor * total)
        rounding = _ROUNDING_OF_VALUES * _epsilon(value) * _norm(value)
        distance = _norm(_difference(value, ranks[name]))
        if distance <= tolerance * scale + rounding:
            continue
        relative = distance / scale if scale else math.inf
        if largest is None or not relative <= largest.distance:
            largest = Found("update", name, relative)
    return largest


def first_buffer_difference(
    here: Mapping[str, torch.Tensor], ranks: Mapping[str, torch.Tensor], tolerance: float
) -> Found | None:
    """Return the first buffer that is another one, relative to its norm."""
    for name, value in here.items():
        distance = _norm(_difference(value, ranks[name]))
        scale = max(_norm(value), _norm(ranks[name]))
        if not distance <= tolerance * scale:
            return Found("buffer", name, distance / scale if scale else math.inf)
    return None


def _difference(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
    if first is None or second is None:
        present = first if second is None else second
        return torch.zeros(()) if present is None else present
    one, other = _wide(first), _wide(second)
    # An infinity is no difference from itself, and a NaN is none from another.
    is_same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(is_same, 0.0, one - other)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor.detach())))


def _epsilon(tensor: torch.Tensor) -> float:
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_inexact else 0.0


def own_batch_norms(model: torch.nn.Module) -> None:
    """Have batch norm compute by itself again, where ranks share its statistics."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), SharedForward):
            del module.forward


def gradients_of(
    parameters: Mapping[str, torch.nn.Parameter], step: Callable[[], None]
) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients that `step` makes."""
    for parameter in parameters.values():
        parameter.grad = None
    step()
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in parameters.items():
        found[name] = None if parameter.grad is None else parameter.grad.detach().clone()
    return found


def is_rounding(
    found: Found, narrow: Mapping[str, torch.Tensor | None], wide: Mapping[str, torch.Tensor | None]
) -> bool:
    """Return whether a difference of gradients can be rounding.

    Args:
        found: the difference.
        narrow: gradients of one process in the job's precision.
        wide: in float64.
    """
    rounding = _norm(_difference(narrow[found.name], wide[found.name]))
    expected = narrow[found.name]
    scale = 0.0 if expected is None else _norm(expected)
    return found.distance * scale <= _ROUNDINGS * rounding


def set_gradients(parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
    """Give parameters the ranks' gradients; None to those that have none."""
    for name, parameter in parameters.items():
        own = parameter.grad
        if name not in gradients:
            parameter.grad = None
        elif own is not None and own.is_sparse:
            parameter.grad = gradients[name].clone().to_sparse(1)
        else:
            parameter.grad = gradients[name].clone()


def clip(parameters: Mapping[str, torch.nn.Parameter], max_norm: float) -> float:
    """Clip gradients, sparse ones too, by the norm of all of them; return the norm."""
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    return norm


def same_numbers(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of generators' states are equal."""
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def sort_buffers(
    model: torch.nn.Module, wanted: Container[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return those of a model's buffers that batch norms have, which are those of the whole batch, and the others."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
    statistics: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        if name in wanted:
            (statistics if name.rpartition(".")[0] in norms else others)[name] = buffer
    return statistics, others


def other_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's random generators."""
    numpy: Any = sys.modules.get("numpy")
    _, keys, place, *_ = numpy.random.get_state() if numpy else (None, b"", 0)
    return random.getstate(), bytes(keys), place


def load_whole_state(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Give an optimizer the state of all parameters that a checkpoint has. A rank may have that of its own only.

    Args:
        folder: the checkpoint.
        model: whole.
        optimizer: of the whole model.

    Raises:
        CheckpointError: the checkpoint does not fit the optimizer.
    """
    manifest = read_manifest(folder)
    alone = AxisComm("world", 0, (0,), None, Ledger())
    tensors = snapshot.read_state(folder, manifest, model, {}, alone)
    snapshot.restore_optimizer(model, optimizer, tensors, manifest["optimizer"], {})
