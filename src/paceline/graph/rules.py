"""Rules of operations: labels say what each does with each dimension.

A dimension that keeps its label from an input to the output can be split there: every rank computes its piece.
A label in `summed` is added up by the operation: pieces give parts of a sum. A dimension labelled None must
be whole. An operation without a rule runs on whole inputs, which is always right.

    linear      x (.. i)  w (o i)  b (o)   ->  (.. o)      free: o       summed: i
    softmax     x (.. d)                   ->  (.. None)   free: ..
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from paceline.graph.context.context_rules import sequence_exchange
from paceline.graph.labels import (
    Labels,
    Spec,
    argument,
    labels_without,
    outer_labels,
    tensor_inputs,
    unlabelled,
    unless_broadcast,
)
from paceline.graph.reshape_rules import shape_of
from paceline.graph.rules_reduce import cross_entropy, pairwise_loss, reduce, sum_all, vector_norm
from paceline.torch_private.operations import OpOverload, schema_of

aten = torch.ops.aten


def spec_of(node: fx.Node) -> Spec | None:
    """Return the rule for this node, or None: then it runs on whole inputs."""
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    if rule is not None:
        return rule(node)
    target = node.target
    if not isinstance(target, OpOverload):
        return sequence_exchange(node)
    # torch tags its own element-wise operations, so most need no rule here.
    if torch.Tag.pointwise in target.tags or schema_of(target).name.removeprefix("aten::") in _ALSO_POINTWISE:
        return pointwise(node)
    return None


# Composite operations, which carry no tags.
_COMPOSITE = """
    __and__ __or__ __xor__ __lshift__ __rshift__ where masked_fill square true_divide rsub clip not_equal
    greater less greater_equal less_equal selu relu6 absolute negative multiply subtract divide float_power
    logical_and logical_or logical_not logical_xor type_as to _to_copy clone contiguous detach alias dropout
    zeros_like ones_like full_like
"""
_ALSO_POINTWISE = frozenset(_COMPOSITE.split())


def pointwise(node: fx.Node) -> Spec | None:
    """Label an operation element by element, its inputs broadcast against each other."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    out = shape_of(node)
    names = [f"d{index}" for index in range(len(out))]
    inputs = []
    for source in tensor_inputs(node):
        shape = shape_of(source)
        missing = len(out) - len(shape)
        if missing < 0:
            return None
        if any(size not in (1, full) for size, full in zip(shape, out[missing:], strict=True)):
            return None
        inputs.append(unless_broadcast(names[missing:], shape))
    return Spec(tuple(inputs), unless_broadcast(names, out))


