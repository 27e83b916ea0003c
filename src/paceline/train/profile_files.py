"""The steps of a job that torch's profiler records, and the files that it leaves in the run directory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_steps, regular

VARIABLE = "PACELINE_PROFILE"  # FIRST:LAST
FOLDER = "profiles"
MOST_STEPS = 100
_MOST_BYTES = 2**30  # of a file, unpacked


def path_of(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return run_dir / FOLDER / f"{rank}.json.gz"


def wanted_steps(text: str, name: str) -> tuple[int, int]:
    """Read the steps to profile.

    Args:
        text: the steps as FIRST:LAST.
        name: the name of the flag or variable, for the error.

    Raises:
        UsageError: it is no range of steps, or of more than MOST_STEPS.
    """
    first, last = parse_steps(text, name)
    if last - first >= MOST_STEPS:
        raise UsageError(
            f"{name} {text}", f"these are {last - first + 1} steps, each with thousands of operations",
            f"take {MOST_STEPS} or fewer, such as {first}:{first + 5}",
        )  # fmt: skip
    return first, last


def read_profile(run_dir: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank's profile, in Chrome's format, with `ts` in microseconds since 1970.

    Args:
        run_dir: the run directory of the job.
        rank: the rank whose profile it is; nothing where it has no profile, or a damaged one.
    """
    try:
        with open(path_of(run_dir, rank), "rb", opener=regular) as packed, gzip.open(packed) as file:
            content = json.loads(file.read(_MOST_BYTES))
        base_us = content.get("baseTimeNanoseconds", 0) / 1000
        events = content["traceEvents"]
        for event in events:
            if isinstance(event, dict) and isinstance(event.get("ts"), int | float):
                yield {**event, "ts": base_us + event["ts"]}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, RecursionError):
        return
