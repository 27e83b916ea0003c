"""Turn a job's state into named tensors and a JSON object, which a checkpoint holds, and back.

Names never depend on the plan: `model/NAME`, `optimizer/KEY/NAME`, `average/KEY/NAME`, and a rank's own
`own/random/...`, `own/wire/...` and `own/kept/...`. The strategies describe by `held` the part of a tensor that this
rank has, and which ranks have the same: a `LocalShard` for every name of the model's state that is not whole on all
ranks. A replicated tensor needs no entry.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from paceline.checkpoint.load import check_same_model, read_parts, verify_hashes
from paceline.checkpoint.manifest import AVERAGE, MODEL, OPTIMIZER, OWN
from paceline.checkpoint.manifest_schema import CONFIGS
from paceline.checkpoint.reshard import LocalTensor, dtype_of
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, WorkloadError
from paceline.nouns.reading import parse_json
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.parallel.low_precision_states import (
    is_low_precision,
    is_packed,
    is_piece,
    keeps_packed,
    pieces_of,
    put_together,
    shape_of_piece,
    spec_of_piece,
    states_of_kind,
)
from paceline.parallel.optimizer_list import alone, kind_of
from paceline.parallel.optimizer_parts import DECLARATION, groups_of, parts_of
from paceline.torch_private.modules import non_persistent_buffers
from paceline.train.alike import StateCheck, check_groups, in_types_of
from paceline.train.composite_optimizer import restore_parts
from paceline.train.python_state import ExtraState, decode, encode, extra_names, state_tensors
from paceline.train.replicas import Shared

_VALUES = "values"  # the one key of what is kept of a list, dict or deque


def model_parts(model: torch.nn.Module, shards: Mapping[str, LocalShard], size: int) -> dict[str, LocalTensor]:
    """Return this rank's parts of parameters and persistent buffers, by name; a tied tensor once, by its first name.

    A tensor on the meta device is another rank's. The parts are the model's own memory: write them to load.

    Args:
        model: the model as the strategies left it.
        shards: the part of each state tensor on this rank; one that is not in it is whole on every rank.
        size: the number of ranks of the world.

    Raises:
        WorkloadError: a module keeps state that is not a tensor.
    """
    parts: dict[str, LocalTensor] = {}
    ids: set[int] = set()  # of the tensors that have a name already
    for name, value in state_tensors(model):
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                f"the model's state {name!r} should be a tensor",
                f"it is a {type(value).__name__}",
                "keep it in a buffer, or have the module's get_extra_state() return it, if it is numbers or strings",
            )
        if id(value) not in ids and not value.is_meta:
            ids.add(id(value))
            shard = shards.get(name) or _replicated(value, size)
            parts[MODEL + name] = LocalTensor(local_part(value), shard)
    return parts


def shared_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, shards: Mapping[str, LocalShard], size: int
) -> Iterator[Shared]:
    """Yield the parameters, persistent buffers and optimizer states that other ranks hold too.

    Args:
        model: the model as the strategies left it.
        optimizer: the optimizer of the model.
        shards: the part of each state tensor on this rank.
        size: the number of ranks of the world.
    """
    names: dict[torch.Tensor, str] = {}  # a tied tensor has its first name
    for name, tensor in [*model.named_parameters(), *_persistent_buffers(model)]:
        if tensor.is_meta or tensor.layout != torch.strided:
            continue
        names.setdefault(tensor, name)
        holders = shard_of_parameter(name, tensor, shards, size).holders
        if len(holders) > 1:
            yield Shared(name, local_part(tensor), holders)
    for parameter, key, value, _ in values_of_state(optimizer):
        if parameter not in names or not isinstance(value, torch.Tensor):
            continue
        holders = shard_of_its_state(names[parameter], parameter, shards, size).holders
        if len(holders) > 1:
            local = local_part(value)
            parts = pieces_of(key, local) if is_packed(local) else {key: local}
            for part, tensor in parts.items():
                yield Shared(f"{part} of the optimizer's state of {names[parameter]}", tensor, holders)


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in non_persistent_buffers(module):
                yield f"{path}.{key}" if path else key, buffer


def names_of_state(model: torch.nn.Module) -> dict[str, str]:
    """Return the names of parameters and persistent buffers, each with the name that checkpoints have it under."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in state_tensors(model):
        names[MODEL + name] = first.setdefault(id(value), MODEL + name)
    return names


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: a DTensor's local tensor, all of any other."""
    tensor = tensor.detach()
    return cast(torch.Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _replicated(tensor: torch.Tensor, size: int) -> LocalShard:
    return LocalShard(ShardSpec(tuple(tensor.shape)), tuple(range(size)))


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, shards: Mapping[str, LocalShard], size: int
) -> tuple[dict[str, LocalTensor], dict[str, Any]]:
    """Return the parts of the optimizer's tensors by name, and its groups and plain numbers as JSON.

    A tensor that other ranks hold too, and save, is left out.

    Raises:
        WorkloadError: it holds a parameter that is not the model's, or state that a checkpoint or a shard spec can't
            keep.
    """
    # Names instead of torch's numbers: those depend on the order of groups and on what this rank holds.
    names = parameter_names(model, optimizer)
    parts: dict[str, LocalTensor] = {}
    plain: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for parameter, key, value, owner in values_of_state(optimizer):
        name = f"{OPTIMIZER}{key}/{names[parameter]}"
        if owners.setdefault(name, owner) != owner:
            raise _duplicate_state(optimizer, name)
        parameter_shard = shard_of_its_state(names[parameter], parameter, shards, size)
        tensors = {key: value}
        if not isinstance(value, torch.Tensor):
            plain[name], inner = form_of_state(f"the optimizer's state {key!r}", value)
            tensors = {f"{key}.{number}": tensor for number, tensor in enumerate(inner)}
        for tensor_key, tensor in tensors.items():
            parts |= _state_parts(tensor_key, names[parameter], local_part(tensor), parameter_shard)
    # Groups are kept by names, so that a stage of another pipeline finds its own parameters in them.
    groups = [_group_as_json(group, names) for group in groups_of(optimizer)]
    description = {"class": kind_of(optimizer), "groups": groups, "numbers": plain}
    if len(parts_of(optimizer)) > 1:
        description["owners"] = owners
    return parts, description


