"""Train by a plain PyTorch loop: `paceline.prepare` takes the objects that the loop has, and the loop stays.

    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in job.epochs(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            job.backward(loss)
            optimizer.step()

A step goes from one batch to the next. It ends when the loop asks for the next batch, or leaves: then a checkpoint has
what the loop did after the update too, such as `scheduler.step()`. `parallel/engine/loop.py` says what each call does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.comm import api
from paceline.comm.batch_norm import share_statistics, statistics_to_share
from paceline.comm.step_times import BACKWARD as BACKWARD_TIME
from paceline.comm.step_times import FORWARD, OPTIMIZER, OTHER, TIMES, Timed, timed_data
from paceline.nouns import arguments
from paceline.nouns.errors import LossError, PacelineError, UsageError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import CUTTING_AXES
from paceline.nouns.parts import check_sinks, shown
from paceline.nouns.plan import Plan
from paceline.nouns.sink import MakeSink
from paceline.parallel.engine.agreement import BACKWARD, END, REDUCE, Call
from paceline.parallel.engine.engine import FOLLOWED_STEPS, Engine
from paceline.parallel.engine.loop import LoopEngine, OwnLoss
from paceline.parallel.model_adapter import EagerAdapter, ModelAdapter
from paceline.parallel.optimizer_parts import contains, groups_of, parts_of
from paceline.parallel.replicate.replicate_strategy import broadcast_state
from paceline.torch_private.autograd import step_post_hooks, step_pre_hooks
from paceline.torch_private.operations import FakeTensor
from paceline.train import prepare as preparing
from paceline.train.assemble import Assembly
from paceline.train.base_job import BaseJob, CollectiveSteps, StepNumbers
from paceline.train.copy_weights import copy_weights
from paceline.train.data import RankLoader
from paceline.train.loader import AtHand, Part, Place, on_device
from paceline.train.loop_alone import LoopAlone
from paceline.train.loop_checks import (
    check_as_handed_in,
    check_effects_of,
    check_known_weight,
    check_share,
    checked_weight,
    look_at_objects,
    no_score,
    no_weight,
)
from paceline.train.loop_loader import Counted, CutLoader, load_pass
from paceline.train.loop_objects import LoopObjects, check_parameters, sort_objects, updated_by
from paceline.train.loop_place import LoopPlace
from paceline.train.loop_scaler import LoopScaler, factor_of
from paceline.train.open_jobs import check_is_first, newest
from paceline.train.parallelize import Fake
from paceline.train.seed import seed_everything
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
        seed: the seed of dropout, of the order of samplers without a generator of their own, and of what data sets
            draw.
        shard_frozen: True to keep only a part on each rank of every model without a trained parameter, such as a
            teacher. Its blocks are gathered as it is called, so every rank must call it equally often.
        whole: the models that stay whole on every rank where the plan cuts the others (`tensor`, `shard` with zero=2 or
            3): one that is small, or that the loop uses in ways that parts don't allow.
        by_part: the models of which the loop calls the modules that they are made of, `model.encoder(x)`, instead of
            `model(x)`: each of these modules is cut by itself, under the names that it has in the model. Parameters
            that such a model has itself stay whole.
        sinks: the functions that make event sinks, such as `[paceline.TensorBoard]`: rank 0 calls each with the run
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
    replaced = (job.batches_of(item) if item is sorted_objects.loader else item for item in objects)
    return job, *replaced


class LoopAssembly(Assembly):
    """The parts of a rank whose loop calls the parts of a step."""

    parallel: LoopEngine

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the user's optimizers."""
        return getattr(self.optimizer, "optimizers", [self.optimizer])

    def choose_strategy(self) -> type[Engine]:
        """Return the class that runs the parts of a step."""
        return LoopEngine

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
        if self.mesh.places > 1:  # a graph shares statistics by itself
            return EagerAdapter(model, nullcontext, statistics_to_share(model, self.comms.data), example)
        return EagerAdapter(model, nullcontext, share_statistics(model, self.comms.data), example)

    def check_may_cut(self, placed: ModelAdapter, notice: Callable[[str], None]) -> None:
        """Do nothing: the loop's losses are means, and weighted."""

    def finish(self, placed: ModelAdapter, fake: Fake = nullcontext) -> None:
        """Make the strategies, and check that the optimizers' updates can be shared out."""
        parallel = self.strategy(placed, self.workload, self.comms, self.plan, self.place)
        assert isinstance(parallel, LoopEngine)
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


