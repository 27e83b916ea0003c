"""Which weights are split, and how: the cheapest way to run the whole graph on the `tensor` axis.

The graph is walked in order with a set of partial layouts. Two that leave all values still needed lying the
same way are the same from there on, so only the cheaper one goes on (a shortest path over the frontier of
live values, as Viterbi's; Alpa, Zheng et al. 2022, solves the same problem by an integer program). What the
field does by hand for each model, columns then rows with one sum per block, comes out of the costs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.functional import written_groups
from paceline.graph.labels import tensor_inputs
from paceline.graph.placement import Placement
from paceline.graph.reshape_rules import blocks_asked_for
from paceline.graph.sharding_strategies import OPERATIONS_PER_BYTE, Choice, Options, choices, exchanged, size_bytes
from paceline.graph.writes import running_statistics

BEAM = 48  # partial layouts kept at a node; 8 gives the same layouts for the models of the tests

State = dict[fx.Node, Any]  # how live values are placed: Split, a tuple of placements, or _WHOLE for a decided weight
_WHOLE = "whole"
_NARROWER = 1000.0


@dataclass(slots=True)
class Layout:
    """What was decided: a choice per operation, a placement per state."""

    choices: dict[fx.Node, Choice]
    placements: dict[str, Placement]
    cost: float


@dataclass(slots=True)
class _Path:
    cost: float
    placements: State
    paid: frozenset[tuple[fx.Node, Any]]  # conversions that exist already
    before: _Path | None
    choice: Choice | None
    node: fx.Node | None
    states: dict[fx.Node, Placement]  # states decided by this choice


def gradients_of(captured: Captured) -> set[fx.Node]:
    """Nodes through which a gradient flows back, as autograd has it when the graph runs."""
    return {node for node in captured.graph.nodes if node.meta["flows"]}


def options_of(captured: Captured, parts: int, is_sequence_split: bool = False) -> Options:
    """What is known of the whole graph."""
    whole = _must_stay_whole(captured)
    parameters = {
        node: name
        for name, node in captured.states.items()
        if node.meta["val"].is_floating_point() and node not in whole
    }
    return Options(
        parts,
        blocks_asked_for(captured.graph),
        parameters,
        set(written_groups(captured.graph)),
        gradients_of(captured),
        is_sequence_split,
        max((node.meta["val"].dtype.itemsize for node in parameters), default=0),
    )


def choose_layout(
    captured: Captured, parts: int, decided: Mapping[str, Placement] | None = None, is_sequence_split: bool = False
) -> Layout:
    """The cheapest layout of the graph over `parts` ranks.

    Args:
        captured: the graph.
        parts: ranks on the `tensor` axis.
        decided: placements of states that an earlier graph of the same model fixed.
        is_sequence_split: also split norms and dropout along the sequence (Korthikanti et al. 2022).
    """
    options = options_of(captured, parts, is_sequence_split)
    last_use = _last_uses(captured.graph)
    start: State = {}
    for name, placement in (decided or {}).items():
        if name in captured.states:
            start[captured.states[name]] = _WHOLE if placement is None else placement
    paths = [_Path(0.0, start, frozenset(), None, None, None, {})]
    for index, node in enumerate(captured.graph.nodes):
        if node.op == "call_function":
            paths = _step(paths, node, index, options, last_use)
        elif node.op == "output":
            paths = [_finish(path, node, options) for path in paths]
    best = min(paths, key=lambda path: path.cost)
    return _read_back(best, captured, decided or {})


def _last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    return {node: max((order[user] for user in node.users), default=index) for node, index in order.items()}


def _step(paths: list[_Path], node: fx.Node, index: int, options: Options, last_use: dict[fx.Node, int]) -> list[_Path]:
    if node.target is operator.getitem:
        return [_pick(path, node, last_use, index) for path in paths]
    merged: dict[Any, _Path] = {}
    inputs = tensor_inputs(node)
    ending = [source for source in {*inputs} if last_use[source] <= index]
    for path in paths:
        placements = [_placement_of(path.placements, source) for source in inputs]
        fixed = [source not in options.parameters or source in path.placements for source in inputs]
        for choice in choices(node, placements, fixed, options):
            if not _may_write(node, inputs, placements, fixed, choice):
                continue
            following = _after(path, node, choice, inputs, placements, fixed, options)
            for source in ending:
                following.placements.pop(source, None)
            gone = set(ending)
            following.paid = frozenset(item for item in following.paid if item[0] not in gone)
            key = (frozenset(following.placements.items()), following.paid)
            if key not in merged or following.cost < merged[key].cost:
                merged[key] = following
    return sorted(merged.values(), key=lambda path: path.cost)[:BEAM]


def _must_stay_whole(captured: Captured) -> set[fx.Node]:
    """States that are written: ranks write them alike. Only a norm's own statistics may be split with its weight."""
    grouped = set(written_groups(captured.graph))
    norms = {source for node in captured.graph.nodes for source in running_statistics(node)}
    return {node for node in captured.states.values() if node in grouped or (node in norms and len(node.users) > 1)}


