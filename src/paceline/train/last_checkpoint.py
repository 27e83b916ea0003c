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
    later_than,
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

if TYPE_CHECKING:
    from paceline.train.job import Job

RETRY_AFTER_S = 1.0  # a file server that was away for a moment, or a file that another program just removed


@dataclass(frozen=True, slots=True)
class Left:
    """The last step of a job that went back, in no checkpoint of its run. It becomes one if the job ends there.

    Attributes:
        folder: the checkpoint that it becomes.
        stale: the checkpoints that the job had gone back from before.
        failure: why it could not be written.
    """

    folder: Path
    stale: tuple[Path, ...]
    failure: CheckpointError | None


def set_aside(job: Job) -> None:
    """Write the last step of a job that goes back beside the run's checkpoints, unless it is in one. Collective."""
    if job.run_dir is None or job.closed_step is not None:
        return
    if job.step_number == job.loaded_step:
        return  # no step was taken since
    job.left = None
    if _is_saved(job):
        return
    folder = job.checkpoint_folder()
    stale = tuple(job.writer.stale)
    # Under a hidden name: as a checkpoint it would be the newest, and a loop that returns from a divergence would load
    # it.
    failure = job.write_checkpoint(left_of(folder))
    if failure is not None:
        job.notice(str(failure))
    job.left = Left(folder, stale, failure)
    job.writer.stale.append(left_of(folder))


def discard_left(job: Job) -> None:
    """Remove what was set aside: the job is closed without a checkpoint of its last step."""
    if job.left is not None and job.rank == 0:
        prepare.check_owner(os.environ)
        shutil.rmtree(left_of(job.left.folder), ignore_errors=True)
    job.left = None


def go_back(job: Job, folder: Path) -> None:
    """Note that the job is at the step of the checkpoint `folder`, which it loaded.

    Checkpoints of later steps stay until a step from here on is saved: a job may load its best state to evaluate it,
    and end.
    """
    job.loaded_step = job.step_number
    # Resolved, to be compared with the stale checkpoints' paths.
    job.loaded_folder = folder.resolve()
    job.saved_step = None
    if job.run_dir is not None and job.rank == 0 and not job.events.takes_over:
        # One that takes a lost process's place loads what the job began with, and joins the others after it.
        checkpoints = job.run_dir / CHECKPOINTS
        job.writer.stale = later_than(job.step_number, checkpoints) + list_left(checkpoints)


def first_failure(failure: CheckpointError | None, folder: Path, comm: AxisComm) -> CheckpointError | None:
    """Return the failure of the first rank that has one, on every rank; None if no rank has one. Collective.

    Args:
        failure: this rank's.
        folder: the checkpoint that was to be written.
        comm: all ranks.
    """
    # One text of each rank: a digit, whether it failed, and why.
    if failure is None:
        text = "0"
        fix = "see that every rank can write to that folder"
    else:
        text = f"1{failure.found}"
        fix = failure.fix
    rows = comm.all_gather(torch.tensor(list(text.encode()), dtype=torch.uint8))
    for rank, row in zip(comm.peers, rows, strict=True):
        answer = bytes(row.tolist()).decode()
        if answer.startswith("1"):
            return CheckpointError(f"rank {rank} should write its part of the checkpoint {folder}", answer[1:], fix)
    return None


def save_last_step(job: Job) -> None:
    """Make the last step trained the run's newest checkpoint. Collective, but for workers of servers.

    A job that went back to an earlier step and took none from there leaves the one that it went back from. Writing is
    tried twice. Where both fail, the state is saved to another folder, and the job fails all the same:
    `--resume` and `paceline export RUN` would use an earlier step.

    Raises:
        CheckpointError: the checkpoint can't be written.
    """
    if not job.steps.is_saving:
        return
    prepare.check_owner(os.environ)
    if _ends_as_loaded(job) or _is_saved(job):
        return
    folder = job.checkpoint_folder()
    failure = job.write_checkpoint(folder, job.plan.keep)
    if failure is not None:
        job.notice(f"{failure}\npaceline: trying once more")
        # All ranks have the same `failure`, so all of them try again.
        time.sleep(RETRY_AFTER_S)
        failure = job.write_checkpoint(folder, job.plan.keep)
    if failure is not None:
        raise _not_saved(job, folder, failure, save_elsewhere(job))
    job.saved_step = job.step_number


def _ends_as_loaded(job: Job) -> bool:
    """True if no step was taken since the job began or went back, and the run has its last step on the disk."""
    if job.step_number != job.loaded_step:
        return False
    assert job.run_dir is not None
    # The step that it left is on the disk under its hidden name: now it either becomes the last checkpoint or goes.
    if job.left is not None:
        if _has_loaded_stale(job, job.left):
            _drop(job, job.left)
        else:
            _publish(job, job.left)
    newest = list_checkpoints(job.run_dir / CHECKPOINTS)[:1] if job.rank == 0 else []
    has_any = torch.tensor([len(newest)])
    job.world.all_reduce(has_any, "max")
    if newest and step_name(newest[0]) != job.checkpoint_folder().name:
        job.notice(
            f"the job ends at step {job.step_number}, which it loaded, and took no step from there: "
            f"{step_name(newest[0])} stays the newest checkpoint of {job.run_dir.name}"
        )
    return bool(int(has_any))


