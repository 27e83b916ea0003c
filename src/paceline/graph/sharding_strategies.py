"""The ways in which one operation can run on the `tensor` axis, and what each costs.

A cost counts operations: what a rank computes, plus the bytes it exchanges times `OPERATIONS_PER_BYTE`. The
constants are small on purpose. They are no model of a machine: whoever asks for `tensor` wants the model split,
so a matrix product is split wherever that does not exchange more than it saves, and among such layouts the one
with the fewest and smallest collectives wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from paceline.graph.labels import Spec, tensor_inputs
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.rules import spec_of

OPERATIONS_PER_BYTE = 4
CALL = 1000  # of one collective, whatever its size
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Choice:
    """How one node runs.

    Attributes:
        inputs: how each tensor input must lie.
        output: how the output lies (a tuple for several).
        is_split: whether ranks compute different things, so that whole inputs get gradients in parts.
        after: the collective that follows: "sum", or "scatter" along the output's split dimension.
        kind: "plain", "vocabulary embedding" or "vocabulary loss".
        cost: of the node itself and the collective after it.
    """

    inputs: tuple[Placement, ...]
    output: Placement | tuple[Placement, ...]
    is_split: bool
    cost: float
    after: str | None = None
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Options:
    """What is known of the whole graph while nodes are looked at one by one."""

    parts: int
    blocks: dict[int, set[tuple[int, ...]]]  # asked for by the model, per size of a dimension
    parameters: dict[fx.Node, str]  # float states, by node
    pinned: set[fx.Node]  # must run whole: they write into shared memory
    with_gradient: set[fx.Node]
    is_sequence_split: bool = False
    widest: int = 0  # bytes of an element of the widest parameter


def choices(
    node: fx.Node, placements: Sequence[Placement], fixed: Sequence[bool], options: Options
) -> Iterator[Choice]:
    """Every way to run `node`, whole first.

    Args:
        node: an operation.
        placements: how its tensor inputs lie now.
        fixed: whether an input's placement is decided; a parameter's is not before its first use.
        options: the rest.
    """
    inputs = tensor_inputs(node)
    outputs = node.meta.get("val")
    several = isinstance(outputs, list | tuple)
    work = operations(node) * (3 if node in options.with_gradient else 1)
    if options.is_sequence_split and not several and len(shape_of(node)) >= 3 and not is_rearrangement(node):
        work += OPERATIONS_PER_BYTE * size_bytes(node)  # asked for to hold less of every value, not to compute less
    whole: Placement | tuple[Placement, ...] = (None,) * len(outputs) if several else None  # type: ignore[arg-type]
    yield Choice((None,) * len(inputs), whole, False, work)
    if node in options.pinned or not inputs:
        return
    if is_rearrangement(node):
        if placements[0] is not None:
            carried = carry(node, placements[0], options.parts)
            if carried is not None:
                output = tuple(carried) if isinstance(carried, list) else carried
                yield Choice((placements[0], *(None,) * (len(inputs) - 1)), output, True, work / options.parts)
        return
    yield from _special(node, placements, fixed, options, work)
    spec = spec_of(node)
    if spec is not None and len(spec.inputs) == len(inputs):
        for label, blocks in _candidates(inputs, placements, fixed, spec, options):
            yield from _split_along(node, spec, label, blocks, options, work)


def operations(node: fx.Node) -> float:
    """Roughly how many arithmetic operations a node's forward takes."""
    values = node.meta.get("val")
    out = sum(value.numel() for value in (values if isinstance(values, list | tuple) else [values]) if _is(value))  # type: ignore[union-attr]
    inputs = tensor_inputs(node)
    if node.target is aten.scaled_dot_product_attention.default:
        query, key = shape_of(inputs[0]), shape_of(inputs[1])
        return 4.0 * math.prod(query) * key[-2]
    spec = spec_of(node) if node.op == "call_function" and not is_rearrangement(node) else None
    if spec is not None and spec.heavy:
        first = spec.inputs[1] if spec.bias == 0 else spec.inputs[0]
        source = shape_of(inputs[1] if spec.bias == 0 else inputs[0])
        weight = shape_of(inputs[2] if spec.bias == 0 else inputs[1])
        inner = math.prod(size for label, size in zip(first, source, strict=True) if label in spec.summed)
        return 2.0 * out * inner * (math.prod(weight[2:]) if len(weight) > 2 and "i" in spec.inputs[1][:2] else 1)
    return 0.0 if is_rearrangement(node) else 0.5 * out


def exchanged(node_bytes: float, times: float, calls: int = 1) -> float:
    """The cost of collectives that move a tensor's bytes so many times altogether."""
    return calls * CALL + OPERATIONS_PER_BYTE * times * node_bytes


