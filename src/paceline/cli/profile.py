"""Say what a step takes in memory, operations and traffic, on fake tensors (shapes, no data): no GPU is needed.

The job's own step runs in a child process, under the plan, as one of its ranks. `-o FILE` keeps the profile, which
other tools may read: every block of memory from its allocation to its end, every operation, what is sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from paceline.cli.plan_flags import OWN_ARGUMENTS, add_plan_arguments, plan_request, print_notice
from paceline.cli.plan_memory import notices_of
from paceline.launch.plan_choice import choose_plan
from paceline.launch.profile_workload import ProfileRequest, profile_workload
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.device import Device
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.profile import Profile
from paceline.nouns.table import aligned
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import communicators, holders, picture, table

MODULES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; those after the file are the file's own."""
    add_plan_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="whose step (default 0)")
    parser.add_argument("--device", default="cpu", metavar="WORD", help="cpu, cuda, 16GB or a name such as V100-16GB")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the profile there, as JSON")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares `workload`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def run(arguments: argparse.Namespace) -> int:
    """Profile one rank's step."""
    plan = choose_plan(plan_request(arguments), print_notice)
    device = Device.parse(arguments.device)
    if not 0 <= arguments.rank < plan.world_size:
        raise UsageError(
            f"the plan {plan.mesh} has no rank {arguments.rank}",
            f"its ranks are 0 to {plan.world_size - 1}",
            "write --rank 0",
        )
    file = read_workload_file(arguments.workload, plan.data_size)
    request = ProfileRequest(asdict(plan), arguments.rank, device.kind)
    # In a child process: this one starts without torch.
    (profile,) = profile_workload([request], [str(file.path), *arguments.arguments])
    if isinstance(profile, WorkloadError):
        raise profile
    if arguments.output is not None:
        _write(profile, arguments.output)
    memory = memory_of(profile, device.capacity(communicators(plan)))
    if arguments.json:
        sums = {"flops": profile.flops, "traffic": profile.traffic, "notices": notices_of(profile, device)}
        print(json.dumps({"plan": profile.plan, "device": device.name, **sums, "memory": memory.to_json()}))
        return 0
    lines = [*table([memory], device, communicators(plan)), "", *holders(memory), "", *picture(profile), ""]
    print("\n".join([*lines, *_work(profile)]))
    for notice in notices_of(profile, device):
        print(f"note: {notice}", file=sys.stderr)
    return 0


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
