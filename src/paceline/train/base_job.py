"""What every job has: it saves, loads, logs, keeps, evaluates, generates and ends.

`train/job.py` adds the steps of a declared workload, `train/loop_job.py` the calls of a loop of one's own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch

from paceline.checkpoint.load import read_own
from paceline.comm import api
from paceline.comm.step_times import EVALUATION, FORWARD, TIMES, Timed, peak_memory_bytes
from paceline.nouns import arguments
from paceline.nouns.clock import Clock, WallClock
from paceline.nouns.errors import CollectiveError, UsageError
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.step_record import StepRecord
from paceline.nouns.workload import Workload
from paceline.parallel.engine.engine import RankPlace
from paceline.parallel.optimizer_parts import groups_of
from paceline.train import evaluate as evaluation
from paceline.train import open_jobs, prepare, snapshot
from paceline.train.agree import check_same_start
from paceline.train.assemble import Assembly
from paceline.train.average import Average
from paceline.train.checkpoints import Checkpoints
from paceline.train.count_memory import count_memory
from paceline.train.data import Batch, open_data
from paceline.train.event_log import VERSION, open_events, restart_fact
from paceline.train.first_step import FirstStep
from paceline.train.generate_job import generate_with
from paceline.train.kept import SETTINGS, KeptObjects
from paceline.train.log import JobLog, no_names
from paceline.train.memory_file import write_memory
from paceline.train.paths import Paths, has_compiled
from paceline.train.precision import autocast
from paceline.train.python_state import encode
from paceline.train.replicas import Replicas, Shared, numbers_of_groups
from paceline.train.schedulers import step_all
from paceline.train.seed import restore_random_state, seed_everything
from paceline.train.step_board import CLOSE, StepBoard
from paceline.train.step_profiler import StepProfiler
from paceline.train.times_file import TimesFile

if TYPE_CHECKING:
    from paceline.comm.collectives import AxisComm
    from paceline.comm.process_group import RankInfo

_COUNTED_STEP = 2  # of a process, after which its memory is counted: the first step makes the optimizer's state
_LOADS_EVERY = 20  # steps after which it is written how the rows went to experts


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


class StepNumbers(NamedTuple):
    """What a form of the job says of a step that has ended; the rest of its record is known to every job.

    Attributes: as those of `StepRecord`.
    """

    loss: float
    weight: float
    samples: int
    seconds: float
    gradient_norm: float | None
    is_skipped: bool
    loss_scale: float | None


class CollectiveSteps:
    """How a rank goes on from step to step, and what it saves, where all ranks take every step together.

    `train/server_steps.py` has the same for workers of parameter servers, which may be at different steps.

    Attributes:
        board_place: the place of this rank among those that wait for each other in `save`, `load`, `evaluate` and
            `close`.
        writer_place: the number of this rank among those that write a checkpoint together, and their number.
        is_saving: True if this rank takes part in writing checkpoints.
        saved_mesh: the mesh of the ranks that write a checkpoint together.
        holds_replicas: True if ranks hold the same tensors at the same step.
        evaluation_part: the number of this rank's part of the evaluation's samples, and the number of parts.
        log_comm: the communicator of the ranks over which `job.log` adds up.
    """

    def __init__(self, job: BaseJob) -> None:
        self.job = job
        self.board_place: RankInfo = job.rank_info
        self.writer_place: tuple[int, int] = (job.rank, job.size)
        self.is_saving = True
        self.saved_mesh = str(job.mesh)
        self.holds_replicas = True
        self.evaluation_part: tuple[int, int] = (job.data_part, job.mesh.data_size)
        self.log_comm: AxisComm = job.world  # ranks of one sample add equal numbers

    def begin_run(self) -> None:
        """Do nothing: the job is at its step, with its random numbers."""

    def check_start(self, resume: str | None) -> None:
        """Raise UsageError where ranks start from different checkpoints. Collective."""
        # Before `load`, in which ranks with a checkpoint would wait for those without one.
        check_same_start(resume, self.job.world)

    def check_may_load(self) -> None:
        """Do nothing: the parameters are here, and may be replaced between any two steps."""

    def check_may_keep(self, call: str) -> None:
        """Do nothing: every rank writes its part of a checkpoint."""

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore what belongs to this rank only, if the checkpoint is of the same mesh: random states, compression.

        Under another mesh no rank of now is one of then, so each draws from a new random stream.
        """
        job = self.job
        # Each rank's file has its own random states and residuals: they fit a rank at the same place of the same mesh.
        if (manifest["world_size"], manifest.get("mesh")) == (job.size, str(job.mesh)):
            rank_tensors = read_own(folder, manifest, job.rank)
            restore_random_state(snapshot.part(rank_tensors, "random/"), job.device)
            if not snapshot.restore_wire(job.parallel.state(), rank_tensors):
                job.notice(f"{folder.name} was saved with other compression: what compression left out so far is lost")
        else:
            seed_everything(job.workload.seed, 1 + job.random_stream, job.position)
            ranks = f"{manifest['world_size']} ranks ({manifest.get('mesh')})"
            job.notice(f"{ranks} saved {folder.name}, {job.size} ({job.mesh!s}) go on: dropout draws other numbers")

    def batches(self) -> Iterator[Batch]:
        """Return this rank's part of every global batch from here to the last step."""
        return self.job.loader.training(self.job.position, self.job.end)

    def length(self, manifest: dict[str, Any]) -> tuple[int, int]:
        """Return the steps of the training, and the position after the last, from a checkpoint on."""
        return self.job.loader.length(self.job.step_number, self.job.position)

    def begin_step(self) -> None:
        """Raise PlanError if the optimizer can't update what it was given since the last step."""
        if self.job.assembly.later_parameters is not None:
            self.job.assembly.check_later_parameters()

    def end_step(self, batch: Batch) -> tuple[int, int]:
        """Step the schedulers; return the step to which the job has come, and its position in the data."""
        job = self.job
        if job.scheduler is not None:
            step_all(job.scheduler)
        job.loader.batch_trained(batch)
        return job.step_number + 1, batch.positions.stop

    def take_state(self) -> None:
        """Do nothing: the optimizer's state is here."""