def size_bytes(node: fx.Node) -> float:
    """A node's full size, in bytes of four per element whatever the precision: layouts don't depend on it."""
    value = node.meta.get("val")
    return 4.0 * value.numel() if _is(value) else 0.0  # type: ignore[union-attr]


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _candidates(
    inputs: Sequence[fx.Node], placements: Sequence[Placement], fixed: Sequence[bool], spec: Spec, options: Options
) -> list[tuple[str, tuple[int, ...]]]:
    """Labels and blocks worth trying: those that an input is split by already, and those of new weights."""
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    for source, placement, labels in zip(inputs, placements, spec.inputs, strict=True):
        if placement is not None and (label := labels[placement.dim]) is not None:
            found[label, placement.blocks] = None
        if source in options.parameters and (spec.heavy or "e" in labels) and len(labels) > 1:
            for label, size in zip(labels, shape_of(source), strict=True):
                if label is None or size < options.parts:
                    continue
                found[label, (size,)] = None
                for blocks in options.blocks.get(size, ()):
                    if all(block % options.parts == 0 for block in blocks):
                        found[label, blocks] = None
    weights = [
        set(labels)
        for source, labels in zip(inputs, spec.inputs, strict=True)
        if source in options.parameters and len(labels) > 1
    ]
    # Splitting the samples or the sequence of a matrix product leaves its weight whole and its gradient in
    # parts as large as the weight: that is what the data axes are for.
    allowed = set.union(*weights) if spec.heavy and weights else None
    return [key for key in found if allowed is None or key[0] in allowed]


def _split_along(
    node: fx.Node, spec: Spec, label: str, blocks: tuple[int, ...], options: Options, work: float
) -> Iterator[Choice]:
    inputs = tensor_inputs(node)
    total = sum(blocks)
    needed: list[Placement] = []
    for number, (source, labels) in enumerate(zip(inputs, spec.inputs, strict=True)):
        placement = _lay_along(labels, label, blocks, total, shape_of(source), options.parts)
        if placement == "impossible":
            return
        assert placement is None or isinstance(placement, Split)
        if number == spec.bias and label in spec.summed:
            placement = None
        needed.append(placement)
    if _wants_something(node) and any(
        placement is not None and placement.size(options.parts - 1, options.parts) == 0 for placement in needed
    ):
        return
    work = work / options.parts
    if label not in spec.summed:
        out = _lay_along(spec.output, label, blocks, total, shape_of(node), options.parts)
        if isinstance(out, Split):
            yield Choice(tuple(needed), out, True, work)
        return
    size = size_bytes(node)
    yield Choice(tuple(needed), None, True, work + exchanged(size, 2), after="sum")
    shape = shape_of(node)
    if options.is_sequence_split and len(shape) >= 3 and shape[-2] >= options.parts:
        back = 1 if node in options.with_gradient else 0
        out = Split(len(shape) - 2, (shape[-2],))
        yield Choice(tuple(needed), out, True, work + exchanged(size, 1 + back, 1 + back), after="scatter")


def _wants_something(node: fx.Node) -> bool:
    """Whether torch refuses the operation on empty pieces, as it does convolutions and norms without channels."""
    name = str(node.target)
    return "conv" in name or "norm" in name


def _lay_along(
    labels: Sequence[str | None], label: str, blocks: tuple[int, ...], total: int, shape: tuple[int, ...], parts: int
) -> Placement | str:
    if label not in labels:
        return None
    dim = list(labels).index(label)
    if shape[dim] == total:
        return Split(dim, blocks)
    # Fewer key and value heads than query heads: the same share of each.
    if any(block * shape[dim] % (total * parts) or block % parts for block in blocks):
        return "impossible"
    return Split(dim, tuple(block * shape[dim] // total for block in blocks))


def _special(
    node: fx.Node, placements: Sequence[Placement], fixed: Sequence[bool], options: Options, work: float
) -> Iterator[Choice]:
    inputs = tensor_inputs(node)
    size = size_bytes(node)
    if node.target is aten.embedding.default and inputs[0] in options.parameters:
        rows = shape_of(inputs[0])[0]
        plain = not any(node.args[3:])
        if plain and rows >= options.parts and (not fixed[0] or placements[0] == Split(0, (rows,))):
            needed = (Split(0, (rows,)), None)
            yield Choice(needed, None, True, work + exchanged(size, 2), "sum", "vocabulary embedding")
            shape = shape_of(node)
            if options.is_sequence_split and len(shape) >= 3 and shape[-2] >= options.parts:
                out = Split(len(shape) - 2, (shape[-2],))
                yield Choice(needed, out, True, work + exchanged(size, 2), "scatter", "vocabulary embedding")
    if node.target is not aten.cross_entropy_loss.default or placements[0] is None or not is_plain_loss(node):
        return
    if placements[0].dim == 1 and len(placements[0].blocks) == 1:
        cost = work / options.parts + exchanged(12 * shape_of(inputs[0])[0], 2)
        yield Choice((placements[0], None), None, True, cost, kind="vocabulary loss")


def is_plain_loss(node: fx.Node) -> bool:
    """A cross entropy of rows of scores and whole-number labels, without weights or smoothing."""
    inputs = tensor_inputs(node)
    arguments = {**dict(zip(("", "", "weight", "", "", "label_smoothing"), node.args, strict=False)), **node.kwargs}
    return (
        len(inputs) == 2
        and len(shape_of(inputs[0])) == 2
        and not inputs[1].meta["val"].is_floating_point()
        and not arguments.get("label_smoothing")
        and arguments.get("weight") is None
    )
