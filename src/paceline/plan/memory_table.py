"""Render a rank's memory and traffic as text: a table by kind, a picture of the step, a line of its traffic."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.nouns.device import Device
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile
from paceline.nouns.table import aligned
from paceline.plan.memory import Memory, live_bytes, phase_at

WIDTH = 72  # of the picture, in characters
HEIGHT = 8  # in lines
_EIGHTHS = " ▁▂▃▄▅▆▇█"  # index: eighths of a cell that are filled, from below


def size(nbytes: float) -> str:
    """Write bytes in MiB, or in GiB from 10 of them."""
    if nbytes >= 10 * 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB"


def table(memories: Sequence[Memory], device: Device, communicators: int) -> list[str]:
    """Return rows by kind and columns by rank, at each rank's peak; below, what a GPU must have."""
    kinds: dict[str, None] = {}  # in the order in which ranks have them
    for memory in memories:
        kinds |= dict.fromkeys(memory.at_peak)
    rows: list[tuple[str, ...]] = [("", *(f"rank {memory.rank}" for memory in memories))]
    for kind in kinds:
        rows.append((kind, *(_or_dash(memory.at_peak.get(kind, 0)) for memory in memories)))
    rows.append(("peak of live tensors", *(size(memory.peak) for memory in memories)))
    rows.append(("in", *(memory.phase for memory in memories)))
    if any(memory.shared for memory in memories):
        rows.append(("shared memory, besides", *(_or_dash(memory.shared) for memory in memories)))
    if any(memory.host for memory in memories):
        rows.append(("in the host's memory, besides", *(size(memory.host) for memory in memories)))
    if any(memory.copied for memory in memories):
        rows.append(("copied to the host and back", *(size(memory.copied) for memory in memories)))
    if device.kind == "cuda":
        reserved = [memory.reserved or 0 for memory in memories]
        beside = device.beside(communicators)
        rows.append(("reserved by the allocator", *(size(nbytes) for nbytes in reserved)))
        rows.append(("with expandable_segments", *[str(device.expandable_segments)] * len(memories)))
        rows.append(("CUDA context, NCCL (assumed)", *[size(beside)] * len(memories)))
        rows.append(("in all", *(size(nbytes + beside) for nbytes in reserved)))
    if device.memory is not None:
        rows.append((f"{device.name} has", *[size(device.memory)] * len(memories)))
        rows.append(("", *("OUT OF MEMORY" if memory.is_too_large else "fits" for memory in memories)))
    return [line.rstrip() for line in aligned(rows, "{:<}" + "  {:>}" * len(memories))]


def servers_table(profile: Profile) -> list[str]:
    """Return a line for each parameter server, and a heading; nothing where there is none."""
    if not profile.servers:
        return []
    rows: list[tuple[str, ...]] = [("", "parameters", "optimizer state", "gradients, at most")]
    for number, server_bytes in enumerate(profile.servers):
        sizes = [size(server_bytes[kind]) for kind in ("parameters", "optimizer_state", "gradients")]
        rows.append((f"server {number}", *sizes))
    return [*aligned(rows, "{:<10}{:>14}{:>17}{:>20}"), ""]


def holders(memory: Memory) -> list[str]:
    """Return a line for each of the largest holders at a rank's peak."""
    rows = [(holder.name or "(the loss)", holder.kind, size(holder.nbytes)) for holder in memory.holders]
    return [f"the largest at rank {memory.rank}'s peak:", *aligned(rows, "{:<}  {:<}  {:>}")]


def picture(profile: Profile) -> list[str]:
    """Draw live memory over the last step, from the first allocation to the last; the phases below."""
    recording = profile.recording
    curve = [(live, phase_at(recording, number)) for number, live in live_bytes(recording)]
    if not curve:
        return []
    tops = []  # of each column the most live bytes
    phases = []  # of each column the phase in which it begins
    for column in range(WIDTH):
        # A column stands for as many events, not for as long a time: how long operations take is not known. The
        # maximum keeps a peak of a single event in sight.
        start = column * len(curve) // WIDTH
        stop = max((column + 1) * len(curve) // WIDTH, start + 1)
        tops.append(max(live for live, _ in curve[start:stop]))
        phases.append(curve[start][1])
    peak = max(tops)
    lines = []
    for row in range(HEIGHT, 0, -1):
        label = size(peak * row / HEIGHT) if row in (HEIGHT, HEIGHT // 2) else ""
        cells = [_cell(top / peak * HEIGHT - row + 1) for top in tops]
        lines.append(f"{label:>12} |" + "".join(cells))
    lines.append(f"{'':>12} |{_labels(phases)}")
    return lines


def _cell(share: float) -> str:
    """Return a character that is filled from below by `share`, in eighths."""
    filled = min(max(share, 0.0), 1.0)
    return _EIGHTHS[round(8 * filled)]


def _labels(phases: list[str]) -> str:
    """Write each phase's name where it begins, as far as there is room."""
    text = ""
    for phase, columns in itertools.groupby(phases):
        width = len(list(columns))
        text += f"^{phase}"[:width].ljust(width)
    return text


def _or_dash(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def communicators(plan: Plan) -> int:
    """Return the number of a rank's NCCL communicators: one for each axis in use, one for all ranks if several are."""
    mesh = Mesh.parse(plan.mesh)
    axes = len([axis for axis in AXES if mesh.size(axis) > 1])
    return axes + 1 if axes > 1 else axes


def traffic_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a ledger for programs that read a plan's facts."""
    return {"collective": row["collective"], "axis": row["axis"], "calls": row["calls"], "payload_bytes": row["bytes"]}


def traffic_line(row: Mapping[str, Any]) -> str:
    """Return a row of `traffic_facts` as text."""
    calls = "1 call" if row["calls"] == 1 else f"{row['calls']} calls"
    mib = row["payload_bytes"] / 2**20
    return f"{row['collective']:<15}{row['axis']:<11}{calls:>10}{mib:>12.3f} MiB a step"
