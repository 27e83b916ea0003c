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

from paceline.graph.context.context_exchanges import AttentionSplit
from paceline.graph.labels import Spec, tensor_inputs
from paceline.graph.own_modules import OwnModule
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.rules import spec_of
from paceline.nouns.shard_spec import total_of

OPERATIONS_PER_BYTE = 4  # that an exchanged byte costs
CALL = 1000  # of one collective, whatever its size
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """How an attention is spread, and whether `tensor` may split its heads."""

    split: AttentionSplit
    shares_heads: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a node on the ranks of an axis.

    Attributes:
        inputs: how each tensor input must lie.
        output: how the output lies (a tuple for several).
        is_split: whether ranks compute different things, so that whole inputs get gradients in parts.
        after: the collective that follows: "sum", or "scatter" along the output's split dimension.
        kind: "plain", "vocabulary embedding" or "vocabulary loss"; others under `context` and `expert` (`walk.py`).
        cost: of the node itself and the collective after it.
        start: of a sequence that is moved, the position of the old one at which the new one begins.
        attention: how the ranks of `context` share it.
    """

    inputs: tuple[Placement, ...]
    output: Placement | tuple[Placement, ...]
    is_split: bool
    cost: float
    after: str | None = None
    kind: str = "plain"
    start: int = 0
    attention: SharedAttention | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a graph on which the choices at its nodes depend."""

    num_ranks: int
    blocks: dict[int, set[tuple[int, ...]]]  # asked for by the model, per size of a dimension
    parameters: dict[fx.Node, str]  # float states, by node
    pinned: set[fx.Node]  # must run whole: they write into shared memory
    with_gradient: set[fx.Node]
    is_sequence_split: bool = False
    widest: int = 0  # bytes of an element of the widest parameter


def choices(
    node: fx.Node, placements: Sequence[Placement], fixed: Sequence[bool], options: Options
) -> Iterator[Choice]:
    """Yield the ways to run `node`, whole first.

    Args:
        node: an operation of the graph.
        placements: the present placements of its tensor inputs.
        fixed: whether an input's placement is decided; a parameter's is not before its first use.
        options: the options that are the same at all nodes.
    """
    inputs = tensor_inputs(node)
    work = _work(node, options)
    whole_output: Placement | tuple[Placement, ...] = None
    if _has_several_outputs(node):
        whole_output = (None,) * len(node.meta["val"])
    yield Choice((None,) * len(inputs), whole_output, False, work)
    # Written memory must be the same on all ranks; without inputs there is nothing to split.
    if node in options.pinned or not inputs:
        return
    if is_rearrangement(node):
        if placements[0] is not None:
            yield from _carried_along(node, placements[0], options.num_ranks, work)
        elif not fixed[0] and _is_weight_of_a_product(node):
            for split in _splits_of(shape_of(inputs[0]), options):
                yield from _carried_along(node, split, options.num_ranks, work)
        return
    yield from _vocabulary_choices(node, placements, fixed, options, work)
    spec = spec_of(node)
    if spec is not None and len(spec.inputs) == len(inputs):
        for label, blocks in _candidates(node, placements, spec, options):
            yield from _split_along(node, spec, label, blocks, options, work)


def _carried_along(node: fx.Node, placement: Split, num_ranks: int, work: float) -> Iterator[Choice]:
    """Yield the way to rearrange each rank's piece of the first input, if there is one."""
    carried = carry(node, placement, num_ranks)
    if carried is None:
        return
    output = tuple(carried) if isinstance(carried, list) else carried
    uncut = (None,) * (len(tensor_inputs(node)) - 1)
    yield Choice((placement, *uncut), output, True, work / num_ranks)


def _is_weight_of_a_product(node: fx.Node) -> bool:
    """True if a product reads what a parameter is rearranged to: then its layout may begin with a split parameter."""
    # Others only follow: a table of positions that is cut to length must not begin a split of what it is added to.
    for user in node.users:
        if user.op != "call_function":
            continue
        if is_rearrangement(user):
            if _is_weight_of_a_product(user):
                return True
            continue
        spec = spec_of(user)
        if spec is not None and spec.heavy:
            return True
    return False


