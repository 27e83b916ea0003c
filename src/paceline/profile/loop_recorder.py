"""Watch a loop of the user's own as one rank of several that are not there: what its steps hold and send.

It is the loop itself that runs, on real tensors on the CPU: a loop reads values, which fake tensors have not. The
strategies are those of a rank, in a world of ranks that are not there (`comm/fake_process_group.py`), whose part of
each message is answered here: they do what this rank does.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._pytree import tree_iter

from paceline.comm.compression import CastReducer
from paceline.comm.ledger import Ledger
from paceline.comm.reducer import GroupReducer, Reducer
from paceline.comm.shared_memory import MAX_BYTES, MAX_RANKS
from paceline.nouns.profile import BUFFERS, COMMUNICATION, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from paceline.parallel.apply import Parallel
from paceline.parallel.low_precision_states import memory_of
from paceline.parallel.observer import FORWARD, REDUCE, UPDATE, StepObserver
from paceline.parallel.optimizer_parts import parts_of
from paceline.parallel.pieces import Ended, OwnLoss, Piece, PiecewiseParallel
from paceline.parallel.split_forward import SplitForward
from paceline.profile.allocation_trace import Allocations
from paceline.profile.step_observer import AbsentPeers, MemoryObserver
from paceline.train.loop_job import LoopAssembly, LoopJob, LoopLoader
from paceline.train.loop_objects import updated_by

MOST_STEPS = 20  # that are recorded until every optimizer has updated


class AllStepsRecorded(BaseException):
    """The loop has taken as many steps as are wanted. No `Exception`: a loop that catches those does not go on."""


class LoopAllocations(Allocations):
    """Records what a loop allocates, and not what it had before.

    Args:
        loads_elsewhere: batches are made in other memory than the step's: the host's, where a GPU trains.
    """

    def __init__(self, loads_elsewhere: bool = False) -> None:
        super().__init__()
        self.is_answering = False  # tensors have values
        self.loads_elsewhere = loads_elsewhere
        self.is_paused = False
        self.following: list[torch.Tensor] = []
        self.earlier: set[int] = set()  # storages that were there before, such as the data

    @contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """Enter nothing of what is allocated inside, or, with False, all of it again; what is freed is entered."""
        was_paused = self.is_paused
        self.is_paused = is_paused
        try:
            yield
        finally:
            self.is_paused = was_paused

    def note(self, tensor: torch.Tensor, kind: str | None = None, holder: str | None = None) -> None:
        """Enter a tensor as `Allocations.note` does; without a name only what is made now, and counts."""
        is_earlier = tensor.layout == torch.strided and _key(tensor) in self.earlier
        if kind is not None or not (self.is_paused or is_earlier):
            super().note(tensor, kind, holder)

    def note_batch(self, batch: Any) -> None:
        """Enter a batch, without tensors that are a view of something larger, such as the whole data set."""
        self.phase = FORWARD
        own = []
        for tensor in _tensors(batch):
            if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() <= tensor.nbytes:
                self.note_all([("batch", tensor)], INPUTS)
                own.append(tensor)
        if not self.loads_elsewhere:
            return
        with self.paused():  # the batch after this one, which comes to a GPU meanwhile
            self.following = [torch.empty_like(tensor) for tensor in own]
        self.note_all((("batch", tensor) for tensor in self.following), INPUTS)

    def enter_module(self, path: str) -> None:
        """Count operations from here on to this module: it is called in a forward pass."""
        self.phase = FORWARD
        super().enter_module(path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns."""
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        for value in _tensors((args, kwargs)):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
                key = _key(value)
                if key not in self.alive and key not in self.earlier:
                    self.earlier.add(key)
                    weakref.finalize(value.untyped_storage(), self.earlier.discard, key).atexit = False
        return super().__torch_dispatch__(func, types, args, kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_iter(value) if isinstance(each, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class AloneInPieces(PiecewiseParallel):
    """The pieces of a step on a rank whose peers are not there: it answers for them, and names what it allocates."""

    recorder: LoopAllocations | None = None  # None while the job is made
    backwards = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts_its_samples = True  # nobody else does

    def backward(
        self, own: OwnLoss, piece: Piece, keeps_pace: bool, retain_graph: bool, is_stopping: bool = False
    ) -> None:
        """Count it, and name the gradients that it has made."""
        self.backwards += 1
        super().backward(own, piece, keeps_pace, retain_graph, is_stopping)
        self._name_gradients()

    def _check_weights(self, found: float, expected: int) -> None:
        """Do nothing: the other ranks' weights are not here."""

    def reduce(self, piece: Piece, is_stopping: bool) -> None:
        """Enter the phase, which lasts until the update or the next forward pass: gradients may be clipped in it."""
        self.observers.phase_begins(REDUCE)
        super().reduce(piece, is_stopping)
        self._name_gradients()

    def begin_update(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        """Enter the phase."""
        self.observers.phase_begins(UPDATE)
        super().begin_update(optimizer, target)

    def end_step(self, piece: Piece, is_asked_to_stop: Callable[[], bool], may_skip_message: bool = False) -> Ended:
        """Enter the phase."""
        self.observers.phase_begins(REDUCE)
        return super().end_step(piece, is_asked_to_stop, may_skip_message)

    def shard_models(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Have the observers told of gathered blocks."""
        super().shard_models(models)
        for prefix, shard in self.sharded.items():
            shard.attach(_Within(self.observers, prefix), self.peer_values)

    def cut_models(
        self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[str]:
        """Have the observers told of gathered blocks, and answer for ranks that use the same parameters."""
        still_used = super().cut_models(models, optimizers)
        assert self.parts is not None
        peers = AbsentPeers(self.comms.step.size, self.peer_values.sums_on_cpu)
        for shard in self.parts.shards:
            shard.attach(_Within(self.observers, shard.prefix), peers)
        return still_used

    def _split_model(self, number: int, forward: SplitForward, call: Any) -> None:
        """Name the pieces, and their buckets."""
        super()._split_model(number, forward, call)
        self.name_what_stays()

    def regroup(self, target: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Name the new buckets."""
        super().regroup(target, parameters)
        self.name_what_stays()

    def name_what_stays(self) -> None:
        """Name what is there between steps: parameters, buffers and what is sent."""
        if self.recorder is None:
            return
        self.recorder.note_all(self.model.named_parameters(), PARAMETERS)
        self.recorder.note_all(self.model.named_buffers(), BUFFERS)
        for reducer in self._reducers():
            for buffer in (*reducer.inboxes, reducer.outbox):
                self.recorder.note_all([("gradient buckets", buffer)], COMMUNICATION)

    def shared_bytes(self, transport: str) -> int:
        """Return what this rank maps for the ranks of its host, where sums go through shared memory; else 0."""
        ranks = self.comms.data.size
        if transport not in ("auto", "shared_memory") or not 1 < ranks <= MAX_RANKS:
            return 0
        # Two inboxes for each sum, filled in turn; every rank maps those of all ranks.
        reducers: list[Reducer] = [self.on_device.reducer] if self.comms.step is self.comms.data else []
        if self.comms.step.axis == "replicate":
            reducers.append(self.stats.reducer)
        for target in self.targets:
            if 2 * sum(parameter.nbytes for parameter in target.parameters.values()) <= MAX_BYTES:
                reducers += [bucket.reducer for bucket in target.replicate.buckets]
        sums = [each for each in map(_inner, reducers) if isinstance(each, GroupReducer)]
        return sum(2 * each.outbox.nbytes for each in sums) * ranks

    def _reducers(self) -> list[Reducer]:
        reducers: list[Reducer] = [*self.reducers, self.stats.reducer]
        for target in self.targets:
            for bucket in target.replicate.buckets:
                reducers += [bucket.reducer, _inner(bucket.reducer)]
        return reducers

    def _name_gradients(self) -> None:
        if self.recorder is not None:
            gradients = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
            self.recorder.note_all(
                ((name, gradient) for name, gradient in gradients if gradient is not None), GRADIENTS
            )

    def _finish_sum(self) -> torch.Tensor:
        """Return the sum of the ranks' messages as if each were at the same piece.

        Weights and counts stay this rank's, as gradients and buffers do, to whose sums nobody adds either. So the means
        over the ranks are those of this rank.
        """
        sums = super()._finish_sum()
        if self.recorder is None:
            return sums
        ranks = self.comms.step.size
        own = self.own_at
        with self.recorder.paused():
            each = (self.buffers_at - self.ranks_at) // ranks
            sums[self.ranks_at : self.buffers_at] = sums[own : own + each].repeat(ranks)
            # The ranks of a tensor group change the same buffers.
            sums[self.buffers_at :] *= self.comms.axes["tensor"].size
        return sums


class _Within(StepObserver):
    """Tells observers of the blocks of one of several models by their names among all."""

    def __init__(self, observers: StepObserver, prefix: str) -> None:
        self.observers = observers
        self.prefix = prefix

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Hand it on."""
        self.observers.block_gathered(f"{self.prefix}{prefix}", module)


def _inner(reducer: Reducer) -> Reducer:
    """Return what sums a bucket: what is inside a reducer that rounds."""
    return reducer.inside if isinstance(reducer, CastReducer) else reducer


class LoneAssembly(LoopAssembly):
    """The parts of a rank whose peers are not there."""

    def choose_strategy(self) -> type[Parallel]:
        """Return the class that runs the pieces of a step."""
        return AloneInPieces


class LoneJob(LoopJob):
    """A job whose loop runs as that of one rank whose peers are not there; it saves nothing."""

    assembly_class = LoneAssembly
    recorder: LoopAllocations | None = None  # None while the job is made

    def batches_of(self, loader: Any) -> LoopLoader:
        """Return the loader, whose batches are entered, and what makes them is not."""
        assert self.cut is not None
        return _RecordedLoader(self, self.cut)

    def end_step(self, goes_on: bool = False) -> None:
        """Enter what the end of a step allocates, though the loader begins it."""
        with contextlib.nullcontext() if self.recorder is None else self.recorder.paused(False):
            super().end_step(goes_on)

    def save(self, folder: Any) -> None:
        """Do nothing: the steps are tried out."""

    def _begin_run(self) -> None:
        super()._begin_run()
        self.paths.leave_out()  # the peers see nothing

    def _compare_ranks(self, now: bool = False) -> None:
        """Do nothing: the peers have no values."""


class _RecordedLoader(LoopLoader):
    def __iter__(self) -> Iterator[Any]:
        recorder = cast(LoneJob, self.job).recorder
        assert recorder is not None
        batches = super().__iter__()
        while True:
            with recorder.paused(recorder.loads_elsewhere):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            recorder.note_batch(batch)
            yield batch


Rows = list[dict[str, Any]]


@dataclass(slots=True)
class RecordedSteps:
    """What the recorded steps did, one entry for each.

    Attributes:
        traffic: the ledger's rows of each step.
        backwards: calls of `job.backward`.
        updates: of each optimizer, calls of `step`.
        began: the event of the recording with which each step begins.
    """

    traffic: list[Rows] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)


class LoopRecorder(StepObserver):
    """Follows the steps of a job, and ends the loop when it has seen enough of them.

    Enough: until every optimizer has updated, and as many steps again, which find all of the optimizers' state.

    Args:
        job: whose steps.
        recorder: of its allocations, as yet without any.
    """

    def __init__(self, job: LoneJob, recorder: LoopAllocations) -> None:
        self.job = job
        self.recorder = recorder
        assert isinstance(job.parallel, AloneInPieces)
        self.parallel: AloneInPieces = job.parallel
        self.optimizers = job.objects.optimizers
        self.steps = RecordedSteps()
        self.all_updated: int | None = None  # the step by which every optimizer had updated
        self.updates = [0] * len(self.optimizers)
        self.shards = job.mesh.size("shard")
        for number, optimizer in enumerate(self.optimizers):
            optimizer.register_step_post_hook(self._noting(number))

    def begin(self) -> None:
        """Name what the job has made, and note the steps from here on."""
        self.recorder.names = {module: name for name, module in self.parallel.model.named_modules()}
        self.recorder.phase = FORWARD
        self.parallel.recorder = self.job.recorder = self.recorder
        self.parallel.observe(MemoryObserver(self.recorder, None))
        self.parallel.observe(self)
        self.parallel.name_what_stays()
        self._begin_step()

    @property
    def is_enough(self) -> bool:
        """True if no more steps are wanted."""
        steps = len(self.steps.traffic)
        return steps >= (MOST_STEPS if self.all_updated is None else 2 * self.all_updated)

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Note a step that has ended, and end the loop after the last one.

        Raises:
            AllStepsRecorded: no more are wanted.
        """
        steps = self.steps
        steps.traffic.append(_rows_since(self.job.ledger, *self.before))
        steps.backwards.append(self.parallel.backwards)
        steps.updates.append(self.updates)
        if self.all_updated is None and all(any(each) for each in zip(*steps.updates, strict=True)):
            self.all_updated = len(steps.updates)
        self.parallel.name_what_stays()  # a buffer may have another tensor
        if self.is_enough:
            self.recorder.has_ended = True
            raise AllStepsRecorded
        self._begin_step()

    def states(self) -> list[int]:
        """Return the bytes of each optimizer's state on this rank."""
        sizes = []
        for optimizer in self.optimizers:
            # By storage: a state may be in two of an optimizer's parts.
            storages = {}
            for part in parts_of(optimizer):
                for tensor in itertools.chain(*map(memory_of, _tensors(list(part.state.values())))):
                    storages[_key(tensor)] = tensor.untyped_storage().nbytes()
            sizes.append(sum(storages.values()))
        return sizes

    def _begin_step(self) -> None:
        ledger = self.job.ledger
        self.before = Counter(ledger.calls), Counter(ledger.payload_bytes)
        self.parallel.backwards = 0
        self.updates = [0] * len(self.optimizers)
        self.recorder.operations.clear()
        self.recorder.modules.clear()
        self.steps.began.append(len(self.recorder.recording.events))

    def _noting(self, number: int) -> Callable[..., None]:
        def after(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
            self.updates[number] += 1
            for name, tensor in self._states_of(optimizer):
                self.recorder.note_all([(name, tensor)], OPTIMIZER)

        return after

    def _states_of(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in updated_by(optimizer, self.parallel.named()).items():
            for part in parts_of(optimizer):
                for tensor in itertools.chain(*map(memory_of, _tensors(part.state.get(parameter, {})))):
                    yield name, tensor


def _rows_since(ledger: Ledger, calls: Counter[tuple[str, str]], payload_bytes: Counter[tuple[str, str]]) -> Rows:
    """Return the ledger's rows without what it had before."""
    since = Ledger(ledger.calls - calls, ledger.payload_bytes - payload_bytes)
    return since.rows()  # type: ignore[return-value]
