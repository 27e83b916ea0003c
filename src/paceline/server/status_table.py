"""A job's servers as people read them: a table, and who everybody waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.nouns.reading import parse_whole

MIB = 2**20


def table(facts: Mapping[str, Any]) -> str:
    """What `watch.look` found, as aligned tables."""
    job = facts["job"]
    details = {
        "quorum": f" of {job['quorum']}",
        "deadline": f" of {job['deadline']:g} s",
        "stale": f" by {job['staleness']}",
    }
    mode = job["mode"] + details.get(job["mode"], "")
    head = f"{job['workers']} workers, {job['servers']} servers, {job['replicas']} replicas, {mode}: {facts['state']}"
    if facts["state"] == "gathering":
        return f"{head}\nhere: {', '.join(facts['here']) or 'nobody'}"
    furthest = max((worker["clock"] for worker in facts["workers"]), default=0)
    workers = [
        [
            f"{one['worker']}.{one['incarnation']}" if one["incarnation"] else str(one["worker"]),
            str(one["clock"]),
            str(furthest - one["clock"]),
            "done" if one["is_done"] else "in" if one["is_in"] else "out",
            f"{one['silent_s']:.1f}",
            f"{one.get('waited_for_network_s', 0):.1f}",
            f"{one.get('waited_for_others_s', 0):.1f}",
            f"{one.get('bytes_sent', 0) / MIB:.1f}",
            f"{one.get('bytes_received', 0) / MIB:.1f}",
        ]
        for one in facts["workers"]
    ]
    titles = ["worker", "steps done", "lag", "state", "silent s", "network s", "others s", "sent MiB", "received MiB"]
    return "\n".join(
        [head, "", *_aligned(titles, workers), "", *_aligned(*_ranges(facts)), "", *_notes(facts)]
    ).rstrip()


def _ranges(facts: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = {row["range"]: row for node in facts["nodes"] for row in node["ranges"] if row["role"] == "head"}
    rows = []
    for chain in facts["chains"]:
        head = heads.get(chain["range"], {})
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
    return ["range", "servers", "epoch", "whole", "updates", "on the way", "duplicates", "waits for"], rows


def _notes(facts: Mapping[str, Any]) -> list[str]:
    counts: dict[int, int] = {}
    for node in facts["nodes"]:
        for row in node["ranges"]:
            for text, number in row.get("staleness", {}).items():
                if (behind := parse_whole(text)) is not None:
                    counts[behind] = counts.get(behind, 0) + number
    if not counts:
        return []
    most = max(counts.values())
    bars = [
        f"{behind:>4} {'#' * max(1, round(40 * counts[behind] / most))} {counts[behind]}" for behind in sorted(counts)
    ]
    return ["updates between a worker's pull and its push:", *bars]


def why_waiting(facts: Mapping[str, Any]) -> str:
    """Who everybody waits for, and what is known of it."""
    if facts["state"] == "gathering":
        job = facts["job"]
        return f"The job has not begun: {job['servers']} servers and {job['workers']} workers must come; here: " + (
            ", ".join(facts["here"]) or "nobody"
        )
    active = [worker for worker in facts["workers"] if worker["is_in"] and not worker["is_done"]]
    missing = {name for node in facts["nodes"] for row in node["ranges"] for name in row["waits_for"]}
    if facts["job"]["mode"] == "stale" and active:
        slowest = min(worker["clock"] for worker in active)
        is_bound = max(worker["clock"] for worker in active) - slowest >= facts["job"]["staleness"] + 1
        missing = {worker["worker"] for worker in active if worker["clock"] == slowest} if is_bound else set()
    waiting = [worker for worker in active if worker.get("is_waiting") and worker["worker"] not in missing]
    broken = [chain["range"] for chain in facts["chains"] if not chain["is_whole"]]
    lines = [f"range {number} is not whole: a server joins, or must be started" for number in broken]
    if not waiting or not missing:
        return "\n".join([*lines, "Nobody waits."])
    names = ", ".join(str(worker["worker"]) for worker in waiting)
    for worker in active:
        if worker["worker"] in missing:
            said = f"at step {worker['clock'] + 1}, last heard {worker['silent_s']:.1f} s ago"
            lines.append(f"worker {worker['worker']} is waited for by {names}: {said}")
    return "\n".join(lines)


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in [titles, *rows]) for at in range(len(titles))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
