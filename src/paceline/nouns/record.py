"""The record of one step, a line of `events.jsonl`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step as rank 0 saw it. Every rank has the same loss, samples and norm."""

    step: int  # counted from 1: the number of updates after this one
    position: int  # samples taken from the global order so far
    loss: float  # mean over the global batch
    weight: float  # what the mean was divided by
    samples: int  # samples of the global batch
    seconds: float
    sent_bytes: int  # payload this rank gave to collectives during the step
    gradient_norm: float | None  # before clipping; None where nothing is clipped
    memory_bytes: int  # peak resident set of this rank so far

    def to_json(self) -> dict[str, Any]:
        """Return the record as an event: its fields plus `event: step`."""
        return {"event": "step", **asdict(self)}
