"""The graph that one rank of the `tensor` axis runs: pieces of the weights, and collectives where placements change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.differentiable import Exchanges, Pieces, attention_values, attention_weights, split_dropout
from paceline.graph.capture import Captured
from paceline.graph.grouped_mm import grouped_mm_of_pieces
from paceline.graph.labels import argument, tensor_inputs
from paceline.graph.layout import Layout
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import is_rearrangement, local_arguments, shape_of
from paceline.graph.rules import spec_of
from paceline.graph.sharding_strategies import Choice
from paceline.graph.writes import storage_of, written_inputs

aten = torch.ops.aten
_RANDOM = (aten.dropout.default,)


def emit(
    captured: Captured, layout: Layout, exchanges: Exchanges, stages: Mapping[fx.Node, int] | None = None
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the captured graph as `exchanges.comm.rank` runs it, and for each new node the old one it was made for.

    The new graph's placeholders have the old names and local shapes. What `stages` keeps apart shares no
    conversion.
    """
    emitter = Emitter(captured, layout, exchanges, stages or {})
    return emitter.run(), emitter.origin


@dataclass(slots=True)
class Emitter:
    """Writes the graph of one rank, node by node.

    Attributes:
        new_nodes: for each old node the new one, whose placement is the layout's.
        placements: for each old node how its value lies.
        converted: conversions that exist already, by old node, placement and stage.
        module_path, no_grad: as those of `Captured`, of the new nodes.
        origin: for each new node the old one that it was made for.
        current: the old node under way.
        axis_of_placement: where each new node's `meta` has its placement.
        unordered: old nodes whose rows lie in another order on this rank: nobody can hold them against one rank's.
    """

    captured: Captured
    layout: Layout
    exchanges: Exchanges
    stages: Mapping[fx.Node, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    new_nodes: dict[fx.Node, Any] = field(default_factory=dict)
    placements: dict[fx.Node, Any] = field(default_factory=dict)
    converted: dict[Any, fx.Node] = field(default_factory=dict)
    module_path: dict[fx.Node, str] = field(default_factory=dict)
    no_grad: set[fx.Node] = field(default_factory=set)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    current: fx.Node | None = None
    axis_of_placement: str = "lies"
    unordered: set[fx.Node] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self.exchanges.comm.rank

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
        return self.exchanges.comm.size

    def run(self) -> Captured:
        """Walk the old graph in order; return the new one."""
        for node in self.captured.graph.nodes:
            self.current = node
            # Placeholders keep their order: whoever runs the graph hands in states, then inputs.
            if node.op in ("placeholder", "get_attr"):
                copied = self.graph.node_copy(node, lambda old: self.new_nodes[old])
                self._register(node, copied, self._placement_of_state(node))
            elif node.op == "output":
                self.graph.output(self._result(node))
            elif node.target is operator.getitem:
                self._emit_getitem(node)
            else:
                self._emit(node, self.layout.choices[node])
        old_graph = self.captured
        return Captured(
            self.graph,
            {name: self.new_nodes[node] for name, node in old_graph.states.items()},
            [self.new_nodes[node] for node in old_graph.inputs],
            old_graph.constants,
            old_graph.rebuild,
            self.module_path,
            old_graph.trained,
            old_graph.buffers,
            old_graph.device,
            self.no_grad,
            old_graph.log,
        )

    def _result(self, output: fx.Node) -> Any:
        """Return what the graph returns, made whole."""
        return fx.node.map_arg(output.args[0], lambda old: self._with_placement(old, None, False))

    def _placement_of_state(self, node: fx.Node) -> Placement:
        for name, state in self.captured.states.items():
            if state is node:
                return self.layout.placements[name]
        return None

    def _emit_getitem(self, node: fx.Node) -> None:
        """Take one of several outputs."""
        source, index = node.args
        placements = self.placements.get(source)  # type: ignore[arg-type]
        placement = None
        if isinstance(placements, tuple):
            placement = placements[index]  # type: ignore[index]
        new = self._call(operator.getitem, self.new_nodes[source], index)  # type: ignore[index]
        self._register(node, new, placement)

    def _register(self, old: fx.Node, new: Any, placement: Any) -> None:
        """Let `new` stand for `old` from here on."""
        self.new_nodes[old] = new
        self.placements[old] = placement
        self._note(new)
        if isinstance(new, fx.Node):
            # An exchange of a graph that was emitted before has none.
            if "original" in old.meta and old not in self.unordered:
                new.meta["original"] = old.meta["original"]
            for earlier in ("lies_on_context", "lies_on_expert"):
                if earlier in old.meta:
                    new.meta[earlier] = old.meta[earlier]
            if old not in self.unordered:
                new.meta[self.axis_of_placement] = placement

    def _note(self, new: Any) -> None:
        """Note for which old node, in which module and whether under `torch.no_grad` a new node was made."""
        if not isinstance(new, fx.Node) or self.current is None:
            return
        path = self.captured.module_path.get(self.current, "")
        self.origin[new] = self.current
        self.module_path[new] = path
        new.meta["module"] = path
        new.meta["made_for"] = self.current.name
        if self.current in self.captured.no_grad:
            self.no_grad.add(new)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> fx.Node:
        new = self.graph.call_function(function, arguments, named)
        self._note(new)
        return new

    def _emit(self, node: fx.Node, choice: Choice) -> None:
        """Run a node as chosen: its inputs brought to their placements, then the operation, then its collective."""
        sources: list[Any] = []
        bias_number = None
        if choice.after is not None and choice.kind == "plain":
            spec = spec_of(node)
            bias_number = None if spec is None else spec.bias

        def bring(old: fx.Node) -> Any:
            number = len(sources)
            is_grad_partial = choice.is_split
            if number == bias_number:
                # A bias is added after the sum, by every rank alike, or by each to its part of a scattered sum.
                is_grad_partial = choice.after == "scatter"
            source = self._with_placement(old, choice.inputs[number], is_grad_partial)
            sources.append(source)
            return source

        # `map_arg` visits the inputs in the order of `tensor_inputs`, in which `choice.inputs` and `spec.bias` count.
        arguments, named = fx.node.map_arg((node.args, node.kwargs), bring)
        new = self._operation(node, choice, arguments, named, sources)
        self._register(node, self._after_operation(node, choice, new, sources), choice.output)

    def _operation(self, node: fx.Node, choice: Choice, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """Run a node's operation on this rank's pieces, without the collective after it."""
        if choice.kind == "vocabulary embedding":
            rows = shape_of(tensor_inputs(node)[0])[0]
            # An index into the whole table; -1 is none.
            padding = arguments[2] if len(arguments) > 2 else -1
            return self._call(self.exchanges.split_embedding, sources[0], sources[1], rows, padding)
        if choice.kind == "vocabulary loss":
            return self._vocabulary_loss(node, sources)
        if choice.is_split and is_rearrangement(node):
            placement = choice.inputs[0]
            assert placement is not None
            output = list(choice.output) if isinstance(choice.output, tuple) else choice.output
            target, rest = local_arguments(node, placement, output, self.rank, self.num_ranks)
            return self._call(target, sources[0], *rest)
        # All ranks of the axis share a random stream: each draws the whole mask and keeps its piece.
        if choice.is_split and node.target in _RANDOM:
            assert isinstance(choice.output, Split)
            place = (pieces_of(choice.output), self.rank, self.num_ranks)
            return self._call(split_dropout, *arguments, shape_of(node), place)
        if choice.is_split and node.target is split_dropout:  # of a sequence that `context` has split before
            assert isinstance(choice.output, Split)
            return self._call(split_dropout, *arguments, (pieces_of(choice.output), self.rank, self.num_ranks))
        if choice.is_split and node.target is aten.scaled_dot_product_attention.default and _dropout_of(node):
            return self._attention_with_dropout(node, choice, arguments, named)
        if choice.is_split and node.target is aten._grouped_mm.default:
            return self._call(grouped_mm_of_pieces, *arguments, **named)
        if choice.after is not None:
            return self._partial(node, arguments, named, sources)
        assert callable(node.target)
        return self._call(node.target, *arguments, **named)

    def _attention_with_dropout(self, node: fx.Node, choice: Choice, arguments: Any, named: Any) -> fx.Node:
        """Run attention on this rank's heads or samples, and drop what one rank would drop of them.

        torch's fused attention draws its mask inside, from the stream that all ranks of the axis share: the heads of
        two ranks would drop the same weights. So the mask is drawn for all heads, outside.
        """
        assert isinstance(choice.output, Split)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        by_name = {**dict(zip(names, arguments, strict=False)), **named}
        query, key = (shape_of(source) for source in tensor_inputs(node)[:2])
        weights = self._call(
            attention_weights,
            by_name["query"],
            by_name["key"],
            by_name.get("attn_mask"),
            by_name.get("is_causal", False),
            by_name.get("scale"),
        )
        weights_shape = (*query[:-1], key[-2])  # (.., positions of the query, positions of the key)
        place = (pieces_of(choice.output), self.rank, self.num_ranks)
        dropped = self._call(split_dropout, weights, _dropout_of(node), True, weights_shape, place)
        dropped.meta[self.axis_of_placement] = choice.output
        return self._call(attention_values, dropped, by_name["value"])

    def _vocabulary_loss(self, node: fx.Node, sources: list[Any]) -> fx.Node:
        names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        defaults = {"reduction": 1, "ignore_index": -100}  # of `aten.cross_entropy_loss`; 1 is the mean
        by_name = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        classes = shape_of(tensor_inputs(node)[0])[1]
        return self._call(
            self.exchanges.split_cross_entropy, *sources, classes, by_name["reduction"], by_name["ignore_index"]
        )

    def _partial(self, node: fx.Node, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """Compute the product without its bias, which is added once, after the sum."""
        spec = spec_of(node)
        if spec is None or spec.bias is None:
            return self._call(node.target, *arguments, **named)  # type: ignore[arg-type]
        if node.target is aten.addmm.default:
            return self._call(aten.mm.default, *arguments[1:3])
        # Linear and convolutions: (input, weight, bias, ...).
        without_bias = arguments[:2]
        if len(arguments) > 3:
            without_bias = (*without_bias, None, *arguments[3:])
        return self._call(node.target, *without_bias)  # type: ignore[arg-type]

    def _after_operation(self, node: fx.Node, choice: Choice, new: fx.Node, sources: list[Any]) -> fx.Node:
        """Add the collective after a node's operation, and the bias after that."""
        if choice.after is None:
            return new
        if choice.after == "sum":
            new = self._call(self.exchanges.reduce_from_group, new)
        else:
            pieces = pieces_of(choice.output) if isinstance(choice.output, Split) else None
            new = self._call(self.exchanges.reduce_scatter_to_group, new, pieces)
        return self._with_bias(node, choice, new, sources)

    def _with_bias(self, node: fx.Node, choice: Choice, new: fx.Node, sources: list[Any]) -> fx.Node:
        """Add the bias of a product whose parts have been summed."""
        if choice.kind != "plain":
            return new
        spec = spec_of(node)
        if spec is None or spec.bias is None:
            return new
        bias = sources[spec.bias]
        is_convolution = spec.inputs[0][0] == "n" and len(spec.inputs[1]) > 2
        if is_convolution:
            spatial_dims = len(shape_of(node)) - 2
            # (channels) -> (channels, 1, ..), to be broadcast over the places
            bias = self._call(aten.reshape.default, bias, [-1, *([1] * spatial_dims)])
        return self._call(aten.add.Tensor, new, bias)

    def _with_placement(self, old: fx.Node, wanted: Placement, is_grad_partial: bool) -> Any:
        """Return the value of `old` as `wanted`; `is_grad_partial`: ranks compute different things from it."""
        current = self.placements.get(old)
        value = self.new_nodes[old]
        # Several outputs are converted one by one, where `getitem` takes them.
        if isinstance(current, tuple) or not isinstance(old.meta.get("val"), torch.Tensor):
            return value
        if current == wanted and (current is not None or not is_grad_partial):
            return value
        stage = None if self.current is None else self.stages.get(self.current)
        # `_convert` looks at `is_grad_partial` only where a whole value is wanted.
        key = (old, wanted, wanted is not None or is_grad_partial, stage)
        if key in self.converted:
            return self.converted[key]
        converted = self._convert(old, value, current, wanted, is_grad_partial)
        # A copy of memory that is written would be out of date for the next reader.
        if old not in self.captured.no_grad and not _is_written(old):
            self.converted[key] = converted
        return converted

    def _convert(
        self, old: fx.Node, value: fx.Node, current: Placement, wanted: Placement, is_grad_partial: bool
    ) -> fx.Node:
        """Add the exchange that changes a value's placement."""
        if current is None and wanted is None:
            # Nothing moves forwards; only a floating-point value has a gradient to add up.
            return self._call(self.exchanges.copy_to_group, value) if _is_float(old) else value
        if current is None:
            assert wanted is not None
            return self._call(self.exchanges.scatter_to_group, value, pieces_of(wanted))
        if wanted is None:
            gather = self.exchanges.gather_with_partial_grad if is_grad_partial else self.exchanges.gather_from_group
            return self._call(gather, value, pieces_of(current))
        # From one split to another: gather, then keep the new piece.
        gathered = self._call(self.exchanges.gather_with_partial_grad, value, pieces_of(current))
        return self._call(self.exchanges.slice_with_partial_grad, gathered, pieces_of(wanted))


def _dropout_of(attention: fx.Node) -> float:
    """Return the share that a node of `scaled_dot_product_attention` drops."""
    share: Any = argument(attention, 4, "dropout_p", 0.0)
    return float(share)


def pieces_of(split: Split) -> Pieces:
    """Return a split as exchanges take it."""
    return split.dim, split.blocks


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_floating_point() or value.is_complex())


def _is_written(node: fx.Node) -> bool:
    """True if an operation that reads the node writes into its memory."""
    shared = storage_of(node)
    for user in node.users:
        written = [storage_of(source) for source in written_inputs(user)]
        if shared in written:
            return True
    return False
