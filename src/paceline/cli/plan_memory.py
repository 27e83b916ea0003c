"""Explain a plan's memory for `paceline plan`: its parts on each rank, and changes where it is too much."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.launch.simulators import ProfileRequest, Simulators, ranks_to_profile
from paceline.nouns import module_names
from paceline.nouns.device import Device
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.profile import NOTHING_TO_OFFLOAD, NOTHING_TO_RECOMPUTE, Profile
from paceline.nouns.table import aligned
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import communicators, holders, picture, servers_table, size, table
from paceline.plan.oom_advice import (
    FREE,
    MOST_SUGGESTIONS,
    OFFLOAD,
    Change,
    Suggestion,
    cheapest,
    ways,
    with_expandable_segments,
)
from paceline.run.supervise.progress import WorkProgress

SIMULATED = "steps simulated"


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the explanation and the device."""
    parser.add_argument("--explain-memory", action="store_true", help="where each rank's memory goes, and when")
    parser.add_argument(
        "--explain-oom", action="store_true", help="the same, and the cheapest changes with which it fits --device"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="WORD", help="cpu (default), cuda, 16GB or a name such as V100-16GB"
    )
    add_allocator_argument(parser)


def add_allocator_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the settings of torch's allocator on the GPU."""
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        help="the job will run with PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


def read_device(text: str, arguments: argparse.Namespace) -> Device:
    """Return a device, with the allocator that the arguments ask for.

    Raises:
        UsageError: --expandable-segments was given for a CPU.
        PlanError: there is no such device.
    """
    device = Device.parse(text)
    if not arguments.expandable_segments:
        return device
    if device.kind != "cuda":
        raise UsageError(
            "--expandable-segments without a GPU",
            f"the device is {device.name}, and only a GPU's memory comes from torch's caching allocator",
            "add --device 16GB, or a name such as V100-16GB, or leave --expandable-segments out",
        )
    return replace(device, expandable_segments=True)


def check_memory_arguments(arguments: argparse.Namespace) -> Device:
    """Return the device.

    Raises:
        UsageError: --explain-oom was given without a device whose memory is known, or --expandable-segments for a CPU.
        PlanError: there is no such device.
    """
    device = read_device(arguments.device, arguments)
    if arguments.explain_oom and device.memory is None:
        raise UsageError(
            "can't search for ways to save memory",
            f"the device {arguments.device!r} has no memory of a known size",
            "add --device 16GB, or a name such as V100-16GB",
        )
    return device


