"""Ask child processes what the first steps of a loop of the user's own take: the asking side has no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from paceline.launch.profile_workload import ProfileRequest, Simulators, Watcher
from paceline.nouns import module_names
from paceline.nouns.errors import WorkloadError
from paceline.nouns.loop_profile import LoopProfile
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan


def profile_loop(plan: Plan, command_line: Sequence[str], device: str, watcher: Watcher) -> list[LoopProfile]:
    """Return what a few steps of a loop hold and send on its first rank, and on the one that updates most.

    Each is a process of its own: the loop's file runs in it.

    Args:
        plan: how the loop is trained.
        command_line: the user's file and its arguments.
        device: "cpu" or "cuda".
        watcher: shows progress.

    Raises:
        WorkloadError: the file failed, or took no step.
    """
    found = [_recorded(plan, 0, command_line, device, watcher)]
    owned = found[0].owned
    # Optimizer state is where a parameter is updated. All else is equal, but for sizes that don't divide: there the
    # first rank has most.
    if owned and max(owned) > owned[0]:
        rank = Mesh.parse(plan.mesh).peers(0, "shard")[owned.index(max(owned))]
        found.append(_recorded(plan, rank, command_line, device, watcher))
    return found


def _recorded(plan: Plan, rank: int, command_line: Sequence[str], device: str, watcher: Watcher) -> LoopProfile:
    request = ProfileRequest(asdict(plan), rank, device, name=f"rank {rank} under {plan.line()}")
    with Simulators(module_names.PROFILE_LOOP, command_line, LoopProfile.read) as simulators:  # the file runs in it
        (answer,) = simulators.ask([request], watcher)
    if isinstance(answer, WorkloadError):
        raise answer
    return answer
