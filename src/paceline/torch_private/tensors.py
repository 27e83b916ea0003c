"""Tensors: the memory that they share, the count of writes to it, the parts of DTensors, nested structures.

`Tensor._version` is used as it is, as autograd's documentation does: a number that each write in place raises.

DTensors: the public `register_sharding` and `local_map` get placements, not tensors. A rule that communicates first, or
looks at the result, can't be written with them.

The functions of nested lists, tuples and dicts know the classes that libraries have registered with torch. torch 2.13
has no public module for them; `paceline.comm.pytree` visits the tensors of batches without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "REQUIRES_GRAD",
    "SET_REQUIRES_GRAD",
    "Rule",
    "TreeSpec",
    "dtensor_rules",
    "is_view",
    "key_of",
    "own_part",
    "storage_key",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

Rule = Callable[..., object]
# The descriptors of the class that `torch.Tensor` inherits from: also for subclasses that have their own.
REQUIRES_GRAD = torch._C.TensorBase.requires_grad
SET_REQUIRES_GRAD = torch._C.TensorBase.requires_grad_


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory.

    It is the address of the C++ object, the same however often Python wraps it, and unique as long as somebody holds
    one of the tensors. The public `data_ptr` is 0 for every tensor without values, and of empty ones.
    """
    return int(tensor.untyped_storage()._cdata)


def key_of(storage: torch.UntypedStorage) -> int:
    """Return the number that `storage_key` has for tensors in a storage."""
    return int(storage._cdata)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return tensor._base is not None


def dtensor_rules() -> dict[object, Rule]:
    """Return the functions that compute operations of DTensors in place of torch's own rules, by operation."""
    # Imported here: only a job that has DTensors needs the 500 modules.
    from torch.distributed.tensor import DTensor

    handlers: dict[object, Rule] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    return handlers


def own_part(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part itself; the public `to_local` makes a new tensor, and asks autograd."""
    return tensor._local_tensor