def _makes_a_weight(node: fx.Node, inputs: Sequence[fx.Node], options: Options) -> bool:
    """True if a node makes a product's weight only of parameters, as weight normalization or a mask does."""
    are_parameters = all(_parameter_behind(source, options) is not None for source in inputs)
    return are_parameters and _is_weight_of_a_product(node)


def _splits_of(shape: tuple[int, ...], options: Options) -> Iterator[Split]:
    """Yield the ways to split a new weight along one of its dimensions."""
    for dim, size in enumerate(shape):
        if size >= options.num_ranks:
            for blocks in _blocks_of(size, options):
                yield Split(dim, blocks)


def _parameter_behind(source: fx.Node, options: Options) -> fx.Node | None:
    """Return the parameter that `source` is, or is rearranged from; None if it is neither."""
    while source.op == "call_function" and is_rearrangement(source):
        source = tensor_inputs(source)[0]
    return source if source in options.parameters else None


def _has_several_outputs(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _work(node: fx.Node, options: Options) -> float:
    """Return the cost to run a node whole, without collectives."""
    # The backward pass of a matrix product is two products of the same size.
    passes = 3 if node in options.with_gradient else 1
    work = operations(node) * passes
    if not options.is_sequence_split or is_rearrangement(node) or _has_several_outputs(node):
        return work
    if len(shape_of(node)) >= 3:
        # A split sequence is asked for to hold less of every value, not to compute less.
        # Without this term, only time decides, and sequence parallelism is hardly ever chosen.
        work += OPERATIONS_PER_BYTE * size_bytes(node)
    return work


def operations(node: fx.Node) -> float:
    """Return roughly how many arithmetic operations a node's forward takes."""
    inputs = tensor_inputs(node)
    if isinstance(node.target, OwnModule):
        return node.target.operations
    if node.target is aten.scaled_dot_product_attention.default:
        query = shape_of(inputs[0])
        key = shape_of(inputs[1])
        return 4.0 * math.prod(query) * key[-2]  # two products, of a multiplication and an addition each
    if is_rearrangement(node):
        return 0.0
    num_elements = _num_output_elements(node)
    spec = spec_of(node) if node.op == "call_function" else None
    if spec is not None and spec.heavy:
        return 2.0 * num_elements * _inner_size(inputs, spec)
    return 0.5 * num_elements


def _num_output_elements(node: fx.Node) -> int:
    values = node.meta.get("val")
    if not isinstance(values, list | tuple):
        values = [values]
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))


def _inner_size(inputs: Sequence[fx.Node], spec: Spec) -> int:
    """Return the number of products that are added up in each element of a matrix product or convolution."""
    first = 1 if spec.bias == 0 else 0  # `addmm` takes its bias before the factors
    labels = spec.inputs[first]
    inner = 1
    for label, size in zip(labels, shape_of(inputs[first]), strict=True):
        if label in spec.summed:
            inner *= size
    weight = shape_of(inputs[first + 1])
    # A convolution's weight is (out, in, sizes of the kernel): these are summed too.
    if len(weight) > 2 and "i" in spec.inputs[1][:2]:
        inner *= math.prod(weight[2:])
    return inner


def exchanged(node_bytes: float, times: float, calls: int = 1) -> float:
    """Return the cost of collectives that move a tensor's bytes so many times altogether."""
    return calls * CALL + OPERATIONS_PER_BYTE * times * node_bytes


def size_bytes(node: fx.Node) -> float:
    """Return a node's full size, in bytes of four per element whatever the precision: layouts don't depend on it."""
    value = node.meta.get("val")
    return 4.0 * value.numel() if isinstance(value, torch.Tensor) else 0.0


