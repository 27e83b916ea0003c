"""Split the sequence of a captured graph over the ranks of `context`: weights stay whole, values are split.

Where the sequence is, attention says: the positions of its queries and of its keys. From there the graph is walked
twice. Backwards: which dimension of each value before an attention is the sequence. Forwards: every operation runs on
the rank's positions as soon as one of its values has them; what mixes positions is exchanged (attention, a slice, one
position taken out) or, where no rule says how, is gathered and runs whole on every rank, which is always right.

Gradients are partial: that of a whole value is the sum over the ranks (`comm/sequence.py`), so what runs whole needs
no exchange backwards, and every parameter's gradient is summed once after the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.differentiable import piece_ranges
from paceline.comm.sequence import AttentionSplit, pairs_seen, positions_of
from paceline.graph.capture import Captured
from paceline.graph.find_experts import Experts, find_experts, is_counted_for_others
from paceline.graph.functional import written_groups
from paceline.graph.labels import Spec, argument, tensor_inputs
from paceline.graph.layout import Layout
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.rules import spec_of
from paceline.graph.sharding_strategies import CALL, OPERATIONS_PER_BYTE, Choice, size_bytes
from paceline.graph.writes import running_statistics
from paceline.nouns.errors import PlanError
from paceline.nouns.shard_spec import total_of

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
CONVOLUTIONS = (aten.conv1d.default, aten.conv1d.padding)
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Operations with several outputs that mix one dimension alone, by the place and default of their argument `dim`.
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
class Found:
    """An attention of the model, and how it is spread.

    Attributes:
        node: its name in the graph.
        module: path of the module that computes it.
        queries, keys: positions.
        way: "ring of N", "heads over N", "heads over N, ring of M", or "gathered": keys of all ranks on each.
        why: in words.
        work: the share of each rank in the pairs of a query and a key that are computed; empty where each computes all.
    """

    node: str
    module: str
    queries: int
    keys: int
    way: str
    why: str
    work: tuple[float, ...] = ()


@dataclass(slots=True)
class ContextLayout(Layout):
    """A layout of the sequence.

    Attributes:
        found: the attentions.
        gathered: the operations that run whole, by reason.
        attention_splits: how each attention is spread.
        shares_heads: whether `tensor` may split an attention's heads.
        unordered: nodes whose rows are sorted by expert, on each rank its own.
    """

    found: list[Found] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    attention_splits: dict[fx.Node, AttentionSplit] = field(default_factory=dict)
    shares_heads: dict[fx.Node, bool] = field(default_factory=dict)
    unordered: set[fx.Node] = field(default_factory=set)


def split_sequence(
    captured: Captured, num_ranks: int, way: str = "auto", tensor_ranks: int = 1, may_stay_whole: bool = False
) -> ContextLayout:
    """Return the layout of `captured` over `num_ranks` ranks that share each sequence.

    Args:
        captured: the graph.
        num_ranks: ranks on the `context` axis.
        way: how attention is spread: "ring", "heads", or the cheaper of both and of their products, "auto".
        tensor_ranks: ranks that share the heads afterwards.
        may_stay_whole: sequences that are too short run whole on every rank.

    Raises:
        PlanError: nothing can be split, or not in this way.
    """
    walk = Walk(captured, num_ranks, way, tensor_ranks, may_stay_whole)
    return walk.run()


@dataclass(slots=True)
class Walk:
    """The walk over a graph.

    Attributes:
        wanted: for each value the split that an attention after it wants.
        placements: how each value lies.
        pinned: operations on memory that is written: they run whole.
    """

    captured: Captured
    num_ranks: int
    way: str
    tensor_ranks: int
    may_stay_whole: bool = False
    wanted: dict[fx.Node, Split] = field(default_factory=dict)
    placements: dict[fx.Node, Any] = field(default_factory=dict)
    pinned: set[fx.Node] = field(default_factory=set)
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    attention_splits: dict[fx.Node, AttentionSplit] = field(default_factory=dict)
    heads: dict[fx.Node, tuple[int, str]] = field(default_factory=dict)  # that ranks exchange in an attention, and why
    layers: dict[fx.Node, Experts] = field(default_factory=dict)  # of experts, by their nodes
    layer_blocks: dict[fx.Node, tuple[int, ...] | None] = field(default_factory=dict)  # of tokens, by the layer's sort
    is_causal: bool = False
    by_samples: bool = False  # what is split are the samples of the batch

    def run(self) -> ContextLayout:
        """Walk backwards, then forwards."""
        nodes = list(self.captured.graph.nodes)
        for layer in find_experts(self.captured):
            self.layers.update(dict.fromkeys(layer.roles, layer))
        attentions = [node for node in nodes if node.target is ATTENTION]
        self.is_causal = any(_is_causal(node) for node in attentions)
        for node in attentions:
            if not _drops(node):
                self.heads[node] = self._heads(node, tensor_inputs(node))
        if not attentions:
            self.want_by_batch(1)
        self.walk()
        if not self.may_stay_whole and not any(_is_split(placement) for placement in self.placements.values()):
            raise self._nothing(attentions)
        states: dict[str, Placement] = dict.fromkeys(self.captured.states)
        layout = ContextLayout(self.choices, states, 0.0, self.found, self.gathered, self.attention_splits)
        layout.unordered = self.unordered()
        for node, split in self.attention_splits.items():
            # What ranks of `tensor` have left must still divide by the ranks that exchange heads.
            shares = split.heads * self.tensor_ranks
            layout.shares_heads[node] = split.heads == 1 or all(count % shares == 0 for count in _head_counts(node))
        return layout

    def walk(self) -> None:
        """Walk backwards from what is wanted already, then forwards."""
        nodes = list(self.captured.graph.nodes)
        self.pinned = set(written_groups(self.captured.graph))
        self.pinned.update(node for node in nodes if running_statistics(node))
        for node in reversed(nodes):
            self._want_inputs(node)
        for node in nodes:
            self._place(node)

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
                split = self._sequence(dim, shape[dim])
                if split is not None:
                    self._want_after(node, split)

    def _want_after(self, node: fx.Node, split: Split) -> None:
        """Note what is split of the values that are made of a split one: views of it are whole, their readers not."""
        for user in node.users:
            after = self._through(user, node, split)
            self._want(user, after)
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
        if node.target is ATTENTION and not self.by_samples:
            self._want_positions(node, inputs)
            return
        wanted = self.wanted.get(node)
        if wanted is None:
            return
        if node.target is operator.getitem:
            self._want_before_splitting(node, wanted)
        elif is_rearrangement(node):
            self._want(inputs[0], self._before(node, wanted))
        else:
            spec = spec_of(node)
            if spec is None or len(spec.inputs) != len(inputs):
                return
            label = spec.output[wanted.dim]
            for source, labels in zip(inputs, spec.inputs, strict=True):
                if label is not None and label in labels:
                    self._want(source, Split(list(labels).index(label), wanted.blocks))

    def _want_positions(self, node: fx.Node, inputs: Sequence[fx.Node]) -> None:
        """Note that an attention wants positions of queries, keys and values, and rows of its mask."""
        query, key = (shape_of(source) for source in inputs[:2])
        for number, source in enumerate(inputs):
            shape = shape_of(source)
            size = (query if number in (0, 3) else key)[-2]
            if number == 3 and self.heads.get(node, (1, ""))[0] > 1:
                continue  # where heads are exchanged every rank needs the mask of all positions
            if shape[-2] == size:
                self._want(source, self._sequence(len(shape) - 2, size))

    def _want_before_splitting(self, node: fx.Node, wanted: Split) -> None:
        """Note the sequence of what is taken apart, as the fused queries, keys and values of GPT-2."""
        source: Any = node.args[0]
        if is_rearrangement(source):
            before = tensor_inputs(source)[0]
            for dim, size in enumerate(shape_of(before)):
                if size != total_of(wanted.blocks):
                    continue
                carried = carry(source, Split(dim, wanted.blocks), self.num_ranks)
                if isinstance(carried, list) and carried[node.args[1]] == wanted:  # type: ignore[index]
                    self._want(before, Split(dim, wanted.blocks))
                    return

    def _before(self, node: fx.Node, wanted: Split) -> Split | None:
        """Return the split of a rearrangement's input that becomes `wanted`."""
        shape = shape_of(tensor_inputs(node)[0])
        length = total_of(wanted.blocks)
        for dim, size in enumerate(shape):
            for blocks in (wanted.blocks, self._blocks(size)):
                if blocks is None or total_of(blocks) != size:
                    continue
                if carry(node, Split(dim, blocks), self.num_ranks) == wanted:
                    return Split(dim, blocks)
            # A part of a longer sequence: what is cut off at its ends moves positions between ranks, no more.
            is_cut = node.target is aten.slice.Tensor and dim == wanted.dim and size != length
            if is_cut and dim == int(argument(node, 1, "dim", 0)) % len(shape):
                return self._sequence(dim, size)
        return None

    def _want(self, node: fx.Node, split: Split | None) -> None:
        if split is not None and node not in self.wanted:
            self.wanted[node] = split

    def _blocks(self, size: int) -> tuple[int, ...] | None:
        """Return how a sequence of this size is split, or None where a rank would have nothing."""
        ways: list[tuple[int, ...]] = [(size,)]
        if self.is_causal:
            ways.insert(0, (size - size // 2, -(size // 2)))
        for blocks in ways:
            if all(positions_of(blocks, rank, self.num_ranks) for rank in range(self.num_ranks)):
                return blocks
        return None

    def _sequence(self, dim: int, size: int) -> Split | None:
        blocks = self._blocks(size)
        return None if blocks is None else Split(dim, blocks)

    # Forwards

    def _take_output(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        placements = self.placements[source]
        self.placements[node] = placements[node.args[1]] if isinstance(placements, tuple) else None  # type: ignore[index]

    def _choose(self, node: fx.Node) -> Choice:
        """Return how a node runs."""
        inputs = tensor_inputs(node)
        lies = [self.placements[source] for source in inputs]
        if node in self.layers:
            choice = self.with_experts(node, inputs, self.layers[node])
            if choice is not None:
                return choice
        if node in self.pinned or not inputs:
            return self._whole(node, inputs)
        if node.target is ATTENTION and not self.by_samples:
            return self._attention(node, inputs)
        if is_rearrangement(node):
            return self._rearranged(node, inputs, lies)
        if node.target in _FILLED:
            return Choice(tuple(lies), None, False, 0.0)
        choice = self._by_labels(node, inputs, lies) or self._along_one(node, inputs, lies)
        choice = choice or self._mean_loss(node, inputs, lies) or self._padded(node, inputs, lies)
        choice = choice or self._joined(node, inputs, lies) or self._convolved(node, inputs, lies)
        if choice is not None:
            return choice
        if any(_is_split(placement) for placement in lies):
            self._note_gathered(node)
        return self._whole(node, inputs)

    def _note_gathered(self, node: fx.Node) -> None:
        where = self.captured.module_path.get(node) or "the model or the loss"
        reason = f"{node.target} in {where}"
        self.gathered[reason] = self.gathered.get(reason, 0) + 1

    def _whole(self, node: fx.Node, inputs: Sequence[fx.Node]) -> Choice:
        values = node.meta.get("val")
        output = (None,) * len(values) if isinstance(values, list | tuple) else None
        return Choice((None,) * len(inputs), output, False, 0.0)

    def _rearranged(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice:
        split = lies[0]
        others = (None,) * (len(inputs) - 1)
        if not isinstance(split, Split):
            return self._whole(node, inputs)  # a view of a whole value costs nothing, and its reader takes its piece
        carried = carry(node, split, self.num_ranks)
        if carried is not None:
            output = tuple(carried) if isinstance(carried, list) else carried
            return Choice((split, *others), output, True, 0.0)
        shape = shape_of(inputs[0])
        if node.target is aten.select.int:  # along the sequence: `carry` knows the others
            return Choice((split, *others), None, True, 0.0, kind="take one position")
        if node.target is aten.slice.Tensor:
            bounds: list[Any] = [*node.args[2:], None, None, None]
            first, last, step = slice(*bounds[:3]).indices(shape[split.dim])
            wanted = self._sequence(split.dim, max(last - first, 0)) if step == 1 else None
            if wanted is not None:
                return Choice((split, *others), wanted, True, 0.0, kind="move", start=first)
        self._note_gathered(node)
        return self._whole(node, inputs)

    def _by_labels(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to run an operation on the rank's positions, by the rule that `tensor` uses too."""
        spec = spec_of(node)
        if spec is None or len(spec.inputs) != len(inputs):
            return None
        for label, blocks in self._candidates(node, lies, spec):
            needed = _lay_along(spec, label, blocks, inputs)
            if needed is None:
                continue
            if label in spec.summed:
                return Choice(needed, None, True, 0.0, after="sum")
            if label in spec.output:
                return Choice(needed, Split(list(spec.output).index(label), blocks), True, 0.0)
        return None

    def _candidates(self, node: fx.Node, lies: Sequence[Any], spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield labels to split by: first the one of which the output is wanted, then those of split inputs."""
        wanted = self.wanted.get(node)
        # Whole numbers (positions, lengths, words) are small, and what is done to them often has no rule: they stay
        # whole until a value of another kind is made of them.
        is_whole_number = node.meta["val"].dtype in _WHOLE_NUMBERS and not self.by_samples
        if is_whole_number and not any(_is_split(placement) for placement in lies):
            return
        split_labels = []
        for placement, labels in zip(lies, spec.inputs, strict=True):
            if isinstance(placement, Split) and labels[placement.dim] is not None:
                split_labels.append((labels[placement.dim], placement.blocks))
        if wanted is not None:
            label = spec.output[wanted.dim]
            # As the inputs lie, where they do already: another order of the same positions would move them.
            blocks = next((blocks for name, blocks in split_labels if name == label), wanted.blocks)
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
        value = argument(node, 2, "value", 0) if node.target is aten.constant_pad_nd.default else node.args[3:]
        is_constant = node.target is aten.constant_pad_nd.default or argument(node, 2, "mode", "constant") == "constant"
        sizes: Any = node.args[1]
        rank = len(shape_of(inputs[0]))
        pairs = {rank - 1 - number // 2: sizes[number : number + 2] for number in range(0, len(sizes), 2)}
        if split.dim not in pairs:
            if not is_constant and any(any(pair) for pair in pairs.values()):
                return None
            return Choice((split,), split, True, 0.0)
        if (
            not is_constant
            or value not in (0, 0.0, (), (None,), None)
            or any(any(pair) for dim, pair in pairs.items() if dim != split.dim)
        ):
            return None
        wanted = self._sequence(split.dim, shape_of(node)[split.dim])
        if wanted is None:
            return None
        return Choice((split,), wanted, True, 0.0, kind="move", start=-int(pairs[split.dim][0]))

    def _convolved(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to convolve along the sequence by steps of one, with what a piece sees of its neighbours."""
        if node.target not in CONVOLUTIONS or not isinstance(lies[0], Split):
            return None
        (stride,) = argument(node, 3, "stride", [1])
        wanted = self._sequence(2, shape_of(node)[-1])
        if lies[0].dim != 2 or len(shape_of(inputs[0])) != 3 or stride != 1 or wanted is None:
            return None
        return Choice((lies[0], *(None,) * (len(inputs) - 1)), wanted, True, 0.0, kind="convolution")

    def _joined(self, node: fx.Node, inputs: Sequence[fx.Node], lies: Sequence[Any]) -> Choice | None:
        """Return the way to join sequences, as a class token and patches: each rank its piece of each."""
        if node.target is not aten.cat.default:
            return None
        rank = len(shape_of(node))
        dim = int(argument(node, 1, "dim", 0)) % rank
        wanted = self.wanted.get(node)
        is_split = any(isinstance(placement, Split) and placement.dim == dim for placement in lies)
        if not is_split and (wanted is None or wanted.dim != dim):
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
                needed.append(Split(dim, self._blocks(size) or (size,)))
        blocks = tuple(block for split in needed for block in split.blocks)
        if not all(positions_of(blocks, rank, self.num_ranks) for rank in range(self.num_ranks)):
            return None
        return Choice(tuple(needed), Split(dim, blocks), True, 0.0)

    # Experts

    def with_experts(self, node: fx.Node, inputs: Sequence[fx.Node], layer: Experts) -> Choice | None:
        """Return the way to run a layer of experts on the rank's tokens alone, None where they don't lie so."""
        blocks = self.blocks_of(layer)
        if blocks is None:
            return None

        def split(dim: int, size: int) -> Split:
            return Split(dim, tuple(block * size // layer.tokens for block in blocks))

        needed = []
        for source in inputs:
            lies = self.placements[source] if source in layer.roles else None
            needed.append(split(0, layer.aligned[source]) if source in layer.aligned else lies)
        of_node = layer.roles[node]
        if of_node.kind == "counts":
            kind = "counts of experts" if is_counted_for_others(node, layer) else "experts"
            return Choice(tuple(needed), None, True, 0.0, kind=kind)
        if of_node.kind == "ends":
            return Choice(tuple(needed), None, True, 0.0, kind="experts")
        if of_node.kind in ("sorted", "chunks"):
            output = (split(of_node.dim, layer.slots),) * len(node.meta["val"])
            return Choice(tuple(needed), output, True, 0.0, kind="experts")
        size = shape_of(node)[0] if of_node.kind == "restored" else layer.slots
        return Choice(tuple(needed), split(of_node.dim, size), True, 0.0, kind="experts")

    def unordered(self) -> set[fx.Node]:
        """Return the nodes of layers that run on this rank's tokens alone, but for those that put rows back."""
        return {
            node
            for node, layer in self.layers.items()
            if self.layer_blocks.get(layer.sort) is not None and layer.roles[node].kind != "restored"
        }

    def blocks_of(self, layer: Experts) -> tuple[int, ...] | None:
        """Return how a layer's tokens are split; None: they are whole."""
        if layer.sort not in self.layer_blocks:
            self.layer_blocks[layer.sort] = self._blocks_of_tokens(layer)
        return self.layer_blocks[layer.sort]

    def _blocks_of_tokens(self, layer: Experts) -> tuple[int, ...] | None:
        """Return how a layer's tokens are split: as the first of its values lies that is."""
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

    # Attention

    def _attention(self, node: fx.Node, inputs: Sequence[fx.Node]) -> Choice:
        query, key = (shape_of(source) for source in inputs[:2])
        rank = len(query)
        batches = [shape[: -3 if rank > 3 else -2] for shape in (query, key)]
        if batches[0] != batches[1]:
            self._found(node, "whole", "queries and keys are of different batches")
            return self._whole(node, inputs)
        rows = self._as_it_lies(inputs[0], rank - 2)
        columns = self._as_it_lies(inputs[1], rank - 2)
        if rows is None or columns is None or len(key) != rank:
            length = min(query[-2], key[-2])
            if self.way != "auto" and not self.may_stay_whole:
                raise PlanError(
                    f"the plan's context={self.num_ranks} with context_by={self.way}",
                    f"attention in {self._module(node)} has {length} positions, too few for a piece on each rank",
                    "use longer sequences, fewer ranks, or leave context_by out",
                )
            self._found(node, "whole", f"{length} positions are too few for {self.num_ranks} ranks")
            return self._whole(node, inputs)
        if _drops(node):
            if self.way == "heads":
                raise PlanError(
                    "the plan's context_by=heads",
                    f"attention in {self._module(node)} drops weights, and one rank's mask is of all positions",
                    "leave context_by out, or set the model's attention dropout to 0",
                )
            self._found(node, "gathered", "it drops weights: each rank has the keys of all")
            mask = [self._mask_by_rows(inputs[3], rows)] if len(inputs) > 3 else []
            return Choice((rows, None, None, *mask), rows, True, 0.0, kind="attention with dropout")
        heads, why = self.heads[node]
        self.attention_splits[node] = AttentionSplit(rows.blocks, columns.blocks, heads)
        ring = self.num_ranks // heads
        parts = [f"heads over {heads}"] * (heads > 1) + [f"ring of {ring}"] * (ring > 1)
        pairs = pairs_seen(self.attention_splits[node], _is_causal(node), self.num_ranks)
        self._found(node, ", ".join(parts), why, tuple(count / sum(pairs) for count in pairs))
        mask = []
        if len(inputs) > 3:
            mask = [self._mask_by_rows(inputs[3], rows) if heads == 1 else None]
        return Choice((rows, columns, columns, *mask), rows, True, 0.0, kind="attention")

    def _as_it_lies(self, source: fx.Node, dim: int) -> Split | None:
        placement = self.placements[source]
        if isinstance(placement, Split) and placement.dim == dim:
            return placement
        return self._sequence(dim, shape_of(source)[dim])

    def _mask_by_rows(self, mask: fx.Node, rows: Split) -> Split | None:
        shape = shape_of(mask)
        return Split(len(shape) - 2, rows.blocks) if shape[-2] > 1 else None

    def _heads(self, node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, str]:
        """Return how many ranks exchange heads, and why so many."""
        counts = _head_counts(node)
        if all(count % self.tensor_ranks == 0 for count in counts):
            counts = [count // self.tensor_ranks for count in counts]  # `tensor` splits heads too
        possible = [
            heads
            for heads in range(1, self.num_ranks + 1)
            if self.num_ranks % heads == 0 and all(count % heads == 0 for count in counts)
        ]
        if self.way == "ring":
            return 1, "context_by=ring"
        if self.way == "heads":
            if possible[-1] < self.num_ranks:
                raise PlanError(
                    f"the plan's context={self.num_ranks} with context_by=heads",
                    f"attention in {self._module(node)} has {_heads_in_words(counts)}, not a multiple of that",
                    "leave context_by out: what heads can't split goes round in a ring",
                )
            return self.num_ranks, "context_by=heads"
        sizes = [size_bytes(source) / self.num_ranks for source in inputs[:3]]
        costs = {heads: attention_cost(sizes, self.num_ranks, heads) for heads in possible}
        cheapest = min(costs, key=lambda heads: costs[heads])
        why = f"cheapest of {len(costs)} ways" if len(costs) > 1 else f"{_heads_in_words(counts)} can't be shared"
        return cheapest, why

    def _found(self, node: fx.Node, way: str, why: str, work: tuple[float, ...] = ()) -> None:
        query, key = (shape_of(source) for source in tensor_inputs(node)[:2])
        self.found.append(Found(node.name, self._module(node), query[-2], key[-2], way, why, work))

    def _module(self, node: fx.Node) -> str:
        return self.captured.module_path.get(node) or "the model or the loss"

    def _nothing(self, attentions: Sequence[fx.Node]) -> PlanError:
        """Return the error for a graph in which no sequence is split."""
        lengths = [shape_of(tensor_inputs(node)[0])[-2] for node in attentions]
        found = "no operation of the model runs on pieces of a sequence"
        if lengths:
            found = f"the longest sequence that the model attends to has {max(lengths)} positions"
        return PlanError(
            f"the plan's context={self.num_ranks} should split sequences over {self.num_ranks} ranks",
            found,
            "use longer sequences or fewer ranks, or replicate, shard, tensor or pipeline",
        )


def attention_cost(sizes: Sequence[float], num_ranks: int, heads: int) -> float:
    """Return what one way to spread attention exchanges, forward and backward, in operations.

    Args:
        sizes: bytes of queries, keys and values on a rank.
        num_ranks: of the axis.
        heads: ranks that exchange heads.
    """
    ring = num_ranks // heads
    query, key, value = sizes
    # Forward keys and values; backward they and their gradients.
    cost = 3 * (ring - 1) * (CALL + OPERATIONS_PER_BYTE * (key + value))
    if heads > 1:
        # Queries, keys, values and the result, each forward and backward; a rank keeps its own share.
        cost += 8 * CALL + OPERATIONS_PER_BYTE * 2 * (2 * query + key + value) * (heads - 1) / heads
    return cost


def _head_counts(node: fx.Node) -> list[int]:
    """Return the heads of an attention's queries, keys and values."""
    shapes = [shape_of(source) for source in tensor_inputs(node)[:3]]
    return [shape[-3] if len(shape) > 3 else 1 for shape in shapes]


def _heads_in_words(counts: Sequence[int]) -> str:
    queries, keys, _ = counts
    if queries == keys:
        return f"{queries} head" + "s" * (queries != 1)
    return f"{queries} heads and {keys} of keys"


def _is_causal(node: fx.Node) -> bool:
    return bool(argument(node, 5, "is_causal", False))


def _drops(node: fx.Node) -> bool:
    return float(argument(node, 4, "dropout_p", 0.0)) > 0


def _averages(node: fx.Node, dim: int) -> bool:
    """True if a node is a mean over a dimension, among others."""
    if node.target is aten.mean.default:
        return True
    dims: Any = argument(node, 1, "dim")
    if node.target is not aten.mean.dim:
        return False
    rank = len(shape_of(tensor_inputs(node)[0]))
    return not dims or dim in {number % rank for number in ([dims] if isinstance(dims, int) else dims)}


def _is_split(placement: Any) -> bool:
    if isinstance(placement, tuple):
        return any(part is not None for part in placement)
    return placement is not None


def _lay_along(
    spec: Spec, label: str, blocks: tuple[int, ...], inputs: Sequence[fx.Node]
) -> tuple[Placement, ...] | None:
    """Return how the inputs must lie to split one label, or None when they can't."""
    needed: list[Placement] = []
    for number, (source, labels) in enumerate(zip(inputs, spec.inputs, strict=True)):
        placement: Placement = None
        if label in labels:
            dim = list(labels).index(label)
            if shape_of(source)[dim] != total_of(blocks):
                return None
            placement = Split(dim, blocks)
        if number == spec.bias and label in spec.summed:
            placement = None  # added once, after the sum
        needed.append(placement)
    return tuple(needed)


def splits_of(layout: Layout) -> Mapping[fx.Node, AttentionSplit]:
    """Return how each attention of a layout is spread."""
    return layout.attention_splits if isinstance(layout, ContextLayout) else {}
