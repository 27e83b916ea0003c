"""Visit the tensors of a batch: in dicts, lists, deques, tuples, named tuples and dataclasses."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch


def map_tensors(value: object, function: Callable[[torch.Tensor], object]) -> Any:
    """Return `value` with `function` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        if type(value) is dict:
            return items
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        # Such as transformers' BatchEncoding: made anew by its class.
        return type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items as arguments
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, collections.deque):
        return collections.deque((map_tensors(item, function) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            changes[field.name] = map_tensors(getattr(value, field.name), function)
        return dataclasses.replace(value, **changes)
    return value


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return every tensor in `value`, in the order in which `map_tensors` visits them."""
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    return tensors


def dense_tensors_in(value: object) -> list[torch.Tensor]:
    """Return every tensor in `value`; of a nested one what it is made of: its values, and where its rows begin."""
    tensors: list[torch.Tensor] = []
    for tensor in tensors_in(value):
        if not tensor.is_nested:
            tensors.append(tensor)
        elif tensor.layout == torch.jagged:
            jagged: Any = tensor
            made_of = (jagged.values(), jagged.offsets(), jagged.lengths())
            tensors += [part for part in made_of if part is not None]
        else:
            tensors += tensor.unbind()
    return tensors


def signature(value: object) -> Hashable:
    """Return a key that is equal for two batches that one graph can serve: same shapes, dtypes and plain values."""
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in dense_tensors_in(value))
    return shapes, plain_values(value)


def plain_values(value: object) -> str:
    """Return the plain values in `value`, and the places of its tensors, as text."""
    return repr(map_tensors(value, lambda tensor: "T"))
