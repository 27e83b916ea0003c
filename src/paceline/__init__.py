"""Paceline trains one PyTorch model on many devices; the loop stays yours.

A folder is a room. Commands are rooms (`plan`, `run`, `bench`, `demo`); behind them `launch`, `train`, `parallel`,
`checkpoint` and `comm` do the work; `nouns` are the things they all speak of. A room imports only rooms
below it: ARCHITECTURE.md draws it, `scripts/check` holds it. The first code to read is `train/step.py`.

The names below are loaded when first used, so that `import paceline` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm.words import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        cross_rank,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        reduce_scatter,
        shutdown,
        size,
    )
    from paceline.nouns.errors import PacelineError
    from paceline.nouns.workload import Workload
    from paceline.train.job import Job, distribute

__version__ = "0.1.0"

_WORDS = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "cross_rank",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
]
_HOME = {
    "Workload": "paceline.nouns.workload",
    "PacelineError": "paceline.nouns.errors",
    "Job": "paceline.train.job",
    "distribute": "paceline.train.job",
    **{word: "paceline.comm.words" for word in _WORDS},
}

__all__ = [
    "Job",
    "PacelineError",
    "Workload",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "cross_rank",
    "distribute",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"paceline has no {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
