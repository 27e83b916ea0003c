"""Show what a plan sends per step, what each rank holds, and how the model is split, without training.

The file's `workload` is made without values in a child process, and one step is simulated there; nothing is trained. Of
a loop of the user's own the first steps are run (`plan_loop.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from paceline.cli.plan_flags import (
    OWN_ARGUMENTS,
    add_job_settings,
    module_variable,
    plan_request,
    print_notice,
)
from paceline.cli.plan_loop import plan_loop
from paceline.cli.plan_memory import add_memory_arguments, check_memory_arguments, explain
from paceline.launch.plan_choice import choose_plan
from paceline.launch.simulators import describe_workload
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.data_order import share
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import Schedule, make_schedule, picture
from paceline.nouns.table import aligned
from paceline.plan.memory_table import traffic_facts, traffic_line
from paceline.run.supervise.progress import WorkProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; those after the file are the file's own."""
    add_job_settings(parser, "n", "plan")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--explain-layout", action="store_true", help="how tensor, context and expert split the model, and why"
    )
    add_memory_arguments(parser)
    add_job_settings(parser, "is_module")
    parser.add_argument("--schedule-picture", action="store_true", help="draw the pipeline's schedule")
    parser.add_argument(
        "workload", metavar="FILE", help="the Python file that declares `workload`, or trains by paceline.prepare"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    plan = choose_plan(plan_request(arguments), print_notice)
    mesh = Mesh.parse(plan.mesh)
    _check_wanted(arguments, mesh)
    # What can be refused from the source comes before the child that imports torch.
    file = read_workload_file(arguments.workload, plan.data_size, plan, arguments.module)
    file.check_batches("plan")
    os.environ.update(module_variable(arguments))  # for the child
    device = check_memory_arguments(arguments)
    command_line = [str(file.path), *arguments.arguments]
    if file.is_loop:
        return plan_loop(arguments, plan, command_line, device)
    with WorkProgress("files") as progress:
        description = facts_of(plan, describe_workload(plan, command_line, progress, with_traffic=True))
    schedule = None
    if mesh.size("pipeline") > 1:  # made here as the ranks will make it
        schedule = make_schedule(plan.schedule, mesh.size("pipeline"), description["micro_batches"])
        description["schedule_bubble"] = round(schedule.bubble, 4)
    lines: list[str] = []
    if arguments.explain_memory or arguments.explain_oom:
        description["memory"], lines, notices = explain(plan, command_line, device, arguments.explain_oom)
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(description))
        return 0
    print_facts(plan, description, schedule)
    if lines:
        print("\n" + "\n".join(lines))
    if arguments.explain_layout:
        print_layout(description["layout"])
        print_attention(description["attention"])
        print_experts(description["experts"])
        print_gathered(description["gathered"])
    if arguments.schedule_picture and schedule is not None:
        print(f"\n{picture(schedule)}\n\nF forward, B backward, W weights' gradients, . waiting; one column a tick")
    return 0


