"""Watch a loop of the user's own as one rank of several that are not there: what its steps hold and send.

It is the loop itself that runs, on real tensors on the CPU: a loop reads values, which fake tensors have not. The
strategies are those of a rank, in a world of ranks that are not there (`comm/fake_process_group.py`), whose part of
each message is answered here: they do what this rank does.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from paceline.comm.compression import CastReducer
from paceline.comm.reducer import GroupReducer, Reducer
from paceline.comm.shared_memory import MAX_BYTES, MAX_RANKS
from paceline.nouns.profile import INPUTS, OPTIMIZER
from paceline.parallel.low_precision_states import memory_of
from paceline.parallel.observer import FORWARD
from paceline.parallel.optimizer_parts import parts_of
from paceline.profile.allocation_trace import Allocations
from paceline.profile.step_observer import (
    AbsentPeers,
    MemoryObserver,
    Parameters,
    name_what_stays,
    reducers_of,
    states_of,
)
from paceline.torch_private.tensors import storage_key, tree_iter
from paceline.train.loop_job import LoopJob, LoopLoader
from paceline.train.loop_objects import updated_by
from paceline.train.replicas import Replicas

MOST_STEPS = 20  # that are recorded until every optimizer has updated


class AllStepsRecorded(BaseException):
    """The loop has taken as many steps as are wanted. No `Exception`: a loop that catches those does not go on."""


class LoopAllocations(Allocations):
    """Records what a loop allocates, and not what it had before.

    Args:
        loads_elsewhere: True if batches are made in the host's memory while the step runs on a GPU.
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

    def record(self, tensor: torch.Tensor, kind: str | None = None, holder: str | None = None) -> None:
        """Enter a tensor as `Allocations.record` does; without a name only what is made now, and counts."""
        is_earlier = tensor.layout == torch.strided and storage_key(tensor) in self.earlier
        if kind is not None or not (self.is_paused or is_earlier):
            super().record(tensor, kind, holder)

    def record_batch(self, batch: Any) -> None:
        """Enter a batch, without tensors that are a view of something larger, such as the whole data set."""
        self.phase = FORWARD
        noted = []
        for tensor in _tensors(batch):
            if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() <= tensor.nbytes:
                self.record_all([("batch", tensor)], INPUTS)
                noted.append(tensor)
        if not self.loads_elsewhere:
            return
        with self.paused():  # the batch after this one, which comes to a GPU meanwhile
            self.following = [torch.empty_like(tensor) for tensor in noted]
        self.record_all((("batch", tensor) for tensor in self.following), INPUTS)

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
                key = storage_key(value)
                if key not in self.alive and key not in self.earlier:
                    self.earlier.add(key)
                    weakref.finalize(value.untyped_storage(), self.earlier.discard, key).atexit = False
        return super().__torch_dispatch__(func, types, args, kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tree_iter(value) if isinstance(tensor, torch.Tensor)]


class AbsentLoopPeers(AbsentPeers):
    """Answers for ranks that are not there as if each were at the same call as this one.

    Args:
        ranks: the number of ranks that take the step together.
        copies: the number of ranks that have the same samples.
        recorder: the recorder, which is paused while answers are made.
    """

    def __init__(self, ranks: int, copies: int, recorder: LoopAllocations) -> None:
        super().__init__(ranks, sums_on_cpu=True)
        self.copies = copies
        self.recorder = recorder

    def message(self, sums: torch.Tensor, ranks: slice, own_part: slice) -> torch.Tensor:
        """Repeat what this rank says.

        Weights and counts stay this rank's, as gradients and buffers do, to whose sums nobody adds either. So the means
        over the ranks are those of this rank.
        """
        with self.recorder.paused():
            sums[ranks] = sums[own_part].repeat(self.ranks)
            sums[ranks.stop :] *= self.copies  # ranks with the same samples change the same buffers
        return sums

    def has_overflown(self, flag: torch.Tensor) -> bool:
        """Return True if this rank's gradients, which have values, have overflown."""
        return bool(flag > 0)


class _AbsentReplicas(Replicas):
    """Compares nothing: the other ranks hold nothing."""

    def after_step(self, step: int, number_done: int) -> None:
        """Do nothing."""

    def compare(self, step: int) -> None:
        """Do nothing."""


class LoneJob(LoopJob):
    """A job whose loop runs as that of one rank whose peers are not there; it saves nothing."""

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
            recorder.record_batch(batch)
            yield batch


