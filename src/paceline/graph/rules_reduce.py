"""Rules of operations that reduce: sums, means, norms, losses. See `rules.py` for what a rule is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from paceline.graph.labels import Labels, Spec, argument, labels_without, tensor_inputs, unlabelled, unless_broadcast
from paceline.graph.reshape_rules import shape_of

aten = torch.ops.aten


def reduce(node: fx.Node) -> Spec | None:
    """Label a mean, sum or largest along dimensions."""
    (source,) = tensor_inputs(node)
    rank = len(shape_of(source))
    dims = dims_of(argument(node, 1, "dim"), rank)
    keeps_dims = bool(argument(node, 2, "keepdim", False))
    after = labels_without(dims, rank)
    output = after if keeps_dims else _dropped(after, dims)
    # Of means and maxima no part can be added up: what they reduce over must be whole.
    if node.target is aten.sum.dim_IntList:
        return Spec((labels_without((), rank),), output, frozenset(f"d{dim}" for dim in dims))
    return Spec((after,), output)


def dims_of(dims: Any, rank: int) -> set[int]:
    """Return the dimensions that an argument names, counted from the first; all where it names none."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return set(range(rank))
    return {dim % rank for dim in dims}


def _dropped(labels: Labels, dims: Collection[int]) -> Labels:
    """Return the labels without those of some dimensions."""
    return tuple(label for dim, label in enumerate(labels) if dim not in dims)


def vector_norm(node: fx.Node) -> Spec | None:
    """Label a norm along dimensions, which must be whole."""
    (source,) = tensor_inputs(node)
    asked = argument(node, 2, "dim")
    if asked is None:
        return None
    rank = len(shape_of(source))
    if isinstance(asked, int):
        asked = [asked]
    dims = {dim % rank for dim in asked}
    labels = labels_without(dims, rank)
    keeps_dims = bool(argument(node, 3, "keepdim", False))
    return Spec((labels,), labels if keeps_dims else _dropped(labels, dims))


def sum_all(node: fx.Node) -> Spec:
    """Label the sum of everything."""
    (source, *_) = tensor_inputs(node)
    labels = tuple(f"d{dim}" for dim in range(len(shape_of(source))))
    return Spec((labels,), (), frozenset(labels))


def cross_entropy(node: fx.Node) -> Spec | None:
    """Label rows of scores, a class each; `reduction` 0 keeps the rows, 2 adds them up, 1 takes a mean."""
    inputs = tensor_inputs(node)
    scores = shape_of(inputs[0])
    classes = shape_of(inputs[1])
    reduction = argument(node, 3, "reduction", 1)
    # 1, the mean: ranks with different numbers of rows have means of different weight.
    if len(scores) < 2 or len(classes) != len(scores) - 1 or reduction == 1:
        return None
    spatial = unlabelled(len(classes) - 1)
    rows: Labels = ("n", *spatial)
    weights = [unlabelled(len(shape_of(source))) for source in inputs[2:]]
    labels = (("n", None, *spatial), rows, *weights)
    if reduction == 2:
        return Spec(labels, (), frozenset("n"))
    return Spec(labels, rows)


def pairwise_loss(node: fx.Node) -> Spec | None:
    """Label a loss element by element, then kept (0) or added up (2)."""
    inputs = tensor_inputs(node)
    places = {aten.binary_cross_entropy_with_logits.default: 4, aten.binary_cross_entropy.default: 3}
    reduction = argument(node, places.get(node.target, 2), "reduction", 1)  # type: ignore[call-overload]
    rank = len(shape_of(inputs[0]))
    names = tuple(f"d{dim}" for dim in range(rank))
    labels = []
    for source in inputs:
        shape = shape_of(source)
        if len(shape) > rank:
            return None
        labels.append(unless_broadcast(names[rank - len(shape) :], shape))
    # As above: a mean of pieces is no part of a sum.
    if reduction == 1:
        return None
    if reduction == 2:
        return Spec(tuple(labels), (), frozenset(names))
    return Spec(tuple(labels), names)
