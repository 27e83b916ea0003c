"""Where a process stands among the ranks, and the process groups that join them.

A rank may find itself under `paceline run` (PACELINE_* variables) or under torchrun (RANK, WORLD_SIZE,
LOCAL_RANK, ...); alone it is a world of one. On one host Paceline meets through a file in a folder that
only this user can open, and Gloo's and NCCL's own sockets are bound to the loopback interface.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.nouns.errors import UsageError

TIMEOUT_S = 1800  # of one collective, as Gloo's own default
COORDINATOR = "PACELINE_COORDINATOR"  # where the parameter servers' coordinator listens, in a job that has servers
PACELINE = ("PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks. `cross_rank` is the host's index, as Horovod has it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    rendezvous: str | None = None  # a file to meet at; None means torchrun's store, or a world of one

    @property
    def device(self) -> torch.device:
        """The GPU of this local rank where there are enough, else the CPU."""
        if torch.cuda.is_available() and torch.cuda.device_count() >= self.local_size:
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def find_place(environment: Mapping[str, str]) -> Place:
    """Read this process's place from its environment.

    Raises:
        UsageError: the launcher's variables are incomplete, not numbers, or contradict each other.
    """
    for names, source in ((PACELINE, "paceline run"), (TORCHRUN, "torchrun")):
        given = [name for name in names if name in environment]
        if names[0] in given and names[1] in given:
            return _place(environment, names, source)
        if given and names is PACELINE:
            raise UsageError(
                "the ranks' variables of paceline run should be set together",
                f"only {', '.join(given)} is set",
                "unset it, or start the job with `paceline run`",
            )
    return Place()


def _place(environment: Mapping[str, str], names: tuple[str, ...], source: str) -> Place:
    values = []
    for name, otherwise in zip(names, ("0", "1", "0", "1"), strict=True):
        text = environment.get(name, otherwise)
        if not text.isdecimal():
            raise UsageError(
                f"{name} from {source} should be a whole number",
                f"it is {text!r}",
                f"unset {name}, or start the job with `paceline run` or torchrun",
            )
        values.append(int(text))
    rank, size, local_rank, local_size = values
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(
            f"the variables of {source} should name one of {size} ranks",
            f"they say rank {rank} of {size}, local rank {local_rank} of {local_size}",
            "unset them, or start the job with `paceline run` or torchrun",
        )
    cross = int(environment.get("GROUP_RANK", rank // local_size))
    return Place(rank, size, local_rank, local_size, cross, environment.get("PACELINE_RENDEZVOUS"))


def open_world(place: Place) -> None:
    """Join the ranks' process group: NCCL and Gloo where there are GPUs, Gloo alone on CPUs."""
    if place.size == 1 or dist.is_initialized():
        return
    if place.size == place.local_size:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = "gloo"
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    if place.rendezvous is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(Path(place.rendezvous)), place.size
    )
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def close_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
