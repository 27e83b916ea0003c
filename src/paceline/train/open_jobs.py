"""The jobs that this process has made: which is the newest, at which step, and which one a run directory belongs to."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.nouns.errors import CollectiveError, PeerLostError, UsageError
from paceline.train.agree import FailedTogetherError
from paceline.train.event_log import FOLDER
from paceline.train.first_step import finish_pending

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob


@dataclass
class _RunJob:
    """A job that writes to a run directory, until the worker ends the run."""

    run_dir: Path
    process: int
    job: BaseJob | None  # None once it is closed: who trains another model after it needs its memory
    closed_step: int = 0

    def forget(self, closed: BaseJob) -> None:
        """Let go of the job if it is this one."""
        if self.job is closed:
            self.closed_step = closed.step_number
            self.job = None

    @property
    def step_number(self) -> int:
        """Return the last step of the job."""
        return self.closed_step if self.job is None else self.job.step_number


_run_jobs: list[_RunJob] = []  # one for each run directory
# One, or none yet. Not held: a loop that makes one job after another would keep two models in memory.
_newest_job: list[weakref.ref[BaseJob]] = []
# Of a function of `paceline.launch` without a run directory: what it returns may be found to be none that can be sent.
_launched_job: list[BaseJob] = []


def register(job: BaseJob) -> None:
    """Make this the newest job of the process."""
    _newest_job[:] = [weakref.ref(job)]
    _launched_job[:] = [job] if FOLDER in os.environ else []


def enter(job: BaseJob, run_dir: Path) -> None:
    """Register a job that writes to a run directory."""
    _run_jobs.append(_RunJob(run_dir, job.process, job))


def forget(job: BaseJob) -> None:
    """Let go of a job that is closed."""
    for of_run in _run_jobs:
        of_run.forget(job)
    _launched_job.clear()


def check_is_first(run_dir: Path | None, as_one: str = "put them into one module and add up their losses") -> None:
    """Raise UsageError when this process has a job in the run directory: a second would write over its checkpoints.

    Where there is no run directory, jobs share nothing, and there may be several. One that has ended still counts:
    `--resume` would load its checkpoints into the second, or those of the second into it.

    Args:
        run_dir: the run directory of the process.
        as_one: the advice of the error: how several models are one job.
    """
    _launched_job.clear()
    for job in _run_jobs:
        if job.run_dir == run_dir:
            raise UsageError(
                "a second job was asked for in this process",
                f"a run keeps the checkpoints of one job, and {run_dir} has those of the first (at step "
                f"{job.step_number})",
                "train each workload by a file and a `paceline run` of its own, or several models as one job: "
                f"{as_one}",
            )


def was_any_made() -> bool:
    """True if this process has made a job."""
    return bool(_newest_job)


def newest() -> BaseJob | None:
    """Return the job that this process made last; None if it has made none, or nothing holds that any more."""
    return _newest_job[0]() if _newest_job else None


def steps_done() -> int:
    """Return the step that this process's newest job has taken last; 0 if there is none."""
    job = newest()
    if job is not None:
        return job.step_number
    return _run_jobs[-1].step_number if _run_jobs else 0


def current_step() -> int | None:
    """Return the step that this process's newest job is in, or failed in; None between steps."""
    job = newest()
    if job is None or not job.is_stepping:
        return None
    return job.step_number + 1


def save_after_failure(error: BaseException) -> None:
    """Save the last step of this process's newest job, which the file has left by an error, if that can be done.

    Args:
        error: the error of the file. Where ranks have come apart, one has gone, or the first step was not that of one
            process, nothing is saved.
    """
    job = newest()
    if job is None or job.process != os.getpid() or job.is_closing or _is_of_others(error):
        return
    if job.first_step.has_differed:
        return
    if isinstance(error, Exception | SystemExit):
        job.checkpoints.last.save_after_failure()


def _is_of_others(error: BaseException) -> bool:
    """True where ranks have come apart, or one has gone, so that they can't save together."""
    return isinstance(error, CollectiveError | PeerLostError) and not isinstance(error, FailedTogetherError)


def close_open_jobs() -> None:
    """End the jobs that the workload's file left open; the worker calls this after it."""
    # Taken out first: a `close` that raises is not tried again.
    while _run_jobs:
        of_run = _run_jobs.pop()
        if of_run.job is not None and of_run.process == os.getpid():  # not in a process that the file forked
            of_run.job.close()
    finish_pending()
