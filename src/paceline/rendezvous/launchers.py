"""What each launcher says, in its own variables, of the process that it started.

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

PACELINE, TORCHRUN, HOROVOD, OPEN_MPI, MVAPICH = "paceline run", "torchrun", "Horovod", "Open MPI", "MVAPICH2"
PMI, SLURM, JSRUN, PMIX = "MPICH (PMI)", "Slurm", "jsrun", "PMIx"
FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
# The variables of each field, in FIELDS' order. Where there are several, those that are set must say the same.
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
    """What one launcher says of this process.

    Args:
        source: the launcher.
        values: number by field, of those that it says.
        origins: the same fields, each with the variable and its text, such as `RANK=3`.
        names: its variables that are set, for who is to unset them.
    """

    source: str
    values: Mapping[str, int]
    origins: Mapping[str, str]
    names: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it names one of so many ranks; else it can only add to what another launcher says."""
        return "rank" in self.values and "size" in self.values

    def __str__(self) -> str:
        values, words = self.values, []
        for what, number, many in (
            ("rank", "rank", "size"),
            ("local rank", "local_rank", "local_size"),
            ("host", "cross_rank", "cross_size"),
        ):
            if number in values or many in values:
                words.append(f"{what} {values.get(number, '?')} of {values.get(many, '?')}")
        return f"{self.source} says {', '.join(words)} ({', '.join(dict.fromkeys(self.origins.values()))})"


def read_launchers(environment: Mapping[str, str]) -> list[LauncherVariables]:
    """What every launcher says whose variables are set, the inner before the outer.

    Raises:
        UsageError: a variable is no number, or a launcher contradicts itself.
    """
    said = []
    for source, variables in NAMES.items():
        if source == SLURM:
            one = _read_slurm(environment)
        elif source == PMIX and _is_no_step(environment):
            continue  # Slurm's PMIx numbers the shell of `salloc` as well
        else:
            one = _read(environment, source, variables)
        if one is not None:
            _check(one)
            said.append(_check_torchrun(one, environment) if source == TORCHRUN else one)
    return said


def _read(environment: Mapping[str, str], source: str, variables: tuple[str, ...]) -> LauncherVariables | None:
    values: dict[str, int] = {}
    origins: dict[str, str] = {}
    names: list[str] = []
    for field, choices in zip(FIELDS, variables, strict=False):
        for name in choices.split():
            if name not in environment:
                continue
            number = whole_number(environment[name], name, source)
            if values.setdefault(field, number) != number:
                raise _contradiction(source, f"{origins[field]} and {name}={number}", [origins[field].split("=")[0]])
            origins.setdefault(field, f"{name}={environment[name]}")
            names.append(name)
    return LauncherVariables(source, values, origins, tuple(names)) if names else None


def _check(said: LauncherVariables) -> None:
    """Raise UsageError unless its numbers can be those of one process among so many."""
    values = said.values
    pairs = [("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")]
    is_below = all(values[low] < values[high] for low, high in pairs if low in values and high in values)
    size, local, hosts = (values.get(field) for field in ("size", "local_size", "cross_size"))
    is_within = size is None or all(many is None or 1 <= many <= size for many in (local, hosts))
    # Each of the other hosts has a rank; one host has them all. Horovod's cross size is not the number of hosts
    # where they are uneven, but of those that have this local rank.
    if size and local and hosts and said.source != HOROVOD:
        is_within = is_within and size - local >= hosts - 1 and (hosts > 1 or local == size)
    if not (is_below and is_within):
        raise _contradiction(said.source, str(said).split(" says ", 1)[1], said.names)


def _contradiction(source: str, found: str, names: tuple[str, ...] | list[str]) -> UsageError:
    return UsageError(
        f"the variables of {source} should name one process among its ranks",
        f"they contradict each other: {found}",
        f"unset {', '.join(names)}, or leave them to {source}",
    )


