"""Find this process's place among the ranks, by whichever launcher started it.

A rank may find itself under `paceline run`, torchrun, Horovod, Open MPI, MVAPICH2, MPICH and its kin, `srun` or
`jsrun`, and under two of them at once: `srun --ntasks-per-node=1 torchrun` sets the variables of both. The earlier
in this list is the inner one; the outer one must say the same, or have started one process per host. Nothing
else is read: no configuration file, and no default that a launcher contradicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole
from paceline.rendezvous import launchers
from paceline.rendezvous.launchers import FIELDS, LauncherVariables, read_launchers
from paceline.rendezvous.nodes import NodeInfo, find_node
from paceline.rendezvous.store_address import MASTER, computed_master, given_master, meeting_file
from paceline.rendezvous.variables import without_empty

__all__ = [
    "PROCESS",
    "LauncherPosition",
    "NodeInfo",
    "find_node",
    "find_position",
    "joined_address",
    "meeting_file",
    "variables_of",
]
ALONE = "alone"
PROCESS = "PACELINE_RANK_PROCESS"  # the rank's process id
_OWN_MEETING = ("PACELINE_RENDEZVOUS", "PACELINE_MASTER")
# Of MPI: their daemons may be tasks of a Slurm step, whose variables the ranks inherit.
_MPI = (launchers.OPEN_MPI, launchers.MVAPICH, launchers.PMI)


@dataclass(frozen=True, slots=True)
class LauncherPosition:
    """A process's place among the ranks, and where they meet.

    Args:
        rank, size: this process among all ranks.
        local_rank, local_size: among those of its host.
        cross_rank, cross_size: its host among the hosts.
        source: the launcher's name; for a process without a launcher, a fixed word.
        origins: by field, the variable that says it, such as `RANK=3`, or how it was computed. The fields are
            the six above, `meeting` and `interface`.
        file: a file to meet at, on one host; its folder may have to be made.
        master: HOST and PORT of rank 0's store.
        interface: the network interface to bind to.
        has_own_store: torchrun's, which `env://` finds at `master`.
        is_cross_computed: no launcher says which host this is. Where hosts have unequal numbers of ranks, or
            ranks go round the hosts in turn, only the ranks together can tell.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    source: str = ALONE
    origins: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    master: tuple[str, int] | None = None
    interface: str | None = None
    has_own_store: bool = False
    is_cross_computed: bool = False


def find_position(environment: Mapping[str, str]) -> LauncherPosition:
    """Return this process's place among the ranks. Under no launcher it is a world of one.

    Raises:
        UsageError: a launcher's variables are incomplete, are no numbers or contradict each other; two launchers
            do; ranks are promised that nobody started; or nothing says where ranks meet.
    """
    environment = without_empty(environment)
    interface = environment.get("PACELINE_INTERFACE")
    launched_by = read_launchers(environment)
    complete = [launcher for launcher in launched_by if launcher.names_rank]
    # No launcher names a rank of so many. Variables that say less can't be used by themselves, nor left out silently.
    if not complete:
        if launched_by:
            raise _incomplete(launched_by[0])
        _check_promises(environment)
        origins = dict.fromkeys(FIELDS, "default: no launcher")
        return LauncherPosition(origins=_with_interface(origins, interface), interface=interface)
    # `read_launchers` has the inner ones first. The inner launcher started this process, so its numbers count.
    inner = complete[0]
    for launcher in launched_by:
        if not launcher.names_rank:
            _check_addition(launcher, complete)
    for outer in complete[1:]:
        _check_agreement(inner, outer)
    # What the inner one does not say, such as the local rank, is taken from those that name the same rank.
    agreeing = [inner]
    for launcher in launched_by:
        if launcher is not inner and _is_same(launcher, inner):
            agreeing.append(launcher)
    values, origins = _completed(agreeing)
    is_cross_computed = origins["cross_rank"].startswith("computed")
    is_on_one_host = values["local_size"] == values["size"]
    position = LauncherPosition(
        values["rank"],
        values["size"],
        values["local_rank"],
        values["local_size"],
        values["cross_rank"],
        values["cross_size"],
        source=inner.source,
        origins=_with_interface(origins, interface),
        interface=interface,
        is_cross_computed=is_cross_computed and values["size"] > 1 and not is_on_one_host,
    )
    # The outermost launcher that names this rank started all of them: by its job they find each other.
    outermost = [launcher for launcher in agreeing if launcher.names_rank][-1]
    return _with_meeting(position, outermost.source, environment)


