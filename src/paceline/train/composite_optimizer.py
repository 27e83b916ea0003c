"""An optimizer made of others, such as Muon with an AdamW inside: its parts keep state of their own.

Checkpoints hold the state of every part under its parameter's name, and say which part has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.train.alike import StateCheck

_OWN = ("state", "param_groups", "defaults")


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and the optimizers in its attributes, in lists, tuples and dicts of them too; each once."""
    parts = [optimizer]
    for part in parts:  # it grows: a part may have parts
        for name, value in vars(part).items():
            inside = () if name in _OWN else _optimizers_in(value)
            parts += [one for one in inside if all(one is not known for known in parts)]
    return parts


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, dict):
        yield from (one for one in value.values() if isinstance(one, torch.optim.Optimizer))
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, torch.optim.Optimizer))


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups of all parts; one that several parts share is there once."""
    groups: list[dict[str, Any]] = []
    for part in parts_of(optimizer):
        groups += [group for group in part.param_groups if all(group is not known for known in groups)]
    return groups


def check_parts(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Raise where an optimizer is made of others and can't be run or saved as it is.

    Raises:
        PlanError: the plan cuts parameters, or the list of them.
        WorkloadError: a part keeps its state or its groups where a checkpoint does not find them.
    """
    parts = parts_of(optimizer)
    if len(parts) == 1:
        return
    names = f"{type(optimizer).__name__} with {', '.join(type(part).__name__ for part in parts[1:])} inside"
    cuts = [axis for axis in ("shard", "tensor", "pipeline") if mesh.size(axis) > 1]
    if cuts:
        raise PlanError(
            f"the axis {cuts[0]} gives each rank a part of the optimizer's work",
            f"the workload's optimizer is made of several ({names})",
            f"write replicate in place of {cuts[0]}, or take one optimizer for all parameters, such as AdamW",
        )
    for part in parts:
        if not {"state", "param_groups"} <= vars(part).keys():
            raise WorkloadError(
                f"a checkpoint should hold the state of an optimizer made of several ({names})",
                f"{type(part).__name__} has no attributes of its own for its state and its groups",
                "call super().__init__(parameters, defaults) in it, and keep what it knows in self.state[parameter]",
            )


def restore_parts(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[int, Mapping[torch.nn.Parameter, dict[str, Any]]],
    names: Mapping[torch.nn.Parameter, str],
) -> None:
    """Put the saved groups and state into the parts, each in its place: the parts may share both.

    Args:
        optimizer: made of several.
        groups: in the order of `groups_of`, without their parameters.
        state: by the number of the part in `parts_of`; what a parameter's state is.
        names: of the parameters, for errors.

    Raises:
        CheckpointError: a part can't go on with its state of a parameter; nothing was changed.
    """
    _check_state(optimizer, groups, state, names)
    for group, saved in zip(groups_of(optimizer), groups, strict=True):
        group.update(saved)
    parts = parts_of(optimizer)
    for part in parts:
        part.state.clear()
    for number, part in enumerate(parts):
        for parameter, values in state.get(number, {}).items():
            part.state[parameter] = {key: _placed(part, parameter, key, value) for key, value in values.items()}


def _check_state(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[int, Mapping[torch.nn.Parameter, dict[str, Any]]],
    names: Mapping[torch.nn.Parameter, str],
) -> None:
    """Raise CheckpointError unless every part can go on with the saved state of its parameters."""
    settings = {id(group): saved for group, saved in zip(groups_of(optimizer), groups, strict=True)}
    parts = parts_of(optimizer)
    for part in parts:
        owners = [number for number, other in enumerate(parts) if other.state is part.state]
        check = StateCheck(part)
        for group_number, group in enumerate(part.param_groups):
            known = {**group, **settings[id(group)]}
            for parameter in group["params"]:
                own = [state.get(owner, {}).get(parameter, {}) for owner in owners]
                if read := {key: value for one in own for key, value in one.items()}:
                    check.check(group_number, known, names[parameter], parameter.detach(), read)


def _placed(part: torch.optim.Optimizer, parameter: torch.nn.Parameter, key: str, value: Any) -> Any:
    """A value of the state where torch's own `load_state_dict` would put it: a count of steps may stay on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    if key != "step":
        return value.to(parameter.device)
    group = next((one for one in part.param_groups if any(parameter is member for member in one["params"])), {})
    return value.to(parameter.device) if group.get("capturable") or group.get("fused") else value
