"""A job's state as named tensors and a JSON object, and back.

Names never depend on the plan: `model/NAME`, `optimizer/KEY/NAME`, and a rank's own `own/random/...` and
`own/wire/...`. What of a tensor this rank holds, and who else, the strategies say by `held`: a `LocalShard` for
every name of the model's state that is not whole on all ranks. What is whole everywhere needs no entry.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from paceline.checkpoint.load import check_same_model, read_parts, verify_hashes
from paceline.checkpoint.manifest import MODEL, OPTIMIZER, OWN
from paceline.checkpoint.manifest_schema import CONFIGS
from paceline.checkpoint.reshard import LocalTensor, dtype_of
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, WorkloadError
from paceline.nouns.reading import parse_json
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.train.alike import StateCheck, check_groups, in_types_of
from paceline.train.composite_optimizer import groups_of, parts_of, restore_parts


def model_parts(model: torch.nn.Module, held: Mapping[str, LocalShard], size: int) -> dict[str, LocalTensor]:
    """What this rank holds of parameters and persistent buffers, by name; a tied tensor once, under its first name.

    A tensor on the meta device is another rank's. The parts are the model's own memory: write them to load.

    Args:
        model: the model as the strategies left it.
        held: which part of a state tensor is here; of one that is not in it, all, and so on every rank.
        size: ranks of the world.

    Raises:
        WorkloadError: a module keeps state that is not a tensor.
    """
    parts: dict[str, LocalTensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                f"the model's state {name!r} should be a tensor",
                f"it is a {type(value).__name__}",
                "keep it in a buffer; checkpoints hold no pickled objects",
            )
        if id(value) not in seen and not value.is_meta:
            seen.add(id(value))
            parts[MODEL + name] = LocalTensor(local_part(value), held.get(name) or _whole(value, size))
    return parts


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this rank's memory: a DTensor's own part, all of any other."""
    tensor = tensor.detach()
    return cast(torch.Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _whole(tensor: torch.Tensor, size: int) -> LocalShard:
    return LocalShard(ShardSpec(tuple(tensor.shape)), tuple(range(size)))


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: Mapping[str, LocalShard], size: int
) -> tuple[dict[str, LocalTensor], dict[str, Any]]:
    """The parts of the optimizer's tensors by name, and its groups and plain numbers as JSON.

    A tensor that other ranks hold too, and save, is left out.

    Raises:
        WorkloadError: it holds a parameter that is not the model's, or state that JSON or a placement can't keep.
    """
    names = parameter_names(model, optimizer)
    parts: dict[str, LocalTensor] = {}
    numbers: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for parameter, key, value, owner in _state_of(optimizer):
        name = f"{OPTIMIZER}{key}/{names[parameter]}"
        if owners.setdefault(name, owner) != owner:
            raise _kept_twice(optimizer, name)
        if not isinstance(value, torch.Tensor):
            numbers[name] = as_json(f"the optimizer's {key}", value, with_tensors=False)
            continue
        of_parameter = _held_of(names[parameter], parameter, held, size)
        local = local_part(value)
        is_cut = tuple(local.shape) == of_parameter.shard_spec.local_shape
        if not is_cut and of_parameter.shard_spec.cuts and local.numel() != 1:
            raise _no_shard_spec(name, local, of_parameter.shard_spec)
        full = of_parameter.shard_spec.shape if is_cut else tuple(local.shape)
        if (answered := _held_of_state(full, of_parameter)) is not None:
            parts[name] = LocalTensor(local, answered)
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            **{k: as_json(f"the optimizer's {k}", v) for k, v in group.items() if k != "params"},
        }
        for group in groups_of(optimizer)
    ]
    facts = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
    return parts, {**facts, "owners": owners} if len(parts_of(optimizer)) > 1 else facts


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, str, Any, int]]:
    """Every value of the state: its parameter, its key, itself, and the number of the optimizer's part that has it."""
    seen: set[tuple[int, str]] = set()
    for owner, part in enumerate(parts_of(optimizer)):
        for parameter, state in part.state.items():
            for key, value in state.items():
                if (id(state), key) not in seen:  # parts may share it
                    seen.add((id(state), key))
                    yield cast(torch.nn.Parameter, parameter), key, value, owner


def _kept_twice(optimizer: torch.optim.Optimizer, name: str) -> WorkloadError:
    return WorkloadError(
        f"the optimizer's state {name} should be kept once",
        f"two of the optimizers in {type(optimizer).__name__} keep it for the same parameter",
        "give each parameter to one of them",
    )


def _held_of(name: str, parameter: torch.nn.Parameter, held: Mapping[str, LocalShard], size: int) -> LocalShard:
    """The part of a parameter's optimizer state that is here: the parameter's, unless a strategy says otherwise."""
    return held.get(OPTIMIZER + name) or held.get(name) or _whole(parameter, size)


