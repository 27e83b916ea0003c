"""Start a job's ranks on other hosts, under mpirun or Ray: check that it can be done, show the commands, run them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.manifest import list_checkpoints
from paceline.checkpoint.owner import Ownership
from paceline.launch.mpi import Mpirun, find_mpirun, mpi_command, mpirun_to_show
from paceline.launch.rank_assignment import HostRanks, Rendezvous, seat, with_servers
from paceline.launch.rank_command import RankCommand, export_lines, quoted, shown
from paceline.launch.ray import RayJob, ray_job
from paceline.launch.ssh import check_ssh
from paceline.launch.workload_file import WorkloadFile
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.options import check_torchao
from paceline.nouns.plan import Plan
from paceline.run.failures import SUPERVISED
from paceline.run.request import RunRequest
from paceline.run.start.start_servers import check_server_credentials, check_servers
from paceline.run.supervise.command_backend import STOP, CommandBackend
from paceline.run.supervise.host_agents import FleetOptions, agent_command, agent_request, open_posts
from paceline.run.supervise.restarts import VARIABLE as RESTART
from paceline.run.supervise.stalls import VARIABLE as STALL_NOTICE
from paceline.run.supervise.supervise_servers import Replaced
from paceline.run.supervise.supervisor import HostAssignment, JobRequest

_PORTS = range(20000, 40000)  # ports for rank 0's store under another's mpirun; below the kernel's own


def check_hosts(request: RunRequest, plan: Plan, notice: Callable[[str], None]) -> None:
    """Raise UsageError unless the request's hosts fit the place and the plan."""
    shape = request.shape
    if shape is not None and shape.nodes > 1 and not request.hosts and request.place in ("local", "mpi"):
        raise UsageError(
            f"-j {shape} needs {shape.nodes} hosts", "no host is named", f"write -n {shape.ranks}, or --on ssh -H"
        )
    if shape is not None and request.place == "ray":
        notice("paceline run: Ray places each rank by itself; -j says only how many there are")
    if request.place == "ssh" and not request.hosts:
        raise UsageError("--on ssh needs hosts", "no host is named", "write -H h1:4,h2:4 or --hostfile FILE")
    check_servers(plan, request.place)


def check_programs(request: RunRequest, plan: Plan) -> None:
    """Raise UsageError, before anything is written, where a program or package is missing or would refuse."""
    if plan.optimizer_states != "full":
        check_torchao("optimizer_states", plan.optimizer_states)
    if plan.float8 != "off":
        check_torchao("float8", plan.float8)
    if request.place == "ssh":
        check_ssh(request.ssh)
        seat(request.hosts, plan.world_size)
        check_server_credentials(plan)
    elif request.place == "mpi":
        find_mpirun(request.mpi)
    elif request.place == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError("--on ray", "the package ray is not installed", "pip install 'paceline[ray]'")


def job_of(request: RunRequest, plan: Plan, file: WorkloadFile, folder: Path, owned: Ownership | None) -> JobRequest:
    """Return the job of a request, without its hosts, their environment and the checkpoint to go on from."""
    return JobRequest(
        file.path,
        request.arguments,
        plan.world_size,
        folder,
        preload=file.imports,
        grace_s=request.grace_s,
        stall_notice_s=request.stall_notice_s,
        stall_timeout_s=request.stall_timeout_s,
        owned=owned,
        resumes_itself=bool(file.trainer),
    )


def assignments_of(
    request: RunRequest, plan: Plan, run_dir: Path, file: Path, restart: int = 0
) -> list[HostAssignment]:
    """Return the hosts of the job, ready to start ranks; none: only this host.

    Args:
        request, plan, run_dir, file: the job's request, plan, run directory and workload file.
        restart: the number of the restart, from 1; 0: the first try.

    Raises:
        UsageError: a host is not ready, or there is no such program.
    """
    if request.place == "ssh":
        return open_posts(_host_ranks(request, plan), file, run_dir, fleet_options(request))
    if request.place == "local":
        return []
    if request.place == "mpi":
        command, environment = _mpi_command(request, find_mpirun(request.mpi), plan, run_dir, file, restart)
        backend = CommandBackend(command, environment)
    else:
        job = _ray_job(request, plan, run_dir, file, restart)
        backend = CommandBackend([sys.executable, "-m", module_names.RAY_DRIVER], {}, job.request(), "Ray's driver")
    return [HostAssignment(backend, HostRanks(request.place, 0, plan.world_size), Rendezvous())]


