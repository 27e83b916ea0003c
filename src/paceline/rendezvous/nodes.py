"""Find this host's place among the hosts of a job, for a launcher that is started on each and starts ranks there.

So it is under Kubernetes: an indexed Job or a JobSet runs a pod per host, and Kubeflow's TrainJob gives each
pod torchrun's flags as PET_* variables, which `paceline run` reads as torchrun does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import MOST_RANKS
from paceline.nouns.reading import parse_whole, shown
from paceline.rendezvous.variables import address, host_and_port, port_number, whole_number, without_empty

PET = "torchrun's PET_* variables"
_NAMES = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")
_RANKS = ("RANK", "PACELINE_RANK")  # this process is a rank already, which was started by a launcher on this host
_COUNTED = ("gpu", "cpu", "auto")  # torchrun counts devices then
_LONGEST_SHOWN = 200  # characters of a variable in an error
_PORT = 29500  # torchrun's, where only the address is given
_RENDEZVOUS_PORT = 29400  # torchrun's, of a rendezvous endpoint without one
_COMPLETION = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """This host's place among those of a job.

    Args:
        node_rank, nodes: this host among the hosts.
        ranks_per_node: to start on it; 0: not said, so as many as it has devices.
        master: HOST and PORT of rank 0's store.
        source: what says so.
        origins: by field, the variable that says it, or how it was computed.
    """

    node_rank: int = 0
    nodes: int = 1
    ranks_per_node: int = 0
    master: tuple[str, int] | None = None
    source: str = PET
    origins: Mapping[str, str] = field(default_factory=dict)


def find_node(environment: Mapping[str, str]) -> NodeInfo | None:
    """Return this host's place where a process per host is started; None where nothing says so.

    Raises:
        UsageError: a variable has no such value, this host's number is missing or too high, two variables name
            different places to meet, or several hosts have none.
    """
    environment = without_empty(environment)
    # A process that is a rank already must not start ranks of its own.
    is_rank = any(name in environment for name in _RANKS)
    if is_rank or not any(name in environment for name in _NAMES):
        return None
    nodes = _nodes(environment.get("PET_NNODES", "1"))
    ranks, ranks_origin = _ranks_per_node(environment.get("PET_NPROC_PER_NODE"))
    node_rank, rank_name = _node_rank(environment, nodes)
    if nodes == 1 and "PET_NPROC_PER_NODE" not in environment:
        return None
    master, meeting_origin = _master(environment, nodes)
    origins = {
        "node_rank": _origin(environment, rank_name),
        "nodes": _origin(environment, "PET_NNODES"),
        "ranks_per_node": ranks_origin,
        "meeting": meeting_origin,
    }
    return NodeInfo(node_rank, nodes, ranks, master, _source(environment, rank_name), origins)


def _origin(environment: Mapping[str, str], name: str) -> str:
    return f"{name}={environment[name]}" if name in environment else "default"


def _source(environment: Mapping[str, str], rank_name: str) -> str:
    """Return the name of what started this host's process, by the variable that has the host's number."""
    if "JOBSET_NAME" in environment:
        return "JobSet"
    return "Kubernetes indexed Job" if rank_name == _COMPLETION else PET


def _nodes(text: str) -> int:
    """Read the number of hosts out of torchrun's N or MIN:MAX."""
    low, colon, high = text.partition(":")
    if colon and low != high:
        raise UsageError(
            f"PET_NNODES={text[:_LONGEST_SHOWN]} asks for a number of hosts that changes",
            "a job's ranks are fixed before its first step",
            "set PET_NNODES to one number, or use `paceline run --min-hosts`",
        )
    nodes = whole_number(low, "PET_NNODES", PET)
    if not 1 <= nodes <= MOST_RANKS:
        raise UsageError(
            f"PET_NNODES from {PET} should be at least 1, and at most {MOST_RANKS}",
            f"it is {shown(text)}",
            "set it to the number of hosts",
        )
    return nodes


def _ranks_per_node(text: str | None) -> tuple[int, str]:
    """Return the number of ranks to start on this host, 0 for as many as it has devices, and its origin."""
    if text is None:
        return 0, "default"
    if text in _COUNTED:
        return 0, f"PET_NPROC_PER_NODE={text}"
    ranks = parse_whole(text, 1, MOST_RANKS)
    if ranks is None:
        raise UsageError(
            f"PET_NPROC_PER_NODE from {PET} should be a number of ranks, {', '.join(_COUNTED)}",
            f"it is {shown(text)}",
            "set it to the ranks of a host, such as 8",
        )
    return ranks, f"PET_NPROC_PER_NODE={text}"