def _candidates(
    node: fx.Node, placements: Sequence[Placement], spec: Spec, options: Options
) -> list[tuple[str, tuple[int, ...]]]:
    """Return labels and blocks worth trying: those that an input is split by already, and those of new weights."""
    inputs = tensor_inputs(node)
    makes_weight = _makes_a_weight(node, inputs, options)
    candidates: dict[tuple[str, tuple[int, ...]], None] = {}  # a set that keeps the order
    for source, placement, labels in zip(inputs, placements, spec.inputs, strict=True):
        if placement is not None:
            split_label = labels[placement.dim]
            if split_label is not None:
                candidates[split_label, placement.blocks] = None
        # Other operations follow the placement of their inputs; only these may begin one.
        # A matrix product's weight, what it is made of, or an embedding's table.
        can_lead = spec.heavy or "e" in labels or makes_weight
        if can_lead and source in options.parameters and len(labels) > 1:
            for label, size in zip(labels, shape_of(source), strict=True):
                if label is not None and size >= options.num_ranks:
                    for blocks in _blocks_of(size, options):
                        candidates[label, blocks] = None
    if not spec.heavy:
        return list(candidates)
    # Splitting the samples or the sequence of a matrix product leaves its weight whole and its gradient in
    # parts as large as the weight: that is what the data axes are for.
    weight_labels = _weight_labels(inputs, spec, options)
    if not weight_labels:
        return list(candidates)
    return [(label, blocks) for label, blocks in candidates if label in weight_labels]


def _blocks_of(size: int, options: Options) -> Iterator[tuple[int, ...]]:
    """Yield the ways to take a dimension of a new weight apart: as one block, or as the model itself does."""
    yield (size,)
    for blocks in options.blocks.get(size, ()):
        if all(block % options.num_ranks == 0 for block in blocks):
            yield blocks


def _weight_labels(inputs: Sequence[fx.Node], spec: Spec, options: Options) -> set[str | None]:
    """Return the labels of the weights among the inputs, biases left out."""
    weight_labels: set[str | None] = set()
    for source, labels in zip(inputs, spec.inputs, strict=True):
        if len(labels) > 1 and _parameter_behind(source, options) is not None:
            weight_labels.update(labels)
    return weight_labels


def _split_along(
    node: fx.Node, spec: Spec, label: str, blocks: tuple[int, ...], options: Options, work: float
) -> Iterator[Choice]:
    """Yield the ways to run a node whose dimensions with one label are split."""
    needed = needed_placements(node, spec, label, blocks, options.num_ranks)
    if needed is None:
        return
    work = work / options.num_ranks
    shape = shape_of(node)
    if label not in spec.summed:
        out = _lay_along(spec.output, label, blocks, shape, options.num_ranks)
        if isinstance(out, Split):
            yield Choice(needed, out, True, work)
        return
    size = size_bytes(node)
    # An all_reduce moves the bytes twice: it is a reduce_scatter and an all_gather. Half of it is needed where the
    # output may stay split.
    yield Choice(needed, None, True, work + exchanged(size, 2), after="sum")
    if _can_scatter(shape, options):
        back = 1 if node in options.with_gradient else 0  # the gradient is gathered
        out = _along_sequence(shape)
        yield Choice(needed, out, True, work + exchanged(size, 1 + back, 1 + back), after="scatter")


def needed_placements(
    node: fx.Node, spec: Spec, label: str, blocks: tuple[int, ...], num_ranks: int
) -> tuple[Placement, ...] | None:
    """Return the placements of the inputs that split one label; None when there are none."""
    needed: list[Placement] = []
    for number, (source, labels) in enumerate(zip(tensor_inputs(node), spec.inputs, strict=True)):
        placement = _lay_along(labels, label, blocks, shape_of(source), num_ranks)
        if placement == "impossible":
            return None
        assert placement is None or isinstance(placement, Split)
        if number == spec.bias and label in spec.summed:
            placement = None  # added once, after the sum
        needed.append(placement)
    if _refuses_empty(node) and any(_leaves_a_rank_empty(placement, num_ranks) for placement in needed):
        return None
    return tuple(needed)


