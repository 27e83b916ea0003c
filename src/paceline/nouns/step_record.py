"""The record of one step, a line of `events.jsonl`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.nouns.shard_spec import chunk_range


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step as rank 0 saw it. Every rank has the same loss, samples and norm.

    Attributes:
        step: the number of the step from 1: the number of updates after this one.
        position: the samples taken from the global order so far.
        loss: the mean over the global batch.
        weight: the divisor of the mean.
        samples: the samples of the global batch; 0 for a batch that the loop made.
        seconds: the time of the step on this rank.
        sent_bytes: the payload that this rank gave to collectives during the step.
        gradient_norm: the norm of the whole gradient, before clipping; None where nothing is clipped.
        memory_bytes: the peak resident set of this rank so far.
        is_skipped: True under fp16 where gradients have overflown on some rank, so that no parameter was changed.
        loss_scale: the factor of the loss in the next step, under fp16; None otherwise.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> record = job.last
        >>> print(f"{record.step} steps, {record.samples / record.seconds:.0f} samples/s")
        8 steps, ... samples/s
    """

    step: int
    position: int
    loss: float
    weight: float
    samples: int
    seconds: float
    sent_bytes: int
    gradient_norm: float | None
    memory_bytes: int
    is_skipped: bool = False
    loss_scale: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as an event: its fields plus `event: step`.

        Returns:
            The content of a line of `runs/JOB/events.jsonl`, but for the time at which it was written.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> mean = job.step(next(job.batches()))
            >>> event = job.last.to_json()
            >>> event["event"], event["step"], event["loss"] == mean
            ('step', 1, True)
        """
        event = {"event": "step", **asdict(self)}
        if self.loss_scale is None:
            del event["is_skipped"], event["loss_scale"]
        return event


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The distribution of the rows of a layer of experts, over all ranks, since the record before.

    Attributes:
        layer: the path of the layer's module.
        shares: the share of the rows of each expert; they add up to 1.
        ranks: the share of the rows of each rank of the axis `expert`.
    """

    layer: str
    shares: tuple[float, ...]
    ranks: tuple[float, ...]

    @classmethod
    def of(cls, layer: str, rows: Sequence[int], ranks: int) -> ExpertLoad | None:
        """Return the record of a layer; None where it had no rows.

        Args:
            layer: the path of the layer's module.
            rows: the number of rows of each expert.
            ranks: the number of ranks of the axis, which have the experts in their order.
        """
        total = sum(rows)
        if not total:
            return None
        by_rank = [sum(rows[slice(*chunk_range(len(rows), rank, ranks))]) / total for rank in range(ranks)]
        return cls(layer, tuple(count / total for count in rows), tuple(by_rank))

    def to_json(self, step: int) -> dict[str, Any]:
        """Return the record as an event."""
        return {
            "event": "experts",
            "step": step,
            "layer": self.layer,
            "shares": [round(share, 6) for share in self.shares],
            "ranks": [round(share, 6) for share in self.ranks],
        }


def elapsed_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds between the first and the last of some step records.

    They are those that the steps' times add up to, by a clock that only goes forward: the wall clock, which `at` has,
    may be set while the job runs. It stands in where a record has no times.
    """
    seconds = 0.0
    for before, record in itertools.pairwise(records):
        times = record.get("times")
        if isinstance(times, dict) and times and all(type(seconds_of) in (int, float) for seconds_of in times.values()):
            seconds += sum(times.values())
        else:
            seconds += max(0.0, record["at"] - before["at"])
    return seconds if math.isfinite(seconds) else 0.0


def samples_per_s(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the samples per second between the first and the last of some step records; None before the second."""
    seconds = elapsed_s(records)
    if seconds <= 0:
        return None
    samples = sum(record["samples"] for record in records[1:])  # the first record's were done before its time
    return float(samples / seconds)
