"""Repair a graph in which the tracer lost track of the result of a factory function (`arange`, `zeros`).

torch hands on the very tensor that a factory's kernel made only if nobody else refers to it; else it hands on a copy
that shares its memory (`make_variable` in torch/csrc/autograd/variable.h), and a copy is no value that the tracer
knows. Somebody else is whoever keeps a frame of the tracer alive: a profiler, a debugger, a thread that looks where
this one stands (`sys._current_frames`), a kept traceback. What a graph is must not depend on that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def rejoin_copies(traced: fx.GraphModule) -> None:
    """Let the users of a factory result's copy use the factory's node."""
    factories: dict[Any, fx.Node] = {}
    for node in list(traced.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and not node.all_input_nodes and isinstance(value, torch.Tensor):
            factories[_memory_of(value)] = node
        factory = None
        if node.target is torch.ops.aten.detach.default and node.args[0] in factories.values():
            factory = node.args[0]  # the copy, where a mode below the tracer sees it made
        elif node.op == "get_attr":
            constant = getattr(traced, str(node.target))
            if isinstance(constant, FakeTensor):
                factory = factories.get(_memory_of(constant))
        if factory is not None:
            node.replace_all_uses_with(factory)
            traced.graph.erase_node(node)


def _memory_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells which memory a tensor shows, and how."""
    storage = value.untyped_storage()._cdata
    return storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