def _with_interface(origins: Mapping[str, str], interface: str | None) -> dict[str, str]:
    origin = f"PACELINE_INTERFACE={interface}" if interface else "default"
    return {**origins, "interface": origin}


def _incomplete(variables: LauncherVariables) -> UsageError:
    names = dict(zip(FIELDS, launchers.NAMES[variables.source], strict=False))
    missing: list[str] = []
    for field_name in ("rank", "size"):
        if field_name not in variables.values:
            name = names.get(field_name, "the number of ranks")
            missing.append(name.split(" PALS")[0])  # of several names for one thing the first
    only = ", ".join(variables.names)
    return UsageError(
        f"the ranks' variables of {variables.source} should be set together",
        f"only {only} is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
        f"unset {only}, or start the job with `paceline run`",
    )


def _is_same(first: LauncherVariables, second: LauncherVariables) -> bool:
    """Return True if they give no field two values; if both name a rank, only rank and size are compared."""
    compared: tuple[str, ...] = FIELDS
    if first.names_rank and second.names_rank:
        compared = ("rank", "size")
    for name in compared:
        if name in first.values and name in second.values and first.values[name] != second.values[name]:
            return False
    return True


def _check_addition(variables: LauncherVariables, complete: list[LauncherVariables]) -> None:
    """Raise UsageError if variables that name no rank contradict all launchers that name one."""
    if not any(_is_same(variables, launcher) for launcher in complete):
        raise _disagreement(variables, complete[-1])


def _check_agreement(inner: LauncherVariables, outer: LauncherVariables) -> None:
    """Raise UsageError unless both name the same rank, or the outer one started one process per host."""
    rank, size = outer.values["rank"], outer.values["size"]
    if size == 1 or _is_same(inner, outer) or (rank, size) == _place_among_hosts(inner):
        return
    # The exception: MPI's daemons as tasks of a Slurm step.
    ranks = inner.values["size"]
    is_on_one_host = inner.values.get("local_size", 1) == ranks
    is_step_of_daemons = outer.source == launchers.SLURM and outer.values.get("local_size") == 1
    if inner.source in _MPI and is_step_of_daemons and not is_on_one_host and ranks > size:
        return  # `mpirun` starts its daemons by `srun`, on every host or on every host but its own
    raise _disagreement(inner, outer)


