"""Format the status of a job's servers for people: tables, and the workers that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.nouns.reading import parse_whole
from paceline.nouns.table import aligned

MIB = 2**20
_BAR = 40  # characters of the longest bar
_WORKER_TITLES = (
    *("worker", "steps done", "lag", "state", "silent s"),
    *("network s", "others s", "sent MiB", "received MiB"),
)
_RANGE_TITLES = ("range", "servers", "epoch", "whole", "updates", "on the way", "duplicates", "waits for")


def table(status: Mapping[str, Any]) -> str:
    """Return a job's status, as `status.look` asked for it, as aligned tables."""
    job = status["job"]
    details = {
        "quorum": f" of {job['quorum']}",
        "deadline": f" of {job['deadline']:g} s",
        "stale": f" by {job['staleness']}",
    }
    mode = job["mode"] + details.get(job["mode"], "")
    counts = f"{job['workers']} workers, {job['servers']} servers, {job['replicas']} replicas"
    headline = f"{counts}, {mode}: {status['state']}"
    if status["state"] == "gathering":
        return f"{headline}\nhere: {', '.join(status['here']) or 'nobody'}"
    workers = _with_titles(_WORKER_TITLES, _worker_rows(status["workers"]))
    ranges = _with_titles(_RANGE_TITLES, _range_rows(status))
    return "\n".join([headline, "", *workers, "", *ranges, "", *_staleness_bars(status)]).rstrip()


def _worker_rows(workers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    furthest = max((worker["clock"] for worker in workers), default=0)
    rows: list[list[str]] = []
    for worker in workers:
        name = str(worker["worker"])
        if worker["incarnation"]:
            name = f"{name}.{worker['incarnation']}"
        rows.append(
            [
                name,
                str(worker["clock"]),
                str(furthest - worker["clock"]),
                _state_of(worker),
                f"{worker['silent_s']:.1f}",
                f"{worker.get('waited_for_network_s', 0):.1f}",
                f"{worker.get('waited_for_others_s', 0):.1f}",
                f"{worker.get('bytes_sent', 0) / MIB:.1f}",
                f"{worker.get('bytes_received', 0) / MIB:.1f}",
            ]
        )
    return rows


def _state_of(worker: Mapping[str, object]) -> str:
    if worker["is_done"]:
        return "done"
    return "in" if worker["is_in"] else "out"


def _rows_of_servers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of all servers about their ranges."""
    rows: list[Mapping[str, Any]] = []
    for node in status["nodes"]:
        rows += node["ranges"]
    return rows


def _range_rows(status: Mapping[str, Any]) -> list[list[str]]:
    heads = {row["range"]: row for row in _rows_of_servers(status) if row["role"] == "head"}
    rows: list[list[str]] = []
    for chain in status["chains"]:
        head = heads.get(chain["range"], {})  # empty where the head did not answer
        rows.append(
            [
                str(chain["range"]),
                " > ".join(map(str, chain["chain"])),
                str(chain["epoch"]),
                "yes" if chain["is_whole"] else "no",
                str(head.get("updates", "?")),
                str(head.get("behind", "?")),
                str(head.get("duplicates", "?")),
                ", ".join(map(str, head.get("waits_for", []))) or "-",
            ]
        )
    return rows


def _staleness_bars(status: Mapping[str, object]) -> list[str]:
    """Return a bar chart of staleness: pushes by the number of updates since their pull; [] without any."""
    counts: dict[int, int] = {}
    for row in _rows_of_servers(status):
        for text, number in row.get("staleness", {}).items():
            behind = parse_whole(text)
            if behind is not None:
                counts[behind] = counts.get(behind, 0) + number
    if not counts:
        return []
    most = max(counts.values())
    lines = ["updates between a worker's pull and its push:"]
    for behind in sorted(counts):
        bar = "#" * max(1, round(_BAR * counts[behind] / most))
        lines.append(f"{behind:>4} {bar} {counts[behind]}")
    return lines


def why_waiting(status: Mapping[str, Any]) -> str:
    """Return, as text, the workers that the others wait for, with their steps and silence."""
    if status["state"] == "gathering":
        job = status["job"]
        needed = f"{job['servers']} servers and {job['workers']} workers must come"
        return f"The job has not begun: {needed}; here: {', '.join(status['here']) or 'nobody'}"
    active = [worker for worker in status["workers"] if worker["is_in"] and not worker["is_done"]]
    missing = _missing(status, active)
    waiting = [worker for worker in active if worker.get("is_waiting") and worker["worker"] not in missing]
    lines: list[str] = []
    for chain in status["chains"]:
        if not chain["is_whole"]:
            lines.append(f"range {chain['range']} is not whole: a server joins, or must be started")
    if not waiting or not missing:
        return "\n".join([*lines, "Nobody waits."])
    names = ", ".join(str(worker["worker"]) for worker in waiting)
    for worker in active:
        if worker["worker"] in missing:
            progress = f"at step {worker['clock'] + 1}, last heard {worker['silent_s']:.1f} s ago"
            lines.append(f"worker {worker['worker']} is waited for by {names}: {progress}")
    return "\n".join(lines)


def _missing(status: Mapping[str, Any], active: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the workers for whom others wait."""
    if status["job"]["mode"] == "stale" and active:
        clocks = [worker["clock"] for worker in active]
        slowest = min(clocks)
        is_at_bound = max(clocks) - slowest >= status["job"]["staleness"] + 1
        return {worker["worker"] for worker in active if worker["clock"] == slowest} if is_at_bound else set()
    missing: set[int] = set()
    for row in _rows_of_servers(status):
        missing.update(row["waits_for"])
    return missing


def _with_titles(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return aligned([titles, *rows], "  ".join(["{:>}"] * len(titles)))
