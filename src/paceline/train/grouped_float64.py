"""Grouped matrix products, as of mixtures of experts, in float64: trials compare in it, and no kernel takes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def grouped_products_in_float64() -> Iterator[None]:
    """Compute `torch.nn.functional.grouped_mm` of float64 tensors group by group, on CPUs; leave other dtypes alone."""
    original = torch.library.get_kernel("aten::_grouped_mm", "CPU")

    def kernel(keys: Any, left: torch.Tensor, right: torch.Tensor, *rest: Any) -> Any:
        if left.dtype != torch.float64:
            return original.call_boxed(keys, left, right, *rest)
        ends = rest[0] if rest else None
        return left @ right if ends is None else _grouped(left, right, ends.tolist())

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_grouped_mm", kernel, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Multiply group by group; what comes after the last group is zero, where the kernels leave what was there."""
    parts = list(itertools.pairwise([0, *ends]))
    if left.dim() == 2 and right.dim() == 2:
        return torch.stack([left[:, begin:end] @ right[begin:end] for begin, end in parts])
    if left.dim() == 2:
        product = left.new_zeros(left.shape[0], right.shape[-1])
        for number, (begin, end) in enumerate(parts):
            product[begin:end] = left[begin:end] @ right[number]
        return product
    product = left.new_zeros(left.shape[1], right.shape[1])
    for number, (begin, end) in enumerate(parts):
        product[:, begin:end] = left[number] @ right[:, begin:end]
    return product
