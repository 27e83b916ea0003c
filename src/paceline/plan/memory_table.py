"""A rank's memory as a person reads it: a table of whose it is, and a picture of the step."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.nouns.device import Device
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile
from paceline.plan.memory import Memory, phase_at

WIDTH, HEIGHT = 72, 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def size(nbytes: float) -> str:
    """Bytes in MiB, or GiB from 10 of them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def table(memories: Sequence[Memory], device: Device, communicators: int) -> list[str]:
    """Rows by kind and columns by rank, at each rank's peak; below, what a GPU must have."""
    kinds = list(dict.fromkeys(kind for memory in memories for kind in memory.at_peak))
    rows = [("", [f"rank {memory.rank}" for memory in memories])]
    rows += [(kind, [_or_dash(memory.at_peak.get(kind, 0)) for memory in memories]) for kind in kinds]
    rows.append(("peak of live tensors", [size(memory.peak) for memory in memories]))
    rows.append(("in", [f"{memory.phase}" for memory in memories]))
    if any(memory.shared for memory in memories):
        rows.append(("shared memory, besides", [_or_dash(memory.shared) for memory in memories]))
    if any(memory.host for memory in memories):
        rows.append(("in the host's memory, besides", [size(memory.host) for memory in memories]))
    if device.kind == "cuda":
        reserved = [memory.reserved or 0 for memory in memories]
        rows.append(("reserved by the allocator", [size(one) for one in reserved]))
        rows.append(("CUDA context, NCCL (assumed)", [size(device.beside(communicators))] * len(memories)))
        rows.append(("in all", [size(one + device.beside(communicators)) for one in reserved]))
    if device.memory is not None:
        rows.append((f"{device.name} has", [size(device.memory)] * len(memories)))
        rows.append(("", ["OUT OF MEMORY" if memory.is_too_large else "fits" for memory in memories]))
    width = max(len(name) for name, _ in rows)
    columns = [max(len(cells[i]) for _, cells in rows) for i in range(len(memories))]
    lines = []
    for name, cells in rows:
        line = f"{name:<{width}}  " + "  ".join(f"{cell:>{columns[i]}}" for i, cell in enumerate(cells))
        lines.append(line.rstrip())
    return lines


def servers_table(profile: Profile) -> list[str]:
    """A line for each parameter server; nothing where there is none."""
    if not profile.servers:
        return []
    lines = [f"{'':<10}{'parameters':>14}{'optimizer state':>17}{'gradients, at most':>20}"]
    for number, held in enumerate(profile.servers):
        cells = [size(held[name]) for name in ("parameters", "optimizer_state", "gradients")]
        lines.append(f"server {number:<3}{cells[0]:>14}{cells[1]:>17}{cells[2]:>20}")
    return [*lines, ""]


def holders(memory: Memory) -> list[str]:
    """The largest holders at a rank's peak."""
    rows = [(holder.name or "(the loss)", holder.kind, size(holder.nbytes)) for holder in memory.holders]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines = [f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {held:>{widths[2]}}" for name, kind, held in rows]
    return [f"the largest at rank {memory.rank}'s peak:", *lines]


def picture(profile: Profile) -> list[str]:
    """Live memory over the last step, from the first allocation to the last; the phases below."""
    recording = profile.recording
    live, curve = 0, []
    for number, event in enumerate(recording.events):
        nbytes = recording.blocks[abs(event) - 1].nbytes
        live += nbytes if event > 0 else -nbytes
        if number >= recording.last_step:
            curve.append((live, phase_at(recording, number)))
    if not curve:
        return []
    cells = [
        curve[i * len(curve) // WIDTH : max((i + 1) * len(curve) // WIDTH, i * len(curve) // WIDTH + 1)]
        for i in range(WIDTH)
    ]
    tops = [max(value for value, _ in cell) for cell in cells]
    peak = max(tops)
    lines = []
    for row in range(HEIGHT, 0, -1):
        filled = [min(max(top / peak * HEIGHT - row + 1, 0.0), 1.0) for top in tops]
        label = size(peak * row / HEIGHT) if row in (HEIGHT, HEIGHT // 2) else ""
        lines.append(f"{label:>12} |" + "".join(_EIGHTHS[round(8 * share)] for share in filled))
    phases = [cell[0][1] for cell in cells]
    return [*lines, f"{'':>12} |{_labels(phases)}"]


def _labels(phases: list[str]) -> str:
    """Each phase's name where it begins, as far as there is room."""
    text, at = "", 0
    while at < len(phases):
        end = next((i for i in range(at, len(phases)) if phases[i] != phases[at]), len(phases))
        text += f"^{phases[at]}"[: end - at].ljust(end - at)
        at = end
    return text


def _or_dash(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def communicators(plan: Plan) -> int:
    """How many NCCL communicators a rank of the plan has: one for each axis with ranks, and one for all."""
    mesh = Mesh.parse(plan.mesh)
    used = sum(mesh.size(axis) > 1 for axis in AXES)
    return used + (used > 1)
