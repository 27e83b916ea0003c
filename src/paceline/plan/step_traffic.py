"""Predict a whole step's traffic under any mesh, by rank of the pipeline and axis. The ledger must count the same.

Batch norm over several ranks, and buffers that change, come on top: they depend on the model's mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.nouns.mesh import DATA_AXES, SPREADING_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import chunk_range
from paceline.plan.traffic import (
    TensorFacts,
    Traffic,
    context,
    expert,
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
from paceline.plan.traffic_whole import whole_updates


def step_traffic(
    plan: Plan, model: Mapping[str, Any], shard_rank: int = 0, tensor_rank: int = 0
) -> list[list[Traffic]] | None:
    """Return for each rank along `pipeline` (one where there is none) what it sends in the first step.

    Args:
        plan: mesh and options.
        model: the model under this plan, as `profile/describe.py` describes it.
        shard_rank: whose rows: where they don't divide, the first ranks have more.
        tensor_rank: which whole parameters are its own to update; whose pieces, `model` says.

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
    # One small sum over all ranks: loss, weight, flags (docs/design.md, "One small all_reduce").
    common = [Traffic("all_reduce", _step_axis(mesh), 1, sums_bytes(mesh.world_size, buffers))]
    if model["clips"]:  # the norm is summed over the axes that split gradients: one float64 each
        for axis in mesh.used(SPREADING_AXES):
            common.append(Traffic("all_reduce", axis, 1, 8))
    if model["scales"]:  # whether gradients have overflown under fp16
        for axis in mesh.used(SPREADING_AXES):
            common.append(Traffic("all_reduce", axis, 1, 4))
    at = {"shard": shard_rank, "tensor": tensor_rank}
    if "shards" in model:
        return _sharded(plan, mesh, model, common, at)
    result = []
    for rank in model["split"]["ranks"]:
        rows = _split(plan, mesh, rank, at)
        if rows is None:
            return None
        pieces = [as_tensor(sizes) for sizes in rank["parameters"]]
        result.append(merged([*common, *rows, *_whole(mesh, model, pieces, at)]))
    return result


def as_tensor(sizes: Mapping[str, Any]) -> TensorFacts:
    """Return a tensor from decoded JSON."""
    return TensorFacts(**{**sizes, "shape": tuple(sizes["shape"])})


def _split(plan: Plan, mesh: Mesh, rank: Mapping[str, Any], at: Mapping[str, int]) -> list[Traffic] | None:
    """Return what a rank of `pipeline` sends where the model is split; None where it depends on the data."""
    if mesh.size("expert") > 1 and mesh.size("tensor") > 1:
        return None  # `tensor` sums rows of experts, of which there are as many as the router sends
    parameters = [as_tensor(sizes) for sizes in rank["parameters"]]
    frozen = [as_tensor(sizes) for sizes in rank["frozen"]]
    # `replicate` sums what `shard` has left of each gradient on this rank.
    local_parameters = _rows_of(parameters, mesh.size("shard"), at["shard"])
    gradients = replicated_gradients(plan, mesh, local_parameters)
    if gradients is None:
        return None
    return [
        *gradients,
        *flat_shard(mesh.size("shard"), parameters, frozen),
        *tensor(rank["graph"]),
        *context(rank["graph"]),
        *expert(rank["graph"]),
        *pipeline(rank["sends"], rank["tied"]),
    ]


def _sharded(
    plan: Plan, mesh: Mesh, model: Mapping[str, Any], common: list[Traffic], at: Mapping[str, int]
) -> list[list[Traffic]] | None:
    """Return what a rank sends where `shard` splits parameters; None where it depends on the data."""
    ranks = mesh.size("shard")
    parameters = [as_tensor(sizes) for sizes in model["parameters"]]
    gradients = replicated_gradients(plan, mesh, _rows_of(parameters, ranks, at["shard"]))
    if gradients is None:
        return None
    shards = [ShardTraffic(**{**shard, "shape": tuple(shard["shape"])}) for shard in model["shards"]]
    samples = -(-model["batch_size"] // mesh.data_size)  # rounded up
    micro_batches = -(-samples // (model["micro_batch_size"] or samples))
    rows = [*shard_traffic(plan, ranks, shards, micro_batches), *_whole(mesh, model, parameters, at)]
    return [merged([*common, *gradients, *rows])]


def _whole(mesh: Mesh, model: Mapping[str, Any], parameters: list[TensorFacts], at: Mapping[str, int]) -> list[Traffic]:
    """Return what whole updates of this rank's parameters, as `tensor` has cut them, send."""
    full_numel = {sizes["name"]: sizes["numel"] for sizes in model["parameters"]}
    rows = _rows_of(parameters, mesh.size("shard"), at["shard"])
    return whole_updates(model["whole"], full_numel, list(zip(parameters, rows, strict=True)), at)


def _rows_of(tensors: list[TensorFacts], ranks: int, rank: int) -> list[TensorFacts]:
    """Return the rows of each tensor that one of `ranks` keeps."""
    result = []
    for full in tensors:
        if not full.shape:  # a scalar is on every rank
            result.append(full)
            continue
        rows, *others = full.shape  # only the first dimension is cut
        start, stop = chunk_range(rows, rank, ranks)
        numel = full.numel // rows * (stop - start) if rows else full.numel
        result.append(dataclasses.replace(full, shape=(stop - start, *others), numel=numel))
    return result


def _step_axis(mesh: Mesh) -> str:
    """Return the name of the group of all ranks: the axis in use, or what several are called together."""
    used = mesh.used()
    if len(used) == 1:
        return used[0]
    if set(used) <= set(DATA_AXES):
        return "data"
    return "step"
