"""A rank that somebody else's launcher started: `python -m paceline.run.joined FILE ARGS`.

Under srun, mpirun or in a pod nobody of ours supervises: rank 0 writes the result, and the exit code tells the
launcher what to do: 0 done, STOPPED_CODE saved before the end (start it again), 1 and 2 as everywhere.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from paceline.comm.dialects import find_position
from paceline.launch.command import STOPPED_CODE
from paceline.launch.orphans import die_with_parent
from paceline.nouns.errors import PacelineError
from paceline.run.failures import first_cause, read_failures
from paceline.run.job import finish
from paceline.run.place import said
from paceline.run.progress import Progress
from paceline.run.supervisor import Ending
from paceline.run.worker import failed, run_rank


def main() -> int:
    """Run the rank; its exit code."""
    die_with_parent()
    try:
        os.environ.update(said(find_position(os.environ)))
    except PacelineError as error:
        return failed(error)
    is_supervised = (
        "PACELINE_SUPERVISED" in os.environ
    )  # our supervisor looks for itself, and mpirun takes 75 for a failure
    run_dir = Path(os.environ["PACELINE_RUN_DIR"])
    progress = Progress(run_dir)  # before the first step: it follows from the file's present end
    is_telling = os.environ["PACELINE_RANK"] == "0" and not is_supervised
    say = partial(print, flush=True) if is_telling else None
    code = run_rank(sys.argv[1], sys.argv[2:], 0 if is_supervised else STOPPED_CODE, say)
    if is_telling:
        _write_result(run_dir, code, progress)
    return code


def _write_result(run_dir: Path, code: int, progress: Progress) -> None:
    progress.read()
    failures = read_failures(run_dir)
    cause = first_cause(failures.values()) if code not in (0, STOPPED_CODE) and failures else None
    status = {0: "done", STOPPED_CODE: "stopped"}.get(code, "failed")
    finish(run_dir, Ending(status, code, cause), progress, partial(print, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
