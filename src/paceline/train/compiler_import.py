"""Keeps torch's compiler unloaded until somebody compiles. The one file that knows how.

Every optimizer imports `torch._dynamo`, for functions that do nothing outside of a compiled region: 820 modules, FSDP's
among them, and 1.2 s of every rank's start (torch 2.13, measured). A stand-in answers these calls, and gives way to the
real module as soon as anything else of it is asked for, `torch.compile` first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


class _TraceRules:
    """`torch._dynamo.trace_rules` as long as nobody compiles."""

    @staticmethod
    def clear_lru_cache() -> None:
        """Forget rules, as `init_process_group` asks of a compiler that is loaded; there are none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{_NAME}.trace_rules"), name)


class _StandIn(ModuleType):
    """`torch._dynamo` as long as nobody compiles."""

    trace_rules = _TraceRules()

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """End a compiled region; nothing is being compiled."""

    def disable(self, function: Callable[..., object] | None = None, *arguments: object, **named: object) -> object:
        """Keep the compiler out of `function`, or be a decorator that does.

        There is none to keep out of functions for which torch itself asks this, as they are called. A user's function
        may be compiled later, so it gets the compiler's own answer.
        """
        if function is None:
            return lambda decorated: self.disable(decorated, *arguments, **named)
        is_asked_by_torch = named.get("wrapping") is False or function.__module__.startswith("torch.")
        if is_asked_by_torch:
            return function
        return self.__getattr__("disable")(function, *arguments, **named)

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
