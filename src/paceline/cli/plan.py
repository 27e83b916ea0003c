"""Say what a plan sends per step and what the model itself holds, without training.

The file's `workload` is made on torch's meta device in a child process; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from paceline.cli.run import add_plan_arguments, decide_plan
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import WorkloadError
from paceline.nouns.order import share
from paceline.nouns.plan import Plan
from paceline.nouns.workload import too_small_batch
from paceline.plan.traffic import Tensor, replicate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; those after the file are the file's own."""
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares `workload`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the file")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    plan = decide_plan(arguments)
    file = read_workload_file(arguments.workload, plan.data_size)
    facts = facts_of(plan, _describe([str(file.path), *arguments.arguments]))
    if arguments.json:
        print(json.dumps(facts))
        return 0
    rows = [
        ("mesh", f"{facts['mesh']} ({plan.world_size} ranks)"),
        (
            "batch",
            f"{facts['batch_size']} samples, {facts['samples_per_rank']} on a rank, "
            f"micro-batches of {facts['micro_batch_size']}",
        ),
        (
            "parameters",
            f"{facts['parameters']:,} in {facts['parameter_bytes'] / 2**20:.1f} MiB, as much again for gradients",
        ),
        ("buffers", f"{facts['buffer_bytes'] / 2**20:.1f} MiB"),
    ]
    if facts["traffic"] is None:
        rows.append(("traffic", "depends on the data (sparse gradients, top-k or PowerSGD)"))
    for row in facts["traffic"] or []:
        sent = (
            f"{row['collective']} on {row['axis']}: {row['calls']} calls, {row['payload_bytes'] / 2**20:.2f} MiB a step"
        )
        rows.append(("traffic", sent))
    for name, text in rows:
        print(f"{name:<12}{text}")
    return 0


def facts_of(plan: Plan, model: dict[str, Any]) -> dict[str, Any]:
    """What is known of `plan` for a model of these sizes.

    Raises:
        WorkloadError: the batch gives some rank no sample.
    """
    batch_size = model["batch_size"]
    if batch_size < plan.world_size:
        raise too_small_batch(batch_size, plan.world_size)
    trained = [Tensor(**{**sizes, "shape": tuple(sizes["shape"])}) for sizes in model["parameters"]]
    held = [*model["parameters"], *model["frozen"]]
    traffic = replicate(plan, trained, len(model["buffers"]))
    samples = len(share(range(batch_size), 0, plan.world_size))
    return {
        **asdict(plan),
        "batch_size": batch_size,
        "samples_per_rank": samples,
        "micro_batch_size": min(model["micro_batch_size"] or samples, samples),
        "parameters": sum(tensor["numel"] for tensor in held),
        "parameter_bytes": sum(tensor["numel"] * tensor["item_bytes"] for tensor in held),
        "buffer_bytes": sum(tensor["numel"] * tensor["item_bytes"] for tensor in model["buffers"]),
        "traffic": None if traffic is None else [asdict(row) for row in traffic],
    }


def _describe(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline.train.describe", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    answer = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WorkloadError(f"to load {words[0]}", f"its process failed: {last}", "run it alone with python first")
    if "error" in answer:
        raise WorkloadError(**answer["error"])
    return dict(answer["model"])
