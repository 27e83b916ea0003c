"""Print the doctor's findings: as a table for users, worst first, and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.doctor.facts import HostFacts
from paceline.doctor.finding import FLEET, LEVELS, Finding, count
from paceline.nouns.table import aligned

_MOST_HOST_WIDTH = 28  # columns
_LEAST_WIDTH = 40  # the least width of the column of texts, however narrow the terminal


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by level; within a level they keep their order, since `sorted` is stable."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """Return the findings as aligned lines, each with its fix below it; equal ones of several hosts become one.

    Args:
        findings: the findings of all hosts.
        width: the width of a line, in columns.
    """
    rows = _folded(worst_first(findings))
    has_hosts = len({finding.host for finding in findings}) > 1

    if has_hosts:
        host_width = min(_MOST_HOST_WIDTH, max(len(row.host) for row in rows))
        cells = [("", "", ""), *((row.level, row.host, row.check) for row in rows)]
        margin, *fronts = aligned(cells, f"{{:<}}  {{:<{host_width}}}  {{:<}}  ")
    else:
        margin, *fronts = aligned([("", ""), *((row.level, row.check) for row in rows)], "{:<}  {:<}  ")

    lines = []
    for front, row in zip(fronts, rows, strict=True):
        lines += _wrapped(front, row.found, margin, width)
        if row.fix:
            lines += _wrapped(margin, f"fix: {row.fix}", margin, width)
    return lines


def _wrapped(front: str, text: str, margin: str, width: int) -> list[str]:
    # Long words and hyphens stay whole: paths and commands are to be copied.
    text_width = max(_LEAST_WIDTH, width - len(margin))
    wrapped = textwrap.wrap(text, text_width, break_long_words=False, break_on_hyphens=False)
    if not wrapped:  # `wrap` has no line for an empty text
        wrapped = [""]
    lines = [(front + wrapped[0]).rstrip()]
    for line in wrapped[1:]:
        lines.append(margin + line)
    return lines


def _folded(findings: Sequence[Finding]) -> list[Finding]:
    """Return one row for all findings that are alike, and one row for each check that found nothing wrong."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.level, finding.check, finding.found, finding.fix)
        if finding.level == "ok":  # "ok" texts have numbers that differ from host to host
            key = ("ok", finding.check, "", "")
        groups.setdefault(key, []).append(finding)
    return [_fold(alike) for alike in groups.values()]


def _fold(alike: Sequence[Finding]) -> Finding:
    """Return one row for findings that are alike: the fleet's own where there is one, for it speaks of all hosts."""
    for finding in alike:
        if finding.host == FLEET:
            return finding
    first = alike[0]
    # Dictionaries, not sets: they keep the order.
    hosts = list(dict.fromkeys(finding.host for finding in alike))
    texts = list(dict.fromkeys(finding.found for finding in alike))
    host = ", ".join(hosts) if len(hosts) < 3 else f"{hosts[0]} and {len(hosts) - 1} more"
    if first.level != "ok" or len(texts) == 1:
        return replace(first, host=host)
    text = "; ".join(texts) if len(hosts) == 1 else f"{texts[0]} on {hosts[0]}, ..."
    return replace(first, host=host, found=text)


def summary(findings: Sequence[Finding], num_hosts: int) -> dict[str, int]:
    """Return the number of hosts, and of the findings of each level."""
    counts = Counter(finding.level for finding in findings)
    result = {"hosts": num_hosts}
    for level in LEVELS:
        result[level.replace(" ", "_")] = counts[level]
    return result


def summary_line(findings: Sequence[Finding], num_hosts: int) -> str:
    """Return the last line of the report for users."""
    numbers = summary(findings, num_hosts)
    verdict = "this will not train well" if numbers["error"] else "nothing was found that prevents training"
    levels = [count(numbers["error"], "error"), count(numbers["warning"], "warning")]
    if numbers["not_checked"]:
        levels.append(f"{numbers['not_checked']} not checked")
    return f"{count(num_hosts, 'host')}: {', '.join(levels)}, {numbers['ok']} ok; {verdict}"


def as_json(hosts: Mapping[str, HostFacts], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return facts, findings and summary as values that `json` can write."""
    names = set(hosts)  # hosts that answered; the others have findings with the reason
    names.update(finding.host for finding in findings if finding.host != FLEET)
    return {
        "hosts": {name: host.to_json() for name, host in hosts.items()},
        "findings": [asdict(finding) for finding in worst_first(findings)],
        "summary": summary(findings, len(names)),
    }