def _node_rank(environment: Mapping[str, str], nodes: int) -> tuple[int, str]:
    """Return this host's number and the variable that has it; several pods of one host each are jobs of their own."""
    # JOB_COMPLETION_INDEX numbers the pods of any indexed Job; with one host each pod is a job of its own.
    choices = ("PET_NODE_RANK", _COMPLETION) if nodes > 1 else ("PET_NODE_RANK",)
    name = next((choice for choice in choices if choice in environment), "")
    if not name and nodes > 1:
        raise UsageError(
            f"PET_NNODES={environment['PET_NNODES']} asks for {nodes} hosts",
            f"neither PET_NODE_RANK nor {_COMPLETION} says which of them this is",
            "set PET_NODE_RANK to 0 on the first host, 1 on the next; a Kubernetes Job needs completionMode: Indexed",
        )
    number = whole_number(environment[name], name, PET) if name else 0
    if number >= nodes:
        raise UsageError(
            f"{name} should be below the number of hosts",
            f"{name}={number}, and PET_NNODES={environment.get('PET_NNODES', 'not set, which is 1')}",
            f"set PET_NNODES to the number of hosts, or {name} to 0 to {nodes - 1}",
        )
    return number, name


def _master(environment: Mapping[str, str], nodes: int) -> tuple[tuple[str, int] | None, str]:
    """Return the address of rank 0's store, and its origin.

    Raises:
        UsageError: two places are named, or none and there are several hosts.
    """
    masters = _given_masters(environment)
    if masters:
        origin, master = masters[0]
        for other_origin, other_master in masters[1:]:
            if other_master != master:
                raise UsageError(
                    "all variables should name one place to meet", f"{origin}, and {other_origin}", "unset one of them"
                )
        return master, origin
    if "JOBSET_NAME" in environment and "REPLICATED_JOB_NAME" in environment:
        jobset = environment["JOBSET_NAME"]
        job = environment["REPLICATED_JOB_NAME"]
        port = port_number(environment.get("PET_MASTER_PORT", str(_PORT)), "PET_MASTER_PORT", PET)
        first_pod = f"{jobset}-{job}-0-0.{jobset}"  # the name that a JobSet gives it in its DNS domain
        return (first_pod, port), f"computed from JOBSET_NAME={jobset}, REPLICATED_JOB_NAME={job}"
    if nodes > 1:
        raise UsageError(
            f"{nodes} hosts should meet on the first one",
            "neither PET_MASTER_ADDR nor MASTER_ADDR says where it is",
            "set PET_MASTER_ADDR and PET_MASTER_PORT; in a JobSet the first is "
            "<jobset>-<replicated job>-0-0.<jobset>, and JOBSET_NAME and REPLICATED_JOB_NAME say as much",
        )
    return None, "not needed by one host"


def _given_masters(environment: Mapping[str, str]) -> list[tuple[str, tuple[str, int]]]:
    """Return every place to meet that is given, each after the variables that give it."""
    masters: list[tuple[str, tuple[str, int]]] = []
    if "PET_MASTER_ADDR" in environment:
        masters.append(_pet_master(environment))
    names = ("MASTER_ADDR", "MASTER_PORT")
    master = address(environment, names, "the environment")
    if master is not None:
        origin = " ".join(f"{name}={environment[name]}" for name in names)
        masters.append((origin, master))
    if not masters and "PET_RDZV_ENDPOINT" in environment:  # beside a master it is a second port, and not ours
        text = environment["PET_RDZV_ENDPOINT"]
        # Colons of an IPv6 address are inside its brackets; only what follows can be a port.
        after_ipv6 = text.rpartition("]")[2]
        if ":" not in after_ipv6:
            text = f"{text}:{_RENDEZVOUS_PORT}"
        masters.append((f"PET_RDZV_ENDPOINT={text}", host_and_port(text, "PET_RDZV_ENDPOINT", PET)))
    return masters


def _pet_master(environment: Mapping[str, str]) -> tuple[str, tuple[str, int]]:
    """Return the place that PET_MASTER_ADDR names, after the variables that give it."""
    host = environment["PET_MASTER_ADDR"]
    if "PET_MASTER_PORT" not in environment:
        return f"PET_MASTER_ADDR={host}, port {_PORT} as torchrun's", (host.strip("[]"), _PORT)
    port = environment["PET_MASTER_PORT"]
    place = (host.strip("[]"), port_number(port, "PET_MASTER_PORT", PET))
    return f"PET_MASTER_ADDR={host} PET_MASTER_PORT={port}", place
