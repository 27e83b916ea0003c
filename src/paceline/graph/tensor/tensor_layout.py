"""Choose which weights are split, and how: the cheapest way to run the whole graph on the `tensor` axis.

The graph is walked in order with a set of partial layouts. Two that leave all values still needed lying the
same way are the same from there on, so only the cheaper one goes on (a shortest path over the frontier of
live values, as Viterbi's; Alpa, Zheng et al. 2022, solves the same problem by an integer program). What the
field does by hand for each model, columns then rows with one sum per block, comes out of the costs.

Needs: a model whose path depends only on shapes. Sizes that don't divide are split unevenly where that is right,
else left whole; nothing to split at all is refused.
Promises: losses, gradients and parameters are those of one rank, up to rounding; dropout too, on CPUs. Attention that
drops and is split is computed step by step: torch's fused one draws its mask inside.
Traffic per micro-batch: what the graph says, counted by a dry run on fake tensors.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.functional import written_groups
from paceline.graph.labels import node_order, tensor_inputs
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import blocks_asked_for, shape_of
from paceline.graph.tensor.choices import OPERATIONS_PER_BYTE, Choice, Options, choices, exchanged, size_bytes
from paceline.graph.writes import running_statistics

# Styles of transformers' tensor plans.
_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_rep")
BEAM = 48  # partial layouts kept at a node; 8 gives the same layouts for the models of the tests

State = dict[fx.Node, Any]  # how live values are placed: Split, a tuple of placements, or _UNSPLIT for a decided weight
_UNSPLIT = "whole"  # a weight without an entry is undecided
# Times the cost of an exchange in a narrower dtype than the weights'. transformers' RMS norms compute in float32 even
# in a float64 model, and a float32 sum that is taken in another order differs by 1e-8.
_NARROWER = 1000.0


@dataclass(slots=True)
class Layout:
    """A choice per operation, a placement per state, and what they cost.

    Attributes:
        unordered: nodes whose rows lie in another order on each rank: nobody can hold them against one rank's.
        owners: the rank of each state that one rank has and no other.
    """

    choices: dict[fx.Node, Choice]
    placements: dict[str, Placement]
    cost: float = 0.0
    unordered: set[fx.Node] = field(default_factory=set)
    owners: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _PartialLayout:
    """A layout of the graph up to one node.

    Attributes:
        cost: the cost of the nodes so far, in operations.
        placements: the placements of values that are still needed.
        paid: conversions that exist already: the value, and what it was converted to.
        before: the layout up to the node before.
        choice, node: the last choice, and whose it is.
        states: placements of states that this choice decided.
    """

    cost: float
    placements: State
    paid: frozenset[tuple[fx.Node, Any]]
    before: _PartialLayout | None
    choice: Choice | None
    node: fx.Node | None
    states: dict[fx.Node, Placement]


def gradients_of(captured: Captured) -> set[fx.Node]:
    """Return the nodes through which a gradient flows back, as autograd has it when the graph runs."""
    return {node for node in captured.graph.nodes if node.meta["flows"]}


def options_of(captured: Captured, num_ranks: int, is_sequence_split: bool = False) -> Options:
    """Return the options of the choices that are the same at all nodes."""
    unsplit = _must_stay_whole(captured)
    parameters = {}
    for name, node in captured.states.items():
        if node.meta["val"].is_floating_point() and node not in unsplit:
            parameters[node] = name
    return Options(
        num_ranks,
        blocks_asked_for(captured.graph),
        parameters,
        set(written_groups(captured.graph)),
        gradients_of(captured),
        is_sequence_split,
        # Once per graph: looked for at every conversion, it took minutes for a model of 160 layers.
        max((node.meta["val"].dtype.itemsize for node in parameters), default=0),
    )


def choose_layout(
    captured: Captured, num_ranks: int, decided: Mapping[str, Placement] | None = None, is_sequence_split: bool = False
) -> Layout:
    """Return the cheapest layout of the graph over `num_ranks` ranks.

    Args:
        captured: the captured graph.
        num_ranks: ranks on the `tensor` axis.
        decided: placements of states that an earlier graph of the same model fixed.
        is_sequence_split: also split norms and dropout along the sequence (Korthikanti et al. 2022).
    """
    options = options_of(captured, num_ranks, is_sequence_split)
    last_use = _last_uses(captured.graph)
    decided = decided or {}
    # Beside the layouts, not in them: what is the same for all must not be compared at every node.
    known: State = {}
    for name, placement in decided.items():
        if name in captured.states:
            known[captured.states[name]] = _UNSPLIT if placement is None else placement
    # One walk in the graph's order; `layouts` are the ways to run everything up to the current node.
    layouts = [_PartialLayout(0.0, {}, frozenset(), None, None, None, {})]
    for index, node in enumerate(captured.graph.nodes):
        if node.op == "call_function":
            layouts = _step(layouts, node, index, options, last_use, known)
        elif node.op == "output":
            layouts = [_finish(layout, node, options, known) for layout in layouts]  # results are gathered
    cheapest = min(layouts, key=lambda layout: layout.cost)
    return _read_back(cheapest, captured, decided)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the index of each node's last user; of a node without users its own."""
    order = node_order(graph)
    last_use = {}
    for node, index in order.items():
        last_use[node] = max((order[user] for user in node.users), default=index)
    return last_use


