"""torch.amp.GradScaler in a loop of the user's own: it finds the same overflows on every rank.

A GradScaler looks at the gradients of this rank before the optimizer's step, in which the ranks' gradients would be
summed: one that finds an overflow by itself would skip the update by itself, and the others would wait for it. So
gradients are summed before it looks, and where ranks have different parts of them, they agree on what was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.nouns.errors import UsageError
from paceline.parallel.optimizer_parts import groups_of
from paceline.torch_private.optim import UNSCALE, found_infinite, is_scaled, replace_methods, scale_of

if TYPE_CHECKING:
    from paceline.train.loop_job import LoopJob

_FACTOR = "_paceline_loss_scale"  # of a tensor that a scaler has returned


def factor_of(loss: torch.Tensor) -> torch.Tensor | None:
    """Return the factor by which a scaler has multiplied a loss; None if none has."""
    return getattr(loss, _FACTOR, None)


class LoopScaler:
    """Watches the calls of a GradScaler that `paceline.prepare` was handed.

    Args:
        scaler: the scaler whose methods are replaced by those of this object.
        job: the job, which sums gradients and counts steps.
    """

    def __init__(self, scaler: torch.amp.GradScaler, job: LoopJob) -> None:
        self.scaler = scaler
        self.job = job
        replacements: dict[str, Callable[..., Any]] = {
            "scale": self.scale,
            "step": self.step,
            UNSCALE: self.unscale_grads,
        }
        self.of_torch = {name: getattr(scaler, name) for name in replacements}
        replace_methods(scaler, replacements)

    def scale(self, outputs: Any) -> Any:
        """Return scaled losses, from which `job.backward` can tell the losses."""
        scaled = self.of_torch["scale"](outputs)
        if isinstance(scaled, torch.Tensor) and self.scaler.is_enabled():
            setattr(scaled, _FACTOR, scale_of(self.scaler).to(scaled.device))
        return scaled

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: bool
    ) -> Any:
        """Sum the optimizer's gradients over the ranks, unscale them, and agree on whether one is infinite or NaN."""
        number = self.job.objects.number_of(optimizer)
        if number is None:
            return self.of_torch[UNSCALE](optimizer, inverse, found, allow_fp16)
        self.job.sum_gradients(number)
        parameters = list(itertools.chain.from_iterable(group["params"] for group in groups_of(optimizer)))
        has_overflown = self.job.parallel.unscale(parameters, float(inverse))
        return {found.device: torch.full_like(found, float(has_overflown))}

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        """Update, or leave it out on every rank; that ends the step too."""
        result = self.of_torch["step"](optimizer, *arguments, **named)
        number = self.job.objects.number_of(optimizer)
        if number is not None and self.scaler.is_enabled() and self.has_found(optimizer):
            self.job.skip_update()
        return result

    def has_found(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a gradient of the optimizer is infinite or NaN."""
        return found_infinite(self.scaler, optimizer)

    def check_unscaled(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """Raise UsageError if the optimizer's gradients are still those of the scaled loss."""
        if self.scaler.is_enabled() and is_scaled(self.scaler, optimizer):
            raise UsageError(
                f"{call} needs the gradients of the loss",
                "they are those of the scaled loss",
                f"call scaler.unscale_(optimizer) before {call}",
            )
