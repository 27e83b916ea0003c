"""Read each launcher's own variables: the numbers that it gives the process that it started.

Nothing is filled in here and nothing is compared across launchers: `launcher_env.py` does that. Sources: torch's
elastic agent; Horovod's `gloo_run.py`; the manuals of Open MPI, MVAPICH2, Hydra, PALS and `srun`; IBM's JSM.
Open MPI's OMPI_COMM_WORLD_NODE_RANK is no host's number, but a second local rank: it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole
from paceline.rendezvous.hostlist import tasks_per_host
from paceline.rendezvous.variables import whole_number

PACELINE = "paceline run"
TORCHRUN = "torchrun"
HOROVOD = "Horovod"
OPEN_MPI = "Open MPI"
MVAPICH = "MVAPICH2"
PMI = "MPICH (PMI)"
SLURM = "Slurm"
JSRUN = "jsrun"
PMIX = "PMIx"
FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
# A rank must be below its size: see `_are_ranks_below_sizes`.
_PAIRS = (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size"))
# The variables of each field, in FIELDS' order. Where there are several, those that are set must say the same.
# The order is from the inner launcher to the outer: a torchrun in a task of `srun` has both sets of variables.
NAMES: dict[str, tuple[str, ...]] = {
    PACELINE: (
        *("PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE"),
        *("PACELINE_CROSS_RANK", "PACELINE_CROSS_SIZE"),
    ),
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    HOROVOD: tuple(f"HOROVOD_{field.upper()}" for field in FIELDS),
    OPEN_MPI: tuple(f"OMPI_COMM_WORLD_{field.upper()}" for field in FIELDS[:4]),
    MVAPICH: tuple(f"MV2_COMM_WORLD_{field.upper()}" for field in FIELDS[:4]),
    # Hydra writes MPI_LOCAL*, Cray's PMI writes PMI_LOCAL_*, PALS writes PALS_*.
    PMI: (
        *("PMI_RANK PALS_RANKID", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK PALS_LOCAL_RANKID"),
        *("MPI_LOCALNRANKS PMI_LOCAL_SIZE", "PALS_NODEID"),
    ),
    # No variable has the local size: it is computed from the tasks per host.
    SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    JSRUN: tuple(f"JSM_NAMESPACE_{field.upper()}" for field in FIELDS[:4]),
    PMIX: ("PMIX_RANK",),
}
# What older versions of Slurm write, or a step that was not told its own.
_SLURM_ELSE = {"SLURM_STEP_NUM_TASKS": ("SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_STEP_NUM_NODES": ("SLURM_NNODES",)}
# Slurm numbers what is no `srun` from here on: the batch script, the shell of an interactive `salloc`, ... (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    """The numbers that one launcher gives this process.

    Args:
        source: the launcher's name.
        values: the number of each field that the launcher sets.
        origins: the same fields, each with the variable and its text, such as `RANK=3`.
        names: its variables that are set, for who is to unset them.
    """

    source: str
    values: Mapping[str, int]
    origins: Mapping[str, str]
    names: tuple[str, ...]

    @property
    def names_rank(self) -> bool:
        """True if it names one of so many ranks; else it can only add to what another launcher says."""
        return "rank" in self.values and "size" in self.values

    def __str__(self) -> str:
        values = self.values
        positions: list[str] = []
        for title, (rank, size) in zip(("rank", "local rank", "host"), _PAIRS, strict=True):
            if rank in values or size in values:
                positions.append(f"{title} {values.get(rank, '?')} of {values.get(size, '?')}")
        origins = dict.fromkeys(self.origins.values())  # each once
        return f"{self.source} says {', '.join(positions)} ({', '.join(origins)})"


def read_launchers(environment: Mapping[str, str]) -> list[LauncherVariables]:
    """Return the variables of every launcher that has set any, the inner before the outer.

    Raises:
        UsageError: a variable is no number, or a launcher contradicts itself.
    """
    launchers: list[LauncherVariables] = []
    for source, names in NAMES.items():
        if source == SLURM:
            variables = _read_slurm(environment)
        elif source == PMIX and _is_no_step(environment):
            continue  # Slurm's PMIx numbers the shell of `salloc` as well
        else:
            variables = _read(environment, source, names)
        if variables is None:
            continue
        _check(variables)
        if source == TORCHRUN:
            variables = _check_torchrun(variables, environment)
        launchers.append(variables)
    return launchers


def _read(environment: Mapping[str, str], source: str, names_of_fields: tuple[str, ...]) -> LauncherVariables | None:
    """Return the numbers in one launcher's variables; None if none of them is set.

    Args:
        environment: the environment's variables.
        source: the launcher's name.
        names_of_fields: the names of the launcher's variables, as in NAMES.
    """
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    names: list[str] = []
    for field, choices in zip(FIELDS, names_of_fields, strict=False):
        for name in choices.split():
            if name not in environment:
                continue
            number = whole_number(environment[name], name, source)
            if values.setdefault(field, number) != number:
                raise _contradiction(source, f"{origins[field]} and {name}={number}", [origins[field].split("=")[0]])
            origins.setdefault(field, f"{name}={environment[name]}")
            names.append(name)
    return LauncherVariables(source, values, origins, tuple(names)) if names else None


def _check(variables: LauncherVariables) -> None:
    """Raise UsageError unless its numbers can be those of one process among so many."""
    if not _are_ranks_below_sizes(variables.values) or not _are_sizes_possible(variables):
        raise _contradiction(variables.source, _numbers_of(variables), variables.names)


def _are_ranks_below_sizes(values: Mapping[str, int]) -> bool:
    pairs = [(rank, size) for rank, size in _PAIRS if rank in values and size in values]
    return all(values[rank] < values[size] for rank, size in pairs)


def _are_sizes_possible(variables: LauncherVariables) -> bool:
    """Return True if size, local size and number of hosts are possible together."""
    size = variables.values.get("size")
    local = variables.values.get("local_size")
    hosts = variables.values.get("cross_size")
    # Nothing to compare with: `find_position` decides whether the launcher says enough.
    if size is None:
        return True
    for count in (local, hosts):
        if count is not None and not 1 <= count <= size:
            return False
    # Horovod's cross size is not the number of hosts where they are uneven, but of those that have this local rank.
    if local is None or hosts is None or variables.source == HOROVOD:
        return True
    if hosts == 1:
        return local == size
    return size - local >= hosts - 1  # each of the other hosts has a rank


def _numbers_of(variables: LauncherVariables) -> str:
    """Return the numbers that a launcher gives, without its name."""
    return str(variables).split(" says ", 1)[1]


def _contradiction(source: str, found: str, names: tuple[str, ...] | list[str]) -> UsageError:
    return UsageError(
        f"the variables of {source} should name one process among its ranks",
        f"they contradict each other: {found}",
        f"unset {', '.join(names)}, or leave them to {source}",
    )


def _check_torchrun(variables: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Check torchrun's numbers against each other and against its flags given as PET_* variables.

    Returns:
        The same, with the local rank of a pod that has one process (Kubeflow's PyTorchJob gives it no LOCAL_RANK).
    """
    values = variables.values
    # All five, as Kubeflow's PyTorchJob sets only some of torchrun's variables.
    if all(field in values for field in FIELDS[:5]) and not _is_torchrun_possible(values):
        raise _contradiction(TORCHRUN, _numbers_of(variables), variables.names)
    for flag, field in (("PET_NNODES", "cross_size"), ("PET_NPROC_PER_NODE", "local_size")):
        _check_flag(variables, flag, field, environment.get(flag, ""))
    is_alone = environment.get("PET_NPROC_PER_NODE") == "1"
    if not variables.names_rank or not is_alone or "local_rank" in values or "local_size" in values:
        return variables
    values_in_pod = {**values, "local_rank": 0, "local_size": 1}
    origins = {**variables.origins, "local_rank": "PET_NPROC_PER_NODE=1", "local_size": "PET_NPROC_PER_NODE=1"}
    return LauncherVariables(TORCHRUN, values_in_pod, origins, variables.names)


