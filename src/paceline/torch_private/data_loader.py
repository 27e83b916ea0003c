"""Batches that the worker processes of a DataLoader have finished; the public iterator only waits for the next one."""

from __future__ import annotations

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import _IterableDatasetStopIteration


def batches_at_hand(batches: object) -> tuple[int, dict[int, object]] | None:
    """Return the number of an iterator's next batch, and the results of its workers by their number.

    Returns:
        None unless it has worker processes and a thread that pins memory. Without that thread the queue is one between
        processes, and can't be read.
    """
    tasks = getattr(batches, "_task_info", None)  # by number: a worker, and what it made if it came too early
    first = getattr(batches, "_rcvd_idx", None)
    waiting = getattr(getattr(batches, "_data_queue", None), "queue", None)  # filled by the thread that pins memory
    if tasks is None or first is None or waiting is None:
        return None
    batches_by_number = dict(waiting.copy())
    batches_by_number.update((number, task[1]) for number, task in tasks.items() if len(task) == 2)
    return first, batches_by_number


def is_batch(result: object) -> bool:
    """Return whether the result of a worker is a batch, and neither an error nor the end of its samples."""
    return not isinstance(result, ExceptionWrapper | _IterableDatasetStopIteration)
