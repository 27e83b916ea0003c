"""Where a split goes when an operation only rearranges: reshapes, transposes, slices, concatenations.

`carry(node, split, parts)` gives the split of the node's output (a list for several outputs) when the rank's
piece, rearranged the same way, is the piece of the rearranged whole; None when it is not. `local_arguments` then
says with which arguments the operation runs on the piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from paceline.graph.placement import Split, flattened, unflattened

aten = torch.ops.aten
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
    """The full shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def carry(node: fx.Node, split: Split, parts: int) -> Carried:
    """The output's split when the first input is split so; None when the operation can't keep it."""
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    return rule(node, split, parts) if rule is not None else None


def is_rearrangement(node: fx.Node) -> bool:
    """Whether `carry` knows the operation."""
    return node.target in _RULES


def local_arguments(node: fx.Node, split: Split, out: Carried, part: int, parts: int) -> tuple[Any, tuple[Any, ...]]:
    """The operation and its further arguments on this rank's piece."""
    target: Any = node.target
    rest = node.args[1:]
    if target in RESHAPES or target in _SQUEEZES:  # a piece may be one long where the whole is not
        assert isinstance(out, Split)
        return aten.reshape.default, (list(out.local_shape(shape_of(node), part, parts)),)
    if target is aten.expand.default:
        assert isinstance(out, Split)
        return target, (list(out.local_shape(shape_of(node), part, parts)), *rest[1:])
    if target in _SPLITTERS and _dim_of(node, _SPLITTERS[target]) == split.dim:
        sizes = [piece.size(part, parts) for piece in out]  # type: ignore[union-attr]
        return aten.split_with_sizes.default, (sizes, split.dim)
    if target is aten.slice.Tensor and _dim_of(node, 1, 0) == split.dim:
        first, count = _sliced_blocks(node, split)  # type: ignore[misc]
        start = Split(split.dim, split.blocks[:first]).size(part, parts)
        length = Split(split.dim, split.blocks[first : first + count]).size(part, parts)
        return aten.slice.Tensor, (split.dim, start, start + length)
    return target, rest


def _dim_of(node: fx.Node, place: int, otherwise: int = 0) -> int:
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", otherwise)
    assert isinstance(dim, int)
    return dim % len(shape_of(node.args[0]))  # type: ignore[arg-type]


def _input(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node.args[0])  # type: ignore[arg-type]


def _reshape(node: fx.Node, split: Split, parts: int) -> Carried:
    before, after = _input(node), shape_of(node)
    if math.prod(before) == 0:
        return None
    for first, last, out_first, out_last in _groups(before, after):
        if first <= split.dim < last:
            inside = Split(split.dim - first, split.blocks)
            found = unflattened(flattened(inside, before[first:last]), after[out_first:out_last], parts)
            if found is None:
                return None
            is_regrouped = last - first > 1 or out_last - out_first > 1
            if is_regrouped and not split.is_even(parts):
                return None
            return Split(found.dim + out_first, found.blocks)
    return None


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Runs of dimensions that hold the same elements: [first, last) of the input, [first, last) of the output."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start_i, start_j, left, right = i, j, 1, 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                left, i = left * before[i], i + 1
        groups.append((start_i, i, start_j, j))
    return groups


def _transpose(node: fx.Node, split: Split, parts: int) -> Carried:
    rank = len(_input(node))
    one, other = int(node.args[1]) % rank, int(node.args[2]) % rank  # type: ignore[arg-type]
    return Split({one: other, other: one}.get(split.dim, split.dim), split.blocks)


def _t(node: fx.Node, split: Split, parts: int) -> Carried:
    return Split(1 - split.dim, split.blocks) if len(_input(node)) == 2 else split


def _permute(node: fx.Node, split: Split, parts: int) -> Carried:
    rank = len(_input(node))
    order = [dim % rank for dim in node.args[1]]  # type: ignore[union-attr, operator]
    return Split(order.index(split.dim), split.blocks)