def form_of_state(label: str, value: object) -> tuple[Any, list[torch.Tensor]]:
    """Return a value of an optimizer's state as JSON, and the tensors in it.

    A number, a string or None is itself; a list, dict or deque has one key, which no earlier version wrote.

    Args:
        label: a name of `value`, for the error.
        value: the value, which is no tensor.

    Raises:
        WorkloadError: a checkpoint can't keep it.
    """
    tensors: list[torch.Tensor] = []
    try:
        form = encode(label, value, tensors)
    except WorkloadError as error:
        with contextlib.suppress(WorkloadError):  # such as a subclass of a number or a tuple
            return as_json(label, value, with_tensors=False), []
        raise error from None
    is_plain = not isinstance(form, dict | list)
    return (form if is_plain else {_VALUES: form}), tensors


def _state_parts(key: str, parameter: str, local: torch.Tensor, shard: LocalShard) -> dict[str, LocalTensor]:
    """Return the parts that this rank saves of a tensor of a parameter's state, by name.

    Args:
        key: the key of the state.
        parameter: the name of the parameter.
        local: the part of the tensor on this rank.
        shard: the shard of the parameter's state.
    """
    if is_packed(local):
        return _packed_parts(key, parameter, local, shard)
    name = f"{OPTIMIZER}{key}/{parameter}"
    spec = shard.shard_spec
    # State of the parameter's shape (Adam's moments) is cut as the parameter is; one number (a count) is on every rank.
    is_cut = tuple(local.shape) == spec.local_shape
    if not is_cut and spec.cuts and local.numel() != 1:
        raise no_shard_spec(name, local, spec.local_shape)
    state_shard = _shard_of_state(spec.shape if is_cut else tuple(local.shape), shard)
    return {} if state_shard is None else {name: LocalTensor(local, state_shard)}


