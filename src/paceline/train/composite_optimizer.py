"""Save and restore an optimizer made of others, such as Muon with an AdamW inside: its parts keep their own state.

Checkpoints hold the state of every part under its parameter's name, and say which part has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.train.alike import StateCheck

_OF_TORCH = ("state", "param_groups", "defaults")  # attributes of every optimizer


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer and the optimizers in its attributes, in lists, tuples and dicts of them too; each once."""
    parts = [optimizer]
    for part in parts:  # it grows: a part may have parts
        # Attributes alone: an optimizer that a part holds elsewhere, in a closure, is not found.
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            for inner in _optimizers_in(value):
                if not _contains(parts, inner):
                    parts.append(inner)
    return parts


def _optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    if isinstance(value, dict):
        values = list(value.values())
    elif isinstance(value, list | tuple):
        values = list(value)
    else:
        values = [value]
    return [item for item in values if isinstance(item, torch.optim.Optimizer)]


def _contains(items: Sequence[Any], item: Any) -> bool:
    """True if `item` itself is among the items: groups are dicts of tensors, which can't be compared by `==`."""
    return any(item is other for other in items)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of all parts; one that several parts share is there once."""
    groups: list[dict[str, Any]] = []
    for part in parts_of(optimizer):
        for group in part.param_groups:
            if not _contains(groups, group):
                groups.append(group)
    return groups


def check_parts(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Raise if an optimizer is made of others and can't be run or saved as it is.

    Raises:
        PlanError: the plan cuts parameters, or the list of them.
        WorkloadError: a part keeps its state or its groups where a checkpoint does not find them.
    """
    parts = parts_of(optimizer)
    if len(parts) == 1:
        return
    inner_names = ", ".join(type(part).__name__ for part in parts[1:])
    names = f"{type(optimizer).__name__} with {inner_names} inside"
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
    # All checks come before the first change.
    _check_state(optimizer, groups, state, names)
    for group, saved in zip(groups_of(optimizer), groups, strict=True):
        group.update(saved)
    parts = parts_of(optimizer)
    # All are cleared before any is filled: parts that share one state would lose what the first was given.
    for part in parts:
        part.state.clear()
    for number, part in enumerate(parts):
        for parameter, values in state.get(number, {}).items():
            restored = {key: _placed(part, parameter, key, value) for key, value in values.items()}
            part.state[parameter] = restored


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
        # Parts that share one state dict each see what all of them have saved.
        owners = [number for number, other in enumerate(parts) if other.state is part.state]
        check = StateCheck(part)
        for group_number, group in enumerate(part.param_groups):
            group_settings = {**group, **settings[id(group)]}
            for parameter in group["params"]:
                values: dict[str, Any] = {}
                for owner in owners:
                    values.update(state.get(owner, {}).get(parameter, {}))
                if values:
                    check.check(group_number, group_settings, names[parameter], parameter.detach(), values)


def _placed(part: torch.optim.Optimizer, parameter: torch.nn.Parameter, key: str, value: Any) -> Any:
    """Move a value of the state where torch's `load_state_dict` would put it: a count of steps may stay on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    if key != "step":
        return value.to(parameter.device)
    for group in part.param_groups:
        if _contains(group["params"], parameter):
            is_on_device = group.get("capturable") or group.get("fused")
            return value.to(parameter.device) if is_on_device else value
    return value
