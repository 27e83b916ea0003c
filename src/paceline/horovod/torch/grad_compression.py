"""Compress gradients before they are reduced: not at all, or to float16. An own class has the same two methods."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compression does; derive from it for one of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that is sent, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype."""
        if tensor.dtype.is_floating_point:
            return tensor.half(), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its dtype before `compress`."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressions that come with it.

    Attributes:
        none: send tensors as they are.
        fp16: send floating-point tensors as float16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
