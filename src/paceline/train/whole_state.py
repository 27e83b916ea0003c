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
    from paceline.train.job import Job


def put_together(whole: torch.Tensor, part: LocalTensor | None, comm: AxisComm) -> None:
    """Write to `whole` the tensor that all ranks together have. Collective.

    Args:
        whole: of the tensor's shape and dtype, on the device of the collectives.
        part: this rank's, or None.
        comm: all ranks.
    """
    for bits in bits_of(whole):
        bits.zero_()
    # Of the holders of a part the first sends it: zeros of all others leave its bits as they are.
    if part is not None and part.held.holders[0] == comm.peers[comm.rank]:
        copy_common(whole, ShardSpec(tuple(whole.shape)), part.tensor, part.held.shard_spec)
    for bits in bits_of(whole):
        wide = bits.to(torch.int64, copy=True).contiguous()  # not every transport adds up narrow numbers
        comm.all_reduce(wide)
        bits.copy_(wide)


def refuse_parts(model: torch.nn.Module, held: Mapping[str, LocalShard]) -> None:
    """Have `state_dict()` of a workload's model refused where this rank has parts: they would pass for the whole.

    Args:
        model: as the strategies left it. Checkpoints, which know what is cut, ask with `keep_vars`.
        held: which part of a state tensor is here.
    """
    parts = [held[name] for name, _ in model.named_parameters() if name in held]
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


def whole_state(job: Job, prefix: str, wants: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers whole, on the CPU of rank 0; the other ranks get nothing. Collective.

    Args:
        job: under any plan of a loop.
        prefix: of one model's names in the job's.
        wants: whether a tensor is wanted, by its name in that model.

    Returns:
        By the name in that model. Names of one tied tensor have the same tensor.
    """
    parts = snapshot.model_parts(job.model, job.parallel.held(), job.size)
    names = snapshot.names_of_state(job.model)
    found: dict[str, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, first in names.items():
        own = name.removeprefix(MODEL)
        if not own.startswith(prefix) or not wants(own.removeprefix(prefix)):
            continue
        if first not in found:
            found[first] = _whole(parts[first], job.world, job.rank)
        if job.rank == 0:
            result[own.removeprefix(prefix)] = found[first]
    return result


def _whole(part: LocalTensor, comm: AxisComm, rank: int) -> torch.Tensor:
    """Return the tensor on rank 0, and an empty one elsewhere."""
    spec = part.held.shard_spec
    if spec.cuts:  # every rank has a part of it, and knows so
        whole = torch.empty(spec.shape, dtype=part.tensor.dtype, device=part.tensor.device)
        put_together(whole, part, comm)
    else:
        whole = part.tensor
    return whole.detach().cpu().clone() if rank == 0 else torch.empty(0)
