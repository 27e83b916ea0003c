"""Ask a running job's ranks where they stand, through its run directory; `run/rank/watchdog.py` answers.

Whoever asks makes `asked/ID`; each rank's watchdog thread writes what it finds to `asked/ID/RANK.json`. It does so
while the rank's main thread waits, computes in Python or runs native code that lets other threads run. No process is
stopped, and several may ask at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import read_json

FOLDER = "asked"  # in the run directory
_POLL_S = 0.5
_MANY_RANKS = 64
_MOST_POLL_S = 5.0
_LOOK_S = 0.05
_PROBE = ".probe"
_ANSWER_BYTES = 2**15  # a long answer; stacks of ten threads are shorter


def poll_s(ranks: int) -> float:
    """Return the seconds between two looks of a rank: all ranks of a large job look at one file system."""
    return min(_MOST_POLL_S, _POLL_S * max(1.0, ranks / _MANY_RANKS))


def questions_in(run_dir: Path) -> list[Path]:
    """Return the folders of the questions that stand in a run directory, also of who has left without an answer."""
    try:
        return list((run_dir / FOLDER).iterdir())
    except OSError:
        return []


def ask(run_dir: Path, ranks: int, limit_s: float) -> dict[int, dict[str, Any]]:
    """Return the answers of the ranks that answer within a time, by rank.

    Args:
        run_dir: of the job.
        ranks: how many there are.
        limit_s: seconds to wait for those that have not answered, beside the time in which they look.

    Raises:
        OSError: the run directory can't be written.
    """
    folder = _make_folder(run_dir)
    answers: dict[int, dict[str, Any]] = {}
    until_s = time.monotonic() + limit_s + poll_s(ranks)
    try:
        # A rank that can't write its answer would be taken for one that gives none.
        (folder / _PROBE).write_bytes(bytes(_ANSWER_BYTES))
        (folder / _PROBE).unlink()
        while len(answers) < ranks and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            for rank in set(range(ranks)) - answers.keys():
                answer = _answer(folder / f"{rank}.json")
                if answer is not None:
                    answers[rank] = answer
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another asks
            (run_dir / FOLDER).rmdir()
    return answers


def _make_folder(run_dir: Path) -> Path:
    folder = run_dir / FOLDER / secrets.token_hex(8)
    try:
        folder.mkdir(parents=True)
    except FileNotFoundError:  # another who asked has just removed the folder above
        folder.mkdir(parents=True)
    owner = run_dir.stat()
    with contextlib.suppress(OSError):  # root asks: the ranks are to write there
        for path in (folder.parent, folder):
            os.chown(path, owner.st_uid, owner.st_gid)
    return folder


def _answer(path: Path) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = read_json(path, dict)
    except (ReadError, OSError):
        return None
    return answer
