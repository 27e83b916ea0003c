"""Train by a plain PyTorch loop: `paceline.prepare` takes the objects that the loop has, and the loop stays.

    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in job.epochs(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            job.backward(loss)
            optimizer.step()

A step goes from one batch to the next. It ends when the loop asks for the next batch, or leaves: then a checkpoint has
what the loop did after the update too, such as `scheduler.step()`. `parallel/pieces.py` says what each call does.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.comm import api
from paceline.comm.batch_norm import share_statistics, statistics_to_share
from paceline.comm.step_times import BACKWARD as BACKWARD_TIME
from paceline.comm.step_times import FORWARD, OPTIMIZER, OTHER, TIMES, Timed, timed_data
from paceline.nouns import arguments
from paceline.nouns.errors import LossError, PacelineError, UsageError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import CUTTING_AXES
from paceline.nouns.parts import check_sinks, shown
from paceline.nouns.plan import Plan
from paceline.nouns.record import StepRecord
from paceline.nouns.sink import MakeSink
from paceline.parallel.apply import FOLLOWED_STEPS, Parallel
from paceline.parallel.effects import GRAPHS, REPLICAS, SHARDS, check_effects
from paceline.parallel.model_adapter import EagerAdapter, ModelAdapter
from paceline.parallel.optimizer_parts import contains, groups_of, parts_of
from paceline.parallel.pieces import BACKWARD, END, REDUCE, OwnLoss, Piece, PiecewiseParallel
from paceline.parallel.replicate.strategy import broadcast_state
from paceline.train import prepare as preparing
from paceline.train.agree import check_same_data_everywhere
from paceline.train.assemble import Assembly
from paceline.train.copy_weights import copy_weights
from paceline.train.count_on import Counted
from paceline.train.data import RankLoader
from paceline.train.data_workers import AtHand
from paceline.train.device_batches import on_device
from paceline.train.events import MEMORY_UNIT
from paceline.train.job import Job, check_is_first, newest
from paceline.train.loop_alone import LoopAlone
from paceline.train.loop_loader import CutLoader, Part, Place, first_of, load_pass
from paceline.train.loop_objects import LoopObjects, check_parameters, sort_objects, updated_by
from paceline.train.loop_scaler import LoopScaler, factor_of
from paceline.train.parallelize import Fake
from paceline.train.step import finite_norm
from paceline.train.taken_batches import BatchMarks, Found, TakenBatches

_OTHER_BATCHES = (
    "every rank should take its part of the same batch",
    "give the loader's sampler a generator with a seed, or let it draw torch's, Python's or numpy's random numbers",
)


def prepare(
    *objects: Any,
    seed: int = 0,
    shard_frozen: bool = False,
    whole: Iterable[torch.nn.Module] = (),
    by_part: Iterable[torch.nn.Module] = (),
    sinks: Sequence[MakeSink] = (),
) -> tuple[Any, ...]:
    """Make this process one rank of the job of a plain training loop, and its objects parts of that job.

    Then three lines of the loop change: `for epoch in job.epochs(n)`, `job.backward(loss)` in place of
    `loss.backward()`, and this call. Every batch of the loader is split over the ranks, so `batch_size` is that of all
    ranks together; parameters, gradients and losses are those of one process that takes the whole batch.

    Args:
        objects: modules, torch optimizers, at most one DataLoader, learning-rate schedulers and a torch.amp.GradScaler,
            in any order.
            Parameters and buffers become those of rank 0. The loader's sampler, batch sampler, collate and workers are
            used as they are.
        seed: of dropout, of the order of samplers without a generator of their own, and of what data sets draw.
        shard_frozen: keep only a part on each rank of every model without a trained parameter, such as a teacher. Its
            blocks are gathered as it is called, so every rank must call it equally often.
        whole: models that stay whole on every rank where the plan cuts the others (`tensor`, `shard` with zero=2 or 3):
            one that is small, or that the loop uses in ways that parts don't allow.
        by_part: models of which the loop calls the modules that they are made of, `model.encoder(x)`, instead of
            `model(x)`: each of these modules is cut by itself, under the names that it has in the model. Parameters
            that such a model has itself stay whole.
        sinks: functions that make event sinks, such as `[paceline.TensorBoard]`: rank 0 calls each with the run
            directory (None where there is none) and hands it every event of the job.

    Returns:
        The job, and then the objects in their order. Models and optimizers are the same objects; the loader is one that
        yields this rank's part of each batch, on its device.

    Raises:
        UsageError: this process has a job in the same run directory, or the launcher's variables contradict each other.
        WorkloadError: there is no model or no optimizer, or an object is none of these kinds, or can't be split; or
            `whole` or `by_part` has something else than these models, or leaves nothing to cut; or, under `shard` with
            zero=2 or 3, an optimizer has state, or two models share a parameter.
        PlanError: the plan has another axis than `replicate`, `shard` and `tensor`, or both `shard` and `tensor`; or an
            optimizer's updates can't be shared out.
        CheckpointError: the job resumes, and its checkpoint can't be used.
        PeerLostError: another rank has gone.

    Examples:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=16, shuffle=True)
        >>> job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
        >>> for epoch in job.epochs(5):
        ...     for inputs, targets in loader:
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...         job.backward(loss)
        ...         optimizer.step()
        >>> print(f"{loss.item():.3f}")
        0.000
    """
    check_sinks(sinks)
    seed = arguments.whole_number("prepare", "seed", seed)
    shard_frozen = arguments.flag("prepare", "shard_frozen", shard_frozen)
    run_dir = preparing.run_dir(os.environ)
    check_is_first(run_dir, "hand all models and optimizers to one call of prepare; evaluate over loaders as they are")
    sorted_objects = dataclasses.replace(sort_objects(objects, whole, by_part), sinks=tuple(sinks))
    api.init()
    try:
        plan = preparing.read_plan(os.environ, api.size())
        check_plan_of_loop(plan)
        job = LoopJob(sorted_objects, plan, seed, shard_frozen)
    except PacelineError as error:
        rank = api.rank() if error.rank is None else error.rank
        raise error.at(rank=rank) from error.__cause__
    return job, *(job.batches_of(each) if each is sorted_objects.loader else each for each in objects)


class LoopAssembly(Assembly):
    """The parts of a rank whose loop calls the pieces of a step."""

    parallel: PiecewiseParallel

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the user's optimizers."""
        return getattr(self.optimizer, "optimizers", [self.optimizer])

    def choose_strategy(self) -> type[Parallel]:
        """Return the class that runs the pieces of a step."""
        return PiecewiseParallel

    def make_loader(self, data: Any, part: tuple[int, int]) -> RankLoader:
        """Return a loader of one part of a data set for evaluation; a rank without samples repeats the first one."""
        loader = super().make_loader(data, part)
        if len(data):
            self.parallel.placed.spare = loader.example()
        return loader

    def place_model(self, example: Any, fake: Fake | None = None) -> ModelAdapter:
        """Have the user's models whole on every rank, with the values of rank 0."""
        model = preparing.make_model(self.workload, self.place.device, self.comms.step)
        broadcast_state([*model.parameters(), *model.buffers()], self.comms.step)
        if self.mesh.size("tensor") > 1:  # a graph shares statistics by itself
            return EagerAdapter(model, nullcontext, statistics_to_share(model, self.comms.data), example)
        return EagerAdapter(model, nullcontext, share_statistics(model, self.comms.data), example)

    def finish(self, placed: ModelAdapter, fake: Fake = nullcontext) -> None:
        """Make the strategies, and check that the optimizers' updates can be shared out."""
        parallel = self.strategy(placed, self.workload, self.comms, self.plan, self.place)
        assert isinstance(parallel, PiecewiseParallel)
        self.parallel = parallel
        self.optimizer = preparing.make_optimizer(self.workload, self.parallel.model)
        for optimizer in self.optimizers:
            if self.plan.optimizer_states != "full":
                from paceline.parallel.low_precision_states import lower_in_place

                lower_in_place(optimizer, self.plan.optimizer_states)
        self.later_parameters = None
        for axis in self.mesh.used(CUTTING_AXES):
            from paceline.parallel.elementwise import check_updates_apart

            is_cut = axis == "shard" and self.plan.zero > 1  # these updates are checked when they are made
            for optimizer in [] if is_cut else self.optimizers:
                check_updates_apart(optimizer, axis)


