"""Find attention that is written by hand, and put torch's operation in its place, which `context` knows to share.

It is a product of the softmax of a product, `softmax(query @ key.T * scale + mask) @ value`, with masks added or filled
in, casts and dropout on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.fake_run import mode_of
from paceline.graph.labels import argument, tensor_inputs
from paceline.graph.reshape_rules import shape_of
from paceline.graph.writes import wants_gradient
from paceline.torch_private.operations import OpOverload, schema_of

aten = torch.ops.aten
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_HIDDEN = -1e4  # the least that a mask fills in: nothing is left of it in a softmax beside any score
_ROUNDS_AWAY = -1e30  # a score that is added to less is rounded away


@dataclass(slots=True)
class _Scores:
    """What comes before a softmax: the product, its factor, and what is added, each a tensor or (mask, fill)."""

    product: fx.Node
    scale: float = 1.0
    added: list[Any] = field(default_factory=list)


def merge_attention(captured: Captured, num_ranks: int) -> int:
    """Replace every attention written by hand in `captured.graph`; return how many there were.

    One with fewer positions than `num_ranks` can't be shared, and stays as it is written.
    """
    count = 0
    for node in list(captured.graph.nodes):
        if node.target in _SOFTMAX and node not in captured.no_grad:
            count += min(shape_of(node)[-2:]) >= num_ranks and _merge(captured, node)
    if count:
        _erase_unread(captured)
    return count


def _merge(captured: Captured, softmax: fx.Node) -> bool:
    rank = len(shape_of(softmax))
    if int(softmax.args[1]) % rank != rank - 1 or rank < 3:  # type: ignore[arg-type]
        return False
    scores = _scores_of(softmax.args[0])
    if scores is None:
        return False
    end, share = _values_of(softmax)
    if end is None:
        return False
    query, keys_across = tensor_inputs(scores.product)
    value = tensor_inputs(end)[1]
    shapes = [shape_of(source) for source in (query, keys_across, value)]
    if any(len(shape) != rank or shape[:-2] != shapes[0][:-2] for shape in shapes):
        return False
    if any(len(shape_of(_tensor_of(item))) < 2 for item in scores.added) or not _fills_alike(scores):
        return False
    writer = _Writer(captured, end)
    key = _transposed(writer, keys_across)
    mask = None
    for item in scores.added:  # in their order: what fills takes the place of what was added before
        if isinstance(item, tuple):
            mask = writer.filled(mask, *item)
        else:
            mask = item if mask is None else writer.call(aten.add.Tensor, mask, item)
    dtype = query.meta["val"].dtype
    if mask is not None and mask.meta["val"].dtype != dtype:
        mask = writer.call(aten._to_copy.default, mask, dtype=dtype)
    new = writer.call(
        aten.scaled_dot_product_attention.default, query, key, value, mask, share, False, scale=scores.scale
    )
    new.meta["original"] = end.meta.get("original", end.name)
    end.replace_all_uses_with(new)
    return True


def _fills_alike(scores: _Scores) -> bool:
    """True if it makes no difference which number hides a key: a row that sees nothing weighs all of them alike."""
    fills = {item[1] for item in scores.added if isinstance(item, tuple)} - {-math.inf}
    return len(fills) < 2 or max(fills) <= _ROUNDS_AWAY


def _tensor_of(item: Any) -> fx.Node:
    node: fx.Node = item[0] if isinstance(item, tuple) else item
    return node


def _scores_of(node: Any) -> _Scores | None:
    """Follow what a softmax is given back to a product of two values, through operations that nothing else reads."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or node.op != "call_function":
        return None
    target = node.target
    if target in _PRODUCTS:
        return _Scores(node)
    if target in (aten.mul.Tensor, aten.div.Tensor):
        source, factor = node.args[:2]
        found = _scores_of(source)
        if found is None or found.added or not isinstance(factor, int | float) or not factor:
            return None
        found.scale = found.scale * factor if target is aten.mul.Tensor else found.scale / factor
        return found
    if target is aten.add.Tensor and not node.kwargs and all(isinstance(source, fx.Node) for source in node.args):
        for source, added in (node.args, node.args[::-1]):
            found = _scores_of(source)
            if found is not None and len(shape_of(node)) == len(shape_of(source)):  # type: ignore[arg-type]
                found.added.append(added)
                return found
        return None
    if target is aten.masked_fill.Scalar:
        source, mask, fill = node.args
        return _filled(_scores_of(source), mask, fill)
    if target in _CASTS:
        value: Any = node.args[0]
        is_wider = node.meta["val"].dtype.itemsize >= value.meta["val"].dtype.itemsize
        return _scores_of(value) if is_wider else None
    return None


