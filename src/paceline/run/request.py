"""What `paceline run` is asked for, as one value that is made once, and what starts the ranks of such a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.host_choice import Shape
from paceline.launch.hosts import Host
from paceline.launch.mpi import MpiOptions
from paceline.launch.plan_choice import PlanRequest
from paceline.launch.ray import RayOptions
from paceline.launch.ssh import SshOptions
from paceline.nouns.errors import UsageError
from paceline.nouns.names import check_name
from paceline.nouns.user_program import MODULE
from paceline.rendezvous.launcher_env import LauncherPosition, NodeInfo, find_node, find_position
from paceline.run.directory import RunChoice
from paceline.run.job_settings import ELASTIC, NAMED_RANK, NODE, RANK
from paceline.run.supervise.membership import RESTARTS, WAIT_S
from paceline.run.supervise.stalls import VARIABLE, notice_time

_TORCHRUN = "torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Limits on hosts that come and go.

    Args:
        least, most: hosts of the job; None: one, and as many as there are.
        script: prints the hosts there are, a line each.
        slots: of a host that the script prints without a number.
        wait_s: the seconds to wait for enough hosts.
        restarts: the number of generations that may follow a failure.
    """

    least: int | None = None
    most: int | None = None
    script: Path | None = None
    slots: int = 1
    wait_s: float = WAIT_S
    restarts: int = RESTARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A job to start, or to be a part of.

    Args:
        file, arguments: the path of the user's file, and its arguments.
        place: what starts the ranks: one of PLACES, ELASTIC, NODE, NAMED_RANK, RANK.
        launcher: what another launcher says that this process is, where the place is one of the last three.
        plan, run: the plan and the run directory that are asked for.
        hosts: that were named.
        shape: hosts, and ranks on each.
        limits: of a job on hosts that come and go.
        environment: variables for the ranks.
        interface: for torch's sockets; "": the one that leads to the other hosts.
        python: on each host.
        ssh, mpi, ray: options of what starts the ranks.
        grace_s: for a checkpoint after Ctrl-C or SIGTERM.
        stall_notice_s: seconds without progress until a notice; 0: never.
        stall_timeout_s: seconds without progress until the job is ended; 0: never.
        max_restarts: after ranks that died.
        is_json: True where standard output is only for the result.
        is_dry_run: nothing is started.
        flags: the flags that were given, by the names of their settings.
    """

    file: str
    arguments: tuple[str, ...]
    place: str
    launcher: LauncherPosition | NodeInfo | None
    plan: PlanRequest
    run: RunChoice
    hosts: tuple[Host, ...] = ()
    shape: Shape | None = None
    limits: HostLimits = field(default_factory=HostLimits)
    environment: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    python: str
    ssh: SshOptions = field(default_factory=SshOptions)
    mpi: MpiOptions = field(default_factory=MpiOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    grace_s: float
    stall_notice_s: float
    stall_timeout_s: float = 0.0
    max_restarts: int = 0
    is_json: bool = False
    is_dry_run: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_host_settings(self.python, self.interface)

    @property
    def module(self) -> str:
        """The name of the module that `file` is, where it is run as one."""
        return self.environment.get(MODULE, "") or os.environ.get(MODULE, "")


def check_host_settings(python: str, interface: str) -> None:
    """Raise UsageError where the Python or the network interface of a job's hosts can't be used."""
    check_name("program", python, fix="write the path of a Python with --python", settings=("python",))
    if interface:
        check_name("interface", interface, settings=("interface",))


def find_launcher(on: str | None, environment: Mapping[str, str]) -> LauncherPosition | NodeInfo | None:
    """Return what the environment says that this process is: a rank, or a node of a job; None: neither.

    Args:
        on: what starts the ranks; where it is named, the job starts from here, whatever the environment has.
        environment: of this process.

    Raises:
        UsageError: two launchers contradict each other, or many ranks were promised and this is the only one.
    """
    if on is not None:
        return None
    # A node before a rank: the one process of a node may have a rank's variables as well.
    node = find_node(environment)
    if node is not None:
        return node
    position = find_position(environment)
    # A launcher that says "one rank" is as good as none: the job starts from here. Under torchrun it is a rank anyway.
    if position.size > 1 or position.source == _TORCHRUN:
        return position
    return None


def place_of(launcher: LauncherPosition | NodeInfo | None, on: str | None, job: str | None, limits: HostLimits) -> str:
    """Return what starts the ranks."""
    if isinstance(launcher, LauncherPosition):
        return NAMED_RANK if job else RANK
    if launcher is not None:
        return NODE
    place = on or "local"
    return ELASTIC if limits != HostLimits() and place in ("local", "ssh") else place


def stall_notice_of(
    seconds: float | None, definitions: Sequence[str], environment: Mapping[str, str] = os.environ
) -> float:
    """Return the seconds without progress until a notice: the flag's, or else what the ranks' environment says.

    Args:
        seconds: of the flag.
        definitions: variables for the ranks, as -x has them; whether all of them can be is checked later.
        environment: that the ranks have beside these.

    Raises:
        UsageError: it is no number of seconds.
    """
    stall_variable = {}
    for definition in definitions:
        name, equals, value = definition.partition("=")
        if name == VARIABLE and equals:
            stall_variable[name] = value
    if seconds is None:
        return notice_time({**environment, **stall_variable})
    notice_time(stall_variable)  # the ranks read it, beside the flag too
    if not 0 <= seconds < float("inf"):
        raise UsageError(
            f"--stall-notice {seconds:g}", "it is no number of seconds", "write seconds, or 0 for no notice"
        )
    return seconds


def stall_timeout_of(seconds: float | None, notice_s: float, notice_name: str) -> float:
    """Return the seconds without progress until a job is ended; 0: it never is.

    Args:
        seconds: of the flag; None: it was not given.
        notice_s: seconds without progress until a notice, which is to come first; 0: there is none.
        notice_name: by which the notice's time can be changed.

    Raises:
        UsageError: it is no number of seconds, or no longer than the notice's.
    """
    if not seconds:
        return 0.0
    if not 0 < seconds < float("inf"):
        found = "it is no number of seconds"
        raise UsageError(f"--stall-timeout {seconds:g}", found, "write seconds, or leave it out for no end")
    if seconds <= notice_s:
        raise UsageError(
            f"--stall-timeout {seconds:g}",
            f"the notice of where each rank is comes after {notice_s:g} s, and the job would end before it",
            f"write more than {notice_s:g}, or a smaller {notice_name}",
        )
    return seconds
