"""Read a table of published measurements, and compare its rows with predictions: of memory, and of what fits.

The table is a CSV file with the columns source, model, hardware, gpus, framework, strategy, precision, seq_len,
micro_batch, global_batch, act_ckpt, metric, value, unit and note. A row with a speed also says that the job ran; one
with memory is compared with the same number that its authors read.
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
from paceline.nouns.table import aligned

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
# Metrics of memory, and of speed: a row with a speed says that the job ran, so that it fitted.
MEMORY = ("peak_memory", "gpu_memory", "gpu_memory_total", "peak_reserved_memory", "activation_memory")
RAN = ("tokens_per_s_per_gpu", "throughput", "iter_time", "MFU")
UNITS = {"GB": 1e9, "GiB": 2.0**30}  # bytes
OFF = 0.12  # relative error: rows with a larger one are listed
COLUMNS = ("source", "model", "hardware", "gpus", "strategy", "precision", "seq_len", "micro_batch", "act_ckpt")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row of the table and its prediction.

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
    """Return the claim about memory that a row makes; None where it makes none."""
    metric = row["metric"]
    if not source_of(row):
        return None
    if metric in MEMORY:
        return "memory"
    if metric == "fits":
        return "out of memory" if row["value"] == "OOM" else "ran"
    if metric == "max_batch":
        return "largest batch" if float(row["value"]) else "out of memory"
    # A speed without a batch size says nothing: no step could be built from it.
    has_batch = bool(row["micro_batch"] or row["global_batch"])
    return "ran" if metric in RAN and has_batch else None


def source_of(row: Row) -> tuple[str, str] | None:
    """Return the file that builds a row's steps, and the number to compare; None for an unknown source."""
    for prefix, program in SOURCES.items():
        if row["source"].startswith(prefix):
            return program
    return None


def device_of(row: Row) -> Device:
    """Return the row's GPU; one of 80 GB where the row does not say."""
    match = re.search(r"(\d+) ?(?:GB|gb)\b", row["hardware"])
    if match:
        return Device.parse(f"{match[1]}GB")
    if "H200" in row["hardware"]:
        return Device.parse("141GB")
    return Device.parse("80GB")


def communicators_of(row: Row) -> int:
    """Return the number of communicators: 1 where there are several GPUs, else 0."""
    return int(row["gpus"] or 1) > 1


