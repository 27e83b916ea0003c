"""What a job writes down while it runs: one line of JSON per event in `events.jsonl`. Rank 0 writes."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Events:
    """Appends events to a run directory; without one, does nothing."""

    def __init__(self, run_dir: Path | None) -> None:
        # Line-buffered: whoever follows the file sees whole lines at once.
        self.file = (run_dir / "events.jsonl").open("a", buffering=1) if run_dir else None

    def write(self, event: dict[str, Any]) -> None:
        """Append one event, with the wall-clock time."""
        if self.file:
            self.file.write(json.dumps({**event, "at": round(time.time_ns() / 1e9, 3)}) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self.file:
            self.file.close()
            self.file = None


def peak_memory_bytes() -> int:
    """The largest resident set that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
