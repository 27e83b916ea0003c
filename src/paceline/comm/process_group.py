"""Find this process's rank, and open the process group that joins all ranks.

This process's rank and the store's address are read from its environment (`rendezvous/launcher_env.py`). On one host
the store is a file in a folder that only this user can open, and Gloo's and NCCL's
own sockets are bound to the loopback interface. On several they meet at a store of torch's that rank 0 holds: it
listens at one address of one interface, where torch by itself would listen on all, and Gloo's and NCCL's sockets are
bound to the interface that leads there.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.nouns.errors import PeerLostError, UsageError
from paceline.rendezvous.interfaces import address_of, address_towards, interface_of, open_listener
from paceline.rendezvous.launcher_env import find_position

TIMEOUT_S = 1800  # of one collective, as Gloo's own default
START_S = 600  # for all ranks to come to the store
STALE_S = 86400  # a file where ranks met, in the folder that jobs of this user share
COORDINATOR = "PACELINE_COORDINATOR"  # where the parameter servers' coordinator listens, in a job that has servers


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The place of this process among the ranks. `cross_rank` is the host's index, as Horovod has it.

    Args:
        rendezvous: a file to meet at.
        master: host and port of a store to meet at; with neither, torchrun's own store, or a world of one.
        interface: the network interface for torch's sockets; None: the one that leads to the master.
        is_cross_computed: no launcher says `cross_rank`; the hosts' names do, once the ranks have met.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    rendezvous: str | None = None
    master: tuple[str, int] | None = None
    interface: str | None = None
    is_cross_computed: bool = False

    @property
    def device(self) -> torch.device:
        """The GPU of this local rank where there are enough, else the CPU."""
        if torch.cuda.is_available() and torch.cuda.device_count() >= self.local_size:
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")


def find_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Read this process's place from its environment.

    Raises:
        UsageError: the launcher's variables are incomplete, not numbers, or contradict each other or another's.
    """
    position = find_position(environment)
    return RankInfo(
        rank=position.rank,
        size=position.size,
        local_rank=position.local_rank,
        local_size=position.local_size,
        cross_rank=position.cross_rank,
        rendezvous=position.file,
        master=None if position.has_own_store else position.master,
        interface=position.interface,
        is_cross_computed=position.is_cross_computed,
    )


def open_world(rank_info: RankInfo) -> None:
    """Join the ranks' process group: NCCL and Gloo where there are GPUs, only Gloo on CPUs.

    Raises:
        UsageError: the ranks can't meet where they should.
        PeerLostError: not all came.
    """
    if rank_info.size == 1 or dist.is_initialized():
        return
    _bind_sockets(rank_info)
    backend = "gloo"
    if rank_info.device.type == "cuda":
        # Before the group is made: NCCL uses the current GPU, which by default is number 0 on every rank.
        torch.cuda.set_device(rank_info.device)
        # One group with both: tensors on the CPU, such as a step's flags, go through Gloo.
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    if rank_info.rendezvous is not None:
        store = _file_store(rank_info)
    elif rank_info.master:
        store = _tcp_store(rank_info)
    else:
        store = _torchrun_store(rank_info)
    dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=timeout)


def _torchrun_store(rank_info: RankInfo) -> Any:
    """Return torchrun's own store, which torch finds by itself; for each restart of the ranks another part of it."""
    meet: Any = dist.rendezvous  # type: ignore[attr-defined]
    store, _, _ = next(meet("env://", timeout=datetime.timedelta(seconds=TIMEOUT_S)))
    # torchrun keeps its store (torch 2.13): it has the addresses of the ranks before the restart, and a rank that reads
    # one of these waits for a process that has gone. Agents of several hosts need not count restarts alike.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank_info.size == rank_info.local_size and restart != "0":
        make: Any = dist.PrefixStore  # type: ignore[attr-defined]
        return make(f"restart {restart}", store)
    return store


