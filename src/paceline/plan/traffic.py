"""What a step sends on each axis: calls and payload bytes by collective. The ledger must count the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nouns.buckets import group_parameters
from paceline.nouns.plan import Plan

_NARROW = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A parameter or buffer, by its sizes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    item_bytes: int
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls and payload bytes of one collective on one axis, per rank and step."""

    collective: str
    axis: str
    calls: int
    payload_bytes: int


def replicate(plan: Plan, trained: Sequence[TensorFacts], buffers: int) -> list[Traffic] | None:
    """A step of `parallel/replicate/strategy.py`, alone on the mesh, whose buffers do not change.

    Args:
        plan: its mesh, compression and bucket size.
        trained: the parameters that get gradients, in the model's order.
        buffers: how many buffers the model has.

    Returns:
        None where the traffic depends on the data: sparse parameters, top-k.
    """
    ranks = plan.world_size
    if ranks == 1:
        return []
    gradients = replicated_gradients(plan, ranks, trained)
    if gradients is None:
        return None
    return merged([*gradients, Traffic("all_reduce", "replicate", 1, sums_bytes(ranks, buffers))])


def replicated_gradients(plan: Plan, ranks: int, trained: Sequence[TensorFacts]) -> list[Traffic] | None:
    """The buckets' sums; None where they depend on the data: sparse parameters, top-k."""
    if plan.compression in ("topk", "powersgd") or any(tensor.is_sparse for tensor in trained):
        return None
    if ranks == 1:
        return []
    groups = group_parameters(
        [(tensor.numel * tensor.item_bytes, tensor.dtype) for tensor in trained], plan.bucket_bytes
    )
    gradient_bytes = 0
    for group in groups:
        item_bytes = _NARROW.get(plan.compression, trained[group[0]].item_bytes)
        gradient_bytes += item_bytes * (len(group) + sum(trained[index].numel for index in group))
    return [Traffic("all_reduce", "replicate", len(groups), gradient_bytes)]


def sums_bytes(ranks: int, buffers: int) -> int:
    """The one small sum of every step: loss, weight, stop flag, a flag per rank and one per buffer."""
    return 8 * (3 + ranks + buffers)


def tensor(graph: Sequence[Sequence[Mapping[str, Any]]]) -> list[Traffic]:
    """A step of `parallel/tensor.py`: what its graphs enter in the ledger, micro-batch by micro-batch."""
    return [
        Traffic(row["collective"], row["axis"], row["calls"], row["bytes"])
        for micro_batch in graph
        for row in micro_batch
    ]


def server(ranges: Sequence[Sequence[int]]) -> list[Traffic]:
    """What a worker of parameter servers pushes and pulls.

    Args:
        ranges: of every server's range the bytes of its segments.
    """
    total = sum(sum(segments) for segments in ranges)
    pushes = Traffic("push", "server", sum(len(segments) for segments in ranges), total)
    return [pushes, Traffic("pull", "server", len(ranges), total)]


def pipeline(sends: Sequence[Sequence[int]], tied: Sequence[int]) -> list[Traffic]:
    """A pipeline's step on one rank, from bytes of each message per micro-batch and of tied weights' gradients."""
    messages = [size for micro_batch in sends for size in micro_batch] + list(tied)
    return [Traffic("send", "pipeline", len(messages), sum(messages))] if messages else []


def flat_shard(ranks: int, trained: Sequence[TensorFacts], frozen: Sequence[TensorFacts] = ()) -> list[Traffic]:
    """A step of `parallel/shard/zero1.py`: rows gathered, gradients summed and scattered, flags of which were used."""
    if ranks == 1:
        return []
    rows: list[Traffic] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in (*trained, *frozen)):
        cut = [tensor for tensor in (*trained, *frozen) if tensor.dtype == dtype and tensor.shape]
        padded = sum(-(-t.shape[0] // ranks) * (t.numel // max(t.shape[0], 1)) * t.item_bytes for t in cut)
        rows.append(Traffic("all_gather", "shard", 1 if cut else 0, padded))
    for dtype in dict.fromkeys(tensor.dtype for tensor in trained):
        summed = [tensor for tensor in trained if tensor.dtype == dtype and tensor.shape]
        calls = 1 if summed else 0
        rows.append(Traffic("reduce_scatter", "shard", calls, sum(t.numel * t.item_bytes for t in summed)))
        rows.append(Traffic("all_reduce", "shard", calls, 4 * len(summed)))
    scalars = [tensor for tensor in trained if not tensor.shape]
    return [*rows, *(Traffic("all_reduce", "shard", 1, 2 * tensor.item_bytes) for tensor in scalars)]


def merged(rows: Iterable[Traffic]) -> list[Traffic]:
    """One row per collective and axis."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        calls[row.collective, row.axis] += row.calls
        sizes[row.collective, row.axis] += row.payload_bytes
    return [Traffic(*key, calls[key], sizes[key]) for key in sorted(calls) if calls[key]]
