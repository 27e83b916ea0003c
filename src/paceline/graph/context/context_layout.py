"""Split the sequence of a captured graph over the ranks of `context`, which share its attentions.

Attention says where the sequence is: the positions of its queries and of its keys. `walk.py` does the rest.

Needs: a model whose path depends only on shapes, and sequences with a position for every rank.
Promises: losses, gradients and parameters are those of one rank, up to rounding; dropout too, on CPUs. Attention that
drops is not shared by ring or heads: each rank has the keys of all.
Traffic: per micro-batch what the graph says, counted by a dry run on fake tensors; per step the gradients of all
parameters, in one sum with those of `replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.context.context_exchanges import AttentionSplit, pairs_seen
from paceline.graph.labels import argument, tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import shape_of
from paceline.graph.tensor.choices import CALL, OPERATIONS_PER_BYTE, Choice, SharedAttention, size_bytes
from paceline.graph.walk import ATTENTION, SpreadLayout, Walk
from paceline.nouns.errors import PlanError


@dataclass(frozen=True, slots=True)
class Found:
    """An attention of the model, and how it is spread.

    Attributes:
        node: the node's name in the graph.
        module: path of the module that computes it.
        queries, keys: the numbers of positions.
        way: "ring of N", "heads over N", "heads over N, ring of M", or "gathered": keys of all ranks on each.
        why: the reason, in words.
        work: the share of each rank in the pairs of a query and a key that are computed; empty where each computes all.
    """

    node: str
    module: str
    queries: int
    keys: int
    way: str
    why: str
    work: tuple[float, ...] = ()


def split_sequence(
    captured: Captured, num_ranks: int, way: str = "auto", tensor_ranks: int = 1, may_stay_whole: bool = False
) -> SpreadLayout:
    """Return the layout of `captured` over `num_ranks` ranks that share each sequence.

    Args:
        captured: the captured graph.
        num_ranks: the number of ranks on the `context` axis.
        way: how attention is spread: "ring", "heads", or the cheaper of both and of their products, "auto".
        tensor_ranks: ranks that share the heads afterwards.
        may_stay_whole: sequences that are too short run whole on every rank.

    Raises:
        PlanError: nothing can be split, or not in this way.
    """
    rules = AttentionRules(way, tensor_ranks, may_stay_whole)
    walk = Walk(captured, num_ranks, rules)
    attentions = [node for node in captured.graph.nodes if node.target is ATTENTION]
    rules.is_causal = any(_is_causal(node) for node in attentions)
    for node in attentions:
        if not _drops(node):
            rules.heads[node] = rules.heads_of(walk, node)
    if not attentions:
        walk.want_by_batch(1)
    layout = walk.run()
    if not may_stay_whole and not walk.is_split:
        raise _nothing_split(num_ranks, attentions)
    layout.found = rules.found
    return layout


@dataclass(slots=True)
class AttentionRules:
    """How attention is shared.

    Args:
        way: the plan's context_by.
        tensor_ranks: ranks that share the heads afterwards.
        may_stay_whole: sequences that are too short run whole on every rank.

    Attributes:
        is_causal: whether later positions have more to see: a rank gets some from both ends of the sequence.
        heads: how many ranks exchange heads in each attention that drops nothing, and why.
        found: what was decided.
    """

    way: str
    tensor_ranks: int
    may_stay_whole: bool
    is_causal: bool = False
    heads: dict[fx.Node, tuple[int, str]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)

    def want(self, walk: Walk, node: fx.Node, inputs: Sequence[fx.Node]) -> None:
        """Note that an attention wants positions of queries, keys and values, and rows of its mask."""
        query, key = (shape_of(source) for source in inputs[:2])
        for number, source in enumerate(inputs):
            shape = shape_of(source)
            size = (query if number in (0, 3) else key)[-2]
            if number == 3 and self.heads.get(node, (1, ""))[0] > 1:
                continue  # where heads are exchanged every rank needs the mask of all positions
            if shape[-2] == size:
                walk.want(source, walk.split_of(len(shape) - 2, size))

    def place(self, walk: Walk, node: fx.Node, inputs: Sequence[fx.Node]) -> Choice:
        """Return the choice of how an attention runs."""
        num_ranks = walk.num_ranks
        query, key = (shape_of(source) for source in inputs[:2])
        rank = len(query)
        batches = [shape[: -3 if rank > 3 else -2] for shape in (query, key)]
        if batches[0] != batches[1]:
            self._note(walk, node, "whole", "queries and keys are of different batches")
            return walk.whole(node, inputs)
        rows = _as_it_lies(walk, inputs[0], rank - 2)
        columns = _as_it_lies(walk, inputs[1], rank - 2)
        if rows is None or columns is None or len(key) != rank:
            length = min(query[-2], key[-2])
            if self.way != "auto" and not self.may_stay_whole:
                raise PlanError(
                    f"the plan's context={num_ranks} with context_by={self.way}",
                    f"attention in {walk.module_of(node)} has {length} positions, too few for a piece on each rank",
                    "use longer sequences, fewer ranks, or leave context_by out",
                )
            self._note(walk, node, "whole", f"{length} positions are too few for {num_ranks} ranks")
            return walk.whole(node, inputs)
        if _drops(node):
            if self.way == "heads":
                raise PlanError(
                    "the plan's context_by=heads",
                    f"attention in {walk.module_of(node)} drops weights, and one rank's mask is of all positions",
                    "leave context_by out, or set the model's attention dropout to 0",
                )
            self._note(walk, node, "gathered", "it drops weights: each rank has the keys of all")
            mask = [_mask_by_rows(inputs[3], rows)] if len(inputs) > 3 else []
            return Choice((rows, None, None, *mask), rows, True, 0.0, kind="attention with dropout")
        heads, reason = self.heads[node]
        split = AttentionSplit(rows.blocks, columns.blocks, heads)
        ring = num_ranks // heads
        parts = [f"heads over {heads}"] * (heads > 1) + [f"ring of {ring}"] * (ring > 1)
        pairs = pairs_seen(split, _is_causal(node), num_ranks)
        self._note(walk, node, ", ".join(parts), reason, tuple(count / sum(pairs) for count in pairs))
        mask = []
        if len(inputs) > 3:
            mask = [_mask_by_rows(inputs[3], rows) if heads == 1 else None]
        # What ranks of `tensor` have left must still divide by the ranks that exchange heads.
        shares = heads * self.tensor_ranks
        shares_heads = heads == 1 or all(count % shares == 0 for count in _head_counts(node))
        attention = SharedAttention(split, shares_heads)
        return Choice((rows, columns, columns, *mask), rows, True, 0.0, kind="attention", attention=attention)

    def heads_of(self, walk: Walk, node: fx.Node) -> tuple[int, str]:
        """Return the number of ranks that exchange heads, and the reason."""
        num_ranks = walk.num_ranks
        counts = _head_counts(node)
        if all(count % self.tensor_ranks == 0 for count in counts):
            counts = [count // self.tensor_ranks for count in counts]  # `tensor` splits heads too
        possible = [
            heads
            for heads in range(1, num_ranks + 1)
            if num_ranks % heads == 0 and all(count % heads == 0 for count in counts)
        ]
        if self.way == "ring":
            return 1, "context_by=ring"
        if self.way == "heads":
            if possible[-1] < num_ranks:
                raise PlanError(
                    f"the plan's context={num_ranks} with context_by=heads",
                    f"attention in {walk.module_of(node)} has {_heads_in_words(counts)}, not a multiple of that",
                    "leave context_by out: what heads can't split goes round in a ring",
                )
            return num_ranks, "context_by=heads"
        sizes = [size_bytes(source) / num_ranks for source in tensor_inputs(node)[:3]]
        costs = {heads: attention_cost(sizes, num_ranks, heads) for heads in possible}
        cheapest = min(costs, key=lambda heads: costs[heads])
        reason = f"cheapest of {len(costs)} ways" if len(costs) > 1 else f"{_heads_in_words(counts)} can't be shared"
        return cheapest, reason

    def _note(self, walk: Walk, node: fx.Node, way: str, reason: str, work: tuple[float, ...] = ()) -> None:
        query, key = (shape_of(source) for source in tensor_inputs(node)[:2])
        self.found.append(Found(node.name, walk.module_of(node), query[-2], key[-2], way, reason, work))


def _as_it_lies(walk: Walk, source: fx.Node, dim: int) -> Split | None:
    placement = walk.placements[source]
    if isinstance(placement, Split) and placement.dim == dim:
        return placement
    return walk.split_of(dim, shape_of(source)[dim])


def _mask_by_rows(mask: fx.Node, rows: Split) -> Split | None:
    shape = shape_of(mask)
    return Split(len(shape) - 2, rows.blocks) if shape[-2] > 1 else None


def _nothing_split(num_ranks: int, attentions: Sequence[fx.Node]) -> PlanError:
    """Return the error for a graph in which no sequence is split."""
    lengths = [shape_of(tensor_inputs(node)[0])[-2] for node in attentions]
    found = "no operation of the model runs on pieces of a sequence"
    if lengths:
        found = f"the longest sequence that the model attends to has {max(lengths)} positions"
    return PlanError(
        f"the plan's context={num_ranks} should split sequences over {num_ranks} ranks",
        found,
        "use longer sequences or fewer ranks, or replicate, shard, tensor or pipeline",
    )


def attention_cost(sizes: Sequence[float], num_ranks: int, heads: int) -> float:
    """Return the cost of the exchanges of one way to spread attention, forward and backward, in operations.

    Args:
        sizes: bytes of queries, keys and values on a rank.
        num_ranks: of the axis.
        heads: ranks that exchange heads.
    """
    ring = num_ranks // heads
    query, key, value = sizes
    # Forward keys and values; backward they and their gradients.
    cost = 3 * (ring - 1) * (CALL + OPERATIONS_PER_BYTE * (key + value))
    if heads > 1:
        # Queries, keys, values and the result, each forward and backward; a rank keeps its own share.
        cost += 8 * CALL + OPERATIONS_PER_BYTE * 2 * (2 * query + key + value) * (heads - 1) / heads
    return cost


def _head_counts(node: fx.Node) -> list[int]:
    """Return the heads of an attention's queries, keys and values."""
    shapes = [shape_of(source) for source in tensor_inputs(node)[:3]]
    return [shape[-3] if len(shape) > 3 else 1 for shape in shapes]


def _heads_in_words(counts: Sequence[int]) -> str:
    queries, keys, _ = counts
    if queries == keys:
        return f"{queries} head" + "s" * (queries != 1)
    return f"{queries} heads and {keys} of keys"


def _is_causal(node: fx.Node) -> bool:
    return bool(argument(node, 5, "is_causal", False))


def _drops(node: fx.Node) -> bool:
    return float(argument(node, 4, "dropout_p", 0.0)) > 0
