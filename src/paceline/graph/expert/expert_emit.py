"""What a rank of `expert` does to the rows of layers of experts, and a rank of `context` to its own. See `walk.py`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from paceline.graph.expert.find_experts import FACTORIES, LIKE, PRODUCT
from paceline.graph.expert.own_experts import names_elsewhere, with_experts
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import RESHAPES, shape_of
from paceline.graph.walk import SpreadExperts, SpreadLayout

if TYPE_CHECKING:
    from paceline.graph.emit import Emitter, Step

aten = torch.ops.aten


class RowsOfExperts:
    """Writes what runs where the experts are.

    Args:
        emitter: of the graph.

    Attributes:
        spread: the layer of each node that runs where the experts are.
        here: what such nodes have made of the rows of this rank's experts.
        sent: rows that have been brought to this rank's experts, by the old node.
        counts: for where the rows of a layer end, how many go to and come from each rank's experts.
        ends: for the same, where the rows of each expert end here.
        counted: how many rows of its own this rank has of each expert; others read those of all rows.
        called: the experts of modules that run by their own code.
        results: what such a module's call gives, where it is several tensors.
    """

    def __init__(self, emitter: Emitter) -> None:
        layout = emitter.layout
        assert isinstance(layout, SpreadLayout)
        self.emitter = emitter
        self.exchanges = emitter.exchanges
        self.call = emitter.call
        self.layout = layout
        self.spread: dict[fx.Node, SpreadExperts] = {}
        for spread in layout.spread:
            self.spread.update(dict.fromkeys(spread.inside, spread))
        self.local_values: dict[fx.Node, fx.Node] = {}
        self.sent: dict[fx.Node, fx.Node] = {}
        self.counts: dict[fx.Node, fx.Node] = {}
        self.ends: dict[fx.Node, fx.Node] = {}
        self.counted: dict[fx.Node, fx.Node] = {}
        self.results: dict[fx.Node, list[fx.Node]] = {}

    def emit(self, node: fx.Node) -> bool:
        """Write a node; False where it is one like others."""
        if node in self.layout.called:
            self._call_with_experts(node)
        elif node.target is operator.getitem and node.args[0] in self.results:
            source, index = node.args
            self.emitter.register(node, self.results[source][index], None)  # type: ignore[index]
        elif node not in self.spread:
            return False
        elif node.target is operator.getitem:
            source, index = node.args
            self._note_here(node, self.call(operator.getitem, self.local_values[source], index))  # type: ignore[index]
        else:
            required = iter(self.layout.choices[node].inputs)
            arguments, named = fx.node.map_arg(
                (node.args, node.kwargs), lambda old: self._bring(node, old, next(required))
            )
            self._note_here(node, self._on_rows(node, arguments, named))
        return True

    def own_counts(self, node: fx.Node) -> fx.Node | None:
        """Return of counts of experts' rows those of this rank's rows, for who works on these; else None."""
        return self.counted.get(node) if self.emitter.current in self.layout.unordered else None

    def _call_with_experts(self, node: fx.Node) -> None:
        """Run a module's code with this rank's experts, and add up what the ranks make."""
        emitter, choice = self.emitter, self.layout.choices[node]
        target: Any = node.target
        experts = self.layout.called[node]
        call = with_experts(target, experts, emitter.rank, emitter.num_ranks)
        handed = [emitter.with_placement(source, None, False) for source in node.all_input_nodes]
        elsewhere = names_elsewhere(experts, emitter.rank, emitter.num_ranks)
        states = [value for name, value in zip(target.names, handed, strict=False) if name not in elsewhere]
        output = self.call(call, *states, *handed[len(target.names) :])
        if not isinstance(node.meta["val"], list | tuple):
            self.emitter.register(node, self.call(self.exchanges.sum_with_partial_grad, output), choice.output)
            return
        results = []
        for number, is_sum in enumerate(experts.are_sums):
            result = self.call(operator.getitem, output, number)
            results.append(self.call(self.exchanges.sum_with_partial_grad, result) if is_sum else result)
        self.results[node] = results
        self.emitter.register(node, output, choice.output)

    def _bring(self, node: fx.Node, old: fx.Node, required: Any) -> Any:
        """Return a value where the experts of this rank are."""
        spread = self.spread[node]
        role = spread.layer.roles.get(old)
        if old in self.local_values:
            return self.local_values[old]
        if role is None:
            return self.emitter.with_placement(old, required, False)
        ends = spread.layer.products[0].args[2]
        if role.kind == "ends":
            return self._ends_here(old, spread)
        if old not in self.sent:
            rows = self.emitter.new_nodes[old]
            if spread.sends:
                self.sent[old] = self.call(self.exchanges.dispatch, rows, self._counts(ends, spread.name))
            else:
                self.sent[old] = self.call(self.exchanges.select, rows, self.emitter.new_nodes[ends])  # type: ignore[index]
        return self.sent[old]

    def _counts(self, ends: Any, layer: str) -> fx.Node:
        if ends not in self.counts:
            self.counts[ends] = self.call(self.exchanges.count_rows, self.emitter.new_nodes[ends], layer)
        return self.counts[ends]

    def _ends_here(self, ends: fx.Node, spread: SpreadExperts) -> fx.Node:
        if ends not in self.ends:
            new = self.emitter.new_nodes[ends]
            if spread.sends:
                counts = self._counts(spread.layer.products[0].args[2], spread.name)
                self.ends[ends] = self.call(self.exchanges.ends_here, new, counts)
            else:
                self.ends[ends] = self.call(self.exchanges.own_ends, new, spread.name)
        return self.ends[ends]

    def _on_rows(self, node: fx.Node, arguments: Any, named: Any) -> fx.Node:
        """Run an operation on the rows of this rank's experts, whose number is known only then."""
        role = self.spread[node].layer.roles[node]
        if node.target in RESHAPES or node.target is aten.expand.default:
            sizes = list(shape_of(node))
            sizes[role.dim] = -1
            target = aten.expand.default if node.target is aten.expand.default else aten.reshape.default
            return self.call(target, arguments[0], sizes)
        if node.target is aten.slice.Tensor and self._is_along_rows(node):
            return arguments[0]  # type: ignore[no-any-return]  # all of them: see `graph/expert/find_experts.py`
        return self.call(node.target, *arguments, **named)  # type: ignore[arg-type]

    def _is_along_rows(self, node: fx.Node) -> bool:
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return dim % len(shape_of(node)) == self.spread[node].layer.roles[node].dim  # type: ignore[no-any-return]

    def _note_here(self, node: fx.Node, new: fx.Node) -> None:
        """Let `new` stand for a node where the experts are, and bring it back where others read it."""
        spread = self.spread[node]
        self.local_values[node] = new
        self.emitter.note(new)
        self.emitter.new_nodes[node] = new
        self.emitter.placements[node] = None
        if all(user in spread.inside for user in node.users):
            return
        ends: Any = spread.layer.products[0].args[2]
        choice = self.layout.choices[node]
        if spread.sends:
            count = choice.output.size(self.emitter.rank, self.emitter.num_ranks)  # type: ignore[union-attr]
            back = self.call(self.exchanges.combine, new, self._counts(ends, spread.name), count)
        else:
            back = self.call(self.exchanges.join, new, self.emitter.new_nodes[ends], spread.layer.slots)
        self.emitter.register(node, back, choice.output)


