"""Find parameters that the forward pass writes to, where the plan would lose the write.

Under `shard` the forward pass has gathered copies of parameters, of which nothing goes back; under `server` a worker
has copies of what the servers hold. The first forward passes run under a dispatch mode that sees every operation,
writes through `.data` and views too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.graph.writes import written_values
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.operations import TorchDispatchMode, schema_of
from paceline.torch_private.tensors import storage_key

_WATCHED = 3  # forward passes: later writes are as good as never
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACELINE = str(Path(__file__).parent.parent) + os.sep
_GATHERS = os.path.join(_TORCH, "distributed", "fsdp") + os.sep  # writes parameters as it gathers them


class ParameterWrites:
    """Watches the first forward passes of a model.

    Args:
        placement: the placement of the model, for the error.
        is_on: whether anything is watched.
    """

    def __init__(self, placement: str, is_on: bool = True) -> None:
        self.placement = placement
        self.passes_left = _WATCHED if is_on else 0
        self.mode: _WriteWatch | None = None

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Watch what runs inside.

        Raises:
            WorkloadError: it writes to a parameter that `add` has named.
        """
        self.mode = None
        if not self.passes_left or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        self.passes_left -= 1
        self.mode = _WriteWatch(self.placement)
        return self.mode

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Name parameters that are whole now."""
        if self.mode is None:
            return
        for name, parameter in parameters.items():
            self.mode.names[storage_key(parameter)] = name


class _WriteWatch(TorchDispatchMode):
    """Raises WorkloadError at an operation that writes to a named parameter."""

    def __init__(self, placement: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placement = placement
        self.names: dict[int, str] = {}  # by storage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what the operation writes to, then run it."""
        if schema_of(function).is_mutable:
            for value in written_values(schema_of(function), args, kwargs or {}):
                self._check(value)
        return function(*args, **(kwargs or {}))

    def _check(self, value: Any) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return
        name = self.names.get(storage_key(value))
        line = None if name is None else _line_of_the_user()
        if line is not None:
            raise WorkloadError(
                f"the forward pass should not write to parameters ({self.placement})",
                f"it writes to {name} at {line}, to a copy of which nothing goes back",
                "write replicate in the plan, which keeps the write",
            )


def _line_of_the_user() -> str | None:
    """Return the innermost line of the user's code; None where the write is FSDP's own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_GATHERS):
            return None
        if not file.startswith((_TORCH, _PACELINE)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
