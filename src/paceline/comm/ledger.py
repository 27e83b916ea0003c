"""Counts what a rank gave to collectives, so that the plan's promise can be held against it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """Calls and payload bytes by (collective, axis), e.g. ("all_reduce", "replicate").

    Payload is what this rank hands to the collective, whatever the transport makes of it on the wire.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, collective: str, axis: str, payload_bytes: int) -> None:
        """Enter one call."""
        self.calls[collective, axis] += 1
        self.payload_bytes[collective, axis] += payload_bytes

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all calls."""
        return self.payload_bytes.total()

    def rows(self) -> list[dict[str, int | str]]:
        """The ledger as rows of collective, axis, calls and bytes, sorted."""
        return [
            {"collective": key[0], "axis": key[1], "calls": calls, "bytes": self.payload_bytes[key]}
            for key, calls in sorted(self.calls.items())
        ]
