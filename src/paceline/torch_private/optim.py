"""Optimizers: their operations on lists of tensors, GradScaler's findings, and how schedulers count their steps.

Operations on lists of tensors use one kernel for many tensors on a GPU: torch's optimizers are made of them. torch
documents the family ("Foreach operations") with these names. The public way is a loop over the tensors, which starts a
kernel for each.

torch.amp.GradScaler has no hook and no public way to see whether it found an overflow. `_unscale_grads_` and
`_per_optimizer_states` are what torch's own ShardedGradScaler overrides and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import optimizer as of_optimizers

from paceline.nouns.patching import patched

foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# GradScaler's kernel: multiplies gradients, and notes whether one is infinite or NaN.
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

UNSCALE = "_unscale_grads_"  # the method that unscales an optimizer's gradients and looks for overflows

INNER = "_schedulers"  # the key, in the state of a scheduler that is made of others, of their states
STATE_OF_ALL = frozenset({"base_lrs", "last_epoch", "_last_lr", "_step_count"})  # keys in the state of every scheduler


@contextmanager
def foreach_by_default(types: Sequence[type[torch.Tensor]]) -> Iterator[None]:
    """Let optimizers use these operations by default on CPUs too, for tensors of `types`: as they do on a GPU."""
    with patched(
        of_optimizers,
        _get_foreach_kernels_supported_devices=lambda: ["cpu"],
        _foreach_supported_types=list(types),
    ):
        yield


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return the loss scale on the device; the public `get_scale` waits for the device to return a number."""
    scale = scaler._scale
    assert scale is not None
    return scale


def found_infinite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient of the optimizer was infinite or NaN, in this step."""
    found: Mapping[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(float(value) for value in found.values())


def is_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's gradients are still those of the scaled loss."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def replace_methods(scaler: torch.amp.GradScaler, methods: Mapping[str, Callable[..., object]]) -> None:
    """Replace methods of a scaler that the user has made, by name: the user's code and optimizers call this object."""
    for name, method in methods.items():
        setattr(scaler, name, method)


def switch_off(scaler: torch.amp.GradScaler) -> None:
    """Have a scaler that was made with `enabled=True` do nothing, as one with `enabled=False`."""
    scaler._enabled = False


def inner_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> Sequence[torch.optim.lr_scheduler.LRScheduler]:
    """Return the schedulers that a SequentialLR or ChainedScheduler is made of."""
    inner: Sequence[torch.optim.lr_scheduler.LRScheduler] = scheduler._schedulers  # type: ignore[attr-defined]
    return inner


def is_wrapped_by_scheduler(step: Callable[..., object]) -> bool:
    """Return whether `step` is what a scheduler has put in the place of an optimizer's step, to count its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_wrapped(step: Callable[..., object]) -> None:
    """Tell schedulers that `step` says itself when it is called, by `note_step`."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell the optimizer's schedulers that it has stepped; otherwise they warn that they step first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
