"""A job's state as named tensors and a JSON object, and back.

Names never depend on the plan: `model/NAME`, `optimizer/KEY/NAME`, and a rank's own `own/random/...` and
`own/wire/...`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch

from paceline.checkpoint.load import OWN
from paceline.nouns.errors import CheckpointError, WorkloadError

MODEL, OPTIMIZER = "model/", "optimizer/"


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied tensor once, under its first name.

    Raises:
        WorkloadError: a module keeps state that is not a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                f"the model's state {name!r} should be a tensor",
                f"it is a {type(value).__name__}",
                "keep it in a buffer; checkpoints hold no pickled objects",
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensors[MODEL + name] = value.detach()
    return tensors


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's tensors by name, and its groups and plain numbers as JSON.

    Raises:
        WorkloadError: it holds a parameter that is not the model's, or state that JSON can't keep.
    """
    names = parameter_names(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():  # keys are the parameters
        for key, value in state.items():
            name = f"{OPTIMIZER}{key}/{names[cast(torch.nn.Parameter, parameter)]}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                numbers[name] = as_json(f"the optimizer's {key}", value)
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            **{k: as_json(f"the optimizer's {k}", v) for k, v in group.items() if k != "params"},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], saved: dict[str, Any]
) -> None:
    """Put back what `optimizer_state` took.

    Raises:
        CheckpointError: the optimizer is of another class or groups parameters otherwise.
    """
    names = parameter_names(model, optimizer)
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if saved["class"] != type(optimizer).__name__ or [g["parameters"] for g in saved["groups"]] != groups:
        raise CheckpointError(
            f"the checkpoint's optimizer is a {saved['class']} with {len(saved['groups'])} parameter groups",
            f"the workload's is a {type(optimizer).__name__} with {len(groups)}, or they hold other parameters",
            "make the optimizer as it was when the checkpoint was saved",
        )
    numbers = {name: index for index, name in enumerate(name for group in groups for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *saved["numbers"].items()]:
        key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
        if parameter not in numbers:
            raise CheckpointError(
                "the checkpoint's optimizer should keep state of the model's parameters",
                f"it has {name}",
                "use an earlier checkpoint",
            )
        state.setdefault(numbers[parameter], {})[key] = value
    packed = []
    for group, before, own in zip(saved["groups"], optimizer.param_groups, groups, strict=True):
        values = {key: value for key, value in group.items() if key != "parameters"}
        values = {k: tuple(v) if isinstance(before.get(k), tuple) else v for k, v in values.items()}
        packed.append({**values, "params": [numbers[name] for name in own]})
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def own_tensors(random: Mapping[str, torch.Tensor], wire: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's own tensors under their checkpoint names."""
    return {
        **{f"{OWN}random/{name}": tensor for name, tensor in random.items()},
        **{f"{OWN}wire/{name}": tensor for name, tensor in wire.items()},
    }


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """The name of each of the optimizer's parameters.

    Raises:
        WorkloadError: one of them is not the model's.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise WorkloadError(
                    "the optimizer should hold parameters of the model",
                    f"its group {number} has one of shape {tuple(parameter.shape)} that is not the model's",
                    "make it from the model it is handed: optimizer=lambda model: AdamW(model.parameters())",
                )
    return names


def as_json(what: str, value: Any) -> Any:
    """`value` if JSON keeps it as it is (tuples become lists).

    Raises:
        WorkloadError: it does not.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise WorkloadError(
            f"{what} should be something that JSON can keep",
            f"it is a {type(value).__name__}",
            "use numbers, strings, lists and dicts; checkpoints hold no pickled objects",
        ) from None
