"""How each rank of a job ended that nobody of ours supervises: `ended/RANK` in the run directory.

A rank's file is empty while it runs, and has its exit status afterwards. Rank 0 reads them before it writes the result.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.launch.command import STOPPED_CODE
from paceline.run.failures import first_cause, left_early, never_ended, read_failures, silent_death

FOLDER = "ended"  # in the run directory


class Ends:
    """The files of one job's ranks.

    Args:
        run_dir: of the job; all ranks see the same.
        size: how many ranks there are.
    """

    def __init__(self, run_dir: Path, size: int) -> None:
        self.folder, self.size = run_dir / FOLDER, size

    def begin(self, rank: int) -> bool:
        """The rank starts: what an earlier attempt has left counts no longer. False: that could not be written."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have made the run directory yet
            (self.folder / str(rank)).write_text("")
            return True
        return False

    def write(self, rank: int, status: int) -> None:
        """The rank has ended, with an exit code, or LEFT, or below 0 the signal."""
        path = self.folder / str(rank)
        with contextlib.suppress(OSError):
            draft = path.with_name(f".{rank}.draft")
            draft.write_text(f"{status}\n")
            draft.replace(path)

    def read(self, ranks: Iterable[int]) -> dict[int, int]:
        """The status of those of `ranks` that have ended."""
        found = {}
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                found[rank] = int((self.folder / str(rank)).read_text())
        return found

    def unseen(self, ended: Collection[int]) -> list[int]:
        """Ranks beside those that have left nothing here: their host does not see this folder, or they never began."""
        return [rank for rank in range(1, self.size) if rank not in ended and not (self.folder / str(rank)).exists()]

    def clear(self) -> None:
        """Remove them; the result has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def first_of(run_dir: Path, ended: Mapping[int, int], size: int, last: Mapping[str, Any] | None) -> dict[str, Any]:
    """The failure that a job's end follows from.

    Args:
        run_dir: of the job, with what the ranks wrote down.
        ended: by rank, how those ended that are known to have.
        size: how many ranks there are.
        last: the last step's record; None: there was none.
    """
    failures = read_failures(run_dir)
    at = max((failure["at"] for failure in failures.values()), default=time.time_ns() / 1e9)
    for rank, status in ended.items():
        if status not in (0, STOPPED_CODE) and rank not in failures:
            failures[rank] = silent_death(rank, status, at)
    ended_well = min((rank for rank, status in ended.items() if status == 0), default=None)
    if all(failure["is_peer_loss"] for failure in failures.values()):
        missing = min(set(range(size)) - ended.keys(), default=None)
        if failures and ended_well is not None:
            return left_early(ended_well, at)
        if not failures and missing is not None:
            return never_ended(missing, at, run_dir)
    for failure in failures.values():
        if failure["type"] == "ProcessDied" and last is not None:
            failure["step"] = last["step"] + 1
    return first_cause(failures.values())
