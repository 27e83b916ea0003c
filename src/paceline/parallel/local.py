"""What a step is on one rank: forward and backward passes over its micro-batches, one after another.

Needs: the loss as (sum, weight).
Promises: accumulation changes nothing but rounding; nothing is divided before the whole batch is known.
Traffic: none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.nouns.errors import LossError
from paceline.parallel.replicate import Replicate

Loss = Callable[[Any, Any], tuple[Any, Any]]


def forward_backward(
    model: torch.nn.Module,
    loss: Loss,
    microbatches: Sequence[Any],
    replicate: Replicate,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    is_stopping: bool = False,
) -> None:
    """Add up the gradients of the loss sum over `microbatches`; a rank without any still takes part.

    Raises:
        LossError: the loss has the wrong form.
    """
    replicate.begin_step()
    for number, batch in enumerate(microbatches):
        with autocast():
            total, weight = checked_loss(loss(model, batch))
        replicate.sums.add(total.detach(), weight)
        if number == len(microbatches) - 1:
            replicate.begin_last_backward(is_stopping)
        if is_scaled_before(replicate, microbatches):
            total = total / weight
        total.backward()  # type: ignore[no-untyped-call]
    if not microbatches:
        replicate.begin_last_backward(is_stopping)


def is_scaled_before(replicate: Replicate, microbatches: Sequence[Any]) -> bool:
    """Whether the mean can be taken before the backward pass: one rank, one micro-batch, nothing to wait for."""
    return replicate.comm.size == 1 and len(microbatches) == 1


def checked_loss(result: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The loss sum and its weight, without a gradient path through the weight.

    Raises:
        LossError: `result` is not a pair of a scalar tensor and a positive number.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        found = "a mean alone can't be split over ranks" if isinstance(result, torch.Tensor) else "that has no weight"
        raise LossError(
            "the loss should return (sum, weight)",
            f"it returned {_shown(result)}: {found}",
            "return the losses added up and their number: cross_entropy(..., reduction='sum'), labels.numel()",
        )
    total, weight = result
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise LossError(
            "the loss's sum should be one floating-point number in a tensor",
            f"it is {_shown(total)}",
            "add the losses up: losses.sum()",
        )
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise LossError(
                "the loss's weight should be one number", f"it is {_shown(weight)}", "count: weight = mask.sum()"
            )
        return total.reshape(()), weight.detach().reshape(())
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise LossError(
            "the loss's weight should be a number, 0 or more",
            f"it is {_shown(weight)}",
            "return how many samples or tokens were added up",
        )
    return total.reshape(()), weight


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{value!r:.40} of type {type(value).__name__}"
