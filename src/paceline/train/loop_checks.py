"""Refuse, or report, objects and values of a user's own loop that can't be right: models, losses, weights, batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline.nouns.errors import LossError, UsageError, WorkloadError
from paceline.parallel.effects import GRAPHS, REPLICAS, SHARDS, check_effects
from paceline.train.agree import check_same_data_everywhere
from paceline.train.loop_loader import first_of
from paceline.train.loop_objects import LoopObjects, updated_by

if TYPE_CHECKING:
    from paceline.train.loop_job import LoopJob
    from paceline.train.taken_batches import Found


def check_effects_of(objects: LoopObjects, placement: str, frozen: Mapping[str, torch.nn.Module]) -> None:
    """Raise WorkloadError if the plan would lose what models or optimizers do beside their arithmetic.

    Args:
        objects: the objects of the loop.
        placement: the placement of trained models under the plan.
        frozen: the models of which each rank keeps a part, by the prefix of their names.
    """
    if placement not in (SHARDS, GRAPHS) and not frozen:
        check_effects(objects.model, objects.optimizers, placement)
        return
    trained = objects.trained() if placement in (SHARDS, GRAPHS) else {}
    for prefix, model in objects.prefixed().items():
        placement_of_model = REPLICAS
        if prefix in frozen:
            placement_of_model = SHARDS
        elif prefix in trained:
            placement_of_model = placement
        check_effects(model, objects.optimizers, placement_of_model)


def look_at_objects(job: LoopJob) -> None:
    """Warn of likely mistakes: data by rank, batches smaller than the ranks, schedulers that were not handed in."""
    loader = job.objects.loader
    if loader is not None and job.size > 1:
        check_same_data_everywhere(*first_of(loader, job.seed), job.world, job.notice)
    if loader is not None and loader.batch_size is not None and loader.batch_size < job.data_size:
        job.notice(
            f"batches of {loader.batch_size} leave {job.data_size - loader.batch_size} of {job.data_size} ranks "
            "without samples; the loader's batch_size is that of all ranks together"
        )
    scheduled = [optimizer for optimizer in job.objects.optimizers if "initial_lr" in optimizer.param_groups[0]]
    if job.run_dir is not None and scheduled and not job.objects.schedulers:
        job.notice(
            f"no checkpoint will have the state of the scheduler of {type(scheduled[0]).__name__}, and a resumed "
            "job would begin its schedule anew: hand it to paceline.prepare too"
        )


def check_as_handed_in(job: LoopJob, before: Mapping[torch.nn.Parameter, torch.dtype]) -> None:
    """Raise WorkloadError where a model was changed between `prepare` and the first step.

    Args:
        job: the job of the models.
        before: the dtypes of the parameters that it was handed.
    """
    updated: set[torch.nn.Parameter] = set()
    for optimizer in job.objects.optimizers:
        updated.update(updated_by(optimizer, job.named()).values())
    for name, parameter in job.named().items():
        found = ""
        if before.get(parameter, parameter.dtype) != parameter.dtype:
            found = f"{name} is of {parameter.dtype} now, and was of {before[parameter]}"
        elif parameter not in before and parameter.requires_grad and parameter not in updated:
            found = f"{name} is another parameter now, which no optimizer updates and each rank has by itself"
        if found and job.mesh.places == 1:  # with `tensor` the first call of a model has split it
            raise WorkloadError(
                "the models should be as they were handed to paceline.prepare",
                found,
                "convert models, and replace their layers, before the optimizer is made",
            ).at(rank=job.rank, step=job.step_number + 1)


def check_known_weight(job: LoopJob, found: Found, weight: Any) -> None:
    """Raise UsageError where ranks have different shares of the batches that a loss without a weight may be of."""
    assert job.cut is not None or not found.batches
    if job.cut is None or not job.taken_batches.is_ahead or not found.batches or job.data_size == 1:
        return
    keeps_pace = {batch.part.keeps_pace for batch in found.batches}
    if weight is not None and (len(keeps_pace) == 1 or not found.is_one):
        return
    has_one_size = job.taken_batches.has_one_size and not job.cut.has_short_batch()
    if has_one_size or (found.is_told and len(keeps_pace) == 1 and (found.is_one or len(found.batches) == 1)):
        return
    raise UsageError(
        "a loss should have the weight of its batch",
        "the loop has taken several batches, which are not equally large, and it can't be told of which the loss is"
        if len(found.batches) == 1
        else "the loss is of several batches, which are not equally large",
        "call job.backward(loss, weight=len(inputs)) for each batch's own loss, with the number of its samples on "
        "this rank, or write drop_last=True in the loader; for one mean over two batches the weight is "
        "len(first) + len(second)",
    )


def no_weight(has_loader: bool) -> UsageError:
    """Return the error of a loss that has no batch and no weight."""
    reason = "the loop has no batch of the loader just now" if has_loader else "paceline.prepare was handed no loader"
    return UsageError(
        "job.backward needs to know over how many samples the loss is a mean",
        reason,
        "write job.backward(loss, weight=len(batch)), with the number of this rank's samples",
    )


def no_score(model: Any, batch: Any) -> dict[str, Any]:
    """Raise UsageError: an evaluation has no function that scores a batch."""
    raise UsageError(
        "job.evaluate needs a function that scores a batch",
        "score was left out, and paceline.prepare is handed no loss",
        "write job.evaluate(data, score), where score(model, batch) returns a dict of (sum, weight)",
    )


def check_share(share: Any) -> None:
    """Raise LossError unless it is a number above 0."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
        raise LossError(
            "the share of a loss should be a number above 0",
            f"it is {share!r:.60}",
            "write by what the mean was multiplied: job.backward(loss / 4, share=1 / 4)",
        )


def checked_weight(weight: Any) -> torch.Tensor | float:
    """Return the weight of a loss.

    Raises:
        LossError: it is no number, or below 0.
    """
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise LossError(
            "the weight of a loss should be a number, 0 or more",
            f"it is {weight!r:.60}",
            "write over how many samples or tokens the loss is a mean",
        )
    return weight
