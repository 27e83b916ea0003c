"""Predict what a step of `parallel/shard/strategy.py` sends from sizes. The ledger must count the same."""

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
    """The sizes of a parameter, and how the axis holds it.

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
        """Return how many numbers travel: every rank's shard is padded to the length of the first."""
        rows = -(-self.shape[0] // ranks) * ranks
        return rows * math.prod(self.shape[1:])


def shard_traffic(plan: Plan, ranks: int, parts: Sequence[ShardTraffic], micro_batches: int = 1) -> list[Traffic]:
    """Predict a step in which each block is called once per micro-batch and each whole parameter is used by some rank.

    Args:
        plan: its `zero` and `compression`.
        ranks: on the axis.
        parts: all parameters of the model, shared ones once.
        micro_batches: of this rank; every rank of the axis runs as many.
    """
    if ranks == 1:
        return []
    gathers = 0
    gather_bytes = 0
    reduces = 0
    reduce_bytes = 0
    for group, sharded in _groups(plan, parts).items():
        # An all_gather's payload is what this rank gives, a reduce_scatter's what it hands in: `ranks` times as much.
        times = _gathers_of(plan, group, micro_batches)
        gathers += times
        gather_bytes += times * sum(_wire_bytes(plan, part, ranks) for part in sharded) // ranks
        trained = [part for part in sharded if part.is_trained]
        if trained:
            times = micro_batches if plan.zero > 1 else 1  # zero=1 reduces once a step
            reduces += times
            reduce_bytes += times * sum(_wire_bytes(plan, part, ranks) for part in trained)
    unsharded = [part for part in parts if part.is_whole and part.is_trained]
    flag_bytes = _FLAG_BYTES * (ranks + 1 + sum(part.is_trained for part in parts))
    sums_bytes = flag_bytes + sum(part.item_bytes * math.prod(part.shape) for part in unsharded)
    sums = 1 + len({part.dtype for part in unsharded})  # the flags, and a sum per dtype
    rows = [
        Traffic("all_gather", AXIS, gathers, gather_bytes),
        Traffic("all_reduce", AXIS, sums, sums_bytes),
        Traffic("reduce_scatter", AXIS, reduces, reduce_bytes),
    ]
    return [row for row in rows if row.calls]


def _groups(plan: Plan, parts: Sequence[ShardTraffic]) -> dict[str, list[ShardTraffic]]:
    """Return the sharded parameters that are gathered together, by block; zero=1 has one group."""
    groups: dict[str, list[ShardTraffic]] = {}
    for part in parts:
        if not part.is_whole:
            group = part.group if plan.zero > 1 else ""
            groups.setdefault(group, []).append(part)
    return groups


def _gathers_of(plan: Plan, group: str, micro_batches: int) -> int:
    """Return how often a group is gathered in a step."""
    if plan.zero < 3:
        return 1
    # zero=3 drops a block after its forward pass, and gathers it again in the backward pass. The root stays from its
    # forward to its backward pass: it is needed again at once.
    return 2 * micro_batches if group else micro_batches


def _wire_bytes(plan: Plan, part: ShardTraffic, ranks: int) -> int:
    item_bytes = 2 if plan.compression == "bf16" else part.item_bytes  # FSDP2 casts before it gathers, too
    return part.padded_numel(ranks) * item_bytes
