"""Before the first step: do all ranks have the same model, data and checkpoint? If not, say where they differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MANIFEST, list_checkpoints
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, LossError, WorkloadError
from paceline.parallel.local import checked_loss
from paceline.parallel.placed import PlacedModel
from paceline.train.data import RankLoader
from paceline.train.seed import kept_random_state


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
    steps = [int(number) for name in names if (number := name.rpartition("-")[2]).isdecimal()]
    return max(steps, default=0)


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


def check_loss_adds_up(placed: PlacedModel, loss: Callable[[Any, Any], Any], loader: RankLoader) -> None:
    """Raise LossError when the loss of two samples is not the sum of their losses: then no batch can be split.

    Tried on the data's first two samples, in evaluation mode; not where their shapes differ, because padding one to
    the other may rightly change it. Collective where the model is sharded.
    """
    pair = loader.two_samples()
    if pair is None:
        return
    was_training = placed.model.training
    placed.model.eval()
    kept = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in placed.model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]

    def tried(batch: Any) -> tuple[float, float]:
        try:
            return _total(placed.evaluate("loss", loss, batch))
        finally:
            for slots, name, buffer, before in kept:  # what forward writes counts neither here nor in training
                buffer.data.copy_(before)
                slots[name] = buffer

    try:
        with torch.no_grad(), kept_random_state(), placed.autocast():
            both, *single = (tried(batch) for batch in pair)
    finally:
        placed.model.train(was_training)
    if not all(math.isfinite(total) for total, _ in (both, *single)):
        return  # the first step says so, and names the rank
    scale = max(abs(both[0]), sum(abs(total) for total, _ in single), 1e-6)
    if abs(both[0] - sum(total for total, _ in single)) <= _ADDS_UP * scale:
        return
    raise LossError(
        "the loss of two samples should be the sum of their losses, so that a batch can be split",
        f"it is {both[0]:.6g} for both together and {single[0][0]:.6g} + {single[1][0]:.6g} for each alone: "
        "samples meet in it (a contrastive loss?), or it returns a mean",
        "return the losses added up; a loss that compares samples trains on one rank, or with tensor or pipeline "
        "and micro_batches=1",
    )


_ADDS_UP = 0.02  # far above bf16's rounding, far below what comparing samples does


def _total(result: Any) -> tuple[float, float]:
    total, weight = checked_loss(result)
    return float(total), float(weight)
