"""Activation checkpointing: what a backward pass needs is computed again instead of kept (Chen et al. 2016).

`full` keeps what enters each block; `selective` also keeps the results of matrix products and attention, which cost
most to compute again (Korthikanti et al. 2022). Random numbers are drawn again as they were. A block's buffers,
and the attributes beside them, are found as they were, and are written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.nouns.profile import NOTHING_TO_RECOMPUTE
from paceline.parallel.kept_attributes import KeptAttributes
from paceline.parallel.replicate.buffers import EarlierPasses, KeptBuffers
from paceline.parallel.shard.blocks import find_blocks
from paceline.torch_private.modules import BatchNorm, compiled_never

Context = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]
aten = torch.ops.aten
_SAVED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_mm.default,  # float8
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def recomputed(function: Callable[..., Any], mode: str, block: torch.nn.Module | None = None) -> Callable[..., Any]:
    """Return `function`, whose inner values are computed again in the backward pass.

    Args:
        function: a function of tensors, without side effects but on the buffers of `block`.
        mode: the kind of checkpointing: "none", "full" or "selective".
        block: the block whose buffers the function may read and write.
    """
    if mode == "none":
        return function
    options: dict[str, Any] = {"use_reentrant": False}
    contexts: Contexts | None = None
    if mode == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    if block is not None:
        contexts = functools.partial(_with_buffers, block, EarlierPasses(), contexts or _no_contexts)
    if contexts is not None:
        options["context_fn"] = contexts

    @functools.wraps(function, updated=())
    def run(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments, **named)
        return checkpoint(function, *arguments, **options, **named)

    return run


def recompute_blocks(model: torch.nn.Module, mode: str, is_compiled: bool = False) -> int:
    """Recompute the repeated blocks of a model that runs by its own code; return how many there are.

    A block with batch norm stays as it is: computed twice it would exchange its statistics with the other ranks twice.

    Args:
        model: the model, changed in place.
        mode: the kind of checkpointing, as for `recomputed`.
        is_compiled: whether the model will be compiled, but for blocks with buffers: where the compiler traces a
            checkpoint, buffers can't be exchanged.
    """
    if mode == "none":
        return 0
    fill_no_cache(model)  # a block that fills one can't be run twice
    blocks = [block for block in find_blocks(model).values() if not _has_batch_norm(block)]
    for block in blocks:
        has_buffers = any(module._buffers for module in block.modules())
        forward = block.forward
        block.forward = recomputed(forward, mode, block if has_buffers else None)
        if is_compiled and has_buffers:
            block.forward = functools.update_wrapper(compiled_never(block.forward), forward, updated=())
    return len(blocks)


def fill_no_cache(model: torch.nn.Module) -> None:
    """Have a model of transformers keep no keys and values for later words, which training has no use for."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]


def is_kept_from_compiler(forward: Callable[..., Any]) -> bool:
    """Return True if `recompute_blocks` has kept a block's forward function from the compiler."""
    return getattr(forward, "_torchdynamo_disable", False)  # torch's own mark


def nothing_recomputed(mode: str, reason: str = "the model has no repeated blocks, or they have batch norm") -> str:
    """Return the notice for a plan under which no block is recomputed."""
    return f"checkpointing={mode} {NOTHING_TO_RECOMPUTE}: {reason}"


class _Nested:
    """A context within another, entered as often as wanted: a graph that is kept is computed again each time."""

    def __init__(self, outer: Context, inner: Context) -> None:
        self.outer = outer
        self.inner = inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.inner.__exit__(*error)
        finally:
            self.outer.__exit__(*error)


class _DropConstants:
    """A context that lets go, at the end of the forward pass, of copies of what the pass has not written."""

    def __init__(self, buffers: KeptBuffers, earlier: EarlierPasses) -> None:
        self.buffers = buffers
        self.earlier = earlier

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.buffers.drop_constants(self.earlier)


def _with_buffers(block: torch.nn.Module, earlier: EarlierPasses, contexts: Contexts) -> tuple[Context, Context]:
    """Return contexts of a forward pass and of its recomputation, which finds the block's state as the pass did."""
    # Called once for each forward pass of the block, before it: what is kept here is the state that the pass finds.
    first, again = contexts()
    modules = list(block.modules())
    buffers = KeptBuffers(modules)
    attributes = KeptAttributes(modules)
    return _Nested(_DropConstants(buffers, earlier), first), _Nested(attributes, _Nested(buffers, again))


def _no_contexts() -> tuple[Context, Context]:
    return nullcontext(), nullcontext()


def _has_batch_norm(block: torch.nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in block.modules())


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    # torch.compile may decide otherwise where it says PREFER, not where it says MUST.
    if operation in _SAVED:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
