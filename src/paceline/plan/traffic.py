"""Predict what a step sends on each axis: calls and payload bytes by collective. The ledger must count the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nouns.buckets import group_parameters
from paceline.nouns.mesh import EXPERT_GRADIENT_AXES, GRADIENT_AXES, Mesh
from paceline.nouns.plan import Plan

# The ledger counts payloads, not what an algorithm such as a ring sends of them.
_NARROW = {"bf16": 2, "fp16": 2}  # bytes of a compressed gradient's numbers


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The sizes of a parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    item_bytes: int
    is_sparse: bool = False
    is_of_experts: bool = False  # each rank of `expert` has others


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls and payload bytes of one collective on one axis, per rank and step."""

    collective: str
    axis: str
    calls: int
    payload_bytes: int


def replicate(plan: Plan, trained: Sequence[TensorFacts], buffers: int) -> list[Traffic] | None:
    """Predict a step of `parallel/replicate/strategy.py`, alone on the mesh, whose buffers do not change.

    Args:
        plan: its mesh, compression and bucket size.
        trained: the parameters that get gradients, in the model's order.
        buffers: number of buffers of the model.

    Returns:
        None where the traffic depends on the data: sparse parameters, top-k.
    """
    ranks = plan.world_size
    if ranks == 1:
        return []
    gradients = replicated_gradients(plan, Mesh.parse(plan.mesh), trained)
    if gradients is None:
        return None
    return merged([*gradients, Traffic("all_reduce", "replicate", 1, sums_bytes(ranks, buffers))])


def replicated_gradients(plan: Plan, mesh: Mesh, trained: Sequence[TensorFacts]) -> list[Traffic] | None:
    """Predict the buckets' sums; None where they depend on the data: sparse parameters, top-k."""
    of_experts = [tensor for tensor in trained if tensor.is_of_experts]
    if of_experts:
        others = replicated_gradients(plan, mesh, [tensor for tensor in trained if not tensor.is_of_experts])
        if others is None:
            return None
        return [*others, *_buckets(plan, mesh.used(EXPERT_GRADIENT_AXES), "expert_gradients", of_experts)]
    if plan.compression in ("topk", "powersgd") or any(tensor.is_sparse for tensor in trained):
        return None
    axes = mesh.used(GRADIENT_AXES)
    return _buckets(plan, axes, "step" if len(axes) == len(mesh.used()) else "gradients", trained)


def _buckets(plan: Plan, axes: Sequence[str], product: str, trained: Sequence[TensorFacts]) -> list[Traffic]:
    """Return the sums of the buckets over `axes`; over several they are called `product`."""
    if not axes:
        return []
    sizes = [(tensor.numel * tensor.item_bytes, tensor.dtype) for tensor in trained]
    buckets = group_parameters(sizes, plan.bucket_bytes)
    gradient_bytes = 0
    for indices in buckets:
        item_bytes = _NARROW.get(plan.compression, trained[indices[0]].item_bytes)
        flags = len(indices)  # at the bucket's end a number per parameter says who has a gradient
        gradient_bytes += item_bytes * (flags + sum(trained[index].numel for index in indices))
    axis = axes[0] if len(axes) == 1 else product
    return [Traffic("all_reduce", axis, len(buckets), gradient_bytes)]


def sums_bytes(ranks: int, buffers: int) -> int:
    """Return the bytes of every step's one small sum: loss, weight, stop flag, a flag per rank and one per buffer."""
    return 8 * (3 + ranks + buffers)  # float64 numbers: sums of losses must not lose digits


def tensor(graph: Sequence[Sequence[Mapping[str, Any]]]) -> list[Traffic]:
    """Return what the graphs of `parallel/tensor.py` enter in the ledger in a step, micro-batch by micro-batch."""
    return _of_graph(graph, "tensor")


