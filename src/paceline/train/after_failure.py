"""Save the last step of a job whose file has failed after it, such as by a picture that it could not draw.

A checkpoint is written by all ranks together. So they meet first: each has failed, or has come to the end of its file.
A rank that is in its next step, or anywhere else, would not come, and then nothing is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.train.checkpoint_copies import finish_copies
from paceline.train.last_checkpoint import save_elsewhere, save_last_step
from paceline.train.step_board import CLOSE

if TYPE_CHECKING:
    from paceline.train.job import Job


def save_after_failure(job: Job) -> None:
    """Save the last step, if all ranks are at their end. Collective, but for a rank whose last step is not done.

    It becomes a checkpoint of the run if a job can go on from it as if nothing had happened. Where the loop may have
    left out a part of its last step, such as `scheduler.step()`, or there is no run directory, it is saved elsewhere.
    """
    is_trained = job.step_number != job.loaded_step and job.plan.strategy == "collectives"
    can_go_on = job.run_dir is not None and job.is_at_step
    if not is_trained or not (can_go_on or job.may_be_done):
        return
    ends = job.board.meet_after_failure()
    if ends is None:
        return
    try:
        job.finish_last_step()
        # A rank that has ended without an error saves the run's checkpoint: the loop was done.
        if can_go_on or (job.run_dir is not None and CLOSE in ends):
            save_last_step(job)
            finish_copies(job)
        elif (folder := save_elsewhere(job)) is not None:
            job.notice(
                f"step {job.step_number} is saved in {folder}: job.load goes on from it, and "
                f"`paceline export {folder} DIR` writes its model"
            )
    except Exception as error:  # the file's own error is the one to tell
        job.notice(f"step {job.step_number} can't be saved: {type(error).__name__}: {error}")