def _linear(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    outer = outer_labels(len(shape_of(inputs[0])) - 1)
    if len(shape_of(inputs[1])) != 2:
        return None
    labels: list[Labels] = [(*outer, "i"), ("o", "i")]  # x (.. i), weight (o i)
    bias = None
    if len(inputs) == 3:
        labels.append(("o",))
        bias = 2
    return Spec(tuple(labels), (*outer, "o"), frozenset("i"), True, bias)


def _addmm(node: fx.Node) -> Spec | None:
    # bias (o) + x (n i) @ weight (i o)
    # With factors the bias would have to be scaled before it is added after the sum.
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        return None
    bias, *_ = tensor_inputs(node)
    if shape_of(bias) != shape_of(node)[1:]:
        return None
    return Spec((("o",), ("n", "i"), ("i", "o")), ("n", "o"), frozenset("i"), True, 0)


def _matmul(node: fx.Node) -> Spec | None:
    first, second = (shape_of(source) for source in tensor_inputs(node)[:2])
    if len(first) < 2 or len(second) < 2:
        return None
    rank = len(shape_of(node)) - 2
    outer = outer_labels(rank)

    def batch(shape: tuple[int, ...]) -> Labels:
        batch_shape = shape[:-2]
        return unless_broadcast(outer[rank - len(batch_shape) :], batch_shape)

    # (.. m i) @ (.. i o) -> (.. m o); either may lack leading dimensions, or have them of size 1
    labels: tuple[Labels, ...] = ((*batch(first), "m", "i"), (*batch(second), "i", "o"))
    return Spec(labels, (*batch(shape_of(node)), "m", "o"), frozenset("i"), True)


def _grouped_mm(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    if len(inputs) != 3 or [len(shape_of(source)) for source in inputs] != [2, 3, 1]:
        return None
    # rows (s i), sorted by group; weights (e i o); where each group's rows end (e). Pieces of rows or groups would need
    # ends of their own.
    return Spec(((None, "i"), (None, "i", "o"), (None,)), (None, "o"), frozenset("i"), True)


def _baddbmm(node: fx.Node) -> Spec | None:
    added, *_ = tensor_inputs(node)
    shape = shape_of(added)
    # added (b m o) + (b m i) @ (b i o); `i` stays whole: with parts of a sum, what is added would count once for each
    names = ("b0", "m", "o")
    labels = unless_broadcast(names[len(names) - len(shape) :], shape)
    return Spec((labels, ("b0", "m", None), ("b0", None, "o")), names)


def _einsum(node: fx.Node) -> Spec | None:
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    inputs, out = equation.split("->")
    terms = inputs.split(",")
    if len(terms) > 2 or any(len(set(term)) != len(term) for term in terms):
        return None
    labels = []
    for term, source in zip(terms, tensor_inputs(node), strict=True):
        labels.append(unless_broadcast(term, shape_of(source)))
    summed = set("".join(terms)) - set(out)
    for label in summed:
        holders = [term for term in terms if label in term]
        if len(holders) < len(terms):
            return None
    return Spec(tuple(labels), tuple(out), frozenset(summed), heavy=len(terms) == 2)


def _conv(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    data = shape_of(inputs[0])
    weight = shape_of(inputs[1])
    if data[1] != weight[1] or len(data) != len(weight):  # groups, or no batch dimension
        return None
    spatial = unlabelled(len(data) - 2)
    # x (n i ..), weight (o i ..) -> (n o ..); pieces of an image would need the rows beside them
    labels: list[Labels] = [("n", "i", *spatial), ("o", "i", *spatial)]
    bias = None
    if len(inputs) == 3:
        labels.append(("o",))
        bias = 2
    return Spec(tuple(labels), ("n", "o", *spatial), frozenset("i"), True, bias)


def _attention(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    query, key = (shape_of(source) for source in inputs[:2])
    rank = len(query) - 2
    if rank < 1 or len(key) != len(query):
        return None
    outer = outer_labels(rank)
    if query[: rank - 1] != key[: rank - 1]:
        return None
    # query, key and value (.. s d): samples and heads are free, positions and features meet
    labels: list[Labels] = [(*outer, None, None)] * 3
    if len(inputs) == 4:
        mask = shape_of(inputs[3])
        batch = mask[:-2]
        names = outer[rank - len(batch) :] if batch else ()
        labels.append((*unless_broadcast(names, batch), None, None))
    return Spec(tuple(labels), (*outer, None, None), heavy=False)


def _softmax(node: fx.Node) -> Spec:
    return _unsplit_along(node, [int(node.args[1])])  # type: ignore[arg-type]


def _unsplit_along(node: fx.Node, dims: Sequence[int]) -> Spec:
    """Label an operation that mixes along some dimensions, which must be whole."""
    rank = len(shape_of(node))
    labels = labels_without({dim % rank for dim in dims}, rank)
    return Spec((labels,), labels)


def _norm(node: fx.Node) -> Spec:
    inputs = tensor_inputs(node)
    rank = len(shape_of(inputs[0]))
    normalized = len(node.args[1])  # type: ignore[arg-type]
    labels = (*outer_labels(rank - normalized), *unlabelled(normalized))  # the last dimensions meet in the norm
    weights = [unlabelled(len(shape_of(source))) for source in inputs[1:]]
    return Spec((labels, *weights), labels)


def _weight_norm(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    shape = shape_of(inputs[0])
    dim = int(argument(node, 2, "dim", 0))
    if len(shape_of(inputs[1])) != len(shape) or not 0 <= dim < len(shape):
        return None  # one norm of all of it
    labels: list[str | None] = [None] * len(shape)
    labels[dim] = "o"  # the direction's other dimensions meet in its norm
    return Spec((tuple(labels), tuple(labels)), tuple(labels))


def _batch_norm(node: fx.Node) -> Spec:
    inputs = tensor_inputs(node)
    spatial = unlabelled(len(shape_of(inputs[0])) - 2)
    labels: Labels = (None, "c", *spatial)  # samples and places meet; each channel has statistics of its own
    of_channels: list[Labels] = [("c",)] * (len(inputs) - 1)
    return Spec((labels, *of_channels), labels)


def _group_norm(node: fx.Node) -> Spec:
    inputs = tensor_inputs(node)
    labels: Labels = ("n", *unlabelled(len(shape_of(inputs[0])) - 1))  # channels of a group meet
    weights = [unlabelled(1)] * (len(inputs) - 1)
    return Spec((labels, *weights), labels)


def _pool(node: fx.Node) -> Spec:
    rank = len(shape_of(tensor_inputs(node)[0]))
    spatial = 1 if "pool1d" in str(node.target) else 2
    leading = ("n", "c")[spatial + 2 - rank :]  # samples need not be there
    labels: Labels = (*leading, *unlabelled(spatial))
    return Spec((labels,), labels)


def _embedding(node: fx.Node) -> Spec:
    _, indices = tensor_inputs(node)
    rank = len(shape_of(indices))
    outer: tuple[str | None, ...] = outer_labels(rank)
    if argument(node, 3, "scale_grad_by_freq", False):  # gradients are divided by how often a row is used in all
        outer = (None,) * rank
    # table (rows e), indices (..) -> (.. e); for rows see `_vocabulary_embedding`
    return Spec(((None, "e"), outer), (*outer, "e"))


def _cat(node: fx.Node) -> Spec | None:
    inputs = tensor_inputs(node)
    rank = len(shape_of(node))
    dim = int(argument(node, 1, "dim", 0)) % rank
    if any(len(shape_of(source)) != rank for source in inputs):
        return None
    labels = labels_without([dim], rank)  # joined pieces of several inputs are no piece of the joined whole
    return Spec((labels,) * len(inputs), labels)


def _stack(node: fx.Node) -> Spec:
    inputs = tensor_inputs(node)
    rank = len(shape_of(node))
    dim = int(argument(node, 1, "dim", 0)) % rank
    labels = outer_labels(rank - 1)
    return Spec((labels,) * len(inputs), (*labels[:dim], None, *labels[dim:]))


def _gather(node: fx.Node) -> Spec | None:
    source, index = (shape_of(tensor) for tensor in tensor_inputs(node))
    dim = int(node.args[1]) % len(source)  # type: ignore[arg-type]
    unsplit = {dim}  # indices count in the whole dimension
    for place, (source_size, index_size) in enumerate(zip(source, index, strict=True)):
        if source_size != index_size:
            unsplit.add(place)
    labels = labels_without(unsplit, len(source))
    return Spec((labels, labels), labels)


def _cumulated(node: fx.Node) -> Spec:
    return _unsplit_along(node, [int(node.args[1])])  # type: ignore[arg-type]


_RULES: dict[Any, Callable[[fx.Node], Spec | None]] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.baddbmm.default: _baddbmm,
    aten._grouped_mm.default: _grouped_mm,
    aten.einsum.default: _einsum,
    aten.conv1d.default: _conv,
    aten.conv2d.default: _conv,
    aten.conv3d.default: _conv,
    aten.scaled_dot_product_attention.default: _attention,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten._weight_norm.default: _weight_norm,
    aten.batch_norm.default: _batch_norm,
    aten.max_pool1d.default: _pool,
    aten.max_pool2d.default: _pool,
    aten.avg_pool1d.default: _pool,
    aten.avg_pool2d.default: _pool,
    aten.adaptive_avg_pool1d.default: _pool,
    aten.adaptive_avg_pool2d.default: _pool,
    aten.mean.dim: reduce,
    aten.sum.dim_IntList: reduce,
    aten.amax.default: reduce,
    aten.sum.default: sum_all,
    aten.embedding.default: _embedding,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.linalg_vector_norm.default: vector_norm,
    aten.cumsum.default: _cumulated,
    aten.gather.default: _gather,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss.default: cross_entropy,
    aten.nll_loss_nd.default: cross_entropy,
    aten.mse_loss.default: pairwise_loss,
    aten.l1_loss.default: pairwise_loss,
    aten.huber_loss.default: pairwise_loss,
    aten.smooth_l1_loss.default: pairwise_loss,
    aten.binary_cross_entropy.default: pairwise_loss,
    aten.binary_cross_entropy_with_logits.default: pairwise_loss,
    aten.group_norm.default: _group_norm,
}
