"""ATen operations as objects, modes that see operations as torch runs them, and fake tensors.

Operations: what a node of a graph calls, and what a dispatch mode receives. `torch.library` registers operations but
has no name for their class, and no way to read what was registered.

Modes: `TorchDispatchMode` sees every ATen operation, also in a backward pass; the public
`torch.overrides.TorchFunctionMode` sees only calls of Python code. The other names run code without modes and
subclasses, as torch's own modes do, and its documentation of `__torch_function__`; no public function does that.

Fake tensors have a shape, a dtype and a device, and no values. A step or a model's code runs on them without its memory
and arithmetic, to predict memory and to capture graphs. Nothing public makes them: `torch.export` and `torch.compile`
do it inside, and their documentation uses these names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _set_grad_enabled
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import no_python_dispatcher
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

disable_current_modes = _disable_current_modes

# The target of a node that begins or ends `torch.no_grad` in a graph: `torch.set_grad_enabled` calls it.
set_grad_enabled = _set_grad_enabled


def schema_of(operation: OpOverload) -> torch.FunctionSchema:
    """Return the names and types of an operation's arguments, and which of them it writes."""
    return operation._schema


def overloads_of(operation: OpOverload) -> OpOverloadPacket:
    """Return the operation with all its overloads: `aten.add` for `aten.add.Tensor`."""
    return operation._overloadpacket


def overload_of(overloads: OpOverloadPacket, like: OpOverload) -> OpOverload | None:
    """Return the overload whose name is that of `like`; None if there is none."""
    overload = getattr(overloads, like._overloadname, None)
    return overload if isinstance(overload, OpOverload) else None


def custom_code(operation: OpOverload) -> Callable[..., object] | None:
    """Return the Python function that `torch.library.custom_op` made the operation of; None for any other operation."""
    definition = OPDEFS.get(operation._name)
    return None if definition is None else definition._init_fn


def end_library(library: torch.library.Library) -> None:
    """Take back at once what a library has registered; otherwise that waits for the garbage collector."""
    library._destroy()


__all__ = [
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "custom_code",
    "disable_current_modes",
    "end_library",
    "is_functorch_wrapped_tensor",
    "no_python_dispatcher",
    "overload_of",
    "overloads_of",
    "schema_of",
    "set_grad_enabled",
    "unset_fake_temporarily",
]