def _packed_parts(key: str, parameter: str, value: torch.Tensor, shard: LocalShard) -> dict[str, LocalTensor]:
    """Return this rank's part of a moment in few bits, as plain tensors by name."""
    parts = {}
    for piece_key, piece in pieces_of(key, value).items():
        shape = shape_of_piece(shard.shard_spec, piece, value)
        piece_shard = LocalShard(spec_of_piece(shard.shard_spec, shape), shard.holders)
        parts[f"{OPTIMIZER}{piece_key}/{parameter}"] = LocalTensor(piece, piece_shard)
    return parts


def _group_as_json(group: Mapping[str, Any], names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
    settings = {key: as_json(f"the optimizer's {key}", value) for key, value in group.items() if key != "params"}
    return {"parameters": [names[parameter] for parameter in group["params"]], **settings}


def values_of_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, str, Any, int]]:
    """Yield every value of the state: its parameter, its key, itself, and the number of the part that has it.

    Raises:
        WorkloadError: one is no parameter's, or its key would not be found again.
    """
    visited: set[tuple[int, str]] = set()
    for owner, part in enumerate(parts_of(optimizer)):
        for parameter, state in part.state.items():
            if not isinstance(parameter, torch.Tensor):
                raise _nameless_state(part, f"self.state[{parameter!r:.60}]")
            for key, value in state.items():
                if not isinstance(key, str) or "/" in key:
                    raise _nameless_state(part, f"self.state[parameter][{key!r:.60}]")
                if (id(state), key) not in visited:  # parts may share it
                    visited.add((id(state), key))
                    yield cast(torch.nn.Parameter, parameter), key, value, owner


def _nameless_state(optimizer: torch.optim.Optimizer, found: str) -> WorkloadError:
    return WorkloadError(
        f"the state of {type(optimizer).__name__} should have names, by which a checkpoint is read again",
        f"it has {found}",
        "keep what belongs to a parameter in self.state[parameter][NAME], NAME a string without /, and numbers of the "
        "whole in its group: self.param_groups[0][NAME]",
    )


def _duplicate_state(optimizer: torch.optim.Optimizer, name: str) -> WorkloadError:
    return WorkloadError(
        f"the optimizer's state {name} should be kept once",
        f"two of the optimizers in {type(optimizer).__name__} keep it for the same parameter",
        "give each parameter to one of them",
    )


def shard_of_parameter(name: str, parameter: torch.Tensor, shards: Mapping[str, LocalShard], size: int) -> LocalShard:
    """Return the part of a parameter on this rank, and the ranks that have the same.

    Args:
        name: the name of the parameter.
        parameter: a parameter of the model as the strategies left it.
        shards: the part of each state tensor on this rank.
        size: the number of ranks of the world.
    """
    return shards.get(name) or _replicated(parameter, size)


def shard_of_its_state(
    name: str, parameter: torch.nn.Parameter, shards: Mapping[str, LocalShard], size: int
) -> LocalShard:
    """Return the shard of a parameter's optimizer state: the parameter's, unless a strategy has another for it."""
    return shards.get(OPTIMIZER + name) or shard_of_parameter(name, parameter, shards, size)


def _shard_of_state(global_shape: tuple[int, ...], parameter_shard: LocalShard) -> LocalShard | None:
    """Return the shard of a state tensor that this rank saves; None if only others save it.

    One of the parameter's shape is cut as the parameter. Any other (a count of steps) is the same wherever
    there is a part of the parameter: those with the first part save it.
    """
    spec = parameter_shard.shard_spec
    if global_shape == spec.shape:
        return parameter_shard
    if any(cut.part != 0 for cut in spec.cuts):
        return None
    return LocalShard(ShardSpec(global_shape), parameter_shard.holders)


