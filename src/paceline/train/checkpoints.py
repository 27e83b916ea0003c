"""The checkpoints of a job: what it writes, and when; what it loads, and from where."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint.copies import is_url
from paceline.checkpoint.load import check_files_together
from paceline.checkpoint.manifest import (
    CHECKPOINTS,
    find_good,
    folder_name,
    later_than,
    list_left,
    read_manifest,
    remove_partial,
)
from paceline.checkpoint.save import CheckpointWriter
from paceline.comm.step_times import CHECKPOINT, Timed
from paceline.nouns import arguments
from paceline.nouns.errors import CheckpointError
from paceline.train import prepare, schedulers, snapshot
from paceline.train.check_saving import check_can_save
from paceline.train.checkpoint_copies import CheckpointCopier, fetched, save_copy
from paceline.train.last_checkpoint import LastCheckpoint, first_failure
from paceline.train.load_weights import OF_TORCH, check_flags, read_weights
from paceline.train.seed import random_state

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob


class Checkpoints:
    """Writes and loads the checkpoints of one job.

    Attributes:
        saved_step: the step of the newest checkpoint of the run that was saved since the last load, or is being
            written.
        loaded_step: the step at which the job began, or to which `load` went.
        loaded_folder: the folder of the checkpoint that was loaded last.
        last: the writer of the last step of a job that goes back, or ends.
        copier: the copier of the run's checkpoints, on rank 0; None where nothing is copied.
    """

    def __init__(self, job: BaseJob) -> None:
        self.job = job
        self.saved_step: int | None = None
        self.loaded_step = 0
        self.loaded_folder: Path | None = None
        self.last = LastCheckpoint(self)
        self.copier: CheckpointCopier | None = None
        self.is_staging = False  # a checkpoint is written to be sent elsewhere
        check_owner = partial(prepare.check_owner, os.environ)
        self.writer = CheckpointWriter(*job.steps.writer_place, self._report, check_owner=check_owner)

    def begin_run(self, run_dir: Path) -> None:
        """Check that the run's checkpoints can be written, and load the one with which it resumes. Collective."""
        job = self.job
        check_can_save(job.model, job.optimizer, job.scheduler, job.parallel.local_shards(), job.world.size)
        prepare.check_space(run_dir, job.model)
        resume = os.environ.get("PACELINE_RESUME")
        job.steps.check_start(resume)
        if resume is not None:
            job.load(resume)

    def begin_copies(self) -> None:
        """Copy the run's checkpoints from now on, where the plan asks for it, beginning with the newest on the disk."""
        job = self.job
        if job.run_dir is not None and job.plan.copy_to and job.rank == 0:
            self.copier = CheckpointCopier(job.plan.copy_to, job.run_dir, job.plan.keep, self._report_copy)
            self.copier.begin_with_newest()

    def finish_copies(self) -> None:
        """Wait until the run's last checkpoint is copied. Collective, but for workers of servers.

        Raises:
            CheckpointError: it can't be; it is on the disk.
        """
        job = self.job
        url = job.plan.copy_to
        if job.run_dir is None or not url or not job.steps.is_saving:
            return
        failure = None if self.copier is None else self.copier.finish(job.notice)
        failure = first_failure(failure, self.folder(), job.world)
        if failure is not None:
            raise CheckpointError(
                f"the run's last checkpoint should be copied to {url}",
                failure.found,
                f"it is in {job.run_dir}; {failure.fix}; then --resume --job {job.run_dir.name} --copy-to {url} "
                "copies it",
            )

    def folder(self) -> Path:
        """Return the folder of the run's checkpoint of this step."""
        return Path(str(self.job.run_dir), CHECKPOINTS, folder_name(self.job.step_number))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to a folder or a URL, and wait until it is there. Collective.

        Raises:
            CheckpointError: there is something else, or it can't be written.
        """
        if is_url(path):
            save_copy(self, str(path))
            return
        prepare.check_may_write(Path(path))
        if not self.job.steps.is_saving:
            return
        failure = self.write(Path(path))
        if failure is not None:
            raise failure

    def write_of_run(self) -> CheckpointError | None:
        """Write the run's checkpoint of this step, as `write` does."""
        failure = self.write(self.folder(), self.job.plan.keep)
        if failure is None:
            self.saved_step = self.job.step_number
        return failure

    def write_staged(self, folder: Path) -> CheckpointError | None:
        """Write a checkpoint that is sent elsewhere, as `write` does: it is reported when it has arrived there."""
        self.is_staging = True
        try:
            return self.write(folder)
        finally:
            self.is_staging = False

    def write(self, folder: Path, keep: int = 0) -> CheckpointError | None:
        """Write a checkpoint and wait for it. Collective; all ranks return the same error, or None.

        Args:
            folder: the folder of the checkpoint.
            keep: the number of checkpoints that stay, as `CheckpointWriter.begin` takes it.
        """
        job = self.job
        prepare.check_owner(os.environ)
        if job.rank == 0:
            remove_partial(folder)
        job.world.barrier()
        # No rank writes before what an earlier attempt left is gone.
        with Timed(CHECKPOINT):
            self._begin(folder, keep)
            failure = first_failure(self.writer.wait(), folder, job.world)
        if failure is not None and job.rank == 0:
            remove_partial(folder)  # now no rank is writing any more
        return failure

    def begin_of_run(self) -> None:
        """Begin to write the run's checkpoint of this step. Collective."""
        with Timed(CHECKPOINT):
            self._begin(self.folder(), self.job.plan.keep)
        self.saved_step = self.job.step_number

    def begin_if_missed(self) -> None:
        """Begin the run's checkpoint that was due after the last step, where a process that was lost has not."""
        job = self.job
        every = job.plan.checkpoint_every
        is_due = job.run_dir is not None and job.step_number and every and job.step_number % every == 0
        if is_due and not self.folder().exists():
            self.begin_of_run()

    def _begin(self, folder: Path, keep: int) -> None:
        job = self.job
        prepare.check_owner(os.environ)
        job.first_step.poll(job, waits=True)
        self.finish()
        if not job.steps.is_saving:
            return
        job.steps.take_state()
        job.compare_ranks(now=True)  # before anything is written: each rank writes a part
        shards = job.parallel.local_shards()
        optimizer_parts, optimizer = snapshot.optimizer_state(job.model, job.optimizer, shards, job.world.size)
        kept_tensors, kept_facts = job.kept_objects.state()
        scale = job.parallel.loss_scale
        metadata = {
            "step": job.step_number,
            "position": job.position,
            "seed": job.workload.seed,
            "samples": job.loader.samples,
            "batch_size": job.workload.batch_size,
            "world_size": job.world.size,
            "mesh": job.steps.saved_mesh,
            "optimizer": optimizer,
            "scheduler": snapshot.as_json("the scheduler's state", schedulers.state_of(job.scheduler)),
            "torch": torch.__version__,
            **kept_facts,
            **({} if scale is None else {"loss_scale": scale.state()}),
            **job.facts(),
            **snapshot.config_facts(job.model),
        }
        model_parts = snapshot.model_parts(job.model, shards, job.world.size)
        parts = {**model_parts, **optimizer_parts, **job.kept_objects.average_parts(shards)}
        rank_tensors = snapshot.own_tensors(random_state(job.device), job.parallel.state(), kept_tensors)
        # `begin` copies the tensors before it returns: training may change them while they are written.
        self.writer.begin(folder, parts, rank_tensors, metadata, keep)

    def end_step(self) -> None:
        """End the job's last step, with what is compared and written beside it. Collective."""
        self.job.settle()
        self.job.first_step.poll(self.job, waits=True)
        self.finish()

    def finish(self) -> None:
        """Wait for the run's checkpoint that is being written; where it fails, say so."""
        with Timed(CHECKPOINT):
            failure = self.writer.wait()
        if failure is not None:
            self.saved_step = None
            self.job.notice(str(failure), everywhere=True)

    def load(self, path: str | Path, weights_only: bool, strict: bool) -> None:
        """Do what `job.load` says. Collective."""
        job = self.job
        check_flags(weights_only, strict)
        folder = arguments.path("job.load", "path", path)
        job.settle()
        job.steps.check_may_load()
        job.board.meet("job.load", job.step_number)
        self.finish()
        job.world.barrier()  # no rank is writing any more: all find the same checkpoints
        if is_url(path):
            with fetched(job, str(path), weights_only) as copied:
                self._load_from(copied, str(path), weights_only, strict)
            return
        self._load_from(folder, "", weights_only, strict)

    def _load_from(self, path: Path, url: str, weights_only: bool, strict: bool) -> None:
        """Load from the disk; `url` is the URL from which the folder was read."""
        job = self.job
        if weights_only:
            shards = job.parallel.local_shards()
            parts, names = snapshot.model_parts(job.model, shards, job.world.size), snapshot.names_of_state(job.model)
            weights = read_weights(path, parts, names, strict, job.world, job.notice)
            snapshot.restore_model(job.model, weights, shards)
            return
        if path.is_file():
            raise CheckpointError(
                f"can't load a checkpoint from {path}",
                "it is a file, and a checkpoint is a folder that job.save or the run has written",
                "name that folder; for the weights of a file of safetensors write job.load(path, weights_only=True); "
                f"{OF_TORCH}",
            )
        # Each rank verifies some of the files; a damaged checkpoint is passed over by all of them.
        folder = find_good(path, job.notice, partial(check_files_together, comm=job.world))
        manifest = read_manifest(folder)
        job.check_place(folder, manifest)
        snapshot.check_same_precision(job.optimizer, manifest["optimizer"])
        state = manifest["scheduler"]
        if job.scheduler is not None and state is not None:
            state = schedulers.checked_state(job.scheduler, state)  # refused before anything is changed
        job.leave_step()
        # From here on the job leaves its step, which must not be lost: it is written first, where no checkpoint has it.
        self.last.set_aside()
        self._restore(folder, manifest, state)
        job.go_to(folder, manifest)
        job.restore_own_state(folder, manifest)
        job.events.write(
            {"event": "resumed", "step": job.step_number, "position": job.position, "path": url or str(folder)}
        )

    def _restore(self, folder: Path, manifest: dict[str, Any], scheduler: Any) -> None:
        """Put the tensors and numbers of a checkpoint into the job's objects."""
        job = self.job
        tensors = snapshot.read_state(folder, manifest, job.model, job.parallel.local_shards(), job.world)
        job.kept_objects.load(folder, manifest, snapshot.averages_of(tensors))
        # The optimizer first: it refuses a checkpoint of another one before anything is written to the model.
        snapshot.restore_optimizer(
            job.model, job.optimizer, tensors, manifest["optimizer"], job.parallel.local_shards()
        )
        snapshot.restore_model(job.model, tensors, job.parallel.local_shards())
        if job.scheduler is not None and scheduler is not None:
            schedulers.restore(job.scheduler, scheduler)
        elif job.scheduler is not None or scheduler is not None:
            has, lacks = ("checkpoint", "workload") if job.scheduler is None else ("workload", "checkpoint")
            job.notice(f"the {has} has a learning-rate scheduler, the {lacks} has none: the rate may jump")
        if job.parallel.loss_scale is not None and manifest.get("loss_scale") is not None:
            job.parallel.loss_scale.restore(manifest["loss_scale"])

    def set_loaded(self, folder: Path) -> None:
        """Record that the job is at the step of the checkpoint `folder`, which it loaded.

        Checkpoints of later steps stay until a step from here on is saved: a job may load its best state to evaluate
        it, and end.
        """
        job = self.job
        self.loaded_step = job.step_number
        # Resolved, to be compared with the stale checkpoints' paths.
        self.loaded_folder = folder.resolve()
        self.saved_step = None
        if job.run_dir is not None and job.rank == 0 and not job.events.takes_over:
            # One that takes a lost process's place loads what the job began with, and joins the others after it.
            checkpoints = job.run_dir / CHECKPOINTS
            self.writer.stale[:] = later_than(job.step_number, checkpoints) + list_left(checkpoints)

    def _report(self, event: dict[str, Any]) -> None:
        if event["event"] == "saved" and self.is_staging:
            return  # reported when it has arrived where it was asked for
        self.job.events.write(event)
        if event["event"] == "checkpoint" and self.copier is not None:
            self.copier.begin(Path(event["path"]))
        removed = event.get("removed")
        if removed:
            self.job.notice(
                f"{Path(event['path']).name} is saved, so the checkpoints that the job went back from are removed: "
                f"{', '.join(removed)}"
            )

    def _report_copy(self, event: dict[str, Any]) -> None:
        """Write an event of the thread that copies checkpoints; say what failed."""
        self.job.events.write(event)
        if event["event"] == "copy_failed":
            name = Path(event["path"]).name
            self.job.notice(f"{name} could not be copied to {event['url']}: {event['found']}; it is on the disk")
