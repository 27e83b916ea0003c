"""Begin the worker processes of a DataLoader, so that none outlives its rank."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import Any

Begin = Callable[[int], Any]


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
    if begin is not None:
        begin(worker)
