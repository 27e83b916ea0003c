"""The graph that one rank of the `expert` axis runs: its samples, and its experts. See `expert_layout.py`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.experts import ExpertExchanges
from paceline.graph.capture import Captured
from paceline.graph.emit_context import ContextEmitter
from paceline.graph.expert_layout import ExpertLayout, SpreadExperts
from paceline.graph.own_experts import OwnExperts, names_elsewhere, with_experts
from paceline.graph.reshape_rules import RESHAPES, shape_of
from paceline.graph.sharding_strategies import Choice

aten = torch.ops.aten


def emit_experts(
    captured: Captured, layout: ExpertLayout, exchanges: ExpertExchanges, stages: Mapping[fx.Node, int] | None = None
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the captured graph as `exchanges.comm.rank` runs it, and for each new node the old one it was made for."""
    emitter = _ExpertEmitter(captured, layout, exchanges, stages or {})
    emitter.sequence = emitter.experts = exchanges
    emitter.splits = layout
    emitter.unordered = layout.unordered
    emitter.axis_of_placement = "lies_on_expert"
    for spread in layout.spread:
        emitter.spread.update(dict.fromkeys(spread.inside, spread))
    emitter.called = layout.called
    emitted = emitter.run()
    for name, rank in layout.owners.items():
        if rank != exchanges.comm.rank:  # nothing of it is here
            emitted.graph.erase_node(emitted.states.pop(name))
    return emitted, emitter.origin


@dataclass(slots=True)
class _ExpertEmitter(ContextEmitter):
    """Writes the graph of one rank.

    Attributes:
        spread: the layer of each node that runs where the experts are.
        here: what such nodes have made of the rows of this rank's experts.
        sent: rows that have been brought to this rank's experts, by the old node.
        counts: for where the rows of a layer end, how many go to and come from each rank's experts.
        ends: for the same, where the rows of each expert end here.
        called: the experts of modules that run by their own code.
        results: what such a module's call gives, where it is several tensors.
    """

    experts: ExpertExchanges = field(init=False)
    spread: dict[fx.Node, SpreadExperts] = field(default_factory=dict)
    here: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    counts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    ends: dict[fx.Node, fx.Node] = field(default_factory=dict)
    called: dict[fx.Node, OwnExperts] = field(default_factory=dict)
    results: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def _call_with_experts(self, node: fx.Node, choice: Choice) -> None:
        """Run a module's code with this rank's experts, and add up what the ranks make."""
        whole: Any = node.target
        experts = self.called[node]
        call = with_experts(whole, experts, self.rank, self.num_ranks)
        handed = [self._with_placement(source, None, False) for source in node.all_input_nodes]
        elsewhere = names_elsewhere(experts, self.rank, self.num_ranks)
        states = [value for name, value in zip(whole.names, handed, strict=False) if name not in elsewhere]
        made = self._call(call, *states, *handed[len(whole.names) :])
        if not isinstance(node.meta["val"], list | tuple):
            self._register(node, self._call(self.sequence.sum_with_partial_grad, made), choice.output)
            return
        results = []
        for number, is_sum in enumerate(experts.are_sums):
            result = self._call(operator.getitem, made, number)
            results.append(self._call(self.sequence.sum_with_partial_grad, result) if is_sum else result)
        self.results[node] = results
        self._register(node, made, choice.output)

    def _emit_getitem(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        if source in self.results:
            index: Any = node.args[1]
            self._register(node, self.results[source][index], None)
            return
        if node not in self.spread:
            ContextEmitter._emit_getitem(self, node)
            return
        self._note_here(node, self._call(operator.getitem, self.here[source], node.args[1]))

    def _emit(self, node: fx.Node, choice: Choice) -> None:
        if node in self.called:
            self._call_with_experts(node, choice)
            return
        if node not in self.spread:
            ContextEmitter._emit(self, node, choice)
            return
        number = -1

        def bring(old: fx.Node) -> Any:
            nonlocal number
            number += 1
            return self._bring(node, old, choice.inputs[number])

        arguments, named = fx.node.map_arg((node.args, node.kwargs), bring)
        self._note_here(node, self._on_rows(node, arguments, named))

    def _bring(self, node: fx.Node, old: fx.Node, wanted: Any) -> Any:
        """Return a value where the experts of this rank are."""
        spread = self.spread[node]
        role = spread.layer.roles.get(old)
        if old in self.here:
            return self.here[old]
        if role is None:
            return self._with_placement(old, wanted, False)
        ends = spread.layer.products[0].args[2]
        if role.kind == "ends":
            return self._ends_here(old, spread)
        if old not in self.sent:
            rows = self.new_nodes[old]
            if spread.sends:
                self.sent[old] = self._call(self.experts.dispatch, rows, self._counts(ends, spread.name))
            else:
                self.sent[old] = self._call(self.experts.select, rows, self.new_nodes[ends])  # type: ignore[index]
        return self.sent[old]

    def _counts(self, ends: Any, layer: str) -> fx.Node:
        if ends not in self.counts:
            self.counts[ends] = self._call(self.experts.count_rows, self.new_nodes[ends], layer)
        return self.counts[ends]

    def _ends_here(self, ends: fx.Node, spread: SpreadExperts) -> fx.Node:
        if ends not in self.ends:
            new = self.new_nodes[ends]
            if spread.sends:
                counts = self._counts(spread.layer.products[0].args[2], spread.name)
                self.ends[ends] = self._call(self.experts.ends_here, new, counts)
            else:
                self.ends[ends] = self._call(self.experts.own_ends, new, spread.name)
        return self.ends[ends]

    def _on_rows(self, node: fx.Node, arguments: Any, named: Any) -> fx.Node:
        """Run an operation on the rows of this rank's experts, whose number is known only then."""
        role = self.spread[node].layer.roles[node]
        if node.target in RESHAPES or node.target is aten.expand.default:
            sizes = list(shape_of(node))
            sizes[role.dim] = -1
            target = aten.expand.default if node.target is aten.expand.default else aten.reshape.default
            return self._call(target, arguments[0], sizes)
        if node.target is aten.slice.Tensor and self._is_along_rows(node):
            return arguments[0]  # type: ignore[no-any-return]  # all of them: see `find_experts.py`
        return self._call(node.target, *arguments, **named)  # type: ignore[arg-type]

    def _is_along_rows(self, node: fx.Node) -> bool:
        dim: Any = node.args[1] if len(node.args) > 1 else 0
        return dim % len(shape_of(node)) == self.spread[node].layer.roles[node].dim  # type: ignore[no-any-return]

    def _note_here(self, node: fx.Node, new: fx.Node) -> None:
        """Let `new` stand for a node where the experts are, and bring it back where others read it."""
        spread = self.spread[node]
        self.here[node] = new
        self._note(new)
        self.new_nodes[node] = new
        self.placements[node] = None
        if all(user in spread.inside for user in node.users):
            return
        ends: Any = spread.layer.products[0].args[2]
        choice = self.layout.choices[node]
        if spread.sends:
            count = choice.output.size(self.rank, self.num_ranks)  # type: ignore[union-attr]
            back = self._call(self.experts.combine, new, self._counts(ends, spread.name), count)
        else:
            back = self._call(self.experts.join, new, self.new_nodes[ends], spread.layer.slots)
        self._register(node, back, choice.output)