class BaseJob:
    """One rank of a training job, whoever takes its steps.

    Attributes and methods that docs/reference does not list serve Paceline's own modules.

    Attributes:
        other_calls: the calls of the other form of a job, with the three lines of the error of each: asked, found, fix.
    """

    assembly_class = Assembly
    other_calls: ClassVar[Mapping[str, tuple[str, str, str]]] = {}
    parallel: Any  # the engine of the form's steps
    model: torch.nn.Module
    scheduler: Any
    steps: CollectiveSteps
    models: list[torch.nn.Module]  # as the user's code calls them
    computes_next: bool = False  # when a step has ended, the loop makes the next batch itself, and computes its loss
    saves_late: bool = False  # what the loop does after a step belongs to its checkpoint
    late: bool | None = None  # a step is done whose checkpoint may be due; whether the job is to stop after it
    last: StepRecord | None = None
    closed_step: int | None = None
    is_closing: bool = False
    is_stepping: bool = False  # stays set when a step fails
    has_own_batches: bool = False
    has_same_data: bool = True  # on all ranks, as far as their first samples show
    has_taken: bool = False  # the loop has taken batches of the job
    has_begun: bool = False  # the loop has begun a step
    step_number: int = 0
    position: int = 0

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
        self.printed: set[str] = set()

    if not TYPE_CHECKING:  # a type checker finds such calls by itself

        def __getattr__(self, name: str) -> Any:
            """Return, for a call of the other form of a job, what raises UsageError and says what to call here."""
            if name in type(self).other_calls:
                return partial(_refuse, type(self).other_calls[name])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _assemble(self) -> None:
        """Split the model over the ranks as the plan says, and check that its batches can be split."""
        place = RankPlace(self.rank, self.device)
        data = self.workload.data
        # The data comes before the model: a split model is captured, and the loss tried, on its first samples.
        assembly = self.assembly_class(
            self.workload, self.plan, place, lambda: () if data is None else open_data("data", data), self.ledger
        )
        self.comms = assembly.comms
        self.comm = self.comms.data
        placed = assembly.place_model(assembly.example())
        self._print_once(placed.notices)
        if assembly.cut_notice:
            self.notice(assembly.cut_notice)
        self.loader = assembly.loader
        assembly.check_may_cut(placed, self.notice)
        assembly.finish(placed)
        self.assembly = assembly
        self.parallel = assembly.parallel
        self.model = self.parallel.model
        self.models = [self.model]
        self.optimizer = assembly.optimizer

    def _begin_run(self) -> None:
        prepare.learn_owner(os.environ)
        prepare.check_owner(os.environ)
        self.total_steps, self.end = self.loader.length()
        self.first_step = FirstStep()
        self.kept_objects = KeptObjects(self.world, self.notice)
        self.kept_objects.add_extra_state(self.model, is_checked=self.run_dir is not None)
        self.replicas = Replicas(self.world.aside(), partial(_shared, self))
        self.paths = Paths(self.comm.aside(), self.notice)
        if self.plan.is_compiled or has_compiled(self.model):
            self.paths.leave_out()
        self.is_stopping = threading.Event()
        self.process = os.getpid()
        self.times_file = TimesFile(self.run_dir, self.rank)  # before others ask the newest job for it
        self.profiler = StepProfiler(self.run_dir, self.rank, os.environ, partial(self.notice, everywhere=True))
        self.checkpoints = Checkpoints(self)
        open_jobs.register(self)
        self.board = StepBoard(self.steps.board_place)
        self.events = open_events(self.rank, self.run_dir, self.workload.sinks)
        self.logged = JobLog(self.events, self.run_dir)
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
            self.checkpoints.begin_run(self.run_dir)
            self.steps.begin_run()
            self.profiler.step_ended(self.step_number)
        except BaseException:  # the file may catch it, and make another job
            signal.signal(signal.SIGTERM, before)
            self.events.close()
            self.times_file.close()
            self.parallel.close()
            raise
        self.checkpoints.begin_copies()
        open_jobs.enter(self, self.run_dir)

    def notice(self, text: str, everywhere: bool = False) -> None:
        """Print a line: rank 0 only, or every rank."""
        if self.rank == 0 or everywhere:
            print(f"paceline: {text}", flush=True)

    def _print_once(self, notices: Sequence[str]) -> None:
        """Print the notices that were not printed yet."""
        for notice in notices:
            if notice not in self.printed:
                self.printed.add(notice)
                self.notice(notice)

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

    def _begin_timing(self) -> None:
        """Mark the time and the traffic from which on both belong to the next step."""
        if self.computes_next:
            TIMES.switch(FORWARD)
        self.began_s = self.clock.now_s()
        self.sent_before = self.ledger.total_bytes

    def _write_step(self, numbers: StepNumbers) -> None:
        """Record the step that has ended, and write the record down, with where its time went."""
        self.last = StepRecord(
            self.step_number,
            self.position,
            numbers.loss,
            numbers.weight,
            numbers.samples,
            round(numbers.seconds, 6),
            self.ledger.total_bytes - self.sent_before,
            numbers.gradient_norm,
            peak_memory_bytes(),
            numbers.is_skipped,
            numbers.loss_scale,
        )
        notices = self.parallel.notices
        if notices:
            self._print_once(notices)
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
            content = count_memory(self.models, self.optimizer, self.device)
            write_memory(self.run_dir, self.rank, {"step": self.step_number, **content})

    def _is_asked_to_stop(self) -> bool:
        """True if a signal came; or, where the launcher can't hand one on, a file in the run directory."""
        if self.is_stopping.is_set():
            return True
        return self.stop_file is not None and self.stop_file.exists()

    def compare_ranks(self, now: bool = False) -> None:
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
                self.replicas.after_step(self.step_number, self.step_number - self.checkpoints.loaded_step)
        except CollectiveError as error:
            raise error.at(rank=self.rank, step=self.step_number) from None

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
            self.checkpoints.begin_of_run()
        if is_stopping:
            # Collective: all ranks come here in the same step, because the flag was summed with the loss.
            flags = self.world.all_gather(torch.tensor([int(self._is_asked_to_stop())]))
            asked = [rank for rank, flag in zip(self.world.peers, flags, strict=True) if int(flag)]
            self.checkpoints.finish()
            self.checkpoints.last.save()
            self.events.write({"event": "stopped", "step": self.step_number, "asked": asked})
            self.world.barrier()  # a launcher may end the others when the first leaves: rank 0 publishes before
            raise Stopped(0)

    def _set_total(self, total_steps: int) -> None:
        """Set the number of steps of the training, where it was not known from the beginning."""
        self.total_steps = total_steps
        self.events.write({"event": "own_batches", "total_steps": total_steps})

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
        self.settle()
        with Timed(EVALUATION):
            # Evaluation is collective: a rank that is in a later step would never come.
            self.board.meet("job.evaluate", self.step_number)
            opened = prepare.evaluation_data(self.workload, data)
            loader = self.assembly.make_loader(opened, self.steps.evaluation_part)
            prepare.check_can_score(self.parallel.placed, metrics)
            is_apart = self.plan.strategy == "collectives" and self.mesh.size("replicate") == self.size
            score = score or self.workload.score or partial(_loss_of, self.workload)
            with autocast(self.workload.precision, self.device.type):
                result: dict[str, Any] = evaluation.evaluate(
                    self.parallel, loader.evaluation(), score, self.comm, metrics, is_apart
                )
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
            more: further values by keyword, as in `values`.

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
        self.logged.check_open("job.log")
        if values is not None and not isinstance(values, Mapping):
            raise no_names(values)
        self.board.meet("job.log", self.step_number)
        return self.logged.numbers({**(values or {}), **more}, self.steps.log_comm, self.device, self.step_number)

    def log_text(self, name: str, text: str) -> None:
        """Write a text to the job's events and sinks: rank 0's; on other ranks it does nothing.

        Args:
            name: the name of the text.
            text: the text, of at most 100,000 characters.

        Raises:
            UsageError: the job is closed; or the text or the name is none, or too long.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> job.log_text("generated", "ROMEO: What is it?")
        """
        self.logged.check_open("job.log_text")
        self.logged.text(name, text, self.step_number)

    def log_picture(self, name: str, picture: Any) -> None:
        """Write a picture to the run directory's `pictures` and to the sinks: rank 0's; on other ranks it does nothing.

        Args:
            name: the name of the picture.
            picture: a figure of matplotlib, an image of Pillow, or an array or tensor, (height, width) or
                (height, width, 3 or 4), of uint8 or of numbers from 0 to 1. Where the disk is full it is left out,
                with a notice.

        Raises:
            UsageError: the job is closed; or it is none of these, or Pillow is not installed.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> job.log_picture("weights", torch.rand(16, 16))
        """
        self.logged.check_open("job.log_picture")
        self.logged.picture(name, picture, self.step_number, self.notice)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to the folder `path` and wait until it is on the disk.

        Under `paceline run` the job also saves by itself: every `checkpoint_every` steps, and its last step.

        Args:
            path: the path of a folder that is new, empty or has a checkpoint, which is replaced. Every rank writes its
                file there. A URL such as s3://bucket/folder names one in an object store, to which rank 0 copies it.

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
        arguments.path("job.save", "path", path)
        self.settle()
        self.board.meet("job.save", self.step_number)
        self.checkpoints.save(path)

    def load(self, path: str | Path, weights_only: bool = False, strict: bool = True) -> None:
        """Go back to the checkpoint at `path`, or to the newest whole one in that folder.

        Any mesh may have saved it. Under the same one every random state is restored too and training goes on
        bit for bit. Under `paceline run`, checkpoints of later steps stay until a step from here on is saved.

        Args:
            path: the path of a checkpoint, or of a folder of checkpoints, such as `runs/JOB/checkpoints`; every rank
                must see it. Or the URL of one in an object store, which rank 0 reads for all.
            weights_only: True to load only parameters and buffers, and stay at this step: the optimizer, the scheduler,
                the data and what `keep` and `ema` have stay as they are. Then `path` may also be a file of safetensors,
                or a folder with model.safetensors. Values are converted to the model's dtypes.
            strict: with `weights_only`, True to refuse names that only one side has; False leaves them out, with a
                notice.

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
        self.checkpoints.load(path, weights_only, strict)

    def check_place(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint is at a place in the data to which this job can't come."""
        end = self.loader.length()[1] if self.loader.samples else 0
        prepare.check_same_job(folder, manifest, self.workload, self.loader.samples, end)

    def leave_step(self) -> None:
        """Leave the step at which the job is, for that of a checkpoint: its own is not due any more."""
        self.late = None

    def go_to(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Be at the step and the place in the data of a checkpoint, whose tensors are in the model."""
        self.step_number = manifest["step"]
        self.position = manifest["position"]
        self.loader.go_to(manifest)
        self.checkpoints.set_loaded(folder)
        self.first_step.end()
        self.first_step = FirstStep()

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore what belongs to this rank only, after `go_to`: random states, what compression left out."""
        self.steps.restore_own_state(folder, manifest)

    def facts(self) -> dict[str, Any]:
        """Return the job's place in the data, for a checkpoint."""
        return self.loader.facts()

    def keep(self, name: str, target: Any, per_rank: bool = False) -> Any:
        """Have checkpoints save and restore an object of yours, such as counters, a replay buffer or an early stopper.

        Call it once for each object, after `distribute` or `prepare`, on every rank. A resumed job gives the object its
        state of the checkpoint here; `load` does so too.

        Args:
            name: the name of the object, of letters, digits, dots, - and _; one for each object.
            target: an object with `state_dict()` and `load_state_dict(state)`; or a dict, list, deque, tensor, array or
                random generator (torch's, Python's or numpy's), which is changed in place. What is in it must be
                numbers, strings, lists, tuples, sets, dicts, bytes, tensors and arrays.
            per_rank: True if each rank has a state of its own; the job then resumes on as many ranks. False: it is the
                same on all of them, which is compared at each checkpoint.

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
        self.kept_objects.add(name, target, per_rank)
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
        saved: dict[str, Any] = self.keep(SETTINGS, {})
        for name, value in settings.items():
            if name in saved and saved[name] != value:
                raise UsageError(
                    f"{name} = {value!r:.80}",
                    f"the job that resumes began with {name} = {saved[name]!r:.80}",
                    "resume with that, or begin another job: without --resume, under another --job",
                ).at(rank=self.rank, step=self.step_number)
        saved.update(settings)

    def ema(self, decay: float, name: str = "ema") -> Average:
        """Begin a moving average of the trained parameters, which checkpoints have and a resumed job goes on with.

        Each rank averages the part of the parameters that it has, under any plan but parameter servers.

        Args:
            decay: the share of the average that stays with each `update()`, from 0 to below 1.
            name: the name of the average in checkpoints; several need different ones.

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
        average = Average(self.named, self.parallel.local_shards, decay)
        self.kept_objects.add_average(name, average)
        return average

    def save_best(self, metric: Any, mode: str = "min", path: str | Path | None = None) -> bool:
        """Save the job to a folder of its own if `metric` is better than with every earlier call for that folder.

        What the best was is in the checkpoints: a resumed job goes on from it.

        Args:
            metric: a number that is the same on every rank, such as a result of `evaluate`. NaN is never better.
            mode: "min" or "max": which metrics are better.
            path: the folder, as `save` takes it; `best` in the run directory where None, or in the current folder where
                there is no run directory.

        Returns:
            True if it was better, and is saved.

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
        self.settle()
        self.board.meet("job.save_best", self.step_number)
        if path is None:
            path = Path(self.run_dir or ".", "best")
        best = self.kept_objects.best()
        if not best.is_better(metric, mode, str(path), self.world):
            return False
        best.record(metric, mode, str(path), self.step_number)
        self.save(path)
        return True

    def _keeps(self, call: str) -> None:
        """Have a step's checkpoint written once the loop is done with the step: it changes what is kept after it."""
        self.steps.check_may_keep(call)
        self.saves_late = True

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters that are on this rank, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if not parameter.is_meta}

    def generate(self, prompts: Any, max_new_tokens: int, **options: Any) -> list[torch.Tensor]:
        """Continue rows of tokens with a causal language model, under any plan. Training goes on as if it had not been.

        The model takes token numbers, (rows, length), and returns their logits, (rows, length, vocabulary): as a
        tensor, as `.logits` or in a tuple such as `(logits, loss)`. Any such module will do, or a causal model of
        transformers. One with `forward(tokens, cache=None)` is handed a dict, from call to call, in which it keeps keys
        and values; then `tokens` are those that follow.

        Args:
            prompts: the tokens, (rows, length) whole numbers, or a list of vectors; the same on every rank, which share
                them out.
            max_new_tokens: the most new tokens of each row.
            options: the options of decoding: `temperature` (0: greedy), `top_k`, `top_p`, `end`, `seed` and `cache`, as
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
        self.settle()
        self.board.meet("job.generate", self.step_number)
        return generate_with(self, prompts, max_new_tokens, options)

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
            check_has_trained(self)
            self.board.meet(CLOSE, self.step_number)
        self.checkpoints.end_step()
        if is_saved:
            self.checkpoints.last.save()
        else:
            self.checkpoints.last.discard()
        self.closed_step = self.step_number
        self.paths.stop()
        self.times_file.close()
        self.profiler.close(self.step_number)
        self.events.write({"event": "end", "step": self.step_number, "ledger": self.ledger.rows()})
        self.logged.close(self.step_number)
        self.board.close()
        self.parallel.close()
        open_jobs.forget(self)

    @property
    def is_at_step(self) -> bool:
        """True if nothing is left to do of the last step, so that a job can go on from a checkpoint of now."""
        # What the loop does after a step that is saved late belongs to it, but for the last step of all.
        return not self.is_stepping and (self.late is None or self.step_number == self.total_steps)

    @property
    def may_be_done(self) -> bool:
        """True if the last step may be that of the whole training."""
        return not self.is_stepping and self.step_number == self.total_steps

    def settle(self) -> None:
        """End the step that is under way. Collective. Do nothing here: a step has ended when `step` returns."""


def _ask_to_stop(is_stopping: threading.Event, number: int, frame: FrameType | None) -> None:
    """Set the flag of a signal. It holds no job: the handler stays after the job's end."""
    is_stopping.set()


