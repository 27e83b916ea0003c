"""Show what a loop of the user's own (`paceline.prepare`) sends per step and what each rank holds: `paceline plan`.

The loop's file runs in child processes (`profile/profile_loop.py`), each as one rank, until it has taken its first
steps. So there is no formula here: the loop's own models, optimizers and losses are observed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.cli.plan_memory import (
    add_suggestions,
    by_allocator,
    explain_profiles,
    flops_of,
    needed_if_it_fits,
    notices_of,
)
from paceline.launch.simulators import Watcher, profile_loop
from paceline.nouns.device import Device
from paceline.nouns.errors import WorkloadError
from paceline.nouns.loop_profile import LoopProfile
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.table import aligned
from paceline.plan.loop_plans import PlanRow, changes_of_loop, plans_of_loop, plans_table
from paceline.plan.memory import Memory, memory_of
from paceline.plan.memory_table import communicators, size, traffic_facts, traffic_line
from paceline.plan.oom_advice import MOMENTS, Suggestion, cheapest
from paceline.run.supervise.progress import WorkProgress


def plan_loop(arguments: argparse.Namespace, plan: Plan, command_line: Sequence[str], device: Device) -> int:
    """Print the memory and traffic of a loop under a plan.

    Raises:
        WorkloadError: its file failed, or took no step.
    """
    is_explained = arguments.explain_memory or arguments.explain_oom
    with WorkProgress("ranks recorded") as progress:
        progress.is_most = True
        progress.total = _most_recordings(plan, is_explained, arguments.explain_oom)
        found = profile_loop(plan, command_line, device.kind, progress)
        description = _facts(plan, found)
        lines: list[str] = []
        notices = []
        for recorded in found:
            notices += notices_of(recorded.profile, device)
        if is_explained:
            profiles = [recorded.profile for recorded in found]
            description["memory"], lines, _ = explain_profiles(plan, profiles, device)
            tried = _Tried(command_line, device, {plan: found}, progress)
            if arguments.explain_oom:
                add_suggestions(_ways_out(plan, tried, description["memory"]), description["memory"], lines, device)
            if plan.world_size > 1:
                description["plans"], table = _other_plans(plan, tried)
                lines += ["", *table]
            notices += tried.refusals
    for notice in dict.fromkeys(notices):  # several ranks have the same
        print(f"note: {notice}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(description))
        return 0
    _print_facts(description)
    if lines:
        print("\n" + "\n".join(lines))
    return 0


def _most_recordings(plan: Plan, is_explained: bool, with_ways_out: bool) -> int:
    """Return the largest number of ranks that are recorded."""
    plans = {plan}
    if is_explained and plan.world_size > 1:
        plans.update(plans_of_loop(plan, plan.world_size))
    if with_ways_out:
        plans.update(change.plan for change in changes_of_loop(plan))
    return sum(1 + (Mesh.parse(candidate.mesh).size("shard") > 1) for candidate in plans)


class _Tried:
    """The plans under which the loop was tried.

    Args:
        command_line: the loop's file and its arguments.
        device: the device on which the loop is to run.
        found: the profiles of the ranks recorded so far, by plan.
        watcher: the receiver of progress.

    Attributes:
        refusals: the reasons why some plans can't be tried.
    """

    def __init__(
        self, command_line: Sequence[str], device: Device, found: dict[Plan, list[LoopProfile]], watcher: Watcher
    ) -> None:
        self.command_line = command_line
        self.device = device
        self.found = found
        self.watcher = watcher
        self.refusals: list[str] = []

    def profiles(self, plan: Plan) -> list[LoopProfile]:
        """Return the profiles under a plan; none where the loop can't run so."""
        if plan not in self.found:
            try:
                self.found[plan] = profile_loop(plan, self.command_line, self.device.kind, self.watcher)
            except WorkloadError as error:
                self.found[plan] = []
                self.refusals.append(f"{plan.line()} was not tried: {error.found}")
        return self.found[plan]

    def memories(self, plan: Plan) -> list[Memory]:
        """Return the memory of the ranks that were recorded."""
        capacity = self.device.capacity(communicators(plan))
        expandable_segments = self.device.expandable_segments
        return [memory_of(profiled.profile, capacity, expandable_segments) for profiled in self.profiles(plan)]


