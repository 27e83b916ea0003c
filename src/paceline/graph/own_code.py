"""Calls that a graph keeps as they are: the user's own code runs there, forward and backward.

An autograd function has a backward pass that its operations don't say, and the CTC loss reads lengths. A graph of
operations would lose both, so such a call is one node. It computes only from its arguments, and runs on whole values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

from paceline.graph.writes import user_line
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.operations import FakeTensor, TorchDispatchMode, schema_of
from paceline.torch_private.tensors import TreeSpec, storage_key, tree_flatten, tree_leaves, tree_unflatten

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_FIX = "hand it what it reads as arguments and return new tensors, or train it by replicate or shard"


_running = False  # a module's or an autograd function's own code runs: none of what it calls is kept or refused


class NoGraphError(WorkloadError):
    """What a module's code does is no graph of operations; the module may run by its own code all the same."""


def is_own_code_running() -> bool:
    """Return True while the user's code runs as it is."""
    return _running


@contextmanager
def own_code_running() -> Iterator[None]:
    """Run the user's code as it is, autograd functions and gradients taken by hand included."""
    global _running
    before = _running
    _running = True
    try:
        yield
    finally:
        _running = before


class OwnCall:
    """A function with the arguments of one call but for its tensors, which it is called with.

    Attributes:
        function: the user's function.
        constants: the arguments, flat, None where a tensor was.
        is_tensor: where a tensor was.
        form: puts them back together.
        on_fakes: is called in its place where tensors have no values.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        on_fakes: Callable[..., Any],
        name: str,
        constants: list[Any],
        is_tensor: list[bool],
        form: TreeSpec,
    ) -> None:
        self.function = function
        self.on_fakes = on_fakes
        self.constants = constants
        self.is_tensor = is_tensor
        self.form = form
        self.__name__ = self.__qualname__ = name  # as fx asks of what a node calls
        self.__module__ = __name__

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Call the function."""
        arguments, named = self.arguments_of(tensors)
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        return (self.on_fakes if is_fake else self.function)(*arguments, **named)

    def arguments_of(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call with these tensors among them."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else constant
            for constant, is_tensor in zip(self.constants, self.is_tensor, strict=True)
        ]
        arguments, named = tree_unflatten(leaves, self.form)
        return arguments, named

    def __repr__(self) -> str:
        """Name the function and its plain arguments: two traces are compared by it."""
        return f"{self.__name__}{self.constants}"

    def __str__(self) -> str:
        """Name the function, for people."""
        return self.__name__


def kept_call(
    function: Callable[..., Any],
    name: str,
    arguments: Sequence[Any],
    named: dict[str, Any],
    on_fakes: Callable[..., Any] | None = None,
) -> Any:
    """Call a function within a trace, as one node of the graph.

    Args:
        function: what the graph calls.
        name: of it, for people.
        arguments, named: of this call.
        on_fakes: of the same arguments, for tensors without values; None: the function itself.

    Raises:
        WorkloadError: it is handed objects, uses tensors that are no arguments of it, or writes into some.
    """
    mode = get_proxy_mode()
    assert mode is not None, "calls are kept while a model is traced"
    leaves, form = tree_flatten((tuple(arguments), named))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    for leaf, is_one in zip(leaves, is_tensor, strict=True):
        if not is_one and leaf is not None and not isinstance(leaf, PLAIN):
            raise _refused(name, f"it is called with a {type(leaf).__name__}")
    constants = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
    tensors = [leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if is_one]
    call = OwnCall(function, on_fakes or function, name, constants, is_tensor, form)
    tracer: Any = mode.tracer
    proxies = [tracer.unwrap_proxy(tensor) for tensor in tensors]
    with _only_of(tensors, name, tracer), disable_proxy_modes_tracing():
        result = call(*tensors)
    made_here = result if isinstance(result, tuple | list) else (result,)
    if not all(value is None or isinstance(value, torch.Tensor) for value in made_here):
        raise _refused(name, "it returns something else than tensors")
    node = tracer.create_proxy("call_function", call, tuple(proxies), {})
    return track_tensor_tree(result, node, constant=None, tracer=tracer)


def _refused(name: str, found: str) -> WorkloadError:
    return NoGraphError(
        f"to be split, {name} at {user_line()} should compute from the tensors that it is handed", found, _FIX
    )


@contextmanager
def _only_of(tensors: list[torch.Tensor], name: str, tracer: Any) -> Iterator[None]:
    """Raise WorkloadError where a call uses tensors of the trace that it was not handed, or writes into them."""
    memories = {storage_key(tensor) for tensor in tensors}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for value in tree_leaves((args, kwargs)):
                if not isinstance(value, torch.Tensor) or storage_key(value) in memories:
                    continue
                if get_proxy_slot(value, tracer, None) is not None:
                    raise _refused(name, f"{function} in it uses a tensor that is none of its arguments")
            for argument, value in zip(schema_of(function).arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, torch.Tensor) and storage_key(value) in memories:
                    raise _refused(name, f"{function} in it writes into one of its arguments")
            return function(*args, **kwargs)

    with Watch():  # type: ignore[no-untyped-call]
        yield


def ctc_on_fakes(log_probs: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """Return the result of `torch.nn.functional.ctc_loss`, in shape: a number, or one for each sample."""
    names = ("targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    reduction = {**dict(zip(names, arguments, strict=False)), **named}.get("reduction", "mean")
    if reduction == "none" and log_probs.dim() == 3:
        return log_probs.sum((0, 2))
    return log_probs.sum()
