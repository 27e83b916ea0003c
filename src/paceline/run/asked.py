"""Ask a running job's ranks where they stand, through its run directory; `run/rank/watchdog.py` answers.

`asked/question` holds a text; each rank's watchdog thread writes what it finds to `asked/RANK.json`, with that text in
it. It does so while the rank's main thread waits, computes in Python or runs native code that lets other threads run.
No process is stopped.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import read_json

FOLDER = "asked"  # in the run directory
QUESTION = "question"
POLL_S = 0.5  # seconds between two looks of a rank, at most
_LOOK_S = 0.05


def question_in(run_dir: Path) -> str:
    """Return the question that stands in a run directory; "" where none does."""
    try:
        return (run_dir / FOLDER / QUESTION).read_text()[:100]
    except (OSError, ValueError):
        return ""


def ask(run_dir: Path, ranks: int, limit_s: float) -> dict[int, dict[str, Any]]:
    """Return the answers of the ranks that answer within a time, by rank.

    Args:
        run_dir: of the job.
        ranks: how many there are.
        limit_s: seconds to wait for those that have not answered.

    Raises:
        OSError: the run directory can't be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    question = secrets.token_hex(8)
    draft = folder / f".{question}"  # renamed: a rank never reads half of it
    draft.write_text(question)
    draft.replace(folder / QUESTION)
    answers: dict[int, dict[str, Any]] = {}
    until_s = time.monotonic() + limit_s
    try:
        while len(answers) < ranks and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            for rank in set(range(ranks)) - answers.keys():
                answer = _answer(folder / f"{rank}.json", question)
                if answer is not None:
                    answers[rank] = answer
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return answers


def _answer(path: Path, question: str) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = read_json(path, dict)
    except (ReadError, OSError):
        return None
    return answer if answer.get("question") == question else None