def _unsqueeze(node: fx.Node, split: Split, parts: int) -> Carried:
    dim = int(node.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
    return Split(split.dim + (dim <= split.dim), split.blocks)


def _squeeze(node: fx.Node, split: Split, parts: int) -> Carried:
    before = _input(node)
    if node.target is aten.squeeze.default:
        gone = [dim for dim, size in enumerate(before) if size == 1]
    else:
        asked = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        gone = [dim % len(before) for dim in asked if before[dim] == 1]  # type: ignore[index, misc, operator]
    return None if split.dim in gone else Split(split.dim - sum(dim < split.dim for dim in gone), split.blocks)


def _expand(node: fx.Node, split: Split, parts: int) -> Carried:
    return Split(split.dim + len(shape_of(node)) - len(_input(node)), split.blocks)


def _select(node: fx.Node, split: Split, parts: int) -> Carried:
    dim = _dim_of(node, 1)
    return None if dim == split.dim else Split(split.dim - (dim < split.dim), split.blocks)


def _slice(node: fx.Node, split: Split, parts: int) -> Carried:
    if _dim_of(node, 1, 0) != split.dim:
        return split
    found = _sliced_blocks(node, split)
    return None if found is None else Split(split.dim, split.blocks[found[0] : found[0] + found[1]])


def _sliced_blocks(node: fx.Node, split: Split) -> tuple[int, int] | None:
    """The blocks that a slice takes whole: the first one's number and how many."""
    size = _input(node)[split.dim]
    start, stop, step = (*node.args[2:], *(None,) * 3)[:3]
    if step not in (None, 1) or not all(isinstance(value, int | None) for value in (start, stop)):
        return None
    first, last, _ = slice(start, stop).indices(size)  # type: ignore[arg-type]
    edges = [sum(split.blocks[:count]) for count in range(len(split.blocks) + 1)]
    if first not in edges or last not in edges or last <= first:
        return None
    return edges.index(first), edges.index(last) - edges.index(first)


def _split(node: fx.Node, split: Split, parts: int) -> Carried:
    dim = _dim_of(node, _SPLITTERS[node.target])  # type: ignore[index]
    outputs = node.meta["val"]
    if dim != split.dim:
        return [split] * len(outputs)
    pieces: list[Split | None] = []
    left = list(split.blocks)
    for output in outputs:
        taken: list[int] = []
        while left and sum(taken) < output.shape[dim]:
            taken.append(left.pop(0))
        if sum(taken) != output.shape[dim]:
            return None
        pieces.append(Split(dim, tuple(taken)))
    return pieces


def _unbind(node: fx.Node, split: Split, parts: int) -> Carried:
    dim = _dim_of(node, 1)
    if dim == split.dim:
        return None
    return [Split(split.dim - (dim < split.dim), split.blocks)] * len(node.meta["val"])


def _flip(node: fx.Node, split: Split, parts: int) -> Carried:
    rank = len(_input(node))
    return None if split.dim in [dim % rank for dim in node.args[1]] else split  # type: ignore[union-attr, operator]


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
    """For each size of a dimension: the blocks into which the model itself takes it apart (fused matrices)."""
    asked: dict[int, set[tuple[int, ...]]] = {}
    edges: dict[tuple[fx.Node, int], set[int]] = {}
    for node in graph.nodes:
        if node.target in _SPLITTERS:
            dim = _dim_of(node, _SPLITTERS[node.target])
            sizes = tuple(output.shape[dim] for output in node.meta["val"])
            asked.setdefault(sum(sizes), set()).add(sizes)
        elif node.target is aten.slice.Tensor and (stop := (*node.args[2:], None, None)[1]) is not None:
            dim = _dim_of(node, 1, 0)
            size = _input(node)[dim]
            start = (*node.args[2:], None)[0]
            if isinstance(start, int | None) and isinstance(stop, int):
                edges.setdefault((node.args[0], dim), {0, size}).update(slice(start, stop).indices(size)[:2])
        elif node.target in RESHAPES:
            for first, last, out_first, out_last in _groups(_input(node), shape_of(node)):
                if last - first == 1 and out_last - out_first > 1:
                    size, count = _input(node)[first], shape_of(node)[out_first]
                    if 1 < count <= 8:
                        asked.setdefault(size, set()).add((size // count,) * count)
    for (source, dim), places in edges.items():
        ordered = sorted(places)
        sizes = tuple(b - a for a, b in itertools.pairwise(ordered))
        asked.setdefault(shape_of(source)[dim], set()).add(sizes)
    return asked
