"""Keep the prediction of a run's step, `predicted/RANK.json` in the run directory, beside the measured one.

`paceline profile --job JOB` makes it, after the job has begun: a job itself spends no time on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.nouns.device import peak_flops
from paceline.nouns.errors import UsageError
from paceline.nouns.profile import BUFFERS, COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS, Profile
from paceline.nouns.reading import COUNT, Whole, read_by_rank, write_whole
from paceline.plan.memory import memory_of
from paceline.run.read.times import RankSplit
from paceline.train.memory_file import RankMemory

FOLDER = "predicted"
VERSION = 1
_AMOUNT = Whole(0, 10**30)  # floating-point operations of a step; more than 64 bits
_FORM = {
    "version": COUNT, "rank": COUNT, "plan": str, "device": str, "precision": str, "flops": _AMOUNT, "peak": COUNT,
    "phase": str, "between": {str: COUNT}, "at_peak": {str: COUNT},
    "traffic": [{"collective": str, "axis": str, "calls": COUNT, "bytes": COUNT}],
    "layout": [{"name": str, "shape": [COUNT], "placement": str, "why": str}],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of one rank's step, by its profile.

    Attributes:
        rank: the number of the rank.
        plan: the line of the plan, see `Plan.line`.
        device: "cpu" or "cuda".
        precision: the precision of the workload.
        flops: the floating-point operations of a step.
        peak: the largest sum of the bytes of live tensors.
        phase: the phase of the step in which the peak is.
        between: the bytes that live when a step begins, by kind.
        at_peak: the bytes at the peak, by kind.
        traffic: the collectives of a step: collective, axis, calls, bytes.
        layout: the split of each weight under `tensor`: name, shape, placement, why; else empty.
    """

    rank: int
    plan: str
    device: str
    precision: str
    flops: int
    peak: int
    phase: str
    between: Mapping[str, int]
    at_peak: Mapping[str, int]
    traffic: Sequence[Mapping[str, Any]]
    layout: Sequence[Mapping[str, Any]] = ()

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Return bytes between two steps by the kinds that a rank counts in its memory."""
        resident_bytes = {kind: self.between.get(kind, 0) for kind in (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER)}
        resident_bytes[GRADIENTS] += self.between.get(COMMUNICATION, 0)  # there gradients are parts of their buckets
        return resident_bytes


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed at which a rank computes.

    Attributes:
        rank: the number of the rank.
        flops_per_s: the operations of a step, by the prediction, over the median time of its newest steps.
        peak: the operations per second that its GPU can do in the workload's precision; None where nobody knows.
        device: the name of the device.
    """

    rank: int
    flops_per_s: float
    peak: float | None
    device: str

    @property
    def mfu(self) -> float | None:
        """Return the share of the peak (model FLOPs utilization; PaLM, arXiv 2204.02311, appendix B)."""
        return None if self.peak is None else self.flops_per_s / self.peak

    @property
    def text(self) -> str:
        """Return the rate in words."""
        mfu = (
            "" if self.mfu is None or self.peak is None else f", {self.mfu:.1%} of the {self.peak / 1e12:,.0f} TFLOP/s"
        )
        return f"{_flops_per_s(self.flops_per_s)}{mfu}{f' of {self.device}' if mfu else ''}"


def predict(profile: Profile, layout: Sequence[Mapping[str, Any]] = ()) -> Prediction:
    """Return the prediction of a profile, with the layout of the split model."""
    memory = memory_of(profile)
    rows = []
    for row in profile.traffic:
        rows.append({name: row[name] for name in ("collective", "axis", "calls", "bytes")})
    return Prediction(
        profile.rank, profile.plan, profile.device, profile.precision, profile.flops,
        memory.peak, memory.phase, memory.between, memory.at_peak, rows, layout,
    )  # fmt: skip


def write_prediction(folder: Path, prediction: Prediction) -> Path:
    """Write a prediction into a run directory, and return the file.

    Raises:
        UsageError: it can't be written.
    """
    path = folder / FOLDER / f"{prediction.rank}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps({"version": VERSION, **asdict(prediction)}) + "\n")
    except OSError as error:
        asked, fix = f"the prediction in {path}", "make room there, or see who may write to the run directory"
        raise UsageError(asked, f"it can't be written ({error})", fix) from None
    return path


def read_predictions(folder: Path, plan: str) -> list[Prediction]:
    """Return the predictions in a run directory, by rank; those of another plan, or that can't be read, are left out.

    Args:
        folder: the run directory.
        plan: the line of the run's plan; a run may have gone on under another.
    """
    found = []
    for value in read_by_rank(folder / FOLDER, _FORM).values():
        if value["version"] == VERSION and value["plan"] == plan:
            found.append(Prediction(**{column.name: value[column.name] for column in fields(Prediction)}))
    return found


def rates(predictions: Sequence[Prediction], splits: Sequence[RankSplit], memories: Sequence[RankMemory]) -> list[Rate]:
    """Return the speed of each rank that has both a prediction and times.

    Args:
        predictions: the predictions of the run.
        splits: the times of its newest steps, split by kind of work.
        memories: the memory of its ranks, with the names of their devices.
    """
    names = {memory.rank: memory.name for memory in memories}
    found = []
    for split in splits:
        prediction = next((candidate for candidate in predictions if candidate.rank == split.rank), None)
        if prediction is not None and split.median_s > 0 and prediction.flops:
            name = names.get(split.rank, "")
            peak = peak_flops(name, prediction.precision)
            found.append(Rate(split.rank, prediction.flops / split.median_s, peak, name))
    return found


def _flops_per_s(value: float) -> str:
    for unit, size in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1e3:.1f} kFLOP/s"
