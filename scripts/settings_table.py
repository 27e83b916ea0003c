#!/usr/bin/env python
"""Write the table of the cluster file's keys in docs/hosts.md."""

from __future__ import annotations

from pathlib import Path

from paceline.run.cluster_file import KIND_NAMES
from paceline.run.job_settings import JOB, KUBERNETES, SLURM, TABLES

PAGE = Path(__file__).parent.parent / "docs/hosts.md"
BEGIN = "<!-- Made by scripts/settings_table.py. -->\n"
END = "<!-- End of the table. -->\n"


def table() -> str:
    """Return the table of all keys."""
    lines = ["| table | key | value | description | flag |", "|---|---|---|---|---|"]
    for name, settings in TABLES.items():
        for key, setting in settings.items():
            # `submit` has a flag for each key of its target's table, and `run` for those of a job.
            flag = f"`{setting.flag}`" if name in (SLURM, KUBERNETES) or key in JOB else ""
            value = KIND_NAMES[setting.kind].removeprefix("a ")
            description = setting.help.replace("[", "\\[")  # a bracket begins a link
            lines.append(f"| `[{name}]` | `{key}` | {value} | {description} | {flag} |")
    return "\n".join(lines) + "\n"


def page_with_table(page: str) -> str:
    """Return a page with the table in place of the one that it has."""
    before, _, after = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{after.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
