"""The numbers of an event, by the names that all sinks give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PREFIX = "logged_"  # as train/log.py writes names that are other fields' or begin so
# Fields of the event `step` that become curves.
STEP_FIELDS = ("loss", "gradient_norm", "seconds", "sent_bytes", "memory_bytes")


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event: `train/...` of a step, `evaluation/...`, and what was logged as it is called."""
    kind = event["event"]
    if kind == "step":
        found = {f"train/{name}": event[name] for name in STEP_FIELDS}
        if event["seconds"] and event["samples"]:
            found["train/samples_per_s"] = event["samples"] / event["seconds"]
        for kind, seconds in event.get("times", {}).items():
            found[f"train/times/{kind.replace(' ', '/')}"] = seconds
    elif kind == "evaluation":
        found = {f"evaluation/{name}": event[name] for name in event.keys() - {"event", "step", "at"}}
    elif kind == "logged":
        names = event.keys() - {"event", "step", "epoch", "at"}
        found = {name.removeprefix(PREFIX): event[name] for name in names}
    else:
        return {}
    return {name: value for name, value in found.items() if type(value) in (int, float)}


def path_of(name: str) -> str:
    """Return a name as a path that stays in its folder: without empty parts, `.` and `..`."""
    return "/".join(part for part in name.split("/") if part.strip() not in ("", ".", "..")) or "_"


def name_of(run_dir: Path | None) -> str:
    """Return the run's name."""
    return "paceline" if run_dir is None else run_dir.resolve().name


def picture_of(event: Mapping[str, Any], run_dir: Path | None) -> Path:
    """Return where the file of an event `picture` is."""
    return Path(event["path"]) if run_dir is None else run_dir / event["path"]


def address_of(url: str) -> str:
    """Return a URL for notices: without its user, password and query; a server's without its path."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host or parts.path}" if parts.scheme else parts.path