def read(path: Path) -> list[tuple[int, Row]]:
    """Return the rows of a table, each with the number of its line.

    Raises:
        UsageError: the file can't be read, or columns are missing.
    """
    what = f"the table of published measurements {path}"
    try:
        with path.open(newline="") as file:
            # Line 1 is the heading.
            rows = [(number, dict(row)) for number, row in enumerate(csv.DictReader(file), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(what, f"it can't be read: {error}", "name a CSV file with --published") from None
    needed = {*COLUMNS, "framework", "global_batch", "metric", "value", "unit", "note", "rev"}
    if not rows or not needed <= set(rows[0][1]):
        missing = sorted(needed - set(rows[0][1])) if rows else ["any row"]
        raise UsageError(what, f"it lacks {', '.join(missing)}", "see docs/published.md for the columns")
    return rows


def said_of(number: int, row: Row, prediction: tuple[float, bool] | str) -> PublishedRow:
    """Return a row with its prediction.

    Args:
        number: the row's line.
        row: its columns.
        prediction: the bytes and whether they are more than the GPU has, or why there is no prediction.
    """
    claim = claim_of(row) or ""
    columns = [row[name] for name in COLUMNS[1:]]  # the source has a field of its own
    short = ", ".join(column for column in columns if column)
    if isinstance(prediction, str):
        return PublishedRow(number, short, row["source"], claim, why_not=prediction)
    nbytes, is_too_large = prediction
    if claim == "memory":
        gpus = int(row["gpus"]) if row["metric"].endswith("_total") else 1
        published = float(row["value"]) * UNITS[row["unit"]] / gpus
        error = nbytes / published - 1
        return PublishedRow(number, short, row["source"], claim, nbytes, published, error)
    capacity = float(device_of(row).memory or 0)
    is_right = is_too_large == (claim == "out of memory")
    return PublishedRow(number, short, row["source"], claim, nbytes, capacity, is_right=is_right)


def ratios(rows: Sequence[PublishedRow]) -> dict[str, float | None]:
    """Return the share of rows that are right of those about fitting, and the relative errors of memory."""
    fits = [row.is_right for row in rows if row.is_right is not None]
    errors = sorted(abs(row.error) for row in rows if row.error is not None)
    num_memory_rows = sum(row.claim == "memory" for row in rows)
    result: dict[str, float | None] = {
        "published_fit_accuracy": None,
        "published_memory_error_median": None,
        "published_memory_error_p90": None,
        "published_memory_predicted": None,
    }
    if fits:
        result["published_fit_accuracy"] = sum(fits) / len(fits)
    if errors:
        result["published_memory_error_median"] = statistics.median(errors)
        result["published_memory_error_p90"] = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
    if num_memory_rows:
        result["published_memory_predicted"] = len(errors) / num_memory_rows
    return result


def by_source(rows: Sequence[PublishedRow]) -> list[dict[str, Any]]:
    """Return the numbers of each source: its rows, those that are right, and the errors of memory."""
    groups: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        groups[row.source].append(row)
    return [_summary_of_source(source, group) for source, group in groups.items()]


def _summary_of_source(source: str, rows: Sequence[PublishedRow]) -> dict[str, Any]:
    errors = [abs(row.error) for row in rows if row.error is not None]
    fits = [row for row in rows if row.is_right is not None]
    oom = [row for row in fits if row.claim == "out of memory"]
    return {
        "source": source,
        "rows": len(rows),
        "memory_rows": len(errors),
        "fit_rows": len(fits),
        "memory_error_median": statistics.median(errors) if errors else None,
        "memory_error_max": max(errors, default=None),
        "fit_right": sum(bool(row.is_right) for row in fits),
        "oom_rows": len(oom),
        "oom_right": sum(bool(row.is_right) for row in oom),
        "not_predicted": sum(row.why_not is not None for row in rows),
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as aligned lines: by source, then each row that is off and each that was not predicted."""
    lines = _lines_of_sources(result["sources"])
    lines += ["", f"off by more than {100 * OFF:.0f} %, or wrong:"]
    for row in result["rows"]:
        name = f"line {row['number']}: {row['source']}, {row['row']}"
        if row["is_right"] is False:  # None: the row is not about fitting
            sizes = f"{row['predicted'] / 2**30:.1f} of {row['published'] / 2**30:.1f} GiB"
            lines.append(f"{name}: {row['claim']}, predicted {sizes}")
        elif row["error"] is not None and abs(row["error"]) > OFF:
            sizes = f"published {row['published'] / 1e9:.1f}, predicted {row['predicted'] / 1e9:.1f} GB"
            lines.append(f"{name}: {sizes} ({100 * row['error']:+.0f} %)")
    # Rows that lack a prediction for the same reason are one line.
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in result["rows"]:
        if row["why_not"] is not None:
            reasons[row["source"], row["why_not"]].append(row["number"])
    lines += ["", "not predicted:"]
    for (source, reason), numbers in reasons.items():
        lines.append(f"{source}: {reason} (lines {', '.join(map(str, numbers))})")
    return lines


def _lines_of_sources(sources: Sequence[dict[str, Any]]) -> list[str]:
    titles = ("rows", "memory", "median", "worst", "fits", "right", "OOM", "right", "not predicted")
    rows: list[tuple[Any, ...]] = [("published elsewhere", *titles)]
    for source in sources:
        cells = (
            source["source"],
            source["rows"],
            source["memory_rows"],
            _percent(source["memory_error_median"]),
            _percent(source["memory_error_max"]),
            source["fit_rows"],
            source["fit_right"],
            source["oom_rows"],
            source["oom_right"],
            source["not_predicted"],
        )
        rows.append(cells)
    return aligned(rows, "{:<34}" + "{:>9}" * 8 + "{:>15}")


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.1f}%"