def _bind_sockets(rank_info: RankInfo) -> None:
    """Have Gloo and NCCL open their sockets on this rank's interface, unless the environment names one."""
    interface = rank_info.interface
    if interface is None and rank_info.size == rank_info.local_size:
        interface = "lo0" if sys.platform == "darwin" else "lo"
    elif interface is None and rank_info.master is not None:
        interface = interface_of(_own_address(rank_info))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _own_address(rank_info: RankInfo) -> str:
    """Return the address at which the other ranks reach this one."""
    assert rank_info.master is not None
    if rank_info.interface:
        return address_of(rank_info.interface)
    return address_towards(rank_info.master[0])


def _file_store(rank_info: RankInfo) -> Any:
    path = Path(str(rank_info.rendezvous))
    # Whoever can write to the folder can put another file in the store's place. Checked below, as exist_ok accepts any
    # folder.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_shared = path.parent.name == f"paceline-{os.getuid()}"  # by this user's jobs, in a folder where all may write
    status = path.parent.lstat() if is_shared else path.parent.stat()  # a link there may be another user's
    is_own = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
    if not is_own or status.st_mode & 0o022:
        raise UsageError(
            f"can't meet at {path}",
            "its folder is a link, or another user's, or others may write to it",
            f"remove {path.parent}, or set MASTER_ADDR and MASTER_PORT",
        )
    if rank_info.rank == 0 and is_shared:
        _sweep(path.parent)
    return dist.FileStore(str(path), rank_info.size)  # type: ignore[attr-defined]


def _sweep(folder: Path) -> None:
    """Remove files in which ranks of earlier jobs met, under 1 kB each.

    No rank may do so at its end: torch's store opens its file once more when it is taken down, and would wait for it.
    """
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time_ns() / 1e9 - file.lstat().st_mtime > STALE_S:
                file.unlink()


def _tcp_store(rank_info: RankInfo) -> Any:
    assert rank_info.master is not None
    host, port = rank_info.master
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    options = {"timeout": datetime.timedelta(seconds=START_S), "wait_for_workers": False}
    if rank_info.rank == 0:
        # torch's TCPStore listens on all interfaces, whatever host it is given, unless it gets a bound socket.
        descriptor = _listener(rank_info)
        # A copy: the socket object closes its descriptor when it is collected, and the store needs the other.
        address = socket.socket(fileno=os.dup(descriptor)).getsockname()[0]
        return make(address, port, rank_info.size, True, master_listen_fd=descriptor, **options)
    try:
        return make(host, port, rank_info.size, False, **options)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"rank {rank_info.rank} can't reach rank 0's store at {host}:{port}",
            f"no answer within {START_S} s ({str(error).splitlines()[0]})",
            "see whether rank 0 runs, and whether a firewall is between them: `paceline doctor -H ...` looks",
        ) from None


def serve_store(host: str, port: int, listener: int) -> object:
    """Return a store that this process serves for others, which meet at it by init_method="env://".

    Args:
        host, port: the address at which it listens.
        listener: the descriptor of the bound socket.
    """
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(host, port, None, True, wait_for_workers=False, master_listen_fd=listener)


def _listener(rank_info: RankInfo) -> int:
    """Return the socket of rank 0's store: inherited from the launcher, or opened at this rank's own address."""
    assert rank_info.master is not None
    if "PACELINE_LISTENER" in os.environ:
        # Taken out of the environment: the descriptor is this process's, not that of processes which it starts.
        return int(os.environ.pop("PACELINE_LISTENER"))
    address = _own_address(rank_info)
    if rank_info.size > rank_info.local_size and address.startswith("127."):
        raise UsageError(
            f"can't open rank 0's store for {rank_info.size} ranks on several hosts",
            f"{rank_info.master[0]} is {address} here, which other hosts can't reach (a line of /etc/hosts?)",
            "name the interface with PACELINE_INTERFACE or --interface, or an address as the master",
        )
    return open_listener(address, rank_info.master[1]).detach()


def close_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
