"""Modules: base classes of torch's layers, what a module holds that its public functions do not show, compilation.

A layer is found by its base class, so that a user's own subclass is found too: the public `BatchNorm1d` and its like
have no public class in common. `Module._parameters`, `_buffers` and `_modules` are used as they are: most libraries
read and assign them, and a function in between would be called for every module in every step.

`FUNCTIONS` has the functions that torch's recurrent modules call: `lstm`, `gru`, `rnn_tanh`, `rnn_relu`. The modules
look them up there at each call. Public are only the modules, whose dropout can't be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

BatchNorm = _BatchNorm  # batch norm of any number of dimensions
NormBase = _NormBase  # also instance norm: layers with running statistics
Dropout = _DropoutNd  # dropout of elements or channels

CALL: CodeType = torch.nn.Module._call_impl.__code__  # the frame in which a module's hooks and forward are called
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FUNCTIONS = torch._VF
FLAT_WEIGHTS = "_flat_weight"  # begins the names of a recurrent module's list of its own weights, and of their names


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of the buffers that the module itself does not save."""
    return module._non_persistent_buffers_set


def check_images(norm: BatchNorm, images: torch.Tensor) -> None:
    """Raise ValueError, in torch's words, if batch norm does not take tensors of so many dimensions."""
    norm._check_input_dim(images)  # type: ignore[operator]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether the module itself was compiled: by `module.compile()`, or as the result of `torch.compile`."""
    return module._compiled_call_impl is not None or compiled_from(module) is not None


def compiled_from(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that `torch.compile` has wrapped in this one; None for any other module."""
    original: torch.nn.Module | None = getattr(module, "_orig_mod", None)
    return original


def forget_compiled(module: torch.nn.Module) -> None:
    """Have a copy of a module that `module.compile()` has compiled run line by line."""
    module._compiled_call_impl = None


def list_weights_again(module: torch.nn.RNNBase) -> None:
    """Have a recurrent module compute with the weights that it holds now: its forward reads a list of them."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def compiled_never(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that is never compiled; this imports the compiler.

    The public `torch.compiler.disable` calls the stand-in that keeps the compiler unloaded, which does nothing.
    """
    from torch._dynamo import decorators

    never: Callable[..., object] = decorators.disable(function)  # type: ignore[no-untyped-call]
    return never
