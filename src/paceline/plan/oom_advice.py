"""What to change when a step does not fit its device: each way with what it costs, the cheapest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan

WANTED = 3
FREE = "micro-batch"  # the kind that costs neither devices nor computation


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Args:
        kind: ways of one kind do the same, the one more than the other.
        text: what to write.
        plan: the plan with it.
        micro_batch_size: in place of the workload's; 0 leaves it.
        precision: in place of the workload's; "" leaves it.
        condition: what the device must have; "": nothing that is in doubt.
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
        way: the change.
        needed: bytes of the device, in all.
        devices: how many more it takes.
        flops: times those of the step as it was, over all its ranks.
    """

    way: Change
    needed: int
    devices: int
    flops: float

    @property
    def cost(self) -> str:
        """In words."""
        parts = []
        if self.devices:
            parts.append(f"{self.devices} more device{'s' * (self.devices > 1)}")
        if self.flops > 1.005:
            parts.append(f"{self.flops - 1:.0%} more computation")
        elif self.way.kind in ("checkpointing", "both"):
            parts.append("all but matrix products computed again")
        if self.way.micro_batch_size:
            number = self.way.micro_batch_size
            parts.append(f"kernels on {number} sample{'s' * (number > 1)} at a time")
        if self.way.precision:
            parts.append("matrix products rounded to bf16")
        if self.way.condition:
            parts.append(self.way.condition)
        return ", ".join(parts) or "none"

    @property
    def order(self) -> tuple[int, float, int, int]:
        """The cheapest first: no device, no computation, the largest micro-batch."""
        return self.devices, round(self.flops, 2), -self.way.micro_batch_size, self.needed


def ways(plan: Plan, micro_batch: int, precision: str, has_bf16: bool | None = True) -> Iterator[Change]:
    """Changes that hold less memory.

    Args:
        plan: as it is.
        micro_batch: samples of its micro-batches.
        precision: the workload's.
        has_bf16: whether the device computes in bf16; None: that is not known.
    """
    mesh = Mesh.parse(plan.mesh)
    smaller = [size for size in (micro_batch // 2, micro_batch // 4, micro_batch // 8, 1) if size >= 1]
    smaller = [size for size in dict.fromkeys(smaller) if size < micro_batch and mesh.size("pipeline") == 1]
    for size in smaller:
        yield Change(FREE, f"micro_batch_size={size} in the workload", plan, size)
    if precision == "float32" and has_bf16 is not False:
        condition = "" if has_bf16 else "where the GPU has bf16 (NVIDIA: Ampere or newer)"
        yield Change("precision", 'precision="bf16" in the workload', plan, 0, "bf16", condition)
    for mode in ("selective", "full"):
        if plan.checkpointing == "none":
            yield Change(
                "checkpointing", f"checkpointing={mode} in the plan", dataclasses.replace(plan, checkpointing=mode)
            )
    if plan.checkpointing == "none" and smaller:
        both = dataclasses.replace(plan, checkpointing="full")
        for size in smaller:
            yield Change("both", f"checkpointing=full and micro_batch_size={size}", both, size)
    if mesh.world_size == 1 and not plan.server:
        for ranks in (2, 4, 8):
            yield Change("shard", f"shard={ranks} as the plan", _sharded(plan, ranks))


def _sharded(plan: Plan, ranks: int) -> Plan:
    """The plan on `ranks` ranks that share parameters, without options that have no effect there."""
    return dataclasses.replace(plan, mesh=f"shard={ranks}").settled()


def cheapest(found: Sequence[tuple[Change, int, float]], plan: Plan, flops: float) -> list[Suggestion]:
    """The three cheapest of the ways that fit, one of each kind.

    Args:
        found: ways, with the bytes that they need and the floating-point operations of all their ranks.
        plan: as it was.
        flops: of all its ranks.
    """
    outs = [
        Suggestion(way, needed, way.plan.world_size - plan.world_size, operations / max(flops, 1.0))
        for way, needed, operations in found
    ]
    best: dict[str, Suggestion] = {}
    for out in sorted(outs, key=lambda out: out.order):
        best.setdefault(out.way.kind, out)
    return list(best.values())[:WANTED]
