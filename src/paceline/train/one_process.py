"""Take the first step of a job in one process, and compare what the ranks made of it.

Two comparisons, since an optimizer may make much of a gradient's rounding (Adam's first update is its sign):

gradients    of the batch's mean loss, before they are clipped: the ranks' with those of one process
updates      of parameters: what this process's optimizer makes of the ranks' gradients, with what theirs made

A difference is measured by the norm of each tensor. What it may be depends on the precision; where it is more, the step
is taken again in float64, which shows how far rounding by itself is from the truth.
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

from paceline.checkpoint.manifest import read_manifest
from paceline.comm.batch_norm import SharedForward
from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.torch_private.modules import NormBase
from paceline.train import snapshot
from paceline.train.forked_process import SharedTensors
from paceline.train.plain_step import norm_of, wide
from paceline.train.rank_draws import RankDraws

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
        kind: "gradient", "update", "statistics" or "buffer".
        name: the name of the tensor.
        distance: the norm of the difference, relative to the norm of the tensor.
    """

    kind: str = ""
    name: str = ""
    distance: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest differences that are allowed after a step.

    Attributes:
        buffer: the limit for buffers, relative to a buffer's norm.
        update: the limit for updates, relative to the norm of a parameter's update.
        floor: the share of the norm of all updates: a smaller update is compared with that.
        are_statistics_shared: True if batch norms take the statistics of the whole batch.
    """

    buffer: float
    update: float = UPDATE_TOLERANCE
    floor: float = 0.0
    are_statistics_shared: bool = True


Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of whole tensors, by name
_GRADIENT, _VALUE, _STATE, _HAS_GRADIENT = "gradient/", "value/", "state/", "has gradient"


class RanksStep:
    """What the ranks made of a step, in memory that a forked process sees too.

    Args:
        forms: the shapes and dtypes of the model's tensors, by name.
        states: the states of the ranks' generators, one for each part of the batch.
    """

    def __init__(self, forms: Forms, states: Sequence[torch.Tensor]) -> None:
        self.names = list(forms)
        shared: list[tuple[str, tuple[int, ...], torch.dtype]] = [(_HAS_GRADIENT, (len(forms),), torch.int64)]
        for name, (shape, dtype) in forms.items():
            shared += [(_GRADIENT + name, shape, dtype), (_VALUE + name, shape, dtype)]
        for number, state in enumerate(states):
            shared.append((f"{_STATE}{number}", tuple(state.shape), state.dtype))
        self._parts = len(states)
        self._tensors = SharedTensors(shared).tensors

    def give_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Hand over gradients; None of a parameter that has none."""
        for name, gradient in gradients.items():
            self._tensors[_HAS_GRADIENT][self.names.index(name)] = gradient is not None
            if gradient is not None:
                self._tensors[_GRADIENT + name].copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def give_values(self, values: Mapping[str, torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Hand over the values and the generators' states after the step."""
        for name, value in values.items():
            self._tensors[_VALUE + name].copy_(value)
        for number, state in enumerate(states):
            self._tensors[f"{_STATE}{number}"].copy_(state)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients, without parameters that have none."""
        flags = self._tensors[_HAS_GRADIENT].tolist()
        return {name: self._tensors[_GRADIENT + name] for name, flag in zip(self.names, flags, strict=True) if flag}

    def values(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers after the step."""
        return {name: self._tensors[_VALUE + name] for name in self.names}

    def drew_as(self, states: Sequence[torch.Tensor]) -> bool:
        """Return whether the ranks' generators are where `states` are."""
        return all(torch.equal(state, self._tensors[f"{_STATE}{number}"]) for number, state in enumerate(states))


def first_gradient_difference(
    one_process: Mapping[str, torch.Tensor | None], ranks: Mapping[str, torch.Tensor], tolerance: float
) -> Found | None:
    """Return the largest difference of gradients that is larger than it may be.

    Args:
        one_process: the gradients of one process by name; None where there is none.
        ranks: the gradients of the ranks, without those that have none.
        tolerance: the largest relative difference that is allowed.
    """
    largest: Found | None = None
    total = math.sqrt(sum(norm_of(gradient) ** 2 for gradient in one_process.values() if gradient is not None))
    for name, gradient in one_process.items():
        gradient_of_ranks = ranks.get(name)
        expected = 0.0 if gradient is None else norm_of(gradient)
        distance = norm_of(_difference(gradient, gradient_of_ranks))
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
        values: the values by name: before the step; after it in one process; and on the ranks.
        tolerance: the tolerance, relative to the norm of a parameter's update.
        floor: the share of the norm of all updates: a smaller update is compared with that.
    """
    before, one_process, ranks = values
    largest: Found | None = None
    updates = {name: norm_of(wide(value) - wide(before[name])) for name, value in one_process.items()}
    total = math.sqrt(sum(update**2 for update in updates.values()))
    for name, value in one_process.items():
        scale = max(updates[name], floor * total)
        rounding = _ROUNDING_OF_VALUES * _epsilon(value) * norm_of(value)
        distance = norm_of(_difference(value, ranks[name]))
        if distance <= tolerance * scale + rounding:
            continue
        relative = distance / scale if scale else math.inf
        if largest is None or not relative <= largest.distance:
            largest = Found("update", name, relative)
    return largest


def first_value_difference(
    model: torch.nn.Module, before: Mapping[str, torch.Tensor], ranks: Mapping[str, torch.Tensor], limits: Limits
) -> Found | None:
    """Return the first difference of what a step leaves: of updates, of batch norms' statistics, of other buffers.

    Args:
        model: the model after the step in one process.
        before: the values by name before the step.
        ranks: the values of the ranks after the step.
        limits: the largest differences that are allowed.
    """
    one_process = {name: parameter.detach() for name, parameter in model.named_parameters() if name in ranks}
    found = first_update_difference((before, one_process, ranks), limits.update, limits.floor)
    statistics, other_buffers = _sort_buffers(model, ranks)
    if found is None and limits.are_statistics_shared:
        found = _first_buffer_difference("statistics", statistics, ranks, limits.buffer)
    return found or _first_buffer_difference("buffer", other_buffers, ranks, limits.buffer)


def _first_buffer_difference(
    kind: str, one_process: Mapping[str, torch.Tensor], ranks: Mapping[str, torch.Tensor], tolerance: float
) -> Found | None:
    """Return the first buffer that is another one, relative to its norm."""
    for name, value in one_process.items():
        distance = norm_of(_difference(value, ranks[name]))
        scale = max(norm_of(value), norm_of(ranks[name]))
        if not distance <= tolerance * scale:
            return Found(kind, name, distance / scale if scale else math.inf)
    return None


def _difference(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:
    if first is None or second is None:
        present = first if second is None else second
        return torch.zeros(()) if present is None else present
    first_wide, second_wide = wide(first), wide(second)
    # An infinity is no difference from itself, and a NaN is none from another.
    is_same = (first_wide == second_wide) | (first_wide.isnan() & second_wide.isnan())
    return torch.where(is_same, 0.0, first_wide - second_wide)


def _epsilon(tensor: torch.Tensor) -> float:
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_inexact else 0.0


def answer_of(found: Found | None, draws: RankDraws) -> dict[str, Any]:
    """Return the difference, as JSON, or the reason why there is no comparison, where it may come from draws."""
    if found is None:
        return {}
    if draws.has_drawn and not draws.is_certain:
        return {"reason": "it is not certain which random numbers belong to which samples"}
    return {"kind": found.kind, "name": found.name, "distance": found.distance}


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
        found: the difference that was found.
        narrow: the gradients of one process in the job's precision.
        wide: the gradients of one process in float64.
    """
    rounding = norm_of(_difference(narrow[found.name], wide[found.name]))
    expected = narrow[found.name]
    scale = 0.0 if expected is None else norm_of(expected)
    return found.distance * scale <= _ROUNDINGS * rounding


def set_gradients(parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
    """Give parameters the ranks' gradients; None to those that have none."""
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if name not in gradients:
            parameter.grad = None
        elif gradient is not None and gradient.is_sparse:
            parameter.grad = gradients[name].clone().to_sparse(1)
        else:
            parameter.grad = gradients[name].clone()


def _sort_buffers(
    model: torch.nn.Module, names: Container[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return those of a model's buffers that batch norms have, which are those of the whole batch, and the others."""
    norms = {name for name, module in model.named_modules() if isinstance(module, NormBase)}
    statistics: dict[str, torch.Tensor] = {}
    other_buffers: dict[str, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        if name in names:
            (statistics if name.rpartition(".")[0] in norms else other_buffers)[name] = buffer
    return statistics, other_buffers


def other_generators() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's random generators."""
    numpy: Any = sys.modules.get("numpy")
    _, keys, place, *_ = numpy.random.get_state() if numpy else (None, b"", 0)
    return random.getstate(), bytes(keys), place


def load_whole_state(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Give an optimizer the state of all parameters that a checkpoint has. A rank may have that of its own only.

    Args:
        folder: the folder of the checkpoint.
        model: the model, whole on this process.
        optimizer: the optimizer of the whole model.

    Raises:
        CheckpointError: the checkpoint does not fit the optimizer.
    """
    manifest = read_manifest(folder)
    alone = AxisComm("world", 0, (0,), None, Ledger())
    tensors = snapshot.read_state(folder, manifest, model, {}, alone)
    snapshot.restore_optimizer(model, optimizer, tensors, manifest["optimizer"], {})
