"""Before the first step: do all ranks have the same model? If not, say where they first differ."""

from __future__ import annotations

import hashlib

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError


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
