"""Predict what an update of `parallel/whole_update.py` sends from sizes. The ledger must count the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.plan.traffic import TensorFacts, Traffic

_BOTH = 2  # a value and its gradient go to the owner, the value comes back


def whole_updates(
    whole: Mapping[str, Mapping[str, int]],
    full_numel: Mapping[str, int],
    pieces: Sequence[tuple[TensorFacts, TensorFacts]],
    at: Mapping[str, int],
) -> list[Traffic]:
    """Return what a rank sends so that owners update whole parameters, each of which has a gradient.

    Args:
        whole: by parameter the index of its owner on each axis that cuts it.
        full_numel: by parameter the elements of all of it.
        pieces: this rank's trained parameters as `tensor` has cut them, and as `shard` has then.
        at: this rank's index on both axes.
    """
    traffic = []
    updated = [pair for pair in pieces if pair[0].name in whole]
    for dtype in dict.fromkeys(piece.dtype for piece, _ in updated):  # only equal ones travel together
        by_shard, by_tensor = [], []  # bytes to the owner, and back from it
        for piece, rows in updated:
            owner = whole[piece.name]
            if piece.dtype != dtype:
                continue
            is_here = owner.get("shard", at["shard"]) == at["shard"]
            if "shard" in owner:
                by_shard.append((_BOTH * rows.numel * rows.item_bytes, is_here * piece.numel * piece.item_bytes))
            # Along `tensor` travels only what `shard` has put together on this rank.
            if "tensor" in owner and is_here:
                is_owner = owner["tensor"] == at["tensor"]
                full_bytes = full_numel[piece.name] * piece.item_bytes
                by_tensor.append((_BOTH * piece.numel * piece.item_bytes, is_owner * full_bytes))
        for axis, messages in (("shard", by_shard), ("tensor", by_tensor)):
            if messages:
                traffic.append(Traffic("all_to_all", axis, 2, sum(map(sum, messages))))
    return traffic
