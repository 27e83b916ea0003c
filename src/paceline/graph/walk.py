"""Split one dimension of all values over ranks that have whole weights: positions (`context`) or samples (`expert`).

The graph is walked twice. Backwards: which dimension of each value is wanted split, as attention says of its queries
and keys, or the batch of its tensors. Forwards: every operation runs on the rank's piece as soon as one of its values
is split; what mixes positions or samples is exchanged (attention, a slice, one position taken out, rows of experts) or,
where no rule says how, is gathered and runs whole on every rank, which is always right.

Gradients are partial: that of a whole value is the sum over the ranks (`context/context_exchanges.py`), so what runs
whole needs no exchange backwards, and a parameter's gradient is summed once after the backward pass. Only the weights
of experts see the rows of all ranks, and have whole ones.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from paceline.comm.differentiable import piece_ranges
from paceline.graph.capture import Captured
from paceline.graph.context.context_exchanges import positions_of
from paceline.graph.expert.find_experts import PRODUCT, Experts, find_experts, is_counted_for_others
from paceline.graph.expert.own_experts import OwnExperts
from paceline.graph.functional import written_groups
from paceline.graph.labels import Spec, argument, arguments_by_name, tensor_inputs
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.rules import spec_of
from paceline.graph.rules_reduce import dims_of
from paceline.graph.tensor.choices import Choice, needed_placements
from paceline.graph.tensor.tensor_layout import Layout
from paceline.graph.writes import running_statistics
from paceline.nouns.shard_spec import total_of

if TYPE_CHECKING:
    from paceline.graph.context.context_layout import AttentionRules, Found

NO_MODULE = "the model or the loss"
aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
CONVOLUTIONS = (aten.conv1d.default, aten.conv1d.padding)
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Operations with several outputs that mix only one dimension, by the place and default of their argument `dim`.
_ALONG_ONE = {aten.topk.default: (2, -1), aten.sort.default: (1, -1), aten.sort.stable: (2, -1), aten.max.dim: (1, 0),
              aten.min.dim: (1, 0)}  # fmt: skip
# Operations that take a tensor for its dtype and device, and fill a new one.
_FILLED = (aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default)
# Losses that are means over rows, which as pieces are sums divided by what all ranks count.
_MEAN_LOSSES = {
    aten.cross_entropy_loss.default: 3, aten.nll_loss.default: 3, aten.nll_loss_nd.default: 3,
    aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3, aten.binary_cross_entropy_with_logits.default: 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """A layer of experts, and how it is spread.

    Attributes:
        layer: as it was found.
        inside: its nodes that run where the experts are.
        sends: whether rows are sent; else every rank has them all, and computes those of its experts.
        name: path of the module that sorts its rows.
    """

    layer: Experts
    inside: frozenset[fx.Node]
    sends: bool
    name: str


@dataclass(slots=True)
class SpreadLayout(Layout):
    """A layout of positions or samples.

    Attributes:
        found: the descriptions of the attentions.
        gathered: the operations that run whole, by reason.
        spread: the layers whose experts are on several ranks.
        called: the calls of modules whose experts are.
        refused: why other modules that run by their own code have none, by their paths.
    """

    found: list[Found] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    spread: list[SpreadExperts] = field(default_factory=list)
    called: dict[fx.Node, OwnExperts] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Walk:
    """The walk over a graph.

    Args:
        captured: the captured graph.
        num_ranks: the number of ranks on the axis.
        attention: places the attentions whose positions are split; None where samples are.

    Attributes:
        wanted: the split of each value that an operation after it asks for.
        placements: how each value lies.
        pinned: operations on memory that is written: they run whole.
        layers: of experts, by their nodes.
        layer_blocks: of the tokens of a layer, by its sort.
        inside: the nodes that run where the experts are, by the layer's sort.
        called: calls of modules that run by their own code, with other experts on each rank.
    """

    captured: Captured
    num_ranks: int
    attention: AttentionRules | None = None
    wanted: dict[fx.Node, Split] = field(default_factory=dict)
    placements: dict[fx.Node, Any] = field(default_factory=dict)
    pinned: set[fx.Node] = field(default_factory=set)
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    layers: dict[fx.Node, Experts] = field(default_factory=dict)
    layer_blocks: dict[fx.Node, tuple[int, ...] | None] = field(default_factory=dict)
    inside: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    called: dict[fx.Node, OwnExperts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in find_experts(self.captured):
            self.layers.update(dict.fromkeys(layer.roles, layer))

    def run(self) -> SpreadLayout:
        """Walk backwards from what is wanted already, then forwards."""
        nodes = list(self.captured.graph.nodes)
        self.pinned = set(written_groups(self.captured.graph))
        self.pinned.update(node for node in nodes if running_statistics(node))
        for node in reversed(nodes):
            self._want_inputs(node)
        for node in nodes:
            self._place(node)
        states: dict[str, Placement] = {name: self.placements.get(node) for name, node in self.captured.states.items()}
        layout = SpreadLayout(self.choices, states, gathered=self.gathered, called=self.called)
        for layer in dict.fromkeys(self.layers.values()):
            sends = self.blocks_of(layer) is not None
            if layer.sort in self.inside:
                name = str(layer.sort.meta.get("module", "")) or NO_MODULE
                layout.spread.append(SpreadExperts(layer, self.inside[layer.sort], sends, name))
                layout.unordered |= self.inside[layer.sort]
            if sends:  # only on this rank's tokens, but for those that put rows back
                layout.unordered.update(node for node, role in layer.roles.items() if role.kind != "restored")
        return layout

    @property
    def is_split(self) -> bool:
        """True if any value is."""
        return any(is_split(placement) for placement in self.placements.values())

    def module_of(self, node: fx.Node) -> str:
        """Return the path of the module of a node, as shown to people."""
        return self.captured.module_path.get(node) or NO_MODULE

    def _place(self, node: fx.Node) -> None:
        """Choose how a node runs, and note how its value lies."""
        if node in self.placements:
            return
        if node.op != "call_function":
            self.placements[node] = None
        elif node.target is operator.getitem:
            self._take_output(node)
        else:
            self.choices[node] = self._choose(node)
            self.placements[node] = self.choices[node].output

    # Backwards

    def want_by_batch(self, dim: int, size: int = 0) -> None:
        """Take a dimension of the batch's tensors for what is split; of those where it has this size, if any is given.

        Without an attention the second one is the sequence.
        """
        for node in self.captured.inputs:
            shape = shape_of(node)
            if len(shape) > dim and size in (0, shape[dim]):
                split = self.split_of(dim, shape[dim])
                if split is not None:
                    self._want_after(node, split)

    def _want_after(self, node: fx.Node, split: Split) -> None:
        """Note what is split of the values that are made of a split one: views of it are whole, their readers not."""
        for user in node.users:
            after = self._through(user, node, split)
            self.want(user, after)
            if after is not None and is_rearrangement(user):
                self._want_after(user, after)

    def _through(self, user: fx.Node, source: fx.Node, split: Split) -> Split | None:
        """Return the split of `user`'s output where that of its input `source` is `split`."""
        if user.op != "call_function" or not isinstance(user.meta.get("val"), torch.Tensor):
            return None
        inputs = tensor_inputs(user)
        if is_rearrangement(user):
            carried = carry(user, split, self.num_ranks) if inputs[0] is source else None
            return carried if isinstance(carried, Split) else None
        spec = spec_of(user)
        if spec is None or len(spec.inputs) != len(inputs):
            return None
        label = spec.inputs[inputs.index(source)][split.dim]
        if label is None or label not in spec.output:
            return None
        return Split(list(spec.output).index(label), split.blocks)

    def _want_inputs(self, node: fx.Node) -> None:
        """Note for a node's inputs which dimension is the sequence."""
        if node.op != "call_function":
            return
        inputs = tensor_inputs(node)
        if node.target is ATTENTION and self.attention is not None:
            self.attention.want(self, node, inputs)
            return
        required = self.wanted.get(node)
        if required is None:
            return
        if node.target is operator.getitem:
            self._want_before_splitting(node, required)
        elif is_rearrangement(node):
            self.want(inputs[0], self._before(node, required))
        else:
            spec = spec_of(node)
            if spec is None or len(spec.inputs) != len(inputs):
                return
            label = spec.output[required.dim]
            for source, labels in zip(inputs, spec.inputs, strict=True):
                if label is not None and label in labels:
                    self.want(source, Split(list(labels).index(label), required.blocks))

    def _want_before_splitting(self, node: fx.Node, required: Split) -> None:
        """Note the sequence of what is taken apart, as the fused queries, keys and values of GPT-2."""
        source: Any = node.args[0]
        if is_rearrangement(source):
            before = tensor_inputs(source)[0]
            for dim, size in enumerate(shape_of(before)):
                if size != total_of(required.blocks):
                    continue
                carried = carry(source, Split(dim, required.blocks), self.num_ranks)
                if isinstance(carried, list) and carried[node.args[1]] == required:  # type: ignore[index]
                    self.want(before, Split(dim, required.blocks))
                    return

    def _before(self, node: fx.Node, required: Split) -> Split | None:
        """Return the split of a rearrangement's input that becomes `required`."""
        shape = shape_of(tensor_inputs(node)[0])
        length = total_of(required.blocks)
        for dim, size in enumerate(shape):
            for blocks in (required.blocks, self.blocks(size)):
                if blocks is None or total_of(blocks) != size:
                    continue
                if carry(node, Split(dim, blocks), self.num_ranks) == required:
                    return Split(dim, blocks)
            # A part of a longer sequence: what is cut off at its ends moves positions between ranks, no more.
            is_cut = node.target is aten.slice.Tensor and dim == required.dim and size != length
            if is_cut and dim == int(argument(node, 1, "dim", 0)) % len(shape):
                return self.split_of(dim, size)
        return None

    def want(self, node: fx.Node, split: Split | None) -> None:
        """Note that an operation after a value wants it split so, unless another one wants it otherwise."""
        if split is not None and node not in self.wanted:
            self.wanted[node] = split

    def blocks(self, size: int) -> tuple[int, ...] | None:
        """Return the blocks of a split sequence of this size, or None where a rank would have nothing."""
        ways: list[tuple[int, ...]] = [(size,)]
        if self.attention is not None and self.attention.is_causal:
            ways.insert(0, (size - size // 2, -(size // 2)))
        for blocks in ways:
            if all(positions_of(blocks, rank, self.num_ranks) for rank in range(self.num_ranks)):
                return blocks
        return None

    def split_of(self, dim: int, size: int) -> Split | None:
        """Return the split of a dimension of this size, or None where a rank would have nothing."""
        blocks = self.blocks(size)
        return None if blocks is None else Split(dim, blocks)

    # Forwards

    def _take_output(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        placements = self.placements[source]
        self.placements[node] = placements[node.args[1]] if isinstance(placements, tuple) else None  # type: ignore[index]

    def _choose(self, node: fx.Node) -> Choice:
        """Return the choice of how a node runs."""
        inputs = tensor_inputs(node)
        lies = [self.placements[source] for source in inputs]
        if node in self.layers:
            choice = self._with_experts(node, inputs, self.layers[node])
            if choice is not None:
                return choice
        if node in self.pinned or node in self.called or not inputs:
            return self.whole(node, inputs)
        if node.target is ATTENTION and self.attention is not None:
            return self.attention.place(self, node, inputs)
        if is_rearrangement(node):
            return self._rearranged(node, inputs, lies)
        if node.target in _FILLED:
            return Choice(tuple(lies), None, False, 0.0)
        choice = self._by_labels(node, inputs, lies) or self._along_one(node, inputs, lies)
        choice = choice or self._mean_loss(node, inputs, lies) or self._padded(node, inputs, lies)
        choice = choice or self._joined(node, inputs, lies) or self._convolved(node, inputs, lies)
        if choice is not None:
            return choice
        if any(is_split(placement) for placement in lies):
            self._note_gathered(node)
        return self.whole(node, inputs)

    def _note_gathered(self, node: fx.Node) -> None:
        reason = f"{node.target} in {self.module_of(node)}"
        self.gathered[reason] = self.gathered.get(reason, 0) + 1

    def whole(self, node: fx.Node, inputs: Sequence[fx.Node]) -> Choice:
        """Return the way to run a node on whole values."""
        values = node.meta.get("val")
        output = (None,) * len(values) if isinstance(values, list | tuple) else None
        return Choice((None,) * len(inputs), output, False, 0.0)

    def _rearranged(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice:
        split = lies[0]
        uncut = (None,) * (len(inputs) - 1)
        if not isinstance(split, Split):
            return self.whole(node, inputs)  # a view of a whole value costs nothing, and its reader takes its piece
        carried = carry(node, split, self.num_ranks)
        if carried is not None:
            output = tuple(carried) if isinstance(carried, list) else carried
            return Choice((split, *uncut), output, True, 0.0)
        shape = shape_of(inputs[0])
        if node.target is aten.select.int:  # along the sequence: `carry` knows the others
            return Choice((split, *uncut), None, True, 0.0, kind="take one position")
        if node.target is aten.slice.Tensor:
            bounds: list[Any] = [*node.args[2:], None, None, None]
            first, last, step = slice(*bounds[:3]).indices(shape[split.dim])
            output_split = self.split_of(split.dim, max(last - first, 0)) if step == 1 else None
            if output_split is not None:
                return Choice((split, *uncut), output_split, True, 0.0, kind="move", start=first)
        self._note_gathered(node)
        return self.whole(node, inputs)

    def _by_labels(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to run an operation on the rank's positions, by the rule that `tensor` uses too."""
        spec = spec_of(node)
        if spec is None or len(spec.inputs) != len(inputs):
            return None
        for label, blocks in self._candidates(node, lies, spec):
            needed = needed_placements(node, spec, label, blocks, self.num_ranks)
            if needed is None:
                continue
            if label in spec.summed:
                return Choice(needed, None, True, 0.0, after="sum")
            if label in spec.output:
                return Choice(needed, Split(list(spec.output).index(label), blocks), True, 0.0)
        return None

    def _candidates(self, node: fx.Node, lies: Sequence[Any], spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield labels to split by: first the one of which the output is wanted, then those of split inputs."""
        required = self.wanted.get(node)
        # Whole numbers (positions, lengths, words) are small, and what is done to them often has no rule: they stay
        # whole until a value of another kind is made of them.
        is_whole_number = node.meta["val"].dtype in _WHOLE_NUMBERS and self.attention is not None
        if is_whole_number and not any(is_split(placement) for placement in lies):
            return
        split_labels = []
        for placement, labels in zip(lies, spec.inputs, strict=True):
            if isinstance(placement, Split) and labels[placement.dim] is not None:
                split_labels.append((labels[placement.dim], placement.blocks))
        if required is not None:
            label = spec.output[required.dim]
            # As the inputs lie, where they do already: another order of the same positions would move them.
            blocks = next((blocks for name, blocks in split_labels if name == label), required.blocks)
            if label is not None:
                yield label, blocks
        # What stays split before what is summed: a row of attention's scores before its width.
        for label, blocks in sorted(split_labels, key=lambda item: item[0] in spec.summed):
            yield label, blocks  # type: ignore[misc]

    def _along_one(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to run a sort or the like on the rank's positions, which it does not mix."""
        if node.target not in _ALONG_ONE or not isinstance(lies[0], Split):
            return None
        place, otherwise = _ALONG_ONE[node.target]
        dim = int(argument(node, place, "dim", otherwise)) % len(shape_of(inputs[0]))
        if dim == lies[0].dim:
            return None
        return Choice((lies[0],), (lies[0],) * len(node.meta["val"]), True, 0.0)

    def _mean_loss(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to take a mean over the rows of all ranks."""
        if isinstance(lies[0], Split) and _averages(node, lies[0].dim):
            return Choice((lies[0],), None, True, 0.0, after="sum", kind="mean")
        place = _MEAN_LOSSES.get(node.target)  # type: ignore[call-overload]
        if place is None or argument(node, place, "reduction", 1) != 1:
            return None
        split = next((placement for placement in lies[:2] if isinstance(placement, Split)), None)
        shapes = [shape_of(source) for source in inputs]
        if split is None:
            return None
        is_by_class = shapes[0] != shapes[1]  # scores of classes and their numbers
        if is_by_class:
            # Rows are the first dimension; classes must be whole. Places beyond them (images) too.
            if split.dim != 0 or len(shapes[1]) != 1:
                return None
            return Choice((split, split, *(None,) * (len(inputs) - 2)), None, True, 0.0, after="sum", kind="mean loss")
        if len(inputs) > 2 or node.target is aten.cross_entropy_loss.default:
            return None  # targets that are probabilities: its mean is over rows, not over all numbers
        return Choice((split, split), None, True, 0.0, after="sum", kind="mean loss")

    def _padded(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to shift a sequence: zeros at one end, and perhaps a cut at the other."""
        if node.target not in (aten.constant_pad_nd.default, aten.pad.default) or not isinstance(lies[0], Split):
            return None
        split = lies[0]
        by_name = arguments_by_name(node, node.args, node.kwargs)
        sizes, rank = by_name["pad"], len(shape_of(inputs[0]))
        pairs = {rank - 1 - number // 2: sizes[number : number + 2] for number in range(0, len(sizes), 2)}
        along = pairs.pop(split.dim, None)
        pads_others = any(any(pair) for pair in pairs.values())
        is_constant = by_name.get("mode", "constant") == "constant"
        if along is None:
            return Choice((split,), split, True, 0.0) if is_constant or not pads_others else None
        output_split = self.split_of(split.dim, shape_of(node)[split.dim])
        if not is_constant or by_name["value"] or pads_others or output_split is None:
            return None
        return Choice((split,), output_split, True, 0.0, kind="move", start=-int(along[0]))

    def _convolved(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to convolve along the sequence by steps of one, with what a piece sees of its neighbours."""
        if node.target not in CONVOLUTIONS or not isinstance(lies[0], Split):
            return None
        (stride,) = argument(node, 3, "stride", [1])
        output_split = self.split_of(2, shape_of(node)[-1])
        if lies[0].dim != 2 or len(shape_of(inputs[0])) != 3 or stride != 1 or output_split is None:
            return None
        return Choice((lies[0], *(None,) * (len(inputs) - 1)), output_split, True, 0.0, kind="convolution")

    def _joined(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to join sequences, as a class token and patches: each rank its piece of each."""
        if node.target is not aten.cat.default:
            return None
        rank = len(shape_of(node))
        dim = int(argument(node, 1, "dim", 0)) % rank
        required = self.wanted.get(node)
        is_split = any(isinstance(placement, Split) and placement.dim == dim for placement in lies)
        if not is_split and (required is None or required.dim != dim):
            return None
        needed = []
        for source, placement in zip(inputs, lies, strict=True):
            if isinstance(placement, Split) and placement.dim == dim:
                needed.append(placement)
            elif isinstance(placement, Split) or len(shape_of(source)) != rank:
                return None
            else:
                # A piece may be empty here: one rank has the class token.
                size = shape_of(source)[dim]
                needed.append(Split(dim, self.blocks(size) or (size,)))
        blocks = tuple(block for split in needed for block in split.blocks)
        if not all(positions_of(blocks, rank, self.num_ranks) for rank in range(self.num_ranks)):
            return None
        return Choice(tuple(needed), Split(dim, blocks), True, 0.0)

    # Experts

    def _with_experts(self, node: fx.Node, inputs: Sequence[fx.Node], layer: Experts) -> Choice | None:
        """Return the way to run a node of a layer of experts: only on the rank's tokens, or where the experts are."""
        choice = self._on_own_tokens(node, inputs, layer)
        if node not in self.inside.get(layer.sort, ()):
            return choice
        if choice is None:  # the tokens don't lie so: rows of all are on every rank
            choice = Choice((None,) * len(inputs), self.whole(node, inputs).output, True, 0.0, kind="experts")
        if node.target is not PRODUCT:
            return choice
        rows, _, ends = choice.inputs  # the weight is split by expert
        return dataclasses.replace(choice, inputs=(rows, Split(0, (layer.count,)), ends))

    def _on_own_tokens(self, node: fx.Node, inputs: Sequence[fx.Node], layer: Experts) -> Choice | None:
        blocks = self.blocks_of(layer)
        if blocks is None:
            return None

        def split(dim: int, size: int) -> Split:
            return Split(dim, tuple(block * size // layer.tokens for block in blocks))

        needed = []
        for source in inputs:
            lies = self.placements[source] if source in layer.roles else None
            needed.append(split(0, layer.aligned[source]) if source in layer.aligned else lies)
        role = layer.roles[node]
        kind = "counts of experts" if is_counted_for_others(node, layer) else "experts"
        output: Any = None
        if role.kind in ("sorted", "chunks"):
            output = (split(role.dim, layer.slots),) * len(node.meta["val"])
        elif role.kind not in ("counts", "ends"):
            output = split(role.dim, shape_of(node)[0] if role.kind == "restored" else layer.slots)
        return Choice(tuple(needed), output, True, 0.0, kind=kind)

    def blocks_of(self, layer: Experts) -> tuple[int, ...] | None:
        """Return the blocks of a layer's split tokens; None: they are whole."""
        if layer.sort not in self.layer_blocks:
            self.layer_blocks[layer.sort] = self._blocks_of_tokens(layer)
        return self.layer_blocks[layer.sort]

    def _blocks_of_tokens(self, layer: Experts) -> tuple[int, ...] | None:
        """Return the blocks of a layer's split tokens: those of the first of its values that is split."""
        for source, size in layer.aligned.items():
            placement = self.placements.get(source)
            if not isinstance(placement, Split) or placement.dim != 0:
                continue
            factor = size // layer.tokens
            if any(block % factor for block in placement.blocks):
                continue
            blocks = tuple(block // factor for block in placement.blocks)
            if all(self._is_scaled(blocks, size // layer.tokens) for size in layer.aligned.values()):
                return blocks
        return None

    def _is_scaled(self, blocks: tuple[int, ...], factor: int) -> bool:
        """True if blocks of slots, so many to a token, go to the ranks that have the tokens."""
        larger = tuple(block * factor for block in blocks)
        for rank in range(self.num_ranks):
            ranges = [(first * factor, last * factor) for first, last in piece_ranges(blocks, rank, self.num_ranks)]
            if piece_ranges(larger, rank, self.num_ranks) != ranges:
                return False
        return True


def _averages(node: fx.Node, dim: int) -> bool:
    """True if a node is a mean over a dimension, among others."""
    if node.target not in (aten.mean.default, aten.mean.dim):
        return False
    return dim in mean_dims(node)


def mean_dims(node: fx.Node) -> list[int]:
    """Return the dimensions that a mean is over."""
    dims = None if node.target is aten.mean.default else argument(node, 1, "dim")
    return sorted(dims_of(dims, len(shape_of(tensor_inputs(node)[0]))))


def is_split(placement: Any) -> bool:
    """True if a placement, or one of several, is a split."""
    if isinstance(placement, tuple):
        return any(part is not None for part in placement)
    return placement is not None
