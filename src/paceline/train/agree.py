"""Before the first step: do all ranks have the same model, data and checkpoint? If not, say where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MANIFEST, REPLACED, list_checkpoints, step_of
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, WorkloadError


def check_same_model_everywhere(model: torch.nn.Module, comm: AxisComm) -> None:
    """Raise WorkloadError on every rank unless names, shapes and dtypes are equal on all of them.

    Collective; nothing is sent when there is one rank.
    """
    if comm.size == 1:
        return
    lines = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in [*model.named_parameters(), *model.named_buffers()]]
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    digests = [int(one) for one in comm.all_gather(torch.tensor([digest]))]
    if len(set(digests)) == 1:
        return
    other = next(index for index, one in enumerate(digests) if one != digests[0])
    texts = comm.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    first, second = (bytes(texts[index].tolist()).decode().split("\n") for index in (0, other))
    longest = max(len(first), len(second))
    pairs = zip([*first, *["nothing"] * longest], [*second, *["nothing"] * longest], strict=False)
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    raise WorkloadError(
        "all ranks should make the same model",
        f"rank {comm.peers[0]} has {here} where rank {comm.peers[other]} has {there}",
        "make the model without looking at the rank, the host or the time",
    )


def check_same_data_everywhere(samples: int, first: Any, comm: AxisComm, warn: Callable[[str], None]) -> None:
    """Raise WorkloadError unless all ranks' data sets are equally long; warn where their first samples differ.

    A sample may differ for a good reason that only the person knows, a length may not.

    Args:
        samples: the length of this rank's data set.
        first: its first sample.
        comm: the axis over which the data is split.
        warn: told, on every rank, of samples that differ.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256()
    _digest(first, digest.update)
    mine = torch.tensor([samples, int.from_bytes(digest.digest()[:7], "big")])
    everybody = [tuple(one.tolist()) for one in comm.all_gather(mine)]
    lengths = [length for length, _ in everybody]
    if len(set(lengths)) > 1:
        raise WorkloadError(
            "all ranks should make the same data set",
            f"theirs hold {', '.join(map(str, lengths))} samples",
            "make it without looking at the rank, the host or the time",
        )
    if len(set(everybody)) > 1:
        warn(
            "the ranks' data sets begin with different samples: is the data made of random numbers "
            "without a seed? Then no two ranks train on the same data"
        )


def check_same_start(resume: str | None, comm: AxisComm) -> None:
    """Raise CheckpointError on every rank unless all go on from the same checkpoint, or all from the start.

    A host that does not see the run directory would train from the start, and the others would wait for it.

    Args:
        resume: the checkpoint, or the folder of checkpoints, that this rank was told to go on from.
        comm: all ranks.
    """
    if comm.size == 1:
        return
    comm.barrier()  # no rank still writes what an earlier job of the same file saves
    seen = [int(one) for one in comm.all_gather(torch.tensor([_newest_step(resume)]))]
    other = next((index for index, one in enumerate(seen) if one != seen[0]), None)
    if other is not None:
        words = {-1: "was told of no checkpoint", 0: "finds no checkpoint"}
        first, second = (words.get(step, f"finds step {step}") for step in (seen[0], seen[other]))
        raise CheckpointError(
            "all ranks should go on from the same checkpoint",
            f"rank {comm.peers[0]} {first}, rank {comm.peers[other]} {second}",
            "see that the run directory is one file system on all hosts, and start again",
        )


def _newest_step(resume: str | None) -> int:
    """The step of the newest checkpoint there; 0: there is none; -1: there need be none."""
    if resume is None:
        return -1
    path = Path(resume)
    names = [path.name] if (path / MANIFEST).exists() else [one.name for one in list_checkpoints(path)]
    steps = [step_of(name.removeprefix(REPLACED)) for name in names]
    return max((step for step in steps if step is not None), default=0)


def _digest(sample: Any, update: Callable[[bytes], None]) -> None:
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
