"""The Job, one rank of a training job: `paceline.distribute(workload)` makes it, a training loop calls its methods."""

from __future__ import annotations

import os
import resource
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from paceline.checkpoint.copies import is_url
from paceline.checkpoint.load import check_files_together, read_own
from paceline.checkpoint.manifest import CHECKPOINTS, find_good, folder_name, read_manifest, remove_partial
from paceline.checkpoint.save import CheckpointWriter
from paceline.comm import api
from paceline.comm.step_times import CHECKPOINT, EVALUATION, Timed, timed_data
from paceline.nouns import arguments
from paceline.nouns.clock import Clock, WallClock
from paceline.nouns.errors import (
    CheckpointError,
    CollectiveError,
    PacelineError,
    PeerLostError,
    UsageError,
    WorkloadError,
)
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.parts import shown
from paceline.nouns.plan import Plan
from paceline.nouns.record import StepRecord
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel.apply import RankPlace
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.optimizer_parts import groups_of, parts_of
from paceline.train import after_failure, last_checkpoint, log, prepare, schedulers, snapshot
from paceline.train import evaluate as evaluation
from paceline.train.agree import FailedTogetherError, check_same_data_everywhere
from paceline.train.assemble import Assembly
from paceline.train.average import Average
from paceline.train.before_update import BeforeUpdate
from paceline.train.best import BEST, Best
from paceline.train.check_saving import check_can_save
from paceline.train.checkpoint_copies import CheckpointCopier, copier_of, fetched, finish_copies, save_copy
from paceline.train.collective_steps import CollectiveSteps
from paceline.train.count_memory import count_memory
from paceline.train.data import Batch, no_data, open_data
from paceline.train.device_batches import moved
from paceline.train.events import FOLDER, MEMORY_UNIT, VERSION, open_events, restart_fact
from paceline.train.first_step import FirstStep, finish_pending
from paceline.train.generate_job import generate_with, whole_model
from paceline.train.kept import SETTINGS, KeptObjects
from paceline.train.kept_values import encode
from paceline.train.last_checkpoint import first_failure
from paceline.train.load_weights import OF_TORCH, check_flags, read_weights
from paceline.train.memory_file import write_memory
from paceline.train.paths import Paths, has_compiled
from paceline.train.pictures import Pictures
from paceline.train.precision import autocast
from paceline.train.replicas import Replicas, Shared, numbers_of_groups
from paceline.train.seed import random_state, restore_random_state, seed_everything
from paceline.train.servers import ServerSteps
from paceline.train.step import StepResult, train_step
from paceline.train.step_board import CLOSE, StepBoard
from paceline.train.step_profiler import StepProfiler
from paceline.train.times_file import TimesFile

_COUNTED_STEP = 2  # of a process, after which its memory is counted: the first step makes the optimizer's state
_LOADS_EVERY = 20  # steps after which it is written how the rows went to experts

STEPS = {"collectives": CollectiveSteps, "servers": ServerSteps}  # by `Plan.strategy`


class Stopped(SystemExit):
    """Raised out of `job.step` once every rank has saved: the job was asked to stop (Ctrl-C, SIGTERM).

    It is no `Exception`, so a loop that catches those does not go on. Let it pass: it ends the process.

    Examples:
        Write a file of your own before the job ends:

        >>> import json, pathlib
        >>> from paceline.train.job import Stopped
        >>> job = paceline.distribute(workload)
        >>> losses = []
        >>> try:
        ...     for batch in job.batches():
        ...         losses.append(job.step(batch))
        ... except Stopped:
        ...     pathlib.Path("losses.json").write_text(json.dumps(losses))
        ...     raise
        >>> len(losses)
        8
    """


