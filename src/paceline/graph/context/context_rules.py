"""Rules of what `context` puts into a graph, so that `tensor` can split it once more. See `rules.py`."""

from __future__ import annotations

from torch import fx

from paceline.comm.differentiable import attention_values, attention_weights, split_dropout
from paceline.graph.context.context_exchanges import SequenceExchanges
from paceline.graph.labels import (
    Labels,
    Spec,
    labels_without,
    outer_labels,
    tensor_inputs,
    unlabelled,
    unless_broadcast,
)
from paceline.graph.reshape_rules import shape_of

_OF_ROWS = ("dispatch", "combine", "select", "join")
_OF_EXPERTS = (*_OF_ROWS, "count_rows", "ends_here", "own_ends")


def sequence_exchange(node: fx.Node) -> Spec | None:
    """Return the rule of an exchange of `context`, or of a function that runs beside it; None for any other."""
    if node.target is split_dropout:
        labels = labels_without((), len(shape_of(node)))
        return Spec((labels,), labels)
    if node.target is attention_weights:
        return _attention(node, True)
    if node.target is attention_values:
        return _values(node)
    exchanges = getattr(node.target, "__self__", None)
    if not isinstance(exchanges, SequenceExchanges):
        return None
    name = node.target.__name__  # type: ignore[union-attr]
    if name in _OF_EXPERTS:
        return _expert_exchange(node)
    return _along_a_sequence(node, name)


def _along_a_sequence(node: fx.Node, name: str) -> Spec | None:
    if name == "attention":
        return _attention(node, node.meta.get("shares_heads", False))
    rank = len(shape_of(tensor_inputs(node)[0]))
    # Along the sequence the pieces are those of `context`.
    dims: tuple[int, ...] = ()
    if name in ("move", "take_at"):
        dims = (int(node.args[1]),)  # type: ignore[arg-type]
    elif name in ("slice_with_partial_grad", "gather_with_partial_grad"):
        dims = (int(node.args[1][0]),)  # type: ignore[index, arg-type]
    labels = labels_without(dims, rank)
    output = labels
    if name == "take_at":
        output = tuple(label for dim, label in enumerate(labels) if dim not in dims)
    return Spec((labels,), output)


def _expert_exchange(node: fx.Node) -> Spec:
    """Return the rule of an exchange of `expert`: rows may be cut across, not along; counts must be whole."""
    first, *more_labels = (unlabelled(len(shape_of(source))) for source in tensor_inputs(node))
    output = unlabelled(len(shape_of(node)))
    if node.target.__name__ in _OF_ROWS:  # type: ignore[union-attr]
        first = output = labels_without((0,), len(output))
    return Spec((first, *more_labels), output)


def _attention(node: fx.Node, shares_heads: bool) -> Spec | None:
    inputs = tensor_inputs(node)
    query, key = (shape_of(source) for source in inputs[:2])
    rank = len(query) - 2
    if len(query) != len(key):
        return None
    outer: list[str | None] = [*outer_labels(rank)]
    if outer and not shares_heads:
        outer[-1] = None
    # (.. s d): samples and heads are free, positions and features meet
    of_one: Labels = (*outer, None, None)
    labels: list[Labels] = [of_one] * (2 if node.target is attention_weights else 3)
    for mask in inputs[len(labels) :]:
        shape = shape_of(mask)
        names = [name or "" for name in outer[rank - (len(shape) - 2) :]] if len(shape) > 2 else []
        of_mask = unless_broadcast(names, shape[:-2])
        labels.append((*(name or None for name in of_mask), None, None))
    return Spec(tuple(labels), of_one)


def _values(node: fx.Node) -> Spec:
    outer = outer_labels(len(shape_of(node)) - 2)
    return Spec(((*outer, None, None), (*outer, None, None)), (*outer, None, None))
