"""Start one node's ranks of a job whose other nodes another launcher started."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from paceline.checkpoint.manifest import has_resume_point
from paceline.checkpoint.owner import Ownership, wait_until_taken
from paceline.launch.plan_choice import choose_plan
from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.launch.rank_command import export_lines
from paceline.launch.workload_file import WorkloadFile, read_workload_file
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.rendezvous.launcher_env import NodeInfo, joined_address
from paceline.run import directory
from paceline.run.request import RunRequest
from paceline.run.start.backends import job_of
from paceline.run.start.outcome import JobEnd, Outcome
from paceline.run.start.plain_job import plain_request
from paceline.run.supervise.host_backend import LocalBackend
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.supervised_job import run_job
from paceline.run.supervise.supervisor import HostAssignment, JobRequest, Supervisor


def run_node(request: RunRequest, node: NodeInfo, outcome: Outcome, notice: Callable[[str], None]) -> None:
    """Start this node's ranks; rank 0's node keeps the run directory.

    Raises:
        UsageError: nothing says how many ranks a node has, or the request contradicts the launcher.
        MeshError: the plan does not cover the ranks of all nodes.
    """
    per_node = _ranks_per_node(request, node)
    world = node.nodes * per_node
    if request.run.job is None:
        raise UsageError(
            "a job of several nodes needs a name", "each node would choose another name for it", "write --job NAME"
        )
    plan = choose_plan(request.plan.with_ranks(world), notice)
    Mesh.parse(plan.mesh).check_fits(world)
    file = read_workload_file(request.file, plan.data_size, plan, request.module)
    file.check_flags(request.flags)
    request = plain_request(request, file.path, file.plain, world, notice)
    if request.is_dry_run:
        ranks = f"# {per_node} ranks from {node.node_rank * per_node} of {world} on this node"
        outcome.dry_run = "\n".join([ranks, *export_lines(request.environment)])
        return
    screen = Screen(sys.stderr if request.is_json else sys.stdout, sys.stderr)
    folder = request.run.folder
    owned = _open_folder(request, node, plan, file.path, screen)
    with owned or contextlib.nullcontext():
        job = _job_request(request, node, plan, file, owned)
        if owned is not None:
            try:
                ending, progress, result = run_job(plan, job, screen)
                outcome.end = JobEnd(folder, ending, progress, result)
            except PacelineError:
                directory.remove_unbegun(folder)
                raise
            return
    supervisor = Supervisor(job, screen)
    try:
        ending, progress = supervisor.run()
        outcome.end = JobEnd(folder, ending, progress)
    finally:
        supervisor.restore_signals()


def _ranks_per_node(request: RunRequest, node: NodeInfo) -> int:
    shape = request.shape
    per_node = node.ranks_per_node
    if not per_node and shape is not None:
        per_node = shape.ranks_per_node
    if not per_node:
        raise UsageError(
            f"can't tell how many ranks a node of {node.source} has",
            "nothing says how many",
            "write -j NODESxRANKS, such as -j 2x8",
        )
    if shape is not None and (shape.nodes, shape.ranks_per_node) != (node.nodes, per_node):
        raise UsageError(f"-j {shape} on a node of {node.source}", f"it says {node.nodes}x{per_node}", "leave -j out")
    return per_node


def _open_folder(request: RunRequest, node: NodeInfo, plan: Plan, script: Path, screen: Screen) -> Ownership | None:
    """Take the run directory on rank 0's node, which makes or finds it; wait for that on the others: None."""

    def report(text: str) -> None:
        screen.say(f"paceline: {text}")

    launch = joined_address(*node.master) if node.master else ""
    if node.node_rank:
        wait_until_taken(request.run.folder, launch, f"node {node.node_rank}", report)
        if plan.copy_to:
            directory.fetch_copies(request.run, script, lambda text: None, plan.copy_to)
        (request.run.folder / "failures").mkdir(parents=True, exist_ok=True)
        return None
    owned, _ = directory.choose_run(request.run, script, report, plan.copy_to, launch)
    try:
        directory.write_start(owned.folder, plan, script, request.arguments)
    except BaseException:
        owned.release()
        raise
    return owned


def _job_request(
    request: RunRequest, node: NodeInfo, plan: Plan, file: WorkloadFile, owned: Ownership | None
) -> JobRequest:
    folder = request.run.folder
    resume = None
    checkpoints = folder / "checkpoints"
    if request.run.must_go_on and has_resume_point(checkpoints):
        resume = checkpoints
    per_node = plan.world_size // node.nodes
    return replace(
        job_of(request, plan, file, folder, owned),
        ranks=per_node,
        resume=resume,
        assignments=_assignments(request, node, per_node),
        world_size=plan.world_size,
        environment={**request.environment, "PACELINE_PLAN": json.dumps(asdict(plan))},
    )


def _assignments(request: RunRequest, node: NodeInfo, per_node: int) -> list[HostAssignment]:
    """Return this node's assignment, in a job of several nodes; none for a single node, which has a file to meet at."""
    if node.nodes <= 1:
        return []
    master = joined_address(*node.master) if node.master else ""
    rendezvous = Rendezvous(master=master, interface=request.interface)
    host_ranks = HostRanks("", node.node_rank * per_node, per_node, node.node_rank, node.nodes)
    return [HostAssignment(LocalBackend(), host_ranks, rendezvous)]
