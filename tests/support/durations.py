"""How long tests take, as measured: `tests/durations.json` has those of more than 0.15 s.

`python tests/support/durations.py REPORT...` adds functions from reports of pytest's `--junitxml`, and drops those that
are gone. Others keep what they had: of a table the cell that runs first pays for what all share, so a run of one cell
measures too much. To measure all anew, delete the file and report runs of all tests.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent.parent
FILE = TESTS / "durations.json"
SLOW = 0.15  # seconds: `scripts/test --fast` leaves out what takes longer
LONG = 1.0  # seconds: `make test` leaves out what takes longer


def read_durations() -> dict[str, float]:
    """Seconds of a test function by file and name ("train/test_data.py::test_x"), the mean over its cells."""
    return json.loads(FILE.read_text())


def read_report(path: Path) -> dict[str, list[float]]:
    """Seconds of every cell that ran, by function."""
    seconds = defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            file = case.get("classname").removeprefix("tests.").replace(".", "/")
            seconds[f"{file}.py::{case.get('name').split('[')[0]}"].append(float(case.get("time")))
    return seconds


def is_there(name: str) -> bool:
    """True if the test function still exists."""
    file, function = name.split("::")
    path = TESTS / file
    return path.is_file() and f"def {function}(" in path.read_text()


def write_durations(reports: list[Path]) -> None:
    measured = read_durations() if FILE.exists() else {}
    for report in reports:
        for name, seconds in read_report(report).items():
            measured.setdefault(name, round(sum(seconds) / len(seconds), 2))
    kept = {name: measured[name] for name in sorted(measured) if measured[name] > SLOW and is_there(name)}
    FILE.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    write_durations([Path(name) for name in sys.argv[1:]])
