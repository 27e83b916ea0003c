"""Copy weights between modules of a loop's models: `job.copy_weights(teacher.encoder, student.encoder)`.

Under a plan that cuts models each rank has a part of every tensor, and of two modules not always the same part: one is
split when it is called first, the other is whole until then. Where the parts are cut alike nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from paceline.checkpoint.manifest import MODEL
from paceline.checkpoint.reshard import LocalTensor, take
from paceline.nouns.errors import UsageError
from paceline.train import snapshot
from paceline.train.whole_state import put_together

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob

_NAMED = 3  # names that an error gives


def copy_weights(job: BaseJob, source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Write parameters and persistent buffers of one module to another of the same names and shapes. Collective.

    Args:
        job: the job of a loop, under any plan.
        source: one of the job's models, or a module in one of them.
        target: the model or module to which the weights are written.

    Raises:
        UsageError: one is none of these, or they have other names or shapes.
    """
    parts = snapshot.model_parts(job.model, job.parallel.local_shards(), job.size)
    names = snapshot.names_of_state(job.model)
    read, written = (_parts_of(job, module, parts, names) for module in (source, target))
    _check_alike(read, written)
    with torch.no_grad():
        for name, part in written.items():
            part.tensor.copy_(_as_cut(read[name], part, job))


def _parts_of(
    job: BaseJob, module: torch.nn.Module, parts: dict[str, LocalTensor], names: dict[str, str]
) -> dict[str, LocalTensor]:
    """Return this rank's parts of a module's tensors by their names in it."""
    for path, candidate in job.model.named_modules():
        if candidate is module:
            prefix = f"{MODEL}{path}." if path else MODEL
            found = {name: first for name, first in names.items() if name.startswith(prefix)}
            return {name.removeprefix(prefix): parts[first] for name, first in found.items()}
    raise UsageError(
        "job.copy_weights copies between modules of the models that paceline.prepare was handed",
        f"this {type(module).__name__} is in none of them",
        "hand its model to paceline.prepare too, or load a file by job.load(path, weights_only=True)",
    )


def _check_alike(source: dict[str, LocalTensor], target: dict[str, LocalTensor]) -> None:
    shapes = [_shapes_of(side) for side in (source, target)]
    if shapes[0] == shapes[1]:
        return
    different = [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
    listed = []
    for name in different[:_NAMED]:
        in_source, in_target = (str(side[name]) if name in side else "missing" for side in shapes)
        listed.append(f"{name} is {in_source} in the source and {in_target} in the target")
    more = f"; and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    raise UsageError(
        "job.copy_weights copies between modules with the same names and shapes",
        "; ".join(listed) + more,
        "copy the modules that are alike, one by one, such as teacher.layers[1] to student.layers[0]",
    )


def _shapes_of(parts: Mapping[str, LocalTensor]) -> dict[str, tuple[int, ...]]:
    return {name: part.shard.shard_spec.shape for name, part in parts.items()}


def _as_cut(source: LocalTensor, target: LocalTensor, job: BaseJob) -> torch.Tensor:
    """Return the values of the target's part on this rank. Collective where the two are cut differently."""
    source_spec, target_spec = source.shard.shard_spec, target.shard.shard_spec
    if source_spec == target_spec:  # on every rank: specs differ between ranks only in the part
        return source.tensor
    full = source.tensor
    if source_spec.cuts:
        full = torch.empty(source_spec.shape, dtype=source.tensor.dtype, device=source.tensor.device)
        put_together(full, source, job.world)
    return take(full, target_spec) if target_spec.cuts else full