def explain(
    plan: Plan, command_line: Sequence[str], device: Device, with_ways_out: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return a plan's memory for programs and for the user, and notices on the way in which it was found.

    Raises:
        WorkloadError, PlanError: no step under the plan can be simulated.
    """
    fields = asdict(plan)
    requests = []
    for rank in ranks_to_profile(plan):
        requests.append(ProfileRequest(fields, rank, device.kind, name=f"rank {rank} under {plan.line()}"))
    with simulators_of(command_line) as simulators, WorkProgress(SIMULATED) as progress:
        progress.total = len(requests)
        profiles = without_errors(simulators.ask(requests, progress, more=with_ways_out))
        report, lines, notices = explain_profiles(plan, profiles, device)
        if with_ways_out:
            is_too_large = any(rank["is_too_large"] for rank in report["ranks"])
            suggestions = _ways_out(plan, simulators, progress, device, profiles) if is_too_large else []
            add_suggestions(suggestions, report, lines, device)
    return report, lines, notices


def simulators_of(command_line: Sequence[str]) -> Simulators[Profile]:
    """Return the child processes that simulate steps of a file's workload."""
    return Simulators(module_names.PROFILE_WORKLOAD, command_line, Profile.read)


def explain_profiles(
    plan: Plan, profiles: Sequence[Profile], device: Device
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the memory by some ranks' profiles, for programs and for the user, and notices."""
    capacity = device.capacity(communicators(plan))
    memories = [memory_of(profile, capacity, device.expandable_segments) for profile in profiles]
    largest = max(range(len(memories)), key=lambda index: memories[index].peak)
    lines = [
        *table(memories, device, communicators(plan)), "",
        *servers_table(profiles[largest]),
        *holders(memories[largest]), "",
        *picture(profiles[largest]),
    ]  # fmt: skip
    report: dict[str, Any] = {"device": device.name, "ranks": [memory.to_json() for memory in memories]}
    report["expandable_segments"] = device.expandable_segments
    if profiles[largest].servers:
        report["servers"] = profiles[largest].servers
    notices: list[str] = []
    for profile in profiles:
        notices += notices_of(profile, device)
    notices = list(dict.fromkeys(notices))  # several ranks have the same
    return report, lines, notices


def add_suggestions(
    suggestions: Sequence[Suggestion], report: dict[str, Any], lines: list[str], device: Device
) -> None:
    """Add to a report the changes that make the job fit."""
    is_too_large = any(rank["is_too_large"] for rank in report["ranks"])
    lines += ["", *_suggestion_lines(suggestions, is_too_large, device)]
    report["ways_out"] = [_suggestion_json(suggestion) for suggestion in suggestions]


def _suggestion_json(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "change": suggestion.way.text,
        "needs_bytes": suggestion.needed,
        "more_devices": suggestion.devices,
        "flops": round(suggestion.flops, 4),
    }


def notices_of(profile: Profile, device: Device) -> list[str]:
    """Return the notices on the way in which a profile was found, and on the device that it needs."""
    notices = list(profile.notices)
    if profile.precision == "bf16" and device.has_bf16 is False:
        notices.append(
            f'{device.name} has no bf16, which precision="bf16" asks for: it is slow there or refused, and attention'
            " may hold more than is shown; write fp16"
        )
    return notices


def _ways_out(
    plan: Plan, simulators: Simulators[Profile], progress: WorkProgress, device: Device, profiles: Sequence[Profile]
) -> list[Suggestion]:
    """Try of each kind the mildest way first, and the next one where that was not enough. Return the cheapest."""
    waiting: dict[str, list[Change]] = {}
    for way in ways(plan, profiles[0].micro_batch, profiles[0].precision, device.has_bf16):
        waiting.setdefault(way.kind, []).append(way)
    fitting = by_allocator(plan, profiles, device)
    progress.is_most = True
    while waiting and (len(fitting) < MOST_SUGGESTIONS or FREE in waiting):
        untried = list(itertools.chain.from_iterable(waiting.values()))
        progress.total = progress.num_done + sum(len(ranks_to_profile(way.plan)) for way in untried)
        mildest = [ways_of_kind.pop(0) for ways_of_kind in waiting.values()]
        same_size = [way for way in mildest if way.plan.world_size == plan.world_size]
        fitting += _tried(same_size, simulators, progress, device)
        # More devices cost more than all else: where enough changes fit without, no other is among the cheapest.
        if sum(way.plan.world_size == plan.world_size for way, _, _ in fitting) < MOST_SUGGESTIONS:
            more_devices = [way for way in mildest if way.plan.world_size != plan.world_size]
            fitting += _tried(more_devices, simulators, progress, device)
        fitting_kinds = {way.kind for way, _, _ in fitting}
        for kind in list(waiting):
            if kind in fitting_kinds or not waiting[kind]:
                del waiting[kind]
    return cheapest(fitting, plan, flops_of(plan, profiles))


def _tried(
    candidates: Sequence[Change], simulators: Simulators[Profile], progress: WorkProgress, device: Device
) -> list[tuple[Change, int, float]]:
    """Return the candidates that fit, with the bytes that they need and the operations of all their ranks."""
    requests = []
    for way in candidates:
        plan = asdict(way.plan)
        capacity = device.capacity(communicators(way.plan))
        for rank in ranks_to_profile(way.plan):
            changes = (way.micro_batch_size, way.precision)
            requests.append(ProfileRequest(plan, rank, device.kind, *changes, True, capacity, way.text))
    answers = iter(simulators.ask(requests, progress))
    fitting: list[tuple[Change, int, float]] = []
    for way in candidates:
        rank_answers = [next(answers) for _ in ranks_to_profile(way.plan)]
        profiles = [answer for answer in rank_answers if isinstance(answer, Profile)]
        if len(profiles) < len(rank_answers) or any(_changes_nothing(profile) for profile in profiles):
            continue  # it does not fit, or this workload can't be changed so: too few samples, no blocks to recompute
        needed = needed_if_it_fits(way.plan, profiles, device)
        if needed is None:
            continue
        if way.kind == OFFLOAD:
            copied = max(profile.copied_bytes for profile in profiles)
            host = max(memory_of(profile).host for profile in profiles)
            cost = f"{size(copied)} copied between device and host in each step, {size(host)} of the host's memory"
            way = replace(way, condition=cost)
        fitting.append((way, needed, flops_of(way.plan, profiles)))
    return fitting


def by_allocator(plan: Plan, profiles: Sequence[Profile], device: Device) -> list[tuple[Change, int, float]]:
    """Return expandable segments as a change, if the plan fits with them: it lacks memory only by fragmentation.

    Args:
        plan: the plan that does not fit.
        profiles: the profiles of its ranks; memory is allocated in the same order, so no step is simulated anew.
        device: the device with its present allocator.
    """
    if device.expandable_segments:
        return []
    needed = needed_if_it_fits(plan, profiles, replace(device, expandable_segments=True))
    return [] if needed is None else [(with_expandable_segments(plan), needed, flops_of(plan, profiles))]


def needed_if_it_fits(plan: Plan, profiles: Sequence[Profile], device: Device) -> int | None:
    """Return the bytes of the device that the largest of a plan's ranks needs; None if one does not fit."""
    capacity = device.capacity(communicators(plan))
    memories = [memory_of(profile, capacity, device.expandable_segments) for profile in profiles]
    if any(memory.is_too_large for memory in memories):
        return None
    needed = max(memory.reserved or 0 for memory in memories) + device.beside(communicators(plan))
    return min(needed, device.memory or needed)


def _changes_nothing(profile: Profile) -> bool:
    unchanged_notices = (NOTHING_TO_RECOMPUTE, NOTHING_TO_OFFLOAD)
    return any(words in notice for notice in profile.notices for words in unchanged_notices)


def flops_of(plan: Plan, profiles: Sequence[Profile]) -> float:
    """Return the operations of all ranks: those not simulated do as much as the one of their stage that was."""
    return sum(profile.flops for profile in profiles) * plan.world_size / len(profiles)


def _suggestion_lines(suggestions: Sequence[Suggestion], is_too_large: bool, device: Device) -> list[str]:
    if not is_too_large:
        return [f"It fits {device.name}: nothing needs to change."]
    if not suggestions:
        return [f"It does not fit {device.name}, and none of the changes that were tried makes it fit."]
    rows = [(suggestion.way.text, size(suggestion.needed), suggestion.cost) for suggestion in suggestions]
    title = f"It does not fit {device.name}. The cheapest changes that fit:"
    return [title, *aligned(rows, "{:<}  needs {:>12}  cost: {}")]


def without_errors(answers: Sequence[Profile | WorkloadError]) -> list[Profile]:
    """Return the profiles; raise the first error among them."""
    profiles = []
    for answer in answers:
        if isinstance(answer, WorkloadError):
            raise answer
        profiles.append(answer)
    return profiles
