"""What a rank of `context` or `expert` does to its piece where an operation mixes positions or samples.

Of a mean each rank computes its part: its sum, divided by what all ranks count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from paceline.graph.labels import argument, tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import shape_of
from paceline.graph.walk import mean_dims

if TYPE_CHECKING:
    from paceline.graph.emit import Emitter, Step

aten = torch.ops.aten


def _take_one_position(emitter: Emitter, step: Step) -> fx.Node:
    split = _split_of_first(step)
    size = shape_of(tensor_inputs(step.node)[0])[split.dim]
    return emitter.call(emitter.exchanges.take_at, step.sources[0], split.dim, step.arguments[2] % size, split.blocks)


def _move(emitter: Emitter, step: Step) -> fx.Node:
    split, choice = _split_of_first(step), step.choice
    assert isinstance(choice.output, Split)
    return emitter.call(
        emitter.exchanges.move, step.sources[0], split.dim, split.blocks, choice.start, choice.output.blocks
    )


def _convolution(emitter: Emitter, step: Step) -> fx.Node:
    by_name, split = step.by_name, _split_of_first(step)
    assert isinstance(step.choice.output, Split)
    (dilation,) = by_name["dilation"]
    padding = by_name["padding"]
    if isinstance(padding, str):  # of an even kernel torch pads one more at the end
        padding = dilation * (shape_of(tensor_inputs(step.node)[1])[-1] - 1) // 2 if padding == "same" else 0
    else:
        (padding,) = padding
    pieces = (split.blocks, step.choice.output.blocks)
    tensors = [by_name[name] for name in ("input", "weight", "bias")]
    return emitter.call(emitter.exchanges.convolve, *tensors, padding, dilation, by_name["groups"], pieces)


def _attention(emitter: Emitter, step: Step) -> fx.Node:
    by_name = step.by_name
    spread = step.choice.attention
    assert spread is not None
    names = ("query", "key", "value", "attn_mask", "is_causal", "scale")
    new = emitter.call(emitter.exchanges.attention, *(by_name[name] for name in names), spread.split)
    new.meta["shares_heads"] = spread.shares_heads
    return new


def _attention_with_dropout(emitter: Emitter, step: Step) -> fx.Node:
    """Run attention of this rank's queries to all keys."""
    assert isinstance(step.choice.output, Split)
    query, key = (shape_of(source) for source in tensor_inputs(step.node)[:2])
    rows = Split(len(query) - 2, step.choice.output.blocks)
    mask = step.by_name["attn_mask"]
    if step.by_name["is_causal"]:
        # The rows of this rank are not the first ones.
        device = emitter.captured.device
        visible = emitter.call(aten.ones.default, [query[-2], key[-2]], dtype=torch.bool, device=device)
        visible = emitter.call(aten.tril.default, visible)
        mask = emitter.call(emitter.exchanges.slice_with_partial_grad, visible, (0, rows.blocks))
    return emitter.attention_with_dropout(step, rows, mask, hides_later=False)


def _mean(emitter: Emitter, step: Step) -> fx.Node:
    node = step.node
    shape = shape_of(tensor_inputs(node)[0])
    dims = mean_dims(node)
    keeps = bool(argument(node, 2, "keepdim", False)) and node.target is aten.mean.dim
    total = emitter.call(aten.sum.dim_IntList, step.sources[0], dims, keeps, dtype=node.meta["val"].dtype)
    return emitter.call(aten.div.Tensor, total, math.prod(shape[dim] for dim in dims))


def _mean_loss(emitter: Emitter, step: Step) -> fx.Node:
    by_name, inputs = step.by_name, tensor_inputs(step.node)
    by_name["reduction"] = 2  # torch's number: a sum
    total = emitter.call(step.node.target, *by_name.values())
    if shape_of(inputs[0]) == shape_of(inputs[1]):
        return emitter.call(aten.div.Tensor, total, math.prod(shape_of(inputs[0])))
    # Of classes: rows whose label is ignored don't count, and a row counts by the weight of its class.
    dtype = step.node.meta["val"].dtype
    count = emitter.call(counted_rows, by_name["target"], by_name.get("weight"), by_name["ignore_index"], dtype)
    return emitter.call(aten.div.Tensor, total, emitter.call(emitter.exchanges.sum_with_partial_grad, count))


def counted_rows(labels: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the divisor of a cross entropy: the number of labels that are not ignored, or their classes' weights."""
    counts = labels != ignored
    if weight is None:
        return counts.sum().to(dtype)
    return torch.where(counts, weight[torch.where(counts, labels, 0)], 0.0).sum().to(dtype)


def _split_of_first(step: Step) -> Split:
    (split, *_) = step.choice.inputs
    assert split is not None
    return split


OPERATIONS: dict[str, Callable[[Any, Any], fx.Node]] = {
    "take one position": _take_one_position,
    "move": _move,
    "convolution": _convolution,
    "attention": _attention,
    "attention with dropout": _attention_with_dropout,
    "mean": _mean,
    "mean loss": _mean_loss,
}
