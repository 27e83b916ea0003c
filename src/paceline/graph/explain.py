"""What was decided for every weight under `tensor`, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.labels import tensor_inputs
from paceline.graph.layout import Layout, options_of
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import shape_of
from paceline.graph.rules import spec_of
from paceline.graph.sharding_strategies import Choice, Options, choices

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Line:
    """One state tensor."""

    name: str
    shape: tuple[int, ...]
    placement: str
    why: str


def explain(captured: Captured, layout: Layout, parts: int) -> list[Line]:
    """A line per state tensor, in the order in which they are read."""
    lines = []
    for name, node in captured.states.items():
        placement = layout.placements.get(name)
        users = [user for user in node.users if user in layout.choices]
        why = (
            _why_split(node, placement, users, layout)
            if placement is not None
            else _why_whole(node, users, layout, parts)
        )
        lines.append(Line(name, shape_of(node), _shown(placement, parts), why))
    return lines


def why_nothing_is_split(captured: Captured, parts: int) -> str:
    """Why a layout splits no weight: an operation without a rule, a size at which it does not pay, or too few rows."""
    weights = [(name, captured.states[name]) for name in captured.trained if name in captured.states]
    weights.sort(key=lambda pair: (-pair[1].meta["val"].numel(), pair[0]))
    options = options_of(captured, parts)
    without, too_small = "", ""
    for name, node in weights:
        shape = shape_of(node)
        if len(shape) < 2 or max(shape) < parts:
            continue
        if any(_can_be_split(node, user, options) for user in node.users):
            too_small = too_small or f"{name} of {'x'.join(map(str, shape))}"
        elif unknown := [user for user in node.users if spec_of(user) is None]:
            without = without or f"{unknown[0].target}, which uses {name} of {'x'.join(map(str, shape))}"
    reasons = [f"{without}, has no rule by which weights are split"] if without else []
    if too_small:
        others = "other " if without else ""
        reasons.append(f"to split {others}weights would send more than it saves at this size (largest: {too_small})")
    return "; ".join(reasons) or f"no weight has a dimension that can be split in {parts}"


def _can_be_split(state: fx.Node, user: fx.Node, options: Options) -> bool:
    inputs = tensor_inputs(user)
    if user.op != "call_function" or state not in inputs:
        return False
    fixed = [source is not state for source in inputs]
    place = inputs.index(state)
    return any(choice.inputs[place] is not None for choice in choices(user, [None] * len(inputs), fixed, options))


def _shown(placement: Split | None, parts: int) -> str:
    if placement is None:
        return "whole"
    blocks = f", {len(placement.blocks)} blocks" if len(placement.blocks) > 1 else ""
    return f"dim {placement.dim} in {parts}{blocks}"


def _why_split(state: fx.Node, placement: Split, users: list[fx.Node], layout: Layout) -> str:
    reasons = dict.fromkeys(_role(state, user, layout.choices[user]) for user in users)
    return "; ".join(reasons)


def _role(state: fx.Node, user: fx.Node, choice: Choice) -> str:
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


def _why_whole(state: fx.Node, users: list[fx.Node], layout: Layout, parts: int) -> str:
    shape = shape_of(state)
    if not any(layout.choices[user].is_split for user in users):
        if not users:
            return "nothing reads it"
        if any(spec_of(user) is None for user in users):
            return f"{next(str(user.target) for user in users if spec_of(user) is None)} has no rule: it runs whole"
        if len(shape) > 1 and all(size % parts for size in shape):
            return f"none of its sizes divides by {parts}, and uneven pieces save less than they send"
        return "its input and output are whole here"
    if len(shape) <= 1:
        return "added or applied to whole values"
    return "splitting it would send more than it saves"