def _step(
    layouts: list[_PartialLayout],
    node: fx.Node,
    index: int,
    options: Options,
    last_use: dict[fx.Node, int],
    known: State,
) -> list[_PartialLayout]:
    """Extend every partial layout by every choice at `node`; return the cheapest of each frontier."""
    if node.target is operator.getitem:
        return [_pick(layout, node, last_use, index) for layout in layouts]
    # Keyed by the frontier: the placements of live values, and the conversions that later readers get for nothing.
    cheapest: dict[Any, _PartialLayout] = {}
    inputs = tensor_inputs(node)
    ending = {source for source in inputs if last_use[source] <= index}
    written = running_statistics(node)
    # Most layouts have this node's inputs lying the same way: what can be done there is asked once for each way.
    possible: dict[Any, list[Choice]] = {}
    for layout in layouts:
        placements = [_placement_of(layout.placements, known, source) for source in inputs]
        fixed = [source in known or _is_decided(source, layout, options) for source in inputs]
        way = (*placements, *fixed)
        if way not in possible:
            possible[way] = [
                choice
                for choice in choices(node, placements, fixed, options)
                if not written or _may_write(written, inputs, placements, fixed, choice)
            ]
        for choice in possible[way]:
            following = _after(layout, node, choice, inputs, placements, fixed, options)
            # Nothing reads these values again: how they lie must not keep two layouts apart.
            for source in ending:
                following.placements.pop(source, None)
            following.paid = frozenset(item for item in following.paid if item[0] not in ending)
            key = (frozenset(following.placements.items()), following.paid)
            if key not in cheapest or following.cost < cheapest[key].cost:
                cheapest[key] = following
    return sorted(cheapest.values(), key=lambda layout: layout.cost)[:BEAM]


def _is_decided(source: fx.Node, layout: _PartialLayout, options: Options) -> bool:
    """True unless it is a parameter before its first use, whose placement is free."""
    return source not in options.parameters or source in layout.placements


def _must_stay_whole(captured: Captured) -> set[fx.Node]:
    """Return the states that are written: ranks write them alike.

    Only a norm's own statistics may be split with its weight.
    """
    grouped = set(written_groups(captured.graph))
    norm_statistics = set()
    for node in captured.graph.nodes:
        norm_statistics.update(running_statistics(node))
    unsplit = set()
    for node in captured.states.values():
        is_read_elsewhere = node in norm_statistics and len(node.users) > 1
        if node in grouped or is_read_elsewhere:
            unsplit.add(node)
    return unsplit


def _may_write(
    written: Collection[fx.Node],
    inputs: list[fx.Node],
    placements: list[Placement],
    fixed: list[bool],
    choice: Choice,
) -> bool:
    """True if a norm's statistics are taken as they lie: what is converted first is a copy, and the write is lost."""
    for source, current, is_fixed, required in zip(inputs, placements, fixed, choice.inputs, strict=True):
        is_converted = is_fixed and current != required
        if is_converted and source in written:
            return False
    return True


def _after(  # noqa: PLR0913
    layout: _PartialLayout,
    node: fx.Node,
    choice: Choice,
    inputs: list[fx.Node],
    placements: list[Placement],
    fixed: list[bool],
    options: Options,
) -> _PartialLayout:
    """Return the layout that goes on with `choice` at `node`, its conversions paid for."""
    cost = layout.cost + choice.cost
    paid = set(layout.paid)
    live = dict(layout.placements)
    states: dict[fx.Node, Placement] = {}
    for source, placement, is_fixed, required in zip(inputs, placements, fixed, choice.inputs, strict=True):
        current = placement
        # A weight has no placement before its first reader: this choice decides it, without a conversion.
        if not is_fixed:
            if source not in states:
                states[source] = required
                live[source] = _UNSPLIT if required is None else required
                cost += _cost_of_state(source, required, options)
            current = states[source]
        # Nothing to do, but for a whole value that ranks use differently: its gradients have to be added up.
        if current == required and (current is not None or not choice.is_split):
            continue
        # A whole value for ranks that compute different things is another than one for ranks that compute the same.
        target = ("whole", choice.is_split) if required is None else required
        if (source, target) in paid:
            continue
        price = conversion_cost(source, current, required, choice.is_split, source in options.with_gradient)
        if price and _is_narrower(source, options):
            price *= _NARROWER  # sums in a narrower dtype than the weights' would round where one rank does not
        cost += price
        paid.add((source, target))
    if _is_split_output(choice.output):
        live[node] = choice.output
    return _PartialLayout(cost, live, frozenset(paid), layout, choice, node, states)