def fleet_options(request: RunRequest) -> FleetOptions:
    """Return the options by which other hosts are reached."""
    return FleetOptions(request.ssh, request.python, request.interface, dict(request.environment))


def _host_ranks(request: RunRequest, plan: Plan) -> tuple[HostRanks, ...]:
    return with_servers(seat(request.hosts, plan.world_size), plan.server)


def _supervised(request: RunRequest, run_dir: Path, restart: int) -> dict[str, str]:
    """Return the variables of ranks under somebody else's launcher, with our supervisor above it."""
    interface = {"PACELINE_INTERFACE": request.interface} if request.interface else {}
    checkpoints = run_dir.resolve() / "checkpoints"
    resume = {"PACELINE_RESUME": str(checkpoints)} if list_checkpoints(checkpoints) else {}
    job = {"PACELINE_RUN_DIR": str(run_dir.resolve()), SUPERVISED: "1"}
    job["PACELINE_STOP_FILE"] = str(run_dir.resolve() / STOP)
    again = {RESTART: str(restart)} if restart else {}
    return {STALL_NOTICE: str(request.stall_notice_s), **request.environment, **interface, **resume, **job, **again}


def _mpi_command(
    request: RunRequest, mpirun: Mpirun, plan: Plan, run_dir: Path, file: Path, restart: int = 0
) -> tuple[list[str], dict[str, str]]:
    """Return mpirun's command line, and the variables that it takes from its environment."""
    environment = _supervised(request, run_dir, restart)
    if len(request.hosts) > 1:
        # Chosen at random, not found free: rank 0's host may be another one. On one host ranks meet in a file.
        port = _PORTS[int.from_bytes(os.urandom(4)) % len(_PORTS)]
        environment["MASTER_ADDR"] = request.hosts[0].name
        environment["MASTER_PORT"] = os.environ.get("MASTER_PORT", str(port))
    program = [request.python, "-m", module_names.EXTERNAL_RANK, str(file.resolve()), *request.arguments]
    return mpi_command(mpirun, plan.world_size, request.hosts, sorted(environment), program), environment


def _ray_job(request: RunRequest, plan: Plan, run_dir: Path, file: Path, restart: int = 0) -> RayJob:
    rank = RankCommand(
        file,
        request.arguments,
        plan,
        run_dir.parent,
        run_dir.name,
        environment=_supervised(request, run_dir, restart),
        python=request.python,
    )
    return ray_job(rank, request.ray, os.getcwd())


def dry_run(request: RunRequest, plan: Plan, run_dir: Path, file: Path) -> str:
    """Return the commands and messages of the job as text, without secrets."""
    if request.place == "ssh":
        return _dry_run_ssh(request, plan, run_dir, file)
    if request.place == "mpi":
        mpirun, remark = mpirun_to_show(request.mpi)
        command, environment = _mpi_command(request, mpirun, plan, run_dir, file)
        return "\n".join([*remark, *export_lines(environment), quoted(command)])
    if request.place == "ray":
        return _ray_job(request, plan, run_dir, file).text()
    noun = "ranks" if plan.world_size > 1 else "rank"
    command_line = quoted([sys.executable, str(file), *request.arguments])
    return "\n".join([f"# {plan.world_size} {noun} on this host", *export_lines(request.environment), command_line])


def _dry_run_ssh(request: RunRequest, plan: Plan, run_dir: Path, file: Path) -> str:
    host_ranks = _host_ranks(request, plan)
    options = fleet_options(request)
    replaced = Replaced(plan.world_size, plan.server)  # has the servers' names
    lines = []
    for at, host in enumerate(host_ranks):
        message = agent_request(host_ranks, at, file, run_dir, options)
        message["environment"] = shown(message["environment"])  # what is printed may end in a log
        processes = f"ranks {host.first} to {host.ranks[-1]}" if host.count > 1 else f"rank {host.first}"
        for server in host.servers:
            processes += f", {replaced.name(server)}"
        lines.append(f"# {host.host}: {processes}")
        lines.append(quoted(agent_command(host.host, options)))
        lines.append(f"# on its standard input: {json.dumps(message)}")
    return "\n".join(lines)
