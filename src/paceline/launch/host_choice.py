"""Choose a job's hosts and its number of ranks by the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.hosts import Host, parse_hosts, read_hostfile
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import MOST_RANKS
from paceline.nouns.reading import parse_whole


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of hosts, and of ranks on each."""

    nodes: int
    ranks_per_node: int

    @classmethod
    def parse(cls, text: str | None) -> Shape | None:
        """Read a shape such as `2x8`; None stays None.

        Raises:
            UsageError: the text is no shape.
        """
        if text is None:
            return None
        before, _, after = text.partition("x")
        nodes = parse_whole(before, 1, MOST_RANKS)
        ranks = parse_whole(after, 1, MOST_RANKS)
        if nodes is None or ranks is None:
            fix = "write such as -j 2x8: 2 hosts with 8 ranks each"
            raise UsageError(f"can't read -j {text[:100]}", "it is not NODESxRANKS", fix)
        return cls(nodes, ranks)

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


def check_accelerators(ranks: int, accelerators: int, called: str, fix: str, setting: str) -> None:
    """Raise UsageError where a node has fewer accelerators than ranks.

    Args:
        ranks: the number of ranks of a node.
        accelerators: the number of accelerators of a node.
        called: the accelerators' name in the error, such as "GPUs".
        fix: the last line of the error.
        setting: the name of the setting that says how many accelerators a node has.
    """
    if ranks > accelerators:
        raise UsageError(
            f"{ranks} ranks on a node with {accelerators} {called}",
            "each rank takes one, and where there are fewer, all ranks of the node train on its CPU",
            fix,
            settings=(setting,),
        )


def choose_hosts(listed: str | None, hostfile: Path | None, shape: Shape | None) -> tuple[Host, ...]:
    """Return the hosts that were named; with a shape only as many as it has, with its number of slots each.

    Args:
        listed: the text of -H.
        hostfile: the path of a file with a host a line.
        shape: the value of -j.

    Raises:
        UsageError: they can't be read, are given twice, or have too few slots.
    """
    if listed and hostfile:
        raise UsageError("the job's hosts should be named once", "there is -H and --hostfile", "leave one out")
    if listed:
        return _shaped(parse_hosts(listed), shape)
    if hostfile:
        return _shaped(read_hostfile(hostfile), shape)
    return ()


def _shaped(hosts: tuple[Host, ...], shape: Shape | None) -> tuple[Host, ...]:
    if shape is None:
        return hosts
    # Hosts with fewer slots are passed over, the rest are taken in the order in which they were named.
    ranks = shape.ranks_per_node
    fit = [dataclasses.replace(host, slots=ranks) for host in hosts if host.slots >= ranks]
    if len(fit) < shape.nodes:
        reason = f"{len(fit)} of the {len(hosts)} hosts have {ranks} slots"
        raise UsageError(f"-j {shape} on these hosts", reason, "name more, or write fewer")
    return tuple(fit[: shape.nodes])


def choose_ranks(ranks: int | None, shape: Shape | None, hosts: Sequence[Host], is_in_plan: bool) -> int | None:
    """Return the number of ranks that is asked for; None: the plan decides it.

    Args:
        ranks: the value of -n.
        shape: the value of -j.
        hosts: the hosts of the job.
        is_in_plan: True where the plan itself says how many ranks it covers.

    Raises:
        UsageError: they contradict each other.
    """
    if shape is not None:
        if ranks not in (None, shape.ranks):
            raise UsageError(f"-n {ranks} and -j {shape} should agree", f"-j is {shape.ranks} ranks", "leave one out")
        return shape.ranks
    if ranks is None and hosts and not is_in_plan:
        return sum(host.slots for host in hosts)
    return ranks
