"""The precision of a workload as a context of torch.autocast, and grouped products in float64 for trials."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.torch_private.operations import end_library

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype in which matrix products are computed; None for the dtype of the parameters."""
    return _AUTOCAST.get(precision)


def autocast_of(precision: str, device_type: str) -> Callable[[], torch.autocast]:
    """Return a function that makes the context in which a model of this precision is called.

    Args:
        precision: the workload's precision, such as "bf16".
        device_type: "cpu" or "cuda".
    """
    dtype = autocast_dtype(precision)
    return partial(torch.autocast, device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def autocast(precision: str, device_type: str) -> torch.autocast:
    """Return the context in which a model of this precision is called."""
    return autocast_of(precision, device_type)()


@contextmanager
def grouped_products_in_float64() -> Iterator[None]:
    """Compute `torch.nn.functional.grouped_mm` of float64 tensors on CPUs, for which torch has no kernel.

    Mixtures of experts call it, and trials compare in float64. Tensors of other dtypes use torch's kernel.
    """
    original = torch.library.get_kernel("aten::_grouped_mm", "CPU")

    def kernel(keys: Any, first: torch.Tensor, second: torch.Tensor, *options: Any) -> Any:
        if first.dtype != torch.float64:
            return original.call_boxed(keys, first, second, *options)
        ends = options[0] if options else None
        return first @ second if ends is None else _grouped(first, second, ends.tolist())

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_grouped_mm", kernel, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        end_library(library)


def _grouped(first: torch.Tensor, second: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Multiply group by group; rows after the last group are zero, where torch's kernels do not write them."""
    parts = list(itertools.pairwise([0, *ends]))
    if first.dim() == 2 and second.dim() == 2:
        return torch.stack([first[:, begin:end] @ second[begin:end] for begin, end in parts])
    if first.dim() == 2:
        product = first.new_zeros(first.shape[0], second.shape[-1])
        for number, (begin, end) in enumerate(parts):
            product[begin:end] = first[begin:end] @ second[number]
        return product
    product = first.new_zeros(first.shape[1], second.shape[1])
    for number, (begin, end) in enumerate(parts):
        product[:, begin:end] = first[number] @ second[:, begin:end]
    return product
