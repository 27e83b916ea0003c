"""The graph that one rank of an axis runs: pieces of values, and exchanges where placements change.

Under `tensor` the weights are split, and a gradient is partial where ranks compute different things from a value. Under
`context` and `expert` all gradients are partial, as their exchanges say; what these axes do to single operations is in
`graph/context/context_emit.py` and `graph/expert/expert_emit.py`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.differentiable import Exchanges, Pieces, attention_values, attention_weights, split_dropout
from paceline.graph.capture import Captured
from paceline.graph.context import context_emit as context_emit
from paceline.graph.context.context_exchanges import SequenceExchanges
from paceline.graph.expert import expert_emit as expert_emit
from paceline.graph.grouped_mm import grouped_mm_of_pieces
from paceline.graph.labels import argument, arguments_by_name, tensor_inputs
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import is_rearrangement, local_arguments, shape_of
from paceline.graph.rules import spec_of
from paceline.graph.tensor.choices import Choice
from paceline.graph.tensor.tensor_layout import Layout
from paceline.graph.walk import SpreadLayout
from paceline.graph.writes import storage_of, written_inputs

aten = torch.ops.aten
_RANDOM = (aten.dropout.default,)


def emit(
    captured: Captured, layout: Layout, exchanges: Exchanges, stages: Mapping[fx.Node, int] | None = None
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the captured graph as `exchanges.comm.rank` runs it, and for each new node the old one it was made for.

    The new graph's placeholders have the old names and local shapes; those of states that other ranks own are left out.
    What `stages` keeps apart shares no conversion.
    """
    emitter = Emitter(captured, layout, exchanges, stages or {})
    return emitter.run(), emitter.origin


@dataclass(frozen=True, slots=True)
class Step:
    """An operation under way.

    Attributes:
        node: the old node.
        choice: how it is run.
        arguments, named: its arguments in the new graph.
        sources: the tensors among them, in their order.
    """

    node: fx.Node
    choice: Choice
    arguments: Any
    named: Any
    sources: list[Any]

    @property
    def by_name(self) -> dict[str, Any]:
        """Return the arguments of an operation of torch by name, in its order, those left out by default."""
        return arguments_by_name(self.node, self.arguments, self.named)


