"""Check before the first step that all ranks have the same model, data and checkpoint, and say where they differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MANIFEST, REPLACED, list_checkpoints, step_of
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, PeerLostError, WorkloadError


class FailedTogetherError(PeerLostError):
    """Another rank has failed in a call that all ranks make, and all of them leave it."""


def fail_together(call: str, error: Exception | None, comm: AxisComm) -> None:
    """Raise this rank's error, or one that names the first rank that has one: none waits for it. Collective.

    Args:
        call: the name of the call that all ranks make.
        error: the error of this rank; None: it has none.
        comm: the communicator of the ranks, which call this after work that each does by itself.

    Raises:
        FailedTogetherError: another rank has failed.
    """
    rows = comm.aside().all_gather(torch.tensor([int(error is not None)]))
    if error is not None:
        raise error
    for rank, row in zip(comm.peers, rows, strict=True):
        if int(row):
            raise FailedTogetherError(
                f"{call} should be done by all ranks", f"rank {rank} has failed in it", "look at that rank's error"
            )


def check_same_model_everywhere(model: torch.nn.Module, comm: AxisComm) -> None:
    """Raise WorkloadError on every rank unless names, shapes and dtypes are equal on all of them.

    Collective; nothing is sent when there is one rank.
    """
    if comm.size == 1:
        return
    lines = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    # Only the form is compared, not values: rank 0's values are sent to all afterwards.
    text = "\n".join(lines)
    # The texts are sent only where their digests differ.
    digests = [int(row) for row in comm.all_gather(torch.tensor([_seven_bytes(hashlib.sha256(text.encode()))]))]
    index = _first_other(digests)
    if index is None:
        return
    texts = comm.all_gather_text(text)
    of_first, of_other = _first_difference(texts[0].split("\n"), texts[index].split("\n"))
    raise WorkloadError(
        "all ranks should make the same model",
        f"rank {comm.peers[0]} has {of_first} where rank {comm.peers[index]} has {of_other}",
        "make the model without looking at the rank, the host or the time",
    )


def _seven_bytes(digest: Any) -> int:
    """Return the first seven bytes of a digest as a number that fits an int64, which has a sign."""
    return int.from_bytes(digest.digest()[:7], "big")


def _first_other(values: Sequence[int]) -> int | None:
    """Return the index of the first value that is not the first one; None if all are equal."""
    for index, value in enumerate(values):
        if value != values[0]:
            return index
    return None


def _first_difference(first: list[str], second: list[str]) -> tuple[str, str]:
    for line, other_line in itertools.zip_longest(first, second, fillvalue="nothing"):
        if line != other_line:
            return line, other_line
    raise AssertionError("the digests differ, so the texts do")


def check_same_data_everywhere(samples: int, first: object, comm: AxisComm, warn: Callable[[str], None]) -> None:
    """Raise WorkloadError unless all ranks' data sets are equally long; warn where their first samples differ.

    A sample may differ for a good reason that only the user knows, a length may not.

    Args:
        samples: the length of this rank's data set.
        first: the first sample of this rank's data set.
        comm: the axis over which the data is split.
        warn: a function that is told, on every rank, of samples that differ.
    """
    if comm.size == 1:
        return
    # The first sample stands for the data: to read all of it would take as long as an epoch.
    digest = hashlib.sha256()
    _digest(first, digest.update)
    rows = comm.all_gather(torch.tensor([samples, _seven_bytes(digest)]))
    lengths = [int(row[0]) for row in rows]
    if len(set(lengths)) > 1:
        raise WorkloadError(
            "all ranks should make the same data set",
            f"theirs hold {', '.join(map(str, lengths))} samples",
            "make it without looking at the rank, the host or the time",
        )
    digests = {int(row[1]) for row in rows}
    if len(digests) > 1:
        warn(
            "the ranks' data sets begin with different samples: is the data made of random numbers "
            "without a seed? Then no two ranks train on the same data"
        )


def check_same_start(resume: str | None, comm: AxisComm) -> None:
    """Raise CheckpointError on every rank unless all go on from the same checkpoint, or all from the start.

    A host that does not see the run directory would train from the start, and the others would wait for it.

    Args:
        resume: the checkpoint, or the folder of checkpoints, from which this rank is to go on.
        comm: the communicator of all ranks.
    """
    if comm.size == 1:
        return
    comm.barrier()  # no rank still writes what an earlier job of the same file saves
    steps = [int(row) for row in comm.all_gather(torch.tensor([_newest_step(resume)]))]
    index = _first_other(steps)
    if index is not None:
        raise CheckpointError(
            "all ranks should go on from the same checkpoint",
            f"rank {comm.peers[0]} {_step_in_words(steps[0])}, rank {comm.peers[index]} {_step_in_words(steps[index])}",
            "see that the run directory is one file system on all hosts, and start again",
        )


def _step_in_words(step: int) -> str:
    if step == -1:
        return "was told of no checkpoint"
    if step == 0:
        return "finds no checkpoint"
    return f"finds step {step}"


def _newest_step(resume: str | None) -> int:
    """Return the step of the newest checkpoint there; 0 if there is none, -1 if there need be none."""
    if resume is None:
        return -1
    path = Path(resume)
    # `resume` is one checkpoint, or the folder of a run's checkpoints. A copy that is being replaced counts as one.
    checkpoints = [path] if (path / MANIFEST).exists() else list_checkpoints(path)
    steps = [step_of(checkpoint.name.removeprefix(REPLACED)) for checkpoint in checkpoints]
    return max((step for step in steps if step is not None), default=0)


def _digest(sample: object, update: Callable[[bytes], None]) -> None:
    if isinstance(sample, torch.Tensor):
        update(sample.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(sample, dict):
        for key in sorted(sample, key=str):
            update(str(key).encode())
            _digest(sample[key], update)
    elif isinstance(sample, list | tuple):
        for part in sample:
            _digest(part, update)
    elif isinstance(sample, str | bytes | int | float | bool):
        update(repr(sample).encode())
