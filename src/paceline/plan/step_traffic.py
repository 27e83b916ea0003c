"""A whole step under any mesh: what each rank of the pipeline sends, axis by axis. The ledger must count the same.

Batch norm over several ranks, and buffers that change, come on top: they depend on the model's mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import chunk_range
from paceline.plan.traffic import (
    TensorFacts,
    Traffic,
    flat_shard,
    merged,
    pipeline,
    replicate,
    replicated_gradients,
    server,
    sums_bytes,
    tensor,
)
from paceline.plan.traffic_shard import ShardTraffic, shard_traffic


def step_traffic(plan: Plan, model: Mapping[str, Any], shard_rank: int = 0) -> list[list[Traffic]] | None:
    """For each rank along `pipeline` (one where there is none) what it sends in the first step.

    Args:
        plan: mesh and options.
        model: what `profile/describe.py` says of the model under this plan.
        shard_rank: whose rows: where they don't divide, the first ranks have more.

    Returns:
        None where it depends on the data.
    """
    mesh = Mesh.parse(plan.mesh)
    buffers = len(model["buffers"])
    trained = [as_tensor(sizes) for sizes in model["parameters"]]
    if "ranges" in model:
        return [server(model["ranges"])]
    if "split" not in model and "shards" not in model:
        rows = replicate(plan, trained, buffers)
        return None if rows is None else [rows]
    step_axis = _step_axis(mesh)
    common = [Traffic("all_reduce", step_axis, 1, sums_bytes(mesh.world_size, buffers))]
    if model["clips"]:
        spread = [axis for axis in ("tensor", "shard", "pipeline") if mesh.size(axis) > 1]
        common += [Traffic("all_reduce", axis, 1, 8) for axis in spread]
    if "shards" in model:
        return _sharded(plan, mesh, model, common, shard_rank)
    result = []
    for rank in model["split"]["ranks"]:
        held = [as_tensor(sizes) for sizes in rank["parameters"]]
        rows = replicated_gradients(plan, mesh.size("replicate"), _rows_of(held, mesh.size("shard"), shard_rank))
        if rows is None:
            return None
        rows += flat_shard(mesh.size("shard"), held, [as_tensor(sizes) for sizes in rank["frozen"]])
        result.append(merged([*common, *rows, *tensor(rank["graph"]), *pipeline(rank["sends"], rank["tied"])]))
    return result


def as_tensor(sizes: Mapping[str, Any]) -> TensorFacts:
    """A tensor of decoded JSON."""
    return TensorFacts(**{**sizes, "shape": tuple(sizes["shape"])})


def _sharded(
    plan: Plan, mesh: Mesh, model: Mapping[str, Any], common: list[Traffic], shard_rank: int
) -> list[list[Traffic]] | None:
    parts = [ShardTraffic(**{**part, "shape": tuple(part["shape"])}) for part in model["shards"]]
    ranks = mesh.size("shard")
    samples = -(-model["batch_size"] // mesh.data_size)
    micro_batches = -(-samples // (model["micro_batch_size"] or samples))
    trained = [as_tensor(sizes) for sizes in model["parameters"]]
    rows = replicated_gradients(plan, mesh.size("replicate"), _rows_of(trained, ranks, shard_rank))
    return None if rows is None else [merged([*common, *rows, *shard_traffic(plan, ranks, parts, micro_batches)])]


def _rows_of(held: list[TensorFacts], ranks: int, rank: int) -> list[TensorFacts]:
    """The rows of each tensor that one of `ranks` keeps."""
    result = []
    for one in held:
        start, stop = chunk_range(one.shape[0], rank, ranks) if one.shape else (0, 0)
        shape = (stop - start, *one.shape[1:]) if one.shape else ()
        numel = one.numel // one.shape[0] * shape[0] if one.shape and one.shape[0] else one.numel
        result.append(TensorFacts(one.name, shape, one.dtype, numel, one.item_bytes, one.is_sparse))
    return result


def _step_axis(mesh: Mesh) -> str:
    used = [axis for axis in ("replicate", "shard", "tensor", "pipeline") if mesh.size(axis) > 1]
    if set(used) <= {"replicate", "shard"}:
        return used[0] if len(used) == 1 else "data"
    return used[0] if len(used) == 1 else "step"