def _has_loaded_stale(job: Job, left: Left) -> bool:
    """True if the job loaded, last, a checkpoint that would be removed if `left` became one. Collective."""
    is_stale = False
    if job.rank == 0:  # it alone knows what is stale
        is_stale = any(job.loaded_folder == checkpoint.resolve() for checkpoint in left.stale)
    flag = torch.tensor([int(is_stale)])
    job.world.all_reduce(flag, "max")
    return bool(int(flag))


def _drop(job: Job, left: Left) -> None:
    """Remove a step that the job left for a checkpoint that it had gone back from before.

    That checkpoint's branch stays, with its own last step.
    """
    job.left = None
    if job.rank != 0:
        return
    _remove(job, [left_of(left.folder)])
    with contextlib.suppress(OSError):  # then it stays where it is, and the next start tries it again
        published = publish_left(left.folder.parent)
        if published is not None:
            _report(job, published, [])
        _remove(job, list_left(left.folder.parent))


def _remove(job: Job, states: list[Path]) -> None:
    for path in states:
        shutil.rmtree(path, ignore_errors=True)
        job.notice(
            f"{step_name(path)} is not kept: the job left it for {folder_name(job.step_number)}, "
            "which it had gone back from before"
        )


def _report(job: Job, saved: Path, removed: list[str]) -> None:
    event: dict[str, Any] = {
        "event": "checkpoint",
        "path": str(saved),
        "step": step_of(saved.name),
        "seconds": 0.0,
    }
    if removed:
        event["removed"] = removed
    job.writer.report(event)


def _publish(job: Job, left: Left) -> None:
    """Make the step that the job went back from the run's newest checkpoint. Collective."""
    # Rank 0 moves the folder; the others hear by `first_failure` whether it could.
    failure = left.failure
    if job.rank == 0 and failure is None:
        try:
            put_in_place(left_of(left.folder), left.folder)
            loaded = [] if job.loaded_folder is None else [job.loaded_folder]
            removed = remove_others(left.folder, job.plan.keep, left.stale, loaded)
        except OSError as error:
            failure = CheckpointError(
                f"the job's last checkpoint {left.folder} should be written",
                f"it can't be written ({error.strerror})",
                how_to_write(error),
            )
        else:
            _report(job, left.folder, removed)
    failure = first_failure(failure, left.folder, job.world)
    if failure is not None:
        raise failure
    job.left = None


def _is_saved(job: Job) -> bool:
    """True if every rank has saved the job's step and its checkpoint is still there. Collective."""
    is_missing = job.saved_step != job.step_number
    # One that the run, or a person, has removed since does not count.
    if job.rank == 0 and not job.checkpoint_folder().is_dir():
        is_missing = True
    # "max": missing on one rank is missing.
    flag = torch.tensor([int(is_missing)])
    job.world.all_reduce(flag, "max")
    return not int(flag)


def save_elsewhere(job: Job) -> Path | None:
    """Save to the run directory itself, or to the folder for temporary files; return the checkpoint, or None."""
    name = "job" if job.run_dir is None else job.run_dir.name
    for parent in temporary_folders(job):
        folder = new_folder(job.world, parent, f"paceline-{name}-")
        if folder is None:
            continue
        checkpoint = folder / folder_name(job.step_number)
        failure = job.write_checkpoint(checkpoint)
        if failure is None:
            return checkpoint
        if job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def temporary_folders(job: Job) -> list[Path]:
    """Return where `new_folder` may be tried: the first is on the same disk as checkpoints, the second often not."""
    temporary = Path(tempfile.gettempdir())
    return [temporary] if job.run_dir is None else [job.run_dir, temporary]


def new_folder(world: AxisComm, parent: Path, prefix: str) -> Path | None:
    """Make a folder in `parent` that all ranks see; return None if that fails. Collective.

    Args:
        world: all ranks.
        parent: where, on rank 0.
        prefix: of its name.
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
    is_unseen = not name or not Path(name).is_dir()  # ranks on other hosts may have other disks
    flag = torch.tensor([int(is_unseen)])
    world.all_reduce(flag, "max")
    if not int(flag):
        return Path(name)
    if world.rank == 0 and name:
        shutil.rmtree(name, ignore_errors=True)
    return None


_LONGEST_PATH = 4096  # PATH_MAX of Linux


def _not_saved(job: Job, folder: Path, failure: CheckpointError, elsewhere: Path | None) -> CheckpointError:
    assert job.run_dir is not None
    if elsewhere is None:
        reason = failure.fix.partition(";")[0]  # that older checkpoints are untouched is said by what follows
        fix = (
            f"{reason}; then train again from the checkpoint before it, if there is one, with --resume --job "
            f"{job.run_dir.name}"
        )
    else:
        fix = (
            f"the state was saved to {elsewhere}: `paceline export {elsewhere} DIR` writes its model; to go on from "
            f"it, move it to {folder} and write --resume --job {job.run_dir.name}"
        )
    error = CheckpointError(
        f"the job's last checkpoint {folder} should be written", f"two attempts failed ({failure.found})", fix
    )
    error.saved_to = None if elsewhere is None else str(elsewhere)
    return error
