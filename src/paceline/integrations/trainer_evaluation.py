"""Evaluate for a Trainer: whole batches, shared out over the ranks, and what they predicted put together on each rank.

The loss is what transformers' is in one process: a mean over batches, weighted by their samples. No batch is cut, so it
does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_pt_utils import EvalLoopContainer, atleast_1d, find_batch_size

from paceline.comm.pytree import map_tensors
from paceline.integrations.trainer_loss import IGNORED
from paceline.train.loader import moved, opened, options_of
from paceline.train.loop_job import LoopJob
from paceline.train.seed import kept_random_state, seed_sample

Scored = tuple[Any, Any, Any]  # the loss, the logits and the labels of a batch; None where there is none


class Evaluated(NamedTuple):
    """What an evaluation found, on every rank.

    Attributes:
        loss: the mean; None without labels.
        predictions: arrays; None where they were not asked for.
        labels: arrays.
        samples: how many.
        batches: how many, over all ranks.
    """

    loss: float | None
    predictions: Any
    labels: Any
    samples: int
    batches: int


def evaluate(
    job: LoopJob,
    loader: DataLoader[Any],
    score: Callable[[dict[str, Any]], Scored],
    filters: bool,
    note: Callable[[], Any],
) -> Evaluated:
    """Evaluate every batch of a loader once, without gradients. Collective.

    Args:
        job: the models, and how the ranks share out the batches.
        loader: of whole batches, the same on every rank.
        score: returns loss, logits and labels of a batch.
        filters: leave batches out of the loss whose loss is not finite.
        note: is called after each batch.
    """
    modes = [(module, module.training) for module in job.model.modules()]
    job.model.eval()
    predictions, labels = EvalLoopContainer(padding_index=IGNORED), EvalLoopContainer(padding_index=IGNORED)
    sums = torch.zeros(4, dtype=torch.float64)  # loss, its samples, samples, batches
    try:
        with torch.no_grad():
            for batch, counts in _own_batches(job, loader):
                inputs = moved(batch, job.device, job.to_float64)
                rows = (find_batch_size(inputs) or 1) if counts else 0
                loss, logits, truth = score(inputs)
                sums += _sums(loss, rows, filters)
                _add(predictions, job, logits, rows)
                _add(labels, job, truth, rows)
                note()
    finally:
        for module, was_training in modes:
            module.training = was_training
    total, weight, samples, batches = job.all_reduce(sums).tolist()
    mean = total / weight if weight else None
    return Evaluated(mean, predictions.get_arrays(), labels.get_arrays(), round(samples), round(batches))


def _sums(loss: Any, rows: int, filters: bool) -> torch.Tensor:
    value = None if loss is None else float(loss.detach().mean())
    counts = value is not None and (not filters or math.isfinite(value))
    weight = rows if counts else 0
    return torch.tensor(
        [value * weight if weight and value is not None else 0.0, weight, rows, rows > 0], dtype=torch.float64
    )


def _add(container: EvalLoopContainer, job: LoopJob, value: object, rows: int) -> None:
    if value is None:
        return
    container.add(map_tensors(value, lambda tensor: _gathered(job, atleast_1d(tensor)[:rows])))
    container.to_cpu_and_numpy()  # or the predictions of all batches would fill a GPU


def _gathered(job: LoopJob, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in their order; rows of other lengths are padded as transformers does."""
    if job.data_size == 1:
        return tensor
    lengths = torch.tensor(tensor.shape[1:], dtype=torch.int64, device=tensor.device)
    longest = job.all_reduce(lengths, "max").tolist() if len(lengths) else []
    padded = tensor.new_full((len(tensor), *longest), IGNORED)
    padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return job.all_gather(padded)


def _own_batches(job: LoopJob, loader: DataLoader[Any]) -> Iterator[tuple[object, bool]]:
    """Yield this rank's batches, and whether each counts: a rank with fewer takes one again, to keep pace."""
    part, parts = job.data_rank, job.data_size
    if parts == 1:
        for batch in loader:
            yield batch, True
    elif isinstance(loader.dataset, IterableDataset):
        yield from _of_stream(loader, part, parts)
    else:
        yield from _of_items(job, loader, part, parts)


def _of_items(job: LoopJob, loader: DataLoader[Any], part: int, parts: int) -> Iterator[tuple[object, bool]]:
    sampler: Any = loader.batch_sampler
    with kept_random_state():  # a sampler that draws gives all ranks the same batches
        seed_sample(job.seed, 0)
        batches = list(sampler)
    own = batches[part::parts]
    counting = len(own)
    rounds = -(-len(batches) // parts)
    own += batches[:1] * (rounds - counting)
    mine = opened(loader.dataset, batch_sampler=own, collate_fn=loader.collate_fn, **options_of(loader))
    for number, batch in enumerate(mine):
        yield batch, number < counting


def _of_stream(loader: DataLoader[Any], part: int, parts: int) -> Iterator[tuple[object, bool]]:
    """Yield from a stream, which every rank reads."""
    batches: list[Any] = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == parts:
            yield batches[part], True
            batches = []
    if batches:
        yield batches[min(part, len(batches) - 1)], part < len(batches)
