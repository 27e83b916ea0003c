"""Say what a plan sends per step, what each rank holds, and how the model is split, without training.

The file's `workload` is made on torch's meta device in a child process; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from paceline.cli.flags import OWN_ARGUMENTS
from paceline.cli.plan_memory import add_memory_arguments, check_memory_arguments, explain
from paceline.cli.run import add_plan_arguments, decide_plan
from paceline.launch.describe_workload import describe_workload
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.order import share
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import Schedule, make_schedule, picture
from paceline.nouns.workload import too_small_batch
from paceline.plan.step_traffic import step_traffic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; those after the file are the file's own."""
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--explain-layout", action="store_true", help="how tensor splits each weight, and why")
    add_memory_arguments(parser)
    parser.add_argument("--schedule-picture", action="store_true", help="draw the pipeline's schedule")
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares `workload`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    plan = decide_plan(arguments)
    mesh = Mesh.parse(plan.mesh)
    _check_wanted(arguments, mesh)
    file = read_workload_file(arguments.workload, plan.data_size)
    device = check_memory_arguments(arguments)
    words = [str(file.path), *arguments.arguments]
    facts = facts_of(plan, describe_workload(plan, words))
    schedule = None
    if mesh.size("pipeline") > 1:
        schedule = make_schedule(plan.schedule, mesh.size("pipeline"), facts["micro_batches"])
        facts["schedule_bubble"] = round(schedule.bubble, 4)
    lines: list[str] = []
    if arguments.explain_memory or arguments.explain_oom:
        facts["memory"], lines, notices = explain(plan, words, device, arguments.explain_oom)
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(facts))
        return 0
    print_facts(plan, facts, schedule)
    if lines:
        print("\n" + "\n".join(lines))
    if arguments.explain_layout:
        print_layout(facts["layout"])
    if arguments.schedule_picture and schedule is not None:
        print(f"\n{picture(schedule)}\n\nF forward, B backward, W weights' gradients, . waiting; one column a tick")
    return 0


def _check_wanted(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Raise UsageError where something is asked for that the plan does not have."""
    if arguments.explain_layout and mesh.size("tensor") == 1:
        raise UsageError("to explain a layout", "the plan has no tensor axis", "write tensor=2")
    if arguments.schedule_picture and mesh.size("pipeline") == 1:
        raise UsageError("a picture of the schedule", f"the plan {mesh} has no pipeline", "write pipeline=2")


def print_facts(plan: Plan, facts: dict[str, Any], schedule: Schedule | None) -> None:
    """The plan as aligned lines."""
    mib = 2**20
    size = facts["parameter_bytes"] / mib
    batch = f"{facts['batch_size']} samples, {facts['samples_per_rank']} on a rank"
    rows = [
        ("mesh", f"{facts['mesh']} ({plan.world_size} {'workers' if plan.server else 'ranks'})"),
        ("batch", f"{batch}, micro-batches of {facts['micro_batch_size']}"),
        ("parameters", f"{facts['parameters']:,} in {size:.1f} MiB, as much again for gradients"),
        ("buffers", f"{facts['buffer_bytes'] / mib:.1f} MiB"),
    ]
    if facts["parameter_bytes_per_rank"]:
        held = ", ".join(f"{held / mib:.1f}" for held in facts["parameter_bytes_per_rank"])
        rows.append(("per rank", f"{held} MiB of parameters"))
    if plan.server:
        idle: list[list[int]] = [[]] * (plan.server - len(facts["ranges"]))  # those of a small model
        held = ", ".join(f"{sum(own) / mib:.1f}" for own in [*facts["ranges"], *idle])
        rows.append(
            ("servers", f"{plan.server} with {held} MiB, {min(plan.replicas, plan.server)} replicas, {plan.mode}")
        )
    if schedule is not None:
        rows.append(("stages", " ".join(f"{share:.0%}" for share in facts["share"]) + " of the work"))
        rows.append(
            ("schedule", f"{schedule.name}, {schedule.micro_batches} micro-batches, {schedule.bubble:.0%} waiting")
        )
    if facts["coupled"]:
        rows.append(("samples", f"meet in {facts['coupled']}: a batch can't be cut without changing the result"))
    if facts["traffic"] is None:
        rows.append(("traffic", "depends on the data (sparse gradients, top-k or PowerSGD)"))
    for row in facts["traffic"] or []:
        calls = f"{row['calls']} call{'s' * (row['calls'] != 1)}"
        sent = f"{row['collective']:<15}{row['axis']:<11}{calls:>10}{row['payload_bytes'] / mib:>12.3f} MiB a step"
        rows.append((f"on stage {row['stage']}" if facts["share"] and len(facts["share"]) > 1 else "traffic", sent))
    for name, text in rows:
        print(f"{name:<12}{text}")


def print_layout(lines: list[dict[str, Any]]) -> None:
    """What `tensor` makes of each weight, and why."""
    width = max(len(line["name"]) for line in lines)
    print()
    for line in lines:
        shape = "x".join(map(str, line["shape"])) or "scalar"
        print(f"{line['name']:<{width}}  {shape:>12}  {line['placement']:<20} {line['why']}")


def facts_of(plan: Plan, model: dict[str, Any]) -> dict[str, Any]:
    """What is known of `plan` for a model of these sizes.

    Raises:
        WorkloadError: the batch gives some rank no sample.
    """
    mesh = Mesh.parse(plan.mesh)
    batch_size = model["batch_size"]
    if batch_size < mesh.data_size:
        raise too_small_batch(batch_size, mesh.data_size)
    held = [*model["parameters"], *model["frozen"]]
    traffic = step_traffic(plan, model)
    samples = len(share(range(batch_size), 0, mesh.data_size))
    split = model.get("split", {})
    micro_batch_size = min(model["micro_batch_size"] or samples, samples)
    micro_batches = split.get("micro_batches") or -(-samples // micro_batch_size)
    return {
        **asdict(plan),
        "batch_size": batch_size,
        "samples_per_rank": samples,
        "micro_batches": micro_batches,
        "micro_batch_size": -(-samples // micro_batches),
        "parameters": sum(tensor["numel"] for tensor in held),
        "parameter_bytes": _bytes(held),
        "parameter_bytes_per_rank": _bytes_per_rank(mesh, model),
        "buffer_bytes": _bytes(model["buffers"]),
        "ranges": model.get("ranges", []),
        "layout": split.get("layout", []),
        "share": split.get("share", []),
        "coupled": split.get("coupled", ""),
        "traffic": None
        if traffic is None
        else [{**asdict(row), "stage": stage} for stage, rows in enumerate(traffic) for row in rows],
    }


def _bytes(tensors: list[dict[str, Any]]) -> int:
    return sum(tensor["numel"] * tensor["item_bytes"] for tensor in tensors)


def _bytes_per_rank(mesh: Mesh, model: dict[str, Any]) -> list[int]:
    """By pipeline rank, what is held between steps; empty where every rank holds everything."""
    held = model["split"]["ranks"] if "split" in model else [model] if "shards" in model else []
    return [-(-_bytes([*rank["parameters"], *rank["frozen"]]) // mesh.size("shard")) for rank in held]
