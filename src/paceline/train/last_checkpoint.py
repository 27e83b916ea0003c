"""The run's last checkpoint: a job that ends must leave its last step on the disk, or fail and say so."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.manifest import (
    CHECKPOINTS,
    folder_name,
    left_of,
    list_checkpoints,
    list_left,
    publish_left,
    put_in_place,
    remove_others,
    step_name,
    step_of,
)
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, how_to_write
from paceline.train import prepare
from paceline.train.step_board import CLOSE

if TYPE_CHECKING:
    from paceline.train.checkpoints import Checkpoints

_LONGEST_PATH = 4096  # PATH_MAX of Linux
RETRY_AFTER_S = 1.0  # a file server that was away for a moment, or a file that another program just removed


@dataclass(frozen=True, slots=True)
class AbandonedStep:
    """The last step of a job that went back, in no checkpoint of its run. It becomes one if the job ends there.

    Attributes:
        folder: the folder of the checkpoint that it becomes.
        stale: the checkpoints from which the job had gone back before.
        failure: the error if it could not be written.
    """

    folder: Path
    stale: tuple[Path, ...]
    failure: CheckpointError | None


class LastCheckpoint:
    """The last step of one job, which must be on the disk when the job goes back from it, or ends.

    Attributes:
        abandoned: the step from which the job has gone back, where no checkpoint of the run has it.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.job = checkpoints.job
        self.abandoned: AbandonedStep | None = None

    def set_aside(self) -> None:
        """Write the last step of a job that goes back beside the run's checkpoints, unless it is in one. Collective."""
        job, checkpoints = self.job, self.checkpoints
        if job.run_dir is None or job.closed_step is not None:
            return
        if job.step_number == checkpoints.loaded_step:
            return  # no step was taken since
        self.abandoned = None
        if self._is_saved():
            return
        folder = checkpoints.folder()
        stale = tuple(checkpoints.writer.stale)
        # Under a hidden name: as a checkpoint it would be the newest, and a loop that returns from a divergence would
        # load it.
        failure = checkpoints.write(left_of(folder))
        if failure is not None:
            job.notice(str(failure))
        self.abandoned = AbandonedStep(folder, stale, failure)
        checkpoints.writer.stale.append(left_of(folder))

    def discard(self) -> None:
        """Remove what was set aside: the job is closed without a checkpoint of its last step."""
        if self.abandoned is not None and self.job.rank == 0:
            prepare.check_owner(os.environ)
            shutil.rmtree(left_of(self.abandoned.folder), ignore_errors=True)
        self.abandoned = None

    def save(self) -> None:
        """Make the last step trained the run's newest checkpoint. Collective, but for workers of servers.

        A job that went back to an earlier step and took none from there leaves the one that it went back from. Writing
        is tried twice. Where both fail, the state is saved to another folder, and the job fails all the same:
        `--resume` and `paceline export RUN` would use an earlier step. Where the run is copied, wait for the copy.

        Raises:
            CheckpointError: the checkpoint can't be written, or copied.
        """
        job, checkpoints = self.job, self.checkpoints
        if not job.steps.is_saving:
            return
        prepare.check_owner(os.environ)
        if not self._ends_as_loaded() and not self._is_saved():
            failure = checkpoints.write_of_run()
            if failure is not None:
                job.notice(f"{failure}\npaceline: trying once more")
                # All ranks have the same `failure`, so all of them try again.
                time.sleep(RETRY_AFTER_S)
                failure = checkpoints.write_of_run()
            if failure is not None:
                raise self._not_saved(failure, self.save_elsewhere())
        checkpoints.finish_copies()

    def save_after_failure(self) -> None:
        """Save the last step of a job whose file has failed after it, such as by a picture that it could not draw.

        A checkpoint is written by all ranks together. So they meet first: each has failed, or has come to the end of
        its file. A rank that is in its next step, or anywhere else, would not come, and then nothing is saved.
        Collective, but for a rank whose last step is not done.

        It becomes a checkpoint of the run if a job can go on from it as if nothing had happened. Where the loop may
        have left out a part of its last step, such as `scheduler.step()`, or there is no run directory, it is saved
        elsewhere.
        """
        job = self.job
        is_trained = job.step_number != self.checkpoints.loaded_step and job.plan.strategy == "collectives"
        can_go_on = job.run_dir is not None and job.is_at_step
        if not is_trained or not (can_go_on or job.may_be_done):
            return
        ends = job.board.meet_after_failure()
        if ends is None:
            return
        try:
            self.checkpoints.end_step()
            # A rank that has ended without an error saves the run's checkpoint: the loop was done.
            if can_go_on or (job.run_dir is not None and CLOSE in ends):
                self.save()
            elif (folder := self.save_elsewhere()) is not None:
                job.notice(
                    f"step {job.step_number} is saved in {folder}: job.load goes on from it, and "
                    f"`paceline export {folder} DIR` writes its model"
                )
        except Exception as error:  # the file's own error is the one to tell
            job.notice(f"step {job.step_number} can't be saved: {type(error).__name__}: {error}")

    def save_elsewhere(self) -> Path | None:
        """Save to the run directory itself, or to the folder for temporary files; return the checkpoint, or None."""
        job = self.job
        name = "job" if job.run_dir is None else job.run_dir.name
        for parent in temporary_folders(job.run_dir):
            folder = new_folder(job.world, parent, f"paceline-{name}-")
            if folder is None:
                continue
            checkpoint = folder / folder_name(job.step_number)
            failure = self.checkpoints.write(checkpoint)
            if failure is None:
                return checkpoint
            if job.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        return None

    def _ends_as_loaded(self) -> bool:
        """True if no step was taken since the job began or went back, and the run has its last step on the disk."""
        if self.job.step_number != self.checkpoints.loaded_step:
            return False
        assert self.job.run_dir is not None
        # The step that it left is on the disk under its hidden name: now it either becomes the last checkpoint or goes.
        if self.abandoned is not None:
            if self._has_loaded_stale(self.abandoned):
                self._drop(self.abandoned)
            else:
                self._publish(self.abandoned)
        newest = list_checkpoints(self.job.run_dir / CHECKPOINTS)[:1] if self.job.rank == 0 else []
        has_any = _on_any(self.job.world, bool(newest))
        if newest and step_name(newest[0]) != self.checkpoints.folder().name:
            self.job.notice(
                f"the job ends at step {self.job.step_number}, which it loaded, and took no step from there: "
                f"{step_name(newest[0])} stays the newest checkpoint of {self.job.run_dir.name}"
            )
        return has_any

    def _has_loaded_stale(self, abandoned: AbandonedStep) -> bool:
        """True if the job loaded, last, a checkpoint that would be removed if `abandoned` became one. Collective."""
        is_stale = False
        if self.job.rank == 0:  # only it knows what is stale
            is_stale = any(self.checkpoints.loaded_folder == checkpoint.resolve() for checkpoint in abandoned.stale)
        return _on_any(self.job.world, is_stale)

    def _drop(self, abandoned: AbandonedStep) -> None:
        """Remove a step that the job left for a checkpoint that it had gone back from before.

        That checkpoint's branch stays, with its own last step.
        """
        self.abandoned = None
        if self.job.rank != 0:
            return
        self._remove([left_of(abandoned.folder)])
        with contextlib.suppress(OSError):  # then it stays where it is, and the next start tries it again
            published = publish_left(abandoned.folder.parent)
            if published is not None:
                self._report(published, [])
            self._remove(list_left(abandoned.folder.parent))

    def _remove(self, states: list[Path]) -> None:
        for path in states:
            shutil.rmtree(path, ignore_errors=True)
            self.job.notice(
                f"{step_name(path)} is not kept: the job left it for {folder_name(self.job.step_number)}, "
                "which it had gone back from before"
            )

    def _report(self, saved: Path, removed: list[str]) -> None:
        event: dict[str, Any] = {
            "event": "checkpoint",
            "path": str(saved),
            "step": step_of(saved.name),
            "seconds": 0.0,
        }
        if removed:
            event["removed"] = removed
        self.checkpoints.writer.report(event)

    def _publish(self, abandoned: AbandonedStep) -> None:
        """Make the step that the job went back from the run's newest checkpoint. Collective."""
        # Rank 0 moves the folder; the others hear by `first_failure` whether it could.
        failure = abandoned.failure
        if self.job.rank == 0 and failure is None:
            try:
                put_in_place(left_of(abandoned.folder), abandoned.folder)
                loaded = [] if self.checkpoints.loaded_folder is None else [self.checkpoints.loaded_folder]
                removed = remove_others(abandoned.folder, self.job.plan.keep, abandoned.stale, loaded)
            except OSError as error:
                failure = CheckpointError(
                    f"the job's last checkpoint {abandoned.folder} should be written",
                    f"it can't be written ({error.strerror})",
                    how_to_write(error),
                )
            else:
                self._report(abandoned.folder, removed)
        failure = first_failure(failure, abandoned.folder, self.job.world)
        if failure is not None:
            raise failure
        self.abandoned = None

    def _is_saved(self) -> bool:
        """True if every rank has saved the job's step and its checkpoint is still there. Collective."""
        is_missing = self.checkpoints.saved_step != self.job.step_number
        # One that the run, or a user, has removed since does not count.
        if self.job.rank == 0 and not self.checkpoints.folder().is_dir():
            is_missing = True
        return not _on_any(self.job.world, is_missing)

    def _not_saved(self, failure: CheckpointError, elsewhere: Path | None) -> CheckpointError:
        assert self.job.run_dir is not None
        folder = self.checkpoints.folder()
        if elsewhere is None:
            reason = failure.fix.partition(";")[0]  # that older checkpoints are untouched is said by what follows
            fix = (
                f"{reason}; then train again from the checkpoint before it, if there is one, with --resume --job "
                f"{self.job.run_dir.name}"
            )
        else:
            fix = (
                f"the state was saved to {elsewhere}: `paceline export {elsewhere} DIR` writes its model; to go on "
                f"from it, move it to {folder} and write --resume --job {self.job.run_dir.name}"
            )
        error = CheckpointError(
            f"the job's last checkpoint {folder} should be written", f"two attempts failed ({failure.found})", fix
        )
        error.saved_to = None if elsewhere is None else str(elsewhere)
        return error


