"""List the runs of a folder again and again, and read only those that have changed since."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path

from paceline.run.read.runs import Run, read_run

PAGE = 100  # runs of a page
SORTS = {  # by the names in addresses
    "started": lambda run: run.started,
    "job": lambda run: run.name.casefold(),
    "status": lambda run: run.status,
    "step": lambda run: run.step,
    "loss": lambda run: run.loss,
    "ranks": lambda run: run.ranks,
    "plan": lambda run: run.plan,
}
_FILES = ("job.json", "plan.json", "result.json", "events.jsonl")

_State = tuple[tuple[int, int], ...]


class RunList:
    """The runs of a folder.

    Args:
        folder: the folder that has their run directories. It may come later, or go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[_State, Run]] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """Return all runs, the one that was started last first."""
        with self._lock:
            known = {}
            for path in self.folder.glob("*/job.json"):
                if _is_text(path.parent.name):
                    known[path.parent.name] = self._read(path.parent)
            self._known = known
        return sorted((run for _, run in known.values()), key=SORTS["started"], reverse=True)

    def _read(self, folder: Path) -> tuple[_State, Run]:
        state = tuple(_state(folder / name) for name in _FILES)
        before = self._known.get(folder.name)
        # Of a run without a result the status depends on the time too.
        if before is not None and before[0] == state and not before[1].is_open:
            return before
        return state, read_run(folder)

    def folder_of(self, name: str) -> Path | None:
        """Return the run directory of a name that came from outside; None: there is no such run."""
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            return None
        folder = self.folder / name
        try:
            return folder if (folder / "job.json").is_file() else None
        except OSError:  # a name that is too long
            return None


def chosen(runs: Sequence[Run], text: str, status: str, sort: str) -> list[Run]:
    """Return the runs that a page asks for, in its order.

    Args:
        runs: all runs of the folder.
        text: the words that must all be in a run's name, plan or file.
        status: the status that it must have; "": any.
        sort: the name of an order in SORTS; with a "-" before it the largest first.
    """
    words = text.casefold().split()
    found = []
    for run in runs:
        content = " ".join((run.name, run.plan, *run.script)).casefold()
        if all(word in content for word in words) and status in ("", run.status):
            found.append(run)
    name = sort.removeprefix("-")
    key = SORTS.get(name, SORTS["started"])
    known = [run for run in found if name != "loss" or _has_loss(run)]
    unknown = [run for run in found if name == "loss" and not _has_loss(run)]  # last in both orders
    return [*sorted(known, key=key, reverse=sort.startswith("-")), *unknown]


def _has_loss(run: Run) -> bool:
    return run.loss is not None and not math.isnan(run.loss)


def _is_text(name: str) -> bool:
    """Return whether a folder's name can stand in a page and in an address."""
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False
    return True


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
