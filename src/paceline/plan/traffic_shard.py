"""What a step of `parallel/shard/strategy.py` sends: arithmetic on sizes. The ledger must count the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.nouns.plan import Plan
from paceline.plan.traffic import Traffic

AXIS = "shard"
_FLAG_BYTES = 8


@dataclass(frozen=True, slots=True)
class ShardTraffic:
    """A parameter as the axis holds it.

    Args:
        shape: of the full parameter.
        item_bytes: of one of its numbers.
        dtype: by name; only equal ones travel together.
        group: the block it belongs to, by name; "" is the root.
        is_trained: it gets gradients.
        is_whole: every rank holds all of it (a scalar, a group's minority dtype).
    """

    shape: tuple[int, ...]
    item_bytes: int
    dtype: str
    group: str
    is_trained: bool = True
    is_whole: bool = False

    def padded_numel(self, ranks: int) -> int:
        """Numbers on the wire: every rank's part is as long as the first one's."""
        rows = -(-self.shape[0] // ranks) * ranks
        return rows * math.prod(self.shape[1:])


def shard_traffic(plan: Plan, ranks: int, parts: Sequence[ShardTraffic], micro_batches: int = 1) -> list[Traffic]:
    """One step in which each block is called once per micro-batch and each whole parameter is used by some rank.

    Args:
        plan: its `zero` and `compression`.
        ranks: on the axis.
        parts: all parameters of the model, shared ones once.
        micro_batches: of this rank; every rank of the axis runs as many.
    """
    if ranks == 1:
        return []
    gathers, gather_bytes, reduces, reduce_bytes = 0, 0, 0, 0
    groups: dict[str, list[ShardTraffic]] = {}
    for part in parts:
        if not part.is_whole:  # zero=1 has one group
            groups.setdefault(part.group if plan.zero > 1 else "", []).append(part)
    for group, cut in groups.items():
        trained = [part for part in cut if part.is_trained]
        # zero=3 drops a block after its forward pass and the root after its backward pass.
        times = micro_batches * (2 if group else 1) if plan.zero == 3 else 1
        gathers += times
        gather_bytes += times * sum(_wire_bytes(plan, part, ranks) for part in cut) // ranks
        times = micro_batches if plan.zero > 1 else 1
        reduces += times if trained else 0
        reduce_bytes += times * sum(_wire_bytes(plan, part, ranks) for part in trained)
    whole = [part for part in parts if part.is_whole and part.is_trained]
    flag_bytes = _FLAG_BYTES * (ranks + 1 + sum(part.is_trained for part in parts))
    sums_bytes = flag_bytes + sum(part.item_bytes * math.prod(part.shape) for part in whole)
    rows = [
        Traffic("all_gather", AXIS, gathers, gather_bytes),
        Traffic("all_reduce", AXIS, 1 + len({part.dtype for part in whole}), sums_bytes),
        Traffic("reduce_scatter", AXIS, reduces, reduce_bytes),
    ]
    return [row for row in rows if row.calls]


def _wire_bytes(plan: Plan, part: ShardTraffic, ranks: int) -> int:
    return part.padded_numel(ranks) * (2 if plan.compression == "bf16" else part.item_bytes)
