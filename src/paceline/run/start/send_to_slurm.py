"""Send a job to Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.host_choice import Shape
from paceline.launch.plan_choice import PlanRequest, choose_plan
from paceline.launch.rank_command import RankCommand, is_secret
from paceline.launch.slurm import SlurmOptions, check_environment, check_sbatch, sbatch_script, submit
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import MODULE
from paceline.run import directory
from paceline.run.directory import RunChoice
from paceline.run.request import check_host_settings
from paceline.run.start.start_servers import check_servers


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """A job to send to Slurm.

    Args:
        file, arguments: the path of the user's file, and its arguments.
        plan, run: the plan and the run directory that are asked for.
        options: the options of the sbatch script.
        shape: the number of nodes, and of ranks on each; None: one node.
        environment: the variables for the ranks.
        interface: the network interface for torch's sockets; "": the one that leads to the other hosts.
        python: the Python program on each node.
        stall_timeout_s: the seconds without progress until the job is ended; 0: never.
    """

    file: str
    arguments: tuple[str, ...]
    plan: PlanRequest
    run: RunChoice
    options: SlurmOptions
    shape: Shape | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    python: str = sys.executable
    stall_timeout_s: float = 0.0

    @property
    def module(self) -> str:
        """Return the name of the module that `file` is, where it is run as one."""
        return self.environment.get(MODULE, "") or os.environ.get(MODULE, "")

    def __post_init__(self) -> None:
        check_host_settings(self.python, self.interface)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that Slurm has taken.

    Args:
        number: the number that Slurm gave the job.
        run_dir: the run directory of the job.
    """

    number: str
    run_dir: Path

    @property
    def log(self) -> Path:
        """Return the file that Slurm writes the job's output to."""
        return self.run_dir / f"slurm-{self.number}.log"


def slurm_script(request: SlurmRequest, notice: Callable[[str], None]) -> str:
    """Return the sbatch script that would be sent.

    Raises:
        PacelineError: the request can't be met.
    """
    plan, script = _checked(request, notice)
    return _render(request, plan, request.run.planned_folder(script), script)


def send_to_slurm(request: SlurmRequest, notice: Callable[[str], None]) -> SlurmJob:
    """Make the run directory, and hand the job to Slurm.

    Raises:
        PacelineError: the request can't be met, there is no Slurm here, or it refuses.
    """
    plan, script = _checked(request, notice)
    _render(request, plan, request.run.planned_folder(script), script)  # refuses before there is a folder
    check_sbatch(request.options)
    owned, _ = directory.choose_run(request.run, script, lambda text: notice(f"paceline: {text}"), plan.copy_to)
    folder = owned.folder
    try:
        with owned:  # not longer: the job may start before sbatch returns, and takes it then
            directory.write_start(folder, plan, script, request.arguments)
        secrets = {name: value for name, value in request.environment.items() if is_secret(name)}
        number = submit(_render(request, plan, folder, script), request.options, {**os.environ, **secrets})
    except BaseException:  # Ctrl-C too: a job that was not sent leaves no folder, and its name stays free
        directory.remove_unbegun(folder)
        raise
    return SlurmJob(number, folder)


def _checked(request: SlurmRequest, notice: Callable[[str], None]) -> tuple[Plan, Path]:
    """Return the plan, and the path of the workload file."""
    plan = choose_plan(request.plan, notice)
    check_servers(plan, "slurm")
    file = read_workload_file(request.file, plan.data_size, plan, request.module)
    if file.plain is not None:
        raise UsageError(
            f"can't send {file.path} to Slurm",
            f"it {file.plain.found}, and srun does not set the variables of torchrun",
            "write a batch script with `srun torchrun`, or train by paceline.prepare: see docs/migrate.md",
        )
    return plan, file.path


def _environment(request: SlurmRequest) -> dict[str, str]:
    environment = dict(request.environment)
    if request.interface:
        environment["PACELINE_INTERFACE"] = request.interface
    return environment


def _render(request: SlurmRequest, plan: Plan, run_dir: Path, file: Path) -> str:
    shape = request.shape or Shape(1, plan.world_size)
    rank = RankCommand(
        file,
        request.arguments,
        plan,
        run_dir.parent,
        run_dir.name,
        nodes=shape.nodes,
        ranks_per_node=shape.ranks_per_node,
        environment=_environment(request),
        python=request.python,
        stall_timeout_s=request.stall_timeout_s,
    )
    check_environment(rank, request.options, os.environ)
    return sbatch_script(rank, request.options)
