"""Compile a graph that communicates, region by region between its collectives (compile=on).

torch.compile can't take in a collective of ours: its messages, the ledger and the clock are Python's. So the graph is
cut where an operation is not one of torch's, draws random numbers or writes into a tensor. These run as they are, so a
dropout draws what it draws without compile, and ranks of one tensor group draw the same. A region that computes little
is left as it is: the call of a compiled function takes longer than it saves. Layers that are alike share one compiled
region (regional compilation), so a model of 48 layers compiles as long as one of two.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from paceline.torch_private.operations import OpOverload, schema_of

_LEAST = 3  # operations that compute: with fewer there is nothing to fuse


class CompiledRegions:
    """Compiles graphs of one model, and knows the regions that it has compiled.

    Attributes:
        shared: the compiled functions, by the operations and the forms of the inputs; they are dropped with the last
            graph that calls them.
    """

    def __init__(self) -> None:
        self.shared: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()

    def compile(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Return a function that runs the module: compiled whole if it has no collectives, else region by region."""
        if all(_may_compile(node) for node in module.graph.nodes):
            return torch.compile(module)
        regions = _regions(module.graph)
        parts = split_module(module, module, regions.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        for name, region in list(parts.named_children()):
            if isinstance(region, fx.GraphModule) and _computes_enough(region.graph):
                setattr(parts, name, _Region(self._compiled(region)))
        parts.recompile()
        return parts

    def _compiled(self, region: fx.GraphModule) -> Callable[..., Any]:
        key = _form_of(region.graph)
        if key is None:
            return torch.compile(region, dynamic=False)
        compiled = self.shared.get(key)
        if compiled is None:
            compiled = self.shared[key] = torch.compile(region, dynamic=False)
        return compiled


class _Region(torch.nn.Module):
    """A region, as a graph calls it; its function may be another layer's too."""

    run: Callable[..., Any]

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["run"] = run  # not a submodule: regions have no parameters

    def forward(self, *values: Any) -> Any:
        """Compute the region."""
        return self.run(*values)


def _regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of each node's region: one after another, of nodes that may and may not be compiled."""
    regions: dict[fx.Node, int] = {}
    number = 0
    last: bool | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        may_compile = _may_compile(node)
        if last is not None and may_compile != last:
            number += 1
        last = may_compile
        regions[node] = number
    return regions


def _may_compile(node: fx.Node) -> bool:
    """Return True if the compiler may take the node in: it is torch's, draws nothing and writes nothing."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    return not draws and not schema_of(node.target).is_mutable


def _computes_enough(graph: fx.Graph) -> bool:
    if not all(_may_compile(node) for node in graph.nodes):
        return False
    return sum(_computes(node) for node in graph.nodes) >= _LEAST


def _computes(node: fx.Node) -> bool:
    """Return True if the node makes numbers, not another view of those that are there."""
    return isinstance(node.target, OpOverload) and not node.target.is_view


def _form_of(graph: fx.Graph) -> Any:
    """Return a key that regions share which compute the same of tensors of the same forms.

    None for a region with constants of its own, which no other has.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    form: list[Any] = []
    for node in graph.nodes:
        if node.op == "get_attr":
            return None
        arguments = fx.map_arg((node.args, node.kwargs), lambda argument: f"%{numbers[argument]}")
        target = None if node.op == "placeholder" else node.target
        value = node.meta.get("val") if node.op == "placeholder" else None
        shape = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else repr(value)
        form.append((node.op, target, repr(arguments), shape))
    return tuple(form)
