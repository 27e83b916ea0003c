"""Where a process stands among the ranks, by whichever launcher started it.

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

__all__ = ["LauncherPosition", "NodeInfo", "find_node", "find_position", "meeting_file"]
ALONE = "alone"
_OWN_MEETING = ("PACELINE_RENDEZVOUS", "PACELINE_MASTER")
# Of MPI: their daemons may be tasks of a Slurm step, whose variables the ranks inherit.
_MPI = (launchers.OPEN_MPI, launchers.MVAPICH, launchers.PMI)


@dataclass(frozen=True, slots=True)
class LauncherPosition:
    """Where a process stands among the ranks, and how they meet.

    Args:
        rank, size: this process among all ranks.
        local_rank, local_size: among those of its host.
        cross_rank, cross_size: its host among the hosts.
        source: the launcher, or "alone".
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
    """This process among the ranks. Under no launcher it is a world of one.

    Raises:
        UsageError: a launcher's variables are incomplete, are no numbers or contradict each other; two launchers
            do; ranks are promised that nobody started; or nothing says where ranks meet.
    """
    environment = without_empty(environment)
    interface = environment.get("PACELINE_INTERFACE")
    said = read_launchers(environment)
    whole = [one for one in said if one.is_whole]
    if not whole:
        if said:
            raise _incomplete(said[0])
        _check_promises(environment)
        origins = dict.fromkeys(FIELDS, "default: no launcher")
        return LauncherPosition(origins=_with_interface(origins, interface), interface=interface)
    inner = whole[0]
    for part in said:
        if not part.is_whole:
            _check_part(part, whole)
    for outer in whole[1:]:
        _check_agreement(inner, outer)
    equals = [inner, *(one for one in said if one is not inner and _is_same(one, inner))]
    values, origins = _completed(equals)
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
        is_cross_computed=origins["cross_rank"].startswith("computed") and 1 < values["size"] != values["local_size"],
    )
    return _met(position, [one for one in equals if one.is_whole][-1].source, environment)


def _with_interface(origins: Mapping[str, str], interface: str | None) -> dict[str, str]:
    return {**origins, "interface": f"PACELINE_INTERFACE={interface}" if interface else "default"}


def _incomplete(said: LauncherVariables) -> UsageError:
    names = dict(zip(FIELDS, launchers.NAMES[said.source], strict=False))
    missing = [names.get(f, "the number of ranks").split(" PALS")[0] for f in FIELDS[:2] if f not in said.values]
    only = ", ".join(said.names)
    return UsageError(
        f"the ranks' variables of {said.source} should be set together",
        f"only {only} is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
        f"unset {only}, or start the job with `paceline run`",
    )


def _is_same(one: LauncherVariables, other: LauncherVariables) -> bool:
    """Whether they give no field two values; of two whole ones, whether they name the same rank of as many."""
    shared = FIELDS[:2] if one.is_whole and other.is_whole else FIELDS
    return all(one.values[f] == other.values[f] for f in shared if f in one.values and f in other.values)


def _check_part(part: LauncherVariables, whole: list[LauncherVariables]) -> None:
    """Raise UsageError unless what an incomplete set of variables says is what some launcher says."""
    if not any(_is_same(part, one) for one in whole):
        raise _disagreement(part, whole[-1])


def _check_agreement(inner: LauncherVariables, outer: LauncherVariables) -> None:
    """Raise UsageError unless both name the same rank, or the outer one started one process per host."""
    rank, size = outer.values["rank"], outer.values["size"]
    if size == 1 or _is_same(inner, outer) or (rank, size) in _hosts(inner):
        return
    local = inner.values.get("local_size", 1)
    is_step_of_daemons = outer.source == launchers.SLURM and outer.values.get("local_size") == 1
    if inner.source in _MPI and is_step_of_daemons and local < inner.values["size"] > size:
        return  # `mpirun` starts its daemons by `srun`, on every host or on every host but its own
    raise _disagreement(inner, outer)


