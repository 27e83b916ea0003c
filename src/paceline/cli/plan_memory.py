"""`paceline plan --explain-memory` and `--explain-oom`: where memory goes, and what to do where it is too much."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.launch.profile_workload import ProfileRequest, profile_workload, ranks_to_profile
from paceline.nouns.device import Device
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.profile import NOTHING_TO_RECOMPUTE, Profile
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import communicators, holders, picture, servers_table, size, table
from paceline.plan.oom_advice import FREE, WANTED, Change, Suggestion, cheapest, ways


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """What to explain, and for which device."""
    parser.add_argument("--explain-memory", action="store_true", help="where each rank's memory goes, and when")
    parser.add_argument(
        "--explain-oom", action="store_true", help="the same, and the cheapest ways out where it does not fit --device"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="WORD", help="cpu (default), cuda, 16GB or a name such as V100-16GB"
    )


def check_memory_arguments(arguments: argparse.Namespace) -> Device:
    """The device.

    Raises:
        UsageError: ways out are asked for, and not out of what.
        PlanError: there is no such device.
    """
    device = Device.parse(arguments.device)
    if arguments.explain_oom and device.memory is None:
        raise UsageError(
            "the cheapest ways out of too little memory",
            f"the device {arguments.device!r} has no memory of a known size",
            "add --device 16GB, or a name such as V100-16GB",
        )
    return device


def explain(
    plan: Plan, words: Sequence[str], device: Device, with_ways_out: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """A plan's memory: for programs, for people, and what people should know of how it was found.

    Raises:
        WorkloadError, PlanError: no step of it can be tried out.
    """
    requests = [ProfileRequest(asdict(plan), rank, device.kind) for rank in ranks_to_profile(plan)]
    profiles = _whole(profile_workload(requests, words, _told(len(requests), "rehearsing")))
    memories = [memory_of(profile, device.capacity(communicators(plan))) for profile in profiles]
    largest = max(range(len(memories)), key=lambda index: memories[index].peak)
    lines = [
        *table(memories, device, communicators(plan)), "",
        *servers_table(profiles[largest]),
        *holders(memories[largest]), "",
        *picture(profiles[largest]),
    ]  # fmt: skip
    facts: dict[str, Any] = {"device": device.name, "ranks": [memory.to_json() for memory in memories]}
    if profiles[largest].servers:
        facts["servers"] = profiles[largest].servers
    notices = list(dict.fromkeys(notice for profile in profiles for notice in notices_of(profile, device)))
    if with_ways_out:
        is_too_large = any(memory.is_too_large for memory in memories)
        outs = _ways_out(plan, words, device, profiles) if is_too_large else []
        lines += ["", *_told_ways(outs, is_too_large, device)]
        facts["ways_out"] = [
            {
                "change": out.way.text,
                "needs_bytes": out.needed,
                "more_devices": out.devices,
                "flops": round(out.flops, 4),
            }
            for out in outs
        ]
    return facts, lines, notices


def notices_of(profile: Profile, device: Device) -> list[str]:
    """What people should know of how a profile was found, and of what it asks of the device."""
    notices = list(profile.notices)
    if profile.precision == "bf16" and device.has_bf16 is False:
        notices.append(
            f'{device.name} has no bf16, which precision="bf16" asks for: it is slow there or refused, and attention'
            " may hold more than is shown; write float32"
        )
    return notices


def _ways_out(plan: Plan, words: Sequence[str], device: Device, profiles: Sequence[Profile]) -> list[Suggestion]:
    """Of each kind the mildest way first; the next one where that was not enough."""
    waiting: dict[str, list[Change]] = {}
    for way in ways(plan, profiles[0].micro_batch, profiles[0].precision, device.has_bf16):
        waiting.setdefault(way.kind, []).append(way)
    found: list[tuple[Change, int, float]] = []
    while waiting and (len(found) < WANTED or FREE in waiting):
        found += _tried([rest.pop(0) for rest in waiting.values()], words, device)
        done = {way.kind for way, _, _ in found}
        waiting = {kind: rest for kind, rest in waiting.items() if rest and kind not in done}
    return cheapest(found, plan, _flops(plan, profiles))


def _tried(candidates: Sequence[Change], words: Sequence[str], device: Device) -> list[tuple[Change, int, float]]:
    """Those that fit, with the bytes that they need and the operations of all their ranks."""
    requests = [
        ProfileRequest(asdict(way.plan), rank, device.kind, way.micro_batch_size, way.precision, is_brief=True)
        for way in candidates
        for rank in ranks_to_profile(way.plan)
    ]
    answers = iter(profile_workload(requests, words, _told(len(requests), "trying other plans")))
    found: list[tuple[Change, int, float]] = []
    for way in candidates:
        own = [next(answers) for _ in ranks_to_profile(way.plan)]
        known = [profile for profile in own if isinstance(profile, Profile)]
        if len(known) < len(own) or any(_changes_nothing(profile) for profile in known):
            continue  # this workload can't be changed so: too few samples, no blocks to recompute
        capacity = device.capacity(communicators(way.plan))
        memories = [memory_of(profile, capacity) for profile in known]
        if not any(memory.is_too_large for memory in memories):
            needed = max(memory.reserved or 0 for memory in memories) + device.beside(communicators(way.plan))
            found.append((way, min(needed, device.memory or needed), _flops(way.plan, known)))
    return found


def _changes_nothing(profile: Profile) -> bool:
    return any(NOTHING_TO_RECOMPUTE in notice for notice in profile.notices)


def _flops(plan: Plan, profiles: Sequence[Profile]) -> float:
    """Of all ranks: those that were not rehearsed do as much as the one of their stage that was."""
    return sum(profile.flops for profile in profiles) * plan.world_size / len(profiles)


def _told_ways(outs: Sequence[Suggestion], is_too_large: bool, device: Device) -> list[str]:
    if not is_too_large:
        return [f"It fits {device.name}: nothing needs to change."]
    if not outs:
        return [f"It does not fit {device.name}, and none of the changes that were tried makes it fit."]
    width = max(len(out.way.text) for out in outs)
    lines = [f"{out.way.text:<{width}}  needs {size(out.needed):>12}  cost: {out.cost}" for out in outs]
    return [f"It does not fit {device.name}. The cheapest ways out:", *lines]


def _whole(answers: Sequence[Profile | WorkloadError]) -> list[Profile]:
    for answer in answers:
        if isinstance(answer, WorkloadError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Profile)]


def _told(total: int, what: str) -> Any:
    def done(number: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if number + 1 == total else ""
            print(f"\r{what}: {number + 1} of {total} steps", end=end, file=sys.stderr, flush=True)

    return done
