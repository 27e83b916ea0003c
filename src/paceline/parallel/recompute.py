"""Activation checkpointing: what a backward pass needs is computed again instead of kept (Chen et al. 2016).

`full` keeps what enters each block; `selective` also keeps the results of matrix products and attention, which cost
most to compute again (Korthikanti et al. 2022). Random numbers are drawn again as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.nouns.profile import NOTHING_TO_RECOMPUTE
from paceline.parallel.blocks import find_blocks

aten = torch.ops.aten
_KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def recomputed(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`function`, whose inner values are computed again in the backward pass.

    Args:
        function: of tensors, without side effects.
        mode: "none", "full" or "selective".
    """
    if mode == "none":
        return function
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(function, updated=())
    def run(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments, **named)
        return checkpoint(function, *arguments, **options, **named)

    return run


def recompute_blocks(model: torch.nn.Module, mode: str) -> int:
    """Recompute the repeated blocks of a model that runs by its own code; how many there are.

    A block with batch norm is left alone: computed twice it would count a batch twice.
    """
    if mode == "none":
        return 0
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):  # a block that fills a cache can't be run twice
        config.use_cache = False  # type: ignore[union-attr]
    blocks = [block for block in find_blocks(model).values() if not _has_batch_norm(block)]
    for block in blocks:
        block.forward = recomputed(block.forward, mode)
    return len(blocks)


def nothing_recomputed(mode: str) -> str:
    """What a person is told whose model has no such block."""
    return f"checkpointing={mode} {NOTHING_TO_RECOMPUTE}: the model has no repeated blocks, or they have batch norm"


def _has_batch_norm(block: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in block.modules())


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
