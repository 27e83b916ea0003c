"""The run's last checkpoint: a job that ends must leave its last step on the disk, or fail and say so."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.checkpoint.manifest import CHECKPOINTS, list_checkpoints
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.train.job import Job

RETRY_AFTER_S = 1.0  # a file server that was away for a moment, or a file that another program just removed


def is_newest_of_run(checkpoint: Path, run_dir: Path | None) -> bool:
    """Whether `checkpoint` is the newest of the run directory `run_dir`."""
    if run_dir is None:
        return False
    newest = list_checkpoints(run_dir / CHECKPOINTS)[:1]
    return [path.resolve() for path in newest] == [checkpoint.resolve()]


def first_failure(failure: CheckpointError | None, folder: Path, comm: AxisComm) -> CheckpointError | None:
    """The failure of the first rank that has one, on every rank; None where no rank has one. Collective.

    Args:
        failure: this rank's.
        folder: the checkpoint that was to be written.
        comm: all ranks.
    """
    found = failure.found if failure is not None else ""
    text = f"{int(failure is not None)}{found}".encode()
    texts = [bytes(row.tolist()).decode() for row in comm.all_gather(torch.tensor(list(text), dtype=torch.uint8))]
    failed = [(rank, text[1:]) for rank, text in zip(comm.peers, texts, strict=True) if text.startswith("1")]
    if not failed:
        return None
    rank, found = failed[0]
    fix = failure.fix if failure is not None else "see that every rank can write to that folder"
    return CheckpointError(f"rank {rank} should write its part of the checkpoint {folder}", found, fix)


def save_last_step(job: Job) -> None:
    """Have the run's newest checkpoint be that of the job's step. Collective, but for workers of servers.

    It is tried twice. Where both fail, the state is saved to another folder, and the job fails all the same:
    `--resume` and `paceline export RUN` would use an earlier step.

    Raises:
        CheckpointError: the checkpoint can't be written.
    """
    if job.plan.server and job.rank != 0:
        return  # the servers' state is the same for all
    if _is_saved(job):
        return
    folder = job.checkpoint_folder()
    failure = job.write_checkpoint(folder, job.plan.keep)
    if failure is not None:
        job.notice(f"{failure}\npaceline: trying once more")
        time.sleep(RETRY_AFTER_S)
        failure = job.write_checkpoint(folder, job.plan.keep)
    if failure is not None:
        raise _not_saved(job, folder, failure, _save_elsewhere(job))
    job.saved_step = job.step_number


def _is_saved(job: Job) -> bool:
    """Whether the checkpoint of the job's step is on the disk, as all ranks know it, and is still there."""
    is_missing = job.rank == 0 and not job.checkpoint_folder().is_dir()
    behind = torch.tensor([int(job.saved_step != job.step_number or is_missing)])
    job.world.all_reduce(behind, "max")
    return not int(behind)


def _save_elsewhere(job: Job) -> Path | None:
    """Save to the run directory itself, or to the folder for temporary files; where it is, or None."""
    assert job.run_dir is not None
    for parent in (job.run_dir, Path(tempfile.gettempdir())):
        folder = _new_folder(job, parent)
        if folder is None:
            continue
        if job.write_checkpoint(folder / job.checkpoint_folder().name) is None:
            return folder / job.checkpoint_folder().name
        if job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _new_folder(job: Job, parent: Path) -> Path | None:
    """A new folder in `parent` that all ranks see, or None. Collective."""
    assert job.run_dir is not None
    name = ""
    if job.rank == 0:
        try:
            name = tempfile.mkdtemp(prefix=f"paceline-{job.run_dir.name}-", dir=parent)
        except OSError:
            name = ""
    row = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
    content = name.encode()[:_LONGEST_PATH]
    row[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    job.world.broadcast(row)
    name = bytes(row.tolist()).rstrip(b"\0").decode()
    is_unseen = torch.tensor([int(not name or not Path(name).is_dir())])
    job.world.all_reduce(is_unseen, "max")
    if not int(is_unseen):
        return Path(name)
    if job.rank == 0 and name:
        shutil.rmtree(name, ignore_errors=True)
    return None


_LONGEST_PATH = 4096  # PATH_MAX of Linux


def _not_saved(job: Job, folder: Path, failure: CheckpointError, elsewhere: Path | None) -> CheckpointError:
    assert job.run_dir is not None
    if elsewhere is None:
        fix = (
            "see that the folder is there, can be written and has space, and train again from the checkpoint before "
            f"it, if there is one, with --resume --job {job.run_dir.name}"
        )
    else:
        fix = (
            f"the state was saved to {elsewhere}: `paceline export {elsewhere} DIR` writes its model; to go on from "
            f"it, move it to {folder} and write --resume --job {job.run_dir.name}"
        )
    return CheckpointError(
        f"the job's last checkpoint {folder} should be written", f"two attempts failed ({failure.found})", fix
    )
