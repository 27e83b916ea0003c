"""Train one PyTorch model on many processes, and keep your own loop.

    >>> import torch
    >>> import paceline
    >>> def loss(model, batch):
    ...     inputs, targets = batch
    ...     return torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum"), len(targets)
    >>> workload = paceline.Workload(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=loss,
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1)),
    ...     batch_size=16,
    ... )
    >>> job = paceline.distribute(workload)
    >>> for batch in job.batches():
    ...     mean = job.step(batch)
    >>> job.save("out")

`python train.py` runs one process and `paceline run -n 2 train.py` two, with the same losses. `--plan` selects another
parallelism. `Workload` declares what to train, `distribute` returns this process's `Job`, and every error that Paceline
raises on purpose is a `PacelineError`. A `Sink` receives a job's events; `TensorBoard` is one.

`prepare` takes the model, optimizer and DataLoader of a plain PyTorch loop in place of a workload, and returns a
`LoopJob`. `launch` calls a function on several ranks, from a notebook.

To communicate without a workload, call the collectives, as in MPI: `init`, `rank`, `size`, `local_rank`, `local_size`,
`cross_rank`, `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `barrier`, `shutdown`,
`is_initialized`. With `grad=True` gradients flow through them. `allreduce`, `allgather`, `reducescatter` and `alltoall`
are other names of the same; the reduction of two of them is always written.

The project's README.md has a complete example and the plans, docs/reference/ all that a file may call;
`paceline --help` lists the commands.
"""

from __future__ import annotations

import importlib
import types

TYPE_CHECKING = False  # not imported: a command can't catch Ctrl-C before this file has run, and typing takes longest
if TYPE_CHECKING:
    from typing import Any

    from paceline.comm.api import (
        all_gather,
        all_reduce,
        all_to_all,
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        cross_rank,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        reduce_scatter,
        reducescatter,
        shutdown,
        size,
    )
    from paceline.nouns.errors import PacelineError
    from paceline.nouns.sink import Sink
    from paceline.nouns.workload import Workload
    from paceline.run.notebook import launch
    from paceline.sinks.tensorboard import TensorBoard
    from paceline.train.job import Job, distribute
    from paceline.train.loop_job import LoopJob, prepare

__version__ = "0.1.0"

# Each name is loaded when it is first used, so that `import paceline` does not import torch.
_API = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "cross_rank",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "reducescatter",
    "shutdown",
    "size",
]
_HOME = {
    "Workload": "paceline.nouns.workload",
    "PacelineError": "paceline.nouns.errors",
    "Job": "paceline.train.job",
    "distribute": "paceline.train.job",
    "LoopJob": "paceline.train.loop_job",
    "prepare": "paceline.train.loop_job",
    "Sink": "paceline.nouns.sink",
    "TensorBoard": "paceline.sinks.tensorboard",
    **{word: "paceline.comm.api" for word in _API},
}

__all__ = [
    "Job",
    "LoopJob",
    "PacelineError",
    "Sink",
    "TensorBoard",
    "Workload",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "cross_rank",
    "distribute",
    "init",
    "is_initialized",
    "launch",
    "local_rank",
    "local_size",
    "prepare",
    "rank",
    "reduce_scatter",
    "reducescatter",
    "shutdown",
    "size",
]


class _Launch(types.ModuleType):
    """The package `paceline.launch`, which has the name of a function, too: called, it is `run.notebook.launch`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("paceline.run.notebook").launch(*arguments, **options)


# The import system sets the name to the package, whatever else this file says; the package itself is a docstring.
importlib.import_module("paceline.launch").__class__ = _Launch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"paceline has no {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List the public names, for tab completion and `dir`, without this file's imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