def _check_torchrun(said: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Hold torchrun's numbers against each other and against its flags given as PET_* variables.

    Returns:
        The same, with the local rank of a pod that has one process (Kubeflow's PyTorchJob gives it no LOCAL_RANK).
    """
    values = said.values
    if all(field in values for field in FIELDS[:5]):
        size, local, group = values["size"], values["local_size"], values["cross_rank"]
        before = values["rank"] - values["local_rank"]  # ranks of earlier groups: torchrun numbers group by group
        is_even = size == values.get("cross_size", 0) * local
        is_possible = before >= group and (group > 0 or before == 0) and before + local <= size
        if not is_possible or (is_even and before != group * local):
            raise _contradiction(TORCHRUN, str(said).split(" says ", 1)[1], said.names)
    for flag, field in (("PET_NNODES", "cross_size"), ("PET_NPROC_PER_NODE", "local_size")):
        _check_flag(said, flag, field, environment.get(flag, ""))
    is_alone = environment.get("PET_NPROC_PER_NODE") == "1"
    if said.is_whole and is_alone and "local_rank" not in values and "local_size" not in values:
        origins = dict.fromkeys(("local_rank", "local_size"), "PET_NPROC_PER_NODE=1")
        return LauncherVariables(
            TORCHRUN, {**values, "local_rank": 0, "local_size": 1}, {**said.origins, **origins}, said.names
        )
    return said


def _check_flag(said: LauncherVariables, flag: str, field: str, text: str) -> None:
    low, _, high = text.partition(":")
    number = said.values.get(field)
    least, most = parse_whole(low), parse_whole(high or low)
    if number is None or least is None or most is None:
        return
    if not least <= number <= most:
        raise _contradiction(TORCHRUN, f"{flag}={text} and {said.origins[field]}", [flag])


def _is_no_step(environment: Mapping[str, str]) -> bool:
    return parse_whole(environment.get("SLURM_STEP_ID", ""), _FIRST_SPECIAL_STEP) is not None


def _read_slurm(environment: Mapping[str, str]) -> LauncherVariables | None:
    """What Slurm says of a step's task; None outside of a step, where SLURM_PROCID=0 stands for the script itself."""
    if "SLURM_STEP_ID" not in environment or _is_no_step(environment):
        return None
    whole_number(environment["SLURM_STEP_ID"], "SLURM_STEP_ID", SLURM)
    chosen = []
    for name in NAMES[SLURM]:
        others = [other for other in _SLURM_ELSE.get(name, ()) if other in environment]
        chosen.append(others[0] if others and name not in environment else name)
    said = _read(environment, SLURM, tuple(chosen))
    if said is None or not said.is_whole:
        return LauncherVariables(SLURM, said.values if said else {}, said.origins if said else {}, ("SLURM_STEP_ID",))
    _check(said)
    return _with_tasks(said, environment)


def _with_tasks(said: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """With the local size, by this host's place in the list of tasks per host."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environment:
            continue
        counts = tasks_per_host(environment[name], name)
        host, hosts = said.values.get("cross_rank", 0), said.values.get("cross_size", len(counts))
        if sum(counts) != said.values["size"] or len(counts) != hosts or host >= hosts:
            if name == "SLURM_TASKS_PER_NODE":
                continue  # may be the job's, of which the step is a part
            found = f"{name}={environment[name]}, {', '.join(said.origins.values())}"
            raise _contradiction(SLURM, found, [name])
        if "cross_rank" in said.values or len(set(counts)) == 1:
            origin = f"{name}={environment[name]}"
            values = {**said.values, "local_size": counts[host], "cross_size": hosts}
            origins = {"cross_size": origin, **said.origins, "local_size": origin}
            return LauncherVariables(SLURM, values, origins, (*said.names, "SLURM_STEP_ID"))
    return LauncherVariables(SLURM, said.values, said.origins, (*said.names, "SLURM_STEP_ID"))
