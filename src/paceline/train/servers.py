"""The parts of a job that differ when parameter servers update its model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from paceline.nouns.errors import UsageError
from paceline.nouns.record import StepRecord
from paceline.train.data import Batch
from paceline.train.events import peak_memory_bytes
from paceline.train.seed import seed_everything

if TYPE_CHECKING:
    from paceline.parallel.server import ServerParallel
    from paceline.train.job import Job


def batches(job: Job) -> Iterator[Batch]:
    """Yield this worker's part of every global batch, from the step that the others have come to."""
    _join(job)
    # The loader goes through positions in order; after a jump it is made anew.
    is_behind = True
    while is_behind:
        is_behind = False
        for batch in job.loader.training(job.position, job.end):
            yield batch
            if job.position > batch.positions.stop:
                is_behind = True  # others went on without this worker
                break


def begin_step(job: Job) -> None:
    """Seed the step's random numbers: a worker that takes a lost one's place draws what that would have drawn."""
    _join(job)
    seed_everything(job.workload.seed, 1 + job.data_part, job.position)


def end_step(job: Job) -> None:
    """Go to the step that the servers have come to: usually the next."""
    _go_to(job, _parallel(job).step_number)


def take_state(job: Job) -> None:
    """Have the worker's optimizer hold what the servers keep, for a checkpoint."""
    _parallel(job).take_optimizer_state()


def check_may_load(job: Job) -> None:
    """Raise UsageError once the servers have the parameters."""
    if _parallel(job).handle is not None:
        raise UsageError(
            "can't load a checkpoint while servers train the model",
            "they have begun with other parameters",
            "load it before the first batch, or start with `paceline run --resume`",
        )


def _join(job: Job) -> None:
    parallel = _parallel(job)
    if parallel.handle is None:
        # At the first batch and not at the start: a checkpoint may be loaded until then.
        parallel.join(job.optimizer, len(job.loader.data), job.total_steps, job.step_number)
        _go_to(job, parallel.step_number)
        if job.rank == 0 and job.events.takes_over:
            _catch_up(job)


def _catch_up(job: Job) -> None:
    """Write what the lost worker 0 may not have written: its last step's line, and the checkpoint that was due."""
    parallel = _parallel(job)
    stats = parallel.stats_of_answer()
    if stats is not None and job.events.last_step() < job.step_number:
        order = job.loader.order(job.workload.batch_size)
        samples = job.position - order.position_after(job.step_number - 1)
        # Of this process's time and traffic the step took nothing.
        record = StepRecord(
            job.step_number,
            job.position,
            stats.mean,
            stats.weight,
            samples,
            0.0,
            0,
            parallel.norm,
            peak_memory_bytes(),
        )
        job.events.write(record.to_json())
    job.save_if_missed()


def _go_to(job: Job, step: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*optimizer.step.*")  # the servers call it
        if job.scheduler is not None:
            for _ in range(step - job.step_number):
                job.scheduler.step()
    job.step_number = step
    job.position = job.loader.order(job.workload.batch_size).position_after(step)


def _parallel(job: Job) -> ServerParallel:
    return cast("ServerParallel", job.parallel)
