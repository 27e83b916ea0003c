"""Record how each rank ended in a job that we don't supervise: `ended/RANK` in the run directory.

A rank's file is blank while it runs, and has its exit status afterwards. Rank 0 reads them before it writes the result.
While a rank runs, the process above it touches the file. If the file no longer changes, that process is gone (its host
was lost, or it was killed), and rank 0 stops waiting for the rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.owner import SILENT_S
from paceline.launch.rank_command import STOPPED_CODE
from paceline.nouns.errors import ReadError
from paceline.nouns.reading import parse_whole, read_text, regular
from paceline.run.failures import first_cause, left_early, never_ended, read_failures, silent_death

FOLDER = "ended"  # the folder's name in the run directory
# Seconds.
_LOOK_S = 1.0  # what one look counts at most: this process, or its whole allocation, may have been suspended
_WIDTH = 4  # characters of a status: "-64" to "256"
_MOST = 256
_MOST_BYTES = 100  # the largest number of bytes that are read of a file


class Ends:
    """The files of one job's ranks.

    Args:
        run_dir: the job's run directory; all ranks see the same.
        size: the number of ranks.
    """

    def __init__(self, run_dir: Path, size: int) -> None:
        self.folder = run_dir / FOLDER
        self.size = size
        self._seen: dict[int, tuple[int | None, float]] = {}  # by rank: its file's time, seconds without a change of it
        self._looked_s = time.monotonic()

    def begin(self, rank: int) -> bool:
        """Record that the rank starts, in place of an earlier attempt's record. Return False if it can't be written."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have made the run directory yet
            self._put(rank, "")
            return True
        return False

    def heartbeat(self, rank: int) -> None:
        """Record that the rank still runs."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / str(rank))

    def write(self, rank: int, status: int) -> None:
        """Record that the rank has ended, with an exit code, or EXITED_EARLY, or below 0 the signal."""
        with contextlib.suppress(OSError):
            self._put(rank, str(status))

    def _put(self, rank: int, text: str) -> None:
        # As many bytes for an end as for a beginning, and in place: a disk that is full by then does not refuse it.
        descriptor = regular(str(self.folder / str(rank)), os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, f"{text:{_WIDTH}}\n".encode())
        finally:
            os.close(descriptor)

    def read(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the status of those of `ranks` that have ended."""
        statuses = {}
        for rank in ranks:
            with contextlib.suppress(ReadError):
                status = parse_whole(read_text(self.folder / str(rank), _MOST_BYTES).strip(), -_MOST, _MOST)
                if status is not None:  # it is blank while the rank runs
                    statuses[rank] = status
        return statuses

    def silent(self, ended: Collection[int]) -> list[int]:
        """Return the ranks, beside those that have ended, of which nothing more is to come.

        They have left nothing here: their host does not see this folder, or they never began. Or what they left has
        not changed for SILENT_S, as this process looked on: the clocks of hosts differ.
        """
        # The file's time is only compared with the one seen before, never with this host's clock.
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        silent = []
        for rank in set(range(1, self.size)) - set(ended):
            touched = self._touched(rank)
            before, quiet_s = self._seen.get(rank, (None, 0.0))
            quiet_s = quiet_s + passed_s if touched == before else 0.0
            self._seen[rank] = (touched, quiet_s)
            if touched is None or quiet_s >= SILENT_S:
                silent.append(rank)
        return sorted(silent)

    def _touched(self, rank: int) -> int | None:
        """Return when a rank's file was touched, in nanoseconds; None: there is none."""
        try:
            with open(self.folder / str(rank), "rb", opener=regular) as file:  # over NFS, opening it asks the server
                return os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # the file system may come back
            return -1

    def clear(self) -> None:
        """Remove the files; the result has been written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def first_of(run_dir: Path, ended: Mapping[int, int], size: int, last: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the failure that a job's end follows from.

    Args:
        run_dir: the run directory of the job, with what the ranks wrote down.
        ended: the status of each rank that is known to have ended, by rank.
        size: the number of ranks.
        last: the record of the last step; None: there was no step.
    """
    failures = read_failures(run_dir)
    # A rank without a file of its own gets the latest time: when it died is not known, so who wrote comes first.
    at = max((failure["at"] for failure in failures.values()), default=time.time_ns() / 1e9)
    for rank, status in ended.items():
        if status not in (0, STOPPED_CODE) and rank not in failures:
            failures[rank] = silent_death(rank, status, at, run_dir=run_dir)
    ended_well = min((rank for rank, status in ended.items() if status == 0), default=None)
    if all(failure["is_peer_loss"] for failure in failures.values()):
        # Nobody failed by itself: the peer that was lost either ended well, too early, or has not been heard of.
        missing = min(set(range(size)) - ended.keys(), default=None)
        if failures and ended_well is not None:
            return left_early(ended_well, at)
        if not failures and missing is not None:
            return never_ended(missing, at, run_dir)
    for failure in failures.values():
        if failure["type"] == "ProcessDied" and last is not None:
            failure["step"] = last["step"] + 1
    return first_cause(failures.values())
