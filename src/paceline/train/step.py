"""One training step, top to bottom. Read this first; `parallel/apply.py` says what each moment is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.nouns.errors import LossError
from paceline.parallel.apply import Parallel
from paceline.parallel.sums import Sums


class Outcome(NamedTuple):
    """What a step found."""

    sums: Sums
    gradient_norm: float | None


def train_step(
    microbatches: Sequence[Any],
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    is_stopping: bool,
) -> Outcome:
    """Forward, backward, reduce, check, clip, update. Nothing is updated when the loss is not finite.

    Raises:
        LossError: the loss has the wrong form or is not finite, or nothing counted.
    """
    optimizer.zero_grad(set_to_none=True)
    is_mean = parallel.forward_backward(microbatches, is_stopping)
    sums = parallel.reduce_gradients(is_mean)
    check_finite(sums)
    norm = None
    if clip_norm is not None:
        norm = clip(optimizer.param_groups, clip_norm)
    optimizer.step()
    return Outcome(sums, norm)


def check_finite(sums: Sums) -> None:
    """Raise LossError when some rank's loss is NaN or infinite, or the whole batch weighs nothing."""
    if sums.bad_ranks:
        error = LossError(
            "the loss should be a finite number",
            f"it is NaN or infinite on rank{'s' if len(sums.bad_ranks) > 1 else ''} "
            f"{', '.join(map(str, sums.bad_ranks))}; the parameters were left as they were",
            "lower the learning rate, set clip_norm, or look for bad samples in this batch",
        )
        raise error.at(rank=sums.bad_ranks[0])
    if sums.weight <= 0:
        raise LossError(
            "the mean loss of a batch",
            f"its weights add up to {sums.weight:g}",
            "make sure that every batch has something to predict",
        )


def clip(groups: Iterable[dict[str, Any]], clip_norm: float) -> float:
    """Scale all gradients so that their norm, over all parameters together, is at most `clip_norm`.

    Returns:
        The norm before clipping. Gradients are the global ones already, so every rank finds the same.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    norms = [p.grad.coalesce().values().norm() for p in sparse]
    norms.append(torch.nn.utils.get_total_norm([p.grad for p in dense]))
    total = torch.linalg.vector_norm(torch.stack([norm.to(torch.float64) for norm in norms]))
    torch.nn.utils.clip_grads_with_norm_(dense, clip_norm, total)
    for parameter in sparse:
        parameter.grad.mul_((clip_norm / (total + 1e-6)).clamp(max=1.0))
    return float(total)
