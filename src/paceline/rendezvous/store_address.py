"""Where ranks meet whose launcher does not say it: a file on one host, rank 0's store for several.

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


def meeting_file(source: str, environment: Mapping[str, str]) -> str:
    """The file where the ranks of one host meet, in a folder for this user alone, which the caller makes.

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
    token = re.sub(r"[^A-Za-z0-9]+", "_", "-".join([source, *marks])).strip("_")
    folder = f"paceline-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    return str(Path(environment.get("TMPDIR", "/tmp"), folder, token[:200]))


def given_master(source: str, environment: Mapping[str, str]) -> tuple[tuple[str, int], str] | None:
    """HOST and PORT of rank 0's store where a person or launcher gave them, and the variables that did.

    Raises:
        UsageError: one is given without the other, is no address, or two differ.
    """
    ours = environment.get("PACELINE_MASTER")
    own = host_and_port(ours, "PACELINE_MASTER", "paceline run") if ours else None
    if own and source == launchers.PACELINE:
        return own, f"PACELINE_MASTER={ours}"  # MASTER_ADDR may be left over from the batch script around it
    torchs = address(environment, MASTER, "the environment")
    if own and torchs and own != torchs:
        raise UsageError(
            "PACELINE_MASTER and MASTER_ADDR with MASTER_PORT should name one place to meet",
            f"PACELINE_MASTER={ours}, MASTER_ADDR={environment[MASTER[0]]} and MASTER_PORT={environment[MASTER[1]]}",
            "unset PACELINE_MASTER, or MASTER_ADDR and MASTER_PORT",
        )
    if torchs:
        return torchs, " ".join(f"{name}={environment[name]}" for name in MASTER)
    return (own, f"PACELINE_MASTER={ours}") if own else None


def computed_master(source: str, hosts: int, environment: Mapping[str, str]) -> tuple[tuple[str, int], str]:
    """HOST and PORT of rank 0's store on one of several hosts, from the scheduler's list, and how they were found.

    Args:
        source: the launcher.
        hosts: how many hosts the ranks are on.
        environment: the variables; LSF's may name a file of hosts, which is read.

    Raises:
        UsageError: the launcher names no hosts, or not as many.
    """
    if source == launchers.SLURM:
        name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if n in environment), None)
        if name is not None and "SLURM_JOB_ID" in environment:
            names = hosts_of(environment[name], name)
            _check_hosts(name, environment[name], len(names), hosts)
            job, step = (whole_number(environment[n], n, source) for n in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
            how = f"computed from {name}={environment[name]}, SLURM_JOB_ID={job}, SLURM_STEP_ID={step}"
            return (names[0], _FIRST_PORT + (job * 31 + step) % _PORTS), how
    if source == launchers.JSRUN and "LSB_JOBID" in environment:
        name, names = _lsf_hosts(environment, hosts)
        if names:
            job = whole_number(environment["LSB_JOBID"], "LSB_JOBID", "LSF")
            return (names[0], _FIRST_PORT + job * 31 % _PORTS), f"computed from {name}, LSB_JOBID={job}"
    by_mpirun = ": `mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`" if source == launchers.OPEN_MPI else ""
    raise UsageError(
        f"the ranks of {source} should meet on rank 0's host",
        f"they are on several hosts, and {source} does not say where rank 0 is",
        f"set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port on it, for all ranks{by_mpirun}",
    )


def _check_hosts(name: str, text: str, there: int, hosts: int) -> None:
    if name == "SLURM_STEP_NODELIST" and there != hosts:
        raise UsageError(
            f"{name} should name the hosts of the step",
            f"{name}={text} names {there}, and the step's other variables say {hosts}",
            "leave the variables of the step to `srun`, or set MASTER_ADDR and MASTER_PORT",
        )


def _lsf_hosts(environment: Mapping[str, str], hosts: int) -> tuple[str, list[str]]:
    """LSF's hosts without the one that runs the batch script, and the variable that has them."""
    name = "LSB_DJOB_RANKFILE"
    try:
        words = read_text(Path(environment[name])).split()
    except (KeyError, ReadError):
        name, words = "LSB_HOSTS", environment.get("LSB_HOSTS", "").split()
    names = list(dict.fromkeys(words))
    # The first one is where the batch script runs: one slot, and no rank of jsrun on most machines.
    if len(names) > hosts and words.count(names[0]) == 1:
        names = names[1:]
    return f"{name}={environment.get(name, '')}", names


def _launcher_process(processes: tuple[str, ...], is_outermost: bool) -> list[str]:
    """Process id and start time of the nearest ancestor of one of these names, or of the farthest; [] without one.

    `horovodrun` forks a copy of itself for every rank, so that only the farthest is common to all.
    """
    found: list[str] = []
    process = os.getppid()
    while processes and process > 1:
        try:
            stat = (_PROCESSES / str(process) / "stat").read_text(errors="replace")  # a name can be any bytes
        except OSError:  # no Linux, another user's process, or one that has just ended
            break
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()  # from field 3 on: the state, the parent, ...
        if name in processes:
            found = [str(process), fields[19]]  # field 22: when it started, in ticks since the host did
            if not is_outermost:
                break
        process = int(fields[1])
    return found
