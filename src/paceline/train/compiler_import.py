"""Keeps torch's compiler unloaded until somebody compiles. The one file that knows how.

Every optimizer's `step` imports `torch._dynamo` to call its `graph_break`, which outside of a compiled region
does nothing: 820 modules and 1.2 s of every rank's start (torch 2.13, measured). A stand-in answers that one
call, and gives way to the real module as soon as anything else of it is asked for, `torch.compile` first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """`torch._dynamo` as long as nobody compiles."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """End a compiled region; nothing is being compiled."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Keep the compiler out of `function` (or be a decorator that does); there is none to keep out."""
        return function if function is not None else lambda decorated: decorated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspect looks at every module, amid other imports
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)
        return getattr(importlib.import_module(_NAME), name)


def defer_compiler_import() -> None:
    """Put the stand-in in place, unless the compiler is loaded already. Safe to call again."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)