def context(graph: Sequence[Sequence[Mapping[str, Any]]]) -> list[Traffic]:
    """Return what the graphs of `parallel/context.py` enter in the ledger in a step, micro-batch by micro-batch."""
    return _of_graph(graph, "context")


def expert(graph: Sequence[Sequence[Mapping[str, Any]]]) -> list[Traffic]:
    """Return what the graphs of `parallel/expert.py` enter in the ledger in a step, micro-batch by micro-batch."""
    return _of_graph(graph, "expert")


def _of_graph(graph: Sequence[Sequence[Mapping[str, Any]]], axis: str) -> list[Traffic]:
    traffic = []
    for micro_batch in graph:
        for row in micro_batch:
            if row["axis"] == axis:
                traffic.append(Traffic(row["collective"], axis, row["calls"], row["bytes"]))
    return traffic


def server(ranges: Sequence[Sequence[int]]) -> list[Traffic]:
    """Predict what a worker of parameter servers pushes and pulls.

    Args:
        ranges: of every server's range the bytes of its segments.
    """
    total = sum(sum(segments) for segments in ranges)
    pushes = Traffic("push", "server", sum(len(segments) for segments in ranges), total)
    return [pushes, Traffic("pull", "server", len(ranges), total)]


def pipeline(sends: Sequence[Sequence[int]], tied: Sequence[int]) -> list[Traffic]:
    """Predict a pipeline's step on one rank.

    Args:
        sends: bytes of each message, by micro-batch.
        tied: bytes of each message with a tied weight's gradient.
    """
    messages = list(tied)
    for micro_batch in sends:
        messages += micro_batch
    if not messages:
        return []
    return [Traffic("send", "pipeline", len(messages), sum(messages))]


def flat_shard(ranks: int, trained: Sequence[TensorFacts], frozen: Sequence[TensorFacts] = ()) -> list[Traffic]:
    """Predict a step of `parallel/shard/zero1.py`: rows gathered, gradients summed and scattered, flags of use."""
    if ranks == 1:
        return []
    traffic: list[Traffic] = []
    everything = [*trained, *frozen]
    for dtype in _dtypes(everything):  # tensors of one dtype travel together
        sharded = [tensor for tensor in everything if tensor.dtype == dtype and tensor.shape]
        padded = sum(_padded_bytes(tensor, ranks) for tensor in sharded)
        traffic.append(Traffic("all_gather", "shard", 1 if sharded else 0, padded))
    for dtype in _dtypes(trained):
        summed = [tensor for tensor in trained if tensor.dtype == dtype and tensor.shape]
        calls = 1 if summed else 0
        gradient_bytes = sum(tensor.numel * tensor.item_bytes for tensor in summed)
        traffic.append(Traffic("reduce_scatter", "shard", calls, gradient_bytes))
        traffic.append(Traffic("all_reduce", "shard", calls, 4 * len(summed)))
    for tensor in trained:
        if not tensor.shape:  # a scalar is not scattered; its flag travels with it
            traffic.append(Traffic("all_reduce", "shard", 1, 2 * tensor.item_bytes))
    return traffic


def _dtypes(tensors: Sequence[TensorFacts]) -> list[str]:
    return list(dict.fromkeys(tensor.dtype for tensor in tensors))


def _padded_bytes(tensor: TensorFacts, ranks: int) -> int:
    """Return the bytes of a rank's rows; all ranks send as many as the first, which has most."""
    rows = -(-tensor.shape[0] // ranks)  # rounded up
    row_numel = tensor.numel // max(tensor.shape[0], 1)
    return rows * row_numel * tensor.item_bytes


def merged(rows: Iterable[Traffic]) -> list[Traffic]:
    """Add up to one row per collective and axis, sorted, without those of no calls."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        calls[row.collective, row.axis] += row.calls
        sizes[row.collective, row.axis] += row.payload_bytes
    return [Traffic(*key, calls[key], sizes[key]) for key in sorted(calls) if calls[key]]
