"""Write the command that starts ranks under mpirun: Open MPI's and MPICH's (and Intel MPI's, which is MPICH's).

Variables go by name, so that no value stands on a command line: the launcher reads them from its own environment.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.hosts import Host
from paceline.nouns.errors import UsageError

_NAME_ONE = "name Open MPI's or MPICH's with `mpirun` in the table [mpi] of the cluster file (--cluster)"
_SETTINGS = ("mpirun",)  # that errors are about


@dataclass(frozen=True, slots=True)
class MpiOptions:
    """The mpirun to look for, and the user's arguments for it.

    Args:
        mpirun: the program to call; "": the first of mpirun and mpiexec in PATH.
        more: the user's own arguments for mpirun.
    """

    mpirun: str = ""
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mpirun:
    """An mpirun that was found on this host.

    Args:
        program: the path or name of the program.
        flavor: the family of its flags, "openmpi" or "mpich".
        more: the user's own arguments for mpirun.
    """

    program: str
    flavor: str
    more: tuple[str, ...] = ()


def find_mpirun(options: MpiOptions) -> Mpirun:
    """Find the mpirun to call, and its family: the flags of the two families differ.

    Raises:
        UsageError: there is none, or it is of no known family.
    """
    programs = _programs(options)
    path = _path_of(programs)
    if path is None:
        fix = "install Open MPI or MPICH"
        if options.mpirun:  # of the cluster file: there may be another one in PATH
            fix += ", or name another with mpirun under [mpi] in the cluster file"
        raise UsageError(f"{' or '.join(programs)} to start ranks", "there is no such program", fix, _SETTINGS)
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
        answer = completed.stdout + completed.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        found = f"`{path} --version` did not end well ({error})"
        raise UsageError(f"what {path} is", found, "name another", _SETTINGS) from None
    if re.search(r"Open ?MPI|OpenRTE|PRRTE", answer, re.IGNORECASE):
        return Mpirun(path, "openmpi", options.more)
    if re.search(r"HYDRA|MPICH|Intel\(R\) MPI", answer, re.IGNORECASE):
        return Mpirun(path, "mpich", options.more)
    lines = answer.strip().splitlines() or ["nothing"]
    raise UsageError(f"what {path} is", f"it says {lines[0]!r}", _NAME_ONE, _SETTINGS)


def mpirun_to_show(options: MpiOptions) -> tuple[Mpirun, list[str]]:
    """Return the mpirun for a dry run, and remarks on it: where this host has none, Open MPI's flags are shown.

    Raises:
        UsageError: it is of no known family.
    """
    programs = _programs(options)
    if _path_of(programs) is not None:
        return find_mpirun(options), []
    remark = f"# there is no {' or '.join(programs)} here; these are the flags of Open MPI's"
    return Mpirun(programs[0], "openmpi", options.more), [remark]


def _programs(options: MpiOptions) -> list[str]:
    return [options.mpirun] if options.mpirun else ["mpirun", "mpiexec"]


def _path_of(programs: Sequence[str]) -> str | None:
    return next(filter(None, map(shutil.which, programs)), None)


def mpi_command(
    mpirun: Mpirun, ranks: int, hosts: Sequence[Host], variables: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command that starts the ranks.

    Args:
        mpirun: the mpirun to call.
        ranks: the number of ranks of the job.
        hosts: the hosts for the ranks; none: this host, or those of a scheduler.
        variables: the names of the variables that go to the ranks.
        command: the command line of a rank.
    """
    flags_of = _openmpi if mpirun.flavor == "openmpi" else _mpich
    return [mpirun.program, *flags_of(ranks, hosts, variables), *mpirun.more, *command]


def _openmpi(ranks: int, hosts: Sequence[Host], variables: Sequence[str]) -> list[str]:
    flags = ["-np", str(ranks)]
    if hosts:
        flags += ["-H", _host_list(hosts)]
    else:
        flags += ["--oversubscribe"]  # else it starts no more ranks than this host has cores
    # The tag names the rank whose line it is: see run/supervise/command_backend.py.
    # By default Open MPI binds a rank, with all of its threads, to a core or a socket.
    flags += ["--bind-to", "none", "--tag-output"]
    for name in variables:
        flags += ["-x", name]
    return flags


def _mpich(ranks: int, hosts: Sequence[Host], variables: Sequence[str]) -> list[str]:
    flags = ["-n", str(ranks)]
    if hosts:
        flags += ["-hosts", _host_list(hosts)]
    flags += ["-prepend-rank"]  # as --tag-output
    if variables:
        flags += ["-genvlist", ",".join(variables)]
    return flags


def _host_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
