"""Follow a split through operations that only rearrange: reshapes, transposes, slices, concatenations.

`carry(node, split, parts)` gives the split of the node's output (a list for several outputs) when the rank's
piece, rearranged the same way, is the piece of the rearranged whole; None when it is not. `local_arguments` then
says with which arguments the operation runs on the piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from paceline.graph.placement import Split, flattened, unflattened
from paceline.nouns.shard_spec import total_of

aten = torch.ops.aten
_MOST_BLOCKS = 8  # that a reshape may take a fused matrix apart into
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
Carried = Split | list[Split | None] | None

RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the full shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def carry(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    """Return the output's split when the first input is split so; None when the operation can't keep it."""
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    return rule(node, split, num_ranks) if rule is not None else None


def is_rearrangement(node: fx.Node) -> bool:
    """True if `carry` knows the operation."""
    return node.target in _RULES


def local_arguments(
    node: fx.Node, split: Split, out: Carried, rank: int, num_ranks: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation and its further arguments on this rank's piece."""
    target: Any = node.target
    arguments = node.args[1:]
    if target in RESHAPES or target in _SQUEEZES:  # a piece may be one long where the whole is not
        assert isinstance(out, Split)
        return aten.reshape.default, (list(out.local_shape(shape_of(node), rank, num_ranks)),)
    if target is aten.expand.default:
        assert isinstance(out, Split)
        return target, (list(out.local_shape(shape_of(node), rank, num_ranks)), *arguments[1:])
    # Along the split dimension the sizes of the whole are wrong for a piece.
    if target in _SPLITTERS and _dim_of(node, _SPLITTERS[target]) == split.dim:
        sizes = [piece.size(rank, num_ranks) for piece in out]  # type: ignore[union-attr]
        return aten.split_with_sizes.default, (sizes, split.dim)
    if target is aten.slice.Tensor and _dim_of(node, 1, 0) == split.dim:
        first, count = _sliced_blocks(node, split)  # type: ignore[misc]
        start = Split(split.dim, split.blocks[:first]).size(rank, num_ranks)
        length = Split(split.dim, split.blocks[first : first + count]).size(rank, num_ranks)
        return aten.slice.Tensor, (split.dim, start, start + length)
    return target, arguments


def _dim_of(node: fx.Node, place: int, otherwise: int = 0) -> int:
    """Return a node's argument `dim`, counted from the first dimension of its input."""
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", otherwise)
    assert isinstance(dim, int)
    return dim % len(_input(node))


def _input(node: fx.Node) -> tuple[int, ...]:
    """Return the full shape of a node's first argument."""
    return shape_of(node.args[0])  # type: ignore[arg-type]


