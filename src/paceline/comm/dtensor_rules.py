"""Compute numbers from DTensors, such as a norm that `float` reads, as of the whole tensor; torch reads the part.

This imports torch.distributed.tensor, so it is imported only where a plan shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from paceline.comm.dtensor_parts import gathered
from paceline.torch_private.tensors import dtensor_rules, own_part

_ATEN = torch.ops.aten
_READ = _ATEN._local_scalar_dense.default
_SUMS = (_ATEN.sum.default, _ATEN.sum.dim_IntList)
_ANY = (_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims)
_VIEWS = (
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.diagonal.default,
)
_MEANS = (
    _ATEN.mse_loss.default,
    _ATEN.huber_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.binary_cross_entropy_with_logits.default,
)

_before_reads: dict[DeviceMesh, Callable[[], None]] = {}
_copies: list[tuple[torch.Tensor, int]] = []  # of parts that looked like views, and their versions


def read_whole(tensors: Iterable[torch.Tensor], before_read: Callable[[], None]) -> None:
    """Have numbers computed from parts, such as a norm that `float` reads, be those of the whole; torch reads the part.

    Args:
        tensors: that are in parts. It holds for all that are spread over the same ranks.
        before_read: called before a number is read, as that takes all these ranks.
    """
    _copies.clear()
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            _before_reads[tensor.device_mesh] = before_read
    # torch asks here for what has no rule of its own for DTensors. It has none for reading a number, and three of its
    # rules are wrong: it adds up norms before they are those of the whole, it takes the mean of the means of parts that
    # are not equally long, and it counts on how many ranks any value is true.
    handlers = dtensor_rules()
    handlers[_READ] = _read_number
    for operation in (*_SUMS, *_MEANS, *_ANY):
        handlers[operation] = _of_whole
    for operation in _VIEWS:
        handlers[operation] = _view
    DTensor.__format__ = _format  # type: ignore[method-assign, assignment]


def _read_number(operation: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the one number of a DTensor."""
    tensor = arguments[0]
    before_read = _before_reads.get(tensor.device_mesh)
    if before_read is None or all(placement.is_replicate() for placement in tensor.placements):
        return operation(own_part(tensor))
    before_read()
    with torch.no_grad():
        return operation(gathered(tensor))


def _of_whole(operation: object, arguments: tuple[Any, ...], options: Mapping[str, object]) -> Any:
    """Return the result of an operation that torch does not compute rightly from parts."""
    mesh = next(value.device_mesh for value in arguments if isinstance(value, DTensor))
    replicated = [Replicate()] * mesh.ndim
    if operation in _MEANS or (operation in _SUMS and any(map(_is_part_of_norm, arguments[0].placements))):
        arguments = tuple(
            value.redistribute(placements=replicated) if isinstance(value, DTensor) else value for value in arguments
        )
    result = _by_torch(operation, arguments, options)
    return result.redistribute(placements=replicated) if operation in _ANY else result


def _is_part_of_norm(placement: Placement) -> bool:
    return placement.is_partial() and type(placement) is not Partial


def _by_torch(operation: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the result of an operation by torch's own rule for DTensors."""
    handlers = dtensor_rules()
    handler = handlers.pop(operation)
    try:
        return operation(*arguments, **options)
    finally:
        handlers[operation] = handler


def _view(operation: object, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return views of a DTensor; remember those that are none, as other ranks have a part of what they show."""
    tensor = arguments[0]
    result = _by_torch(operation, arguments, options)
    if tensor.device_mesh in _before_reads:
        memory = own_part(tensor).untyped_storage().data_ptr()
        for output in result if isinstance(result, (list, tuple)) else [result]:
            if own_part(output).untyped_storage().data_ptr() != memory:
                _copies.append((output, output._version))
    return result


def take_lost_write() -> bool:
    """Return whether something was written since the last call into what looked like a view, and was a copy."""
    is_lost = any(copy._version != version for copy, version in _copies)
    _copies.clear()
    return is_lost


def _format(tensor: DTensor, spec: str) -> str:
    """Format one number as a plain tensor's is, which torch leaves out."""
    return format(tensor.item(), spec) if spec and tensor.dim() == 0 else object.__format__(tensor, spec)
