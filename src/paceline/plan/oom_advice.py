"""Suggest what to change when a step does not fit its device: each change with its cost, the cheapest first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan

MOST_SUGGESTIONS = 4
OFFLOAD = "offload"  # the kind whose cost is what it copies
MOMENTS = "moments"  # the kind that keeps Adam's moments in fewer bits
FREE = "micro-batch"  # the kind that costs neither devices nor computation
ALLOCATOR = "allocator"  # the kind that changes only where blocks of memory are put
_LATER = {OFFLOAD: 1, MOMENTS: 2}  # kinds that come after others of as many devices and as much computation


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the plan or the workload that holds less memory.

    Args:
        kind: the kind of change; two changes of one kind do the same to a different degree.
        text: the text that the user should write.
        plan: the plan with the change.
        micro_batch_size: the new micro-batch size, in samples; 0: no change.
        precision: the new precision of the workload; "": no change.
        condition: a requirement of the device, or another cost of the change; "": neither.
    """

    kind: str
    text: str
    plan: Plan
    micro_batch_size: int = 0
    precision: str = ""
    condition: str = ""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that makes the step fit.

    Attributes:
        way: the change that is suggested.
        needed: the bytes that the step needs on the device, in all.
        devices: the number of additional devices.
        flops: the floating-point operations on all ranks, relative to those of the unchanged step.
    """

    way: Change
    needed: int
    devices: int
    flops: float

    @property
    def cost(self) -> str:
        """The cost in words; "none" if there is none."""
        costs = []
        if self.devices:
            costs.append(f"{self.devices} more device{'s' * (self.devices > 1)}")
        if self.flops > 1.005:  # what rounds to 1 %
            costs.append(f"{self.flops - 1:.0%} more computation")
        elif self.way.kind in ("checkpointing", "both"):
            costs.append("all but matrix products computed again")
        if self.way.micro_batch_size:
            number = self.way.micro_batch_size
            costs.append(f"kernels on {number} sample{'s' * (number > 1)} at a time")
        if self.way.precision:
            costs.append(f"matrix products rounded to {self.way.precision}")
        if self.way.condition:
            costs.append(self.way.condition)
        return ", ".join(costs) or "none"

    @property
    def order(self) -> tuple[bool, int, float, int, int, int]:
        """The key to sort by, cheapest first: a setting, fewest devices, least computation, no copies, moments in full,
        the largest micro-batch.
        """
        way = self.way
        is_setting, later = way.kind == ALLOCATOR, _LATER.get(way.kind, 0)
        return not is_setting, self.devices, round(self.flops, 2), later, -way.micro_batch_size, self.needed


def with_expandable_segments(plan: Plan) -> Change:
    """Return the change that leaves plan and workload as they are, and gives torch's allocator expandable segments."""
    return Change(ALLOCATOR, "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment", plan)


def ways(plan: Plan, micro_batch: int, precision: str, has_bf16: bool | None = True) -> Iterator[Change]:
    """Yield changes that hold less memory.

    Args:
        plan: the plan that is changed.
        micro_batch: the number of samples in its micro-batches.
        precision: the precision of the workload.
        has_bf16: True if the device computes in bf16; None if that is not known.
    """
    mesh = Mesh.parse(plan.mesh)
    smaller = _smaller(micro_batch) if mesh.size("pipeline") == 1 else []
    for size in smaller:
        yield Change(FREE, f"micro_batch_size={size} in the workload", plan, size)
    if precision == "float32" and has_bf16 is False and _can_skip_updates(plan):
        yield Change("precision", 'precision="fp16" in the workload', plan, 0, "fp16")
    if precision == "float32" and has_bf16 is not False:
        condition = "" if has_bf16 else "where the GPU has bf16 (NVIDIA: Ampere or newer)"
        yield Change("precision", 'precision="bf16" in the workload', plan, 0, "bf16", condition)
    if mesh.size("tensor") > 1 and plan.sequence == "off":
        split = dataclasses.replace(plan, sequence="on")
        yield Change("sequence", "sequence=on in the plan", split, condition="other collectives")
    yield from fewer_bits(plan)
    if plan.checkpointing == "none":
        yield from _of_activations(plan, smaller)
    if plan.is_one_process:
        for ranks in (2, 4, 8):
            yield Change("shard", f"shard={ranks} as the plan", _over(plan, "shard", ranks))
        for ranks in (2, 4, 8):
            yield Change("context", f"context={ranks} as the plan", _over(plan, "context", ranks))


def fewer_bits(plan: Plan) -> Iterator[Change]:
    """Yield changes that keep Adam's moments in fewer bits, where the plan has them in full and can have such."""
    if plan.optimizer_states != "full":
        return
    for bits in (8, 4):
        states = f"optimizer_states={bits}bit"
        with contextlib.suppress(PlanError):  # servers, say, keep moments in full
            changed = dataclasses.replace(plan, optimizer_states=f"{bits}bit")
            yield Change(MOMENTS, f"{states} in the plan", changed, condition=f"Adam's moments rounded to {bits} bits")


def _of_activations(plan: Plan, smaller: Sequence[int]) -> Iterator[Change]:
    """Yield changes that compute activations again, or keep them in the host's memory."""
    for mode in ("selective", "full"):
        checkpointed = dataclasses.replace(plan, checkpointing=mode)
        yield Change("checkpointing", f"checkpointing={mode} in the plan", checkpointed)
    if not plan.is_compiled:
        offloaded = dataclasses.replace(plan, checkpointing="offload")
        yield Change(OFFLOAD, "checkpointing=offload in the plan", offloaded)
    checkpointed = dataclasses.replace(plan, checkpointing="full")
    for size in smaller:
        yield Change("both", f"checkpointing=full and micro_batch_size={size}", checkpointed, size)


def _can_skip_updates(plan: Plan) -> bool:
    """Return whether all ranks can leave out an update together, as fp16 asks for."""
    return plan.strategy == "collectives" and plan.compression not in ("topk", "powersgd")


def _smaller(micro_batch: int) -> list[int]:
    """Return the smaller sizes of micro-batches that are tried, the largest first."""
    sizes = []
    for size in (micro_batch // 2, micro_batch // 4, micro_batch // 8, 1):
        if 1 <= size < micro_batch and size not in sizes:
            sizes.append(size)
    return sizes


def _over(plan: Plan, axis: str, ranks: int) -> Plan:
    """Return the plan on `ranks` ranks of one axis, without options that have no effect there."""
    return dataclasses.replace(plan, mesh=f"{axis}={ranks}").settled()


def cheapest(found: Sequence[tuple[Change, int, float]], plan: Plan, flops: float) -> list[Suggestion]:
    """Return the four cheapest of the changes that fit, one of each kind.

    Args:
        found: changes, with the bytes that they need and the floating-point operations of all their ranks.
        plan: the plan before the change.
        flops: the floating-point operations of all its ranks.
    """
    suggestions = []
    for change, needed, operations in found:
        devices = change.plan.world_size - plan.world_size
        suggestions.append(Suggestion(change, needed, devices, operations / max(flops, 1.0)))
    cheapest_of_kind: dict[str, Suggestion] = {}
    for suggestion in sorted(suggestions, key=lambda suggestion: suggestion.order):
        cheapest_of_kind.setdefault(suggestion.way.kind, suggestion)
    return list(cheapest_of_kind.values())[:MOST_SUGGESTIONS]
