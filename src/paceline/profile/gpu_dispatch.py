"""Have a step on the CPU run the operations that a GPU would, so that it allocates what they allocate.

Five things differ: attention runs a fused kernel, dropout keeps a mask of one byte, autocast widens other
operations, optimizers update all parameters at once (foreach), and FSDP2 works on several streams, each of which has
memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.cpu
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.nouns.patching import patched
from paceline.profile.allocation_trace import Allocations
from paceline.torch_private.autograd import backward_passes_within
from paceline.torch_private.operations import FakeTensor
from paceline.torch_private.optim import foreach_by_default

FLASH_HEAD = 256  # the widest head that flash attention takes
# Widened by CUDA's autocast (torch/_C autocast_mode.cpp, fp32 list) and not by the CPU's.
_WIDE: frozenset[Any] = frozenset(
    {
        *(functional.layer_norm, functional.softmax, functional.log_softmax, functional.cross_entropy),
        *(functional.nll_loss, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss),
        *(functional.binary_cross_entropy_with_logits, functional.kl_div, functional.group_norm),
        *(torch.softmax, torch.log_softmax, torch.sum, torch.pow, torch.exp, torch.log, torch.rsqrt, torch.norm),
        *(torch.cumsum, torch.prod, torch.Tensor.softmax, torch.Tensor.sum, torch.Tensor.pow, torch.Tensor.exp),
        *(torch.Tensor.log, torch.Tensor.rsqrt, torch.Tensor.norm, torch.Tensor.log_softmax, torch.Tensor.cumsum),
    }
)


@contextmanager
def as_on_gpu(device: str, recorder: Allocations) -> Iterator[None]:
    """Let modules and optimizers run a GPU's operations where `device` is "cuda"; else do nothing.

    Attention and dropout are exchanged where modules look them up. What autocast widens is seen by a function mode.
    """
    if device == "cpu":
        yield
        return
    widening = _Widening()
    with (
        patched(functional, scaled_dot_product_attention=attention, dropout=dropout),
        foreach_by_default([torch.Tensor, torch.nn.Parameter, FakeTensor]),
        patched(
            torch.cpu,
            Stream=Stream,
            stream=lambda stream: _on(recorder, stream),
            current_stream=lambda device=None: Stream(recorder.stream),
        ),
        widening,
        # A function runs without the mode that saw its call. What a backward pass computes again is to be widened too.
        backward_passes_within(widening),
    ):
        yield


class Stream(torch.cpu.Stream):
    """A stream of a GPU, by its number; FSDP2 copies and communicates on streams of its own.

    As torch's own for CPUs it waits for nothing.
    """

    count = 0

    def __init__(self, number: int = -1, **named: Any) -> None:
        if number < 0:
            Stream.count += 1
            number = Stream.count
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def synchronize(self) -> None:
        """Do nothing: operations run as they are called."""


@contextmanager
def _on(recorder: Allocations, stream: Any) -> Iterator[None]:
    """Enter what is allocated inside as the stream's: the allocator keeps a pool for each."""
    stream_before = recorder.stream
    recorder.stream = getattr(stream, "number", 0)
    try:
        yield
    finally:
        recorder.stream = stream_before


def dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replace `torch.nn.functional.dropout` by the fused kernel, whose mask takes a byte for each number."""
    if not training or p <= 0:
        return values
    result, _ = torch.native_dropout(values, p, True)
    return result


def attention(  # noqa: PLR0913 (torch's own arguments)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by the kernel that a GPU of 2020 or later takes.

    Flash attention in half precision without a mask, the memory-efficient kernel for the rest.
    """
    if torch.is_autocast_enabled("cpu"):  # CUDA's autocast has attention on its list of lower precision
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(half)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_flash = attn_mask is None and is_half and query.shape[-1] <= FLASH_HEAD
    if enable_gqa and query.shape[1] != key.shape[1] and not is_flash:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    if is_flash:
        kernel: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill(attn_mask.logical_not(), -math.inf)
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    # The kernel keeps a log-sum-exp per row for the backward pass, and only then.
    keeps_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    result = kernel(query, key, value, attn_mask, keeps_sums, dropout_p, is_causal, scale=scale)
    return result[0]  # type: ignore[no-any-return]


class _Widening(TorchFunctionMode):
    """A mode that gives the operations of CUDA's autocast list float32 inputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        is_half = isinstance(first, torch.Tensor) and first.dtype in (torch.float16, torch.bfloat16)
        if is_half and func in _WIDE and torch.is_autocast_enabled("cpu"):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))
