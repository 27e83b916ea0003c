"""A table of published measurements, row by row against what is predicted: memory, and what fits.

The table is a CSV file with the columns source, model, hardware, gpus, framework, strategy, precision, seq_len,
micro_batch, global_batch, act_ckpt, metric, value, unit and note. A row that tells a speed also tells that the job
ran; one that tells memory is held against the same number that its authors read.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.device import Device
from paceline.nouns.errors import UsageError

Row = dict[str, str]
# By the beginning of the source: the file that builds its steps, and the number that its authors read.
SOURCES = {
    "torchtitan": ("torchtitan", "reserved"),
    "litgpt": ("litgpt", "allocated"),
    "QwenLM": ("qwen", "process"),
    "InternEvo": ("intern_evo", "process"),
    "Korthikanti": ("megatron", "activations"),
    "vTrain ground truth": ("megatron", "process"),
    "MosaicML": ("llm_foundry", "process"),
    "NVIDIA": ("bert", "process"),
    "DeepSpeed": ("bert", "process"),
    "google-research/bert": ("bert", "process"),
}
MEMORY = ("peak_memory", "gpu_memory", "gpu_memory_total", "peak_reserved_memory", "activation_memory")
RAN = ("tokens_per_s_per_gpu", "throughput", "iter_time", "MFU")
UNITS = {"GB": 1e9, "GiB": 2.0**30}
OFF = 0.12  # from here on a row is listed
COLUMNS = ("source", "model", "hardware", "gpus", "strategy", "precision", "seq_len", "micro_batch", "act_ckpt")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """What was predicted of a row.

    Attributes:
        number: the row's line in the file.
        row: its columns, shortened.
        claim: "memory", "ran", "out of memory" or "largest batch".
        predicted, published: bytes; where a claim is of fitting, the bytes that are there.
        error: relative, of memory.
        is_right: of fitting.
        why_not: why there is no prediction.
    """

    number: int
    row: str
    source: str
    claim: str
    predicted: float | None = None
    published: float | None = None
    error: float | None = None
    is_right: bool | None = None
    why_not: str | None = None


def claim_of(row: Row) -> str | None:
    """What a row tells of memory: None where nothing."""
    if not source_of(row) or (row["metric"] in RAN and not row["micro_batch"] and not row["global_batch"]):
        return None
    if row["metric"] in MEMORY:
        return "memory"
    if row["metric"] == "fits":
        return "out of memory" if row["value"] == "OOM" else "ran"
    if row["metric"] == "max_batch":
        return "largest batch" if float(row["value"]) else "out of memory"
    return "ran" if row["metric"] in RAN else None


def source_of(row: Row) -> tuple[str, str] | None:
    """The file that builds a row's steps, and the number to compare."""
    return next((what for name, what in SOURCES.items() if row["source"].startswith(name)), None)


def device_of(row: Row) -> Device:
    """The row's GPU; of 80 GB where it does not say."""
    found = re.search(r"(\d+) ?(?:GB|gb)\b", row["hardware"])
    if found is None and "H200" in row["hardware"]:
        return Device.parse("141GB")
    return Device.parse(f"{found[1] if found else 80}GB")


def communicators_of(row: Row) -> int:
    """One, where there are several GPUs."""
    return int(row["gpus"] or 1) > 1


