"""Attributes that a model's own code changes in forward, as a pass that is computed again must find them.

A flag that says whether a buffer was filled, the length of a cached table, a list of losses: they belong to the buffers
that the pass finds, and what it changes itself must vanish.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch

_OF_TORCH = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in a module's dictionary
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_Values = dict[str, Any]


class KeptAttributes:
    """The attributes of some modules as they are now; while it is entered the modules have these.

    Containers are copied one level deep, so that what the pass appends is gone afterwards.

    Args:
        modules: the modules whose own attributes are meant; those of torch's own classes keep nothing between batches.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.before: list[tuple[torch.nn.Module, _Values]] = []
        for module in modules:
            if _has_own_code(type(module)):
                self.before.append((module, _copied(_attributes(module))))
        self.now: list[tuple[torch.nn.Module, _Values]] = []

    def __enter__(self) -> None:
        self.now = [(module, _attributes(module)) for module, _ in self.before]
        # Copies again: a graph that is kept is computed again more than once.
        for module, values in self.before:
            _put(module, _copied(values))

    def __exit__(self, *error: object) -> None:
        for module, values in self.now:
            _put(module, values)
        self.now = []


def _has_own_code(kind: type) -> bool:
    """True if a class of modules, or one that it is made of, is not torch's: FSDP makes a class of each."""
    return any(not base.__module__.startswith(("torch.", "builtins")) for base in kind.__mro__)


def _attributes(module: torch.nn.Module) -> _Values:
    """Return the attributes that the model's own code has put into a module, without `forward`."""
    values = dict(vars(module))
    values.pop("forward", None)  # it is there where Paceline replaced it
    for name in _OF_TORCH:
        values.pop(name, None)
    return values


def _copied(values: _Values) -> _Values:
    copies = {}
    for name, value in values.items():
        copies[name] = value.copy() if type(value) in _CONTAINERS else value
    return copies


def _put(module: torch.nn.Module, values: _Values) -> None:
    now = vars(module)
    for name in _attributes(module):
        if name not in values:
            del now[name]
    now.update(values)