def _is_torchrun_possible(values: Mapping[str, int]) -> bool:
    """Return True if rank, local rank and group fit each other: torchrun numbers ranks group by group."""
    size, local, group = values["size"], values["local_size"], values["cross_rank"]
    before = values["rank"] - values["local_rank"]  # ranks of earlier groups
    if group == 0 and before != 0:
        return False
    if before < group or before + local > size:  # each earlier group has a rank at least
        return False
    is_even = size == values.get("cross_size", 0) * local
    return not is_even or before == group * local


def _check_flag(variables: LauncherVariables, flag: str, field: str, text: str) -> None:
    """Raise UsageError if a number is not what torchrun's flag asks for: N, or MIN:MAX."""
    low, _, high = text.partition(":")
    number = variables.values.get(field)
    least, most = parse_whole(low), parse_whole(high or low)
    if number is None or least is None or most is None:
        return
    if not least <= number <= most:
        raise _contradiction(TORCHRUN, f"{flag}={text} and {variables.origins[field]}", [flag])


def _is_no_step(environment: Mapping[str, str]) -> bool:
    return parse_whole(environment.get("SLURM_STEP_ID", ""), _FIRST_SPECIAL_STEP) is not None


def _read_slurm(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the numbers of Slurm's task; None outside of a step, where SLURM_PROCID=0 is the script itself."""
    if "SLURM_STEP_ID" not in environment or _is_no_step(environment):
        return None
    # Raises where it is no number: the port to meet at is computed from it.
    whole_number(environment["SLURM_STEP_ID"], "SLURM_STEP_ID", SLURM)
    chosen = tuple(_slurm_name(name, environment) for name in NAMES[SLURM])
    variables = _read(environment, SLURM, chosen)
    if variables is None:
        return LauncherVariables(SLURM, {}, {}, ("SLURM_STEP_ID",))
    if not variables.names_rank:
        return LauncherVariables(SLURM, variables.values, variables.origins, ("SLURM_STEP_ID",))
    _check(variables)
    return _with_tasks(variables, environment)


def _slurm_name(name: str, environment: Mapping[str, str]) -> str:
    """Return the variable that is set in place of `name`, or `name` itself."""
    if name not in environment:
        for alternative in _SLURM_ELSE.get(name, ()):
            if alternative in environment:
                return alternative
    return name


def _with_tasks(variables: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Add the local size, by this host's place in the list of tasks per host."""
    names = (*variables.names, "SLURM_STEP_ID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environment:
            continue
        counts = tasks_per_host(environment[name], name)
        host = variables.values.get("cross_rank", 0)
        hosts = variables.values.get("cross_size", len(counts))
        # Three ways in which the list can be of something else than this step.
        if sum(counts) != variables.values["size"] or len(counts) != hosts or host >= hosts:
            if name == "SLURM_TASKS_PER_NODE":
                continue  # may be the job's, of which the step is a part
            found = f"{name}={environment[name]}, {', '.join(variables.origins.values())}"
            raise _contradiction(SLURM, found, [name])
        is_even = len(set(counts)) == 1  # then it does not matter which host this is
        if "cross_rank" in variables.values or is_even:
            origin = f"{name}={environment[name]}"
            values = {**variables.values, "local_size": counts[host], "cross_size": hosts}
            origins = {"cross_size": origin, **variables.origins, "local_size": origin}
            return LauncherVariables(SLURM, values, origins, names)
    return LauncherVariables(SLURM, variables.values, variables.origins, names)
