"""The plans that a loop of the user's own could have in place of the one that is asked for, and a table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.nouns.errors import PlanError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS
from paceline.nouns.table import aligned
from paceline.plan.memory import Memory
from paceline.plan.memory_table import size
from paceline.plan.oom_advice import Change, fewer_bits

_COSTS = {  # of what shares out the memory: by axis and level of ZeRO
    ("shard", 1): "updated parameters are sent",
    ("shard", 2): "each backward pass sums gradients, and parameters are gathered for each call",
    ("shard", 3): "each backward pass sums gradients, and parameters are gathered for each call and each backward pass",
    ("tensor", 3): "layers send activations, and models are called as wholes",
}
_MORE_RANKS = (2, 4, 8)  # are tried where one process has too little memory


def plans_of_loop(plan: Plan, ranks: int) -> list[Plan]:
    """Return the plans of so many ranks that can train a loop, with the options of `plan`.

    Args:
        plan: the plan that is asked for; it is returned unchanged if it is one of them.
        ranks: the number of ranks of the plans.
    """
    if ranks == 1:
        return [plan] if plan.world_size == 1 else []
    meshes = [(f"replicate={ranks}", 3), *((f"{axis}={ranks}", zero) for axis, zero in _COSTS)]
    found = []
    for mesh, zero in meshes:
        variant = dataclasses.replace(plan, mesh=mesh, zero=zero).settled()
        try:
            check_plan_of_loop(variant)
        except PlanError:
            continue
        found.append(variant)
    return found


def changes_of_loop(plan: Plan) -> list[Change]:
    """Return plans with which each rank of a loop may hold less, those of as many ranks first."""
    changes = list(fewer_bits(plan))
    ranks = [plan.world_size]
    if plan.world_size == 1:
        ranks = list(_MORE_RANKS)
    for count in ranks:
        for variant in plans_of_loop(plan, count):
            if variant != plan and not variant.mesh.startswith("replicate"):  # which hold as much as one process
                (axis,) = Mesh.parse(variant.mesh).used()
                cost = _COSTS[axis, variant.zero]
                changes.append(Change(axis, f"{variant.line()} as the plan", variant, condition=cost))
    return changes


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan, the rank that holds most under it, and the most that a step sends."""

    plan: Plan
    memory: Memory
    sent_bytes: int


def plans_table(rows: Sequence[PlanRow], asked: Plan) -> list[str]:
    """Return a line for each plan."""
    title = ("plan", "peak", "parameters", "gradients", "optimizer state", "sent in a step")
    cells: list[tuple[str, ...]] = [title]
    for row in rows:
        bytes_of = row.memory.at_peak
        # Gradients that are summed are in their buckets.
        gradients = max(bytes_of.get(GRADIENTS, 0), bytes_of.get(COMMUNICATION, 0))
        sizes = (row.memory.peak, bytes_of.get(PARAMETERS, 0), gradients, bytes_of.get(OPTIMIZER, 0), row.sent_bytes)
        mark = " (asked for)" if row.plan == asked else ""
        cells.append((f"{row.plan.line()}{mark}", *(size(nbytes) for nbytes in sizes)))
    return [line.rstrip() for line in aligned(cells, "{:<}" + "  {:>}" * (len(title) - 1))]