def _check_wanted(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Raise UsageError where a flag asks for a part that the plan does not have."""
    if arguments.explain_layout and mesh.places == 1:
        raise UsageError(
            "can't explain a layout", "the plan has no tensor axis, no context and no expert", "write tensor=2"
        )
    if arguments.schedule_picture and mesh.size("pipeline") == 1:
        raise UsageError("can't draw the schedule", f"the plan {mesh} has no pipeline", "write pipeline=2")


def print_facts(plan: Plan, description: dict[str, Any], schedule: Schedule | None) -> None:
    """Print the plan as aligned lines."""
    mib = 2**20
    mesh = Mesh.parse(plan.mesh)
    size = description["parameter_bytes"] / mib
    batch = f"{description['batch_size']} samples, {description['samples_per_rank']} on a rank"
    noun = "workers" if description["ranges"] else "ranks"
    rows = [
        ("mesh", f"{description['mesh']} ({plan.world_size} {noun})"),
        ("batch", f"{batch}, micro-batches of {description['micro_batch_size']}"),
        ("parameters", f"{description['parameters']:,} in {size:.1f} MiB, as much again for gradients"),
        ("buffers", f"{description['buffer_bytes'] / mib:.1f} MiB"),
    ]
    if description["parameter_bytes_per_rank"]:
        sizes = ", ".join(f"{nbytes / mib:.1f}" for nbytes in description["parameter_bytes_per_rank"])
        rows.append(("per rank", f"{sizes} MiB of parameters"))
    if description["ranges"]:  # of servers
        server_bytes = [sum(ranges) for ranges in description["ranges"]]
        server_bytes += [0] * (plan.server - len(server_bytes))  # a small model leaves servers without a range
        sizes = ", ".join(f"{nbytes / mib:.1f}" for nbytes in server_bytes)
        replicas = min(plan.replicas, plan.server)
        rows.append(("servers", f"{plan.server} with {sizes} MiB, {replicas} replicas, {plan.mode}"))
    if schedule is not None:
        shares = " ".join(f"{share:.0%}" for share in description["share"])
        rows.append(("stages", f"{shares} of the work"))
        rows.append(
            ("schedule", f"{schedule.name}, {schedule.micro_batches} micro-batches, {schedule.bubble:.0%} waiting")
        )
    if description["coupled"]:
        rows.append(("samples", f"meet in {description['coupled']}: a batch can't be cut without changing the result"))
    if description["traffic"] is None:
        reason = "sparse gradients, top-k or PowerSGD"
        if mesh.size("expert") > 1 and mesh.size("tensor") > 1:
            reason = "tensor sums rows of experts, as many as the router sends"
        rows.append(("traffic", f"depends on the data ({reason})"))
    has_stages = len(description["share"]) > 1
    for row in description["traffic"] or []:
        rows.append((f"on stage {row['stage']}" if has_stages else "traffic", traffic_line(row)))
    print("\n".join(aligned(rows, "{:<12}{}")))


def print_layout(lines: list[dict[str, Any]]) -> None:
    """Print the split of each weight under `tensor`, and the reason."""
    if not lines:
        return
    rows = []
    for line in lines:
        shape = "x".join(map(str, line["shape"])) or "scalar"
        rows.append((line["name"], shape, line["placement"], line["why"]))
    print("\n".join(["", *aligned(rows, "{:<}  {:>12}  {:<20} {}")]))


def print_attention(found: list[dict[str, Any]]) -> None:
    """Print the way in which `context` shares each attention."""
    if not found:
        return
    rows = [("attention in", "positions", "shared by", "work of ranks", "why")]
    for line in found:
        positions = f"{line['queries']}" if line["queries"] == line["keys"] else f"{line['queries']} to {line['keys']}"
        work = " ".join(f"{share:.1%}" for share in line["work"]) or "all on each"
        rows.append((line["module"], positions, line["way"], work, line["why"]))
    print("\n".join(["", *aligned(rows, "{:<}  {:>}  {:<}  {:<}  {}")]))


def print_experts(lines: list[dict[str, Any]]) -> None:
    """Print the way in which `expert` spreads each layer of experts."""
    if not lines:
        return
    rows = [("experts in", "on a rank", "choices", "tokens", "weights", "why")]
    for line in lines:
        on_rank = f"{line['per_rank']} of {line['experts']}"
        weights = ", ".join(name.removeprefix(f"{line['module']}.") for name in line["weights"])
        choices = str(line["choices"] or "by code")
        rows.append((line["module"], on_rank, choices, line["way"], weights or "whole", line["why"]))
    print("\n".join(["", *aligned(rows, "{:<}  {:<}  {:>}  {:<}  {:<}  {}")]))


def print_gathered(gathered: dict[str, int]) -> None:
    """Print the operations that `context` or `expert` runs whole on every rank."""
    if gathered:
        print("\nwhole on every rank, as no rule says how to run it on a piece:")
        print("\n".join(aligned([(f"{count}x", reason) for reason, count in gathered.items()], "  {:>} {}")))


def facts_of(plan: Plan, model: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about `plan` for a model, as `describe_workload` describes it with its traffic."""
    mesh = Mesh.parse(plan.mesh)
    batch_size = model["batch_size"]
    tensors = [*model["parameters"], *model["frozen"]]
    traffic = None  # it depends on the data
    if model["traffic"] is not None:
        traffic = []
        for stage, rows in enumerate(model["traffic"]):
            traffic += [{**traffic_facts(row), "stage": stage} for row in rows]
    samples = len(share(range(batch_size), 0, mesh.data_size))  # part 0 has most, where sizes don't divide
    split = model.get("split", {})
    micro_batch_size = min(model["micro_batch_size"] or samples, samples)
    micro_batches = split.get("micro_batches") or -(-samples // micro_batch_size)
    parameter_bytes = _bytes(tensors)
    rank_bytes = []  # by pipeline rank, between steps; empty where every rank holds everything
    if "split" in model or mesh.size("shard") > 1:
        for stage_bytes in split.get("held", [parameter_bytes]):
            rank_bytes.append(-(-stage_bytes // mesh.size("shard")))  # rounded up
    return {
        **asdict(plan),
        "batch_size": batch_size,
        "samples_per_rank": samples,
        "micro_batches": micro_batches,
        "micro_batch_size": -(-samples // micro_batches),
        "parameters": sum(tensor["numel"] for tensor in tensors),
        "parameter_bytes": parameter_bytes,
        "parameter_bytes_per_rank": rank_bytes,
        "buffer_bytes": _bytes(model["buffers"]),
        "ranges": model.get("ranges", []),
        "layout": split.get("layout", []),
        "attention": split.get("attention", []),
        "experts": split.get("experts", []),
        "gathered": split.get("gathered", {}),
        "share": split.get("share", []),
        "coupled": split.get("coupled", ""),
        "traffic": traffic,
    }


def _bytes(tensors: list[dict[str, Any]]) -> int:
    return sum(tensor["numel"] * tensor["item_bytes"] for tensor in tensors)
