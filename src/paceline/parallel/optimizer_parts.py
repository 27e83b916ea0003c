"""Find the optimizers that an optimizer is made of, such as the AdamW inside a Muon, and all their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# An attribute of an optimizer that updates whole parameters, each by itself, where trials can't find that out.
DECLARATION = "needs_whole_parameters"
_HOLDERS = (torch.optim.Optimizer, dict, list, tuple)
_OF_TORCH = ("state", "param_groups", "defaults")  # attributes of every optimizer


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer and the optimizers in its attributes, in lists, tuples and dicts of them too; each once."""
    parts = [optimizer]
    for part in parts:  # it grows: a part may have parts
        # Only attributes: an optimizer that a part holds elsewhere, in a closure, is not found.
        for name, value in vars(part).items():
            if name in _OF_TORCH or not isinstance(value, _HOLDERS):
                continue
            for inner in _optimizers_in(value):
                if not contains(parts, inner):
                    parts.append(inner)
    return parts


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return what the optimizer and its parts know of a parameter, by key."""
    state: dict[str, Any] = {}
    for part in parts_of(optimizer):
        state.update(part.state.get(parameter, {}))
    return state


def _optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, torch.optim.Optimizer)]
    return [item for item in value if isinstance(item, torch.optim.Optimizer)]


def contains(items: Sequence[Any], item: Any) -> bool:
    """True if `item` itself is among the items: groups are dicts of tensors, which can't be compared by `==`."""
    return any(item is other for other in items)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of all parts; one that several parts share is there once."""
    groups: list[dict[str, Any]] = []
    for part in parts_of(optimizer):
        for group in part.param_groups:
            if not contains(groups, group):
                groups.append(group)
    return groups


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's settings of a group, such as its learning rate."""
    return {name: value for name, value in group.items() if name != "params"}
