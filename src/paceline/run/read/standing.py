"""Read the positions of a job's ranks: their reports and their answers, which `run/rank/watchdog.py` writes.

A rank that makes no progress writes `stalls/RANK.json` in the run directory. Whoever asks makes `asked/ID`; each rank's
watchdog thread writes what it finds to `asked/ID/RANK.json`. It does so while the rank's main thread waits, computes in
Python or runs native code that lets other threads run. No process is stopped, and several may ask at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import COUNT, Form, read_by_rank, read_json

FOLDER = "asked"  # the folder's name in the run directory, and the next one's
STALLS = "stalls"
_POLL_S = 0.5
_MANY_RANKS = 64
_MOST_POLL_S = 5.0
_LOOK_S = 0.05
_PROBE = ".probe"
_ANSWER_BYTES = 2**15  # a long answer; stacks of ten threads are shorter
_IDLE = 0.2  # cores: a rank that uses less is not computing
_REPORT: dict[str, Form] = {
    "rank": COUNT, "at": float, "stalled_s": float, "cpu_s": float, "step": (COUNT, None), "steps_done": COUNT,
    "waits_in": (str, None), "is_in_step": bool, "is_closing": bool, "line": (str, None), "stack": [[(str, COUNT)]],
}  # fmt: skip
_ANSWER = {**_REPORT, "cores?": COUNT, "pid?": COUNT, "host?": str}
_FRAME_PARTS = 3  # the file, the line and the function

Report = dict[str, Any]


def poll_s(ranks: int) -> float:
    """Return the seconds between two looks of a rank: all ranks of a large job look at one file system."""
    return min(_MOST_POLL_S, _POLL_S * max(1.0, ranks / _MANY_RANKS))


def questions_in(run_dir: Path) -> list[Path]:
    """Return the folders of the questions that stand in a run directory, also of who has left without an answer."""
    try:
        return list((run_dir / FOLDER).iterdir())
    except OSError:
        return []


def read_reports(folder: Path) -> list[Report]:
    """Return the reports that ranks without progress wrote to a folder, by rank; those in another form are left out."""
    reports = read_by_rank(folder, _REPORT).values()
    return sorted(filter(_has_frames, reports), key=lambda report: int(report["rank"]))


def _has_frames(report: Report) -> bool:
    return all(len(frame) == _FRAME_PARTS for frame in report["stack"])


def line_of(report: Mapping[str, Any]) -> str:
    """Return the innermost line of the user's code, or of any code."""
    if report.get("line"):
        return str(report["line"])
    if not report["stack"]:
        return "an unknown line"
    file, line, name = report["stack"][0]
    return f"{file}:{line} ({name})"


def standing(report: Mapping[str, Any]) -> str:
    """Return in a few words where a rank stands: equal for ranks at the same place."""
    if report.get("is_closing"):
        return f"left its loop after step {report['steps_done']}, closing the job"
    step = "" if report["step"] is None else f"step {report['step']}, "
    if report["waits_in"]:
        return f"{step}waiting in {report['waits_in']}, called at {line_of(report)}"
    activity = "idle" if report["cpu_s"] < _IDLE * report["stalled_s"] else "computing"
    return f"{step}at {line_of(report)}, {activity}"


def by_standing(standings: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks by where they stand."""
    ranks: dict[str, list[int]] = {}
    for rank, text in standings:
        ranks.setdefault(text, []).append(rank)
    return ranks


def ask(run_dir: Path, ranks: int, limit_s: float) -> dict[int, Report]:
    """Return the answers of the ranks that answer within a time, by rank.

    Args:
        run_dir: the run directory of the job.
        ranks: the number of ranks of the job.
        limit_s: the seconds to wait for ranks that have not answered, beside the time in which they look.

    Raises:
        OSError: the run directory can't be written.
    """
    folder = _make_folder(run_dir)
    answers: dict[int, Report] = {}
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


def _answer(path: Path) -> Report | None:
    try:
        answer: Report = read_json(path, _ANSWER)
    except (ReadError, OSError):
        return None
    return answer if _has_frames(answer) else None
