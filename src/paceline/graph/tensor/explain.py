"""Explain the split of every weight under `tensor`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.labels import tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import is_rearrangement, shape_of
from paceline.graph.rules import spec_of
from paceline.graph.tensor.choices import Options, choices
from paceline.graph.tensor.tensor_layout import Layout, options_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Line:
    """The explanation of one state tensor's placement."""

    name: str
    shape: tuple[int, ...]
    placement: str
    why: str


def explain(captured: Captured, layout: Layout, num_ranks: int) -> list[Line]:
    """Return a line per state tensor, in the order in which they are read."""
    lines = []
    for name, node in captured.states.items():
        placement = layout.placements.get(name)
        lines.append(
            Line(name, shape_of(node), _shown(placement, num_ranks), _reason_of(node, placement, layout, num_ranks))
        )
    return lines


def _reason_of(state: fx.Node, placement: Split | None, layout: Layout, num_ranks: int) -> str:
    users = [user for user in state.users if user in layout.choices]
    if placement is None:
        return _why_whole(state, users, layout, num_ranks)
    return _why_split(state, users, layout)


def why_nothing_is_split(captured: Captured, num_ranks: int) -> str:
    """Explain that a layout splits no weight.

    There is an operation without a rule, a size at which it does not pay, or no dimension with enough rows.
    """
    weights = [name for name in captured.states if name in captured.trained]
    # By name where sizes are equal, so that the message is the same each time.
    weights.sort(key=lambda name: (-captured.states[name].meta["val"].numel(), name))  # the largest is named
    options = options_of(captured, num_ranks)
    without_rule = ""
    too_small = ""
    for name in weights:
        node = captured.states[name]
        shape = shape_of(node)
        if len(shape) < 2 or max(shape) < num_ranks:
            continue
        weight = f"{name} of {'x'.join(map(str, shape))}"
        # It could be split, so the costs have decided against it.
        if any(_can_be_split(node, user, options) for user in node.users):
            too_small = too_small or weight
            continue
        unknown = _first_without_rule(node.users)
        if unknown is not None:
            without_rule = without_rule or f"{unknown.target}, which uses {weight}"
    reasons = []
    if without_rule:
        reasons.append(f"{without_rule}, has no rule by which weights are split")
    if too_small:
        further = "other " if without_rule else ""
        reasons.append(f"to split {further}weights would send more than it saves at this size (largest: {too_small})")
    return "; ".join(reasons) or f"no weight has a dimension that can be split in {num_ranks}"


def _first_without_rule(nodes: Iterable[fx.Node]) -> fx.Node | None:
    return next((node for node in nodes if spec_of(node) is None), None)


def _can_be_split(state: fx.Node, user: fx.Node, options: Options) -> bool:
    """True if an operation can be run with a split weight, whatever it costs."""
    inputs = tensor_inputs(user)
    if user.op != "call_function" or state not in inputs:
        return False
    fixed = [source is not state for source in inputs]
    number = inputs.index(state)
    possible = choices(user, [None] * len(inputs), fixed, options)
    return any(choice.inputs[number] is not None for choice in possible)


def _shown(placement: Split | None, num_ranks: int) -> str:
    if placement is None:
        return "whole"
    blocks = f", {len(placement.blocks)} blocks" if len(placement.blocks) > 1 else ""
    return f"dim {placement.dim} in {num_ranks}{blocks}"


def _why_split(state: fx.Node, users: list[fx.Node], layout: Layout) -> str:
    reasons = dict.fromkeys(_role(*_reader(state, user), layout) for user in users)  # each once, in order
    return "; ".join(reasons)


def _reader(state: fx.Node, user: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the operation that computes with a state which `user` rearranges, as a transpose, and what it is given."""
    while is_rearrangement(user) and len(user.users) == 1 and next(iter(user.users)).op == "call_function":
        state, user = user, next(iter(user.users))
    return state, user


def _role(state: fx.Node, user: fx.Node, layout: Layout) -> str:
    choice = layout.choices[user]
    if choice.kind == "vocabulary embedding":
        return "rows of the vocabulary: each rank looks up its own, one sum"
    spec = spec_of(user)
    number = tensor_inputs(user).index(state)
    if spec is None or not spec.heavy or number == spec.bias:
        return "follows what it is applied to"
    if choice.after == "sum":
        return "rows: takes a split input, one sum of its output"
    if choice.after == "scatter":
        return "rows: takes a split input, its output is summed and split along the sequence"
    if choice.is_split:
        return "columns: its output stays split, nothing is sent"
    return "gathered where it is used"


def _why_whole(state: fx.Node, users: list[fx.Node], layout: Layout, num_ranks: int) -> str:
    shape = shape_of(state)
    if any(layout.choices[user].is_split for user in users):
        if len(shape) <= 1:
            return "added or applied to whole values"
        return "splitting it would send more than it saves"
    if not users:
        return "nothing reads it"
    unknown = _first_without_rule(users)
    if unknown is not None:
        return f"{unknown.target} has no rule: it runs whole"
    if len(shape) > 1 and all(size % num_ranks for size in shape):
        return f"none of its sizes divides by {num_ranks}, and uneven pieces save less than they send"
    return "its input and output are whole here"