def no_shard_spec(name: str, local: torch.Tensor, shape: tuple[int, ...]) -> WorkloadError:
    """Return the error of state that no rank could find again, where ranks have parts of `shape` of its parameter."""
    return WorkloadError(
        f"the optimizer's state {name} should be of its parameter's shape, or one number",
        f"it is of shape {tuple(local.shape)} for a part of shape {shape}",
        f"write {DECLARATION} = True in the optimizer's class, if it updates each parameter by itself, or plan with "
        "the axis replicate alone",
    )


def read_state(
    folder: Path,
    manifest: Mapping[str, Any],
    model: torch.nn.Module,
    shards: Mapping[str, LocalShard],
    comm: AxisComm,
) -> dict[str, torch.Tensor]:
    """Read this rank's parts of the model's and the optimizer's tensors, as any mesh saved them; verify each bit.

    Nothing is written to the model yet. All ranks call this, and all raise if one of them can't go on.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    # Step 1: what this rank wants of each tensor, and which parts its hashes cover. The mesh that saved may be another.
    local_model = model_parts(model, shards, comm.size)
    verified = {name: part.shard for name, part in local_model.items()}  # what this rank verifies
    shard_specs: dict[str, ShardSpec | None] = {name: shard.shard_spec for name, shard in verified.items()}  # and reads
    parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
    extra = extra_names(model)
    for name, entry in manifest["tensors"].items():
        if name.removeprefix(MODEL) in extra:  # up to version 4, where it was a tensor
            shard_specs[name] = None
            verified[name] = _replicated(torch.empty(entry["shape"], device="meta"), comm.size)
        parameter = _parameter_of(name)
        if parameter not in parameters:
            continue
        if name.startswith(AVERAGE):
            parameter_shard = shard_of_parameter(parameter, parameters[parameter], shards, comm.size)
        else:
            parameter_shard = shard_of_its_state(parameter, parameters[parameter], shards, comm.size)
        if not parameter_shard.holders:
            continue
        spec = parameter_shard.shard_spec
        global_shape = tuple(entry["shape"])
        if name.startswith(OPTIMIZER) and is_piece(_key_of(name)):
            spec = spec_of_piece(spec, global_shape)
            shard_specs[name] = spec
            verified[name] = LocalShard(spec, parameter_shard.holders)
            continue
        # None: all of it.
        shard_specs[name] = spec if global_shape == spec.shape else None
        shard = _shard_of_state(global_shape, parameter_shard)
        if shard is not None:
            verified[name] = shard
    # Step 2: read; a rank that fails must still come to the collective below, or the others wait for it there.
    failure = None
    tensors: dict[str, torch.Tensor] = {}
    restored: dict[str, LocalTensor] = {}
    try:
        check_same_model(folder, manifest["tensors"], local_model)
        tensors = read_parts(folder, manifest, shard_specs)
        restored = {name: LocalTensor(tensors[name], shard) for name, shard in verified.items()}
    except CheckpointError as error:
        failure = error
    # Collective, so a rank that failed calls it too: it hands on its error, and every rank raises.
    verify_hashes(folder, manifest, restored, comm, failure)
    return tensors


def _parameter_of(name: str) -> str | None:
    """Return the parameter of `optimizer/KEY/NAME`, its state, or `average/KEY/NAME`; None for another name."""
    if not name.startswith((OPTIMIZER, AVERAGE)):
        return None
    return name.partition("/")[2].partition("/")[2]


def _key_of(name: str) -> str:
    """Return the key of `optimizer/KEY/NAME`."""
    return name.removeprefix(OPTIMIZER).partition("/")[0]


def averages_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the averages of the parameters that `read_state` read, by the average's name and the parameter's."""
    averages: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(AVERAGE):
            key, _, parameter = name.removeprefix(AVERAGE).partition("/")
            averages.setdefault(key, {})[parameter] = tensor
    return averages


