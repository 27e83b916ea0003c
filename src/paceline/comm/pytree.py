"""A batch as a list of tensors and the shape of what held them: dicts, lists, tuples and their kin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(one, function) for key, one in value.items()}
        return type(value)(items) if type(value) is not dict else items  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(one, function) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(one, function) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: map_tensors(getattr(value, field.name), function) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in the order in which `map_tensors` meets them."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def signature(value: Any) -> Hashable:
    """Equal for two batches that one graph can serve: the same shapes, dtypes and plain values."""
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors_in(value))
    return shapes, plain_values(value)


def plain_values(value: Any) -> str:
    """What `value` holds besides tensors, and where it holds tensors."""
    return repr(map_tensors(value, lambda tensor: "T"))
