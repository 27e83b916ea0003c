"""Take a job's steps as workers of parameter servers, each of which is at a step of its own."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from paceline.comm.step_times import peak_memory_bytes
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.step_record import StepRecord
from paceline.train.base_job import CollectiveSteps
from paceline.train.data import Batch
from paceline.train.event_log import TAKES_OVER
from paceline.train.schedulers import step_all
from paceline.train.seed import seed_everything

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.parallel.server import ServerEngine
    from paceline.train.job import Job


class ServerSteps(CollectiveSteps):
    """How a worker goes on from step to step. Only worker 0 saves: the servers' state is the same for all."""

    job: Job

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.board_place = dataclasses.replace(job.rank_info, size=1)  # it waits for no other
        self.writer_place = (0, 1)
        self.is_saving = job.rank == 0
        self.saved_mesh = "replicate=1"  # worker 0 writes the whole model
        # The other workers may be at other steps, with other parameters.
        self.holds_replicas = False
        self.evaluation_part = (0, 1)
        self.log_comm = job.comm  # worker 0's numbers are written

    @property
    def parallel(self) -> ServerEngine:
        """Return the worker's end of the servers."""
        return cast("ServerEngine", self.job.parallel)

    def check_start(self, resume: str | None) -> None:
        """Do nothing: the servers refuse a worker that begins with another checkpoint."""

    def check_may_load(self) -> None:
        """Raise UsageError once the servers have the parameters."""
        if self.parallel.handle is not None:
            raise UsageError(
                "can't load a checkpoint while servers train the model",
                "they have begun with other parameters",
                "load it before the first batch, or start with `paceline run --resume`",
            )

    def check_may_keep(self, call: str) -> None:
        """Raise UsageError: each worker is at a step of its own, and only worker 0 writes checkpoints."""
        raise UsageError(
            f"{call} has every rank keep the same in a checkpoint",
            "parameter servers train the model: workers are at steps of their own, and worker 0 alone saves",
            "write a file of your own, such as after job.close(), or train by replicate or shard",
        )

    def begin_run(self) -> None:
        """Have a loop that makes its own batches begin at the right step, with that step's random numbers."""
        if self.job.workload.data is not None:
            return
        if os.environ.get(TAKES_OVER):
            # A worker that takes a lost one's place loads no checkpoint, and its loop looks at its step first.
            self._join()
        self._seed_own_batch(self.job.step_number)

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Draw as after the checkpoint's step; where there is a data set, numbers are drawn anew for every step."""
        if self.job.workload.data is None:
            self._seed_own_batch(int(manifest["step"]))

    def batches(self) -> Iterator[Batch]:
        """Yield this worker's part of every global batch, from the step that the others have come to."""
        job = self.job
        self._join()
        # The loader goes through positions in order; after a jump it is made anew.
        is_behind = True
        while is_behind:
            is_behind = False
            for batch in job.loader.training(job.position, job.end):
                yield batch
                if job.position > batch.positions.stop:
                    is_behind = True  # others went on without this worker
                    break

    def length(self, manifest: dict[str, Any]) -> tuple[int, int]:
        """Return the steps of the training, and the position after the last: a worker's position follows from its step.

        Raises:
            CheckpointError: the steps of the checkpoint had batches of another size.
        """
        saved, now = manifest.get("batch_size"), self.job.workload.batch_size
        if self.job.step_number and saved not in (None, now):
            raise CheckpointError(
                "under parameter servers every step should have batches of one size",
                f"the checkpoint was saved with batch_size={saved}, and the workload has {now}",
                f"resume with batch_size={saved}, or train by replicate or shard",
            )
        return self.job.loader.length()

    def begin_step(self) -> None:
        """Seed the step's random numbers: a worker that takes a lost one's place draws what that would have drawn."""
        self._join()
        job = self.job
        if job.workload.data is not None:  # else the loop has drawn for this step already
            seed_everything(job.workload.seed, 1 + job.data_part, job.position)

    def end_step(self, batch: Batch) -> tuple[int, int]:
        """Return the step that the servers have come to, usually the next, and its position in the data."""
        self._go_to(self.parallel.step_number)
        if self.job.workload.data is None:
            self._seed_own_batch(self.job.step_number)
        return self.job.step_number, self.job.position

    def _seed_own_batch(self, step: int) -> None:
        """Seed what the loop draws for the batch after a step, and what the step then draws."""
        seed_everything(self.job.workload.seed, 1 + self.job.data_part, step)

    def take_state(self) -> None:
        """Have the worker's optimizer hold what the servers keep, for a checkpoint."""
        self.parallel.take_optimizer_state()

    def _join(self) -> None:
        job = self.job
        if self.parallel.handle is not None:
            return
        # At the first batch and not at the start: a checkpoint may be loaded until then.
        self.parallel.join(job.optimizer, len(job.loader.data), job.total_steps, job.step_number)
        self._go_to(self.parallel.step_number)
        if job.rank == 0 and job.events.takes_over:
            self._catch_up()

    def _catch_up(self) -> None:
        """Write what the lost worker 0 may not have written: its last step's line, and the checkpoint that was due."""
        job = self.job
        stats = self.parallel.stats_of_answer()
        if stats is not None and job.events.last_step() < job.step_number:
            samples = job.position - self._position_after(job.step_number - 1)
            # Of this process's time and traffic the step took nothing.
            record = StepRecord(
                job.step_number,
                job.position,
                stats.mean,
                stats.weight,
                samples,
                0.0,
                0,
                self.parallel.norm,
                peak_memory_bytes(),
            )
            job.events.write(record.to_json())
        job.checkpoints.begin_if_missed()

    def _go_to(self, step: int) -> None:
        job = self.job
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*optimizer.step.*")  # the servers call it
            for _ in range(step - job.step_number):
                step_all(job.scheduler)
        job.stand_at(step, self._position_after(step))

    def _position_after(self, steps: int) -> int:
        """Return the position in the data order; it stays where the loop makes its own batches."""
        job = self.job
        if job.workload.data is None:
            return job.position
        return job.loader.order(job.workload.batch_size).position_after(steps)
