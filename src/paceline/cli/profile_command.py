"""Show what a step takes in memory, operations and traffic, on fake tensors (shapes, no data): no GPU is needed.

The job's own step runs in a child process, under the plan, as one of its ranks. `-o FILE` keeps the profile, which
other tools may read: every block of memory from its allocation to its end, every operation, what is sent.

`--job JOB` takes the plan and arguments of a run, and keeps in its run directory what its step is predicted to take:
`paceline runs show` and the dashboard then have it beside what the job measures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.closed_output import check_may_write
from paceline.cli.plan_flags import (
    OWN_ARGUMENTS,
    add_job_settings,
    module_variable,
    plan_request,
    print_notice,
)
from paceline.cli.plan_memory import (
    SIMULATED,
    add_allocator_argument,
    notices_of,
    read_device,
    simulators_of,
    without_errors,
)
from paceline.launch.plan_choice import choose_plan
from paceline.launch.simulators import ProfileRequest, describe_workload
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile
from paceline.nouns.table import aligned
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import communicators, holders, picture, table
from paceline.run.job_settings import RUNS
from paceline.run.prediction import predict, write_prediction
from paceline.run.read.runs import Run, find_folder, read_run
from paceline.run.supervise.progress import WorkProgress
from paceline.train.memory_file import read_memory

MODULES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; those after the file are the file's own."""
    add_job_settings(parser, "n", "plan")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="whose step (default 0)")
    parser.add_argument(
        "--device",
        metavar="WORD",
        help="cpu, cuda, 16GB or a name such as V100-16GB (default cpu; with --job, the run's)",
    )
    add_allocator_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the profile there, as JSON")
    parser.add_argument("--job", metavar="JOB", help="of a run's plan; keep it there, beside what the job measures")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where the run of --job is kept (default runs)")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    add_job_settings(parser, "is_module")
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares `workload`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def run(arguments: argparse.Namespace) -> int:
    """Profile one rank's step."""
    of_run = None if arguments.job is None else _run_of(arguments)
    if of_run is None and arguments.runs is not None:
        raise UsageError("--runs without --job", "it is where the run of --job is looked for", "leave it out")
    plan = (
        choose_plan(plan_request(arguments), print_notice) if of_run is None else Plan.read(of_run.folder / "plan.json")
    )
    device = read_device(arguments.device or _device_of(of_run, arguments.rank), arguments)
    if not 0 <= arguments.rank < plan.world_size:
        raise UsageError(
            f"the plan {plan.mesh} has no rank {arguments.rank}",
            f"its ranks are 0 to {plan.world_size - 1}",
            "write --rank 0",
        )
    if arguments.output is not None:
        check_may_write(arguments.output)
    file = read_workload_file(arguments.workload, plan.data_size, module=arguments.module)
    os.environ.update(module_variable(arguments))  # for the child
    name = f"rank {arguments.rank} under {plan.line()}"
    request = ProfileRequest(asdict(plan), arguments.rank, device.kind, name=name)
    own_arguments = arguments.arguments if of_run is None else of_run.script[1:]
    # In a child process: this one starts without torch.
    with simulators_of([str(file.path), *own_arguments]) as simulators, WorkProgress(SIMULATED) as progress:
        (profile,) = without_errors(simulators.ask([request], progress))
    if arguments.output is not None:
        _write(profile, arguments.output)
    if of_run is not None:
        path = write_prediction(of_run.folder, predict(profile, _layout(plan, [str(file.path), *own_arguments])))
        print(f"paceline profile: kept in {path}", file=sys.stderr)
    memory = memory_of(profile, device.capacity(communicators(plan)), device.expandable_segments)
    if arguments.json:
        sums = {"flops": profile.flops, "traffic": profile.traffic, "notices": notices_of(profile, device)}
        facts = {"plan": profile.plan, "device": device.name, "expandable_segments": device.expandable_segments}
        print(json.dumps({**facts, **sums, "memory": memory.to_json()}))
        return 0
    lines = [*table([memory], device, communicators(plan)), "", *holders(memory), "", *picture(profile), ""]
    print("\n".join([*lines, *_work(profile)]))
    for notice in notices_of(profile, device):
        print(f"note: {notice}", file=sys.stderr)
    return 0


def _run_of(arguments: argparse.Namespace) -> Run:
    """Return the run of --job.

    Raises:
        UsageError: there is none, it trains another file, or the command line contradicts the run.
    """
    run = read_run(find_folder(arguments.runs or RUNS, arguments.job))
    if arguments.plan is not None or arguments.n is not None:
        raise UsageError("--plan or -n with --job", f"the run has a plan: {run.plan}", "leave them out")
    if not run.script or Path(run.script[0]) != Path(arguments.workload).resolve():
        found = f"that run trains {run.script[0]}" if run.script else "that run's job.json names no file"
        raise UsageError(f"--job {arguments.job} with {arguments.workload}", found, "name the file that it trains")
    if arguments.arguments and tuple(arguments.arguments) != run.script[1:]:
        found = f"the run has the arguments {' '.join(run.script[1:]) or '(none)'}"
        raise UsageError(f"the arguments {' '.join(arguments.arguments)}", found, "leave them out: the run's are taken")
    return run


def _layout(plan: Plan, command_line: list[str]) -> list[dict[str, Any]]:
    """Return the split of each weight under `tensor`, with the reason; empty under other plans."""
    if Mesh.parse(plan.mesh).size("tensor") == 1:
        return []
    with WorkProgress("files") as progress:
        layout: list[dict[str, Any]] = describe_workload(plan, command_line, progress)["split"]["layout"]
    return layout


def _device_of(run: Run | None, rank: int) -> str:
    """Return the kind of device that a rank of a run computes on."""
    memories = [] if run is None else read_memory(run.folder, run.ranks)
    return next((memory.device.partition(":")[0] for memory in memories if memory.rank == rank), "cpu")


def _write(profile: Profile, path: Path) -> None:
    try:
        profile.write(path)
    except OSError as error:
        raise UsageError(f"the profile in {path}", f"it can't be written ({error})", "name another file") from None


def _work(profile: Profile) -> list[str]:
    """Return a table of the modules that compute most."""
    largest = sorted(profile.modules.items(), key=lambda item: -item[1].flops)[:MODULES]
    total = max(profile.flops, 1)
    rows = []
    for name, work in largest:
        if work.flops:
            gflop, mib = work.flops / 1e9, work.nbytes / 2**20
            rows.append((name or "(the loss)", f"{gflop:,.3f}", f"{work.flops / total:.1%}", f"{mib:,.1f}"))
    count = sum(work.count for work in profile.operations.values())
    title = f"{count:,} operations, {profile.flops / 1e9:,.3f} GFLOP on this rank; the most of them in"
    return [title, *aligned(rows, "{:<}  {:>12} GFLOP {:>6} {:>12} MiB moved")]
