"""Parts that several of the measured programs share: norms, rotary positions, and what fine-tuning adds to a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RmsNorm(nn.Module):
    """A root-mean-square norm by plain operations, in float32.

    Args:
        width: of what is normed.
        has_offset: the weight is told as its difference from one.
        is_wide: the weight is multiplied in float32 too.
    """

    def __init__(self, width: int, has_offset: bool = False, is_wide: bool = False) -> None:
        super().__init__()
        self.weight, self.has_offset, self.is_wide = nn.Parameter(torch.ones(width)), has_offset, is_wide

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`, in its dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        weight = 1 + self.weight if self.has_offset else self.weight
        return (normed * weight.float()).to(x.dtype) if self.is_wide else normed.to(x.dtype) * weight


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions by plain operations: halves, turned and joined; the result in `x`'s dtype."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos + turned * sin).to(x.dtype)


def adamw_of_2_0(squares: list[Tensor]) -> None:
    """What torch 2.0's AdamW takes for all parameters at once beside its states: two temporaries of their size.

    Later versions need one. FSDP's use_orig_params came with 2.0, so who uses it has no earlier one.
    """
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, 0.5)
    denominators = torch._foreach_add(roots, 1e-8)
    del roots, denominators


class FusedLoss(torch.autograd.Function):
    """flash-attn's cross-entropy: a number for each row, and a gradient beside the scores or in their place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, is_in_place: bool) -> Tensor:
        """The rows' losses."""
        ctx.save_for_backward(scores)
        ctx.is_in_place = is_in_place
        return scores.new_empty(scores.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """As large as the scores."""
        (scores,) = ctx.saved_tensors
        return scores.detach() if ctx.is_in_place else torch.empty_like(scores), None


class FourBit(torch.autograd.Function):
    """bitsandbytes' product with a weight of four bits a number: widened each time, to float16 and then to `x`'s dtype.

    It keeps `x`, although the weight is frozen, and beyond the backward pass: for as long as the loss lives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """`x` times the weight."""
        ctx.tensors, ctx.shape, ctx.dtype = (x, packed), shape, x.dtype
        return F.linear(x, torch.empty(shape, dtype=torch.float16).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The gradient of `x`."""
        return gradient @ torch.empty(ctx.shape, dtype=torch.float16).to(ctx.dtype), None, None


class FourBitLinear(nn.Module):
    """A frozen layer in bitsandbytes' NF4: half a byte for each number and a scale for every 64.

    Args:
        inner, outer: numbers in and out.
        has_bias: kept in the usual dtype.
    """

    def __init__(self, inner: int, outer: int, has_bias: bool) -> None:
        super().__init__()
        count = inner * outer
        self.shape = (outer, inner)
        self.packed = nn.Parameter(torch.empty(count // 2, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.empty(count // 64, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outer), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the weight, and the bias."""
        y: Tensor = FourBit.apply(x, self.packed, self.shape)
        return y if self.bias is None else y + self.bias


class Adapted(nn.Module):
    """A frozen layer with a product of two small matrices beside it (LoRA).

    Args:
        frozen: the layer.
        sizes: numbers in, numbers out, and the rank between.
        dropout: of what enters the small matrices.
    """

    def __init__(self, frozen: nn.Module, sizes: tuple[int, int, int], dropout: float) -> None:
        super().__init__()
        inner, outer, rank = sizes
        self.frozen = frozen.requires_grad_(False)
        self.first = nn.Parameter(torch.empty(rank, inner))
        self.second = nn.Parameter(torch.empty(outer, rank))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`, both together."""
        base = self.frozen(x)
        small = F.dropout(x, self.dropout, self.training) @ self.first.t() @ self.second.t()
        return base + small * 0.5
