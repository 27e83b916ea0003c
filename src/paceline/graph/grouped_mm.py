"""torch's products of groups of rows, each with a matrix of its own, and counts of rows, on fake tensors.

Mixtures of experts are computed so: rows that are sorted by expert, and a weight of shape (experts, in, out). torch's
own fake of `aten._grouped_mm` takes only bf16, while its kernels take float32 and fp16 too; and its counter of
operations doesn't know it. `train/precision.py` has them in float64.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from paceline.nouns.errors import WorkloadError

aten = torch.ops.aten
_ALIGNED_BYTES = 16  # of the kernels' rows


def _shape(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor | None) -> tuple[int, ...]:
    """Return the shape of the product: `ends` cuts the dimension that only one of both has, or that both sum over."""
    if first.dim() == 2 and second.dim() == 2:
        assert ends is not None, "two matrices without groups are no grouped product"
        return ends.shape[0], first.shape[0], second.shape[1]
    if first.dim() == 2:
        return first.shape[0], second.shape[-1]
    if second.dim() == 2:
        return first.shape[1], second.shape[1]
    return first.shape[0], first.shape[1], second.shape[-1]


def _fake(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return left.new_empty(_shape(left, right, offs), dtype=out_dtype or left.dtype)


def _operations(first: Any, second: Any, *arguments: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the operations of a grouped product: each row meets one matrix."""
    if len(first) == len(second) == 2:
        return int(2 * math.prod(first) * second[1])
    rows = first[-2] * (first[0] if len(first) == len(second) == 3 else 1)
    return int(2 * rows * first[-1] * second[-1])


@torch.library.custom_op("paceline::counts", mutates_args=())
def counts(numbers: torch.Tensor, length: int) -> torch.Tensor:
    """Count how often each number below `length` is there."""
    result = torch.bincount(numbers, minlength=length)
    if len(result) > length:  # the graph that this is part of is one of shapes
        raise WorkloadError(
            "to be split, a model that calls torch.bincount should count as many numbers as it asks for",
            f"minlength is {length}, and there are numbers up to {len(result) - 1}",
            f"write minlength={len(result)} or more, or train it by replicate or shard",
        )
    return result


@counts.register_fake
def _(numbers: torch.Tensor, length: int) -> torch.Tensor:
    return numbers.new_empty(length, dtype=torch.int64)


class KnownCounts(TorchFunctionMode):
    """Trace counts of which the code says how many there are, as of experts, as an operation of that shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in (torch.bincount, torch.Tensor.bincount):
            options = {**dict(zip(("input", "weights", "minlength"), args, strict=False)), **named}
            options.setdefault("input", options.pop("self", None))
            if options.get("weights") is None and options.get("minlength", 0) > 0:
                return counts(options["input"], options["minlength"])
        return func(*args, **named)


@functools.cache
def register_fake() -> None:
    """Let this process run grouped products on fake tensors, and count their operations."""
    torch.library.register_fake("aten::_grouped_mm", _fake, allow_override=True)
    if aten._grouped_mm not in flop_registry:
        register_flop_formula(aten._grouped_mm)(_operations)


def grouped_mm_of_pieces(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *options: Any) -> torch.Tensor:
    """Multiply pieces of rows (rows, in) with pieces of weights (groups, in, out).

    The kernels want rows of a multiple of 16 bytes, and a piece of such a row need not be one: it is filled up with
    zeros, which add nothing.
    """
    step = max(1, _ALIGNED_BYTES // rows.element_size())
    inner, outer = -weight.shape[-2] % step, -weight.shape[-1] % step
    if inner or outer:
        rows, weight = F.pad(rows, (0, inner)), F.pad(weight, (0, outer, 0, inner))
    product: torch.Tensor = aten._grouped_mm.default(rows, weight, ends, *options)
    return product[..., : product.shape[-1] - outer] if outer else product
