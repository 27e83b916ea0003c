"""One training step, top to bottom. Read this first; `parallel/engine/declared.py` has the code of each part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.host_copy import HostCopy
from paceline.comm.step_times import OPTIMIZER, Timed
from paceline.nouns.errors import LossError
from paceline.parallel.engine.declared import DeclaredEngine
from paceline.parallel.loss_scale import can_leave_out, left_out_if
from paceline.parallel.observer import REDUCE, UPDATE
from paceline.parallel.step_stats import StepStats


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        stats: the numbers that all ranks know.
        gradient_norm: the norm of the gradients before clipping; None where nothing is clipped.
        is_skipped: True if gradients have overflown under fp16: the parameters are unchanged.
    """

    stats: StepStats
    gradient_norm: float | None
    is_skipped: bool = False


def train_step(
    microbatches: Sequence[Any],
    parallel: DeclaredEngine,
    optimizer: torch.optim.Optimizer,
    is_stopping: bool = False,
    longest: int = 1,
) -> StepResult:
    """Run forward, backward, reduce, check, change, clip, update. Update nothing if the loss is not finite.

    Under fp16 nothing is updated, either, where gradients overflow on some rank.

    Args:
        microbatches: the micro-batches of this rank.
        parallel: the engine, with the strategies of the plan.
        optimizer: the optimizer of this rank's parameters.
        is_stopping: True if this rank was asked to stop.
        longest: the most micro-batches that any rank has.

    Raises:
        LossError: the loss has the wrong form or is not finite, or nothing counted; or the gradient's norm is
            not finite.
        WorkloadError: the workload's before_update does more than change gradients.
    """
    optimizer.zero_grad(set_to_none=True)
    parallel.model.zero_grad(set_to_none=True)  # parameters that the optimizer does not have count in the norm too
    parallel.forward_backward(microbatches, is_stopping, longest)
    observer = parallel.observers
    if parallel.is_observed:
        observer.phase_begins(REDUCE)
    stats = parallel.reduce_gradients()
    has_overflown = parallel.loss_scale is not None and parallel.unscale_gradients()
    updated = parallel.placed.updated()
    if parallel.is_observed:
        observer.gradients_reduced(updated)
    # Before the update, and on all ranks from the same sums: all raise, and the parameters stay as they were.
    check_finite(stats)
    if parallel.loss_scale is not None:
        parallel.loss_scale.update(has_overflown)
        if has_overflown:
            return StepResult(stats, None, is_skipped=True)
    with Timed(OPTIMIZER):
        if parallel.change_gradients is not None:
            parallel.change_gradients(updated)
        norm = parallel.norm
        # After the sum over all ranks: the norm of a rank's own gradient is another.
        clipped = None if parallel.clip_norm is None else parallel.clip(parallel.clip_norm)
        is_guarded = clipped is not None and can_leave_out(optimizer, parallel.device)
        if clipped is not None and not is_guarded:
            norm = finite_norm(clipped)
        if parallel.is_observed:
            observer.phase_begins(UPDATE)
        if clipped is not None and is_guarded:
            norm = _update_if_finite(parallel, optimizer, clipped)
        else:
            parallel.update(optimizer)
    if parallel.is_observed:
        observer.parameters_updated(updated, optimizer)
    return StepResult(stats, norm)


def check_finite(stats: StepStats) -> None:
    """Raise LossError when some rank's loss is NaN or infinite, or the whole batch weighs nothing."""
    if stats.bad_ranks:
        plural = "s" if len(stats.bad_ranks) > 1 else ""
        error = LossError(
            "the loss should be a finite number",
            f"it is NaN or infinite on rank{plural} {', '.join(map(str, stats.bad_ranks))}; "
            "the parameters were left as they were",
            "lower the learning rate, set clip_norm, or look for bad samples in this batch",
        )
        raise error.at(rank=stats.bad_ranks[0])
    if stats.weight <= 0:
        raise LossError(
            "can't take the mean loss of a batch",
            f"its weights add up to {stats.weight:g}",
            "make sure that every batch has something to predict",
        )


def _update_if_finite(parallel: DeclaredEngine, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> float:
    """Give the device an update that it leaves out where the norm is not finite, and then read the norm.

    Raises:
        LossError: it is not finite.
    """
    copy = HostCopy(1, norm.dtype, parallel.device)
    copy.begin(lambda: norm.reshape(1))
    with left_out_if(optimizer, ~torch.isfinite(norm)):
        parallel.update(optimizer)
    return _checked_norm(parallel.peer_values.norm(copy))


def finite_norm(norm: torch.Tensor) -> float:
    """Read the norm of the gradient: once, as the host waits for the device each time.

    Raises:
        LossError: it is not finite.
    """
    return _checked_norm(float(norm))


def _checked_norm(read: float) -> float:
    if not math.isfinite(read):
        raise LossError(
            "the gradient's norm should be a finite number",
            f"it is {read} although the loss is finite; the parameters were left as they were",
            "lower the learning rate, use precision float32, or look for samples at which the loss has no gradient",
        )
    return read