def _hosts(said: LauncherVariables) -> set[tuple[int, int]]:
    """This host among the hosts, as the launcher says, or as it is where ranks fill one host after the other."""
    values = said.values
    if "cross_rank" in values and "cross_size" in values:
        return {(values["cross_rank"], values["cross_size"])}
    local, size, rank = values.get("local_size", 0), values["size"], values["rank"]
    if not local or size % local:
        return set()
    hosts = size // local
    if "cross_rank" in values:
        return {(values["cross_rank"], hosts)}
    return {(rank // local, hosts)}


def _disagreement(inner: LauncherVariables, outer: LauncherVariables) -> UsageError:
    return UsageError(
        f"{inner.source} and {outer.source} should say the same of this process, or {outer.source} start one per host",
        f"{inner}, and {outer}",
        f"start the job with one of them: unset {', '.join(inner.names)}, or unset {', '.join(outer.names)}",
    )


def _completed(equals: list[LauncherVariables]) -> tuple[dict[str, int], dict[str, str]]:
    """All six fields and their origins: said by the inner launcher, else by another one, else computed."""
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    for said in equals:
        values = {**said.values, **values}
        origins = {**said.origins, **origins}
    _complete_local(values, origins, equals[0])
    _complete_hosts(values, origins)
    if not (
        values["local_rank"] < values["local_size"] <= values["size"] and values["cross_rank"] < values["cross_size"]
    ):
        words = ", ".join(dict.fromkeys(origins[f] for f in FIELDS if "=" in origins[f]))
        raise UsageError(
            f"the variables of {' and '.join(dict.fromkeys(said.source for said in equals))} should name one process",
            f"together they contradict each other: {words}",
            "leave them to the launcher: unset those that you set",
        )
    return values, origins


def _complete_local(values: dict[str, int], origins: dict[str, str], inner: LauncherVariables) -> None:
    size, hosts = values["size"], values.get("cross_size", 0)
    if "local_size" not in values:
        is_even = hosts and size % hosts == 0 and inner.source != launchers.HOROVOD
        if size > 1 and not is_even:
            raise UsageError(
                f"{inner.source} should say how many ranks this host has",
                f"{', '.join(inner.origins.values())} are set, and no variable that says it",
                "set LOCAL_WORLD_SIZE (or PACELINE_LOCAL_SIZE) to the ranks of this host, and LOCAL_RANK if ranks "
                "do not fill host after host",
            )
        values["local_size"] = size // hosts if hosts else 1
        origins["local_size"] = "computed: size / hosts" if hosts else "computed: the size is 1"
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
    rank, size, local = values["rank"], values["size"], values["local_size"]
    if "cross_size" not in values:
        values["cross_size"] = max(-(-size // local), values.get("cross_rank", 0) + 1)
        origins["cross_size"] = "computed: size / local size"
    if "cross_rank" not in values:
        hosts = values["cross_size"]
        is_round = rank % local != values["local_rank"] == rank // hosts
        values["cross_rank"] = rank % hosts if is_round else rank // local
        origins["cross_rank"] = f"computed: rank {'modulo hosts' if is_round else '/ local size'}"


def _met(position: LauncherPosition, meeter: str, environment: Mapping[str, str]) -> LauncherPosition:
    """The position with where its ranks meet."""
    file, master, origin = _meeting(position, meeter, environment)
    origins = {**position.origins, "meeting": origin}
    # Also where a rank of torchrun's says its place in Paceline's own variables: see rendezvous/rank_variables.py.
    is_torchs = launchers.TORCHRUN in (position.source, meeter) and origin.startswith(MASTER[0])
    return replace(position, origins=origins, file=file, master=master, has_own_store=is_torchs)


def _meeting(
    position: LauncherPosition, meeter: str, environment: Mapping[str, str]
) -> tuple[str | None, tuple[str, int] | None, str]:
    """The file or the HOST and PORT, and what says so."""
    source = position.source
    if position.size == 1:
        return None, None, "not needed by one rank"
    if source == launchers.PACELINE:
        given = [f"{name}={environment[name]}" for name in _OWN_MEETING if name in environment]
        if len(given) == 2:
            raise UsageError("one place where ranks meet", f"there are two: {' and '.join(given)}", "unset one of them")
        if "PACELINE_RENDEZVOUS" in environment:
            return environment["PACELINE_RENDEZVOUS"], None, given[0]
    found = given_master(source, environment)
    if found is not None:
        return None, *found
    if source == launchers.PACELINE and "PACELINE_COORDINATOR" in environment:
        return None, None, "not needed: workers of parameter servers do not meet"
    if source in (launchers.PACELINE, launchers.TORCHRUN):
        own = " or ".join(_OWN_MEETING) if source == launchers.PACELINE else " and ".join(MASTER)
        raise UsageError(
            f"the ranks of {source} should meet",
            f"{own} is not set",
            f"start them with {source}, or set {' and '.join(MASTER)}",
        )
    if position.local_size == position.size:
        file = meeting_file(meeter, environment)
        return file, None, f"computed from the job's name under {meeter}"
    return None, *computed_master(meeter, position.cross_size, environment)


def _check_promises(environment: Mapping[str, str]) -> None:
    """Raise UsageError where no launcher names this process, and something says that it should be one of many.

    The launcher itself asks `find_node` before, and starts the ranks that are missing here.
    """
    node = find_node(environment)
    promised = ""
    fix = "start the ranks: `paceline run FILE`"
    if node is not None and (node.nodes > 1 or node.ranks_per_node > 1):
        names = [origin for name, origin in node.origins.items() if name in ("nodes", "ranks_per_node")]
        promised = ", ".join(name for name in names if "=" in name)
    counts: tuple[tuple[tuple[str, ...], str], ...] = (
        (("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"), "srun"),
        (("LSB_DJOB_NUMPROC",), "jsrun"),
    )
    for variables, launcher in counts:
        many = [name for name in variables if parse_whole(environment.get(name, ""), 2) is not None]
        if many and not promised:
            promised = f"{many[0]}={environment[many[0]]}"
            fix = f"start the ranks: `{launcher} python FILE`, or `paceline run FILE`; to train alone, unset {many[0]}"
    if promised:
        raise UsageError(
            f"{promised} promises more than one rank",
            "this process is a world of one: no variable of a launcher gives it a rank",
            fix,
        )