def _place_among_hosts(variables: LauncherVariables) -> tuple[int, int] | None:
    """Return this host's number and how many there are; None where the launcher does not say how many.

    Where it does not say which host this is, ranks are taken to fill one host after the other.
    """
    values = variables.values
    if "cross_rank" in values and "cross_size" in values:
        return values["cross_rank"], values["cross_size"]
    size = values["size"]
    local_size = values.get("local_size", 0)
    # Hosts with unequal numbers of ranks: the host can't be told from the rank.
    if not local_size or size % local_size:
        return None
    host = values.get("cross_rank", values["rank"] // local_size)
    return host, size // local_size


def _disagreement(inner: LauncherVariables, outer: LauncherVariables) -> UsageError:
    return UsageError(
        f"{inner.source} and {outer.source} should say the same of this process, or {outer.source} start one per host",
        f"{inner}, and {outer}",
        f"start the job with one of them: unset {', '.join(inner.names)}, or unset {', '.join(outer.names)}",
    )


def _completed(agreeing: list[LauncherVariables]) -> tuple[dict[str, int], dict[str, str]]:
    """Return all six fields and their origins: given by the inner launcher, else by another one, else computed."""
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    for launcher in agreeing:
        # What is there already stays: earlier launchers are the inner ones.
        values = {**launcher.values, **values}
        origins = {**launcher.origins, **origins}
    _complete_local(values, origins, agreeing[0])
    _complete_hosts(values, origins)
    is_local_possible = values["local_rank"] < values["local_size"] <= values["size"]
    is_cross_possible = values["cross_rank"] < values["cross_size"]
    if not is_local_possible or not is_cross_possible:
        sources = dict.fromkeys(launcher.source for launcher in agreeing)
        texts = dict.fromkeys(origins[name] for name in FIELDS if "=" in origins[name])
        raise UsageError(
            f"the variables of {' and '.join(sources)} should name one process",
            f"together they contradict each other: {', '.join(texts)}",
            "leave them to the launcher: unset those that you set",
        )
    return values, origins


def _complete_local(values: dict[str, int], origins: dict[str, str], inner: LauncherVariables) -> None:
    """Add the size of this host and the rank on it, where no launcher gives them."""
    size, hosts = values["size"], values.get("cross_size", 0)
    if "local_size" not in values:
        # Horovod's cross size counts only the hosts that have this local rank, so it is not the number of hosts.
        is_even = hosts and size % hosts == 0 and inner.source != launchers.HOROVOD
        if size > 1 and not is_even:
            raise UsageError(
                f"{inner.source} should say how many ranks this host has",
                f"{', '.join(inner.origins.values())} are set, and no variable that says it",
                "set LOCAL_WORLD_SIZE (or PACELINE_LOCAL_SIZE) to the ranks of this host, and LOCAL_RANK if ranks "
                "do not fill host after host",
            )
        if hosts:
            values["local_size"] = size // hosts
            origins["local_size"] = "computed: size / hosts"
        else:
            values["local_size"] = 1
            origins["local_size"] = "computed: the size is 1"
    if "local_rank" not in values:
        if size % values["local_size"]:
            raise UsageError(
                f"{inner.source} should say which rank of its host this is",
                f"{', '.join(inner.origins.values())} are set, and no variable that says it",
                "set LOCAL_RANK to the rank on this host, from 0",
            )
        values["local_rank"] = values["rank"] % values["local_size"]
        origins["local_rank"] = "computed: rank modulo local size"


def _complete_hosts(values: dict[str, int], origins: dict[str, str]) -> None:
    """Add the number of hosts and of this one, where no launcher gives them."""
    rank, size, local_size = values["rank"], values["size"], values["local_size"]
    if "cross_size" not in values:
        full_hosts = -(-size // local_size)  # rounded up
        # Full hosts give the least number; a host's number that is given may be higher, where hosts are not full.
        values["cross_size"] = max(full_hosts, values.get("cross_rank", 0) + 1)
        origins["cross_size"] = "computed: size / local size"
    if "cross_rank" in values:
        return
    hosts = values["cross_size"]
    local_rank = values["local_rank"]
    # Ranks go round the hosts in turn, if that gives this local rank and filling host after host does not.
    is_round = rank % local_size != local_rank == rank // hosts
    if is_round:
        values["cross_rank"] = rank % hosts
        origins["cross_rank"] = "computed: rank modulo hosts"
    else:
        values["cross_rank"] = rank // local_size
        origins["cross_rank"] = "computed: rank / local size"


def _with_meeting(position: LauncherPosition, outermost: str, environment: Mapping[str, str]) -> LauncherPosition:
    """Add to the position where its ranks meet.

    Args:
        position: the numbers of the inner launcher.
        outermost: the launcher that started all ranks.
        environment: the environment's variables.
    """
    file, master, origin = _meeting(position, outermost, environment)
    origins = {**position.origins, "meeting": origin}
    # Also where a rank of torchrun's gives its place in Paceline's own variables: see `variables_of`.
    is_under_torchrun = launchers.TORCHRUN in (position.source, outermost)
    is_torchs = is_under_torchrun and origin.startswith(MASTER[0])
    return replace(position, origins=origins, file=file, master=master, has_own_store=is_torchs)


def _meeting(
    position: LauncherPosition, outermost: str, environment: Mapping[str, str]
) -> tuple[str | None, tuple[str, int] | None, str]:
    """Return the file or the HOST and PORT where ranks meet, and the variable that gives it or how it was computed."""
    source = position.source
    if position.size == 1:
        return None, None, "not needed by one rank"
    if source == launchers.PACELINE:
        settings = [f"{name}={environment[name]}" for name in _OWN_MEETING if name in environment]
        if len(settings) == 2:
            raise UsageError(
                "the ranks should meet at one place", f"there are two: {' and '.join(settings)}", "unset one of them"
            )
        if "PACELINE_RENDEZVOUS" in environment:
            return environment["PACELINE_RENDEZVOUS"], None, settings[0]
    # An address that is given counts before any that is computed, also on one host.
    given_by_variables = given_master(source, environment)
    if given_by_variables is not None:
        return None, *given_by_variables
    if source == launchers.PACELINE and "PACELINE_COORDINATOR" in environment:
        return None, None, "not needed: workers of parameter servers do not meet"
    if source in (launchers.PACELINE, launchers.TORCHRUN):
        variables = " or ".join(_OWN_MEETING) if source == launchers.PACELINE else " and ".join(MASTER)
        raise UsageError(
            f"the ranks of {source} should meet",
            f"{variables} is not set",
            f"start them with {source}, or set {' and '.join(MASTER)}",
        )
    # A file needs no port, and only this user can open it.
    if position.local_size == position.size:
        file = meeting_file(outermost, environment)
        return file, None, f"computed from the job's name under {outermost}"
    return None, *computed_master(outermost, position.cross_size, environment)


def _check_promises(environment: Mapping[str, str]) -> None:
    """Raise UsageError if variables promise several ranks although no launcher gives this process a rank.

    The launcher itself asks `find_node` before, and starts the ranks that are missing here.
    """
    node = find_node(environment)
    # A batch script that forgot `srun` would train once on one process, or once in each task, without a word.
    promised = ""
    fix = "start the ranks: `paceline run FILE`"
    if node is not None and (node.nodes > 1 or node.ranks_per_node > 1):
        origins = [node.origins["nodes"], node.origins["ranks_per_node"]]
        promised = ", ".join(origin for origin in origins if "=" in origin)
    # What a job was given, not a rank of it: these are also set in the batch script itself.
    counts: tuple[tuple[tuple[str, ...], str], ...] = (
        (("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"), "srun"),
        (("LSB_DJOB_NUMPROC",), "jsrun"),
    )
    for variables, launcher in counts:
        for name in variables:
            is_many = parse_whole(environment.get(name, ""), 2) is not None
            if is_many and not promised:
                promised = f"{name}={environment[name]}"
                fix = f"start the ranks: `{launcher} python FILE`, or `paceline run FILE`; to train alone, unset {name}"
    if promised:
        raise UsageError(
            f"{promised} promises more than one rank",
            "this process is a world of one: no variable of a launcher gives it a rank",
            fix,
        )


def variables_of(position: LauncherPosition) -> dict[str, str]:
    """Return Paceline's own variables for a rank's place, and for the store, unless it is torchrun's."""
    numbers = {
        "PACELINE_RANK": position.rank,
        "PACELINE_WORLD_SIZE": position.size,
        "PACELINE_LOCAL_RANK": position.local_rank,
        "PACELINE_LOCAL_SIZE": position.local_size,
        "PACELINE_CROSS_RANK": position.cross_rank,
        "PACELINE_CROSS_SIZE": position.cross_size,
    }
    variables = {name: str(number) for name, number in numbers.items()}
    if position.file is not None:
        variables["PACELINE_RENDEZVOUS"] = position.file
    elif position.master is not None and not position.has_own_store:
        variables["PACELINE_MASTER"] = joined_address(*position.master)
    return variables


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