def _may_write(
    node: fx.Node, inputs: list[fx.Node], placements: list[Placement], fixed: list[bool], choice: Choice
) -> bool:
    """Whether a norm's statistics are taken as they lie: what is converted first is a copy, and the write is lost."""
    written = running_statistics(node)
    return all(
        source not in written or not is_fixed or now == wanted
        for source, now, is_fixed, wanted in zip(inputs, placements, fixed, choice.inputs, strict=True)
    )


def _after(  # noqa: PLR0913
    path: _Path,
    node: fx.Node,
    choice: Choice,
    inputs: list[fx.Node],
    placements: list[Placement],
    fixed: list[bool],
    options: Options,
) -> _Path:
    cost, paid, live = path.cost + choice.cost, set(path.paid), dict(path.placements)
    states: dict[fx.Node, Placement] = {}
    for source, now, is_fixed, wanted in zip(inputs, placements, fixed, choice.inputs, strict=True):
        if not is_fixed and source not in states:
            states[source] = wanted
            live[source] = _WHOLE if wanted is None else wanted
            # A weight that stays whole is held and updated by every rank.
            cost += OPERATIONS_PER_BYTE * size_bytes(source) / (options.parts if wanted is not None else 1)
            now = wanted
        elif not is_fixed:
            now = states[source]
        target = ("whole", choice.is_split) if wanted is None else wanted
        if (now == wanted and (now is not None or not choice.is_split)) or (source, target) in paid:
            continue
        price = conversion_cost(source, now, wanted, choice.is_split, source in options.with_gradient)
        # Sums in a narrower dtype than the weights' would round where one rank does not.
        cost += price * (_NARROWER if price and _is_narrower(source, options) else 1)
        paid.add((source, target))
    output = choice.output
    if output is not None and (not isinstance(output, tuple) or any(placement is not None for placement in output)):
        live[node] = output
    return _Path(cost, live, frozenset(paid), path, choice, node, states)


def conversion_cost(source: fx.Node, now: Placement, wanted: Placement, for_parts: bool, with_gradient: bool) -> float:
    """What it costs to make a value lie otherwise, its gradient's way back included."""
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return 0.0
    back = 1.0 if with_gradient else 0.0
    if wanted is None:
        if now is None:
            return exchanged(size_bytes(source), 2) if for_parts and with_gradient else 0.0
        back = back if for_parts else 0
        return exchanged(size_bytes(source), 1 + back, 1 + int(back))
    if now is None:
        return exchanged(size_bytes(source), 1) if with_gradient else 0.0
    return exchanged(size_bytes(source), 1 + back, 1 + int(back))


def _is_narrower(source: fx.Node, options: Options) -> bool:
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dtype.itemsize < options.widest


def _placement_of(placements: State, node: fx.Node) -> Any:
    placement = placements.get(node)
    return None if placement == _WHOLE else placement


def _pick(path: _Path, node: fx.Node, last_use: dict[fx.Node, int], index: int) -> _Path:
    source: Any = node.args[0]
    placements = path.placements.get(source)
    placement = placements[node.args[1]] if isinstance(placements, tuple) else None  # type: ignore[index]
    live = dict(path.placements)
    if placement is not None:
        live[node] = placement
    if last_use[source] <= index:
        live.pop(source, None)
    return _Path(path.cost, live, path.paid, path, Choice((), placement, False, 0.0), node, {})


def _finish(path: _Path, output: fx.Node, options: Options) -> _Path:
    """The outputs must be whole."""
    cost = path.cost
    for source in tensor_inputs(output):
        placement = _placement_of(path.placements, source)
        if placement is not None:
            cost += conversion_cost(source, placement, None, False, source in options.with_gradient)
    return _Path(cost, path.placements, path.paid, path, None, None, {})


def _read_back(best: _Path, captured: Captured, decided: Mapping[str, Placement]) -> Layout:
    made: dict[fx.Node, Choice] = {}
    placements: dict[str, Placement] = {name: decided.get(name) for name in captured.states}
    names = {node: name for name, node in captured.states.items()}
    path: _Path | None = best
    while path is not None:
        if path.node is not None and path.choice is not None:
            made[path.node] = path.choice
        for node, placement in path.states.items():
            placements[names[node]] = placement
        path = path.before
    return Layout(made, placements, best.cost)