def restore_model(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, LocalShard]
) -> None:
    """Write what `read_state` read to the model's own memory."""
    # The parts are the model's own memory; the size of the world does not matter here.
    with torch.no_grad():
        for name, part in model_parts(model, shards, 1).items():
            if name in tensors:  # a file of weights may be without some
                part.tensor.copy_(tensors[name])
    ExtraState(model).load_state_dict({name.removeprefix(MODEL): tensor for name, tensor in tensors.items()})


def restore_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    saved: dict[str, Any],
    shards: Mapping[str, LocalShard],
) -> None:
    """Put back what `optimizer_state` took, for the parameters whose state is on this rank.

    Raises:
        CheckpointError: the optimizer is of another class or groups parameters otherwise, or its state is not whole.
    """
    names = parameter_names(model, optimizer)
    groups = []
    for group in groups_of(optimizer):
        groups.append([names[parameter] for parameter in group["params"]])
    _check_groups(model, kind_of(optimizer), groups, saved)
    # A user's own class may keep in its groups what grows while it runs; torch's classes don't.
    is_torchs = all(type(member).__module__.startswith("torch.") for member in alone(optimizer))
    check_groups(saved["groups"], groups_of(optimizer), may_grow=not is_torchs)
    local_parameters = _with_state_here(names, shards)
    tensors = _put_together(optimizer, local_parameters, tensors, shards)
    values = _values_of(saved["numbers"], local_parameters, tensors)
    if len(parts_of(optimizer)) > 1:
        _restore_parts(optimizer, names, {**tensors, **values}, saved, shards)
        return
    # torch's `load_state_dict` knows parameters by their number, counted through all groups.
    numbers = {name: number for number, name in enumerate(itertools.chain.from_iterable(groups))}
    named = {name: parameter for name, parameter in local_parameters.items() if name in numbers}
    by_name, apart = _by_parameter({**tensors, **values}, named)
    state = {numbers[name]: values_of_one for name, values_of_one in by_name.items()}
    packed = []
    for saved_group, group, members in zip(saved["groups"], optimizer.param_groups, groups, strict=True):
        # What the checkpoint does not know stays: a scheduler that is new keeps its own numbers in the groups.
        packed.append({**group, **_settings_of(saved_group, group), "params": [numbers[name] for name in members]})
    # torch's `load_state_dict` checks neither keys nor shapes: damage would be a KeyError in the next step.
    check = StateCheck(optimizer)
    for group_number, members in enumerate(groups):
        for name in members:
            if numbers[name] in state:
                local_state = _local_values(state[numbers[name]])
                part = _like_state(local_parameters[name], shards.get(OPTIMIZER + name))
                check.check(group_number, packed[group_number], name, part, local_state)
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    for parameter, key, value in apart:
        optimizer.state[parameter][key] = value


def _by_parameter(
    values: Mapping[str, object], parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, dict[str, Any]], list[tuple[torch.nn.Parameter, str, Any]]]:
    """Return a checkpoint's state of some parameters: the part that torch's `load_state_dict` takes, and all else.

    Of a list it would cast the tensors, and it fails at a string, an array or a bounded deque.
    """
    state: dict[str, dict[str, Any]] = {}
    apart: list[tuple[torch.nn.Parameter, str, Any]] = []
    for name, value in values.items():
        key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
        if not name.startswith(OPTIMIZER) or parameter not in parameters:
            continue
        if isinstance(value, torch.Tensor | int | float):
            state.setdefault(parameter, {})[key] = _as_state_of(parameters[parameter], value)
        else:
            apart.append((parameters[parameter], key, value))
    return state, apart