class LoopSteps(CollectiveSteps):
    """How a rank of a loop goes on from step to step: all of them take every step together."""

    job: LoopJob

    def take_state(self) -> None:
        """Reshard the models: the loop may have called one, whose gradients it is about to take."""
        self.job.parallel.models.reshard()


class LoopOptimizers:
    """The optimizers of a loop's job: sums gradients before their updates, and notices when they change.

    Attributes:
        stepped: the numbers, from 1, of the optimizers that have updated in this step.
        usual: the number of optimizers that update in a step.
    """

    def __init__(self, job: LoopJob) -> None:
        self.job = job
        self.optimizers = job.objects.optimizers
        self.scalers = [LoopScaler(scaler, job) for scaler in job.objects.scalers]
        self.stepped: set[int] = set()
        self.usual = len(self.optimizers)
        self._grouped: dict[int, list[int]] = {}  # the identities of each optimizer's parameters
        for number, optimizer in enumerate(self.optimizers, 1):
            self._watch(optimizer, number)
        self._watch_others()
        self.follow_groups()

    def end_step(self) -> None:
        """Begin to count the updates of the next step."""
        self.usual = len(self.stepped)
        self.stepped.clear()

    def _watch(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Sum gradients before each of the optimizer's updates."""
        job = self.job

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)  # the first is the optimizer
            if closure is not None:
                raise UsageError(
                    "an optimizer should update once per call of step()",
                    "step was handed a closure, whose backward passes would not be summed over the ranks",
                    "call job.backward(loss) before optimizer.step(), without a closure",
                )
            job.sum_gradients(number)
            if job.first_step.is_active:
                job.first_step.update_of_loop(job, number)
            job.parallel.begin_update(optimizer, number)
            TIMES.switch(OPTIMIZER)

        def after(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            job.parallel.end_update(number)
            self.stepped.add(number)
            job.count_update()

        # Before the user's own hooks: these see gradients of the whole batch, and parameters that are updated.
        _put_first(step_pre_hooks(optimizer), optimizer.register_step_pre_hook(before).id)
        _put_first(step_post_hooks(optimizer), optimizer.register_step_post_hook(after).id)

    def _watch_others(self) -> None:
        """Refuse updates by an optimizer that is not the job's: its gradients would be those of this rank only."""
        reference = weakref.ref(self)
        own_ids = {id(optimizer) for optimizer in self.optimizers}

        def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if id(optimizer) in own_ids:
                return
            watching = reference()
            if watching is not None and newest() is watching.job and watching.job.closed_step is None:
                watching._check_is_own(optimizer)

        handle = register_optimizer_step_pre_hook(before)
        weakref.finalize(self, handle.remove)

    def _check_is_own(self, optimizer: torch.optim.Optimizer) -> None:
        if contains(self.optimizers, optimizer):
            return
        known = list(itertools.chain.from_iterable(map(parts_of, self.optimizers)))
        if any(contains(known, part) for part in parts_of(optimizer)):
            return
        trained = set(self.job.named().values())
        if any(parameter in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                "the models of the job should be updated by the optimizers that paceline.prepare was handed",
                f"this {type(optimizer).__name__} is none of them: it would see the gradients of this rank's samples",
                "hand it to paceline.prepare too; to train other parameters later, call add_param_group on one of them",
            ).at(rank=self.job.rank, step=self.job.step_number + 1)

    def follow_groups(self) -> None:
        """Take in parameters that an optimizer was given since, or has in place of others."""
        for number, optimizer in enumerate(self.optimizers, 1):
            parameters: list[int] = []
            # Those of torch have no parts.
            is_torch = type(optimizer).__module__.startswith("torch.optim.")
            for group in optimizer.param_groups if is_torch else groups_of(optimizer):
                parameters.extend(map(id, group["params"]))
            if parameters != self._grouped.get(number, parameters):
                named = self.job.named()
                check_parameters(named.values(), [optimizer])
                self.job.parallel.regroup(number, updated_by(optimizer, named))
            self._grouped[number] = parameters

    def target_of(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Return an optimizer's number; 0, all of them, for None.

        Raises:
            UsageError: it is none of the job's.
        """
        if optimizer is None:
            return 0
        number = self.job.objects.number_of(optimizer)
        if number is not None:
            return number
        raise UsageError(
            "the optimizer should be one of those that paceline.prepare was handed",
            f"this {type(optimizer).__name__} is not",
            "hand it to paceline.prepare too",
        )

    def check_unscaled(self, target: int, call: str) -> None:
        """Raise UsageError if gradients are those of a loss that a GradScaler has scaled."""
        for scaler in self.scalers:
            for optimizer in self._of(target):
                scaler.check_unscaled(optimizer, call)

    def have_overflown(self, target: int) -> bool:
        """Return whether a GradScaler has found that gradients overflow."""
        return any(scaler.has_found(optimizer) for scaler in self.scalers for optimizer in self._of(target))

    def _of(self, target: int) -> list[torch.optim.Optimizer]:
        return [self.optimizers[target - 1]] if target else self.optimizers


class LoopJob(BaseJob):
    """One rank of a job whose training loop is plain PyTorch; `paceline.prepare` makes it.

    `evaluate(data, score)`, `save`, `load` and `close` are those of [Job][paceline.Job].

    Attributes:
        objects (LoopObjects): the objects that `prepare` was handed, by kind.
        plan (Plan): the parallelism and its options.
        seed (int): the seed of dropout, samplers and data sets.
        shard_frozen (bool): True if models without a trained parameter are sharded.
        model (torch.nn.Module): the only model, or a ModuleList of several.
        step_number (int): the number of steps done: batches after which an optimizer updated; without a loader,
            updates.
        position (int): the number of samples taken, over all ranks and passes.
        data_rank (int): the number of this rank's part of the samples, from 0. Under `tensor`, `context` and
            `expert` ranks have the same part; otherwise it is `rank`.
        data_size (int): the number of parts.
        last (StepRecord | None): the record of the last step; None before the first.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> job.size, job.step_number
        (1, 0)
    """

    assembly_class = LoopAssembly
    parallel: LoopEngine
    alone: LoopAlone | None = None  # in the process that takes the first step by itself
    other_calls: ClassVar = {
        "batches": (
            "the batches of a job of paceline.prepare come from its loader",
            "job.batches() yields those of a paceline.Workload",
            "iterate over the loader that paceline.prepare returned",
        ),
        "step": (
            "the loop of a job of paceline.prepare calls the pieces of a step itself",
            "job.step runs the loss of a paceline.Workload",
            "write job.backward(loss) and optimizer.step()",
        ),
        "whole_model": (
            "job.whole_model makes the model anew by the `model` of a paceline.Workload",
            "paceline.prepare is handed a model that is made already",
            "inside `with job.gathered():` load model.state_dict() into a model of your own",
        ),
    }

    def __init__(self, objects: LoopObjects, plan: Plan, seed: int, shard_frozen: bool = False) -> None:
        self.objects = objects
        self.shard_frozen = shard_frozen
        self.seed = seed
        self.is_updated = False  # an optimizer has stepped since the last step ended
        self.is_scaled = False  # a GradScaler has scaled a loss of this step
        self.is_skipped = False  # gradients have overflown in this step
        self.norm: float | None = None
        self.taken_batches = TakenBatches()
        self.marks: BatchMarks | None = None  # of a loop that is ahead of itself
        self.samples = 0  # of the batches of this step, once there is an update
        self.batches_a_step = 1  # at most, in this pass
        self.to_float64 = False  # verify widens what the loader gives
        self.parts: dict[str, torch.nn.Parameter] = {}  # parameters by name, where ranks have parts of them
        self.as_handed_in: dict[torch.nn.Parameter, torch.dtype] | None = None
        self.cut: CutLoader | None = None
        if objects.loader is not None:
            self.cut = CutLoader(objects.loader, seed)
        self.computes_next = self.cut is None
        modes = [(module, module.training) for module in objects.model.modules()]
        workload = dataclasses.replace(objects.workload(seed), score=no_score)
        super().__init__(workload, plan)
        self.data_rank, self.data_size = self.data_part, self.mesh.data_size
        self.place = LoopPlace(self)
        self._assemble()
        self.models = objects.models
        self.scheduler = objects.scheduler
        self.steps = LoopSteps(self)
        seed_everything(seed, 1 + self.random_stream)  # dropout draws from here on
        self._begin_run()
        api.world().has_copies = self.mesh.places > 1
        for module, is_training in modes:  # a teacher may be in evaluation mode
            module.training = is_training

    def _begin_run(self) -> None:
        optimizers = self.objects.optimizers
        frozen = self.objects.frozen() if self.shard_frozen else {}
        check_effects_of(self.objects, self.parallel.placement, frozen)
        if self.mesh.places > 1:
            cut = self.objects.cut_by_tensor()
            models = {prefix: model for prefix, model in cut.items() if prefix not in frozen}
            self.parallel.split_models(models, optimizers)
            self.parallel.models.share_statistics(self.objects.whole_models)
        if frozen:
            self.parallel.models.shard_frozen(frozen)
        is_cut = self.mesh.size("shard") > 1 and self.plan.zero > 1
        if is_cut:
            still_used = self.parallel.models.cut_rows(self.objects.trained(), optimizers)
            if still_used:
                self.notice(
                    f"{len(still_used)} parameters, such as {still_used[0]}, are still referred to as they were before "
                    "paceline.prepare: whole, and not trained; make lists of parameters after it"
                )
            # From now on: while a model runs, some of its names are those of gathered parameters.
            self.parts = dict(self.model.named_parameters())
        self.as_handed_in = {parameter: parameter.dtype for parameter in self.named().values()}
        self.parallel.open_sums([updated_by(optimizer, self.named()) for optimizer in optimizers])
        if is_cut:
            self.parallel.models.update_in_parts(self.parallel.sums.targets, optimizers)
        self.updates = LoopOptimizers(self)
        self._begin_timing()
        look_at_objects(self)
        super()._begin_run()
        self.paths.watch()

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the models, as this rank has them, by name."""
        return self.parts or dict(self.model.named_parameters())

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the passes over the loader that are to be made, from that at which the job is.

        Args:
            count: the number of passes of the whole training.

        Yields:
            The numbers from 0 to `count - 1`; a resumed job begins in the pass in which it was.

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
        self.place.forget_look()
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

    @property
    def part(self) -> Part | None:
        """Return the batch that the loop has taken last; None at the end of a pass."""
        return None if self.taken_batches.newest is None else self.taken_batches.newest.part

    def batches_of(self, loader: Any) -> LoopLoader:
        """Return the loader that the loop iterates over in place of its own."""
        assert self.cut is not None
        return LoopLoader(self, self.cut)

    def backward(self, loss: torch.Tensor, weight: Any = None, retain_graph: bool = False, share: float = 1.0) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        As `loss.backward()` it adds to what is there: call it as often as the loop needs, for parts of a batch or for
        several losses. With one optimizer gradients are summed over the ranks while they are made, but for passes
        inside `accumulate`. Otherwise they become sums with `optimizer.step()`, `clip` or `gradients`.

        Args:
            loss: a tensor of one number, the mean over this rank's part of the batch.
            weight: the number of samples in the mean, such as the tokens that count; the samples of this rank's part of
                the batch where None. The mean over the ranks is weighted by it, which makes it that of the whole batch.
            retain_graph: True to keep the graph, as `torch.Tensor.backward` takes it.
            share: the factor by which the loop has multiplied the mean, such as 1 / 4 for one of four parts of a batch.
                It changes no gradient: the step's record has the mean without it.

        Raises:
            LossError: the loss is no such number, is not finite on some rank, or the weights add up to 0; or the share
                is no number above 0.
            UsageError: the job is closed; or there is no loader and no weight.
            CollectiveError: another rank is at another call of the step, or hands in a weight where this one does not.
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
                check_share(share)
        if retain_graph is not False:
            retain_graph = arguments.flag("job.backward", "retain_graph", retain_graph)
        factor = factor_of(loss) if self.updates.scalers else None
        found = self.taken_batches.of_loss(loss, self._may_follow())
        self._begin_pass(found)
        self.is_scaled |= factor is not None
        if share != 1:
            unscaled = torch.ones((), dtype=torch.float64, device=loss.device)
            factor = share * (unscaled if factor is None else factor)
        if self.cut is not None:
            self.cut.is_idle = False
        with self._located():
            if self.taken_batches.is_ahead:
                check_known_weight(self, found, weight)
            weighted = self._weighted(loss, found, weight, factor)
        self.taken_batches.mark_trained(found)
        keeps_pace = bool(found.batches)
        for batch in found.batches:
            keeps_pace &= batch.part.keeps_pace
        call = Call(BACKWARD, int(self.parallel.is_accumulating), found.check, _OTHER_BATCHES)
        with self._located(), Timed(BACKWARD_TIME):
            self.parallel.backward(weighted, call, keeps_pace, retain_graph, self._is_asked_to_stop())

    @contextmanager
    def accumulate(self, when: bool = True) -> Iterator[None]:
        """Leave gradients of the backward passes inside to this rank: a later one outside sums them with its own.

        Write it around every backward pass of an accumulation but the last, on every rank, as DDP's `no_sync`. Without
        it the result is the same, and each pass communicates. With several optimizers, and under `shard` with zero=2 or
        3 and `tensor`, it changes nothing.

        Args:
            when: True to do so; False does nothing, so that one line serves all passes.

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
            return OwnLoss(loss, checked_weight(weight), factor)
        if not found.batches:
            raise no_weight(self.cut is not None)
        if found.is_one:
            return OwnLoss(loss, sum(batch.part.samples for batch in found.batches), factor)
        part = found.batches[0].part
        return OwnLoss(
            loss, part.samples, factor, part.of if found.is_seen or self.taken_batches.has_one_size else None
        )

    def _may_follow(self) -> bool:
        """Return whether a loss may be of the step whose update was made: that of another optimizer."""
        return self.is_updated and len(self.updates.stepped) < len(self.objects.optimizers)

    def _begin_call(self, found: Found) -> None:
        """Begin a model's call in a loop that is ahead of itself: the step before ends; the samples count, or not."""
        if self.is_updated and found.is_fresh:
            self.end_step(goes_on=True)
        if any(batch.part.keeps_pace for batch in [*self.taken_batches.updated, *self.taken_batches.waiting]):
            counts = not found.batches or not all(batch.part.keeps_pace for batch in found.batches)
            self.parallel.models.counts_samples(counts)

    def clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Scale gradients so that their norm is at most `max_norm`; call it between `backward` and the update.

        Args:
            max_norm: the largest norm, above 0; `float("inf")` only returns the norm.
            optimizer: the optimizer whose parameters' gradients are clipped; all optimizers where None.

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
        target = self.updates.target_of(optimizer)
        if self.is_scaled:
            with self._located():
                self.updates.check_unscaled(target, "job.clip")
            if self.updates.have_overflown(target):  # the update will be left out
                self.norm = None
                return math.inf
        self.sum_gradients(target)
        with self._located():
            self.norm = finite_norm(self.parallel.clip(max_norm, target))
        return self.norm

    def gradients(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
        """Return the gradients of the whole batch, the same on every rank, to be read or changed before the update.

        Args:
            optimizer: the optimizer whose parameters' gradients are returned; all optimizers where None.

        Returns:
            Each parameter's `grad` by its name, of the parameter's shape, without parameters that have none. The update
            sees a change in place, or another tensor in `parameter.grad`. Every rank must make the same change.

        Raises:
            UsageError: the optimizer is not the job's, something else has changed gradients, they are those of a loss
                that a GradScaler has scaled, or the plan has `tensor`, which gives this rank shards of them.

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
        target = self.updates.target_of(optimizer)
        if self.is_scaled:
            with self._located():
                self.updates.check_unscaled(target, "job.gradients")
        self.sum_gradients(target)
        if self.parallel.models.has_pieces(self.parallel.gradients_of(target)):
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
        or `model.weight` inside: under `tensor` a list that was made before has the shards. Under `replicate` and
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
        with self._located(), self.parallel.models.gathered():
            yield

    def copy_weights(self, source: torch.nn.Module, target: torch.nn.Module) -> None:
        """Copy parameters and persistent buffers from one module to another, under every plan. Collective.

        It does what `target.load_state_dict(source.state_dict())` does in one process, also where each rank has a part
        of the two: for a student that begins as every second layer of its teacher, or a target network.

        Args:
            source: one of the models that `prepare` was handed, or a module in one.
            target: one of these models or modules, with the same names and shapes.

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

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, grad: bool = False) -> torch.Tensor:
        """Do what `paceline.all_reduce` does, over the ranks that have different samples; under any plan.

        Args:
            tensor: the tensor, of any shape, the same on every rank, with one dtype.
            op: how values are combined: "sum", "mean", "min", "max" or "product". A mean needs a floating-point dtype.
            grad: True to let gradients flow through a sum or mean.

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
            tensor: the tensor, (rows, ...), on every rank with the same dtype and the same shape but for the rows.
            grad: True to let gradients flow; the gradient of `tensor` is the sum of those that its rows have on these
                ranks.

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

        What the loop does with an evaluation, such as `scheduler.step(metric)`, belongs to the step. A loop that
        evaluates by itself calls this first: buffers are equal on all ranks then.
        """
        if self.closed_step is None and self.is_updated:
            self._finish_step()
            self.late = self._end_step()

    def check_place(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint is at a place in the data to which this job can't come."""
        super().check_place(folder, manifest)
        self.place.check(folder, manifest)

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore random states and the place in the data, now and again when the loop comes to the place."""
        super().restore_own_state(folder, manifest)
        place = manifest.get("loop")
        if place is not None and self.cut is not None:
            self.batches_a_step = place.get("batches_a_step", 1)
            self.place.restore(folder, manifest)

    def facts(self) -> dict[str, Any]:
        """Return the job's place in the data, for a checkpoint."""
        return self.place.facts()

    def take(self, part: Part | None, batch: Any = None) -> None:
        """Record the batch that the loop gets, as it is on the device; None: it has none."""
        if self.parallel.may_keep_pace:
            self.parallel.models.counts_samples(part is None or not part.keeps_pace)
        if part is None:
            self.taken_batches.end_pass()
            self.batches_a_step = 1
        else:
            assert self.cut is not None
            self.has_taken = True
            if self.place.return_to is not None:
                self.place.come_back()
            self.taken_batches.take(part, (self.cut.number, self.cut.batch - 1), batch)
        if self.taken_batches.is_ahead and self.marks is None:
            self.marks = BatchMarks(self.taken_batches, self._may_follow, self._begin_call)
            for model in self.objects.prefixed().values():
                self.marks.watch(model)

    def end_step(self, goes_on: bool = False) -> None:
        """End the step if an optimizer has updated in it: make buffers equal, save what is due. Collective.

        Args:
            goes_on: True if the loop begins the next step, in which the ranks find out whether all of them do.

        Raises:
            Stopped: the job was asked to stop; it has been saved.
            CollectiveError: another rank is at another call, or ranks differ.
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
            if self.alone is not None:
                vars(self).update(self.alone.in_place)
        return self.alone is not None

    def _end_step(self, goes_on: bool = False) -> bool:
        """End the step but for its checkpoint, and return whether the job is to stop after it. Collective."""
        self.is_updated = False
        every = self.plan.checkpoint_every
        since = self.step_number - self.checkpoints.loaded_step
        # The collectives of a comparison, and of a checkpoint, want every rank there.
        is_compared = self.size > 1 and self.replicas.is_due(self.step_number, since)
        is_saved = bool(every and self.step_number % every == 0)
        if self.board.memory is not None:
            self.board.begin_collective()
        with self._located(self.step_number):
            ended = self.parallel.end_step(
                Call(END), self._is_asked_to_stop, goes_on and not is_compared and not is_saved
            )
        seconds = self.clock.now_s() - self.began_s
        if self.first_step.is_active:
            self.first_step.end_of_loop_step(self)
        total = self.place.foreseen() if since == 1 else None
        if total is not None:
            self._set_total(total)
        loss = ended.loss / ended.weight if ended.weight else 0.0
        scale = self.updates.scalers[0].scaler.get_scale() if self.is_scaled else None
        self._write_step(StepNumbers(loss, ended.weight, self.samples, seconds, self.norm, self.is_skipped, scale))
        if self.first_step.is_active:
            self.first_step.poll(self)
        self.norm = None
        self.is_scaled = self.is_skipped = False
        self.updates.end_step()
        self.taken_batches.end_step()
        if self.parallel.is_observed:
            self.parallel.observers.parameters_updated(self.parallel.named(), self.optimizer)
        if self.paths.is_watching:
            self.paths.end_step()
            self.paths.watch()
        if self.size > 1:
            self.compare_ranks()
        self._begin_timing()
        return ended.is_stopping

    def _finish_step(self) -> None:
        """Save the last step, if that is due, once the loop is done with it."""
        late, self.late = self.late, None
        if late is not None:
            self._save_if_due(late)
            self._begin_timing()

    def _begin_pass(self, found: Found) -> None:
        self._check_may_step()
        if self.as_handed_in is not None:
            before, self.as_handed_in = self.as_handed_in, None
            check_as_handed_in(self, before)
        if not found.batches or (self.is_updated and found.is_fresh):
            # Without a loader, and in a loop that has taken the next batch before, the backward pass begins a step.
            self.end_step(goes_on=True)
        if not found.batches and self.place.return_to is not None:
            self.place.come_back(may_look=False)
        self._begin_step()
        self.updates.follow_groups()
        if self.parallel.followed_steps < FOLLOWED_STEPS:
            self.parallel.follow_hooks(self.objects.optimizers)

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

    def sum_gradients(self, target: int) -> None:
        """Make the gradients of an optimizer's parameters sums over the ranks; of all for 0. Collective."""
        self._check_may_step()
        self._begin_step()
        self.updates.follow_groups()
        if self.board.memory is not None:
            self.board.begin_collective()
        with self._located():
            self.parallel.reduce(Call(REDUCE, target), self._is_asked_to_stop())

    def skip_update(self) -> None:
        """Count an update that was skipped because gradients have overflown; the step counts all the same."""
        self.is_skipped = True
        self.count_update()

    def count_update(self) -> None:
        """Count an optimizer's update: the first of a step counts it."""
        if not self.is_updated:
            self.is_updated = True
            self.is_stepping = False
            self.step_number += 1
            self.samples = self.taken_batches.end_update()
            self.batches_a_step = max(self.batches_a_step, len(self.taken_batches.updated))
            self.position += self.samples
        # What the loop does next, for the times: of several optimizers, as in a GAN, it goes on to the next one's loss;
        # after the last its own code follows, or without a loader its next batch.
        is_last = len(self.updates.stepped) >= self.updates.usual
        TIMES.switch(OTHER if is_last and self.cut is not None else FORWARD)

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
    """This rank's parts of a loader's batches; all other attributes are those of the loader."""

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
        return Counted(self._batches(), lambda: self.cut.opened_at[1], self._check_count)

    def _check_count(self, counter: str) -> None:
        """Refuse, or report, that the loop counts the batches of a pass from the place at which it goes on."""
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
        if counter or (groups and not job.kept_objects.objects):
            job.notice(f"{found}{'; ' * bool(groups)}{groups}: {fix}, or keep the count by job.keep")

    def _batches(self) -> Iterator[Any]:
        is_own = threading.get_ident() == self.job.taken_batches.thread  # another thread leaves the step to the loop's
        if is_own:
            self.job.end_step()
        self._check_is_one_pass()
        self.cut.check_trained()
        self.job.place.check_has_updated()
        if not self.cut.begin_pass():
            if self.cut.begun == 1:  # reported once, for all passes
                passes = "1 pass" if self.cut.number == 1 else f"{self.cut.number} passes"
                self.job.notice(
                    f"{passes} over the data came before the checkpoint, and the loader gives no batches there; "
                    "`for epoch in job.epochs(n)` leaves such passes out"
                )
            return
        self.job.place.begin_pass()
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
            self.cut.count_batch()
            handed_out = [batch.take()]
            self.job.take(part, handed_out[0])
            if is_own:
                TIMES.switch(FORWARD)
            yield handed_out.pop()  # who has it is then the only one who holds it
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
    other_hooks = {key: hook for key, hook in hooks.items() if key != number}
    first = hooks[number]
    hooks.clear()
    hooks[number] = first
    hooks.update(other_hooks)


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