@dataclass(slots=True)
class Emitter:
    """Writes the graph of one rank, node by node.

    Attributes:
        new_nodes: the new node of each old node, with the placement of the layout.
        placements: the placement of each old node's value.
        converted: conversions that exist already, by old node, placement and stage.
        module_path, no_grad: as those of `Captured`, of the new nodes.
        origin: for each new node the old one that it was made for.
        current: the old node under way.
        rows: writes what is done to the rows of experts, under `context` and `expert`.
    """

    captured: Captured
    layout: Layout
    exchanges: Any  # those of the axis
    stages: Mapping[fx.Node, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    new_nodes: dict[fx.Node, Any] = field(default_factory=dict)
    placements: dict[fx.Node, Any] = field(default_factory=dict)
    converted: dict[Any, fx.Node] = field(default_factory=dict)
    module_path: dict[fx.Node, str] = field(default_factory=dict)
    no_grad: set[fx.Node] = field(default_factory=set)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    current: fx.Node | None = None
    rows: expert_emit.RowsOfExperts | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layout, SpreadLayout):
            self.rows = expert_emit.RowsOfExperts(self)

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return int(self.exchanges.comm.rank)

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
        return int(self.exchanges.comm.size)

    def run(self) -> Captured:
        """Walk the old graph in order; return the new one."""
        names = {node: name for name, node in self.captured.states.items()}
        for node in self.captured.graph.nodes:
            self.current = node
            # Placeholders keep their order: whoever runs the graph hands in states, then inputs.
            if node.op in ("placeholder", "get_attr"):
                copied = self.graph.node_copy(node, lambda old: self.new_nodes[old])
                self.register(node, copied, self.layout.placements.get(names.get(node, "")))
            elif node.op == "output":
                self.graph.output(self._result(node))
            elif self.rows is not None and self.rows.emit(node):
                continue
            elif node.target is operator.getitem:
                self._emit_getitem(node)
            else:
                self._emit(node, self.layout.choices[node])
        states = {name: self.new_nodes[node] for name, node in self.captured.states.items()}
        for name, rank in self.layout.owners.items():
            if rank != self.rank:  # nothing of it is here
                self.graph.erase_node(states.pop(name))
        inputs = [self.new_nodes[node] for node in self.captured.inputs]
        return dataclasses.replace(
            self.captured,
            graph=self.graph,
            states=states,
            inputs=inputs,
            module_path=self.module_path,
            no_grad=self.no_grad,
        )

    def _result(self, output: fx.Node) -> Any:
        """Return the graph's outputs, made whole; of partial gradients each rank takes its share."""
        results: Any = fx.node.map_arg(output.args[0], lambda old: self.with_placement(old, None, False))
        if not self.exchanges.are_gradients_partial:
            return results
        shared = []
        for old, new in zip(output.args[0], results, strict=True):  # type: ignore[arg-type]
            flows = isinstance(old, fx.Node) and old.meta["flows"]
            shared.append(self.call(self.exchanges.share_of_gradient, new) if flows else new)
        return shared

    def _emit_getitem(self, node: fx.Node) -> None:
        """Take one of several outputs."""
        source, index = node.args
        placements = self.placements.get(source)  # type: ignore[arg-type]
        placement = None
        if isinstance(placements, tuple):
            placement = placements[index]  # type: ignore[index]
        new = self.call(operator.getitem, self.new_nodes[source], index)  # type: ignore[index]
        self.register(node, new, placement)

    def register(self, old: fx.Node, new: Any, placement: Any) -> None:
        """Let `new` stand for `old` from here on."""
        self.new_nodes[old] = new
        self.placements[old] = placement
        self.note(new)
        if isinstance(new, fx.Node):
            # An exchange of a graph that was emitted before has none.
            is_ordered = old not in self.layout.unordered
            if "original" in old.meta and is_ordered:
                new.meta["original"] = old.meta["original"]
            for earlier in ("lies_on_context", "lies_on_expert"):
                if earlier in old.meta:
                    new.meta[earlier] = old.meta[earlier]
            if is_ordered:
                new.meta[self.exchanges.placement_key] = placement

    def note(self, new: Any) -> None:
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

    def call(self, function: Any, *arguments: Any, **named: Any) -> fx.Node:
        """Add a node that calls a function."""
        new = self.graph.call_function(function, arguments, named)
        self.note(new)
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
            source = self.with_placement(old, choice.inputs[number], is_grad_partial)
            sources.append(source)
            return source

        # `map_arg` visits the inputs in the order of `tensor_inputs`, in which `choice.inputs` and `spec.bias` count.
        arguments, named = fx.node.map_arg((node.args, node.kwargs), bring)
        step = Step(node, choice, arguments, named, sources)
        operation = _OPERATIONS.get(choice.kind, Emitter.plain)
        self.register(node, self._after_operation(step, operation(self, step)), choice.output)

    def plain(self, step: Step) -> fx.Node:
        """Run a node's operation on this rank's pieces, without the collective after it."""
        node, choice, arguments, named = step.node, step.choice, step.arguments, step.named
        assert callable(node.target)
        if choice.is_split and is_rearrangement(node):
            placement = choice.inputs[0]
            assert placement is not None
            output = list(choice.output) if isinstance(choice.output, tuple) else choice.output
            target, more_arguments = local_arguments(node, placement, output, self.rank, self.num_ranks)
            return self.call(target, step.sources[0], *more_arguments)
        # All ranks of the axis share a random stream: each draws the whole mask and keeps its piece.
        if choice.is_split and node.target in (*_RANDOM, split_dropout):  # the latter of what an axis has split before
            shape = () if node.target is split_dropout else (shape_of(node),)
            return self.call(split_dropout, *arguments, *shape, self.place_of(choice.output))
        if choice.is_split and node.target is aten.scaled_dot_product_attention.default and _dropout_of(node):
            return self.attention_with_dropout(step, choice.output, step.by_name["attn_mask"])
        if choice.is_split and node.target is aten._grouped_mm.default:
            return self.call(grouped_mm_of_pieces, *arguments, **named)
        if choice.after is not None:
            return self._partial(node, arguments, named, step.sources)
        return self.call(node.target, *arguments, **named)

    def place_of(self, placement: Any) -> tuple[Pieces, int, int]:
        """Return a placement and this rank, as `split_dropout` takes them."""
        assert isinstance(placement, Split)
        return pieces_of(placement), self.rank, self.num_ranks

    def attention_with_dropout(self, step: Step, placement: Any, mask: Any, hides_later: bool = True) -> fx.Node:
        """Run attention on this rank's heads, samples or queries, and drop what one rank would drop of them.

        torch's fused attention draws its mask inside, from the stream that all ranks of the axis share: the heads of
        two ranks would drop the same weights. So the mask is drawn for all of them, outside.

        Args:
            step: the call of the attention.
            placement: the placement of its weights.
            mask: the mask of this rank's part.
            hides_later: torch hides later keys where the attention is causal; else `mask` does.
        """
        by_name = step.by_name
        query, key = (shape_of(source) for source in tensor_inputs(step.node)[:2])
        is_causal = hides_later and by_name["is_causal"]
        weights = self.call(attention_weights, by_name["query"], by_name["key"], mask, is_causal, by_name["scale"])
        weights_shape = (*query[:-1], key[-2])  # (.., positions of the query, positions of the key)
        dropped = self.call(
            split_dropout, weights, _dropout_of(step.node), True, weights_shape, self.place_of(placement)
        )
        dropped.meta[self.exchanges.placement_key] = placement
        return self.call(attention_values, dropped, by_name["value"])

    def _partial(self, node: fx.Node, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """Compute the product without its bias, which is added once, after the sum."""
        spec = spec_of(node)
        if spec is None or spec.bias is None:
            return self.call(node.target, *arguments, **named)  # type: ignore[arg-type]
        if node.target is aten.addmm.default:
            return self.call(aten.mm.default, *arguments[1:3])
        # Linear and convolutions: (input, weight, bias, ...).
        without_bias = arguments[:2]
        if len(arguments) > 3:
            without_bias = (*without_bias, None, *arguments[3:])
        return self.call(node.target, *without_bias)  # type: ignore[arg-type]

    def _after_operation(self, step: Step, new: fx.Node) -> fx.Node:
        """Add the collective after a node's operation, and the bias after that."""
        choice = step.choice
        if choice.after is None:
            return new
        if choice.after == "sum":
            are_partial = self.exchanges.are_gradients_partial
            new = self.call(
                self.exchanges.sum_with_partial_grad if are_partial else self.exchanges.reduce_from_group, new
            )
        else:
            pieces = pieces_of(choice.output) if isinstance(choice.output, Split) else None
            new = self.call(self.exchanges.reduce_scatter_to_group, new, pieces)
        return self._with_bias(step.node, choice, new, step.sources)

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
            bias = self.call(aten.reshape.default, bias, [-1, *([1] * spatial_dims)])
        return self.call(aten.add.Tensor, new, bias)

    def with_placement(self, old: fx.Node, required: Placement, is_grad_partial: bool) -> Any:
        """Return the value of `old`, placed as `required`; `is_grad_partial` if ranks use it in different ways."""
        counted = None if self.rows is None else self.rows.own_counts(old)
        if counted is not None:
            return counted
        current = self.placements.get(old)
        value = self.new_nodes[old]
        # Several outputs are converted one by one, where `getitem` takes them.
        if isinstance(current, tuple) or not isinstance(old.meta.get("val"), torch.Tensor):
            return value
        if current == required and (current is not None or not is_grad_partial):
            return value
        stage = None if self.current is None else self.stages.get(self.current)
        # `_convert` looks at `is_grad_partial` only where a whole value is wanted.
        key = (old, required, required is not None or is_grad_partial, stage)
        if key in self.converted:
            return self.converted[key]
        converted = self._convert(old, value, current, required, is_grad_partial)
        # A copy of memory that is written would be out of date for the next reader.
        if old not in self.captured.no_grad and not _is_written(old):
            self.converted[key] = converted
        return converted

    def _convert(
        self, old: fx.Node, value: fx.Node, current: Placement, required: Placement, is_grad_partial: bool
    ) -> fx.Node:
        """Add the exchange that changes a value's placement."""
        exchanges = self.exchanges
        are_all_partial = exchanges.are_gradients_partial
        if current is None and required is None:
            # Nothing moves forwards; only a floating-point value has a gradient to add up, once unless all are partial.
            return self.call(exchanges.copy_to_group, value) if _is_float(old) and not are_all_partial else value
        if current is None:
            assert required is not None
            scatter = exchanges.slice_with_partial_grad if are_all_partial else exchanges.scatter_to_group
            return self.call(scatter, value, pieces_of(required))
        if required is None:
            is_partial = are_all_partial or is_grad_partial
            gather = exchanges.gather_with_partial_grad if is_partial else exchanges.gather_from_group
            return self.call(gather, value, pieces_of(current))
        if isinstance(exchanges, SequenceExchanges) and current.dim == required.dim:
            return self.call(exchanges.move, value, current.dim, current.blocks, 0, required.blocks)
        # From one split to another: gather, then keep the new piece.
        gathered = self.call(exchanges.gather_with_partial_grad, value, pieces_of(current))
        return self.call(exchanges.slice_with_partial_grad, gathered, pieces_of(required))


def _vocabulary_embedding(emitter: Emitter, step: Step) -> fx.Node:
    rows = shape_of(tensor_inputs(step.node)[0])[0]
    # An index into the whole table; -1 is none.
    return emitter.call(emitter.exchanges.split_embedding, *step.sources, rows, step.by_name["padding_idx"])


def _vocabulary_loss(emitter: Emitter, step: Step) -> fx.Node:
    by_name = step.by_name
    classes = shape_of(tensor_inputs(step.node)[0])[1]
    return emitter.call(
        emitter.exchanges.split_cross_entropy, *step.sources, classes, by_name["reduction"], by_name["ignore_index"]
    )


# How operations run that are not run as they are, by the kind of their choice.
_OPERATIONS: dict[str, Callable[[Emitter, Step], fx.Node]] = {
    "vocabulary embedding": _vocabulary_embedding,
    "vocabulary loss": _vocabulary_loss,
    **context_emit.OPERATIONS,
    **expert_emit.OPERATIONS,
}


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
