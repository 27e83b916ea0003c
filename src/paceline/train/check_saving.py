"""Find out before the first step whether checkpoints can keep what the job has, by trying it on the real objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.checkpoint.tensor_file import DTYPES
from paceline.nouns.errors import WorkloadError
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.low_precision_states import is_low_precision
from paceline.parallel.optimizer_list import alone
from paceline.parallel.optimizer_parts import groups_of, parts_of
from paceline.train import snapshot
from paceline.train.schedulers import state_of


def check_can_save(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    shards: Mapping[str, LocalShard],
    size: int,
) -> None:
    """Raise WorkloadError where a checkpoint can't keep the model, the optimizer or the scheduler.

    An optimizer that is not torch's own is tried on small tensors: what it keeps is there only after a step.

    Args:
        model: the model as the strategies left it.
        optimizer: the optimizer of the job.
        scheduler: the scheduler of the job, or None.
        shards: the part of each state tensor that this rank holds.
        size: the number of ranks of the world.
    """
    for name, part in snapshot.model_parts(model, shards, size).items():
        _check_tensor(f"the model's {name.partition('/')[2]}", part.tensor)
    _check_groups(optimizer)
    names = snapshot.parameter_names(model, optimizer)
    for member in alone(optimizer):
        if not is_low_precision(member) and not all(_is_torchs(part) for part in parts_of(member)):
            _check_state(member, names, shards, size)
    if scheduler is not None:
        snapshot.as_json("the scheduler's state", state_of(scheduler))


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    for group in groups_of(optimizer):
        for name, value in group.items():
            if name != "params":
                snapshot.as_json(f"the optimizer's {name}", value)


def _check_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    local_shards: Mapping[str, LocalShard],
    size: int,
) -> None:
    from paceline.parallel.elementwise import steps_tried  # with it comes FSDP: 0.6 s, for few optimizers

    for twin, small, members in steps_tried(optimizer):
        _check_groups(twin)
        shards = {}
        for parameter in members:
            name = names[parameter]
            shards[name] = snapshot.shard_of_its_state(name, parameter, local_shards, size)
        cut = [name for name, shard in shards.items() if shard.shard_spec.cuts]
        for _, key, value, _ in snapshot.values_of_state(twin):
            tensors = [value]
            if not isinstance(value, torch.Tensor):
                _, tensors = snapshot.form_of_state(f"the optimizer's state {key!r}", value)
            for tensor in tensors:
                _check_tensor(f"the optimizer's state {key!r}", tensor)
                if cut and tensor.shape != small.shape and tensor.numel() != 1:
                    raise snapshot.no_shard_spec(f"{OPTIMIZER}{key}/{cut[0]}", tensor, tuple(small.shape))


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not torch.strided:
        raise WorkloadError(
            f"{name} should be a tensor that a checkpoint can keep",
            f"it is of {dtype}, {tensor.layout}",
            f"checkpoints keep dense tensors of {', '.join(DTYPES)}; of a buffer, register it with persistent=False "
            "where the model's code makes it anew",
        )