def distribute(workload: Workload) -> Job:
    """Make this process one rank of the job that trains `workload`; alone, it is the only one.

    The plan comes from the launcher: `paceline run` writes it, under torchrun it is `replicate=WORLD_SIZE`.

    Args:
        workload: the same on every rank.

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


class Job:
    """One rank of a training job. Every rank calls the same methods in the same order.

    `paceline.distribute` makes it. Attributes and methods that are not listed here serve Paceline's own modules.

    Attributes:
        workload (Workload): what is trained.
        plan (Plan): the parallelism and its options.
        clock (Clock): measures the seconds of a step.
        model (torch.nn.Module): the user's model, on this rank's device. Where the plan splits it, it has this rank's
            part of the parameters.
        optimizer (torch.optim.Optimizer): as the workload made it. Of several it has the groups of all, and each by
            its index.
        scheduler (Any): as the workload made it; None without one.
        device (torch.device): where this rank computes.
        rank (int): this rank's number, from 0.
        size (int): the number of ranks.
        step_number (int): optimizer steps done.
        total_steps (int): optimizer steps of the whole training; 0 where only the loop knows, or the end of a stream.
        position (int): samples taken from the global order; with the seed it says all about the data.
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

    assembly_class = Assembly
    step_number: int
    position: int
    total_steps: int
    is_stepping: bool
    has_own_batches: bool
    before_update: BeforeUpdate | None = None
    unchecked: bool = False  # the ranks are to be compared after the last step, if that is due
    saves_late: bool = False
    has_same_data: bool = True  # on all ranks, as far as their first samples show
    late: bool | None  # a step is done whose checkpoint may be due; whether the job is to stop after it
    last: StepRecord | None
    saved_step: int | None  # of the newest checkpoint that was saved since the last load, or is being written
    loaded_step: int  # at which the job began, or to which `load` went
    loaded_folder: Path | None  # the checkpoint that `load` read last
    left: last_checkpoint.Left | None
    copier: CheckpointCopier | None = None  # of the run's checkpoints, on rank 0
    is_staging: bool = False  # a checkpoint is written to be sent elsewhere
    kept: KeptObjects
    first_step: FirstStep
    best: Best | None = None  # of `save_best`
    closed_step: int | None
    is_closing: bool = False
    scheduled: list[Any] | None = None  # how often the schedulers have stepped, as far as `step` knows
    has_taken: bool = False  # the loop has taken batches of the job
    has_begun: bool = False  # the loop has begun a step

    def __init__(self, workload: Workload, plan: Plan, clock: Clock | None = None) -> None:
        api.check_own_process()
        world = api.world()
        self.workload = workload
        self.plan = plan
        self.clock = clock or WallClock()
        self.rank_info = world.rank_info
        self.rank = world.rank_info.rank
        self.size = world.rank_info.size
        self.device = world.rank_info.device
        self.world = world.comm
        self.ledger = world.comm.ledger
        self.mesh = Mesh.parse(plan.mesh)
        self.mesh.check_fits(self.size)
        workload.check_ranks(self.mesh.data_size)
        self.run_dir = prepare.run_dir(os.environ)
        self.stop_file = prepare.stop_file(os.environ) if self.rank == 0 else None
        if workload.deterministic:
            prepare.be_deterministic()
        self.data_part = self.mesh.data_part(self.rank)
        self.random_stream = self.mesh.random_stream(self.rank)
        self._check_plan_without_data()
        self._assemble()
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
            check_same_data_everywhere(len(self.loader.data), first, self.comms.step, self._note_other_data)
        self._begin_run()

    def _note_other_data(self, text: str) -> None:
        """Say that the ranks have different samples; no process has those of all."""
        self.has_same_data = False
        self.notice(text)

    def _assemble(self) -> None:
        """Split the model over the ranks as the plan says, and check that its batches can be split."""
        place = RankPlace(self.rank, self.device)
        # The data comes before the model: a split model is captured, and the loss tried, on its first samples.
        assembly = self.assembly_class(self.workload, self.plan, place, self._open_data, self.ledger)
        self.comms = assembly.comms
        self.comm = self.comms.data
        placed = assembly.place_model(assembly.example())
        self.told: set[str] = set()
        self._tell(placed.notices)
        if assembly.cut_notice:
            self.notice(assembly.cut_notice)
        self.loader = assembly.loader
        self._check_may_cut(placed)
        assembly.finish(placed)
        self.assembly = assembly
        self.parallel = assembly.parallel
        self.model = self.parallel.model
        self.optimizer = assembly.optimizer
        self.steps = STEPS[self.plan.strategy](self)

    def _tell(self, notices: Sequence[str]) -> None:
        """Print what of this the person was not told yet."""
        for notice in notices:
            if notice not in self.told:
                self.told.add(notice)
                self.notice(notice)

    def _check_plan_without_data(self) -> None:
        """Raise PlanError where the plan needs samples, or a function of them, and there are none."""
        prepare.check_plan_without_data(self.workload, self.plan, self.mesh)

    def _check_may_cut(self, placed: ModelAdapter) -> None:
        """Raise LossError where the loss is no sum over samples, and batches are to be cut."""
        prepare.check_may_cut(placed, self.workload, self.loader, self.comms, self.mesh, self.notice)

    def _open_data(self) -> Any:
        return () if self.workload.data is None else open_data("data", self.workload.data)

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
            batch: from `batches`; or this rank's part of a batch of your own. Then the data order is yours too, after
                a resume as well (begin at `step_number`), all ranks must take equally many steps, and the loss must
                add up over the parts: nothing is tried out beforehand.

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
        self.began_s = self.clock.now_s()
        self.sent_before = self.ledger.total_bytes
        self.is_stepping = True
        if not isinstance(batch, Batch):
            batch = self._own_batch(batch)
        elif 0 <= batch.positions.start < self.position and self.plan.strategy == "collectives":
            self._tell(["job.step was handed a batch again: it is trained on once more, and the data does not go on"])
        if self.before_update is not None:
            self.before_update.step = self.step_number
        stats, norm, is_skipped = self._train(batch)
        self.steps.end_step(batch)
        if self.scheduler is not None:
            self.scheduled = schedulers.counts_of(self.scheduler)
        self.last = StepRecord(
            self.step_number,
            self.position,
            stats.mean,
            stats.weight,
            len(batch.positions),
            round(self.clock.now_s() - self.began_s, 6),
            self.ledger.total_bytes - self.sent_before,
            norm,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MEMORY_UNIT,
            is_skipped,
            None if self.parallel.loss_scale is None else self.parallel.loss_scale.value,
        )
        self.is_stepping = False
        self.unchecked = True
        self._tell(self.parallel.notices)
        self._write_step()
        if self.first_step.is_active:
            self.first_step.poll(self)
        if self.saves_late:
            self.late = stats.is_stopping
        else:
            self._save_if_due(stats.is_stopping)
        return stats.mean

    def _train(self, batch: Batch) -> StepResult:
        """Take the step of a batch, which one process may take too, to compare the first."""
        if self.first_step.is_active:
            self.first_step.begin(self, batch)
        control = (self._is_asked_to_stop(), batch.longest)
        try:
            with self.paths.watched() if self.paths.is_watching else nullcontext():
                result = train_step(batch.microbatches, self.parallel, self.optimizer, control)
        except PacelineError as error:
            rank = self.rank if error.rank is None else error.rank
            raise error.at(rank=rank, step=self.step_number + 1) from error.__cause__
        if self.first_step.is_active:
            self.first_step.step_taken(self)
        return result

    def backward(self, *arguments: Any, **named: Any) -> None:
        """Raise UsageError: `step` runs the loss of the workload and its backward pass."""
        raise UsageError(
            "job.backward is a piece of a loop of your own, whose objects paceline.prepare is handed",
            "paceline.distribute has made this job of a paceline.Workload",
            "write job.step(batch), which calls the workload's loss, takes the backward pass and updates",
        )

    def _watch_updates(self) -> None:
        """Refuse updates that the loop makes besides `step`: they would take the last step's gradients once more."""
        this = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            job = this()
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

    def _write_step(self) -> None:
        """Write the record of the last step, and where its time went."""
        assert self.last is not None
        is_shown = self.events.file is not None or bool(self.events.sinks)
        if is_shown or self.times_file.file is not None:
            times = self.times_file.end_step(self.step_number)
            if is_shown:
                self.events.write({**self.last.to_json(), "times": times})
        # Every rank knows whether somebody reads events: all take part, or none.
        if self.step_number % _LOADS_EVERY == 0 and (self.run_dir is not None or self.workload.sinks):
            for load in self.parallel.expert_loads():
                self.events.write(load.to_json(self.step_number))
        if self.profiler.steps is not None:
            self.profiler.step_ended(self.step_number)
        if self.run_dir is not None and self.times_file.steps == _COUNTED_STEP:
            content = count_memory(self.models(), self.optimizer, self.device)
            write_memory(self.run_dir, self.rank, {"step": self.step_number, **content})

    def schedule(self, metric: Any) -> None:
        """Step the schedulers of the workload that step by a metric, such as ReduceLROnPlateau.

        Call it after a step, where the loop has evaluated. The step's checkpoint, if one is due, has it: it is written
        when the loop asks for the next batch.

        Args:
            metric: a number, the same on every rank: what `evaluate` or `step` returned.

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
        for each in schedulers.by_metric(self.scheduler):
            each.step(number)

    def evaluate(self, data: Any = None, score: evaluation.Score | None = None, metrics: Any = None) -> dict[str, Any]:
        """Evaluate over all ranks, each sample once.

        Args:
            data: a data set; the workload's `evaluation` where None.
            score: `score(model, batch)` returns a dict of (sum, weight); the workload's where None.
            metrics: a torchmetrics Metric or MetricCollection that `score` updates; computed from the counts
                of all ranks.

        Returns:
            The ratio of every name, and under "metrics" what `metrics` computed. The same on every rank. NaN where the
            weights add up to 0.

        Raises:
            WorkloadError: there is no data set for evaluation, or `score` returns no dict, or other names on some rank.
            CollectiveError: another rank goes on with its steps.
            PeerLostError: another rank has gone.

        Examples:
            Two ratios in one pass. Without `score` it is the loss:

            >>> def score(model, batch):
            ...     inputs, targets = batch
            ...     errors = (model(inputs) - targets).abs()
            ...     return {"mean error": (errors.sum(), len(errors)), "below 9": ((errors < 9).sum(), len(errors))}
            >>> job = paceline.distribute(workload)
            >>> held_out = torch.utils.data.TensorDataset(torch.ones(10, 4), torch.full((10, 1), 4.0))
            >>> ratios = job.evaluate(held_out, score)
            >>> print(f"{ratios['mean error']:.1f} {ratios['below 9']:.0%}")
            4.7 100%
            >>> list(job.evaluate(held_out))
            ['loss']
        """
        if score is not None:
            arguments.function("job.evaluate", "score", score, "score(model, batch), which returns a dict")
        evaluation.check_metrics(metrics)
        self._settle()
        with Timed(EVALUATION):
            return self._evaluate(data, score, metrics)

    def _evaluate(self, data: Any, score: Any, metrics: Any) -> dict[str, Any]:
        # Evaluation is collective: a rank that is in a later step would never come.
        self.board.meet("job.evaluate", self.step_number)
        opened = prepare.evaluation_data(self.workload, data)
        loader = self.assembly.make_loader(opened, self.steps.evaluation_part)
        score = score or self.workload.score or self._score
        prepare.check_can_score(self.parallel.placed, metrics)
        with autocast(self.workload.precision, self.device.type):
            batches = loader.evaluation()
            is_apart = self.plan.strategy == "collectives" and self.mesh.size("replicate") == self.size
            result: dict[str, Any] = evaluation.evaluate(self.parallel, batches, score, self.comm, metrics, is_apart)
        self.events.write({"event": "evaluation", "step": self.step_number, **result})
        if metrics is not None:
            result["metrics"] = evaluation.reduce_metric(metrics, self.comm)
        return result

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, float]:
        """Write numbers of the loop's own to the job's events and sinks, over all ranks. Call it on every rank.

        Args:
            values: a dict, for names that can't be keywords. A value is a pair, a sum and its weight, which are added
                up over the ranks and divided, as the loss is; or a number, which counts once on each rank: the mean
                over the ranks.
            more: the same, by keyword.

        Returns:
            The numbers as they are written, the same on every rank; NaN where weights add up to 0. Under `server` each
            worker's own; worker 0's are written.

        Raises:
            UsageError: the job is closed; or a value is neither, or a name is empty, too long or has characters that
                don't print.
            WorkloadError: ranks have other names.
            CollectiveError: another rank goes on with its steps.
            PeerLostError: another rank has gone.

        Examples:
            Three of four right. With a second rank that has one of two it is 4 / 6:

            >>> job = paceline.distribute(workload)
            >>> predictions, labels = torch.tensor([1, 2, 0, 1]), torch.tensor([1, 2, 0, 0])
            >>> job.log({"held out/accuracy": ((predictions == labels).sum(), len(labels))}, lr=0.1)
            {'held out/accuracy': 0.75, 'lr': 0.1}
        """
        self._check_may_log("job.log")
        if values is not None and not isinstance(values, Mapping):
            raise log.no_names(values)
        self.board.meet("job.log", self.step_number)
        numbers = log.reduced({**(values or {}), **more}, self.steps.log_comm, self.device)
        if numbers:
            fields = {log.field_of(name): number for name, number in numbers.items()}
            self.events.write({"event": "logged", "step": self.step_number, **fields})
        return numbers

    def log_text(self, name: str, text: str) -> None:
        """Write a text to the job's events and sinks: rank 0's; on other ranks it does nothing.

        Args:
            name: of the text.
            text: at most 100,000 characters.

        Raises:
            UsageError: the job is closed; or the text or the name is none, or too long.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> job.log_text("generated", "ROMEO: What is it?")
        """
        self._check_may_log("job.log_text")
        event = {"event": "text", "name": log.checked_name(name), "text": log.checked_text(name, text)}
        self.events.write({**event, "step": self.step_number})

    def log_picture(self, name: str, picture: Any) -> None:
        """Write a picture to the run directory's `pictures` and to the sinks: rank 0's; on other ranks it does nothing.

        Args:
            name: of the picture.
            picture: a figure of matplotlib, an image of Pillow, or an array or tensor, (height, width) or
                (height, width, 3 or 4), of uint8 or of numbers from 0 to 1. Where the disk is full it is left out,
                with a notice.

        Raises:
            UsageError: the job is closed; or it is none of these, or Pillow is not installed.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> job.log_picture("weights", torch.rand(16, 16))
        """
        self._check_may_log("job.log_picture")
        log.checked_name(name)
        if not self.events.is_open:
            return
        try:
            path = self.pictures.write(name, picture, self.step_number)
        except OSError as error:  # a full disk ends no training
            self.notice(f"the picture {name!r} of step {self.step_number} can't be written ({error.strerror})")
            return
        self.events.write({"event": "picture", "name": name, "path": path, "step": self.step_number})

    def _check_may_log(self, call: str) -> None:
        """Raise UsageError once events and sinks have ended."""
        if self.closed_step is not None:
            raise UsageError(
                f"{call} writes to the job's events and sinks",
                f"they have ended: job.close() ended the job after step {self.closed_step}",
                f"call {call} before job.close()",
            )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to the folder `path` and wait until it is on the disk.

        Under `paceline run` the job also saves by itself: every `checkpoint_every` steps, and its last step.

        Args:
            path: a folder that is new, empty or has a checkpoint, which is replaced. Every rank writes its file there.
                A URL such as s3://bucket/folder names one in an object store, to which rank 0 copies it.

        Raises:
            CheckpointError: `path` holds something else, or can't be written.
            CollectiveError: another rank goes on with its steps, or ranks that hold the same tensors have come apart.
            PeerLostError: another rank has gone.

        Examples:
            Keep the best state:

            >>> job = paceline.distribute(workload)
            >>> best = float("inf")
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     if mean < best:
            ...         best = mean
            ...         job.save("best")
            >>> import pathlib
            >>> pathlib.Path("best", "manifest.json").exists()
            True
        """
        folder = arguments.path("job.save", "path", path)
        self._settle()
        self.board.meet("job.save", self.step_number)
        if is_url(path):
            save_copy(self, str(path))
            return
        prepare.check_may_write(folder)
        if not self.steps.is_saving:
            return
        failure = self.write_checkpoint(folder)
        if failure is not None:
            raise failure

    def load(self, path: str | Path, weights_only: bool = False, strict: bool = True) -> None:
        """Go back to the checkpoint at `path`, or to the newest whole one in that folder.

        Any mesh may have saved it. Under the same one every random state is restored too and training goes on
        bit for bit. Under `paceline run`, checkpoints of later steps stay until a step from here on is saved.

        Args:
            path: a checkpoint, or a folder of checkpoints, such as `runs/JOB/checkpoints`; every rank must see it.
                Or the URL of one in an object store, which rank 0 reads for all.
            weights_only: take parameters and buffers alone, and stay at this step: the optimizer, the scheduler, the
                data and what `keep` and `ema` have stay as they are. Then `path` may also be a file of safetensors, or
                a folder with model.safetensors. Values are converted to the model's dtypes.
            strict: with `weights_only`, refuse names that only one side has; False leaves them out and says so.

        Raises:
            CheckpointError: none is whole, or it is of another model, optimizer or data set.
            UsageError: parameter servers train the model already; or `strict` is False without `weights_only`.
            CollectiveError: another rank goes on with its steps.
            PeerLostError: another rank has gone.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> batches = job.batches()
            >>> for _ in range(3):
            ...     mean = job.step(next(batches))
            >>> job.save("third")
            >>> after = [job.step(batch) for batch in batches]
            >>> job.load("third")
            >>> job.step_number
            3
            >>> [job.step(batch) for batch in job.batches()] == after
            True
        """
        check_flags(weights_only, strict)
        folder = arguments.path("job.load", "path", path)
        self._settle()
        self.steps.check_may_load()
        self.board.meet("job.load", self.step_number)
        self.finish_save()
        self.world.barrier()  # no rank is writing any more: all find the same checkpoints
        if is_url(path):
            with fetched(self, str(path), weights_only) as copied:
                self._load_from(copied, str(path), weights_only, strict)
            return
        self._load_from(folder, "", weights_only, strict)

    def _load_from(self, path: Path, url: str, weights_only: bool, strict: bool) -> None:
        """Load from the disk; `url` is where that was read from."""
        if weights_only:
            held = self._held()
            model = snapshot.model_parts(self.model, held, self.world.size), snapshot.names_of_state(self.model)
            weights = read_weights(path, model, strict, self.world, self.notice)
            snapshot.restore_model(self.model, weights, held)
            return
        if path.is_file():
            raise CheckpointError(
                f"can't load a checkpoint from {path}",
                "it is a file, and a checkpoint is a folder that job.save or the run has written",
                "name that folder; for the weights of a file of safetensors write job.load(path, weights_only=True); "
                f"{OF_TORCH}",
            )
        # Each rank verifies some of the files; a damaged checkpoint is passed over by all of them.
        folder = find_good(path, self.notice, partial(check_files_together, comm=self.world))
        manifest = read_manifest(folder)
        self._check_same_job(folder, manifest)
        snapshot.check_same_precision(self.optimizer, manifest["optimizer"])
        state = manifest["scheduler"]
        if self.scheduler is not None and state is not None:
            state = schedulers.checked_state(self.scheduler, state)  # refused before anything is changed
        self.late = self.scheduled = None
        # From here on the job leaves its step, which must not be lost: it is written first, where no checkpoint has it.
        last_checkpoint.set_aside(self)
        tensors = snapshot.read_state(folder, manifest, self.model, self._held(), self.world)
        self.kept.load(folder, manifest, snapshot.averages_of(tensors))
        if BEST in self.kept.saved:  # the next checkpoint has it too, though nothing may be better until then
            self._begin_best()
        # The optimizer first: it refuses a checkpoint of another one before anything is written to the model.
        held = self._held()
        snapshot.restore_optimizer(self.model, self.optimizer, tensors, manifest["optimizer"], held)
        snapshot.restore_model(self.model, tensors, self._held())
        if self.scheduler is not None and state is not None:
            schedulers.restore(self.scheduler, state)
        elif self.scheduler is not None or state is not None:
            if self.scheduler is None:
                has, lacks = "checkpoint", "workload"
            else:
                has, lacks = "workload", "checkpoint"
            self.notice(f"the {has} has a learning-rate scheduler, the {lacks} has none: the rate may jump")
        if self.parallel.loss_scale is not None and manifest.get("loss_scale") is not None:
            self.parallel.loss_scale.restore(manifest["loss_scale"])
        self.step_number = manifest["step"]
        self.position = manifest["position"]
        self.loader.go_to(manifest)
        self._go_on_with(manifest)
        last_checkpoint.go_back(self, folder)
        self.first_step.end()
        self.first_step = FirstStep()
        self.steps.restore_own_state(folder, manifest)
        self.events.write(
            {"event": "resumed", "step": self.step_number, "position": self.position, "path": url or str(folder)}
        )

    def _check_same_job(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint is at a place in the data to which this job can't come."""
        end = self.loader.length()[1] if self.loader.samples else 0
        prepare.check_same_job(folder, manifest, self.workload, self.loader.samples, end)

    def _go_on_with(self, manifest: dict[str, Any]) -> None:
        """Find the end of the training from the checkpoint's place on: `steps` counts those of any batch size."""
        if not self.loader.samples or self.has_own_batches:
            return
        before, (self.total_steps, self.end) = self.total_steps, self.steps.length(manifest)
        if self.total_steps != before:
            self.events.write({"event": "own_batches", "total_steps": self.total_steps})
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

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore what belongs to this rank alone, if the checkpoint is of the same mesh: random states, compression.

        Under another mesh no rank of now is one of then, so each draws from a new random stream.
        """
        # Each rank's file has its own random states and residuals: they fit a rank at the same place of the same mesh.
        if (manifest["world_size"], manifest.get("mesh")) == (self.size, str(self.mesh)):
            rank_tensors = read_own(folder, manifest, self.rank)
            restore_random_state(snapshot.part(rank_tensors, "random/"), self.device)
            if not snapshot.restore_wire(self.parallel.state(), rank_tensors):
                self.notice(f"{folder.name} was saved with other compression: what compression left out so far is lost")
        else:
            seed_everything(self.workload.seed, 1 + self.random_stream, self.position)
            ranks = f"{manifest['world_size']} ranks ({manifest.get('mesh')})"
            self.notice(f"{ranks} saved {folder.name}, {self.size} ({self.mesh!s}) go on: dropout draws other numbers")

    def keep(self, name: str, target: Any, per_rank: bool = False) -> Any:
        """Have checkpoints save and restore an object of yours, such as counters, a replay buffer or an early stopper.

        Call it once for each object, after `distribute` or `prepare`, on every rank. A resumed job gives the object its
        state of the checkpoint here; `load` does so too.

        Args:
            name: of letters, digits, dots, - and _; one for each object.
            target: an object with `state_dict()` and `load_state_dict(state)`; or a dict, list, deque, tensor, array or
                random generator (torch's, Python's or numpy's), which is changed in place. What is in it must be
                numbers, strings, lists, tuples, sets, dicts, bytes, tensors and arrays.
            per_rank: each rank has a state of its own; the job then resumes on as many ranks. False: it is the same on
                all of them, which is compared at each checkpoint.

        Returns:
            `target`.

        Raises:
            UsageError: the name is none, or taken; or parameter servers train the model.
            WorkloadError: the state can't be kept; or, at a checkpoint, it is not the same on every rank.
            CheckpointError: the job resumes, and the state that was saved does not fit the object.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> progress = job.keep("progress", {"best": float("inf"), "bad": 0})
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     progress["bad"] = 0 if mean < progress["best"] else progress["bad"] + 1
            ...     progress["best"] = min(mean, progress["best"])
            >>> progress["best"] <= mean
            True
        """
        arguments.flag("job.keep", "per_rank", per_rank)
        self._keeps("job.keep")
        self.kept.add(name, target, per_rank)
        return target

    def keep_settings(self, **settings: Any) -> None:
        """Keep in checkpoints what a job can't change on the way, and refuse to resume with other values.

        Such as the data that it trains on, or how they are split: a resumed job with others would train on both, and
        call the result that of one. Call it once, after `distribute` or `prepare`, on every rank: it compares there,
        and not in a later `job.load`.

        Args:
            settings: numbers, strings, None, and tuples of these, the same on every rank; of data a digest or a count.

        Raises:
            UsageError: the job resumes, and began with another value; it was called before; or parameter servers train
                the model.
            WorkloadError: a value can't be kept.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> job.keep_settings(data="letters, 64 samples", fold=2)
        """
        encode("job.keep_settings", settings, [])  # what can't be kept is refused now, not at the first checkpoint
        kept: dict[str, Any] = self.keep(SETTINGS, {})
        for name, value in settings.items():
            if name in kept and kept[name] != value:
                raise UsageError(
                    f"{name} = {value!r:.80}",
                    f"the job that resumes began with {name} = {kept[name]!r:.80}",
                    "resume with that, or begin another job: without --resume, under another --job",
                ).at(rank=self.rank, step=self.step_number)
        kept.update(settings)

    def ema(self, decay: float, name: str = "ema") -> Average:
        """Begin a moving average of the trained parameters, which checkpoints have and a resumed job goes on with.

        Each rank averages the part of the parameters that it has, under any plan but parameter servers.

        Args:
            decay: the share of the average that stays with each `update()`, from 0 to below 1.
            name: of the average in checkpoints; several need different ones.

        Returns:
            The average: `update()` after each step, and `with ema.applied():` to evaluate or save it.

        Raises:
            UsageError: the name is none, or taken; `decay` is no such number; or parameter servers train the model.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> ema = job.ema(0.99)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     ema.update()
            >>> with ema.applied():
            ...     job.save("averaged")  # `paceline export averaged` exports the average
        """
        self._keeps("job.ema")
        average = Average(self._named, self._held, decay)
        self.kept.add_average(name, average)
        return average

    def save_best(self, metric: Any, mode: str = "min", path: str | Path | None = None) -> bool:
        """Save the job to a folder of its own if `metric` is better than with every earlier call for that folder.

        What the best was is in the checkpoints: a resumed job goes on from it.

        Args:
            metric: a number, the same on every rank, such as what `evaluate` returned. NaN is never better.
            mode: "min" or "max": which metrics are better.
            path: the folder, as `save` takes it; `best` in the run directory where None, or in the current folder where
                there is no run directory.

        Returns:
            Whether it was better, and is saved.

        Raises:
            UsageError: the metric is no number, or another on some rank; `mode` is neither, or not that of the earlier
                calls; or parameter servers train the model.
            CheckpointError: it can't be written.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     if job.step_number % 4 == 0:
            ...         is_better = job.save_best(job.evaluate(workload.data)["loss"])
            >>> is_better
            True
        """
        if path is not None:
            arguments.path("job.save_best", "path", path)
        self._keeps("job.save_best")
        self._settle()
        self.board.meet("job.save_best", self.step_number)
        if path is None:
            path = Path(self.run_dir or ".", "best")
        best = self._begin_best()
        if not best.is_better(metric, mode, str(path), self.world):
            return False
        best.note(metric, mode, str(path), self.step_number)
        self.save(path)
        return True

    def _keeps(self, call: str) -> None:
        """Have a step's checkpoint written once the loop is done with the step: it changes what is kept after it."""
        self.steps.check_may_keep(call)
        self.saves_late = True

    def _begin_best(self) -> Best:
        if self.best is None:
            self.best = Best()
            self.kept.add(BEST, self.best.states, per_rank=False)
        return self.best

    def _named(self) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters that are on this rank, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if not parameter.is_meta}

    def generate(self, prompts: Any, max_new_tokens: int, **options: Any) -> list[torch.Tensor]:
        """Continue rows of tokens with a causal language model, under any plan. Training goes on as if it had not been.

        The model takes token numbers, (rows, length), and returns their logits, (rows, length, vocabulary): as a
        tensor, as `.logits` or in a tuple such as `(logits, loss)`. Any such module will do, or a causal model of
        transformers. One with `forward(tokens, cache=None)` is handed a dict, from call to call, in which it keeps keys
        and values; then `tokens` are those that follow.

        Args:
            prompts: (rows, length) whole numbers, or a list of vectors; the same on every rank, which share them out.
            max_new_tokens: at most so many for each row.
            options: `temperature` (0: greedy), `top_k`, `top_p`, `end`, `seed` and `cache`, as
                [Decoding][paceline.nouns.decoding.Decoding] has them. `cache=True` under `tensor` and `pipeline` makes
                a copy of the whole model on each rank for the call. And `model`: which one, where a loop has several.

        Returns:
            Each row with its prompt, up to and with its end token; the same on every rank.

        Raises:
            UsageError: an option is unknown, or not as it should be.
            WorkloadError: the prompts are no tokens, or differ between ranks; or the model is no causal language model,
                takes fewer positions, or has no cache where one is asked for.
            PeerLostError: another rank has gone.

        Examples:
            A model that counts, whose next token is one more:

            >>> class Counter(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.scale = torch.nn.Parameter(torch.ones(()))
            ...
            ...     def forward(self, tokens):
            ...         return self.scale * torch.nn.functional.one_hot((tokens + 1) % 10, 10)
            >>> model = Counter()
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> [row.tolist() for row in job.generate([[3, 4], [8]], max_new_tokens=3)]
            [[3, 4, 5, 6, 7], [8, 9, 0, 1]]
        """
        self._settle()
        self.board.meet("job.generate", self.step_number)
        return generate_with(self, prompts, max_new_tokens, options)

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
        self._settle()
        self.board.meet("job.whole_model", self.step_number)
        return whole_model(self, "job.whole_model", "each call makes a new one")

    def models(self) -> list[torch.nn.Module]:
        """Return the job's models, as the user's code calls them."""
        return [self.model]

    def close(self, save: bool = True) -> None:
        """End the job: save the last step that it trained if it runs under `paceline run`, and finish writing.

        It takes no step after that. It can still load a checkpoint, evaluate and save to a folder. The end of the file
        closes a job that is open.

        Args:
            save: False leaves the last step unsaved.

        Raises:
            CheckpointError: under `paceline run`, the last step can't be saved; says where it was saved instead.
            CollectiveError: another rank goes on with its steps.
            PeerLostError: another rank has gone.

        Examples:
            Train first, then evaluate the model that a run would keep:

            >>> job = paceline.distribute(workload)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            >>> job.close()
            >>> job.evaluate(workload.data)["loss"] < mean
            True
        """
        arguments.flag("job.close", "save", save)
        if self.closed_step is not None:
            return  # by the file itself; the worker closes what is open at the file's end
        self.is_closing = True
        is_saved = save and self.run_dir is not None
        if is_saved:
            self.check_has_trained()
            self.board.meet(CLOSE, self.step_number)
        self.finish_last_step()
        if is_saved:
            last_checkpoint.save_last_step(self)
            finish_copies(self)
        else:
            last_checkpoint.discard_left(self)
        self.closed_step = self.step_number
        self.paths.stop()
        self.times_file.close()
        self.profiler.close(self.step_number)
        self.events.write({"event": "end", "step": self.step_number, "ledger": self.ledger.rows()})
        self.events.close()
        self.pictures.close()
        self.board.close()
        self.parallel.close()
        for of_run in _run_jobs:
            of_run.forget(self)
        _launched_job.clear()

    def finish_last_step(self) -> None:
        """End the last step, with what is compared and written beside it. Collective."""
        self._settle()
        self.first_step.poll(self, waits=True)
        self.finish_save()

    @property
    def is_at_step(self) -> bool:
        """True if nothing is left to do of the last step, so that a job can go on from a checkpoint of now."""
        # What the loop does after a step that is saved late belongs to it, but for the last step of all.
        return not self.is_stepping and (self.late is None or self.step_number == self.total_steps)

    @property
    def may_be_done(self) -> bool:
        """True if the last step may be that of the whole training."""
        return not self.is_stepping and self.step_number == self.total_steps

    def _settle(self) -> None:
        """Do nothing: a step has ended when `step` returns."""

    def check_has_trained(self, where: str = "its file made it, and has ended") -> None:
        """Raise UsageError if the file has taken no step, and has neither gone on with a job nor done anything else.

        Args:
            where: what the job has come to.
        """
        is_apart = self.plan.strategy == "servers"  # the other workers may have taken all
        if self.step_number != self.loaded_step or self.last is not None or is_apart or self._is_asked_to_stop():
            return
        found = "the file ended, and its loop was not entered"
        if self.has_taken or self.has_begun:
            found = "the loop took batches, and trained on none"
            if self.has_begun:
                found = "job.backward was called, and no optimizer stepped"
        elif self.board.has_met:  # it evaluates, say
            return
        # A resumed loop may find that nothing is left once it has taken a batch.
        if not self.loaded_step or self.has_begun:
            raise UsageError(
                f"the job should train: {where}",
                f"0 steps were taken: {found}",
                "call job.step(batch) for every batch; in a loop of your own optimizer.step() after job.backward(loss)",
            ).at(rank=self.rank)

    def _check_may_step(self) -> None:
        if os.getpid() != self.process:
            api.check_own_process()
        if self.closed_step is not None:
            raise UsageError(
                f"can't take step {self.step_number + 1} of the job",
                f"the job is closed: job.close() ended it after step {self.closed_step}",
                "call job.close() after the last step, or leave it out, since the end of the file closes the job; to "
                "save on the way, write job.save(FOLDER)",
            ).at(rank=self.rank, step=self.step_number + 1)

    def _own_batch(self, batch: Any) -> Batch:
        """Return a batch that the training loop made itself as one of the job's; the position in the data stays."""
        self._check_own_batch()
        tensors = moved(batch, self.device, self.workload.precision == "float64")
        return Batch([tensors], range(self.position, self.position))

    def _check_own_batch(self) -> None:
        """Check a batch that the training loop made itself; with the first, say what it changes."""
        prepare.check_own_batch(self.workload, self.plan, self.step_number)
        if self.has_own_batches:
            return
        self.has_own_batches = True
        self.total_steps = self.workload.steps or 0
        self.events.write({"event": "own_batches", "total_steps": self.total_steps})
        if self.step_number:
            self.notice(
                f"the job goes on after step {self.step_number} with batches of your own: a loop that does not begin "
                "there (job.step_number) takes its first ones again"
            )

    def _score(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": self.workload.loss(model, batch)}

    def _begin_run(self) -> None:
        prepare.learn_owner(os.environ)
        prepare.check_owner(os.environ)
        self.total_steps, self.end = self.loader.length()
        self.step_number = 0
        self.position = 0
        self.last = None
        self.late = None
        self.saved_step = None
        self.loaded_step = 0
        self.loaded_folder = None
        self.left = None
        self.closed_step = None
        self.first_step = FirstStep()
        self.kept = KeptObjects(self.world, self.notice)
        self.kept.add_extra_state(self.model, is_checked=self.run_dir is not None)
        self.replicas = Replicas(self.world.aside(), self._shared)
        self.paths = Paths(self.comm.aside(), self.notice)
        if self.plan.is_compiled or has_compiled(self.model):
            self.paths.leave_out()
        self.has_own_batches = False
        self.is_stopping = threading.Event()
        self.is_stepping = False  # stays set when a step fails
        self.process = os.getpid()
        self.times_file = TimesFile(self.run_dir, self.rank)  # before others ask the newest job for it
        self.profiler = StepProfiler(self.run_dir, self.rank, os.environ, partial(self.notice, everywhere=True))
        _newest_job[:] = [weakref.ref(self)]
        _launched_job[:] = [self] if FOLDER in os.environ else []
        self.board = StepBoard(self.steps.board_place)
        check_owner = partial(prepare.check_owner, os.environ)
        self.writer = CheckpointWriter(*self.steps.writer_place, self._report_save, check_owner=check_owner)
        self.pictures = Pictures(self.run_dir)
        self.events = open_events(self.rank, self.run_dir, self.workload.sinks)
        self.events.write(
            {
                # Before `resumed`: who reads the file backwards (`last_step`) stops at the first of the two.
                "event": "start",
                "version": VERSION,
                "total_steps": self.total_steps,
                "samples": self.loader.samples,
                "batch_size": self.workload.batch_size,
                "world_size": self.size,
                **restart_fact(os.environ),
            }
        )
        if self.run_dir is None:
            return
        # From here on SIGTERM asks for a checkpoint and an end after the current step.
        before = signal.signal(signal.SIGTERM, partial(_ask_to_stop, self.is_stopping))
        try:
            self._find_start(self.run_dir)
            self.steps.begin_run()
            self.profiler.step_ended(self.step_number)
        except BaseException:  # the file may catch it, and make another job
            signal.signal(signal.SIGTERM, before)
            self.events.close()
            self.times_file.close()
            self.parallel.close()
            raise
        self.copier = copier_of(self)
        _run_jobs.append(_RunJob(self.run_dir, self.process, self))

    def _find_start(self, run_dir: Path) -> None:
        check_can_save(self.model, self.optimizer, self.scheduler, self._held(), self.world.size)
        prepare.check_space(run_dir, self.model)
        resume = os.environ.get("PACELINE_RESUME")
        self.steps.check_start(resume)
        if resume is not None:
            self.load(resume)

    def _is_asked_to_stop(self) -> bool:
        """True if a signal came; or, where the launcher can't hand one on, a file in the run directory."""
        if self.is_stopping.is_set():
            return True
        return self.stop_file is not None and self.stop_file.exists()

    def _ranks_asked_to_stop(self) -> list[int]:
        """Return the ranks that were asked to stop. Collective."""
        flags = self.world.all_gather(torch.tensor([int(self._is_asked_to_stop())]))
        return [rank for rank, flag in zip(self.world.peers, flags, strict=True) if int(flag)]

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
                self._compare_ranks(now=self.step_number == self.total_steps)  # a short job may save nothing
        late, self.late = self.late, None
        if late is not None:
            self._save_if_due(late)

    def _compare_ranks(self, now: bool = False) -> None:
        """Compare what several ranks hold, if that is due, or now. Collective, but for workers of servers.

        Raises:
            CollectiveError: ranks that hold the same tensors have come apart.
        """
        if not self.steps.holds_replicas:
            return
        try:
            if now:
                self.replicas.compare(self.step_number)
            else:
                self.replicas.after_step(self.step_number, self.step_number - self.loaded_step)
        except CollectiveError as error:
            raise error.at(rank=self.rank, step=self.step_number) from None

    def _shared(self) -> Iterator[Shared]:
        """Yield the tensors and numbers that other ranks should hold as this one does."""
        yield from snapshot.shared_tensors(self.model, self.optimizer, self._held(), self.size)
        # Another stage of a pipeline may have other groups.
        others = self.mesh.peers_on(self.rank, [axis for axis in AXES if axis != "pipeline"])
        yield from numbers_of_groups(groups_of(self.optimizer), others)

    def _save_if_due(self, is_stopping: bool) -> None:
        """Begin the checkpoint of this step if the plan has one; where the job stops, save the last step and end.

        Raises:
            Stopped: the job was asked to stop, and is saved.
        """
        if self.run_dir is None:
            return
        every = self.plan.checkpoint_every
        # The last step of a job that stops is saved below: that waits until the checkpoint is on the disk.
        if every and self.step_number % every == 0 and not is_stopping:
            self._begin_save(self.checkpoint_folder(), self.plan.keep)
            self.saved_step = self.step_number
        if is_stopping:
            # Collective: all ranks come here in the same step, because the flag was summed with the loss.
            asked = self._ranks_asked_to_stop()
            self.finish_save()
            last_checkpoint.save_last_step(self)
            finish_copies(self)
            self.events.write({"event": "stopped", "step": self.step_number, "asked": asked})
            self.world.barrier()  # a launcher may end the others when the first leaves: rank 0 publishes before
            raise Stopped(0)

    def checkpoint_folder(self) -> Path:
        """Return the folder of the run's checkpoint of this step."""
        return Path(str(self.run_dir), CHECKPOINTS, folder_name(self.step_number))

    def write_checkpoint(self, folder: Path, keep: int = 0) -> CheckpointError | None:
        """Write a checkpoint and wait for it. Collective; all ranks return the same error, or None.

        Args:
            folder: the checkpoint.
            keep: as `CheckpointWriter.begin` takes it.
        """
        prepare.check_owner(os.environ)
        if self.rank == 0:
            remove_partial(folder)
        self.world.barrier()
        # No rank writes before what an earlier attempt left is gone.
        self._begin_save(folder, keep)
        with Timed(CHECKPOINT):
            failure = first_failure(self.writer.wait(), folder, self.world)
        if failure is not None and self.rank == 0:
            remove_partial(folder)  # now no rank is writing any more
        return failure

    def save_if_missed(self) -> None:
        """Write the checkpoint that a lost process should have written after the last step."""
        if self.step_number and self.run_dir is not None and not self.checkpoint_folder().exists():
            self._save_if_due(is_stopping=False)

    def _begin_save(self, folder: Path, keep: int) -> None:
        with Timed(CHECKPOINT):
            self._begin_checkpoint(folder, keep)

    def _begin_checkpoint(self, folder: Path, keep: int) -> None:
        prepare.check_owner(os.environ)
        self.first_step.poll(self, waits=True)
        self.finish_save()
        if not self.steps.is_saving:
            return
        self._compare_ranks(now=True)  # before anything is written: each rank writes a part
        self.steps.take_state()
        held = self._held()
        size = self.world.size
        optimizer_parts, optimizer = snapshot.optimizer_state(self.model, self.optimizer, held, size)
        kept, kept_facts = self.kept.state()
        metadata = {
            "step": self.step_number,
            "position": self.position,
            "seed": self.workload.seed,
            "samples": self.loader.samples,
            "batch_size": self.workload.batch_size,
            "world_size": size,
            "mesh": self.steps.saved_mesh,
            "optimizer": optimizer,
            "scheduler": snapshot.as_json("the scheduler's state", schedulers.state_of(self.scheduler)),
            "torch": torch.__version__,
            **kept_facts,
            **self._scale_facts(),
            **self.facts(),
            **self.loader.facts(),
            **snapshot.config_facts(self.model),
        }
        parts = {**snapshot.model_parts(self.model, held, size), **optimizer_parts, **self.kept.average_parts(held)}
        rank_tensors = snapshot.own_tensors(random_state(self.device), self.parallel.state(), kept)
        # `begin` copies the tensors before it returns: training may change them while they are written.
        self.writer.begin(folder, parts, rank_tensors, metadata, keep)

    def _scale_facts(self) -> dict[str, Any]:
        scale = self.parallel.loss_scale
        return {} if scale is None else {"loss_scale": scale.state()}

    def facts(self) -> dict[str, Any]:
        """Return what else a checkpoint says of the job."""
        return {}

    def _held(self) -> dict[str, LocalShard]:
        """Return what of the model's state the strategies have cut; ask each time, they may change it."""
        return self.parallel.held()

    def finish_save(self) -> None:
        """Wait for the run's checkpoint that is being written; where it fails, say so."""
        with Timed(CHECKPOINT):
            failure = self.writer.wait()
        if failure is not None:
            self.saved_step = None
            self.notice(str(failure), everywhere=True)

    def _report_save(self, event: dict[str, Any]) -> None:
        if event["event"] == "saved" and self.is_staging:
            return  # said when it has arrived where it was asked for
        self.events.write(event)
        if event["event"] == "checkpoint" and self.copier is not None:
            self.copier.begin(Path(event["path"]))
        removed = event.get("removed")
        if removed:
            self.notice(
                f"{Path(event['path']).name} is saved, so the checkpoints that the job went back from are removed: "
                f"{', '.join(removed)}"
            )

    def report_copy(self, event: dict[str, Any]) -> None:
        """Write an event of the thread that copies checkpoints; say what failed."""
        self.events.write(event)
        if event["event"] == "copy_failed":
            name = Path(event["path"]).name
            self.notice(f"{name} could not be copied to {event['url']}: {event['found']}; it is on the disk")

    def notice(self, text: str, everywhere: bool = False) -> None:
        """Print a line: rank 0 alone, or every rank."""
        if self.rank == 0 or everywhere:
            print(f"paceline: {text}", flush=True)


def _ask_to_stop(is_stopping: threading.Event, number: int, frame: FrameType | None) -> None:
    """Note a signal. It holds no job: the handler stays after the job's end."""
    is_stopping.set()


@dataclass
class _RunJob:
    """What a process knows of a job that writes to a run directory, until the worker ends the run."""

    run_dir: Path
    process: int
    job: Job | None  # None once it is closed: who trains another model after it needs its memory
    closed_step: int = 0

    def forget(self, closed: Job) -> None:
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
_newest_job: list[weakref.ref[Job]] = []
# Of a function of `paceline.launch` without a run directory: what it returns may be found to be none that can be sent.
_launched_job: list[Job] = []


def check_is_first(run_dir: Path | None, as_one: str = "put them into one module and add up their losses") -> None:
    """Raise UsageError when this process has a job in the run directory: a second would write over its checkpoints.

    Where there is no run directory, jobs share nothing, and there may be several. One that has ended still counts:
    `--resume` would load its checkpoints into the second, or those of the second into it.

    Args:
        run_dir: of the process.
        as_one: how several models are one job.
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


def newest() -> Job | None:
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
        error: that of the file. Where ranks have come apart, one has gone, or the first step was not that of one
            process, nothing is saved.
    """
    job = newest()
    if job is None or job.process != os.getpid() or job.is_closing or _is_of_others(error):
        return
    if job.first_step.has_differed:
        return
    if isinstance(error, Exception | SystemExit):
        after_failure.save_after_failure(job)


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
