"""Which ranks a host has, and where all ranks of a job meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.hosts import Host
from paceline.nouns.errors import UsageError


@dataclass(frozen=True, slots=True)
class Seats:
    """The ranks of one host: `first`, and from there as many as `count`.

    Args:
        host: its name; "" is this host.
        first: its lowest rank.
        count: of its ranks.
        cross_rank: this host among those of the job.
        cross_size: the hosts of the job.
    """

    host: str
    first: int
    count: int
    cross_rank: int = 0
    cross_size: int = 1

    @property
    def ranks(self) -> range:
        """The ranks themselves."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet: a file on one host, rank 0's store for several.

    Args:
        file: a path that only this user can reach.
        master: HOST:PORT of the store.
        interface: of this host, that torch's sockets are bound to; "": the one that leads to the master.
        listener: the descriptor on which rank 0's store listens, open in the fork server; -1: rank 0 opens it.
    """

    file: str = ""
    master: str = ""
    interface: str = ""
    listener: int = -1


def seat(hosts: Sequence[Host], ranks: int | None) -> tuple[Seats, ...]:
    """Ranks onto hosts, in order: each host is filled before the next has any.

    Args:
        hosts: with their slots.
        ranks: of the job; None: as many as there are slots.

    Raises:
        UsageError: there are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    wanted = slots if ranks is None else ranks
    if wanted > slots:
        found = f"they have {slots} slots: {', '.join(f'{host.name}:{host.slots}' for host in hosts)}"
        raise UsageError(f"{wanted} ranks on {len(hosts)} hosts", found, "add hosts, or slots to those that are there")
    counts: list[tuple[str, int]] = []
    for host in hosts:
        count = min(host.slots, wanted - sum(count for _, count in counts))
        if count > 0:
            counts.append((host.name, count))
    firsts = [sum(count for _, count in counts[:number]) for number in range(len(counts))]
    return tuple(
        Seats(name, first, count, number, len(counts))
        for number, ((name, count), first) in enumerate(zip(counts, firsts, strict=True))
    )