def _filled(found: _Scores | None, mask: Any, fill: Any) -> _Scores | None:
    if found is None or not isinstance(fill, int | float) or not fill <= _HIDDEN:
        return None
    found.added.append((mask, float(fill)))
    return found


def _values_of(softmax: fx.Node) -> tuple[fx.Node | None, float]:
    """Follow a softmax to the product with the values; return it, and the share that is dropped on the way."""
    node = softmax
    share = 0.0
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in _PRODUCTS:
            return (user, share) if user.args[0] is node else (None, 0.0)
        if user.target is aten.dropout.default and not share:
            share = float(argument(user, 1, "p")) if argument(user, 2, "train") else 0.0
        elif user.target not in _CASTS:
            break
        node = user
    return None, 0.0


def _transposed(writer: _Writer, node: fx.Node) -> fx.Node:
    rank = len(shape_of(node))
    if node.target is aten.transpose.int and {int(dim) % rank for dim in node.args[1:]} == {rank - 1, rank - 2}:  # type: ignore[arg-type]
        source: Any = node.args[0]
        return source  # type: ignore[no-any-return]
    return writer.call(aten.transpose.int, node, -2, -1)


@dataclass(slots=True)
class _Writer:
    """Adds nodes before another one, in its module."""

    captured: Captured
    before: fx.Node

    def call(self, target: Any, *arguments: Any, **named: Any) -> fx.Node:
        """Add a node; its value on fake tensors is noted."""
        with self.captured.graph.inserting_before(self.before):
            node = self.captured.graph.call_function(target, arguments, named)
        values = fx.node.map_arg((arguments, named), lambda source: source.meta["val"])
        with mode_of(self.captured):
            value = target(*values[0], **values[1])
        node.meta["val"] = value.detach()
        flows = any(source.meta.get("flows") for source in tensor_inputs(node))
        node.meta["flows"] = flows or wants_gradient(value)
        self.captured.module_path[node] = self.captured.module_path.get(self.before, "")
        return node

    def filled(self, before: fx.Node | None, hidden: fx.Node, fill: float) -> fx.Node:
        """Add what is added to scores where a mask hides them.

        Args:
            before: the node of what is added to them so far.
            hidden: the node of the mask of filled scores.
            fill: the value that they are filled with.
        """
        dtype = self.before.meta["val"].dtype
        if before is None:
            before = self.call(aten.zeros_like.default, hidden, dtype=dtype)
        # Not `fill` itself: a score that -1e9 is added to would not be the same as all others.
        least = fill if fill == -math.inf else torch.finfo(dtype).min
        return self.call(aten.masked_fill.Scalar, before, hidden, least)


def _erase_unread(captured: Captured) -> None:
    """Erase what only the replaced products read."""
    for node in reversed(list(captured.graph.nodes)):
        is_pure = node.op == "call_function" and isinstance(node.target, OpOverload)
        if is_pure and not node.users and not schema_of(node.target).is_mutable:
            captured.graph.erase_node(node)
            captured.module_path.pop(node, None)
            captured.no_grad.discard(node)
