"""Save and restore an optimizer made of others, such as Muon with an AdamW inside: its parts keep their own state.

Checkpoints hold the state of every part under its parameter's name, and say which part has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.parallel.optimizer_list import alone
from paceline.parallel.optimizer_parts import DECLARATION, contains, groups_of, parts_of
from paceline.train.alike import StateCheck


def check_parts(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Raise if an optimizer is made of others and can't be run or saved as it is.

    Raises:
        PlanError: the plan cuts parameters, or the list of them.
        WorkloadError: a part keeps its state or its groups where a checkpoint does not find them.
    """
    for member in alone(optimizer):
        _check_parts(member, mesh)


def _check_parts(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    parts = parts_of(optimizer)
    if len(parts) == 1:
        return
    inner_names = ", ".join(type(part).__name__ for part in parts[1:])
    names = f"{type(optimizer).__name__} with {inner_names} inside"
    # Where its author has declared that it updates whole parameters, one by one, it is given those.
    refused = ["pipeline"] if getattr(optimizer, DECLARATION, False) else ["shard", "tensor", "pipeline"]
    cuts = [axis for axis in refused if mesh.size(axis) > 1]
    if cuts:
        raise PlanError(
            f"the axis {cuts[0]} gives each rank a part of the optimizer's work",
            f"the workload's optimizer is made of several ({names})",
            f"write replicate in place of {cuts[0]}, or take one optimizer for all parameters, such as AdamW; under "
            f"shard and tensor {DECLARATION} = True in its class is enough, if it updates each parameter by itself",
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
    like: Mapping[torch.nn.Parameter, tuple[str, torch.Tensor]],
) -> None:
    """Put the saved groups and state into the parts, each in its place: the parts may share both.

    Args:
        optimizer: the optimizer, which is made of several.
        groups: the saved groups, in the order of `groups_of`, without their parameters.
        state: the state of each parameter, by the number of the part in `parts_of`.
        like: the name, and a tensor of the state's shape, of each parameter whose state is on this rank.

    Raises:
        CheckpointError: a part can't go on with its state of a parameter; nothing was changed.
    """
    # All checks come before the first change.
    _check_state(optimizer, groups, state, like)
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
    like: Mapping[torch.nn.Parameter, tuple[str, torch.Tensor]],
) -> None:
    """Raise CheckpointError unless every part can go on with the saved state of its parameters."""
    settings = {id(group): saved for group, saved in zip(groups_of(optimizer), groups, strict=True)}
    parts = parts_of(optimizer)
    for part in parts:
        # Parts that share one state dict each see what all of them have saved.
        owners = [number for number, candidate in enumerate(parts) if candidate.state is part.state]
        check = StateCheck(part)
        for group_number, group in enumerate(part.param_groups):
            group_settings = {**group, **settings[id(group)]}
            for parameter in group["params"]:
                values: dict[str, Any] = {}
                for owner in owners:
                    values.update(state.get(owner, {}).get(parameter, {}))
                if values:
                    check.check(group_number, group_settings, *like[parameter], values)


def _placed(part: torch.optim.Optimizer, parameter: torch.nn.Parameter, key: str, value: object) -> Any:
    """Move a value of the state where torch's `load_state_dict` would put it: a count of steps may stay on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    if key != "step":
        return value.to(parameter.device)
    for group in part.param_groups:
        if contains(group["params"], parameter):
            is_on_device = group.get("capturable") or group.get("fused")
            return value.to(parameter.device) if is_on_device else value
    return value