def _of_experts(emitter: Emitter, step: Step) -> fx.Node:
    """Run an operation of a layer of experts on this rank's rows."""
    node, choice = step.node, step.choice
    if node.target is PRODUCT:
        return emitter.call(node.target, *step.arguments, **step.named)
    if choice.output is None or node.target not in FACTORIES:
        return emitter.plain(step)
    # A factory has a row for each of this rank's slots.
    assert isinstance(choice.output, Split)
    slots = choice.output.size(emitter.rank, emitter.num_ranks)
    if node.target in LIKE:  # the tensor that it is like may have a row for each slot of all ranks
        options = {name: value for name, value in step.named.items() if name != "memory_format"}
        return emitter.call(LIKE[node.target], step.arguments[0], [slots, *shape_of(node)[1:]], **options)

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [slots, *value[1:]]
        return slots if not isinstance(value, fx.Node) and value == shape_of(node)[0] else value

    return emitter.call(node.target, *map(local, step.arguments), **step.named)


def _counts_of_experts(emitter: Emitter, step: Step) -> fx.Node:
    """Count rows: the layer reads those of this rank's rows, all others those of all rows."""
    own_counts = emitter.call(step.node.target, *step.arguments, **step.named)
    assert emitter.rows is not None
    emitter.rows.counted[step.node] = own_counts
    return emitter.call(emitter.exchanges.sum_with_partial_grad, own_counts)


OPERATIONS: dict[str, Callable[[Any, Any], fx.Node]] = {
    "experts": _of_experts,
    "counts of experts": _counts_of_experts,
}