class LoopJob(Job):
    """One rank of a job whose training loop is plain PyTorch; `paceline.prepare` makes it.

    `evaluate(data, score)`, `save`, `load` and `close` are those of [Job][paceline.Job].

    Attributes:
        objects (LoopObjects): what `prepare` was handed, by kind.
        plan (Plan): the parallelism and its options.
        seed (int): of dropout, samplers and data sets.
        shard_frozen (bool): models without a trained parameter are in parts.
        model (torch.nn.Module): the model; where there are several, a ModuleList of them.
        step_number (int): steps done: batches after which an optimizer updated; without a loader, updates.
        position (int): samples taken, over all ranks and passes.
        data_rank (int): which part of the samples this rank has, from 0. Under `tensor` ranks have the same part;
            otherwise it is `rank`.
        data_size (int): how many parts there are.
        last (StepRecord | None): the record of the last step; None before the first.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> job.size, job.step_number
        (1, 0)
    """

    assembly_class = LoopAssembly
    parallel: PiecewiseParallel
    alone: LoopAlone | None = None  # in the process that takes the first step by itself

    def __init__(self, objects: LoopObjects, plan: Plan, seed: int, shard_frozen: bool = False) -> None:
        self.objects = objects
        self.shard_frozen = shard_frozen
        self.seed = seed
        self.is_updated = False  # an optimizer has stepped since the last step ended
        self.stepped: set[int] = set()  # which have
        self.usual_updates = len(objects.optimizers)  # of a step
        self.is_scaled = False  # a GradScaler has scaled a loss of this step
        self.is_skipped = False  # gradients have overflown in this step
        self.norm: float | None = None
        self.taken = TakenBatches()
        self.marks: BatchMarks | None = None  # of a loop that is ahead of itself
        self.samples = 0  # of the batches of this step, once there is an update
        self.batches_a_step = 1  # at most, in this pass
        self.opened_at_step = 0  # when the loop began its newest pass
        self.to_float64 = False  # verify widens what the loader gives
        self.return_to: Callable[[], None] | None = None
        self.returned_to: Callable[[], None] | None = None
        self.grouped: dict[int, list[int]] = {}  # the identities of each optimizer's parameters
        self.parts: dict[str, torch.nn.Parameter] = {}  # parameters by name, where ranks have parts of them
        self.as_handed_in: dict[torch.nn.Parameter, torch.dtype] | None = None
        self.cut: CutLoader | None = None
        if objects.loader is not None:
            self.cut = CutLoader(objects.loader, seed)
        modes = [(module, module.training) for module in objects.model.modules()]
        super().__init__(objects.workload(seed), plan)
        api.world().has_copies = self.mesh.size("tensor") > 1
        for module, is_training in modes:  # a teacher may be in evaluation mode
            module.training = is_training

    def _watch_updates(self) -> None:
        """Do nothing: the loop updates."""

    def _check_may_cut(self, placed: ModelAdapter) -> None:
        """Do nothing: the loop's losses are means, and weighted."""

    def _check_plan_without_data(self) -> None:
        """Do nothing: a model is split by what the loop calls it with."""

    def _check_effects(self, frozen: Mapping[str, torch.nn.Module]) -> None:
        """Raise WorkloadError if the plan would lose what models or optimizers do beside their arithmetic."""
        placement = self.parallel.placement
        if placement not in (SHARDS, GRAPHS) and not frozen:
            check_effects(self.objects.model, self.objects.optimizers, placement)
            return
        trained = self.objects.trained() if placement in (SHARDS, GRAPHS) else {}
        for prefix, model in self.objects.prefixed().items():
            where = REPLICAS
            if prefix in frozen:
                where = SHARDS
            elif prefix in trained:
                where = placement
            check_effects(model, self.objects.optimizers, where)

    def _begin_run(self) -> None:
        optimizers = self.objects.optimizers
        frozen = self.objects.frozen() if self.shard_frozen else {}
        self._check_effects(frozen)
        if self.mesh.size("tensor") > 1:
            cut = self.objects.cut_by_tensor()
            models = {prefix: model for prefix, model in cut.items() if prefix not in frozen}
            self.parallel.split_models(models, optimizers)
            self.parallel.share_statistics(self.objects.whole)
        if frozen:
            self.parallel.shard_models(frozen)
        is_cut = self.mesh.size("shard") > 1 and self.plan.zero > 1
        if is_cut:
            still_used = self.parallel.cut_models(self.objects.trained(), optimizers)
            if still_used:
                self.notice(
                    f"{len(still_used)} parameters, such as {still_used[0]}, are still referred to as they were before "
                    "paceline.prepare: whole, and not trained; make lists of parameters after it"
                )
            # From now on: while a model runs, some of its names are those of gathered parameters.
            self.parts = dict(self.model.named_parameters())
        self.as_handed_in = self._dtypes()
        self.parallel.split([updated_by(optimizer, self._named()) for optimizer in optimizers])
        if is_cut:
            self.parallel.update_in_parts(optimizers)
        for number, optimizer in enumerate(optimizers, 1):
            self._watch(optimizer, number)
        self._watch_others()
        self.scalers = [LoopScaler(scaler, self) for scaler in self.objects.scalers]
        self._follow_groups()
        self.scheduler = self.objects.scheduler
        self.began_s = self.clock.now_s()
        self.sent_before = self.ledger.total_bytes
        self._look_at_objects()
        super()._begin_run()
        self.paths.watch()

    def _look_at_objects(self) -> None:
        """Say what is likely to be a mistake: data by rank, batches below the ranks, schedulers that are not here."""
        loader = self.objects.loader
        if loader is not None and self.size > 1:
            check_same_data_everywhere(*first_of(loader, self.seed), self.world, self.notice)
        if loader is not None and loader.batch_size is not None and loader.batch_size < self.data_size:
            self.notice(
                f"batches of {loader.batch_size} leave {self.data_size - loader.batch_size} of {self.data_size} ranks "
                "without samples; the loader's batch_size is that of all ranks together"
            )
        scheduled = [each for each in self.objects.optimizers if "initial_lr" in each.param_groups[0]]
        if self.run_dir is not None and scheduled and not self.objects.schedulers:
            self.notice(
                f"no checkpoint will have the state of the scheduler of {type(scheduled[0]).__name__}, and a resumed "
                "job would begin its schedule anew: hand it to paceline.prepare too"
            )

    def models(self) -> list[torch.nn.Module]:
        """Return the models that `paceline.prepare` was handed."""
        return self.objects.models

    def _named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the models, as this rank has them, by name."""
        return self.parts or dict(self.model.named_parameters())

    def _dtypes(self) -> dict[torch.nn.Parameter, torch.dtype]:
        return {parameter: parameter.dtype for parameter in self._named().values()}

    def _check_as_handed_in(self) -> None:
        """Raise WorkloadError where a model was changed between `prepare` and the first step."""
        before, self.as_handed_in = self.as_handed_in, None
        assert before is not None
        updated = {
            parameter for each in self.objects.optimizers for parameter in updated_by(each, self._named()).values()
        }
        for name, parameter in self._named().items():
            found = ""
            if before.get(parameter, parameter.dtype) != parameter.dtype:
                found = f"{name} is of {parameter.dtype} now, and was of {before[parameter]}"
            elif parameter not in before and parameter.requires_grad and parameter not in updated:
                found = f"{name} is another parameter now, which no optimizer updates and each rank has by itself"
            if found and self.mesh.size("tensor") == 1:  # there the first call of a model has made pieces of it
                raise WorkloadError(
                    "the models should be as they were handed to paceline.prepare",
                    found,
                    "convert models, and replace their layers, before the optimizer is made",
                ).at(rank=self.rank, step=self.step_number + 1)

    def _watch(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Sum gradients before each of the optimizer's updates."""

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)  # the first is the optimizer
            if closure is not None:
                raise UsageError(
                    "an optimizer should update once per call of step()",
                    "step was handed a closure, whose backward passes would not be summed over the ranks",
                    "call job.backward(loss) before optimizer.step(), without a closure",
                )
            self._reduce(number)
            if self.first_step.is_active:
                self.first_step.update_of_loop(self, number)
            self.parallel.begin_update(optimizer, number)
            TIMES.switch(OPTIMIZER)

        def after(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.parallel.end_update(number)
            self._note_update()
            self.stepped.add(number)
            # Of several, as in a GAN, the loop goes on to the next one's loss; without a loader, to its next batch.
            self._end_update()

        # Before the user's own hooks: these see gradients of the whole batch, and parameters that are updated.
        _put_first(optimizer._optimizer_step_pre_hooks, optimizer.register_step_pre_hook(before).id)
        _put_first(optimizer._optimizer_step_post_hooks, optimizer.register_step_post_hook(after).id)

    def _watch_others(self) -> None:
        """Refuse updates by an optimizer that the job has not: its gradients would be those of this rank alone."""
        this = weakref.ref(self)

        own = {id(optimizer) for optimizer in self.objects.optimizers}

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if id(optimizer) in own:
                return
            job = this()
            if job is not None and newest() is job and job.closed_step is None:
                job._check_is_own(optimizer)

        handle = register_optimizer_step_pre_hook(before)
        weakref.finalize(self, handle.remove)

    def _check_is_own(self, optimizer: torch.optim.Optimizer) -> None:
        if contains(self.objects.optimizers, optimizer):
            return
        known = [part for own in self.objects.optimizers for part in parts_of(own)]
        if any(contains(known, part) for part in parts_of(optimizer)):
            return
        trained = set(self._named().values())
        if any(parameter in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                "the models of the job should be updated by the optimizers that paceline.prepare was handed",
                f"this {type(optimizer).__name__} is none of them: it would see the gradients of this rank's samples",
                "hand it to paceline.prepare too; to train other parameters later, call add_param_group on one of them",
            ).at(rank=self.rank, step=self.step_number + 1)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the passes over the loader that are to be made, from that at which the job is.

        Args:
            count: passes of the whole training.

        Yields:
            From 0 to `count - 1`; a resumed job begins in the pass in which it was.

        Raises:
            UsageError: the job has no loader, or a pass did not train; or, as soon as the loop goes over the loader
                again under one number.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> data = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=16)
            >>> job, model, optimizer, data = paceline.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
            >>> for epoch in job.epochs(2):
            ...     for inputs in data:
            ...         optimizer.zero_grad()
            ...         job.backward(model(inputs).square().mean())
            ...         optimizer.step()
            ...     if job.rank == 0:
            ...         print(f"epoch {epoch}: {job.position} samples")
            epoch 0: 64 samples
            epoch 1: 128 samples
        """
        if self.cut is None:
            raise UsageError(
                "job.epochs counts passes over the loader",
                "paceline.prepare was handed none",
                "hand it the DataLoader, or count in the loop: while job.step_number < STEPS",
            )
        cut = self.cut
        count = arguments.whole_number("job.epochs", "count", count)
        cut.passes = count
        self._forget_look()
        try:
            while cut.number < count:
                cut.epoch = cut.number
                yield cut.epoch
                cut.check_trained()
                if cut.number == cut.epoch:  # the loop left the pass by `break`
                    cut.end_pass()
                self.end_step()  # what the loop does next, such as writing the model, finds equal buffers
        finally:
            cut.epoch = None

    def check_has_updated(self) -> None:
        """Raise UsageError if the loop has gone over all of the data without an update, and begins again."""
        if self.cut is None or not self.cut.has_ended or self.cut.opened_at[1]:  # of a resumed pass a rest was left
            return
        if self.last is None and not self.is_updated:
            self.check_has_trained("its loop has gone over the data once")

    @property
    def part(self) -> Part | None:
        """Return the batch that the loop has taken last; None at the end of a pass."""
        return None if self.taken.newest is None else self.taken.newest.part

    @property
    def batches_seen(self) -> int:
        """Return how many batches the loop has taken since those of the last update."""
        return len(self.taken.waiting)

    def _forget_look(self) -> None:
        """Go back to the beginning of a pass of which the loop has only looked at batches: `next(iter(loader))`."""
        cut = self.cut
        if cut is None or not cut.is_open or self.is_updated or self.step_number != self.opened_at_step:
            return
        cut.go_to(*cut.opened_at)
        self.take(None)
        self.taken.clear()
        self.return_to = self.returned_to

    def batches_of(self, loader: Any) -> LoopLoader:
        """Return what the loop iterates over in place of its loader."""
        assert self.cut is not None
        return LoopLoader(self, self.cut)

    def backward(self, loss: torch.Tensor, weight: Any = None, retain_graph: bool = False, share: float = 1.0) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        As `loss.backward()` it adds to what is there: call it as often as the loop needs, for parts of a batch or for
        several losses. With one optimizer gradients are summed over the ranks while they are made, but for passes
        inside `accumulate`. Otherwise they become sums with `optimizer.step()`, `clip` or `gradients`.

        Args:
            loss: one number, a mean over what this rank has of the batch.
            weight: over how many, such as the tokens that count; the samples of this rank's part of the batch where
                None. The mean over the ranks is weighted by it, which makes it that of the whole batch.
            retain_graph: as `torch.Tensor.backward` takes it.
            share: by what the loop has multiplied the mean, such as 1 / 4 for one of four parts of a batch. It changes
                no gradient: the step's record has the mean without it.

        Raises:
            LossError: the loss is no such number, is not finite on some rank, or the weights add up to 0; or the share
                is no number above 0.
            UsageError: the job is closed; or there is no loader and no weight.
            CollectiveError: another rank is at another piece of the step, or hands in a weight where this one does not.
            PeerLostError: another rank has gone.

        Examples:
            A model of transformers has its own mean; the weight is the number of labels:

            >>> model = torch.nn.Linear(4, 3)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> inputs, labels = torch.ones(8, 4), torch.tensor([0, 1, 2, -100, -100, 0, 1, 2])
            >>> loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            >>> job.backward(loss, weight=(labels != -100).sum())
            >>> optimizer.step()
        """
        with self._located():
            _check_loss(loss)
            if type(share) is not float or share != 1:
                _check_share(share)
        if retain_graph is not False:
            retain_graph = arguments.flag("job.backward", "retain_graph", retain_graph)
        factor = factor_of(loss) if self.scalers else None
        found = self.taken.of_loss(loss, self._may_follow())
        self._begin_piece(found)
        self.is_scaled |= factor is not None
        if share != 1:
            one = torch.ones((), dtype=torch.float64, device=loss.device)
            factor = share * (one if factor is None else factor)
        if self.cut is not None:
            self.cut.is_idle = False
        with self._located():
            if self.taken.is_ahead:
                self._check_told(found, weight)
            own = self._weighted(loss, found, weight, factor)
        self.taken.note_trained(found)
        keeps_pace = bool(found.batches)
        for taken in found.batches:
            keeps_pace &= taken.part.keeps_pace
        piece = Piece(BACKWARD, int(self.parallel.is_accumulating), found.check, _OTHER_BATCHES)
        with self._located(), Timed(BACKWARD_TIME):
            self.parallel.backward(own, piece, keeps_pace, retain_graph, self._is_asked_to_stop())

    @contextmanager
    def accumulate(self, when: bool = True) -> Iterator[None]:
        """Leave gradients of the backward passes inside to this rank: a later one outside sums them with its own.

        Write it around every backward pass of an accumulation but the last, on every rank, as DDP's `no_sync`. Without
        it the result is the same, and each pass communicates. With several optimizers, and under `shard` with zero=2 or
        3 and `tensor`, it changes nothing.

        Args:
            when: whether to do so; False does nothing, so that one line serves all passes.

        Yields:
            Nothing: the `with` has no value.

        Raises:
            UsageError: `when` is neither True nor False.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for number in range(4):
            ...     with job.accumulate(number < 3):
            ...         job.backward(model(torch.ones(8, 4)).mean() / 4, weight=8)
            >>> optimizer.step()
        """
        if arguments.flag("job.accumulate", "when", when):
            with self.parallel.accumulate():
                yield
        else:
            yield

    def _weighted(self, loss: torch.Tensor, found: Found, weight: Any, factor: torch.Tensor | None) -> OwnLoss:
        """Return the loss with its weight: that of its batches where the loop has handed in none."""
        if weight is not None:
            return OwnLoss(loss, _checked_weight(weight), factor)
        if not found.batches:
            raise self._no_weight()
        if found.is_one:
            return OwnLoss(loss, sum(taken.part.samples for taken in found.batches), factor)
        part = found.batches[0].part
        return OwnLoss(loss, part.samples, factor, part.of if found.is_seen or self.taken.has_one_size else None)

    def _check_told(self, found: Found, weight: Any) -> None:
        """Raise UsageError where ranks have different shares of the batches that the loss may be of."""
        assert self.cut is not None or not found.batches
        if self.cut is None or not self.taken.is_ahead or not found.batches or self.data_size == 1:
            return
        keeps_pace = {taken.part.keeps_pace for taken in found.batches}
        if weight is not None and (len(keeps_pace) == 1 or not found.is_one):
            return
        has_one_size = self.taken.has_one_size and not self.cut.has_short_batch()
        if has_one_size or (found.is_told and len(keeps_pace) == 1 and (found.is_one or len(found.batches) == 1)):
            return
        raise UsageError(
            "a loss should have the weight of its batch",
            "the loop has taken several batches, which are not equally large, and it can't be told of which the loss is"
            if len(found.batches) == 1
            else "the loss is of several batches, which are not equally large",
            "call job.backward(loss, weight=len(inputs)) for each batch's own loss, with the number of its samples on "
            "this rank, or write drop_last=True in the loader; for one mean over two batches the weight is "
            "len(first) + len(second)",
        )

    def _may_follow(self) -> bool:
        """Return whether a loss may be of the step whose update was made: that of another optimizer."""
        return self.is_updated and len(self.stepped) < len(self.objects.optimizers)

    def _begin_call(self, found: Found) -> None:
        """Begin a model's call in a loop that is ahead of itself: the step before ends; the samples count, or not."""
        if self.is_updated and found.is_fresh:
            self.end_step(goes_on=True)
        if any(taken.part.keeps_pace for taken in [*self.taken.updated, *self.taken.waiting]):
            counts = not found.batches or not all(taken.part.keeps_pace for taken in found.batches)
            self.parallel.counts_samples(counts)

    def clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Scale gradients so that their norm is at most `max_norm`; call it between `backward` and the update.

        Args:
            max_norm: above 0; `float("inf")` only returns the norm.
            optimizer: whose parameters; those of all where None.

        Returns:
            The norm before clipping, of all the gradients together, the same on every rank. On a GPU the host waits for
            it, and so for the backward pass.

        Raises:
            LossError: the norm is not finite, and no GradScaler will leave the update out.
            UsageError: `max_norm` is not above 0, the optimizer is not the job's, something else has changed gradients,
                or they are those of a loss that a GradScaler has scaled.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> job.backward(model(torch.full((8, 4), 9.0)).sum(), weight=8)
            >>> norm = job.clip(1.0)
            >>> optimizer.step()
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
            raise UsageError(
                "job.clip needs the largest norm, a number above 0", f"it is {shown(max_norm)}", "write job.clip(1.0)"
            )
        target = self._target(optimizer)
        self._check_unscaled(target, "job.clip")
        if self._has_overflown(target):  # the update will be left out
            self.norm = None
            return math.inf
        self._reduce(target)
        with self._located():
            norm = self.parallel.norm_of(target)
            self.norm = finite_norm(norm)
        if not math.isinf(max_norm):
            # The factor is that of torch's clip_grad_norm_, with its 1e-6.
            self.parallel.scale(target, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return self.norm

    def gradients(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
        """Return the gradients of the whole batch, the same on every rank, to be read or changed before the update.

        Args:
            optimizer: whose parameters; those of all where None.

        Returns:
            By the parameter's name its `grad`, of the parameter's shape, without parameters that have none. The update
            sees a change in place, or another tensor in `parameter.grad`. Every rank must make the same change.

        Raises:
            UsageError: the optimizer is not the job's, something else has changed gradients, they are those of a loss
                that a GradScaler has scaled, or the plan has `tensor`, which gives this rank pieces of them.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> job.backward(model(torch.ones(8, 4)).mean(), weight=8)
            >>> for name, gradient in job.gradients().items():
            ...     print(name, gradient.norm().item())
            weight 2.0
            bias 1.0
            >>> optimizer.step()
        """
        target = self._target(optimizer)
        self._check_unscaled(target, "job.gradients")
        self._reduce(target)
        if self.parallel.has_pieces(target):
            raise UsageError(
                "job.gradients returns whole gradients",
                "under tensor this rank has pieces of them",
                "clip by job.clip(max_norm), which takes the norm of the whole; to change gradients write replicate or "
                "shard in place of tensor",
            ).at(rank=self.rank, step=self.step_number + 1)
        found: dict[str, torch.Tensor] = {}
        for parameter, name in self.parallel.gradients_of(target).items():
            if parameter.grad is not None:
                found[name] = parameter.grad
        return found

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the models' parameters whole inside the `with`, to read, compute with or change them. Collective.

        Under `shard` with zero=2 or 3, of a model in parts by `shard_frozen`, and under `tensor`, a rank has a part of
        each parameter outside of the model's calls. An average of weights, a penalty on them, a use of a weight outside
        of its module or a change of some rows needs all of it. Gradients may be taken of what is computed inside. What
        is changed inside, by the same code on every rank, is changed in every rank's part. Ask for `model.parameters()`
        or `model.weight` inside: under `tensor` a list that was made before has the pieces. Under `replicate` and
        zero=1 everything is whole anyhow.

        Yields:
            Nothing: the `with` has no value.

        Raises:
            CollectiveError: ranks have made other changes.

        Examples:
            A moving average of the weights, the same under every plan:

            >>> import copy
            >>> model = torch.nn.Linear(4, 1)
            >>> average = copy.deepcopy(model).requires_grad_(False)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> job, model, average, optimizer = paceline.prepare(model, average, optimizer)
            >>> job.backward(model(torch.ones(8, 4)).mean(), weight=8)
            >>> optimizer.step()
            >>> with torch.no_grad(), job.gathered():
            ...     for mean, parameter in zip(average.parameters(), model.parameters()):
            ...         _ = mean.lerp_(parameter, 0.1)
        """
        with self._located(), self.parallel.gathered():
            yield

    def copy_weights(self, source: torch.nn.Module, target: torch.nn.Module) -> None:
        """Copy parameters and persistent buffers from one module to another, under every plan. Collective.

        It does what `target.load_state_dict(source.state_dict())` does in one process, also where each rank has a part
        of the two: for a student that begins as every second layer of its teacher, or a target network.

        Args:
            source: one of the models that `prepare` was handed, or a module in one.
            target: the same; with the same names and shapes.

        Raises:
            UsageError: one is none of these, or they have other names or shapes.
            PeerLostError: another rank has gone.

        Examples:
            >>> teacher = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
            >>> student = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
            >>> optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
            >>> job, teacher, student, optimizer = paceline.prepare(teacher, student, optimizer)
            >>> for number, layer in enumerate(student):
            ...     job.copy_weights(teacher[2 * number + 1], layer)
            >>> torch.equal(student[1].weight, teacher[3].weight)
            True
        """
        with self._located():
            copy_weights(self, source, target)

    @property
    def data_rank(self) -> int:
        """Return which part of the samples this rank has."""
        return self.data_part

    @property
    def data_size(self) -> int:
        """Return how many parts of the samples there are."""
        return self.mesh.data_size

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, grad: bool = False) -> torch.Tensor:
        """Do what `paceline.all_reduce` does, over the ranks that have different samples; under any plan.

        Args:
            tensor: any shape, the same on every rank, with one dtype.
            op: "sum", "mean", "min", "max" or "product". A mean needs a floating-point dtype.
            grad: let gradients flow through a sum or mean.

        Returns:
            A new tensor of the same shape and dtype, equal on every rank.

        Raises:
            UsageError: `op` is unknown, `op` or `grad` does not fit the dtype, or `grad` does not fit `op`.
            PeerLostError: a rank has gone.
            CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> right, answers = job.all_reduce(torch.tensor([41.0, 50.0]))
            >>> print(f"{right / answers:.2f}")
            0.82
        """
        return api.reduce_over(self.comms.data, tensor, op, grad)

    def all_gather(self, tensor: torch.Tensor, *, grad: bool = False) -> torch.Tensor:
        """Do what `paceline.all_gather` does, over the ranks that have different samples; under any plan.

        Args:
            tensor: (rows, ...), on every rank with the same dtype and the same shape but for the rows.
            grad: let gradients flow; the gradient of `tensor` is the sum of those that its rows have on these ranks.

        Returns:
            A new tensor, (rows of these ranks, ...), in the order of `data_rank`, equal on every rank.

        Raises:
            UsageError: `tensor` is a scalar, or it has a dtype without gradients and `grad` is set.
            PeerLostError: a rank has gone.
            CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

        Examples:
            >>> model = torch.nn.Linear(4, 1)
            >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> rows_before = job.all_gather(torch.tensor([8]))[: job.data_rank].sum()
            >>> rows_before.item()
            0
        """
        return api.gather_over(self.comms.data, tensor, grad)

    def batches(self) -> Iterator[Any]:
        """Raise UsageError: the loop iterates over its own loader."""
        raise UsageError(
            "the batches of a job of paceline.prepare come from its loader",
            "job.batches() yields those of a paceline.Workload",
            "iterate over the loader that paceline.prepare returned",
        )

    def step(self, batch: Any) -> float:
        """Raise UsageError: the loop calls the pieces of a step."""
        raise UsageError(
            "the loop of a job of paceline.prepare calls the pieces of a step itself",
            "job.step runs the loss of a paceline.Workload",
            "write job.backward(loss) and optimizer.step()",
        )

    def whole_model(self) -> torch.nn.Module:
        """Raise UsageError: nothing that `prepare` is handed makes another model."""
        raise UsageError(
            "job.whole_model makes the model anew by the `model` of a paceline.Workload",
            "paceline.prepare is handed a model that is made already",
            "inside `with job.gathered():` load model.state_dict() into a model of your own",
        )

    def _score(self, model: Any, batch: Any) -> dict[str, Any]:
        raise UsageError(
            "job.evaluate needs a function that scores a batch",
            "score was left out, and paceline.prepare is handed no loss",
            "write job.evaluate(data, score), where score(model, batch) returns a dict of (sum, weight)",
        )

    @property
    def is_at_step(self) -> bool:
        """True if nothing is left to do of the last step, so that a job can go on from a checkpoint of now."""
        if self.cut is not None and self.cut.passes is not None and self.cut.number >= self.cut.passes:
            return not self.is_stepping
        return super().is_at_step and not self.is_updated

    @property
    def may_be_done(self) -> bool:
        """True if the last step may be that of the whole training: without `epochs`, at the end of any pass."""
        if self.cut is None:
            return not self.is_stepping
        is_last = self.cut.passes is None or self.cut.number >= self.cut.passes
        return not self.is_stepping and self.part is None and is_last

    def settle(self) -> None:
        """End the step that is under way, and leave its checkpoint until the loop goes on. Collective.

        Call it before an evaluation that the loop makes itself: buffers are equal on all ranks then.
        """
        self._settle()

    def _settle(self) -> None:
        """End the step that is under way, and leave its checkpoint until the loop goes on.

        What the loop does with an evaluation, such as `scheduler.step(metric)`, belongs to the step.
        """
        if self.closed_step is None and self.is_updated:
            self._finish_step()
            self.late = self._end_step()

    def _begin_save(self, folder: Path, keep: int) -> None:
        # The loop may have called a model since the step ended, whose gradients it is about to take.
        self.parallel.reshard()
        super()._begin_save(folder, keep)

    def _check_same_job(self, folder: Path, manifest: dict[str, Any]) -> None:
        super()._check_same_job(folder, manifest)
        place = manifest.get("loop")
        if place is not None and self.cut is not None and manifest.get("batch_size") == self.workload.batch_size:
            self.cut.check_place(folder, place["batch"])

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore random states and the place in the data, now and again when the loop comes to the place."""
        super().restore_own_state(folder, manifest)
        place = manifest.get("loop")
        if place is None or self.cut is None:
            return
        saved, now = manifest.get("batch_size"), self.workload.batch_size
        batch = self.cut.batch_after(place.get("batch", 0), saved, now)
        self.cut.go_to(place["pass"], place.get("batch", 0) if batch is None else batch)
        self.taken.clear()
        self.batches_a_step = place.get("batches_a_step", 1)
        if saved != now and batch is not None:
            self.notice(
                f"{folder.name} was saved with batches of {saved}, the loader's have {now}: pass {self.cut.number} "
                f"goes on after {batch} of these, with the samples that come next"
            )
        elif self.cut.batch and saved != now:
            self.notice(
                f"{folder.name} was saved with batches of {saved}, the loader's have {now}: pass {self.cut.number} "
                f"goes on after {self.cut.batch} of them, so samples of it are left out or taken twice"
            )
        # Copies: a scheduler's state may be its own lists.
        scheduler = None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())
        settings = [copy.deepcopy(_settings_of(group)) for group in groups_of(self.optimizer)]

        def return_to() -> None:
            # What the loop has drawn since, or a scheduler done in passes that were made before, is not to count.
            Job.restore_own_state(self, folder, manifest)
            if scheduler is not None:
                self.scheduler.load_state_dict(scheduler)
            for group, values in zip(groups_of(self.optimizer), settings, strict=True):
                group.update(values)

        self.return_to = return_to

    def facts(self) -> dict[str, Any]:
        """Return where in the data the job is, for a checkpoint."""
        if self.cut is None:
            return {}
        # Gradients are not saved: batches without an update are to be taken again, those of this pass at least.
        number, batch = self.taken.place((self.cut.number, self.cut.batch), self.cut.passes is not None)
        groups = {"batches_a_step": self.batches_a_step} if self.batches_a_step > 1 else {}
        return {"loop": {"pass": number, "batch": batch, **groups}}

    def take(self, part: Part | None, batch: Any = None) -> None:
        """Note the batch that the loop gets, as it is on the device; None: it has none."""
        if self.parallel.may_keep_pace:
            self.parallel.counts_samples(part is None or not part.keeps_pace)
        if part is None:
            self.taken.end_pass()
            self.batches_a_step = 1
        else:
            assert self.cut is not None
            self.has_taken = True
            if self.return_to is not None:
                self._return()
            self.taken.take(part, (self.cut.number, self.cut.batch - 1), batch)
        if self.taken.is_ahead and self.marks is None:
            self.marks = BatchMarks(self.taken, self._may_follow, self._begin_call)
            for model in self.objects.prefixed().values():
                self.marks.watch(model)

    def _return(self) -> None:
        """Be as the checkpoint was, at the place to which the job has gone back."""
        assert self.return_to is not None
        self.return_to()
        self.returned_to, self.return_to = self.return_to, None

    def end_step(self, goes_on: bool = False) -> None:
        """End the step if an optimizer has updated in it: make buffers equal, save what is due. Collective.

        Args:
            goes_on: the loop begins the next step, in which the ranks find out whether all of them do.

        Raises:
            Stopped: the job was asked to stop; it has been saved.
            CollectiveError: another rank is at another piece, or ranks differ.
        """
        if self.late is not None:
            self._finish_step()
        if self.is_updated:
            is_stopping = self._end_step(goes_on)
            self._save_if_due(is_stopping)
            self._begin_timing()

    def begin_batch(self) -> bool:
        """End the step before a batch; return whether this is the process that takes the first step by itself."""
        self.end_step(goes_on=True)
        if self.first_step.is_active:
            self.alone = self.first_step.begin_loop(self)
        return self.alone is not None

    def _end_step(self, goes_on: bool = False) -> bool:
        """End the step but for its checkpoint, and return whether the job is to stop after it. Collective."""
        self.is_updated = False
        every = self.plan.checkpoint_every
        # The collectives of a comparison, and of a checkpoint, want every rank there.
        is_compared = self.size > 1 and self.replicas.is_due(self.step_number, self.step_number - self.loaded_step)
        is_saved = bool(every and self.step_number % every == 0)
        if self.board.memory is not None:
            self.board.begin_collective()
        with self._located(self.step_number):
            ended = self.parallel.end_step(
                Piece(END), self._is_asked_to_stop, goes_on and not is_compared and not is_saved
            )
        now_s = self.clock.now_s()
        self.last = StepRecord(
            self.step_number,
            self.position,
            ended.loss / ended.weight if ended.weight else 0.0,
            ended.weight,
            self.samples,
            round(now_s - self.began_s, 6),
            self.ledger.total_bytes - self.sent_before,
            self.norm,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MEMORY_UNIT,
            self.is_skipped,
            self.scalers[0].scaler.get_scale() if self.is_scaled else None,
        )
        if self.first_step.is_active:
            self.first_step.end_of_loop_step(self)
        if self.step_number == self.loaded_step + 1:
            self._tell_length()
        self._tell(self.parallel.notices)
        self._write_step()
        if self.first_step.is_active:
            self.first_step.poll(self)
        self.norm = None
        self.is_scaled = self.is_skipped = False
        self.usual_updates = len(self.stepped)
        self.stepped.clear()
        self.taken.end_step()
        if self.parallel.is_observed:
            self.parallel.observers.parameters_updated(self.parallel.named(), self.optimizer)
        if self.paths.is_watching:
            self.paths.end_step()
            self.paths.watch()
        if self.size > 1:
            self._compare_ranks()
        self._begin_timing()
        return ended.is_stopping

    def _finish_step(self) -> None:
        if self.late is not None:
            super()._finish_step()
            self._begin_timing()

    def _begin_timing(self) -> None:
        if self.cut is None:  # the loop makes its batches itself, and computes their loss
            TIMES.switch(FORWARD)
        self.began_s = self.clock.now_s()
        self.sent_before = self.ledger.total_bytes

    def _tell_length(self) -> None:
        """Say after the first step how many there will be, if each takes as many batches."""
        batches = None if self.cut is None else self.cut.batches_left()
        taken = self.taken
        # A step may have taken none: the loop counts passes, and makes its batches itself.
        if batches is not None and taken.updated:
            self.total_steps = self.step_number + (batches + len(taken.waiting)) // len(taken.updated)
            self.events.write({"event": "own_batches", "total_steps": self.total_steps})

    def _begin_piece(self, found: Found) -> None:
        self._check_may_step()
        if self.as_handed_in is not None:
            self._check_as_handed_in()
        if not found.batches or (self.is_updated and found.is_fresh):
            # Without a loader, and in a loop that has taken the next batch before, the backward pass begins a step.
            self.end_step(goes_on=True)
        if not found.batches and self.return_to is not None:
            self.return_to()
            self.return_to = None
        self._begin_step()
        self._follow_groups()
        if self.parallel.followed_steps < FOLLOWED_STEPS:
            self.parallel.follow_hooks(self.objects.optimizers)

    def _follow_groups(self) -> None:
        """Take in parameters that an optimizer was given since, or has in place of others."""
        for number, optimizer in enumerate(self.objects.optimizers, 1):
            parameters: list[int] = []
            # Those of torch have no parts.
            is_torch = type(optimizer).__module__.startswith("torch.optim.")
            for group in optimizer.param_groups if is_torch else groups_of(optimizer):
                parameters.extend(map(id, group["params"]))
            if parameters != self.grouped.get(number, parameters):
                check_parameters(self._named().values(), [optimizer])
                self.parallel.regroup(number, updated_by(optimizer, self._named()))
            self.grouped[number] = parameters

    def _begin_step(self) -> None:
        if self.is_stepping or self.is_updated:
            return
        if self.late is not None:  # the loop goes on with the batch of a step that an evaluation has ended
            self._finish_step()
        self.is_stepping = True
        # A rank that waits in `save` or `load` for this one sees on the board that it went on.
        self.has_begun = True
        if self.board.memory is not None:
            self.board.begin_step()

    def _reduce(self, target: int) -> None:
        self._check_may_step()
        self._begin_step()
        self._follow_groups()
        if self.board.memory is not None:
            self.board.begin_collective()
        with self._located():
            self.parallel.reduce(Piece(REDUCE, target), self._is_asked_to_stop())

    def _no_weight(self) -> UsageError:
        reason = "the loop has no batch of the loader just now"
        if self.cut is None:
            reason = "paceline.prepare was handed no loader"
        return UsageError(
            "job.backward needs to know over how many samples the loss is a mean",
            reason,
            "write job.backward(loss, weight=len(batch)), with the number of this rank's samples",
        )

    def _target(self, optimizer: torch.optim.Optimizer | None) -> int:
        if optimizer is None:
            return 0
        number = self.number_of(optimizer)
        if number is not None:
            return number
        raise UsageError(
            "the optimizer should be one of those that paceline.prepare was handed",
            f"this {type(optimizer).__name__} is not",
            "hand it to paceline.prepare too",
        )

    def _check_unscaled(self, target: int, call: str) -> None:
        """Raise UsageError if gradients are those of a loss that a GradScaler has scaled."""
        if not self.is_scaled:
            return
        for scaler in self.scalers:
            for optimizer in self._optimizers_of(target):
                with self._located():
                    scaler.check_unscaled(optimizer, call)

    def _has_overflown(self, target: int) -> bool:
        """Return whether a GradScaler has found that gradients overflow."""
        if not self.is_scaled:
            return False
        optimizers = self._optimizers_of(target)
        return any(scaler.has_found(optimizer) for scaler in self.scalers for optimizer in optimizers)

    def _optimizers_of(self, target: int) -> list[torch.optim.Optimizer]:
        return [self.objects.optimizers[target - 1]] if target else self.objects.optimizers

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return which of the job's optimizers this is, from 1; None if it is none of them."""
        for number, own in enumerate(self.objects.optimizers, 1):
            if own is optimizer:
                return number
        return None

    def sum_gradients(self, number: int) -> None:
        """Make the gradients of an optimizer's parameters sums over the ranks. Collective."""
        self._reduce(number)

    def skip_update(self) -> None:
        """Note that gradients have overflown, so an optimizer's update was left out; the step counts all the same."""
        self.is_skipped = True
        self._note_update()
        self._end_update()

    def _end_update(self) -> None:
        """Say what the loop does next, for the times: after the last update of a step its own code."""
        is_last = len(self.stepped) >= self.usual_updates
        TIMES.switch(OTHER if is_last and self.cut is not None else FORWARD)

    def _note_update(self) -> None:
        if self.is_updated:
            return  # of several optimizers
        self.is_updated = True
        self.is_stepping = False
        self.step_number += 1
        self.samples = self.taken.note_update()
        self.batches_a_step = max(self.batches_a_step, len(self.taken.updated))
        self.position += self.samples

    @contextmanager
    def _located(self, step: int | None = None) -> Iterator[None]:
        """Give errors the rank and the step: this one, or the one that is under way."""
        try:
            yield
        except PacelineError as error:
            rank = self.rank if error.rank is None else error.rank
            if step is None:
                step = self.step_number + (not self.is_updated)
            raise error.at(rank=rank, step=step) from error.__cause__


class LoopLoader:
    """A loader's batches, of each this rank's part; what it is asked else, the loader answers."""

    def __init__(self, job: LoopJob, cut: CutLoader) -> None:
        self.job = job
        self.cut = cut

    def __len__(self) -> int:
        return len(self.cut.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cut.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch of the next pass; of the pass in which a resumed job is, the rest."""
        if self.job.alone is not None:
            return self.job.alone.batches(self.cut)
        return Counted(self._batches(), lambda: self.cut.opened_at[1], self._tell_count)

    def _tell_count(self, counter: str) -> None:
        """Say, or refuse, that the loop counts the batches of a pass from the place at which it goes on."""
        job = self.job
        number, left_out = self.cut.opened_at
        groups = f"updates of this pass took {job.batches_a_step} batches each" if job.batches_a_step > 1 else ""
        found = f"the job goes on after batch {left_out} of pass {number}, and a count of the loop's own begins at 0"
        fix = "write `for i, batch in enumerate(loader)`, which goes on there, and a progress bar around it"
        if counter and groups:
            raise UsageError(
                "a resumed loop should accumulate the batches that it would have without an interruption",
                f"{found}, that of `enumerate` around a generator; {groups}",
                fix,
            ).at(rank=job.rank)
        if counter or (groups and not job.kept.kept):
            job.notice(f"{found}{'; ' * bool(groups)}{groups}: {fix}, or keep the count by job.keep")

    def _batches(self) -> Iterator[Any]:
        is_own = threading.get_ident() == self.job.taken.thread  # another thread leaves the step to the loop's
        if is_own:
            self.job.end_step()
        self._check_is_one_pass()
        self.cut.check_trained()
        self.job.check_has_updated()
        if not self.cut.begin_pass():
            if self.cut.begun == 1:  # said once, of all passes
                passes = "1 pass" if self.cut.number == 1 else f"{self.cut.number} passes"
                self.job.notice(
                    f"{passes} over the data came before the checkpoint, and the loader gives no batches there; "
                    "`for epoch in job.epochs(n)` leaves such passes out"
                )
            return
        self.job.opened_at_step = self.job.step_number
        self.job.returned_to = None
        place = Place(self.job.data_part, self.job.mesh.data_size, self.cut.seed, self.cut.number)
        jumps = self.cut.jumps
        at_hand = AtHand()
        parts = load_pass(self.cut.loader, place, self.cut.batch, self.cut.limit, at_hand)
        loaded = ((part, part.batch) for part in parts)
        arrived = on_device(loaded, self.job.device, self.job.to_float64, at_hand)
        for part, batch in timed_data(arrived) if is_own else arrived:
            # Whatever the loop does with a batch, the step ends here, unless it is one that the loop takes ahead.
            if is_own and self.job.begin_batch():
                assert self.job.alone is not None
                yield from self.job.alone.batches(self.cut)
                return
            self.cut.note_batch()
            given = [batch.take()]
            self.job.take(part, given[0])
            if is_own:
                TIMES.switch(FORWARD)
            yield given.pop()  # who has it is then the only one who holds it
            if self.cut.jumps != jumps:
                raise UsageError(
                    "the loop should go over its loader in one place at a time",
                    "it asks an earlier iterator for a batch, after another was begun, or job.load went elsewhere",
                    "leave the `for` after job.load, and call iter(loader) once for each pass",
                ).at(rank=self.job.rank)
        self.cut.check_has_batches(self.job.notice)
        self.cut.end_pass()
        self.job.take(None)
        if is_own:
            TIMES.switch(OTHER)

    def _check_is_one_pass(self) -> None:
        if self.cut.epoch is None or self.cut.epoch == self.cut.number:
            return
        raise UsageError(
            "job.epochs counts passes over the loader, one for each number that it yields",
            f"the loop goes over the loader again in epoch {self.cut.epoch}",
            "evaluate by job.evaluate(data, score), or over a DataLoader that paceline.prepare was not handed; for "
            "several passes in each round write `for _ in range(n)`",
        ).at(rank=self.job.rank)


def _put_first(hooks: dict[int, Any], number: int) -> None:
    """Have torch call one of these hooks before the others."""
    others = {key: hook for key, hook in hooks.items() if key != number}
    first = hooks[number]
    hooks.clear()
    hooks[number] = first
    hooks.update(others)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's settings of a group, such as its learning rate."""
    return {name: value for name, value in group.items() if name != "params"}


def _check_loss(loss: Any) -> None:
    """Raise LossError unless it is one number with a gradient."""
    asked = "job.backward needs the loss, one floating-point number in a tensor"
    if not isinstance(loss, torch.Tensor):
        raise LossError(asked, f"it is a {type(loss).__name__}", "hand in the tensor itself, without .item()")
    if isinstance(loss, FakeTensor):
        raise LossError(
            "under tensor losses should be made of what model(...) returns",
            "the loss depends on a value that a hook, or an attribute, kept while the model's graph was captured",
            "have forward return that value; hooks on parts of a model do not run with each call",
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise LossError(asked, f"its shape is {tuple(loss.shape)}, of {loss.dtype}", "take the mean: loss.mean()")
    if not loss.requires_grad:
        raise LossError(
            "the loss should depend on parameters of the models",
            "no gradient leads from it to them",
            "leave out .detach(), torch.no_grad() and numpy between the model and the loss",
        )


def _check_share(share: Any) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
        raise LossError(
            "the share of a loss should be a number above 0",
            f"it is {share!r:.60}",
            "write by what the mean was multiplied: job.backward(loss / 4, share=1 / 4)",
        )


def _checked_weight(weight: Any) -> torch.Tensor | float:
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise LossError(
            "the weight of a loss should be a number, 0 or more",
            f"it is {weight!r:.60}",
            "write over how many samples or tokens the loss is a mean",
        )
    return weight