def _values_of(
    saved: Mapping[str, object], local_parameters: Mapping[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the state that is no tensor, by name, of the parameters with state here, and remove its tensors.

    Args:
        saved: the manifest's numbers.
        local_parameters: the parameters whose state is on this rank, by name.
        tensors: the tensors that were read; those that belong to a list, dict or deque are taken out.

    Raises:
        CheckpointError: a list, dict or deque lacks a tensor.
    """
    values: dict[str, Any] = {}
    for name, form in saved.items():
        key, _, parameter_name = name.removeprefix(OPTIMIZER).partition("/")
        if parameter_name not in local_parameters:
            continue
        if not isinstance(form, dict) or form.keys() != {_VALUES}:
            values[name] = form
            continue
        device = local_part(local_parameters[parameter_name]).device
        inner: dict[int, torch.Tensor] = {}
        # Plain tensors, also of a parameter that is a DTensor: the optimizer steps on this rank's rows.
        while (of_number := f"{OPTIMIZER}{key}.{len(inner)}/{parameter_name}") in tensors:
            inner[len(inner)] = tensors.pop(of_number).to(device)
        try:
            values[name] = decode(form[_VALUES], inner)
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(
                f"the checkpoint's optimizer state {key} of {parameter_name} should be whole",
                f"it can't be read: {type(error).__name__}: {error}",
                "use an earlier one",
            ) from None
    return values


def check_same_precision(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint has the optimizer's state in another precision; before it is read.

    Args:
        optimizer: the optimizer of the job.
        saved: the manifest's entry of the checkpoint's optimizer.
    """
    saved_precision, precision = states_of_kind(saved["class"]), states_of_kind(kind_of(optimizer))
    if saved_precision != precision:
        advice = (
            "leave optimizer_states out" if saved_precision == "full" else f"write optimizer_states={saved_precision}"
        )
        raise CheckpointError(
            f"the checkpoint has the state of a {saved['class']}, in {saved_precision} precision",
            f"the job's optimizer is a {kind_of(optimizer)}: optimizer_states={precision}",
            f"{advice} in the plan, or start without the checkpoint",
        )


def _put_together(
    optimizer: torch.optim.Optimizer,
    local_parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, LocalShard],
) -> dict[str, torch.Tensor]:
    """Return the tensors that were read, with moments in few bits put together from their parts.

    Raises:
        CheckpointError: the optimizer has such a moment in another form.
    """
    owners = _low_precision_owners(optimizer)
    together: dict[str, torch.Tensor] = {}
    pieces: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(OPTIMIZER):
            together[name] = tensor
            continue
        key, _, parameter_name = name.removeprefix(OPTIMIZER).partition("/")
        if is_piece(key):
            pieces.setdefault((key.rpartition(".")[0], parameter_name), {})[key] = tensor
            continue
        owner = owners.get(local_parameters[parameter_name]) if parameter_name in local_parameters else None
        if owner is not None and keeps_packed(owner, tensor.numel()):
            raise _in_another_form(optimizer, key, parameter_name, "in full")
        together[name] = tensor
    for (key, name), read in pieces.items():
        if name not in local_parameters:
            continue
        parameter = local_parameters[name]
        like = _like_state(parameter, shards.get(OPTIMIZER + name))
        empty = torch.empty(like.shape, dtype=like.dtype, device=local_part(parameter).device)
        value = put_together(owners[parameter], empty, key, read) if parameter in owners else None
        if value is None:
            raise _in_another_form(optimizer, key, name, "in blocks")
        together[f"{OPTIMIZER}{key}/{name}"] = value
    return together


def _low_precision_owners(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, torch.optim.Optimizer]:
    """Return for each parameter with states in few bits the optimizer that has it."""
    owners: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
    for part in parts_of(optimizer):
        if is_low_precision(part):
            for group in part.param_groups:
                owners |= dict.fromkeys(group["params"], part)
    return owners


def _in_another_form(optimizer: torch.optim.Optimizer, key: str, name: str, form: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's optimizer state {key} of {name} should fit the job's optimizer",
        f"it is {form}, and the job's {kind_of(optimizer)} has it in another form",
        "write the optimizer_states that the checkpoint was saved with, or start without the checkpoint",
    )


def _with_state_here(
    names: Mapping[torch.nn.Parameter, str], shards: Mapping[str, LocalShard]
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose optimizer state is on this rank, by name."""
    named = {}
    for parameter, name in names.items():
        shard = shards.get(OPTIMIZER + name)
        if not parameter.is_meta and (shard is None or shard.holders):
            named[name] = parameter
    return named


def _like_state(parameter: torch.nn.Parameter, shard: LocalShard | None) -> torch.Tensor:
    """Return a tensor of the shape that state of the parameter has here: of its part, or of all of it."""
    if shard is None:
        return local_part(parameter)
    return torch.empty(shard.shard_spec.local_shape, dtype=parameter.dtype, device="meta")


def _settings_of(saved_group: Mapping[str, object], group: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of a saved group, in the types that they have in the optimizer's group."""
    settings = {}
    for key, value in saved_group.items():
        if key != "parameters":
            settings[key] = in_types_of(value, group.get(key))
    return settings


def _local_values(state: Mapping[str, object]) -> dict[str, Any]:
    values = {}
    for key, value in state.items():
        values[key] = local_part(value) if isinstance(value, torch.Tensor) else value
    return values


def _restore_parts(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    values: Mapping[str, object],
    saved: dict[str, Any],
    shards: Mapping[str, LocalShard],
) -> None:
    """Put back the state of an optimizer made of several; `values` are tensors and all else, by name."""
    local_parameters = _with_state_here(names, shards)
    part_numbers = range(len(parts_of(optimizer)))
    owners = saved.get("owners", {})
    state: dict[int, dict[torch.nn.Parameter, dict[str, Any]]] = {}
    for name, value in values.items():
        key, _, parameter_name = name.removeprefix(OPTIMIZER).partition("/")
        if not name.startswith(OPTIMIZER) or parameter_name not in local_parameters:
            continue
        if owners.get(name) not in part_numbers:
            raise _other_parts(optimizer)
        states_of_part = state.setdefault(owners[name], {})
        states_of_part.setdefault(local_parameters[parameter_name], {})[key] = value
    groups = []
    for saved_group, group in zip(saved["groups"], groups_of(optimizer), strict=True):
        groups.append(_settings_of(saved_group, group))
    like = {}
    for name, parameter in local_parameters.items():
        like[parameter] = (name, _like_state(parameter, shards.get(OPTIMIZER + name)))
    restore_parts(optimizer, groups, state, like)


def _other_parts(optimizer: torch.optim.Optimizer) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's optimizer should be made of {len(parts_of(optimizer))} optimizers, as the workload's is",
        "it does not say which of them has what",
        "make the optimizer as it was when the checkpoint was saved",
    )


def _check_groups(model: torch.nn.Module, kind: str, groups: list[list[str]], saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless every parameter that is here is in the group in which it was saved."""
    local_names = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    is_same = kind == saved["class"] and len(groups) == len(saved["groups"])
    for members, saved_group in zip(groups, saved["groups"], strict=False):
        if not is_same:
            break
        # A stage knows its own members only, so names that are saved but not here may be another rank's.
        saved_members = set(saved_group["parameters"])
        is_same = saved_members & local_names <= set(members) <= saved_members
    if not is_same:
        found = f"this one is {kind}, {_counted(groups)}"
        if (kind, len(groups)) == (saved["class"], len(saved["groups"])):
            found = "this one's groups have other parameters"
        error = CheckpointError(
            f"the optimizer should be that of the checkpoint: {saved['class']}, {_counted(saved['groups'])}",
            found,
            "make the optimizer as it was when the checkpoint was saved, or start without the checkpoint",
        )
        error.exit_code = 2
        raise error


def _counted(groups: Sequence[object]) -> str:
    return "1 group of parameters" if len(groups) == 1 else f"{len(groups)} groups of parameters"


def _as_state_of(parameter: torch.nn.Parameter, value: object) -> object:
    """Return a part that was read, as the optimizer keeps state of `parameter`: a DTensor's is one on its mesh."""
    from_local = getattr(type(parameter), "from_local", None)
    if from_local is None or not isinstance(value, torch.Tensor) or is_packed(value):
        return value
    local = local_part(parameter)
    if value.shape != local.shape:  # a count of steps is a plain tensor
        return value
    dtensor: Any = parameter
    # Shape and stride are given: torch would take the parts of all ranks to be equally large. Without `run_check` it
    # sends nothing.
    return from_local(
        value.to(local.device),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )


def config_facts(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return the configs of a transformers model, for `paceline export`; nothing for any other model.

    As `save_pretrained` does, the class and the dtype of the parameters are put in.
    """
    configs: dict[str, dict[str, Any]] = {}
    for key in CONFIGS:
        to_json = getattr(getattr(model, key, None), "to_json_string", None)
        if not callable(to_json):
            continue
        # The config is another library's: one that can't be read is left out, and does not fail the checkpoint.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            config = parse_json(to_json(), "a config")
            if isinstance(config, dict):
                configs[key] = config
    if "config" in configs:
        kind = type(model).__name__.removeprefix("FSDP")  # fully_shard gives the class another name
        configs["config"] = {**configs["config"], "architectures": [kind], "dtype": _model_dtype(model)}
    return configs


def _model_dtype(model: torch.nn.Module) -> str:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return dtype_of(parameter)
    return "float32"


def own_tensors(
    random: Mapping[str, torch.Tensor], wire: Mapping[str, torch.Tensor], kept_tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's own tensors under their checkpoint names."""
    tensors = {f"{OWN}random/{name}": tensor for name, tensor in random.items()}
    tensors.update({OWN + name: tensor for name, tensor in kept_tensors.items()})
    for name, tensor in wire.items():
        tensors[f"{OWN}wire/{name}"] = tensor
    return tensors


def restore_wire(state: Mapping[str, torch.Tensor], rank_tensors: Mapping[str, torch.Tensor]) -> bool:
    """Put back what compression carries over; change nothing and return False if other compression was saved."""
    # Residuals of another compression, or of other buckets, fit no bucket of now.
    saved = part(rank_tensors, "wire/")
    if _layout(state) != _layout(saved):
        return False
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    return True


def _layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter of the model; the optimizer's are among them.

    Raises:
        WorkloadError: one of them is not the model's.
    """
    # A tied parameter has the first of its names, as in `model_parts`.
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


def as_json(label: str, value: object, with_tensors: bool = True) -> Any:
    """Return `value` as JSON keeps it: tuples as lists, whole numbers as keys as text, tensors of one number as that.

    `alike.in_types_of` undoes all three where a value of the same form is at hand.

    Args:
        label: a name of `value`, for the error.
        value: the value of a setting or a state.
        with_tensors: True if tensors of one number may be in it.

    Raises:
        WorkloadError: JSON can't keep it.
    """
    try:
        return parse_json(json.dumps(value, default=_number_of if with_tensors else None), label)
    except (TypeError, ValueError, RecursionError):
        raise WorkloadError(
            f"{label} should be something that JSON can keep",
            f"it is a {type(value).__name__}",
            "use numbers, strings, lists and dicts; checkpoints hold no pickled objects",
        ) from None


def _number_of(value: Any) -> float:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    if is_one or isinstance(value, numbers.Real):  # such as numpy's
        return cast(float, value.item())
    raise TypeError("neither JSON nor a number")