def _refuse(error_lines: tuple[str, str, str], *arguments: Any, **named: Any) -> NoReturn:
    """Raise UsageError in place of a call that the job's form does not have."""
    raise UsageError(*error_lines)


def _loss_of(workload: Workload, model: Any, batch: Any) -> dict[str, Any]:
    return {"loss": workload.loss(model, batch)}


def _shared(job: BaseJob) -> Iterator[Shared]:
    """Yield the tensors and numbers that other ranks should hold as this one does."""
    yield from snapshot.shared_tensors(job.model, job.optimizer, job.parallel.local_shards(), job.size)
    # Another stage of a pipeline may have other groups.
    peers = job.mesh.peers_on(job.rank, [axis for axis in AXES if axis != "pipeline"])
    yield from numbers_of_groups(groups_of(job.optimizer), peers)


def check_has_trained(job: BaseJob, place: str = "its file made it, and has ended") -> None:
    """Raise UsageError if the file has taken no step, and has neither gone on with a job nor done anything else.

    Args:
        job: the job of the file.
        place: the end to which the job has come, in words.
    """
    loaded_step = job.checkpoints.loaded_step
    is_apart = job.plan.strategy == "servers"  # the other workers may have taken all
    if job.step_number != loaded_step or job.last is not None or is_apart or job._is_asked_to_stop():
        return
    found = "the file ended, and its loop was not entered"
    if job.has_taken or job.has_begun:
        found = "the loop took batches, and trained on none"
        if job.has_begun:
            found = "job.backward was called, and no optimizer stepped"
    elif job.board.has_met:  # it evaluates, say
        return
    # A resumed loop may find that nothing is left once it has taken a batch.
    if not loaded_step or job.has_begun:
        raise UsageError(
            f"the job should train: {place}",
            f"0 steps were taken: {found}",
            "call job.step(batch) for every batch; in a loop of your own optimizer.step() after job.backward(loss)",
        ).at(rank=job.rank)