def _held_of_state(full: tuple[int, ...], of_parameter: LocalShard) -> LocalShard | None:
    """Who answers for a state tensor of shape `full`; None: others do.

    One of the parameter's shape is cut as the parameter. Any other (a count of steps) is the same wherever
    there is a part of the parameter: those with the first part answer for it.
    """
    if full == of_parameter.shard_spec.shape:
        return of_parameter
    is_first = all(cut.part == 0 for cut in of_parameter.shard_spec.cuts)
    return LocalShard(ShardSpec(full), of_parameter.holders) if is_first else None


def _no_shard_spec(name: str, local: torch.Tensor, shard_spec: ShardSpec) -> WorkloadError:
    return WorkloadError(
        f"the optimizer's state {name} should be of its parameter's shape, or one number",
        f"it is of shape {tuple(local.shape)} for a part of shape {shard_spec.local_shape} of {shard_spec.shape}",
        "use an optimizer that works element by element, such as AdamW, or plan with the axis replicate alone",
    )


def read_state(
    folder: Path,
    manifest: Mapping[str, Any],
    model: torch.nn.Module,
    held: Mapping[str, LocalShard],
    comm: AxisComm,
) -> dict[str, torch.Tensor]:
    """This rank's parts of the model's and the optimizer's tensors, as any mesh saved them, verified bit for bit.

    Nothing is written to the model yet. All ranks call this, and all raise if one of them can't go on.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    model_here = model_parts(model, held, comm.size)
    answered = {name: part.held for name, part in model_here.items()}
    wanted: dict[str, ShardSpec | None] = {name: one.shard_spec for name, one in answered.items()}
    parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
    for name, entry in manifest["tensors"].items():
        parameter = _parameter_of(name)
        if parameter not in parameters:
            continue
        of_parameter = _held_of(parameter, parameters[parameter], held, comm.size)
        full = tuple(entry["shape"])
        wanted[name] = of_parameter.shard_spec if full == of_parameter.shard_spec.shape else None
        if (one := _held_of_state(full, of_parameter)) is not None:
            answered[name] = one
    failure, tensors = None, {}
    try:
        check_same_model(folder, manifest["tensors"], model_here)
        tensors = read_parts(folder, manifest, wanted)
    except CheckpointError as error:
        failure = error
    read = {name: LocalTensor(tensors[name], one) for name, one in answered.items()} if failure is None else {}
    verify_hashes(folder, manifest, read, comm, failure)
    return tensors


def _parameter_of(name: str) -> str | None:
    """The parameter whose optimizer state `optimizer/KEY/NAME` is."""
    return name.removeprefix(OPTIMIZER).partition("/")[2] if name.startswith(OPTIMIZER) else None


def restore_model(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], held: Mapping[str, LocalShard]) -> None:
    """Write what `read_state` read to the model's own memory."""
    with torch.no_grad():
        for name, part in model_parts(model, held, 1).items():
            part.tensor.copy_(tensors[name])


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], saved: dict[str, Any]
) -> None:
    """Put back what `optimizer_state` took, of the parameters that are here.

    Raises:
        CheckpointError: the optimizer is of another class or groups parameters otherwise, or its state is not whole.
    """
    names = parameter_names(model, optimizer)
    groups = [[names[parameter] for parameter in group["params"]] for group in groups_of(optimizer)]
    _check_groups(model, type(optimizer).__name__, groups, saved)
    is_torchs = type(optimizer).__module__.startswith("torch.")
    check_groups(saved["groups"], groups_of(optimizer), may_grow=not is_torchs)
    if len(parts_of(optimizer)) > 1:
        _restore_parts(optimizer, names, tensors, saved)
        return
    here = {name: parameter for parameter, name in names.items() if not parameter.is_meta}
    numbers = {name: index for index, name in enumerate(name for group in groups for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *saved["numbers"].items()]:
        key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
        if name.startswith(OPTIMIZER) and parameter in here and parameter in numbers:
            state.setdefault(numbers[parameter], {})[key] = _as_state_of(here[parameter], value)
    packed = []
    for group, before, own in zip(saved["groups"], optimizer.param_groups, groups, strict=True):
        # What the checkpoint does not know stays: a scheduler that is new keeps its own numbers in the groups.
        values = {key: in_types_of(value, before.get(key)) for key, value in group.items() if key != "parameters"}
        packed.append({**before, **values, "params": [numbers[name] for name in own]})
    states = StateCheck(optimizer)
    for group_number, own in enumerate(groups):
        for name in own:
            if numbers[name] in state:
                read = {k: local_part(v) if isinstance(v, torch.Tensor) else v for k, v in state[numbers[name]].items()}
                states.check(group_number, packed[group_number], name, local_part(here[name]), read)
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _restore_parts(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
    saved: dict[str, Any],
) -> None:
    """Put back the state of an optimizer made of several."""
    here = {name: parameter for parameter, name in names.items() if not parameter.is_meta}
    owners = saved.get("owners", {})
    state: dict[int, dict[torch.nn.Parameter, dict[str, Any]]] = {}
    for name, value in [*tensors.items(), *saved["numbers"].items()]:
        key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
        if name.startswith(OPTIMIZER) and parameter in here:
            if owners.get(name) not in range(len(parts_of(optimizer))):
                raise _other_parts(optimizer)
            state.setdefault(owners[name], {}).setdefault(here[parameter], {})[key] = value
    groups = []
    for group, before in zip(saved["groups"], groups_of(optimizer), strict=True):
        groups.append({k: in_types_of(value, before.get(k)) for k, value in group.items() if k != "parameters"})
    restore_parts(optimizer, groups, state, names)


def _other_parts(optimizer: torch.optim.Optimizer) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's optimizer should be made of {len(parts_of(optimizer))} optimizers, as the workload's is",
        "it does not say which of them has what",
        "make the optimizer as it was when the checkpoint was saved",
    )