def _facts(plan: Plan, found: Sequence[LoopProfile]) -> dict[str, Any]:
    """Return the facts that the recorded ranks show, for programs."""
    first = found[0]
    steps = []
    for number, step in enumerate(first.steps[first.from_step :], first.from_step + 1):
        steps.append({**step, "step": number, "traffic": [traffic_facts(row) for row in step["traffic"]]})
    is_same = all(step["traffic"] == steps[0]["traffic"] for step in steps)
    memories = [memory_of(recorded.profile) for recorded in found]
    memory_rows = [{"rank": memory.rank, "peak": memory.peak, "between": memory.between} for memory in memories]
    optimizers = []
    for number, optimizer in enumerate(first.optimizers):
        state_bytes = {recorded.profile.rank: recorded.optimizers[number]["state_bytes"] for recorded in found}
        optimizers.append(
            {"name": optimizer["name"], "parameters": optimizer["parameters"], "state_bytes": state_bytes}
        )
    return {
        **asdict(plan),
        "is_loop": True,
        "batch_size": first.batch_size,
        "samples_per_rank": first.profile.micro_batch,
        "recorded_steps": len(first.steps),
        "models": first.models,
        "optimizers": optimizers,
        "parameters": sum(model["parameters"] for model in first.models),
        "parameter_bytes": sum(model["parameter_bytes"] for model in first.models),
        "buffer_bytes": sum(model["buffer_bytes"] for model in first.models),
        "held": memory_rows,
        "steps": steps,
        "traffic": steps[0]["traffic"] if is_same else None,  # it differs from step to step
    }


def _print_facts(description: dict[str, Any]) -> None:
    """Print a loop's plan as aligned lines."""
    plural = "s" * (description["recorded_steps"] > 1)
    ranks = Plan(mesh=description["mesh"]).world_size
    batch = f"{description['batch_size']} samples, {description['samples_per_rank']} on a rank"
    if not description["batch_size"]:
        batch = "made by the loop"
    rows = [
        ("mesh", f"{description['mesh']} ({ranks} rank{'s' * (ranks > 1)})"),
        ("tried", f"the loop's first {description['recorded_steps']} step{plural}, on the CPU"),
        ("batch", batch),
    ]
    for model in description["models"]:
        frozen = "" if model["trained"] else ", frozen"
        rows.append(
            (
                "model",
                f"{model['name']}: {model['parameters']:,} parameters in {size(model['parameter_bytes'])}{frozen}",
            )
        )
    for optimizer in description["optimizers"]:
        state = ", ".join(f"{size(nbytes)} on rank {rank}" for rank, nbytes in optimizer["state_bytes"].items())
        rows.append(("optimizer", f"{optimizer['name']}: updates {optimizer['parameters']:,}, state {state}"))
    for rank in description["held"]:
        rows.append(("memory", f"at most {size(rank['peak'])} on rank {rank['rank']}"))
    rows += _traffic_rows(description)
    print("\n".join(aligned(rows, "{:<12}{}")))


def _traffic_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a step's traffic; of each step where they differ."""
    steps = description["steps"] if description["traffic"] is None else description["steps"][:1]
    rows = []
    for step in steps:
        name = "traffic" if len(steps) == 1 else f"step {step['step']}"
        rows += [(name, traffic_line(row)) for row in step["traffic"]]
    return rows


def _other_plans(plan: Plan, tried: _Tried) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the loop's memory and traffic under each plan of as many ranks."""
    rows = []
    plans = plans_of_loop(plan, plan.world_size)
    if plan not in plans:
        plans.insert(0, plan)
    for candidate in plans:
        memories = tried.memories(candidate)
        if memories:
            largest = max(memories, key=lambda memory: memory.peak)
            rows.append(PlanRow(candidate, largest, _most_sent(tried.profiles(candidate)[0])))
    report = []
    for row in rows:
        report.append({"plan": row.plan.line(), "memory": row.memory.to_json(), "sent_bytes": row.sent_bytes})
    return report, plans_table(rows, plan)


def _most_sent(found: LoopProfile) -> int:
    """Return the most bytes that one of the recorded steps sends."""
    steps: list[int] = [sum(row["bytes"] for row in step["traffic"]) for step in found.steps[found.from_step :]]
    return max(steps)


def _ways_out(plan: Plan, tried: _Tried, report: dict[str, Any]) -> list[Suggestion]:
    """Return plans under which the loop fits, where it does not fit under the one that is asked for."""
    if not any(rank["is_too_large"] for rank in report["ranks"]):
        return []
    asked = [profiled.profile for profiled in tried.profiles(plan)]
    fitting = by_allocator(plan, asked, tried.device)
    has_answer = False  # True once moments with more bits fit, or can't be had: fewer bits are not tried then
    for change in changes_of_loop(plan):
        if change.kind == MOMENTS and has_answer:
            continue
        profiles = [profiled.profile for profiled in tried.profiles(change.plan)]
        needed = needed_if_it_fits(change.plan, profiles, tried.device) if profiles else None
        if needed is not None:
            fitting.append((change, needed, flops_of(change.plan, profiles)))
        has_answer |= change.kind == MOMENTS and (not profiles or needed is not None)
    return cheapest(fitting, plan, flops_of(plan, asked))
