"""Put tensors together of which ranks have parts: one at a time, so that a rank has no second model in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from paceline.checkpoint.manifest import MODEL
from paceline.checkpoint.reshard import LocalTensor, bits_of, copy_common
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.train import snapshot

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob


def put_together(full: torch.Tensor, part: LocalTensor | None, comm: AxisComm) -> None:
    """Write to `full` the tensor that all ranks together have. Collective.

    Args:
        full: the tensor that is filled, of its final shape and dtype, on the device of the collectives.
        part: the part of this rank, or None.
        comm: the communicator of all ranks.
    """
    for bits in bits_of(full):
        bits.zero_()
    # Of the holders of a part the first sends it: zeros of all others leave its bits as they are.
    if part is not None and part.shard.holders[0] == comm.peers[comm.rank]:
        copy_common(full, ShardSpec(tuple(full.shape)), part.tensor, part.shard.shard_spec)
    for bits in bits_of(full):
        wide = bits.to(torch.int64, copy=True).contiguous()  # not every transport adds up narrow numbers
        comm.all_reduce(wide)
        bits.copy_(wide)


def refuse_parts(model: torch.nn.Module, shards: Mapping[str, LocalShard]) -> None:
    """Have `state_dict()` of a workload's model refused where this rank has parts: they would pass for the whole.

    Args:
        model: the model as the strategies left it. Checkpoints, which know what is cut, ask with `keep_vars`.
        shards: the part of each state tensor on this rank.
    """
    parts = [shards[name] for name, _ in model.named_parameters() if name in shards]
    is_cut = any(part.shard_spec.cuts for part in parts)
    if not is_cut and not any(parameter.is_meta for parameter in model.parameters()):
        return

    def refuse(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            raise WorkloadError(
                "the model is in parts, and state_dict() should have whole tensors",
                "job.model has this rank's parts under the plan",
                "write job.whole_model().state_dict(), on every rank; or job.save(FOLDER), and `paceline export` for a "
                "file",
            )

    for module in model.modules():
        module.register_state_dict_pre_hook(refuse)


def whole_state(job: BaseJob, prefix: str, wants: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers whole, on the CPU of rank 0; the other ranks get nothing. Collective.

    Args:
        job: the job of a loop, under any plan.
        prefix: the prefix of one model's names in the job.
        wants: a function that returns True if a tensor is wanted, by its name in that model.

    Returns:
        The tensors by their names in that model. Names of one tied tensor have the same tensor.
    """
    parts = snapshot.model_parts(job.model, job.parallel.local_shards(), job.size)
    names = snapshot.names_of_state(job.model)
    found: dict[str, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, first in names.items():
        name_in_job = name.removeprefix(MODEL)
        if not name_in_job.startswith(prefix) or not wants(name_in_job.removeprefix(prefix)):
            continue
        if first not in found:
            found[first] = _on_first_rank(parts[first], job.world, job.rank)
        if job.rank == 0:
            result[name_in_job.removeprefix(prefix)] = found[first]
    return result


def _on_first_rank(part: LocalTensor, comm: AxisComm, rank: int) -> torch.Tensor:
    """Return the tensor on rank 0, and an empty one elsewhere."""
    spec = part.shard.shard_spec
    if spec.cuts:  # every rank has a part of it, and knows so
        full = torch.empty(spec.shape, dtype=part.tensor.dtype, device=part.tensor.device)
        put_together(full, part, comm)
    else:
        full = part.tensor
    return full.detach().cpu().clone() if rank == 0 else torch.empty(0)
