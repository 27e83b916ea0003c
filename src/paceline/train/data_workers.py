"""The worker processes of a DataLoader: none outlives its rank, and what they have made can be asked for."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

Begin = Callable[[int], Any]
_KILLED_S = 0.5  # a process that is killed closes its connections before its children get another parent


def ends_with_rank(begin: Begin | None = None, context: Any = None) -> Begin | None:
    """Return a `worker_init_fn`: a worker whose rank has been killed already ends at once.

    torch's worker ends when its parent is no longer the process that it found at its start. Where the rank is killed
    between the two, it finds the process that inherits orphans, and waits for ever (torch 2.13).

    Args:
        begin: the user's `worker_init_fn`, called after the check.
        context: the loader's `multiprocessing_context`; Python's own where None.
    """
    if (context or multiprocessing).get_start_method() == "forkserver":
        return begin  # a worker's parent is that server, which ends with the rank
    return partial(_begin, os.getpid(), begin)


def _begin(rank_process: int, begin: Begin | None, worker: int) -> None:
    if os.getppid() != rank_process:
        os._exit(1)
    sys.excepthook = partial(_show_unless_alone, rank_process, sys.excepthook)
    if begin is not None:
        begin(worker)


def _show_unless_alone(
    rank_process: int, show: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """Show an error of a worker's thread, unless it is that the rank, which was killed, fetches a batch no longer."""
    if issubclass(kind, ConnectionError | EOFError):
        time.sleep(_KILLED_S)
        if os.getppid() != rank_process:
            return
    show(kind, error, trace)


_Batches = TypeVar("_Batches")


class AtHand:
    """Says whether a DataLoader can give its next batches without a wait.

    torch has no call for it, so this looks into the iterator of a loader with worker processes and pinned memory
    (torch 2.11 to 2.13). Where that is another, nothing is ever at hand.

    Args:
        count: how many batches of the DataLoader are wanted at a time.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.batches: Any = None

    def of(self, batches: _Batches) -> _Batches:
        """Look at a loader's iterator from here on; return it."""
        self.batches = batches
        return batches

    def has_next(self) -> bool:
        """True if the next batches are there; False too if one of them is an error or the end."""
        tasks = getattr(self.batches, "_task_info", None)  # by number: a worker, and what it made if it came too early
        first = getattr(self.batches, "_rcvd_idx", None)
        # Filled by the thread that pins memory. Without that thread it is a queue between processes, and can't be read.
        waiting = getattr(getattr(self.batches, "_data_queue", None), "queue", None)
        if tasks is None or first is None or waiting is None:
            return False
        there = dict(waiting.copy())
        there.update((number, task[1]) for number, task in tasks.items() if len(task) == 2)
        return all(_is_made(there.get(number)) for number in range(first, first + self.count))


def _is_made(batch: Any) -> bool:
    return batch is not None and not isinstance(batch, ExceptionWrapper | _IterableDatasetStopIteration)
