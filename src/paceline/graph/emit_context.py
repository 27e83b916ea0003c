"""The graph that one rank of the `context` axis runs: its positions of every sequence. See `context_layout.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.differentiable import attention_values, attention_weights, split_dropout
from paceline.comm.sequence import SequenceExchanges
from paceline.graph.capture import Captured
from paceline.graph.context_layout import ContextLayout
from paceline.graph.emit import Emitter, pieces_of
from paceline.graph.find_experts import FACTORIES, LIKE, PRODUCT
from paceline.graph.labels import argument, tensor_inputs
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import shape_of
from paceline.graph.sharding_strategies import Choice

aten = torch.ops.aten


def emit_context(
    captured: Captured, layout: ContextLayout, exchanges: SequenceExchanges, stages: Mapping[fx.Node, int] | None = None
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the captured graph as `exchanges.comm.rank` runs it, and for each new node the old one it was made for."""
    emitter = ContextEmitter(captured, layout, exchanges, stages or {})
    emitter.sequence = exchanges
    emitter.splits = layout
    emitter.unordered = layout.unordered
    emitter.axis_of_placement = "lies_on_context"
    return emitter.run(), emitter.origin


@dataclass(slots=True)
class ContextEmitter(Emitter):
    """Writes the graph of one rank; every gradient in it is partial."""

    sequence: SequenceExchanges = field(init=False)
    splits: ContextLayout = field(init=False)
    counted: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def _with_placement(self, old: fx.Node, wanted: Placement, is_grad_partial: bool) -> Any:
        if old in self.counted and self.current in self.unordered:
            return self.counted[old]
        return Emitter._with_placement(self, old, wanted, is_grad_partial)

    def _result(self, output: fx.Node) -> Any:
        """Return what the graph returns, made whole; of the loss's gradient each rank takes its share."""
        results = Emitter._result(self, output)
        first = output.args[0][0]  # type: ignore[index]
        if isinstance(first, fx.Node) and first.meta["flows"]:
            shared = self._call(self.sequence.share_of_gradient, results[0])
            results = [shared, *results[1:]]
        return results

    def _convert(
        self, old: fx.Node, value: fx.Node, current: Placement, wanted: Placement, is_grad_partial: bool
    ) -> fx.Node:
        """Add the exchange that changes a value's placement."""
        if current is None and wanted is None:
            return value
        if current is None:
            assert wanted is not None
            return self._call(self.exchanges.slice_with_partial_grad, value, pieces_of(wanted))
        if wanted is not None and current.dim == wanted.dim:
            return self._call(self.sequence.move, value, current.dim, current.blocks, 0, wanted.blocks)
        gathered = self._call(self.exchanges.gather_with_partial_grad, value, pieces_of(current))
        if wanted is None:
            return gathered
        return self._call(self.exchanges.slice_with_partial_grad, gathered, pieces_of(wanted))

    def _operation(self, node: fx.Node, choice: Choice, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """Run a node's operation on this rank's positions, without the sum after it."""
        if choice.kind == "take one position":
            (split, *_) = choice.inputs
            assert split is not None
            size = shape_of(tensor_inputs(node)[0])[split.dim]
            return self._call(self.sequence.take_at, sources[0], split.dim, arguments[2] % size, split.blocks)
        if choice.kind == "move":
            (split, *_) = choice.inputs
            assert split is not None
            assert isinstance(choice.output, Split)
            return self._call(
                self.sequence.move, sources[0], split.dim, split.blocks, choice.start, choice.output.blocks
            )
        if choice.kind == "convolution":
            return self._convolution(node, choice, arguments, named)
        if choice.kind == "attention":
            by_name = _attention_arguments(arguments, named)
            names = ("query", "key", "value", "attn_mask", "is_causal", "scale")
            spread = self.splits.attention_splits[node]
            new = self._call(self.sequence.attention, *(by_name[name] for name in names), spread)
            new.meta["shares_heads"] = self.splits.shares_heads[node]
            return new
        if choice.kind == "attention with dropout":
            return self._attention_with_dropped(node, choice, _attention_arguments(arguments, named))
        if choice.kind in ("experts", "counts of experts"):
            return self._of_experts(node, choice, arguments, named, sources)
        if choice.kind == "mean":
            return self._sum_of_mean(node, choice, sources[0])
        if choice.kind == "mean loss":
            return self._sum_of_loss(node, choice, arguments, named)
        return Emitter._operation(self, node, choice, arguments, named, sources)

    def _after_operation(self, node: fx.Node, choice: Choice, new: fx.Node, sources: list[Any]) -> fx.Node:
        """Add the sum after a node's operation, and the bias after that."""
        if choice.after is None:
            return new
        return self._with_bias(node, choice, self._call(self.sequence.sum_with_partial_grad, new), sources)

    def _of_experts(self, node: fx.Node, choice: Choice, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """Run an operation of a layer of experts on this rank's rows."""
        if choice.kind == "counts of experts":
            # The layer reads those of this rank's rows, all others those of all rows.
            self.counted[node] = self._call(node.target, *arguments, **named)  # type: ignore[arg-type]
            return self._call(self.sequence.sum_with_partial_grad, self.counted[node])
        if node.target is PRODUCT:
            return self._call(node.target, *arguments, **named)
        if choice.output is not None and node.target in FACTORIES:
            return self._with_a_row_for_each(node, choice, arguments, named)
        return Emitter._operation(self, node, choice, arguments, named, sources)

    def _with_a_row_for_each(self, node: fx.Node, choice: Choice, arguments: Any, named: Any) -> fx.Node:
        """Run a factory for this rank's slots."""
        assert isinstance(choice.output, Split)
        slots = choice.output.size(self.rank, self.num_ranks)

        def local(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [slots, *value[1:]]
            return slots if value == shape_of(node)[0] else value

        if node.target in LIKE:  # the tensor that it is like may have a row for each slot of all ranks
            shape = [slots, *shape_of(node)[1:]]
            options = {name: value for name, value in named.items() if name != "memory_format"}
            return self._call(LIKE[node.target], arguments[0], shape, **options)
        new = [value if isinstance(value, fx.Node) else local(value) for value in arguments]
        return self._call(node.target, *new, **named)  # type: ignore[arg-type]

    def _convolution(self, node: fx.Node, choice: Choice, arguments: Any, named: Any) -> fx.Node:
        by_name = _by_name(node, arguments, named)
        (split, *_) = choice.inputs
        assert split is not None
        assert isinstance(choice.output, Split)
        (dilation,) = by_name["dilation"]
        padding = by_name["padding"]
        if isinstance(padding, str):  # of an even kernel torch pads one more at the end
            padding = dilation * (shape_of(tensor_inputs(node)[1])[-1] - 1) // 2 if padding == "same" else 0
        else:
            (padding,) = padding
        pieces = (split.blocks, choice.output.blocks)
        tensors = [by_name[name] for name in ("input", "weight", "bias")]
        return self._call(self.sequence.convolve, *tensors, padding, dilation, by_name["groups"], pieces)

    def _attention_with_dropped(self, node: fx.Node, choice: Choice, by_name: Mapping[str, Any]) -> fx.Node:
        """Run attention of this rank's queries to all keys; drop what one rank would drop of them."""
        assert isinstance(choice.output, Split)
        query, key = (shape_of(source) for source in tensor_inputs(node)[:2])
        mask = by_name["attn_mask"]
        rows = Split(len(query) - 2, choice.output.blocks)
        is_causal = by_name["is_causal"]
        if is_causal:
            # The rows of this rank are not the first ones.
            visible = self._call(aten.ones.default, [query[-2], key[-2]], dtype=torch.bool, device=self.captured.device)
            visible = self._call(aten.tril.default, visible)
            mask = self._call(self.exchanges.slice_with_partial_grad, visible, (0, rows.blocks))
        weights = self._call(attention_weights, by_name["query"], by_name["key"], mask, False, by_name["scale"])
        place = (pieces_of(rows), self.rank, self.num_ranks)
        share = by_name["dropout_p"]
        dropped = self._call(split_dropout, weights, share, True, (*query[:-1], key[-2]), place)
        dropped.meta["lies_on_context"] = rows
        return self._call(attention_values, dropped, by_name["value"])

    def _sum_of_mean(self, node: fx.Node, choice: Choice, source: Any) -> fx.Node:
        """Return this rank's part of a mean: its sum, divided by what all ranks count."""
        shape = shape_of(tensor_inputs(node)[0])
        dims: Any = None if node.target is aten.mean.default else argument(node, 1, "dim")
        if isinstance(dims, int):
            dims = [dims]
        dims = [dim % len(shape) for dim in dims] if dims else list(range(len(shape)))
        keeps = bool(argument(node, 2, "keepdim", False)) and node.target is aten.mean.dim
        dtype = node.meta["val"].dtype
        total = self._call(aten.sum.dim_IntList, source, dims, keeps, dtype=dtype)
        return self._call(aten.div.Tensor, total, math.prod(shape[dim] for dim in dims))

    def _sum_of_loss(self, node: fx.Node, choice: Choice, arguments: Any, named: Any) -> fx.Node:
        """Return this rank's part of a mean loss: its sum, divided by what all ranks count."""
        by_name = _by_name(node, arguments, named)
        inputs = tensor_inputs(node)
        by_name["reduction"] = 2  # torch's number: a sum
        total = self._call(node.target, *by_name.values())  # type: ignore[arg-type]
        if shape_of(inputs[0]) == shape_of(inputs[1]):
            return self._call(aten.div.Tensor, total, math.prod(shape_of(inputs[0])))
        # Of classes: rows whose label is ignored don't count, and a row counts by the weight of its class.
        dtype = node.meta["val"].dtype
        count = self._call(counted_rows, by_name["target"], by_name.get("weight"), by_name["ignore_index"], dtype)
        counted = self._call(self.sequence.sum_with_partial_grad, count)
        return self._call(aten.div.Tensor, total, counted)


def _by_name(node: fx.Node, arguments: Any, named: Any) -> dict[str, Any]:
    """Return the arguments of an operation of torch by name, in its order, those left out by default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    by_name = {of.name: of.default_value if of.has_default_value() else None for of in schema}
    return by_name | dict(zip(by_name, arguments, strict=False)) | dict(named)


def counted_rows(labels: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a cross entropy divides by: rows with a label that is not ignored, or their classes' weights."""
    counts = labels != ignored
    if weight is None:
        return counts.sum().to(dtype)
    return torch.where(counts, weight[torch.where(counts, labels, 0)], 0.0).sum().to(dtype)


def _attention_arguments(arguments: Any, named: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return {**defaults, **dict(zip(names, arguments, strict=False)), **named}
