"""Whether all ranks begin the same collectives in the same order; where not, which rank, which line, after what.

Read from the traces that ranks write as they go, so that it also explains a run that hung or died.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.mesh import AXES, Mesh

IDLE_S = 6.0  # all ranks without work for so long, waiting for one another: nobody will come any more
_IDLE_CPU_S = 0.1
_PAIRWISE = ("send", "receive")
_SAME_SIZE = ("all_reduce", "broadcast")  # others may rightly carry other numbers of rows


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank began it."""

    collective: str
    axis: str
    payload_bytes: int
    line: str

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.collective} on {self.axis} ({self.payload_bytes} bytes){at}"


@dataclass(frozen=True, slots=True)
class Disorder:
    """Where ranks that belong together went different ways."""

    axis: str
    rank: int  # the one that left the order
    call: Call | None  # what it began instead; None: nothing more
    others: int  # a rank that kept to it
    expected: Call | None
    last_common: Call | None
    number: int  # collectives on that axis before it

    def describe(self) -> str:
        """A sentence."""
        did = f"began {self.call}" if self.call else f"began nothing more on {self.axis}"
        kept = f"began {self.expected}" if self.expected else "began nothing more"
        last = f"the last they had in common was {self.last_common}" if self.last_common else "they had none in common"
        return f"rank {self.rank} {did} where rank {self.others} {kept}; {last}"

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "axis": self.axis, "rank": self.rank, "other_rank": self.others, "number": self.number,
            "began": str(self.call) if self.call else None, "line": self.call.line if self.call else None,
            "expected": str(self.expected) if self.expected else None,
            "expected_line": self.expected.line if self.expected else None,
            "last_common": str(self.last_common) if self.last_common else None,
        }  # fmt: skip


def read_trace(path: Path) -> list[Call]:
    """A rank's collectives; a last line that was cut off is left out."""
    calls = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            calls.append(Call(*json.loads(line)))
        except ValueError:
            break
    return calls


def find_disorder(traces: dict[int, list[Call]], mesh: Mesh) -> Disorder | None:
    """The earliest place where ranks on one axis differ; None where they agree."""
    found = []
    for axis in [*AXES, "data", "step", "world"]:
        axes = {"data": ["replicate", "shard"], "step": list(AXES), "world": list(AXES)}.get(axis, [axis])
        for peers in sorted({mesh.peers_on(rank, axes) for rank in traces}):
            one = _first_difference(axis, {rank: _on(traces[rank], axis) for rank in peers if rank in traces})
            if one is not None:
                found.append(one)
    return min(found, key=lambda one: one.number) if found else None


def _on(calls: list[Call], axis: str) -> list[Call]:
    return [call for call in calls if call.axis == axis and call.collective not in _PAIRWISE]


def _first_difference(axis: str, calls: dict[int, list[Call]]) -> Disorder | None:
    ranks = sorted(calls)
    for number in range(max(len(own) for own in calls.values())):
        here = {rank: calls[rank][number] if number < len(calls[rank]) else None for rank in ranks}
        forms = {rank: _form(call) for rank, call in here.items()}
        if len(set(forms.values())) == 1:
            continue
        values = list(forms.values())
        usual = max(set(values), key=lambda form: (values.count(form), form is not None))
        odd = next(rank for rank in ranks if forms[rank] != usual)
        kept = next(rank for rank in ranks if forms[rank] == usual)
        if len(ranks) == 2:  # of two, the one whose next call is what the other begins now has left one out
            odd, kept = _who_left_out(calls, ranks, number)
        before = calls[kept][number - 1] if number else None
        return Disorder(axis, odd, here[odd], kept, here[kept], before, number)
    return None


def _who_left_out(calls: dict[int, list[Call]], ranks: list[int], number: int) -> tuple[int, int]:
    one, other = ranks
    rest = [_form(call) for call in calls[other][number + 1 :]]
    mine = _form(calls[one][number]) if number < len(calls[one]) else None
    if mine is None or (rest and rest[0] == mine):
        return one, other
    return other, one


def _form(call: Call | None) -> tuple[Any, ...] | None:
    if call is None:
        return None
    return (call.collective, call.payload_bytes if call.collective in _SAME_SIZE else 0)


@dataclass(slots=True)
class HangWatch:
    """Asked at every turn of the supervisor: have all ranks stopped working while they wait for each other?"""

    folder: Path
    ranks: int
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)  # CPU seconds, and since when
    standing: dict[int, dict[str, Any]] = field(default_factory=dict)
    has_hung: bool = False

    def describe(self) -> str:
        """Where each rank stands."""
        return "; ".join(
            f"rank {rank} at {heartbeat['at'] or heartbeat['line']}"
            for rank, heartbeat in sorted(self.standing.items())
        )

    def __call__(self) -> bool:
        """True once nobody has computed for a while and all wait in collectives; one that reads data does not hang."""
        now = time.monotonic()
        idle = []
        for rank in range(self.ranks):
            try:
                heartbeat = json.loads((self.folder / f"beat-{rank}.json").read_text())
            except (OSError, ValueError):
                return False
            self.standing[rank] = heartbeat
            cpu_s, _ = self.seen.get(rank, (-1.0, now))
            if heartbeat["cpu_s"] - cpu_s > _IDLE_CPU_S:
                self.seen[rank] = (heartbeat["cpu_s"], now)
            idle.append(now - self.seen[rank][1] >= IDLE_S)
        self.has_hung = self.has_hung or (all(idle) and all(heartbeat["waits"] for heartbeat in self.standing.values()))
        return self.has_hung