def read(path: Path) -> list[tuple[int, Row]]:
    """The rows of a table and their lines.

    Raises:
        UsageError: the file can't be read, or columns are missing.
    """
    what = f"the table of published measurements {path}"
    try:
        with path.open(newline="") as file:
            rows = [(number, dict(row)) for number, row in enumerate(csv.DictReader(file), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(what, f"it can't be read: {error}", "name a CSV file with --published") from None
    needed = {*COLUMNS, "framework", "global_batch", "metric", "value", "unit", "note", "rev"}
    if not rows or not needed <= set(rows[0][1]):
        missing = sorted(needed - set(rows[0][1])) if rows else ["any row"]
        raise UsageError(what, f"it lacks {', '.join(missing)}", "see docs/published.md for the columns")
    return rows


def said_of(number: int, row: Row, prediction: tuple[float, bool] | str) -> PublishedRow:
    """What a prediction says of a row: bytes and whether that is too much, or why there is none."""
    claim = claim_of(row) or ""
    short = ", ".join(value for value in (row[one] for one in COLUMNS[1:]) if value)
    if isinstance(prediction, str):
        return PublishedRow(number, short, row["source"], claim, why_not=prediction)
    nbytes, is_too_large = prediction
    if claim == "memory":
        gpus = int(row["gpus"]) if row["metric"].endswith("_total") else 1
        published = float(row["value"]) * UNITS[row["unit"]] / gpus
        return PublishedRow(number, short, row["source"], claim, nbytes, published, nbytes / published - 1)
    there = float(device_of(row).memory or 0)
    is_right = is_too_large == (claim == "out of memory")
    return PublishedRow(number, short, row["source"], claim, nbytes, there, None, is_right)


def ratios(said: Sequence[PublishedRow]) -> dict[str, float | None]:
    """The shares of rows that are right, and the errors of memory."""
    fits = [one.is_right for one in said if one.is_right is not None]
    errors = sorted(abs(one.error) for one in said if one.error is not None)
    told = [one for one in said if one.claim == "memory"]
    return {
        "published_fit_accuracy": sum(fits) / len(fits) if fits else None,
        "published_memory_error_median": statistics.median(errors) if errors else None,
        "published_memory_error_p90": errors[min(int(0.9 * len(errors)), len(errors) - 1)] if errors else None,
        "published_memory_predicted": len(errors) / len(told) if told else None,
    }


def by_source(said: Sequence[PublishedRow]) -> list[dict[str, Any]]:
    """A line for each source."""
    groups: dict[str, list[PublishedRow]] = defaultdict(list)
    for one in said:
        groups[one.source].append(one)
    lines = []
    for source, rows in groups.items():
        errors = [abs(one.error) for one in rows if one.error is not None]
        fits = [one for one in rows if one.is_right is not None]
        oom = [one for one in fits if one.claim == "out of memory"]
        lines.append(
            {"source": source, "rows": len(rows), "memory_rows": len(errors), "fit_rows": len(fits)}
            | {"memory_error_median": statistics.median(errors) if errors else None}
            | {"memory_error_max": max(errors) if errors else None}
            | {"fit_right": sum(bool(one.is_right) for one in fits)}
            | {"oom_rows": len(oom), "oom_right": sum(bool(one.is_right) for one in oom)}
            | {"not_predicted": sum(one.why_not is not None for one in rows)}
        )
    return lines


def table(result: dict[str, Any]) -> list[str]:
    """The result as aligned lines: by source, then each row that is off and each that was not predicted."""
    heads = ("rows", "memory", "median", "worst", "fits", "right", "OOM", "right", "not predicted")
    lines = ["published elsewhere" + " " * 15 + "".join(f"{head:>9}" for head in heads[:-1]) + f"{heads[-1]:>15}"]
    for one in result["sources"]:
        errors = [one["memory_error_median"], one["memory_error_max"]]
        shown = ["-" if error is None else f"{100 * error:.1f}%" for error in errors]
        cells = [one["rows"], one["memory_rows"], *shown, one["fit_rows"], one["fit_right"]]
        cells += [one["oom_rows"], one["oom_right"]]
        lines.append(f"{one['source']:<34}" + "".join(f"{cell:>9}" for cell in cells) + f"{one['not_predicted']:>15}")
    lines += ["", f"off by more than {100 * OFF:.0f} %, or wrong:"]
    for one in result["rows"]:
        if one["is_right"] is False:
            there = f"{one['predicted'] / 2**30:.1f} of {one['published'] / 2**30:.1f} GiB"
            lines.append(f"line {one['number']}: {one['source']}, {one['row']}: {one['claim']}, predicted {there}")
        elif one["error"] is not None and abs(one["error"]) > OFF:
            both = f"published {one['published'] / 1e9:.1f}, predicted {one['predicted'] / 1e9:.1f} GB"
            lines.append(f"line {one['number']}: {one['source']}, {one['row']}: {both} ({100 * one['error']:+.0f} %)")
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in result["rows"]:
        if one["why_not"] is not None:
            reasons[one["source"], one["why_not"]].append(one["number"])
    lines += ["", "not predicted:"]
    lines += [f"{source}: {why} (lines {', '.join(map(str, numbers))})" for (source, why), numbers in reasons.items()]
    return lines
