"""Assign a job's ranks and parameter servers to hosts, and describe the rendezvous of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.launch.hosts import Host
from paceline.nouns.errors import UsageError

_MOST_LISTED = 20  # hosts in an error


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of one host: `first`, and from there as many as `count`.

    Args:
        host: the name of the host; "" is this host.
        first: the lowest rank of the host.
        count: the number of its ranks.
        cross_rank: the number of this host among those of the job, from 0.
        cross_size: the number of hosts of the job.
        servers: the numbers of parameter servers here, and of their coordinator; they come after those of all ranks.
    """

    host: str
    first: int
    count: int
    cross_rank: int = 0
    cross_size: int = 1
    servers: tuple[int, ...] = ()

    @property
    def ranks(self) -> range:
        """Return the numbers of the ranks."""
        return range(self.first, self.first + self.count)

    @property
    def processes(self) -> tuple[int, ...]:
        """Return the numbers of the ranks, and then of the servers."""
        return (*self.ranks, *self.servers)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of a job's ranks: a file on one host, rank 0's store for several.

    Args:
        file: a path that only this user can reach.
        master: the address HOST:PORT of the store.
        interface: the network interface of this host for torch's sockets; "": the one that leads to the master.
        listener: the descriptor on which rank 0's store listens, open in the fork server; -1: rank 0 opens it.
        coordinator: the address HOST:PORT of the servers' coordinator; "": they and the workers are on one host.
        own: the address of this host, at which its servers listen.
    """

    file: str = ""
    master: str = ""
    interface: str = ""
    listener: int = -1
    coordinator: str = ""
    own: str = ""


def seat(hosts: Sequence[Host], ranks: int | None) -> tuple[HostRanks, ...]:
    """Assign ranks to hosts, in order: each host is filled before the next has any.

    Args:
        hosts: the hosts with their slots.
        ranks: the number of ranks of the job; None: as many as there are slots.

    Raises:
        UsageError: there are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    num_ranks = slots if ranks is None else ranks
    if num_ranks > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:_MOST_LISTED])
        if len(hosts) > _MOST_LISTED:
            listed += f" and {len(hosts) - _MOST_LISTED} more"
        reason = f"they have {slots} slots: {listed}"
        raise UsageError(
            f"can't place {num_ranks} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}",
            reason,
            "add hosts, or slots to those that are there",
        )
    # Ranks of one host follow each other: the mesh's innermost axes, which talk most, then stay on one host.
    counts: list[tuple[str, int]] = []
    unassigned = num_ranks
    for host in hosts:
        count = min(host.slots, unassigned)
        if count > 0:  # a host without a rank is no part of the job, and gets no agent
            counts.append((host.name, count))
            unassigned -= count
    host_ranks = []
    first = 0
    for cross_rank, (name, count) in enumerate(counts):
        host_ranks.append(HostRanks(name, first, count, cross_rank, len(counts)))
        first += count
    return tuple(host_ranks)


def with_servers(host_ranks: Sequence[HostRanks], servers: int) -> tuple[HostRanks, ...]:
    """Assign parameter servers to the hosts in turn, and the coordinator to the first.

    The replicas of a range of parameters are on servers that follow each other, so in turn they are on different hosts.

    Args:
        host_ranks: the hosts with all ranks of the job.
        servers: the number of servers; 0: there are none, and no coordinator.
    """
    world_size = sum(ranks.count for ranks in host_ranks)
    numbers: list[list[int]] = [[] for _ in host_ranks]
    for server in range(servers):
        numbers[server % len(host_ranks)].append(world_size + server)
    if servers:
        numbers[0].append(world_size + servers)
    assigned = []
    for ranks, servers_here in zip(host_ranks, numbers, strict=True):
        assigned.append(replace(ranks, servers=tuple(servers_here)))
    return tuple(assigned)
