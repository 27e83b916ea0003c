"""How fast a job is over its newest steps, from the end of its events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.events import decoded
from paceline.nouns.record import elapsed_s
from paceline.run.summary import Run, ends_of
from paceline.run.supervise.progress import speed

_WINDOW = 50  # steps


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a job.

    Attributes:
        samples_per_s: over its newest steps; None before the second, and where the loop makes its own batches.
        left_s: seconds until its last step, at that speed; None where nobody knows.
    """

    samples_per_s: float | None
    left_s: float | None


def speed_of(folder: Path, run: Run) -> Speed:
    """Return the speed of the job in a run directory."""
    records: list[dict[str, Any]] = []
    for content in ends_of(folder / "events.jsonl"):
        events = list(decoded(content))
        # Of this process: between two there is time without a step, and steps are taken again.
        begins = [number for number, event in enumerate(events) if event["event"] in ("start", "resumed")]
        records = [event for event in events[begins[-1] if begins else 0 :] if event["event"] == "step"][-_WINDOW:]
        if begins or len(records) > 1:
            break
    seconds = elapsed_s(records)
    if seconds <= 0:
        return Speed(None, None)
    a_step_s = seconds / (len(records) - 1)
    left_s = a_step_s * (run.total_steps - run.step) if run.total_steps >= run.step else None
    return Speed(speed(records), left_s)