def _leaves_a_rank_empty(placement: Placement, num_ranks: int) -> bool:
    """True if the last rank, whose piece is the smallest, has nothing."""
    return placement is not None and placement.size(num_ranks - 1, num_ranks) == 0


def _can_scatter(shape: tuple[int, ...], options: Options) -> bool:
    """True if a sum of this shape, (..., sequence, features), may be scattered along the sequence."""
    return options.is_sequence_split and len(shape) >= 3 and shape[-2] >= options.num_ranks


def _along_sequence(shape: tuple[int, ...]) -> Split:
    return Split(len(shape) - 2, (shape[-2],))


def _refuses_empty(node: fx.Node) -> bool:
    """True if torch raises for the operation on empty pieces, as for convolutions and norms without channels."""
    name = str(node.target)
    return "conv" in name or "norm" in name


def _lay_along(
    labels: Sequence[str | None], label: str, blocks: tuple[int, ...], shape: tuple[int, ...], num_ranks: int
) -> Placement | str:
    """Return the split of a tensor along the dimension with a label, or "impossible"; None if it has none."""
    if label not in labels:
        return None
    dim = list(labels).index(label)
    total = total_of(blocks)
    if shape[dim] == total:
        return Split(dim, blocks)
    # Fewer key and value heads than query heads: the same share of each.
    for block in blocks:
        is_divisible = block % num_ranks == 0 and block * shape[dim] % (total * num_ranks) == 0
        if not is_divisible:
            return "impossible"
    return Split(dim, tuple(block * shape[dim] // total for block in blocks))


def _vocabulary_choices(
    node: fx.Node, placements: Sequence[Placement], fixed: Sequence[bool], options: Options, work: float
) -> Iterator[Choice]:
    """Yield the ways to run an embedding or a loss whose vocabulary is split (Shoeybi et al. 2019)."""
    inputs = tensor_inputs(node)
    if node.target is aten.embedding.default and inputs[0] in options.parameters:
        yield from _vocabulary_embedding(node, placements[0], fixed[0], options, work)
    if node.target is not aten.cross_entropy_loss.default or not is_plain_loss(node):
        return
    scores = placements[0]
    if scores is not None and scores.dim == 1 and len(scores.blocks) == 1:
        rows = shape_of(inputs[0])[0]
        # For each row the largest score, the sum of exponentials and the label's score: 12 bytes.
        cost = work / options.num_ranks + exchanged(12 * rows, 2)
        yield Choice((scores, None), None, True, cost, kind="vocabulary loss")


def _vocabulary_embedding(
    node: fx.Node, placement: Placement, is_fixed: bool, options: Options, work: float
) -> Iterator[Choice]:
    """Yield the ways to look up rows of a table of which each rank holds some; `placement` is the table's."""
    rows = shape_of(tensor_inputs(node)[0])[0]
    by_rows = Split(0, (rows,))
    has_options = any(node.args[3:])  # scale_grad_by_freq, sparse
    if has_options or rows < options.num_ranks:
        return
    if is_fixed and placement != by_rows:
        return
    needed = (by_rows, None)
    # The work is not divided: each rank makes an output of full size, with zeros for the rows of others.
    cost = work + exchanged(size_bytes(node), 2)
    yield Choice(needed, None, True, cost, "sum", "vocabulary embedding")
    shape = shape_of(node)
    if _can_scatter(shape, options):
        yield Choice(needed, _along_sequence(shape), True, cost, "scatter", "vocabulary embedding")


def is_plain_loss(node: fx.Node) -> bool:
    """True for a cross entropy of rows of scores and whole-number labels, without weights or smoothing."""
    inputs = tensor_inputs(node)
    names = ("", "", "weight", "", "", "label_smoothing")  # by place; the others don't matter here
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return (
        len(inputs) == 2
        and len(shape_of(inputs[0])) == 2
        and not inputs[1].meta["val"].is_floating_point()
        and not arguments.get("label_smoothing")
        and arguments.get("weight") is None
    )