def _cost_of_state(state: fx.Node, placement: Placement, options: Options) -> float:
    """Return a rank's cost to hold and update a state; one that stays whole is every rank's."""
    ranks = 1 if placement is None else options.num_ranks
    return OPERATIONS_PER_BYTE * size_bytes(state) / ranks


def _is_split_output(output: Placement | tuple[Placement, ...]) -> bool:
    if isinstance(output, tuple):
        return any(placement is not None for placement in output)
    return output is not None


def conversion_cost(
    source: fx.Node, current: Placement, required: Placement, is_grad_partial: bool, with_gradient: bool
) -> float:
    """Return the cost to change a value's placement, its gradient's way back included.

    Args:
        source: the node of the value.
        current: its present placement.
        required: its new placement.
        is_grad_partial: whether ranks compute different things from it, so that its gradient is partial.
        with_gradient: whether a gradient flows back.
    """
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return 0.0
    size = size_bytes(source)
    # The costs are those of the exchanges that `emit._convert` adds, forwards and backwards.
    if current is None:
        if required is None:  # forwards nothing moves; an all-reduce of the gradient's parts
            return exchanged(size, 2) if is_grad_partial and with_gradient else 0.0
        return exchanged(size, 1) if with_gradient else 0.0  # each rank keeps its piece; the gradient is gathered
    times = 1
    if with_gradient and (required is not None or is_grad_partial):
        times += 1  # the gradient's way back
    return exchanged(size, times, times)


def _is_narrower(source: fx.Node, options: Options) -> bool:
    """True if a value's floating-point dtype is narrower than the widest parameter's."""
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dtype.itemsize < options.widest


def _placement_of(placements: State, known: State, node: fx.Node) -> Any:
    placement = placements.get(node, known.get(node))
    return None if placement == _UNSPLIT else placement


def _pick(layout: _PartialLayout, node: fx.Node, last_use: dict[fx.Node, int], index: int) -> _PartialLayout:
    """Return the layout that goes on with `node`, which takes one of several outputs."""
    source: Any = node.args[0]
    placements = layout.placements.get(source)
    placement = None
    if isinstance(placements, tuple):
        placement = placements[node.args[1]]  # type: ignore[index]
    live = dict(layout.placements)
    if placement is not None:
        live[node] = placement
    if last_use[source] <= index:
        live.pop(source, None)
    return _PartialLayout(layout.cost, live, layout.paid, layout, Choice((), placement, False, 0.0), node, {})


def _finish(layout: _PartialLayout, output: fx.Node, options: Options, known: State) -> _PartialLayout:
    """Return the layout with the graph's outputs gathered: they must be whole."""
    cost = layout.cost
    for source in tensor_inputs(output):
        placement = _placement_of(layout.placements, known, source)
        if placement is not None:
            cost += conversion_cost(source, placement, None, False, source in options.with_gradient)
    return _PartialLayout(cost, layout.placements, layout.paid, layout, None, None, {})


def _read_back(last: _PartialLayout, captured: Captured, decided: Mapping[str, Placement]) -> Layout:
    """Collect the choices of a finished layout, from its end to its beginning."""
    chosen: dict[fx.Node, Choice] = {}
    placements: dict[str, Placement] = {name: decided.get(name) for name in captured.states}
    names = {node: name for name, node in captured.states.items()}
    layout: _PartialLayout | None = last
    while layout is not None:
        if layout.node is not None and layout.choice is not None:
            chosen[layout.node] = layout.choice
        for node, placement in layout.states.items():
            placements[names[node]] = placement
        layout = layout.before
    return Layout(chosen, placements, last.cost)


def own_plan(model: torch.nn.Module, captured: Captured, num_ranks: int) -> dict[str, Placement]:
    """Return the placements of weights that the model's own plan names, where their sizes divide.

    transformers ships such plans (`model.tp_plan`). The layout starts from their placements.
    """
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    placements: dict[str, Placement] = {}
    for name, node in captured.states.items():
        module, _, kind = name.rpartition(".")
        shape = shape_of(node)
        dim = _dim_of_style(_style_of(module, plan), kind)
        # The derived layout decides on weights whose sizes do not divide.
        if dim is not None and dim < len(shape) and shape[dim] % num_ranks == 0:
            placements[name] = Split(dim, (shape[dim],))
    return placements


def _style_of(module: str, plan: Mapping[str, Any]) -> Any:
    """Return the style of the first pattern that a module's path matches, or None."""
    for pattern, style in plan.items():
        if fnmatch.fnmatchcase(module, pattern):
            return style
    return None


def _dim_of_style(style: Any, kind: str) -> int | None:
    """Return the dimension of a linear layer's "weight" or "bias" that a style splits."""
    if style in _COLUMNS:
        return 0
    if style in _ROWS and kind == "weight":  # its bias is added once, after the sum
        return 1
    return None
