"""Work around code of torch and transformers that a capture would trace wrongly, or that can't be split.

* `rejoin_copies`: results of factory functions of which the tracer lost track.
* `install_recording_hooks`: hooks that models of transformers put on their modules in their first forward pass.
* `WithoutChunks`: torch's loss of a large vocabulary by chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.torch_private.operations import FakeTensor, custom_code
from paceline.torch_private.tensors import storage_key

_OUTPUT_CAPTURING = "transformers.utils.output_capturing"
_LOSS = getattr(F, "linear_cross_entropy", None)  # torch 2.11 has none


def rejoin_copies(traced: fx.GraphModule) -> None:
    """Replace, in a graph, copies of what a factory function (`arange`, `zeros`) made by the factory's node.

    torch hands on the tensor that a factory's kernel made only if nobody else refers to it. Otherwise it hands on a
    copy that shares its memory (`make_variable` in torch/csrc/autograd/variable.h), which the tracer does not know as a
    value. Whoever keeps a frame of the tracer refers to it: a profiler, a debugger, a thread that reads
    `sys._current_frames`, a kept traceback. The graph must not depend on that.
    """
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
    """Return a key that is equal for tensors that show the same memory in the same way."""
    storage = storage_key(value)
    return storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def install_recording_hooks(model: nn.Module) -> None:
    """Install the hooks by which a model of transformers records values; a second call does nothing.

    The values are those that it is asked to return: routers' scores, attention weights, hidden states. transformers
    installs the hooks in the first forward pass, which a capture would take for state that the model carries from batch
    to batch.
    """
    capturing = sys.modules.get(_OUTPUT_CAPTURING)
    if capturing is None:
        return
    for part in model.modules():
        if capturing._CAN_RECORD_REGISTRY.get(part):
            capturing.maybe_install_capturing_hooks(part)


class WithoutChunks(TorchFunctionMode):
    """Compute, inside, `F.linear_cross_entropy` without its option to go by chunks.

    By chunks it is one operation with gradients of its own, which can't be split. Without chunks a graph has the matrix
    product and the loss, which `tensor` splits by vocabulary. Where a model runs by its own code, under `replicate` and
    `shard`, its chunks stay.

    Attributes:
        is_met: whether a call asked for chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is _LOSS and _LOSS is not None:
            self.is_met |= named.get("options") is not None
            named["options"] = None
        return func(*args, **named)


def body_of(operation: Any) -> Callable[..., Any] | None:
    """Return the Python code of the operation that computes a loss by chunks; None for any other operation.

    On tensors without values torch makes the operation's result at once. Only a run of its code shows the memory and
    the operations that it needs.
    """
    if getattr(operation, "namespace", "") != "torch_nn":
        return None
    return custom_code(operation)
