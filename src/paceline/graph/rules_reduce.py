"""Rules of operations that reduce: sums, means, norms, losses. See `rules.py` for what a rule is."""

from __future__ import annotations

import torch
from torch import fx

from paceline.graph.labels import Labels, Spec, argument, tensor_inputs
from paceline.graph.reshape_rules import shape_of

aten = torch.ops.aten


def reduce(node: fx.Node) -> Spec | None:
    """Mean, sum or largest along dimensions."""
    (source,) = tensor_inputs(node)
    rank = len(shape_of(source))
    asked = argument(node, 1, "dim")
    asked = [asked] if isinstance(asked, int) else asked
    dims = {dim % rank for dim in asked} if asked else set(range(rank))
    keep = bool(argument(node, 2, "keepdim", False))
    is_sum = node.target is aten.sum.dim_IntList
    labels = tuple(f"d{dim}" if is_sum or dim not in dims else None for dim in range(rank))
    out = tuple(None if dim in dims else f"d{dim}" for dim in range(rank) if keep or dim not in dims)
    return Spec((labels,), out, frozenset(f"d{dim}" for dim in dims) if is_sum else frozenset())


def vector_norm(node: fx.Node) -> Spec | None:
    """A norm along dimensions, which must be whole."""
    (source,) = tensor_inputs(node)
    rank = len(shape_of(source))
    asked = argument(node, 2, "dim")
    if asked is None:
        return None
    dims = {dim % rank for dim in ([asked] if isinstance(asked, int) else asked)}
    keep = bool(argument(node, 3, "keepdim", False))
    labels = tuple(None if dim in dims else f"d{dim}" for dim in range(rank))
    return Spec((labels,), tuple(label for dim, label in enumerate(labels) if keep or dim not in dims))


def sum_all(node: fx.Node) -> Spec:
    """The sum of everything."""
    labels = tuple(f"d{dim}" for dim in range(len(shape_of(tensor_inputs(node)[0]))))
    return Spec((labels,), (), frozenset(labels))


def cross_entropy(node: fx.Node) -> Spec | None:
    """Rows of scores, a label each; `reduction` 0 keeps the rows, 2 adds them up, 1 takes a mean."""
    inputs = tensor_inputs(node)
    scores, labels = shape_of(inputs[0]), shape_of(inputs[1])
    reduction = argument(node, 3, "reduction", 1)
    if len(scores) < 2 or len(labels) != len(scores) - 1 or reduction == 1:
        return None
    kept: Labels = ("n", *(None,) * (len(labels) - 1))
    others = tuple((None,) * len(shape_of(source)) for source in inputs[2:])
    spec = (("n", None, *kept[1:]), kept, *others)
    return Spec(spec, (), frozenset("n")) if reduction == 2 else Spec(spec, kept)


def pairwise_loss(node: fx.Node) -> Spec | None:
    """Element by element, then kept (0) or added up (2)."""
    inputs = tensor_inputs(node)
    places = {aten.binary_cross_entropy_with_logits.default: 4, aten.binary_cross_entropy.default: 3}
    reduction = argument(node, places.get(node.target, 2), "reduction", 1)  # type: ignore[call-overload]
    full = shape_of(inputs[0])
    names = tuple(f"d{dim}" for dim in range(len(full)))
    labels = []
    for source in inputs:
        shape = shape_of(source)
        aligned = names[len(full) - len(shape) :]
        if len(shape) > len(full):
            return None
        labels.append(tuple(n if s != 1 else None for n, s in zip(aligned, shape, strict=True)))
    if reduction == 1:
        return None
    return Spec(tuple(labels), (), frozenset(names)) if reduction == 2 else Spec(tuple(labels), names)
