"""Render a row of a step's traffic for people."""

from __future__ import annotations

from typing import Any


def traffic_line(row: dict[str, Any]) -> str:
    """Return a row of the traffic as text."""
    calls = "1 call" if row["calls"] == 1 else f"{row['calls']} calls"
    mib = row["payload_bytes"] / 2**20
    return f"{row['collective']:<15}{row['axis']:<11}{calls:>10}{mib:>12.3f} MiB a step"
