"""Shows what the doctor found: a table for people, worst first, and JSON for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.doctor.facts import HostFacts
from paceline.doctor.finding import FLEET, LEVELS, Finding, count

_LEAST_WIDTH = 40  # of the column of texts, however narrow the terminal


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by level; within a level in the order in which they were found."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """The findings as aligned lines, each with its fix below it. What several hosts have alike is told once.

    Args:
        findings: of all hosts.
        width: of a line, in columns.
    """
    folded = _folded(worst_first(findings))
    has_hosts = len({finding.host for finding in findings}) > 1
    columns = [len(max((row.level for row in folded), key=len, default=""))]
    columns += [min(28, max((len(row.host) for row in folded), default=0))] if has_hosts else []
    columns += [max((len(row.check) for row in folded), default=0)]
    margin = sum(columns) + 2 * len(columns)
    lines = []
    for row in folded:
        words = [row.level, row.host, row.check] if has_hosts else [row.level, row.check]
        front = "".join(f"{word:<{size}}  " for word, size in zip(words, columns, strict=True))
        lines += _wrapped(front, row.found, margin, width)
        if row.fix:
            lines += _wrapped(" " * margin, f"fix: {row.fix}", margin, width)
    return lines


def _wrapped(front: str, text: str, margin: int, width: int) -> list[str]:
    parts = textwrap.wrap(text, max(_LEAST_WIDTH, width - margin), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    return [(front + parts[0]).rstrip(), *(" " * margin + part for part in parts[1:])]


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    """One row for what several hosts have alike; of what is right one row a check, the fleet's own where it has one."""
    rows: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        key = ("ok", one.check, "", "") if one.level == "ok" else (one.level, one.check, one.found, one.fix)
        rows.setdefault(key, []).append(one)
    return [_one_row(alike) for alike in rows.values()]


def _one_row(alike: Sequence[Finding]) -> Finding:
    first = next((one for one in alike if one.host == FLEET), alike[0])
    hosts = list(dict.fromkeys(one.host for one in alike))
    texts = list(dict.fromkeys(one.found for one in alike))
    if first.host == FLEET:
        return first
    host = ", ".join(hosts) if len(hosts) < 3 else f"{hosts[0]} and {len(hosts) - 1} more"
    if first.level == "ok" and len(texts) > 1:
        return replace(
            first, host=host, found="; ".join(texts) if len(hosts) == 1 else f"{texts[0]} on {hosts[0]}, ..."
        )
    return replace(first, host=host)


def summary(findings: Sequence[Finding], num_hosts: int) -> dict[str, int]:
    """How many findings there are of each level, and the hosts."""
    numbers = Counter(finding.level for finding in findings)
    return {"hosts": num_hosts, **{level.replace(" ", "_"): numbers[level] for level in LEVELS}}


def summary_line(findings: Sequence[Finding], num_hosts: int) -> str:
    """The last line, for people."""
    numbers = summary(findings, num_hosts)
    verdict = "this will not train well" if numbers["error"] else "nothing was found that prevents training"
    parts = [count(numbers["error"], "error"), count(numbers["warning"], "warning")]
    parts += [f"{numbers['not_checked']} not checked"] if numbers["not_checked"] else []
    return f"{count(num_hosts, 'host')}: {', '.join(parts)}, {numbers['ok']} ok; {verdict}"


def as_json(hosts: Mapping[str, HostFacts], findings: Sequence[Finding]) -> dict[str, Any]:
    """Facts, findings and summary as values that `json` knows."""
    return {
        "hosts": {name: facts.to_json() for name, facts in hosts.items()},
        "findings": [asdict(finding) for finding in worst_first(findings)],
        "summary": summary(findings, len({*hosts, *(one.host for one in findings if one.host != FLEET)})),
    }
