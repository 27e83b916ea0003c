"""Ranks under mpirun: Open MPI's and MPICH's (and Intel MPI's, which is MPICH's).

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


@dataclass(frozen=True, slots=True)
class Mpirun:
    """An mpirun.

    Args:
        program: which.
        flavor: "openmpi" or "mpich".
        more: arguments of the user's.
    """

    program: str
    flavor: str
    more: tuple[str, ...] = ()


def find_mpirun(program: str = "", more: Sequence[str] = ()) -> Mpirun:
    """The mpirun to call, and whose it is.

    Args:
        program: which; "": the first of mpirun and mpiexec in PATH.
        more: arguments of the user's.

    Raises:
        UsageError: there is none, or it is nobody's that is known.
    """
    known = [program] if program else ["mpirun", "mpiexec"]
    found = next((path for path in map(shutil.which, known) if path), None)
    if found is None:
        raise UsageError(
            f"can't start ranks by {' or '.join(known)}", "there is no such program", "install Open MPI or MPICH"
        )
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
        told = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"can't tell which MPI {found} is of", f"`{found} --version` did not end well ({error})", "name another"
        ) from None
    if re.search(r"Open ?MPI|OpenRTE|PRRTE", told, re.IGNORECASE):
        return Mpirun(found, "openmpi", tuple(more))
    if re.search(r"HYDRA|MPICH|Intel\(R\) MPI", told, re.IGNORECASE):
        return Mpirun(found, "mpich", tuple(more))
    first = (told.strip().splitlines() or ["nothing"])[0]
    raise UsageError(
        f"can't tell which MPI {found} is of", f"it says {first!r}", "name Open MPI's or MPICH's with --mpirun"
    )


def mpi_command(
    mpirun: Mpirun, ranks: int, hosts: Sequence[Host], variables: Sequence[str], words: Sequence[str]
) -> list[str]:
    """What starts the ranks.

    Args:
        mpirun: by which.
        ranks: of the job.
        hosts: where; none: this host, or where a scheduler says.
        variables: names that go to the ranks.
        words: a rank's command.
    """
    own = _openmpi(ranks, hosts, variables) if mpirun.flavor == "openmpi" else _mpich(ranks, hosts, variables)
    return [mpirun.program, *own, *mpirun.more, *words]


def _openmpi(ranks: int, hosts: Sequence[Host], variables: Sequence[str]) -> list[str]:
    places = ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)] if hosts else ["--oversubscribe"]
    given = [word for name in variables for word in ("-x", name)]
    return ["-np", str(ranks), *places, "--bind-to", "none", "--tag-output", *given]


def _mpich(ranks: int, hosts: Sequence[Host], variables: Sequence[str]) -> list[str]:
    places = ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)] if hosts else []
    given = ["-genvlist", ",".join(variables)] if variables else []
    return ["-n", str(ranks), *places, "-prepend-rank", *given]