def _reshape(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    before = _input(node)
    after = shape_of(node)
    if math.prod(before) == 0:
        return None
    for first, last, out_first, out_last in _groups(before, after):
        if first <= split.dim < last:
            # A split survives if its blocks, seen as runs of elements in memory order, are blocks of a new dimension.
            inside = Split(split.dim - first, split.blocks)
            carried = unflattened(flattened(inside, before[first:last]), after[out_first:out_last], num_ranks)
            if carried is None:
                return None
            # Uneven pieces of the old dimensions and of the new ones end at different elements, unless both are last
            # in their runs: then they end where the dimension ends.
            is_last = split.dim == last - 1 and carried.dim == out_last - out_first - 1
            is_regrouped = last - first > 1 or out_last - out_first > 1
            if is_regrouped and not is_last and not split.is_even(num_ranks):
                return None
            return Split(carried.dim + out_first, carried.blocks)
    return None


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return runs of dimensions that hold the same elements: [first, last) of the input, [first, last) of the output.

    Both shapes are walked at once; the run with fewer elements so far takes its next dimension.
    """
    # (2, 6, 5) -> (12, 5): [(0, 2, 0, 1), (2, 3, 1, 2)]
    groups = []
    i = 0
    j = 0
    while i < len(before) or j < len(after):
        start_i = i
        start_j = j
        size_before = 1
        right = 1
        if i < len(before):
            size_before = before[i]
            i += 1
        if j < len(after):
            right = after[j]
            j += 1
        while size_before != right:
            takes_input = size_before < right and i < len(before)
            if takes_input or j >= len(after):
                size_before *= before[i]
                i += 1
            else:
                right *= after[j]
                j += 1
        groups.append((start_i, i, start_j, j))
    return groups


def _transpose(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    rank = len(_input(node))
    first = int(node.args[1]) % rank  # type: ignore[arg-type]
    second = int(node.args[2]) % rank  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    return Split(swapped.get(split.dim, split.dim), split.blocks)


def _t(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    if len(_input(node)) != 2:  # a vector stays as it is
        return split
    return Split(1 - split.dim, split.blocks)


def _permute(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    rank = len(_input(node))
    order = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr, operator]
    return Split(order.index(split.dim), split.blocks)


def _unsqueeze(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    dim = int(node.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
    return Split(split.dim + (dim <= split.dim), split.blocks)  # behind the new dimension


def _squeeze(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    before = _input(node)
    if node.target is aten.squeeze.default:
        candidates: Any = range(len(before))
    elif isinstance(node.args[1], list | tuple):
        candidates = node.args[1]
    else:
        candidates = [node.args[1]]
    gone = [dim % len(before) for dim in candidates if before[dim] == 1]
    if split.dim in gone:
        return None
    gone_before = sum(dim < split.dim for dim in gone)
    return Split(split.dim - gone_before, split.blocks)


def _expand(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    added = len(shape_of(node)) - len(_input(node))  # new dimensions come first
    return Split(split.dim + added, split.blocks)


def _select(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    dim = _dim_of(node, 1)
    if dim == split.dim:  # the output would be on only one rank
        return None
    return Split(split.dim - (dim < split.dim), split.blocks)


def _slice(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    if _dim_of(node, 1, 0) != split.dim:
        return split
    sliced = _sliced_blocks(node, split)
    if sliced is None:
        return None
    first, count = sliced
    return Split(split.dim, split.blocks[first : first + count])


def _sliced_blocks(node: fx.Node, split: Split) -> tuple[int, int] | None:
    """Return the blocks that a slice takes whole, the first one's number and how many; None when it cuts one."""
    size = _input(node)[split.dim]
    start, stop, step = (*node.args[2:], *(None,) * 3)[:3]
    if step not in (None, 1) or not isinstance(start, int | None) or not isinstance(stop, int | None):
        return None
    first, last, _ = slice(start, stop).indices(size)
    edges = [0, *itertools.accumulate(map(abs, split.blocks))]
    if first not in edges or last not in edges or last <= first:
        return None
    return edges.index(first), edges.index(last) - edges.index(first)


def _split(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    dim = _dim_of(node, _SPLITTERS[node.target])  # type: ignore[index]
    outputs = node.meta["val"]
    if dim != split.dim:
        return [split] * len(outputs)
    pieces: list[Split | None] = []
    remaining = list(split.blocks)
    for output in outputs:
        blocks: list[int] = []
        # Each output takes whole blocks, so that a rank's piece of it is part of the rank's piece of the input.
        while remaining and total_of(blocks) < output.shape[dim]:
            blocks.append(remaining.pop(0))
        if total_of(blocks) != output.shape[dim]:  # it cuts a block
            return None
        pieces.append(Split(dim, tuple(blocks)))
    return pieces


def _unbind(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    dim = _dim_of(node, 1)
    if dim == split.dim:  # each output would be on only one rank
        return None
    return [Split(split.dim - (dim < split.dim), split.blocks)] * len(node.meta["val"])


def _flip(node: fx.Node, split: Split, num_ranks: int) -> Carried:
    rank = len(_input(node))
    flipped = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr, operator]
    return None if split.dim in flipped else split  # flipped, the first rank's piece would be the last rank's


_SPLITTERS: dict[Any, int] = {
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.split.sizes: 2,
    aten.chunk.default: 2,
}
_RULES: dict[Any, Callable[[fx.Node, Split, int], Carried]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(_SPLITTERS, _split),
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys(_SQUEEZES, _squeeze),
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unbind.int: _unbind,
    aten.flip.default: _flip,
}


def blocks_asked_for(graph: fx.Graph) -> dict[int, set[tuple[int, ...]]]:
    """Return for each size of a dimension the blocks into which the model itself takes it apart (fused matrices)."""
    asked: dict[int, set[tuple[int, ...]]] = {}
    edges: dict[tuple[fx.Node, int], set[int]] = {}  # where slices of a dimension begin and end
    for node in graph.nodes:
        if node.target in _SPLITTERS:
            dim = _dim_of(node, _SPLITTERS[node.target])
            sizes = tuple(output.shape[dim] for output in node.meta["val"])
            asked.setdefault(sum(sizes), set()).add(sizes)
        elif node.target is aten.slice.Tensor:
            _note_edges(node, edges)
        elif node.target in RESHAPES:
            # A dimension of a fused matrix that is viewed as (3, ..): blocks of equal size.
            for size, count in _unflattened_sizes(node):
                if 1 < count <= _MOST_BLOCKS:
                    asked.setdefault(size, set()).add((size // count,) * count)
    for (source, dim), places in edges.items():
        sizes = tuple(stop - start for start, stop in itertools.pairwise(sorted(places)))
        asked.setdefault(shape_of(source)[dim], set()).add(sizes)
    return asked


def _note_edges(node: fx.Node, edges: dict[tuple[fx.Node, int], set[int]]) -> None:
    """Note where a slice begins and ends; one without an end is left out."""
    start, stop = (*node.args[2:], None, None)[:2]
    if not isinstance(start, int | None) or not isinstance(stop, int):
        return
    dim = _dim_of(node, 1, 0)
    size = _input(node)[dim]
    first, last, _ = slice(start, stop).indices(size)
    source: Any = node.args[0]
    edges.setdefault((source, dim), {0, size}).update((first, last))


def _unflattened_sizes(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the size of each dimension that a reshape takes apart, and the first of the sizes that it becomes."""
    before = _input(node)
    after = shape_of(node)
    for first, last, out_first, out_last in _groups(before, after):
        if last - first == 1 and out_last - out_first > 1:
            yield before[first], after[out_first]
