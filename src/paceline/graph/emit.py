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
from paceline.graph.labels import tensor_inputs
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
    """The captured graph as `exchanges.comm.rank` runs it, and of each new node the old one it was made for.

    The new graph's placeholders have the old names and local shapes. What `stages` keeps apart shares no
    conversion.
    """
    emitter = _Emitter(captured, layout, exchanges, stages or {})
    return emitter.run(), emitter.origin


@dataclass(slots=True)
class _Emitter:
    captured: Captured
    layout: Layout
    exchanges: Exchanges
    stages: Mapping[fx.Node, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, Any] = field(default_factory=dict)  # old node to new, lying as the layout says
    placements: dict[fx.Node, Any] = field(default_factory=dict)
    converted: dict[Any, fx.Node] = field(default_factory=dict)
    module_path: dict[fx.Node, str] = field(default_factory=dict)
    no_grad: set[fx.Node] = field(default_factory=set)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    here: fx.Node | None = None

    @property
    def part(self) -> int:
        return self.exchanges.comm.rank

    @property
    def parts(self) -> int:
        return self.exchanges.comm.size

    def run(self) -> Captured:
        """Walk the old graph in order."""
        for node in self.captured.graph.nodes:
            self.here = node
            if node.op in ("placeholder", "get_attr"):
                self._keep(node, self.graph.node_copy(node, lambda old: self.made[old]), self._state_lay(node))
            elif node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], lambda old: self._as(old, None, False)))
            elif node.target is operator.getitem:
                placements = self.placements.get(node.args[0])
                placement = placements[node.args[1]] if isinstance(placements, tuple) else None
                self._keep(node, self._call(operator.getitem, self.made[node.args[0]], node.args[1]), placement)
            else:
                self._emit(node, self.layout.choices[node])
        old = self.captured
        return Captured(
            self.graph,
            {name: self.made[node] for name, node in old.states.items()},
            [self.made[node] for node in old.inputs],
            old.constants,
            old.rebuild,
            self.module_path,
            old.trained,
            old.buffers,
            old.device,
            self.no_grad,
            old.log,
        )

    def _state_lay(self, node: fx.Node) -> Placement:
        for name, state in self.captured.states.items():
            if state is node:
                return self.layout.placements[name]
        return None

    def _keep(self, old: fx.Node, new: Any, placement: Any) -> None:
        self.made[old], self.placements[old] = new, placement
        self._note(new)
        if isinstance(new, fx.Node):
            new.meta["original"], new.meta["lies"] = old.name, placement

    def _note(self, new: Any) -> None:
        if isinstance(new, fx.Node) and self.here is not None:
            self.origin[new] = self.here
            self.module_path[new] = new.meta["module"] = self.captured.module_path.get(self.here, "")
            new.meta["made_for"] = self.here.name
            if self.here in self.captured.no_grad:
                self.no_grad.add(new)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> fx.Node:
        new = self.graph.call_function(function, arguments, named)
        self._note(new)
        return new

    def _emit(self, node: fx.Node, choice: Choice) -> None:
        sources: list[Any] = []
        spec = spec_of(node) if choice.after is not None and choice.kind == "plain" else None
        once = spec.bias if spec is not None else None

        def bring(old: fx.Node) -> Any:
            number = len(sources)
            # A bias is added after the sum, by every rank alike, or by each to its part of a scattered sum.
            for_parts = choice.is_split if number != once else choice.after == "scatter"
            sources.append(self._as(old, choice.inputs[number], for_parts))
            return sources[-1]

        arguments, named = fx.node.map_arg((node.args, node.kwargs), bring)
        if choice.kind == "vocabulary embedding":
            rows = shape_of(tensor_inputs(node)[0])[0]
            padding = arguments[2] if len(arguments) > 2 else -1
            new = self._call(self.exchanges.split_embedding, sources[0], sources[1], rows, padding)
        elif choice.kind == "vocabulary loss":
            new = self._vocabulary_loss(node, sources)
        elif choice.is_split and is_rearrangement(node):
            placement = choice.inputs[0]
            assert placement is not None
            output = list(choice.output) if isinstance(choice.output, tuple) else choice.output
            target, rest = local_arguments(node, placement, output, self.part, self.parts)
            new = self._call(target, sources[0], *rest)
        elif choice.is_split and node.target in _RANDOM:
            assert isinstance(choice.output, Split)
            module_path = (_pieces(choice.output), self.part, self.parts)
            new = self._call(split_dropout, *arguments, shape_of(node), module_path)
        elif choice.is_split and node.target is aten.scaled_dot_product_attention.default and _dropout_of(node):
            new = self._attention_with_dropout(node, choice, arguments, named)
        elif choice.after is not None:
            new = self._partial(node, arguments, named, sources)
        else:
            assert callable(node.target)
            new = self._call(node.target, *arguments, **named)
        self._keep(node, self._finish(node, choice, new, sources), choice.output)

    def _attention_with_dropout(self, node: fx.Node, choice: Choice, arguments: Any, named: Any) -> fx.Node:
        """Attention on this rank's heads or samples, of which it drops what one rank would."""
        assert isinstance(choice.output, Split)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, arguments, strict=False)), **named}
        query, key = (shape_of(source) for source in tensor_inputs(node)[:2])
        mask, is_causal, scale = given.get("attn_mask"), given.get("is_causal", False), given.get("scale")
        weights = self._call(attention_weights, given["query"], given["key"], mask, is_causal, scale)
        module_path = (_pieces(choice.output), self.part, self.parts)
        dropped = self._call(split_dropout, weights, _dropout_of(node), True, (*query[:-1], key[-2]), module_path)
        dropped.meta["lies"] = choice.output
        return self._call(attention_values, dropped, given["value"])

    def _vocabulary_loss(self, node: fx.Node, sources: list[Any]) -> fx.Node:
        names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        given = {"reduction": 1, "ignore_index": -100, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        classes = shape_of(tensor_inputs(node)[0])[1]
        return self._call(
            self.exchanges.split_cross_entropy, *sources, classes, given["reduction"], given["ignore_index"]
        )

    def _partial(self, node: fx.Node, arguments: Any, named: Any, sources: list[Any]) -> fx.Node:
        """The product without its bias, which is added once, after the sum."""
        spec = spec_of(node)
        if spec is None or spec.bias is None:
            return self._call(node.target, *arguments, **named)  # type: ignore[arg-type]
        if node.target is aten.addmm.default:
            return self._call(aten.mm.default, *arguments[1:3])
        return self._call(node.target, *arguments[:2], *((None, *arguments[3:]) if len(arguments) > 3 else ()))  # type: ignore[arg-type]

    def _finish(self, node: fx.Node, choice: Choice, new: fx.Node, sources: list[Any]) -> fx.Node:
        if choice.after is None:
            return new
        pieces = _pieces(choice.output) if isinstance(choice.output, Split) else None
        if choice.after == "sum":
            new = self._call(self.exchanges.add_parts, new)
        else:
            new = self._call(self.exchanges.scatter_parts, new, pieces)
        spec = spec_of(node) if choice.kind == "plain" else None
        if spec is None or spec.bias is None:
            return new
        bias = sources[spec.bias]
        spatial = len(shape_of(node)) - 2 if spec.inputs[0][0] == "n" and len(spec.inputs[1]) > 2 else 0
        if spatial:
            bias = self._call(aten.reshape.default, bias, [-1, *([1] * spatial)])
        return self._call(aten.add.Tensor, new, bias)

    def _as(self, old: fx.Node, wanted: Placement, for_parts: bool) -> Any:
        """The value of `old`, lying as wanted; a whole one whose gradients come in parts where `for_parts`."""
        now, value = self.placements.get(old), self.made[old]
        if isinstance(now, tuple) or not isinstance(old.meta.get("val"), torch.Tensor):
            return value
        if now == wanted and (now is not None or not for_parts):
            return value
        stage = self.stages.get(self.here) if self.here is not None else None
        key = (old, wanted, for_parts if wanted is None else True, stage)
        if key not in self.converted:
            made = self._convert(old, value, now, wanted, for_parts)
            if old in self.captured.no_grad or _is_written(old):
                return made
            self.converted[key] = made
        return self.converted[key]

    def _convert(self, old: fx.Node, value: fx.Node, now: Placement, wanted: Placement, for_parts: bool) -> fx.Node:
        if wanted is None:
            if now is None:
                return self._call(self.exchanges.share_whole, value) if _is_float(old) else value
            return self._call(self.exchanges.gather_parts if for_parts else self.exchanges.gather, value, _pieces(now))
        if now is None:
            return self._call(self.exchanges.keep_piece, value, _pieces(wanted))
        whole = self._call(self.exchanges.gather_parts, value, _pieces(now))
        return self._call(self.exchanges.keep_of_parts, whole, _pieces(wanted))


def _dropout_of(attention: fx.Node) -> float:
    """The share that a node of `scaled_dot_product_attention` drops."""
    share = attention.args[4] if len(attention.args) > 4 else attention.kwargs.get("dropout_p", 0.0)
    return float(share)  # type: ignore[arg-type]


def _pieces(split: Split) -> Pieces:
    return split.dim, split.blocks


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_floating_point() or value.is_complex())


def _is_written(node: fx.Node) -> bool:
    shared = storage_of(node)
    return any(storage_of(source) == shared for user in node.users for source in written_inputs(user))
