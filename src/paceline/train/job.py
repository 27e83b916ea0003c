"""The Job, one rank of a training job: `paceline.distribute(workload)` makes it, a training loop calls its methods."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.comm import api
from paceline.comm.step_times import timed_data
from paceline.nouns.clock import Clock
from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.engine.declared import DeclaredEngine
from paceline.parallel.optimizer_parts import parts_of
from paceline.train import prepare, schedulers
from paceline.train.agree import check_same_data_everywhere
from paceline.train.base_job import BaseJob, CollectiveSteps, StepNumbers
from paceline.train.base_job import Stopped as Stopped  # its public place
from paceline.train.before_update import BeforeUpdate
from paceline.train.data import Batch, no_data
from paceline.train.generate_job import whole_model
from paceline.train.loader import moved
from paceline.train.open_jobs import check_is_first
from paceline.train.seed import seed_everything
from paceline.train.server_steps import ServerSteps
from paceline.train.step import StepResult, train_step

STEPS = {"collectives": CollectiveSteps, "servers": ServerSteps}  # by `Plan.strategy`


def distribute(workload: Workload) -> Job:
    """Make this process one rank of the job that trains `workload`; without a launcher, it is the only one.

    The plan comes from the launcher: `paceline run` writes it, under torchrun it is `replicate=WORLD_SIZE`.

    Args:
        workload: the workload, the same on every rank.

    Returns:
        This rank's job, at step 0; under `paceline run --resume`, at the step of the checkpoint.

    Raises:
        UsageError: this process has a job in the same run directory, or the launcher's variables contradict each other.
        WorkloadError: a part of the workload does not fit the others or the plan.
        MeshError: the plan's mesh does not fit the number of ranks.
        PlanError: the plan can't be met.
        LossError: the loss has the wrong form, where it is tried before the first step.
        CheckpointError: the job resumes, and its checkpoint can't be used.
        PeerLostError: another rank has gone.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        ...     if job.rank == 0 and job.step_number % 4 == 0:
        ...         print(f"step {job.step_number} of {job.total_steps}")
        step 4 of 8
        step 8 of 8
        >>> job.save("out")
    """
    if not isinstance(workload, Workload):
        raise WorkloadError(
            "paceline.distribute should be handed a workload",
            f"it is {shown(workload)}",
            "hand it paceline.Workload(model=..., loss=..., optimizer=..., data=..., batch_size=...)",
        )
    api.init()
    try:
        check_is_first(prepare.run_dir(os.environ))
        return Job(workload, prepare.read_plan(os.environ, api.size()))
    except PacelineError as error:
        rank = api.rank() if error.rank is None else error.rank  # an error may speak of another rank
        raise error.at(rank=rank) from error.__cause__


class Job(BaseJob):
    """One rank of a training job. Every rank calls the same methods in the same order.

    `paceline.distribute` makes it. Attributes and methods that are not listed here serve Paceline's own modules.

    Attributes:
        workload (Workload): the workload that is trained.
        plan (Plan): the parallelism and its options.
        clock (Clock): the clock that measures the seconds of a step.
        model (torch.nn.Module): the user's model, on this rank's device. Where the plan splits it, it has this rank's
            part of the parameters.
        optimizer (torch.optim.Optimizer): the optimizer as the workload made it. Of several it has the groups of all,
            and each by its index.
        scheduler (Any): the schedulers as the workload made them; None without one.
        device (torch.device): the device on which this rank computes.
        rank (int): this rank's number, from 0.
        size (int): the number of ranks.
        step_number (int): the number of optimizer steps done.
        total_steps (int): the number of optimizer steps of the whole training; 0 where only the loop knows, or the end
            of a stream.
        position (int): the number of samples taken from the global order; with the seed it says all about the data.
        last (StepRecord | None): the record of the last step; None before the first.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> sum(parameter.numel() for parameter in job.model.parameters())
        5
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        ...     if job.rank == 0 and job.step_number == job.total_steps:
        ...         print(f"{job.position} samples seen, learning rate {job.optimizer.param_groups[0]['lr']}")
        128 samples seen, learning rate 0.1
    """

    parallel: DeclaredEngine
    before_update: BeforeUpdate | None = None
    unchecked: bool = False  # the ranks are to be compared after the last step, if that is due
    scheduled: list[Any] | None = None  # how often the schedulers have stepped, as far as `step` knows
    other_calls: ClassVar = {
        "backward": (
            "job.backward is a piece of a loop of your own, whose objects paceline.prepare is handed",
            "paceline.distribute has made this job of a paceline.Workload",
            "write job.step(batch), which calls the workload's loss, takes the backward pass and updates",
        ),
    }

    def __init__(self, workload: Workload, plan: Plan, clock: Clock | None = None) -> None:
        super().__init__(workload, plan, clock)
        prepare.check_plan_without_data(workload, plan, self.mesh)
        self._assemble()
        self.steps = STEPS[plan.strategy](self)
        self.scheduler = schedulers.make_schedulers(workload, self.optimizer)
        if not self.parallel.takes_metrics:
            schedulers.check_servers_can_schedule(self.scheduler)
        if workload.before_update is not None:
            self.before_update = BeforeUpdate(workload.before_update, workload.seed, self.device)
            self.parallel.change_gradients = self.before_update
        # What the loop does after a step, by `schedule`, belongs to the step: its checkpoint is written after that.
        self.saves_late = bool(schedulers.by_metric(self.scheduler))
        self._watch_updates()
        seed_everything(workload.seed, 1 + self.random_stream)  # dropout draws from here on
        if self.loader.notice:
            self.notice(self.loader.notice)
        if self.size > 1 and len(self.loader.data):  # of a stream the samples of its first batch
            first = self.loader.first_sample()
            check_same_data_everywhere(len(self.loader.data), first, self.comms.step, self._set_other_data)
        self._begin_run()

    def _set_other_data(self, text: str) -> None:
        """Record, with a notice, that the ranks have different samples; no process has those of all."""
        self.has_same_data = False
        self.notice(text)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part of every global batch from here to the last step; hand each to `step`.

        Yields:
            This rank's part of a global batch. It may be empty when the last batch of an epoch is short; hand it to
            `step` all the same.

        Raises:
            WorkloadError: the workload's data is None.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     if mean < 1.0:  # equal on every rank, so all of them leave the loop here
            ...         break
            >>> job.step_number < job.total_steps
            True
        """
        if self.workload.data is None:
            raise no_data()
        self.model.train()
        for batch in timed_data(self.steps.batches()):
            self.has_taken = True
            yield batch
            self._finish_step()
        self.first_step.poll(self, waits=True)

    def step(self, batch: Any) -> float:
        """Take one optimizer step; return the mean loss of the global batch, the same on every rank.

        Args:
            batch: a batch from `batches`; or this rank's part of a batch of your own. Then the data order is yours too,
                after a resume as well (begin at `step_number`), all ranks must take equally many steps, and the loss
                must add up over the parts: nothing is tried out beforehand.

        Returns:
            The losses' sum divided by their weight, over all ranks and micro-batches.

        Raises:
            UsageError: the job is closed, or this process is forked from the rank's.
            WorkloadError: a batch of your own, and the workload cuts batches or has no steps left.
            PlanError: the optimizer was given more parameters, or some are no longer frozen, and it can't update them
                under the plan.
            LossError: the loss has the wrong form or is not finite; the model is as it was.
            PeerLostError: another rank has gone.
            CollectiveError: ranks that hold the same tensors have come apart.
            CheckpointError: the job was asked to stop, and can't be saved.
            Stopped: the job was asked to stop; it has been saved.

        Examples:
            A loop that makes its own batches, a part of each on every rank:

            >>> import dataclasses
            >>> own = dataclasses.replace(workload, data=None, batch_size=0, epochs=1, steps=100)
            >>> job = paceline.distribute(own)
            >>> per_rank = 32 // job.size
            >>> random = torch.Generator().manual_seed(job.rank)
            >>> while job.step_number < job.total_steps:
            ...     inputs = torch.randn(per_rank, 4, generator=random)
            ...     mean = job.step((inputs, inputs.sum(1, keepdim=True)))
            >>> f"step {job.step_number}, loss {mean:.3f}"
            'step 100, loss 0.000'
        """
        self._check_may_step()
        if self.scheduler is not None:
            self._check_scheduled()
        # A rank that waits in `save` or `load` for this one sees on the board that it went on.
        self.has_begun = True
        if self.board.memory is not None:
            self.board.begin_step()
        self._finish_step()
        self.steps.begin_step()
        self._begin_timing()
        self.is_stepping = True
        if not isinstance(batch, Batch):
            batch = self._own_batch(batch)
        elif 0 <= batch.positions.start < self.position and self.plan.strategy == "collectives":
            self._print_once(
                ["job.step was handed a batch again: it is trained on once more, and the data does not go on"]
            )
        if self.before_update is not None:
            self.before_update.begin_step(self.step_number)
        stats, norm, is_skipped = self._train(batch)
        self.step_number, self.position = self.steps.end_step(batch)
        if self.scheduler is not None:
            self.scheduled = schedulers.counts_of(self.scheduler)
        self.is_stepping = False
        self.unchecked = True
        seconds = self.clock.now_s() - self.began_s
        scale = self.parallel.loss_scale
        mean = stats.mean
        self._write_step(
            StepNumbers(
                mean,
                stats.weight,
                len(batch.positions),
                seconds,
                norm,
                is_skipped,
                None if scale is None else scale.value,
            )
        )
        if self.first_step.is_active:
            self.first_step.poll(self)
        if self.saves_late:
            self.late = stats.is_stopping
        else:
            self._save_if_due(stats.is_stopping)
        return mean

    def _train(self, batch: Batch) -> StepResult:
        """Take the step of a batch, which one process may take too, to compare the first."""
        if self.first_step.is_active:
            self.first_step.begin(self, batch)
        is_stopping = self._is_asked_to_stop()
        try:
            with self.paths.watched() if self.paths.is_watching else nullcontext():
                result = train_step(batch.microbatches, self.parallel, self.optimizer, is_stopping, batch.longest)
        except PacelineError as error:
            rank = self.rank if error.rank is None else error.rank
            raise error.at(rank=rank, step=self.step_number + 1) from error.__cause__
        if self.first_step.is_active:
            self.first_step.step_taken(self)
        return result

    def stand_at(self, step: int, position: int) -> None:
        """Set the step of the job: the servers have come to it without this worker."""
        self.step_number = step
        self.position = position

    def _finish_step(self) -> None:
        """Do what is left of the last step, once the loop is done with it: compare the ranks, save it if that is due.

        Raises:
            CollectiveError: ranks that hold the same tensors have come apart.
            Stopped: the job was asked to stop, and is saved.
        """
        if self.unchecked:
            self.unchecked = False
            if self.board.memory is not None:
                self.board.begin_collective()
            if self.paths.is_watching:
                self.paths.end_step()
            if self.size > 1:
                self.compare_ranks(now=self.step_number == self.total_steps)  # a short job may save nothing
        late, self.late = self.late, None
        if late is not None:
            self._save_if_due(late)

    def _watch_updates(self) -> None:
        """Refuse updates that the loop makes besides `step`: they would take the last step's gradients once more."""
        reference = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            job = reference()
            if job is not None and not job.is_stepping and job.closed_step is None:
                raise UsageError(
                    "job.step(batch) updates the model of a paceline.Workload",
                    f"the loop calls {type(optimizer).__name__}.step() too",
                    "leave it out; a loop that calls it itself hands its objects to paceline.prepare",
                ).at(rank=job.rank, step=job.step_number)

        for optimizer in parts_of(self.optimizer):
            optimizer.register_step_pre_hook(before)

    def _check_scheduled(self) -> None:
        """Raise UsageError if the loop has stepped a scheduler that `step` steps."""
        if self.scheduled not in (None, schedulers.counts_of(self.scheduler)):
            raise UsageError(
                "job.step(batch) steps the workload's schedulers after every update",
                "the loop has stepped one too",
                "leave scheduler.step() out; for one that steps by a metric write job.schedule(metric)",
            ).at(rank=self.rank, step=self.step_number)

    def schedule(self, metric: Any) -> None:
        """Step the schedulers of the workload that step by a metric, such as ReduceLROnPlateau.

        Call it after a step, where the loop has evaluated. The step's checkpoint, if one is due, has it: it is written
        when the loop asks for the next batch.

        Args:
            metric: a number that is the same on every rank, such as a result of `evaluate` or `step`.

        Raises:
            UsageError: there is no such scheduler; the metric is no number, or another on some rank.
            PeerLostError: another rank has gone.

        Examples:
            Halve the learning rate where two evaluations have brought nothing:

            >>> import dataclasses
            >>> plateau = dataclasses.replace(
            ...     workload,
            ...     scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
            ... )
            >>> job = paceline.distribute(plateau)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     if job.step_number % 4 == 0:
            ...         job.schedule(job.evaluate(workload.data)["loss"])
            >>> job.scheduler.num_bad_epochs
            0
        """
        if self.workload.scheduler is None:
            raise UsageError(
                "job.schedule steps the workload's schedulers by a metric",
                "the workload has no scheduler",
                "write scheduler=... in the Workload, or step your own: scheduler.step(metric)",
            )
        number = schedulers.checked_metric(self.scheduler, metric, self.world)
        for scheduler in schedulers.by_metric(self.scheduler):
            scheduler.step(number)

    def whole_model(self) -> torch.nn.Module:
        """Return a copy of the model with whole parameters on this rank, in evaluation mode. Every rank calls it.

        It is a plain module, made by the workload's `model`, for what no `job.step` or `job.evaluate` can do: to sample
        from an autoregressive model, or to search. Calls of it are no collectives, so each rank may call it as often as
        it needs. Training goes on as if it had not been made. Under parameter servers a worker's copy has the
        parameters that it pulled last.

        Returns:
            The copy. It takes the memory of the whole model on each rank, and does not follow later steps.

        Raises:
            WorkloadError: the workload's `model` returns one and the same model each time.
            CollectiveError: another rank goes on with its steps.
            PeerLostError: another rank has gone.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> copy = job.whole_model()
            >>> with torch.no_grad():
            ...     outputs = copy(torch.randn(2, 4))
            >>> copy.training
            False
        """
        self.board.meet("job.whole_model", self.step_number)
        return whole_model(self, "job.whole_model", "each call makes a new one")

    def leave_step(self) -> None:
        """Leave the step at which the job is: a checkpoint's schedulers have stepped otherwise."""
        super().leave_step()
        self.scheduled = None

    def go_to(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Be at the step and the place in the data of a checkpoint, and find the end of the training from there on."""
        super().go_to(folder, manifest)
        # `steps` counts those of any batch size.
        if not self.loader.samples or self.has_own_batches:
            return
        before, (total_steps, self.end) = self.total_steps, self.steps.length(manifest)
        if total_steps != before:
            self._set_total(total_steps)
        if self.position > self.end and manifest.get("loop") is None:
            self.notice(
                f"step {self.step_number} was saved after {self.position} samples, and the {self.workload.epochs} "
                f"epochs of this workload have {self.end}: no step is left"
            )
        saved, now = manifest.get("batch_size", self.workload.batch_size), self.workload.batch_size
        if saved != now:
            self.notice(
                f"step {self.step_number} was saved with batch_size={saved}, the workload has {now}: the job goes on "
                f"after sample {self.position}, to step {self.total_steps or 'the last'}"
            )

    def _own_batch(self, batch: Any) -> Batch:
        """Return a batch that the training loop made itself as one of the job's; the position in the data stays."""
        self._check_own_batch()
        tensors = moved(batch, self.device, self.workload.precision == "float64")
        return Batch([tensors], range(self.position, self.position))

    def _check_own_batch(self) -> None:
        """Check a batch that the training loop made itself; with the first, print what it changes."""
        prepare.check_own_batch(self.workload, self.plan, self.step_number)
        if self.has_own_batches:
            return
        self.has_own_batches = True
        self._set_total(self.workload.steps or 0)
        if self.step_number:
            self.notice(
                f"the job goes on after step {self.step_number} with batches of your own: a loop that does not begin "
                "there (job.step_number) takes its first ones again"
            )


def train_workload(workload: Workload | None) -> None:
    """Train the workload of a file that has no loop; evaluate it at the end if it has an evaluation."""
    if workload is None:
        return
    job = distribute(workload)
    for batch in job.batches():
        job.step(batch)
    if workload.evaluation is not None:
        result = job.evaluate()
        if job.rank == 0:
            print("  ".join(f"{name} {value:.6g}" for name, value in result.items()))
