"""Find the place where ranks meet: a file on one host, the address of rank 0's store for several.

The file's name must be the same for all ranks of one start and no other. It is made of the launcher's name for
the job, and of the process id and start time of the launcher's own process among this process's ancestors; the
parent will not do, for `mpirun sh script` gives every rank a shell of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import read_text
from paceline.rendezvous import launchers
from paceline.rendezvous.hostlist import hosts_of
from paceline.rendezvous.variables import address, host_and_port, whole_number

MASTER = ("MASTER_ADDR", "MASTER_PORT")
# By launcher: the variables that name a job, and its process above the ranks, as the kernel shortens it.
# Needed to tell this start from an earlier or a simultaneous one: a file that an earlier job left has other ranks in
# it.
_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    launchers.HOROVOD: (("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), ("horovodrun",)),
    launchers.OPEN_MPI: (
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        ("mpirun", "mpiexec", "orterun", "prterun", "prte", "prted", "orted"),
    ),
    launchers.MVAPICH: (("MPIRUN_ID",), ("mpispawn", "hydra_pmi_proxy")),
    launchers.PMI: (("PALS_APID", "PMI_JOBID"), ("hydra_pmi_proxy", "pmi_proxy", "mpiexec.gforker")),
    launchers.SLURM: (("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), ("slurmstepd",)),
    launchers.JSRUN: (("LSB_JOBID", "PMIX_NAMESPACE"), ()),
}
# A port computed from a job's number lies below those that Linux (32768) and Kubernetes (30000) hand out.
_FIRST_PORT, _PORTS = 12000, 18000
_PROCESSES = Path("/proc")
_MOST_CHARACTERS = 200  # of a file's name, which may have 255 on Linux


def meeting_file(source: str, environment: Mapping[str, str]) -> str:
    """Return the file where the ranks of one host meet, in a folder for only this user, which the caller makes.

    Raises:
        UsageError: nothing tells this start of `source` from another one.
    """
    variables, processes = _MARKS.get(source, ((), ()))
    marks = [environment[name] for name in variables if name in environment]
    marks += _launcher_process(processes, is_outermost=source == launchers.HOROVOD)
    if not marks:
        raise UsageError(
            f"the ranks of {source} should meet",
            f"none of {', '.join((*variables, 'MASTER_ADDR'))} is set, and no process of {source} is above this one",
            "set MASTER_ADDR and MASTER_PORT for all ranks, such as 127.0.0.1 and 29500",
        )
    # Only letters and digits: a variable's content must not lead out of the folder.
    token = re.sub(r"[^A-Za-z0-9]+", "_", "-".join([source, *marks])).strip("_")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    # By user: another one may own a folder of the same name. `process_group._file_store` checks who owns it.
    folder = Path(environment.get("TMPDIR", "/tmp"), f"paceline-{user}")
    return str(folder / token[:_MOST_CHARACTERS])


def given_master(source: str, environment: Mapping[str, str]) -> tuple[tuple[str, int], str] | None:
    """Return HOST and PORT of rank 0's store where a user or launcher gave them, and the variables that did.

    Raises:
        UsageError: one is given without the other, is no address, or two differ.
    """
    text = environment.get("PACELINE_MASTER")
    by_paceline = host_and_port(text, "PACELINE_MASTER", "paceline run") if text else None
    origin = f"PACELINE_MASTER={text}"
    if by_paceline is not None and source == launchers.PACELINE:
        return by_paceline, origin  # MASTER_ADDR may be left over from the batch script around it
    by_torch = address(environment, MASTER, "the environment")
    if by_torch is None:
        return None if by_paceline is None else (by_paceline, origin)
    if by_paceline is not None and by_paceline != by_torch:
        raise UsageError(
            "PACELINE_MASTER and MASTER_ADDR with MASTER_PORT should name one place to meet",
            f"{origin}, MASTER_ADDR={environment[MASTER[0]]} and MASTER_PORT={environment[MASTER[1]]}",
            "unset PACELINE_MASTER, or MASTER_ADDR and MASTER_PORT",
        )
    return by_torch, " ".join(f"{name}={environment[name]}" for name in MASTER)


def computed_master(source: str, hosts: int, environment: Mapping[str, str]) -> tuple[tuple[str, int], str]:
    """Return HOST and PORT of rank 0's store, on one of several hosts of the scheduler's list, and their origin.

    Args:
        source: the launcher's name.
        hosts: the number of hosts that the ranks are on.
        environment: the environment's variables; LSF's may name a file of hosts, which is read.

    Raises:
        UsageError: the launcher names no hosts, or not as many.
    """
    if source == launchers.SLURM and "SLURM_JOB_ID" in environment:
        # The step's list first: rank 0 is on its first host, which need not be the job's.
        for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
            if name in environment:
                return _slurm_master(name, hosts, environment)
    if source == launchers.JSRUN and "LSB_JOBID" in environment:
        origin, names = _lsf_hosts(environment, hosts)
        if names:
            job = whole_number(environment["LSB_JOBID"], "LSB_JOBID", "LSF")
            port = _FIRST_PORT + job * 31 % _PORTS
            return (names[0], port), f"computed from {origin}, LSB_JOBID={job}"
    by_mpirun = ": `mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`" if source == launchers.OPEN_MPI else ""
    raise UsageError(
        f"the ranks of {source} should meet on rank 0's host",
        f"they are on several hosts, and {source} does not say where rank 0 is",
        f"set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port on it, for all ranks{by_mpirun}",
    )


def _slurm_master(name: str, hosts: int, environment: Mapping[str, str]) -> tuple[tuple[str, int], str]:
    """Return the first host of the list in the variable `name`, with a port by job and step."""
    names = hosts_of(environment[name], name)
    _check_hosts(name, environment[name], len(names), hosts)
    job = whole_number(environment["SLURM_JOB_ID"], "SLURM_JOB_ID", launchers.SLURM)
    step = whole_number(environment["SLURM_STEP_ID"], "SLURM_STEP_ID", launchers.SLURM)
    # By job and step, as jobs may share a host. Consecutive jobs are 31 ports apart: their first steps don't meet.
    port = _FIRST_PORT + (job * 31 + step) % _PORTS
    origin = f"computed from {name}={environment[name]}, SLURM_JOB_ID={job}, SLURM_STEP_ID={step}"
    return (names[0], port), origin


def _check_hosts(name: str, text: str, listed: int, hosts: int) -> None:
    """Raise UsageError unless the list of a step has as many hosts as the step; that of a job may have more."""
    if name == "SLURM_STEP_NODELIST" and listed != hosts:
        raise UsageError(
            f"{name} should name the hosts of the step",
            f"{name}={text} names {listed}, and the step's other variables say {hosts}",
            "leave the variables of the step to `srun`, or set MASTER_ADDR and MASTER_PORT",
        )


def _lsf_hosts(environment: Mapping[str, str], hosts: int) -> tuple[str, list[str]]:
    """Return LSF's variable with its text, and its hosts without the one that runs only the batch script."""
    name = "LSB_DJOB_RANKFILE"
    try:
        slots = read_text(Path(environment[name])).split()
    except (KeyError, ReadError):
        name = "LSB_HOSTS"
        slots = environment.get(name, "").split()
    names = list(dict.fromkeys(slots))  # a host stands there once for each of its slots
    # The first one is where the batch script runs: one slot, and no rank of jsrun on most machines.
    if len(names) > hosts and slots.count(names[0]) == 1:
        names = names[1:]
    return f"{name}={environment.get(name, '')}", names


def _launcher_process(processes: tuple[str, ...], is_outermost: bool) -> list[str]:
    """Return process id and start time of the nearest ancestor of one of these names, or of the farthest; [] without.

    `horovodrun` forks a copy of itself for every rank, so that only the farthest is common to all.
    """
    launcher: list[str] = []
    process = os.getppid()
    # Up through the parents; init (1) is no launcher.
    while processes and process > 1:
        try:
            stat = (_PROCESSES / str(process) / "stat").read_text(errors="replace")  # a name can be any bytes
        except OSError:  # no Linux, another user's process, or one that has just ended
            break
        # As proc_pid_stat(5) has it: the id, the name in brackets, which may have brackets itself, then the rest.
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()  # from field 3 on: the state, the parent, ...
        if name in processes:
            # With the start time, as process ids are used again.
            launcher = [str(process), fields[19]]  # field 22: when it started, in ticks since the host did
            if not is_outermost:
                break
        process = int(fields[1])
    return launcher