class LoopRecorder(MemoryObserver):
    """Follows the steps of a job, and ends the loop when it has seen enough of them.

    Enough: until every optimizer has updated, and as many steps again, which find all of the optimizers' state.

    Args:
        job: the job whose steps are followed.
        recorder: the recorder of the job's allocations, which is still empty.

    Attributes:
        steps: for each recorded step: the ledger's rows (`traffic`), calls of `job.backward` (`backwards`), and
            how often each optimizer has updated (`updates`).
        began: the index of the event in the recording with which each step begins.
        all_updated: the number of steps until every optimizer had updated; None while some have not.
    """

    recorder: LoopAllocations

    def __init__(self, job: LoneJob, recorder: LoopAllocations) -> None:
        super().__init__(recorder, None)
        self.job = job
        self.parallel = job.parallel
        self.optimizers = job.objects.optimizers
        self.steps: list[dict[str, Any]] = []
        self.began: list[int] = []
        self.all_updated: int | None = None
        self.backwards = 0
        self.updates = [0] * len(self.optimizers)
        self.shards = job.mesh.size("shard")
        for number, optimizer in enumerate(self.optimizers):
            optimizer.register_step_post_hook(self._counting(number))

    def begin(self) -> None:
        """Name what the job has made, answer for its peers, and record the steps from here on."""
        job, comms = self.job, self.parallel.comms
        self.recorder.names = {module: name for name, module in self.parallel.model.named_modules()}
        self.recorder.phase = FORWARD
        job.recorder = self.recorder
        job.replicas = _AbsentReplicas(comms.step, tuple)
        job.paths.leave_out()  # the peers see nothing
        self.parallel.counts_its_samples = True  # nobody else does
        self.parallel.read_by(AbsentLoopPeers(comms.step.size, comms.same_samples.size, self.recorder))
        self.parallel.observe(self)
        self._name_what_stays()
        self._begin_step()

    def phase_begins(self, phase: str) -> None:
        """Enter the phase, and name what the loop's first calls have made: shards of models, and their buckets."""
        super().phase_begins(phase)
        self._name_what_stays()

    def backward_ended(self, model: torch.nn.Module) -> None:
        """Count the backward pass, and name the gradients that it has made; those in buckets are the buckets'."""
        self.backwards += 1
        self._name_what_stays()
        self.gradients_reduced(dict(model.named_parameters()))

    def parameters_updated(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Record a step that has ended, and end the loop after the last one.

        Raises:
            AllStepsRecorded: no more are wanted.
        """
        super().parameters_updated(parameters, optimizer)
        traffic = self.job.ledger.rows_since(self.before)
        self.steps.append({"traffic": traffic, "backwards": self.backwards, "updates": self.updates})
        count = len(self.steps)
        if self.all_updated is None and not self.missing():
            self.all_updated = count
        self._name_what_stays()  # a buffer may have another tensor
        if count >= (MOST_STEPS if self.all_updated is None else 2 * self.all_updated):
            self.recorder.has_ended = True
            raise AllStepsRecorded
        self._begin_step()

    def missing(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have made no update."""
        updates = [step["updates"] for step in self.steps]
        without = []
        for number, optimizer in enumerate(self.optimizers):
            if not any(counts[number] for counts in updates):
                without.append(optimizer)
        return without

    def states(self) -> list[int]:
        """Return the bytes of each optimizer's state on this rank."""
        sizes = []
        for optimizer in self.optimizers:
            # By storage: a state may be in two of an optimizer's parts.
            storages = {}
            for part in parts_of(optimizer):
                for tensor in itertools.chain(*map(memory_of, _tensors(list(part.state.values())))):
                    storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            sizes.append(sum(storages.values()))
        return sizes

    def _begin_step(self) -> None:
        self.before = self.job.ledger.copy()
        self.backwards = 0
        self.updates = [0] * len(self.optimizers)
        self.recorder.operations.clear()
        self.recorder.modules.clear()
        self.began.append(len(self.recorder.recording.events))

    def _counting(self, number: int) -> Callable[..., None]:
        def after(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
            self.updates[number] += 1
            self.recorder.record_all(states_of(updated_by(optimizer, self.parallel.named()), optimizer), OPTIMIZER)

        return after

    def _name_what_stays(self) -> None:
        """Name what is there between steps: parameters, buffers and what is sent."""
        parallel = self.parallel
        buckets = reducers_of(target.replicate for target in parallel.sums.targets)
        reducers = [*parallel.agreement.reducers, *buckets, *map(_inner, buckets)]
        name_what_stays(self.recorder, parallel.model, reducers)

    def shared_bytes(self, transport: str) -> int:
        """Return the bytes of shared memory that this rank maps for the ranks of its host; 0 for other transports."""
        comms = self.parallel.comms
        ranks = comms.data.size
        if transport not in ("auto", "shared_memory") or not 1 < ranks <= MAX_RANKS:
            return 0
        # Two inboxes for each sum, filled in turn; every rank maps those of all ranks.
        reducers = self.parallel.agreement.reducers if comms.step is comms.data else []
        for target in self.parallel.sums.targets:
            if 2 * sum(parameter.nbytes for parameter in target.parameters.values()) <= MAX_BYTES:
                reducers += reducers_of([target.replicate])
        sums = [reducer for reducer in map(_inner, reducers) if isinstance(reducer, GroupReducer)]
        return sum(2 * reducer.outbox.nbytes for reducer in sums) * ranks


def _inner(reducer: Reducer) -> Reducer:
    """Return the reducer that sums a bucket: of one that rounds, the reducer inside."""
    return reducer.inside if isinstance(reducer, CastReducer) else reducer
