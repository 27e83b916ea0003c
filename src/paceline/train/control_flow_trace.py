"""Record the branches that the user's code took where it looked at a tensor's value, with their lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACELINE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MODULE = torch.nn.modules.module.__file__
# What hands a value of a tensor to Python. The first ones are what an `if` or `while` looks at.
_LOOKS = ("__bool__", "equal", "allclose", "is_nonzero")
_READS = ("item", "tolist", "__float__", "__int__", "__index__")


class Branches:
    """A context that records in `outcomes` the (file:line, outcome) of every look at a tensor's value inside it.

    The line is the user's that looked, be it by code of torch's. The outcome of `if tensor` is what it was; where
    Python was handed a number it is None, as what becomes of it can't be seen.

    Args:
        in_models: True to record only looks in calls of modules, while gradients are taken.
    """

    def __init__(self, in_models: bool = False) -> None:
        self.in_models = in_models
        self.outcomes: list[tuple[str, bool | None]] = []
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> Branches:
        for owner in (torch.Tensor, torch):
            for name in (*_LOOKS, *_READS):
                original = getattr(owner, name, None)
                if original is not None:
                    self._replace(owner, name, original)
        return self

    def _replace(self, owner: object, name: str, original: Any) -> None:
        is_own = name in vars(owner)

        def recorded(*arguments: Any, **options: Any) -> Any:
            outcome = original(*arguments, **options)
            if not self.undo:  # it is over, and something else still calls this
                return outcome
            line = None
            if not self.in_models or (torch.is_grad_enabled() and _is_in_module(sys._getframe(1))):
                line = _line_of_user(sys._getframe(1))
            if line is not None:
                self.outcomes.append((line, bool(outcome) if name in _LOOKS else None))
            return outcome

        setattr(owner, name, recorded)

        def undo() -> None:
            if getattr(owner, name) is not recorded:
                return  # something else has replaced it since
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self.undo.append(undo)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for undo in self.undo:
            undo()
        self.undo = []


def _is_in_module(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _MODULE:
            return True
        frame = frame.f_back
    return False


def _line_of_user(frame: FrameType | None) -> str | None:
    """Return the line that called, through torch's code or not; None where it is Paceline's."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_PACELINE):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
