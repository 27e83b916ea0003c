"""What a step sends on each axis: calls and payload bytes by collective. The ledger must count the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.nouns.buckets import group_parameters
from paceline.nouns.plan import Plan

_NARROW = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
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


def replicate(plan: Plan, trained: Sequence[Tensor], buffers: int) -> list[Traffic] | None:
    """A step of `parallel/replicate.py` whose buffers do not change.

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
    if plan.compression in ("topk", "powersgd") or any(tensor.is_sparse for tensor in trained):
        return None
    sums_bytes = 8 * (3 + ranks + buffers)
    groups = group_parameters(
        [(tensor.numel * tensor.item_bytes, tensor.dtype) for tensor in trained], plan.bucket_bytes
    )
    gradient_bytes = 0
    for group in groups:
        item_bytes = _NARROW.get(plan.compression, trained[group[0]].item_bytes)
        gradient_bytes += item_bytes * (len(group) + sum(trained[index].numel for index in group))
    return [Traffic("all_reduce", "replicate", 1 + len(groups), sums_bytes + gradient_bytes)]
