"""Write a trained model as transformers or peft reads it: ranks put tensors together, rank 0 writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.nouns.errors import CheckpointError, PacelineError, UsageError, how_to_write
from paceline.nouns.patching import patched
from paceline.train.loop_job import LoopJob
from paceline.train.whole_state import whole_state

WEIGHTS = "model.safetensors"


def prefix_of(job: LoopJob, model: torch.nn.Module, call: str) -> str:
    """Return what the names of a model begin with in the job.

    Args:
        job: of `paceline.prepare`.
        model: one of its models.
        call: is named in the error.

    Raises:
        UsageError: the job has no such model.
    """
    for prefix, each in job.objects.prefixed().items():
        if each is model:
            return prefix
    raise UsageError(
        f"{call} saves a model that paceline.prepare was handed",
        f"this {type(model).__name__} is none of the job's",
        "hand in the same object, such as that of get_peft_model",
    )


def save_model(
    job: LoopJob, model: torch.nn.Module, folder: str | Path, others: Callable[[Path], object] = lambda path: None
) -> None:
    """Write one of the models of a loop, whole, under every plan. Collective.

    A model of transformers is written by its `save_pretrained`, as `from_pretrained` reads it; any other as
    `model.safetensors`. `job.save` writes a checkpoint, to go on from.

    Args:
        job: of `paceline.prepare`.
        model: one of those that `prepare` was handed.
        folder: is made if need be; files of the same names in it are replaced.
        others: writes what else belongs there, such as a tokenizer, to the folder that it is handed. Rank 0 calls it.

    Raises:
        UsageError: the job has no such model.
        CheckpointError: rank 0 can't write.
        PeerLostError: another rank has gone.

    Examples:
        >>> from paceline.integrations.saving import save_model
        >>> model = torch.nn.Linear(4, 1)
        >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> save_model(job, model, "model")
        >>> from safetensors.torch import load_file
        >>> sorted(load_file("model/model.safetensors"))
        ['bias', 'weight']
    """
    state = whole_state(job, prefix_of(job, model, "save_model"), lambda name: True)

    def write(path: Path) -> None:
        if callable(getattr(model, "save_pretrained", None)):
            model.save_pretrained(path, state_dict=state)  # type: ignore[operator]
        else:
            save_file(_without_ties(state), path / WEIGHTS, {"format": "pt"})
        others(path)

    write_folder(job, Path(folder), write)


@contextmanager
def names_of_parts() -> Iterator[None]:
    """Let libraries ask modules for the names of their state, which they do by `state_dict()`, though ranks have parts.

    The tensors of what they get are this rank's parts.
    """
    plain = torch.nn.Module.state_dict

    def state_dict(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return plain(module, *arguments, **{**named, "keep_vars": True})

    with patched(torch.nn.Module, state_dict=state_dict):
        yield


def _without_ties(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each tensor once: safetensors takes no tensor under two names."""
    found: dict[int, str] = {}
    for name, tensor in state.items():
        found.setdefault(id(tensor), name)
    return {name: state[name] for name in found.values()}


def write_folder(
    job: LoopJob, folder: Path, write: Callable[[Path], None], check: Callable[[Path], None] = lambda path: None
) -> None:
    """Have rank 0 write files to a folder, in which they appear when they are complete. Collective.

    Args:
        job: whose ranks wait, and all raise where rank 0 fails.
        folder: is made if need be; files of the same names are replaced.
        write: writes to the folder that it is handed.
        check: raises a PacelineError where the folder should not be written to.
    """
    failure = None
    if job.rank == 0:
        try:
            check(folder)
            _write(folder, write)
        except PacelineError as error:
            failure = error
        except OSError as error:
            failure = CheckpointError(
                f"can't save the model to {folder}",
                f"it can't be written ({error.strerror or type(error).__name__})",
                how_to_write(error, "for the model"),
            )
    told = _of_rank_0(job, failure)
    if failure is not None:
        raise failure
    if told is not None:
        raise told


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    # Beside the target, hence on the same file system. By process, as two jobs may run.
    partial = folder.parent / f".partial-{folder.name}-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        write(partial)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if folder.is_dir():
            _move_files(partial, folder)
        else:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_files(source: Path, folder: Path) -> None:
    """Move files to a folder that has others, weights first: what describes them comes when they are there."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.suffix != ".safetensors", str(path))):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


def _of_rank_0(job: LoopJob, failure: PacelineError | None) -> PacelineError | None:
    """Return rank 0's failure on every rank; None if it has none. Collective."""
    text = "" if failure is None else "\0".join((failure.asked, failure.found, failure.fix))
    answer = job.world.all_gather_text(text)[0]
    if not answer:
        return None
    asked, found, fix = answer.split("\0")
    return CheckpointError(asked, found, fix)