def _on_any(comm: AxisComm, is_so: bool) -> bool:
    """Return whether something is so on any rank. Collective."""
    flag = torch.tensor([int(is_so)])
    comm.all_reduce(flag, "max")
    return bool(int(flag))


def first_failure(failure: CheckpointError | None, folder: Path, comm: AxisComm) -> CheckpointError | None:
    """Return the failure of the first rank that has one, on every rank; None if no rank has one. Collective.

    Args:
        failure: the error of this rank; None: it has none.
        folder: the folder of the checkpoint that was to be written.
        comm: the communicator of all ranks.
    """
    # One text of each rank: a digit, whether it failed, and why.
    if failure is None:
        text = "0"
        fix = "see that every rank can write to that folder"
    else:
        text = f"1{failure.found}"
        fix = failure.fix
    for rank, answer in zip(comm.peers, comm.all_gather_text(text), strict=True):
        if answer.startswith("1"):
            return CheckpointError(f"rank {rank} should write its part of the checkpoint {folder}", answer[1:], fix)
    return None


def temporary_folders(run_dir: Path | None) -> list[Path]:
    """Return the parents for `new_folder` to try: the first is on the disk of the checkpoints, the second often not."""
    temporary = Path(tempfile.gettempdir())
    return [temporary] if run_dir is None else [run_dir, temporary]


def new_folder(world: AxisComm, parent: Path, prefix: str) -> Path | None:
    """Make a folder in `parent` that all ranks see; return None if that fails. Collective.

    Args:
        world: the communicator of all ranks.
        parent: the folder in which it is made, on rank 0.
        prefix: the beginning of its name.
    """
    name = ""
    if world.rank == 0:
        try:
            name = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except OSError:
            name = ""
    # Rank 0 sends the name, which is empty where it could make no folder.
    # A broadcast needs the same size on all ranks, and only rank 0 knows the name.
    row = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
    content = name.encode()[:_LONGEST_PATH]
    row[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    world.broadcast(row)
    name = bytes(row.tolist()).rstrip(b"\0").decode()
    # Ranks on other hosts may have other disks.
    if not _on_any(world, not name or not Path(name).is_dir()):
        return Path(name)
    if world.rank == 0 and name:
        shutil.rmtree(name, ignore_errors=True)
    return None
