"""Run a step on one rank: forward and backward passes over its micro-batches, one after another.

Needs: the loss as (sum, weight).
Promises: with one micro-batch the backward pass is that of the global batch's mean loss, as in a plain loop, so hooks
and code in the backward pass see what they see there. With several, gradients are those of the sum until the whole
batch's weight is known.
Traffic: none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.pytree import tensors_in
from paceline.comm.step_times import BACKWARD, FORWARD, Timed
from paceline.nouns.errors import LossError, PacelineError
from paceline.parallel.replicate.replicate_strategy import no_scale

_SHAPES = 6  # how many are named in a note


@dataclass(frozen=True, slots=True)
class Divisor:
    """The division that makes gradients of loss sums those of the mean over the global batch, before or after.

    Attributes:
        after: a function that waits for the factor of the summed gradients, and returns it; None where they are the
            mean's.
        before: a function that waits for the global batch's weight, by which the loss is divided before its backward
            pass; None where the first backward pass comes before it is known.
        scale: the factor of the loss in backward passes, under fp16.
    """

    after: Callable[[], torch.Tensor | None] = no_scale
    before: Callable[[], torch.Tensor | float] | None = None
    scale: float = 1.0

    @property
    def is_known(self) -> bool:
        """Return True if the weight is known before the first backward pass."""
        return self.before is not None

    def root(self, total: torch.Tensor) -> torch.Tensor:
        """Return the root of the backward pass: this rank's share of the mean loss, or the sum; times the scale."""
        if self.before is not None:
            weight = self.before()
            if isinstance(weight, torch.Tensor):
                weight = weight.to(torch.promote_types(total.dtype, torch.float32))
            total = total / weight
        if self.scale != 1.0:
            total = total.to(torch.promote_types(total.dtype, torch.float32)) * self.scale
        return total


@dataclass(frozen=True, slots=True)
class StepHooks:
    """Calls by which the strategies follow a step while it runs.

    Attributes:
        add: a function that takes a micro-batch's loss sum and weight.
        before_backward: a function called before each backward pass, with whether it is the last and whether it is
            padding.
        after_forwards: a function called when the last forward pass is done.
        divisor: the divisor of the losses.
    """

    add: Callable[[torch.Tensor, torch.Tensor | float], None]
    before_backward: Callable[[bool, bool], None]
    after_forwards: Callable[[], None]
    divisor: Divisor = field(default_factory=Divisor)


def forward_backward(
    loss: Callable[[Any], Any], microbatches: Sequence[Any], hooks: StepHooks, padding: int = 0
) -> None:
    """Add up the gradients of the loss sum over `microbatches`; a rank without any still takes part.

    Args:
        loss: a function that returns the loss of one micro-batch, with the model in it.
        microbatches: this rank's micro-batches.
        hooks: the calls by which the strategies follow the step.
        padding: the number of micro-batches at the end that only keep step with ranks that have more: they count
            nothing.

    Raises:
        LossError: the loss has the wrong form.
    """
    for number, batch in enumerate(microbatches):
        with Timed(FORWARD):
            total, weight = checked_loss(_called(loss, batch, f"micro-batch {number + 1} of {len(microbatches)}"))
        if not total.requires_grad:
            raise LossError(
                "the loss should depend on the model's parameters",
                "no gradient leads from it to them",
                "leave out .detach(), torch.no_grad() and numpy between the model and the loss, and return a tensor",
            )
        is_last = number == len(microbatches) - 1
        is_padding = number >= len(microbatches) - padding
        if is_padding:
            total = torch.where(torch.isfinite(total), total, 0.0) * 0.0  # infinity times 0 would be NaN
        else:
            hooks.add(total.detach(), weight)
        # Before the last backward pass: what the hook sends travels while it runs.
        if is_last:
            hooks.after_forwards()
        hooks.before_backward(is_last, is_padding)
        root = hooks.divisor.root(total)
        with Timed(BACKWARD):
            root.backward()  # type: ignore[no-untyped-call]
    # A rank without samples has no forward pass, but the others wait for its numbers.
    if not microbatches:
        hooks.after_forwards()


def _called(loss: Callable[[Any], Any], batch: Any, which: str) -> Any:
    """Return the loss of a micro-batch; an error of the user's code gets a note of the shapes it was given."""
    try:
        return loss(batch)
    except Exception as error:
        if not isinstance(error, PacelineError):
            tensors = tensors_in(batch)[:_SHAPES]
            shapes = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in tensors)
            error.add_note(f"paceline: this is the loss of {which}, with tensors of shape {shapes or 'none'}")
        raise


def checked_loss(result: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the loss sum and its weight, without a gradient path through the weight.

    Raises:
        LossError: `result` is not a pair of a scalar tensor and a positive number.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise LossError(
            "the loss should return (sum, weight)",
            f"it returned {_shown(result)}: {_lack(result)}",
            "return the losses added up and their number: cross_entropy(..., reduction='sum'), labels.numel()",
        )
    total, weight = result
    if isinstance(total, int | float):
        raise LossError(
            "the loss's sum should be one floating-point number in a tensor",
            f"it is {_shown(total)}: a plain number has no gradient",
            "return the tensor itself, without .item() or float()",
        )
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise LossError(
            "the loss's sum should be one floating-point number in a tensor",
            f"it is {_shown(total)}",
            "add the losses up: losses.sum()",
        )
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise LossError(
                "the loss's weight should be one number",
                f"it is {_shown(weight)}",
                "return the sum and over how many it is, such as len(labels) or mask.sum()",
            )
        return total.reshape(()), weight.detach().reshape(())
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise LossError(
            "the loss's weight should be a number, 0 or more",
            f"it is {_shown(weight)}",
            "return how many samples or tokens were added up",
        )
    return total.reshape(()), weight


def _lack(result: Any) -> str:
    """Return the fault of a loss that is no pair."""
    if result is None:
        return "is its `return` missing?"
    if isinstance(result, torch.Tensor):
        return "a mean alone can't be split over ranks"
    if isinstance(result, int | float):
        return "a plain number has no gradient and no weight"
    if isinstance(result, list) and len(result) == 2:
        return "a tuple is wanted"
    if isinstance(result, tuple):
        return "that is no pair"
    return "that has no weight"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{value!r:.40} of type {type(value).__name__}"