def _check_groups(model: torch.nn.Module, kind: str, groups: list[list[str]], saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless every parameter that is here is in the group in which it was saved."""
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    is_same = kind == saved["class"] and len(groups) == len(saved["groups"])
    for group, before in zip(groups, saved["groups"], strict=False):
        # A stage knows its own members only, so names that are saved but not here may be another rank's.
        is_same = is_same and set(group) <= set(before["parameters"]) and here & set(before["parameters"]) <= set(group)
    if not is_same:
        raise CheckpointError(
            f"the checkpoint's optimizer is a {saved['class']} with {len(saved['groups'])} parameter groups",
            f"the workload's is a {kind} with {len(groups)}, or they hold other parameters",
            "make the optimizer as it was when the checkpoint was saved",
        )


def _as_state_of(parameter: torch.nn.Parameter, value: Any) -> Any:
    """A part that was read, as the optimizer keeps state of `parameter`: a DTensor's is a DTensor on its mesh."""
    from_local = getattr(type(parameter), "from_local", None)
    is_cut = isinstance(value, torch.Tensor) and value.shape == local_part(parameter).shape
    if from_local is None or not is_cut:
        return value
    dtensor: Any = parameter
    return from_local(
        value.to(local_part(parameter).device),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )


def config_facts(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What a transformers model says of itself, for `paceline export`; nothing of any other model.

    As `save_pretrained` does, the class and the dtype of the parameters are put in.
    """
    facts: dict[str, dict[str, Any]] = {}
    for key in CONFIGS:
        to_json = getattr(getattr(model, key, None), "to_json_string", None)
        if not callable(to_json):
            continue
        with contextlib.suppress(
            ValueError, TypeError, RecursionError
        ):  # somebody else's config, and none of ours to judge
            said = parse_json(to_json(), "a config")
            facts.update({key: said} if isinstance(said, dict) else {})
    if "config" in facts:
        kind = type(model).__name__.removeprefix("FSDP")  # fully_shard gives the class another name
        dtype = next((dtype_of(p) for p in model.parameters() if p.is_floating_point()), "float32")
        facts["config"] = {**facts["config"], "architectures": [kind], "dtype": dtype}
    return facts


def own_tensors(random: Mapping[str, torch.Tensor], wire: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's own tensors under their checkpoint names."""
    return {
        **{f"{OWN}random/{name}": tensor for name, tensor in random.items()},
        **{f"{OWN}wire/{name}": tensor for name, tensor in wire.items()},
    }


def restore_wire(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> bool:
    """Put back what compression carries over; False, and nothing is, where other compression was saved."""
    saved = part(own, "wire/")
    form = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    if form != {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()}:
        return False
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    return True


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """The name of each of the optimizer's parameters.

    Raises:
        WorkloadError: one of them is not the model's.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(groups_of(optimizer)):
        for parameter in group["params"]:
            if parameter not in names:
                raise WorkloadError(
                    "the optimizer should hold parameters of the model",
                    f"its group {number} has one of shape {tuple(parameter.shape)} that is not the model's",
                    "make it from the model it is handed: optimizer=lambda model: AdamW(model.parameters())",
                )
    return names


def as_json(what: str, value: Any, with_tensors: bool = True) -> Any:
    """`value` as JSON keeps it: tuples become lists, whole numbers as keys text, tensors of one number that number.

    `alike.in_types_of` undoes all three where a value of the same form is at hand.

    Args:
        what: `value` is, for the error.
        value: of a setting or a state.
        with_tensors: whether tensors of one number may be in it.

    Raises:
        WorkloadError: JSON can't keep it.
    """
    try:
        return parse_json(json.dumps(value, default=_number_of if with_tensors else None), what)
    except (TypeError, ValueError, RecursionError):
        raise WorkloadError(
            f"{what} should be something that JSON can keep",
            f"it is a {type(value).__name__}",
            "use numbers, strings, lists and dicts; checkpoints hold no pickled objects",
        ) from None


def _number_of(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError("neither JSON nor a number")
