"""What a step sends, in closed form: witnesses that know nothing of the code whose traffic they predict.

One for each way in which ranks share work: copies (replicate), rows (shard), columns and rows of layers (tensor). They
return calls and payload bytes by collective and axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from paceline.nouns.plan import Plan
from paceline.parallel.replicate.bucket import group_parameters

Rows = dict[tuple[str, str], tuple[int, int]]
FLAG_BYTES = 8
NARROW = {"bf16": 2, "fp16": 2}  # bytes of a compressed gradient's numbers


def by_operation(rows) -> Rows:
    """A ledger's rows in the same form."""
    return {(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in rows}


def sums_bytes(ranks: int, buffers: int = 0) -> int:
    """Every step's one small sum: loss, weight, stop flag, a flag per rank and one per buffer, in float64."""
    return 8 * (3 + ranks + buffers)


def replicate(plan: Plan, model: nn.Module) -> Rows:
    """One sum for each bucket, with a number per parameter that says who has a gradient; and the step's numbers."""
    ranks = plan.world_size
    if ranks == 1:
        return {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buckets = group_parameters([(each.nbytes, str(each.dtype)) for each in trained], plan.bucket_bytes)
    sent = sums_bytes(ranks, len(list(model.buffers())))
    for indices in buckets:
        item_bytes = NARROW.get(plan.compression, trained[indices[0]].itemsize)
        sent += item_bytes * (len(indices) + sum(trained[index].numel() for index in indices))
    return {("all_reduce", "replicate"): (len(buckets) + 1, sent)}


def tensor(ranks: int, layer_pairs: int, activation_bytes: int, clips: bool) -> Rows:
    """Pairs of layers of which the first is split by columns and the second by rows (Shoeybi et al. 2019, Megatron-LM).

    Each pair sums its result in the forward pass and the gradient of what goes in in the backward pass.
    """
    calls = 2 * layer_pairs + 1 + clips
    return {("all_reduce", "tensor"): (calls, 2 * layer_pairs * activation_bytes + sums_bytes(ranks) + 8 * clips)}


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


def shard_traffic(plan: Plan, ranks: int, parts: Sequence[ShardTraffic], micro_batches: int = 1) -> Rows:
    """FSDP2: each block is called once per micro-batch, and some rank uses each whole parameter.

    Args:
        plan: its `zero` and `compression`.
        ranks: on the axis.
        parts: all parameters of the model, shared ones once.
        micro_batches: of this rank; every rank of the axis runs as many.
    """
    if ranks == 1:
        return {}
    gathers = 0
    gather_bytes = 0
    reduces = 0
    reduce_bytes = 0
    for group, sharded in _groups(parts).items():
        # An all_gather's payload is what this rank gives, a reduce_scatter's what it hands in: `ranks` times as much.
        times = _gathers_of(plan, group, micro_batches)
        gathers += times
        gather_bytes += times * sum(_wire_bytes(plan, part, ranks) for part in sharded) // ranks
        trained = [part for part in sharded if part.is_trained]
        if trained:
            reduces += micro_batches
            reduce_bytes += micro_batches * sum(_wire_bytes(plan, part, ranks) for part in trained)
    unsharded = [part for part in parts if part.is_whole and part.is_trained]
    flag_bytes = FLAG_BYTES * (ranks + 1 + sum(part.is_trained for part in parts))
    sums_bytes = flag_bytes + sum(part.item_bytes * math.prod(part.shape) for part in unsharded)
    sums = 1 + len({part.dtype for part in unsharded})  # the flags, and a sum per dtype
    rows = {
        ("all_gather", "shard"): (gathers, gather_bytes),
        ("all_reduce", "shard"): (sums, sums_bytes),
        ("reduce_scatter", "shard"): (reduces, reduce_bytes),
    }
    return {operation: sent for operation, sent in rows.items() if sent[0]}


def _groups(parts: Sequence[ShardTraffic]) -> dict[str, list[ShardTraffic]]:
    """Return the sharded parameters that are gathered together, by block."""
    groups: dict[str, list[ShardTraffic]] = {}
    for part in parts:
        if not part.is_whole:
            groups.setdefault(part.group, []).append(part)
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
