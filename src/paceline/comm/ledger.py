"""Count what a rank hands to collectives, so that it can be compared with what the plan predicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Ledger:
    """Counts of calls and payload bytes by (collective, axis), e.g. ("all_reduce", "replicate").

    Payload is what this rank hands to the collective, whatever the transport makes of it on the wire.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    total_bytes: int = field(init=False)  # payload bytes of all calls

    def __post_init__(self) -> None:
        self.total_bytes = self.payload_bytes.total()

    def add(self, collective: str, axis: str, payload_bytes: int) -> None:
        """Enter one call."""
        self.calls[collective, axis] += 1
        self.payload_bytes[collective, axis] += payload_bytes
        self.total_bytes += payload_bytes

    def copy(self) -> Ledger:
        """Return the counts as they are now."""
        return Ledger(Counter(self.calls), Counter(self.payload_bytes))

    def rows_since(self, before: Ledger) -> list[dict[str, Any]]:
        """Return the rows of what was entered since the ledger was as `before`."""
        return Ledger(self.calls - before.calls, self.payload_bytes - before.payload_bytes).rows()

    def rows(self) -> list[dict[str, Any]]:
        """Return the ledger as rows of collective, axis, calls and bytes, sorted."""
        rows: list[dict[str, Any]] = []
        for (collective, axis), calls in sorted(self.calls.items()):
            payload_bytes = self.payload_bytes[collective, axis]
            rows.append({"collective": collective, "axis": axis, "calls": calls, "bytes": payload_bytes})
        return rows
