"""Copies of a model whose tensors hold no values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.nouns.errors import WorkloadError


def skeleton(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Return a copy of `model` whose parameters and buffers hold nothing; tied ones stay tied.

    Args:
        model: its tensors may hold values or not.
        dtype: of floating-point tensors, where it is to change; complex ones get the complex dtype of its digits.

    Raises:
        WorkloadError: a module holds something that can't be copied.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        new_dtype = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            new_dtype = dtype
        if dtype is not None and tensor.is_complex():
            new_dtype = torch.promote_types(dtype, tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype, device="meta")

    # `deepcopy` looks here first, by identity: it takes these and copies no values.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(empty(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = empty(buffer)
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        holder = _holder_of_computed_tensor(model)
        name = "a module" if holder is None else holder
        raise WorkloadError(
            "the model can't be copied without its values",
            f"{name} holds a computed tensor, or something else that can't be copied ({error!s:.60}...)",
            "use torch.nn.utils.parametrizations.weight_norm for torch.nn.utils.weight_norm, keep computed tensors out "
            "of the model, or train it by replicate",
        ) from error


def _holder_of_computed_tensor(model: torch.nn.Module) -> str | None:
    """Return the name of the first module with an attribute that autograd computed, which torch refuses to copy."""
    for name, module in model.named_modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                return str(name)
    return None
