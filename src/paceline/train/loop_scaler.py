"""torch.amp.GradScaler in a loop of the user's own: it finds the same overflows on every rank.

A GradScaler looks at the gradients of this rank before the optimizer's step, in which the ranks' gradients would be
summed: one that finds an overflow alone would leave the update out alone, and the others would wait for it. So
gradients are summed before it looks, and where ranks have different parts of them, they agree on what was found.

`_unscale_grads_` and `_per_optimizer_states` are torch's, private, and what its ShardedGradScaler changes and reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from paceline.nouns.errors import UsageError
from paceline.parallel.optimizer_parts import groups_of

if TYPE_CHECKING:
    from paceline.train.loop_job import LoopJob

_FACTOR = "_paceline_loss_scale"  # of a tensor that a scaler has returned


def factor_of(loss: torch.Tensor) -> torch.Tensor | None:
    """Return by what a scaler has multiplied a loss; None if none has."""
    return getattr(loss, _FACTOR, None)


class LoopScaler:
    """Watches the calls of a GradScaler that `paceline.prepare` was handed.

    Args:
        scaler: whose methods are replaced by those of this object.
        job: sums gradients and counts steps.
    """

    def __init__(self, scaler: torch.amp.GradScaler, job: LoopJob) -> None:
        self.scaler = scaler
        self.job = job
        self.of_torch = {name: getattr(scaler, name) for name in ("scale", "step", "_unscale_grads_")}
        for name in self.of_torch:
            setattr(scaler, name, getattr(self, name.strip("_")))

    def scale(self, outputs: Any) -> Any:
        """Return scaled losses, from which `job.backward` can tell the losses."""
        scaled = self.of_torch["scale"](outputs)
        if isinstance(scaled, torch.Tensor) and self.scaler.is_enabled():
            setattr(scaled, _FACTOR, self.scaler._scale.to(scaled.device))  # type: ignore[union-attr]
        return scaled

    def unscale_grads(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: bool
    ) -> Any:
        """Sum the optimizer's gradients over the ranks, unscale them, and agree on whether one is infinite or NaN."""
        number = self.job.number_of(optimizer)
        if number is None:
            return self.of_torch["_unscale_grads_"](optimizer, inverse, found, allow_fp16)
        self.job.sum_gradients(number)
        parameters = [parameter for group in groups_of(optimizer) for parameter in group["params"]]
        has_overflown = self.job.parallel.unscale(parameters, float(inverse))
        return {found.device: torch.full_like(found, float(has_overflown))}

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        """Update, or leave it out on every rank; that ends the step too."""
        result = self.of_torch["step"](optimizer, *arguments, **named)
        number = self.job.number_of(optimizer)
        if number is not None and self.scaler.is_enabled() and self.has_found(optimizer):
            self.job.skip_update()
        return result

    def has_found(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if a gradient of the optimizer is infinite or NaN."""
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(float(value) for value in found.values())

    def check_unscaled(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """Raise UsageError if the optimizer's gradients are still those of the scaled loss."""
        if self.scaler.is_enabled() and self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            raise UsageError(
                f"{call} needs the gradients of the loss",
                "they are those of the scaled loss",
                f"call scaler.unscale_(optimizer) before {call}",
            )
