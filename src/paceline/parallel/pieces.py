"""A step in pieces: backward passes, sums over the ranks and updates, each called by the user's own loop.

`apply.py` runs a step from one loss function. Here the loop calls its models as often as it likes, and its optimizers
one after another. This can be right for any loop, because gradients are linear in the losses:

    backward(loss, weight)   adds the gradient of weight * loss / (the sum of the ranks' weights)
    reduce(optimizer)        sums the gradients of the optimizer's parameters over the ranks
    end_step()               makes buffers equal, and learns whether a rank was asked to stop

Each piece begins with one small sum in which every rank says what it is about to do. Ranks that are at different pieces
find that out there, before a collective of one meets another's. The end of a step has none where the sums of `reduce`
have said all that it would: nobody was asked to stop, nothing is compared, and buffers, which nothing has changed, do
not belong to the models' state.

Needs: every rank calls the same pieces in the same order.
Promises: after `reduce` gradients are those of one rank that calls the same pieces with the whole batch.
Where a loop repeats its steps, the sum that follows a backward pass begins in it (`replicate/early.py`), before that of
`reduce`, which then also says whether all ranks still have the gradients that were sent.

Traffic per step: for each piece that says something, and each call of a model in parts, one all_reduce of
8 (4 + 5 R + buffers) bytes; for each update that of `replicate`, without the numbers of the step, and with `shard` that
of `shard/owned_update.py` (zero=1) or `shard/loop_models.py`. On GPUs the hosts exchange one more for each backward
pass. A sum that was foreseen, and was not wanted, comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from paceline.comm.batch_norm import share_by
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import checksum
from paceline.comm.fully_shard import gathered, is_part, local, read_whole, take_lost_write
from paceline.comm.host_copy import HostCopy
from paceline.comm.pytree import tensors_in
from paceline.comm.reducer import Reducer, message_reducer
from paceline.comm.shared_memory import SharedMemory
from paceline.nouns.errors import CollectiveError, LossError, PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel.apply import Comms, Parallel, RankPlace
from paceline.parallel.known_gradients import KnownGradient
from paceline.parallel.loss_scale import unscale
from paceline.parallel.model_adapter import EagerAdapter
from paceline.parallel.norm import global_norm, scale_gradients
from paceline.parallel.replicate.bucket import local_gradient
from paceline.parallel.replicate.buffers import KeptBuffers, sums_of
from paceline.parallel.replicate.early import EarlySums, Foresight
from paceline.parallel.replicate.strategy import Replicate
from paceline.parallel.shard.owned_update import OwnedUpdates
from paceline.parallel.step_stats import write_numbers

if TYPE_CHECKING:
    from paceline.parallel.shard.loop_models import LoopShards, RowUpdates
    from paceline.parallel.shard.strategy import Shard
    from paceline.parallel.split_forward import SplitForward, SplitForwards

BACKWARD, REDUCE, END, CALL, GATHER, SPLIT, READ = range(1, 8)
_CALLS = {
    BACKWARD: "calls job.backward",
    REDUCE: "sums gradients, for optimizer.step(), job.clip or job.gradients",
    END: "ends the step, for the next batch or the end of the loop",
    CALL: "calls a model of which each rank has a part",
    GATHER: "enters job.gathered",
    SPLIT: "calls a model for the first time",
    READ: "reads a number of a parameter or gradient that is in parts",
}
# Places in the message: sums over the ranks, and then five numbers of each rank; the last two are equal on some ranks.
# At the end of a step _STOP says that a rank was asked to stop; before an update, that the step's end has more to say.
_WEIGHT, _LOSS, _STOP, _OTHERS, _FIRST_RANK = range(5)
_CODE, _CHECK, _BAD, _ALIKE, _ARGUMENTS, _PER_RANK = range(6)
_MOST_OPTIMIZERS = 1000
_GRAPH_IS_GONE = "backward through the graph a second time"  # torch's words
_BAD_WEIGHT = 2  # in the place of _BAD, where 1 means the loss
# Relative: GPUs may sum in another order; other samples, or a loss of pieces, differ in their first digits.
SUMS_DIFFER = 1e-9
_MAY_DIFFER = {SPLIT: SUMS_DIFFER, BACKWARD: 1e-4}
SAME_SAMPLES = (
    "call models on every rank, not under `if job.rank == 0`; take the samples from the loader that paceline.prepare "
    "returned, or by job.data_rank in place of job.rank; draw with torch, whose random numbers are the same on these "
    "ranks"
)
_NOT_ALIKE = {  # what should be equal, and how to make it so
    SPLIT: ("ranks of one tensor group should call a model with the same arguments", SAME_SAMPLES),
    BACKWARD: (
        "ranks of one tensor group should compute the same loss",
        f"{SAME_SAMPLES}; and compute the loss from what model(...) returns, not from its parameters, of which each "
        "rank has a piece",
    ),
}


_OTHER_CHANGES = (
    "every rank should change parameters in job.gathered in the same way",
    "draw from a generator with the same seed on every rank, or on rank 0 and send it by paceline.broadcast",
)


class Piece(NamedTuple):
    """What a rank is about to do.

    Attributes:
        call: BACKWARD, REDUCE, END, CALL, GATHER, SPLIT or READ.
        target: the number of the optimizer, or of the model for CALL and SPLIT, from 1; 0 means all.
        check: a number that is the same on every rank where all is well.
        differs: what is wrong where it is not.
    """

    call: int
    target: int = 0
    check: float = 0.0
    differs: tuple[str, str] = ("", "")

    @property
    def code(self) -> int:
        """Return call and target as one number."""
        return self.call * _MOST_OPTIMIZERS + self.target


class Agreed(NamedTuple):
    """What all ranks know after the sum at the beginning of a piece."""

    weight: float
    loss: float
    is_stopping: bool
    has_others: bool  # on some rank the sums that began early are those of other gradients
    changed: list[int]  # for each buffer, as `Buffers.find_changed` has it


class Ended(NamedTuple):
    """What all ranks know of a step that has ended.

    Attributes:
        weight, loss: of the step's backward passes, added up; the loss is weighted.
        is_stopping: a rank was asked to stop.
    """

    weight: float
    loss: float
    is_stopping: bool


class OwnLoss(NamedTuple):
    """What a rank takes a backward pass from.

    Attributes:
        loss: this rank's mean loss, one number.
        weight: what it counts among the ranks' losses, such as its number of samples.
        factor: by which a GradScaler, or the loop, has multiplied the loss.
        whole_weight: what the ranks' weights add up to; None where this rank does not know.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float
    factor: torch.Tensor | None = None
    whole_weight: int | None = None


class _Whole:
    """A tensor that is whole for a while, and what takes its values to where ranks have parts of it."""

    def __init__(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> None:
        self.tensor = tensor
        self.fill = fill
        self.sums = sums_of(tensor.detach())

    def has_changed(self) -> bool:
        """Return whether its values are others, also where they were written past the counter of writes."""
        if not self.tensor.untyped_storage().nbytes():  # a checkpoint inside of `gathered` has let it go
            return False
        return not torch.equal(self.sums, sums_of(self.tensor.detach()))


class _Coming(NamedTuple):
    """A message that is on its way while a backward pass runs.

    Attributes:
        piece: what it says.
        is_left_out: whether the loss, which has weight 0, is not finite; None: it has a weight.
        whole_weight: what the ranks' weights should add up to.
    """

    piece: Piece
    is_left_out: torch.Tensor | None
    whole_weight: int


class _Target:
    """The parameters of one optimizer, and whether their gradients are still each rank's own.

    Attributes:
        replicate: sums gradients of whole parameters over all ranks.
        parts: sums those of parts over the ranks that hold the same; None where nothing is in parts.
        updates: how the optimizer updates parts; None where nothing is.
        known: what is known of the parameters' gradients.
        updated: how often the optimizer has updated.
        is_uncleared: the newest backward passes have added to the gradients of the update before.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], replicate: Replicate, parts: Replicate | None
    ) -> None:
        self.parameters = parameters
        self.replicate = replicate
        self.parts = parts
        self.updates: RowUpdates | None = None
        self.early = EarlySums(replicate)
        self.is_summed = True  # there is nothing to sum
        self.known: list[KnownGradient] = []
        self.updated = 0
        self.is_uncleared = False

    def sums(self) -> list[Replicate]:
        """Return what makes sums of the gradients."""
        return [self.replicate] if self.parts is None else [self.replicate, self.parts]


class _Message:
    """One number for each of its places, which the ranks add up.

    Args:
        comm: the ranks.
        shared: memory of theirs, if it is open.
        length: in numbers.
        device: where they are.
    """

    def __init__(self, comm: AxisComm, shared: SharedMemory | None, length: int, device: torch.device) -> None:
        self.length = length
        self.reducer = message_reducer(comm, shared, length, device)
        self.clear()

    def clear(self) -> None:
        """Begin a message: all zeros."""
        self.numbers = [0.0] * self.length
        self.of_device: dict[int, torch.Tensor] = {}  # by place: what the host does not know

    def write(self, place: int, value: torch.Tensor | float) -> None:
        """Put one number of this rank in its place; a tensor of one number on a device is not read."""
        value = _of_host(value)
        if isinstance(value, torch.Tensor):
            self.of_device[place] = value
        else:
            self.of_device.pop(place, None)
            self.numbers[place] = float(value)

    def begin(self) -> None:
        """Send this rank's numbers."""
        inbox = self.reducer.inboxes[self.reducer.turn]
        # What the host knows by one copy: each number by itself would be a kernel by itself.
        write_numbers(inbox, self.numbers)
        for place, value in self.of_device.items():
            inbox[place].copy_(value)
        self.reducer.begin()

    def finish(self) -> torch.Tensor:
        """Return the sums."""
        self.reducer.finish(None)
        return self.reducer.outbox.clone()


class PiecewiseParallel(Parallel):
    """The strategies of a rank whose loop calls the pieces of a step itself.

    Every rank has whole parameters and gradients, on `replicate` and on `shard` with zero=1, which shares out the
    updates; with zero=2 and 3 it has parts of them.
    """

    is_loop = True
    placed: EagerAdapter
    targets: list[_Target]
    said: _Message

    def __init__(self, placed: EagerAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        super().__init__(placed, workload, comms, plan, place)
        self.sharded: dict[str, Shard] = {}
        self.parts: LoopShards | None = None
        self.is_closed = False
        self.tensor: SplitForwards | None = None

    def replicate_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return a strategy without parameters: `split` makes one for each optimizer."""
        return self._summed_over({})

    def _summed_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return what sums gradients over all ranks, which see different samples. Collective."""
        sparse = self.placed.sparse() & parameters.keys()
        return Replicate(parameters, sparse, self.comms.data, self.plan, self.device, overlaps=False)

    def _target(self, parameters: Mapping[str, torch.nn.Parameter]) -> _Target:
        """Return the strategies of one optimizer's parameters. Collective."""
        if self.parts is None:
            return _Target(parameters, self._summed_over(parameters), None)
        whole = {name: parameter for name, parameter in parameters.items() if not is_part(parameter)}
        cut = {name: parameter for name, parameter in parameters.items() if is_part(parameter)}
        over_replicas = Replicate(cut, set(), self.comms.axes["replicate"], self.plan, self.device, overlaps=False)
        return _Target(parameters, self._summed_over(whole), over_replicas)

    def cut_models(
        self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[str]:
        """Keep a part of each of these models on each rank, for the optimizers too (ZeRO-2, ZeRO-3). Collective.

        Args:
            models: by the prefix of their names in `self.model`.
            optimizers: of the loop.

        Returns:
            The parameters that something else still refers to, by name.

        Raises:
            WorkloadError: two models share a parameter, or an optimizer has state already.
        """
        from paceline.parallel.shard.loop_models import LoopShards
        from paceline.parallel.shard.state_dicts import WholeStateDicts

        self.parts = LoopShards(models, self.comms.axes, self.plan, self.device)
        self.placed.parameters = dict(self.model.named_parameters())
        still_used = self.parts.exchange(optimizers)
        for number, shard in enumerate(self.parts.shards, 1):
            shard.before_call = partial(self._meet, Piece(CALL, len(self.sharded) + number))
            WholeStateDicts(shard.model, shard)
        read_whole(self.placed.parameters.values(), partial(self._meet, Piece(READ)))
        self.placed.keeps_pace = True  # the collectives of a forward pass want every rank there
        return still_used

    def shard_models(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Keep a part of each frozen model on each rank, and gather its blocks as it is called (ZeRO-3). Collective.

        Args:
            models: by the prefix of their names in `self.model`.
        """
        from paceline.parallel.shard.state_dicts import WholeStateDicts
        from paceline.parallel.shard.strategy import Shard

        plan = Plan(mesh=f"shard={self.comms.data.size}")
        for prefix, model in models.items():
            if self.tensor is not None:
                self.share_statistics([model])
            self.sharded[prefix] = shard = Shard(model, self.comms.data, plan, self.device)
            model.register_forward_hook(partial(_drop_unless_needed, shard))
            model.register_forward_pre_hook(partial(self._meet_at_call, shard, len(self.sharded)))
            WholeStateDicts(model, shard)
        self.placed.parameters = dict(self.model.named_parameters())  # the whole ones are let go

    def _meet_at_call(self, shard: Shard, number: int, model: torch.nn.Module, inputs: Any) -> None:
        """Find out whether all ranks call this frozen model."""
        if not shard.is_held:
            self._meet(Piece(CALL, number))

    def share_statistics(self, models: Sequence[torch.nn.Module]) -> None:
        """Have batch norm of models that run by their own code under `tensor` take the whole batch's statistics."""
        if self.placed.shared is not None:
            for model in models:
                share_by(model, self.placed.shared)

    def split_models(self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Split each model over the axis `tensor` when it is called first.

        Args:
            models: by the prefix of their names in `self.model`.
            optimizers: of the loop, in the order of their numbers.
        """
        from paceline.parallel.split_forward import SplitForwards

        self.tensor = SplitForwards(models, optimizers, self.comms, self.plan, self.device, self.placed.shared)
        for number, forward in enumerate(self.tensor.forwards, 1):
            forward.place = partial(self._split_model, number)
            forward.guard(True)

    @torch.inference_mode(False)  # the first call may be an evaluation; what is made here is trained with
    def _split_model(self, number: int, forward: SplitForward, call: Any) -> None:
        """Choose how to split a model by its first call, and keep this rank's pieces. Collective.

        Raises:
            WorkloadError, PlanError: it can't be split.
            CollectiveError: another rank is at another piece.
        """
        assert self.tensor is not None
        failure = None
        try:
            forward.decide(call, self.tensor.may_stay_whole)
        except PacelineError as error:
            failure = error
        piece = Piece(SPLIT, number)
        self._say(piece)
        self._write(self._place(_BAD), failure is not None)
        self._write(self._place(_ALIKE), forward.form_of(call))
        sums = self._sum()
        if failure is not None:
            raise failure
        self._read_all()
        self._read(piece, sums.tolist())
        forward.agree(self.comms.step)
        cut = self.tensor.cut(forward)
        forward.guard(True)
        self.buffers.take_forms(cut)
        for target in self.targets:
            if any(parameter is one for parameter in target.parameters.values() for one in cut):
                target.replicate.close()
                target.early.close()
                target.replicate = self._summed_over(target.parameters)
                target.early = EarlySums(target.replicate)

    def split(self, optimizers: Sequence[Mapping[str, torch.nn.Parameter]]) -> None:
        """Sum the gradients of each optimizer's parameters apart from those of the others. Collective.

        Args:
            optimizers: of each, the parameters that it updates, by name.
        """
        self.targets = []
        self.known: dict[torch.nn.Parameter, KnownGradient] = {}
        self.owned = OwnedUpdates(self.comms.axes["shard"], tuple(sorted(self.comms.axes["replicate"].peers)))
        self.hooks: list[RemovableHandle] = []
        self.reached: list[torch.nn.Parameter] = []  # by backward passes, since a piece began
        self.last_reached: list[torch.nn.Parameter] = []  # by the newest backward pass that reached some
        self.clearing_notices: list[str] = []
        self.raw: set[torch.nn.Parameter] = set()  # reached by a backward pass of the loop's own
        for parameters in optimizers:
            self.targets.append(self._target(parameters))
            self.owned.assign(parameters)
            self.targets[-1].known = self._name(parameters)
        self.is_doubtful = False  # this rank had a loss that is not finite, and has weight 0
        self.is_end_said = False  # at this step's newest sums no rank had something to say at its end
        comm = self.comms.step
        self.ranks_at = _FIRST_RANK
        self.buffers_at = _FIRST_RANK + _PER_RANK * comm.size
        length = self.buffers_at + len(self.buffers.tensors)
        shared = self.replicate.shared if comm is self.comms.data else None
        # What the host knows by itself travels without the device, which the answer would have to wait for.
        self.on_device = _Message(comm, shared, length, self.device)
        host = torch.device("cpu")
        self.on_host = self.on_device if self.device == host else _Message(comm, None, length, host)
        self.said = self.on_device
        self.foresight = Foresight()
        self.early: list[_Target] = []  # sums that a backward pass has begun
        self.is_mixed = False  # a backward pass has collectives of its own
        self.coming: _Coming | None = None
        self.unread: list[tuple[Piece, Callable[[], list[float]]]] = []  # the sums, and last whether a loss is doubtful
        self.losses: list[Agreed] = []  # of the step's backward passes
        self.kept: KeptBuffers | None = None
        self.buffers.begin_step()

    def update_in_parts(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Have the optimizers, in the order of `split`, update this rank's parts.

        Raises:
            PlanError: one updates parameters from each other, or can't be tried.
        """
        assert self.parts is not None
        for target, optimizer in zip(self.targets, optimizers, strict=True):
            target.updates = self.parts.updates_of(optimizer, target.parameters)

    def regroup(self, target: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Sum the gradients of other parameters with those of an optimizer, whose groups have changed. Collective."""
        self._drop_early()
        before = self.targets[target - 1]
        after = self._target(parameters)
        self.owned.assign(parameters)
        if self.tensor is not None:
            self.tensor.regroup(target)
        after.is_summed = before.is_summed
        after.updates = before.updates
        after.updated = before.updated
        for sums in before.sums():
            sums.close()
        before.early.close()
        self.targets[target - 1] = after
        after.known = self._name(parameters)

    def counts_samples(self, counts: bool) -> None:
        """Have forward passes count from here on; if not, they leave no trace in buffers, and only keep pace."""
        if self.placed.shared is not None:
            self.placed.shared.counts = counts
        if self.kept is not None:
            self.kept.__exit__()
            self.kept = None
        if not counts:
            self.kept = KeptBuffers(self.placed.written_alone())
            self.kept.__enter__()

    def backward(self, own: OwnLoss, piece: Piece, keeps_pace: bool, retain_graph: bool) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        Where the sum of the weights is known the ranks do not wait for each other: what they say is read after the
        backward pass, whose gradients are then cleared if a loss is bad.

        Args:
            own: this rank's loss.
            piece: this call.
            keeps_pace: this rank has no samples: its loss counts nothing.
            retain_graph: as `torch.Tensor.backward` takes it.

        Raises:
            LossError: it is not finite on some rank, or the weights add up to 0.
            CollectiveError: another rank is at another piece, or the weights add up to something else.
        """
        self._check_late()
        self._note_reached()
        self._drop_early()
        self.foresight.note(False, 0)
        self._look_for_uncleared()
        self._count_once()
        self.raw = {parameter for parameter in self.raw if parameter.grad is not None}
        loss = own.loss.reshape(())
        self._meet_on_host(piece)
        self._say(piece)
        own_weight = 0.0 if keeps_pace else _of_host(own.weight)
        is_left_out = None
        if isinstance(own_weight, torch.Tensor) or own_weight == 0:
            is_left_out = ~torch.isfinite(loss.detach()) & (own_weight == 0)
            loss = torch.where(is_left_out, 0.0, loss)
        detached = loss.detach()
        if own.factor is not None:
            detached = detached / own.factor
        value = _of_host(detached)
        self._write(_WEIGHT, own_weight if self.counts_its_samples else 0.0)
        self._write(_LOSS, own_weight * value if self.counts_its_samples else 0.0)
        self._write(self._place(_BAD), _badness(value, own_weight))
        self._write(self._place(_ALIKE), value)
        if own.whole_weight is not None and self._may_clear_gradients():
            self._write(_OTHERS, 1)
            self.said.begin()
            self.coming = _Coming(piece, is_left_out, own.whole_weight)
            scale = torch.tensor(own_weight / own.whole_weight, dtype=torch.float64)
            self._run_backward(loss * scale.to(loss.dtype), keeps_pace, retain_graph)
            self._take_coming()
        else:
            sums = self._sum()
            self.unread.append((piece, self._to_read(sums, is_left_out)))
            # A GPU is not waited for: what its ranks have said is read before the update.
            if self.device.type == "cpu":
                self._read_before_backward(sums)
            scale = own_weight / sums[_WEIGHT]
            self._run_backward(loss * scale.to(loss.dtype), keeps_pace, retain_graph)
        for target in self.targets:
            target.is_summed = False
        self._note()

    def _read_before_backward(self, sums: torch.Tensor) -> None:
        """Read what the ranks have said, and take part in sums that others began early if a loss is bad."""
        try:
            self._read_all()
        except LossError:
            if float(sums[_OTHERS]) > 0:  # ranks that read it after their backward passes
                self._begin_early()
                self._end_early(self._calls())
            raise

    def _may_clear_gradients(self) -> bool:
        """Return True if a backward pass can be undone: there are no gradients before it."""
        if self.device.type != "cpu" or self.parts is not None or self.tensor is not None:
            return False
        return all(parameter.grad is None for parameter in self.known)

    def _take_coming(self) -> None:
        """Read what was said before the backward pass.

        Raises:
            LossError: a loss is not finite, and gradients are as they were.
            CollectiveError: another rank is at another piece, or weights add up to something else.
        """
        coming, self.coming = self.coming, None
        if coming is None:
            return
        try:
            sums = self._finish_sum()
            self.unread.append((coming.piece, self._to_read(sums, coming.is_left_out)))
            self._read_all()
            self._check_weights(self.losses[-1].weight, coming.whole_weight)
        except PacelineError:
            for parameter in self.known:
                parameter.grad = None
            raise

    def _check_weights(self, found: float, expected: int) -> None:
        if found != expected:
            raise CollectiveError(
                "the weights of a loss should add up to the number of the batch's samples where it is left out",
                f"they add up to {found:g}, and the batch has {expected} samples",
                "hand in the weight on every rank, or on none",
            )

    def _run_backward(self, loss: torch.Tensor, keeps_pace: bool, retain_graph: bool) -> None:
        if self.parts is not None:
            self.parts.open_backward(loss, keeps_pace)
        self._begin_early()
        calls = self._calls()
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            if self.parts is not None:
                self.parts.forget()
            if isinstance(error, RuntimeError) and _GRAPH_IS_GONE in str(error):
                raise LossError(
                    "job.backward needs a loss of which no backward pass was made yet",
                    "what a backward pass of it needs was let go in one that came before",
                    "call job.backward once for each loss, in place of loss.backward(); for a second pass through the "
                    "same values write job.backward(loss, retain_graph=True) in the first, and .detach() what comes "
                    "from an earlier step",
                ) from error
            raise
        finally:
            reached = list(self.reached)
            self.reached.clear()
            self._end_early(calls)
        self.last_reached = reached or self.last_reached
        self.gradient_hooks.note_backward(reached)
        if self.parts is not None:
            self.parts.close_backward()

    def reduce(self, piece: Piece, is_stopping: bool) -> None:
        """Make the gradients of `piece.target` sums over the ranks, where they are not yet. Collective.

        Args:
            piece: this call.
            is_stopping: this rank was asked to stop; the end of the step will say so.

        Raises:
            UsageError: a gradient was changed, or made, by something else than `backward`.
            CollectiveError: another rank is at another piece.
            LossError: a gradient is not finite, of a loss with weight 0 that isn't either.
            WorkloadError: a dense parameter has a sparse gradient, or the other way round.
        """
        self._note_reached()
        if self.parts is not None and take_lost_write():
            raise _lost_write()
        if piece.target or len(self.targets) == 1:
            self._check_not_cleared(self.targets[piece.target - 1])
        self.foresight.note(True, piece.target)
        targets = self.targets if not piece.target else [self.targets[piece.target - 1]]
        is_early = self._agree_on_early(piece, targets, is_stopping)
        self._check_left_out()
        for target in targets:
            # Of the others it is known that nothing has changed them.
            if not (is_early and target.early.is_begun) or target.replicate.sparse_names:
                self._check_untouched(target)
        if self.parts is not None:
            for shard in self.parts.shards:
                for name in shard.raw_gradients():
                    raise _made_elsewhere(name)
            self.parts.finish()
        for target in targets:
            if not target.is_summed:
                self._reduce(target, is_early and target.early.is_begun)

    def begin_update(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        """Let the optimizer update what this rank is to update; its gradients are sums."""
        this = self.targets[target - 1]
        this.updated += 1
        if this.updated == 2 and this.is_uncleared:  # told once
            self.clearing_notices.append(
                "the second update has the gradients of the first too, which nothing has cleared: write "
                "optimizer.zero_grad() before job.backward, unless the gradients of all steps are to add up"
            )
        updates = self.targets[target - 1].updates
        if updates is not None:
            updates.begin()
        elif self.shares_updates:
            self.owned.begin(optimizer, self.targets[target - 1].parameters)
        if self.tensor is not None:
            self.tensor.guard(False)
            self.tensor.begin_update(optimizer, target)

    def end_update(self, target: int) -> None:
        """Give every rank what the others have updated. Collective."""
        updates = self.targets[target - 1].updates
        if updates is not None:
            updates.end()
        elif self.shares_updates:
            self.owned.end()
            self.owned.spread(self.targets[target - 1].parameters)
        if self.tensor is not None:
            self.tensor.end_update(target)
            self.tensor.guard(True)

    @property
    def counts_its_samples(self) -> bool:
        """True if no other rank counts the same samples, as those of a tensor group would."""
        return self.comms.axes["tensor"].rank == 0

    @property
    def shares_updates(self) -> bool:
        """True if each parameter is updated by one rank, and whole on all of them."""
        return self.parts is None and self.owned.comm.size > 1

    @property
    def notices(self) -> Sequence[str]:
        """Return what the person should know of how the models run."""
        forwards = [] if self.tensor is None else self.tensor.forwards
        split = [notice for forward in forwards for notice in forward.split.notices]
        return [*self.placed.notices, *split, *self.buffers.notices, *self.clearing_notices]

    def held(self) -> dict[str, LocalShard]:
        """Return where the optimizers' state of each parameter is, if not on every rank, and parts of frozen models."""
        held = self.owned.state_shards() if self.shares_updates else {}
        if self.parts is not None:
            held |= self.parts.held()
        for target in self.targets:
            if target.updates is not None:
                held |= target.updates.state_shards()
        for prefix, shard in self.sharded.items():
            for name, shard_spec in shard.shard_specs().items():
                if shard_spec.cuts:
                    held[prefix + name] = LocalShard(shard_spec, tuple(sorted(self.comms.axes["tensor"].peers)))
        if self.tensor is not None:
            held |= self.tensor.held()
        return held

    def end_step(self, piece: Piece, is_asked_to_stop: Callable[[], bool], may_skip_message: bool = False) -> Ended:
        """Make buffers equal on all ranks, and begin the next step. Collective.

        Args:
            piece: this call.
            is_asked_to_stop: returns whether this rank was. It is not called where the ranks say nothing: they hear of
                it in the next step.
            may_skip_message: nothing is compared, and the next piece tells whether all ranks were here.

        Returns:
            The weight and the weighted loss of the step's backward passes, added up.

        Raises:
            CollectiveError: another rank is at another piece.
            WorkloadError: the ranks' buffers have different shapes.
        """
        self._note_reached()
        self.counts_samples(True)
        self._drop_early()
        self.foresight.end_step()
        if not may_skip_message:  # no backward pass may follow
            self._check_late()
        skips_message = may_skip_message and self._is_all_said()
        is_stopping = not skips_message and self._agree_on_end(piece, is_asked_to_stop())
        self.is_end_said = False
        self.reshard()
        weight = sum(each.weight for each in self.losses)
        loss = sum(each.loss for each in self.losses)
        self.losses = []
        return Ended(weight, loss, is_stopping)

    def _is_all_said(self) -> bool:
        """Return whether the ranks have nothing to tell each other at the end of a step; equal on all of them."""
        return self.is_end_said and not self.unread  # a loss that is not read belongs to this step

    def _has_more_to_say(self, is_stopping: bool) -> bool:
        """Return whether this rank has something to tell the others at the end of the step, as far as it knows."""
        # One rank alone hears of a stop at once. Under tensor the ranks compare what they have in common.
        if is_stopping or self.comms.step.size == 1 or self.tensor is not None:
            return True
        # What is written after the sums only its rank knows then: a buffer of the model's state may not wait a step.
        return not self.buffers.are_derived or self.buffers.has_changed()

    def _agree_on_end(self, piece: Piece, is_stopping: bool) -> bool:
        """Make buffers equal; return whether a rank was asked to stop."""
        self._say(piece)
        self._write(_STOP, is_stopping)
        changed = self.buffers.find_changed()
        if any(changed):
            for place, flag in enumerate(changed, self.buffers_at):
                self._write(place, flag)
        agreed = self._agree(piece)
        # Ranks of `tensor` change the same buffers: each change was counted by all of them.
        copies = self.comms.axes["tensor"].size
        self.buffers.reduce([ranks // copies for ranks in agreed.changed])
        self.buffers.begin_step()
        return agreed.is_stopping

    def reshard(self) -> None:
        """Leave parts alone of parameters that a call has gathered; a backward pass of it gathers them again."""
        for shard in self.sharded.values():
            shard.reshard()
        if self.parts is not None:
            self.parts.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have parameters whole of which ranks have parts, to be read and changed. Collective.

        Raises:
            CollectiveError: ranks have made other changes.
        """
        shards = [*self.sharded.values(), *(self.parts.shards if self.parts is not None else ())]
        forwards = [] if self.tensor is None else self.tensor.forwards
        if not shards and not forwards:
            yield
            return
        self._meet(Piece(GATHER))
        whole: list[_Whole] = []
        try:
            for shard in shards:
                shard.hold(True)
                for name, parameter in shard.model.named_parameters():
                    if name not in shard.whole:
                        whole.append(_Whole(parameter, partial(shard.fill, name)))
            for forward in forwards:
                for name, tensor in forward.hold().items():
                    whole.append(_Whole(tensor, partial(forward.fill, name)))
            yield
            changed = [each for each in whole if each.has_changed()]
            with torch.no_grad():
                check = _check_of(each.tensor for each in changed)
                values = [each.tensor.detach().clone() for each in changed]  # whole tensors are about to go
            self._meet(Piece(GATHER, 0, check, _OTHER_CHANGES))
        finally:
            for shard in shards:
                shard.hold(False)
            for forward in forwards:
                forward.release()
        for each, value in zip(changed, values, strict=True):
            each.fill(value)

    def _meet(self, piece: Piece) -> None:
        """Find out whether all ranks are at a piece that adds nothing up. Collective."""
        if self.is_closed:
            return
        self._say(piece)
        sums = self._sum()
        self.unread.append((piece, self._to_read(sums, sums.new_zeros(()))))
        if sums.device.type == "cpu":
            self._read_all()

    def norm_of(self, target: int) -> torch.Tensor:
        """Return the norm of the gradients of an optimizer's parameters, of all if it is 0; after `reduce`."""
        gradients = self.gradients_of(target)
        if self.parts is not None:
            return self._norm_over("shard", gradients, self.parts.counted())
        if self.tensor is not None:
            return self._norm_over("tensor", gradients, self.tensor.counted())
        return global_norm(gradients, {}, [])

    def _norm_over(
        self, axis: str, gradients: Iterable[torch.nn.Parameter], counted: Mapping[torch.nn.Parameter, bool]
    ) -> torch.Tensor:
        """Return the norm of gradients of which ranks of an axis have parts; what all have, its first rank counts."""
        comm = self.comms.axes[axis]
        counts = {parameter: counted.get(parameter, comm.rank == 0) for parameter in gradients}
        return global_norm(counts, counts, [comm])

    def scale(self, target: int, factor: torch.Tensor) -> None:
        """Multiply the gradients of an optimizer's parameters, of all if it is 0."""
        scale_gradients(self.gradients_of(target), factor)

    def unscale(self, parameters: Iterable[torch.nn.Parameter], inverse: float) -> bool:
        """Multiply gradients by `inverse`; return whether one is infinite or NaN on some rank. Collective."""
        comms = []
        if self.parts is not None:
            comms.append(self.comms.axes["shard"])
        if self.tensor is not None:
            comms.append(self.comms.axes["tensor"])
        with torch.no_grad():
            return self.peer_values.has_overflown(unscale(parameters, inverse, self.device, comms))

    def gradients_of(self, target: int) -> dict[torch.nn.Parameter, str]:
        """Return the parameters that have a gradient, with their names."""
        targets = self.targets if not target else [self.targets[target - 1]]
        found = {}
        for each in targets:
            for name, parameter in each.parameters.items():
                if parameter.grad is not None:
                    found[parameter] = name
        return found

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the optimizers update, by name."""
        return {known.name: parameter for parameter, known in self.known.items()}

    def _pieces(self) -> Mapping[torch.nn.Parameter, tuple[SplitForward, str]]:
        """Return the parameters of which this rank has a piece."""
        return {} if self.tensor is None else self.tensor.pieces()

    def whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the values of a parameter, whole. Collective where ranks have parts or pieces of it."""
        found = self._pieces().get(parameter)
        if found is None:
            return gathered(parameter.detach())
        forward, name = found
        return forward.whole(name, parameter)

    def has_pieces(self, target: int) -> bool:
        """Return True if this rank has pieces of an optimizer's parameters, of any if it is 0."""
        pieces = self._pieces()
        return any(parameter in pieces for parameter in self.gradients_of(target))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what compression carries from step to step, by name."""
        state = {}
        for number, target in enumerate(self.targets):
            for name, tensor in target.replicate.state().items():  # what sums parts has none
                state[f"{number}.{name}"] = tensor
        return state

    def close(self) -> None:
        """Let go of the other ranks."""
        self.is_closed = True
        super().close()
        for target in self.targets:
            target.early.close()
            for sums in target.sums():
                sums.close()
        for hook in self.hooks:
            hook.remove()

    def _name(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[KnownGradient]:
        """Know parameters by their names, and hear of each backward pass that reaches them."""
        for name, parameter in parameters.items():
            if parameter in self.known:
                self.known[parameter].name = name
                continue
            self.known[parameter] = KnownGradient(parameter, name)
            was_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch registers hooks of no other
            # A list's own method: of many small parameters, a call of Python code for each is felt in a step's time.
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self.reached.append))
            parameter.requires_grad_(was_trained)
        return [self.known[parameter] for parameter in parameters.values()]

    def _note_reached(self) -> None:
        """Forget gradients to which backward passes of the loop's own have added this rank's samples."""
        for parameter in self.reached:
            known = self.known[parameter]
            known.noted = known.summed = None
            self.raw.add(parameter)
        self.reached.clear()

    def _check_not_cleared(self, target: _Target) -> None:
        """Raise UsageError if the first backward pass reached an optimizer's parameters, and all gradients are gone."""
        if target.updated or target.is_summed or any(each.parameter.grad is not None for each in target.known):
            return
        reached = {id(parameter) for parameter in self.last_reached}
        if not reached and len(self.targets) == 1:
            raise UsageError(
                "an optimizer's first update should have the gradients that job.backward has made",
                "no backward pass has reached one of its parameters",
                "compute the loss by calls of the models that paceline.prepare returned, and call job.backward(loss)",
            )
        if any(id(each.parameter) in reached for each in target.known):
            raise UsageError(
                "an optimizer's first update should have the gradients that job.backward has made",
                "they were cleared after job.backward, so that nothing would be updated",
                "call optimizer.zero_grad() before job.backward(loss), and optimizer.step() after it",
            )

    def _look_for_uncleared(self) -> None:
        """Find out whether the loop clears gradients between the first update of an optimizer and the second."""
        for target in self.targets:
            if target.updated != 1:
                continue
            gradients = [each.parameter.grad for each in target.known]
            if not all(gradient is not None and _values_of(local(gradient)).any() for gradient in gradients):
                target.is_uncleared = False
            elif any(each.summed is each.parameter.grad for each in target.known):  # else this step has added to them
                target.is_uncleared = True

    def _check_left_out(self) -> None:
        if not self.is_doubtful:
            return
        self.is_doubtful = False
        for parameter, known in self.known.items():
            gradient = local_gradient(parameter)
            if gradient is not None and not _values_of(gradient).isfinite().all():
                raise LossError(
                    "a loss with weight 0 should leave gradients as they are",
                    f"it is NaN or infinite on this rank, and so is the gradient of {known.name}",
                    "divide by the number of labels or by 1 if there are none: loss.sum() / count.clamp(min=1)",
                )

    def _begin_early(self) -> None:
        """Let the sums that will follow this backward pass begin in it, as far as can be foreseen."""
        numbers = self.foresight.next_sums()
        if not numbers or self.parts is not None:  # a backward pass sums the gradients of parts
            return
        targets = self.targets if 0 in numbers else [self.targets[number - 1] for number in sorted(numbers)]
        self.early = [target for target in targets if target.early.is_possible]
        for target in self.early:
            with self._as_trained(target):
                target.replicate.begin_step(lambda: None)
                target.early.begin()

    def _end_early(self, calls: int) -> None:
        for target in self.early:
            target.early.end_backward()
            calls += len(target.replicate.buckets)
        self.is_mixed = self._calls() != calls

    def _calls(self) -> int:
        return self.comms.step.ledger.calls.total()

    def _agree_on_early(self, piece: Piece, targets: Sequence[_Target], is_stopping: bool) -> bool:
        """Return whether sums that began in the backward pass are, on all ranks, those of the gradients."""
        self._say(piece)
        self._write(_STOP, self._has_more_to_say(is_stopping))
        wanted = [target for target in self.early if target in targets and target.early.is_begun]
        is_current = all(target.early.is_current() and not target.early.is_kept for target in wanted)
        self._write(_OTHERS, self.is_mixed or not is_current)
        self.said.begin()
        for target in self.early:  # in the order in which they began
            target.early.finish()
        agreed = self._read_with_earlier(piece, self._finish_sum())
        self.is_end_said = not agreed.is_stopping  # here: no rank has more to say
        if agreed.has_others:
            self.foresight.was_wrong()
        return not agreed.has_others

    def _check_late(self) -> None:
        """Raise UsageError if the newest update was made without a change of gradients that the loop made."""
        for target in self.targets:
            target.early.check_late()

    def _drop_early(self) -> None:
        """Wait for sums that are not needed."""
        for target in self.early:
            target.early.finish()
            if target.early.is_begun:
                target.early.forget()
                self.foresight.was_wrong()
        self.early = []

    def _reduce(self, target: _Target, is_early: bool) -> None:
        # A parameter of two optimizers may have a sum already.
        self._count_once(target)
        with self._as_trained(target):
            if is_early:
                target.early.install()
            else:
                target.early.forget()
                for sums in target.sums():
                    sums.begin_step(lambda: None)
                    sums.reduce_gradients()
        target.is_summed = True
        self.gradient_hooks.call(target.parameters.values())
        for known in target.known:
            known.is_unsummed = False
            gradient = known.parameter.grad
            if gradient is not None:
                known.summed = gradient

    @contextmanager
    def _as_trained(self, target: _Target) -> Iterator[None]:
        """Count what was frozen since its backward pass among the trained parameters."""
        frozen = []
        for known in target.known:
            if known.is_unsummed and not known.parameter.requires_grad:
                frozen.append(known.parameter)
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _count_once(self, target: _Target | None = None) -> None:
        """Keep a sum that the loop has not cleared on the first rank alone: the next sum counts it once."""
        for known in self.known.values() if target is None else target.known:
            summed, known.summed = known.summed, None
            if summed is None or known.parameter.grad is not summed:
                continue
            # Of those that hold the same: of a part only its replicas do.
            holders = self.comms.axes["replicate"] if is_part(known.parameter) else self.comms.data
            if holders.rank > 0:
                summed.zero_()
            known.note(summed)
            known.is_unsummed = True

    def _note(self) -> None:
        """Remember every gradient, to tell later whether something else has changed it."""
        # Rows that no other rank has are sums already, so torch's clip_grad_norm_ is right on them.
        may_have_parts = self.comms.axes["replicate"].size > 1 and self.parts is not None
        for parameter, known in self.known.items():
            if parameter.requires_grad:
                known.is_unsummed = True
            gradient = parameter.grad
            if gradient is not None:
                known.note(gradient, may_have_parts and is_part(gradient))

    def _check_untouched(self, target: _Target) -> None:
        for known in target.known:
            parameter = known.parameter
            gradient = parameter.grad
            if gradient is None or known.summed is gradient:
                continue
            if known.is_noted(gradient):
                continue
            if target.is_summed and parameter not in self.raw:
                known.summed = gradient  # put in the sum's place
                continue
            own = local_gradient(parameter)
            if own is None or not _values_of(own).count_nonzero():  # cleared by zero_grad(set_to_none=False)
                continue
            raise _made_elsewhere(known.name)

    def _place(self, number: int) -> int:
        """Return the place of one of this rank's numbers in the message."""
        return self.ranks_at + _PER_RANK * self.comms.step.rank + number

    @property
    def reducers(self) -> list[Reducer]:
        """Return what sums messages."""
        messages = [self.on_device] if self.on_host is self.on_device else [self.on_device, self.on_host]
        return [message.reducer for message in messages]

    def _say(self, piece: Piece) -> None:
        self._take_coming()  # of a backward pass that has failed
        # A loss is the device's, and so is the digest of what models are called with under `tensor`.
        is_of_host = piece.call != BACKWARD and self.tensor is None
        self.said = self.on_host if is_of_host else self.on_device
        self.said.clear()
        self._write(self._place(_CODE), piece.code)
        self._write(self._place(_CHECK), piece.check)
        if self.tensor is not None:
            self._write(self._place(_ARGUMENTS), self.tensor.take_digest())

    def _meet_on_host(self, piece: Piece) -> None:
        """Find out whether all ranks are at a piece, before the device is given what waits for the others' devices."""
        if self.on_host is self.on_device or self.comms.step.size == 1 or self.tensor is not None:
            return
        self.said = self.on_host
        self.said.clear()
        self._write(self._place(_CODE), piece.code)
        self._write(self._place(_CHECK), piece.check)
        self._check_same(piece, self._by_rank(self._sum().tolist()))

    def _write(self, place: int, value: torch.Tensor | float) -> None:
        self.said.write(place, value)

    def _agree(self, piece: Piece) -> Agreed:
        """Add up the ranks' messages, and check that all are at the same piece.

        Raises:
            CollectiveError: they are not, or were not before.
            LossError: a loss is not finite, or nothing counts.
        """
        return self._read_with_earlier(piece, self._sum())

    def _sum(self) -> torch.Tensor:
        """Return the sum of all ranks' messages."""
        self.said.begin()
        return self._finish_sum()

    def _finish_sum(self) -> torch.Tensor:
        return self.said.finish()

    def _to_read(self, sums: torch.Tensor, is_left_out: torch.Tensor | None) -> Callable[[], list[float]]:
        """Return what reads these numbers once they are there; a device goes on meanwhile with what comes after."""
        if sums.device.type == "cpu":
            return lambda: [*sums.tolist(), float(is_left_out or 0.0)]
        if is_left_out is None:
            is_left_out = sums.new_zeros(1)
        copy = HostCopy(sums.numel() + 1, sums.dtype, sums.device)
        numbers = torch.cat([sums, is_left_out.reshape(1)])
        copy.begin(lambda: numbers)
        return copy.read

    def _read_with_earlier(self, piece: Piece, sums: torch.Tensor) -> Agreed:
        """Read the sums of a piece, and those of the backward passes before it."""
        if self.unread and sums.device.type == "cpu":
            # First: if another rank is at another piece, those of a backward pass on a device may never come.
            agreed = self._read(piece, sums.tolist())
            self._read_all()
            return agreed
        self._read_all()
        return self._read(piece, sums.tolist())

    def _read_all(self) -> None:
        """Read the sums of the backward passes that have not been read."""
        unread = self.unread
        self.unread = []
        for piece, read in unread:
            *sums, is_left_out = read()
            self.is_doubtful |= is_left_out > 0
            self.losses.append(self._read(piece, sums))

    def _read(self, piece: Piece, sums: Sequence[float]) -> Agreed:
        weight, loss, stop, others = sums[: self.ranks_at]
        by_rank = self._by_rank(sums)
        self._check_same(piece, by_rank)
        if any(numbers[_BAD] for numbers in by_rank):
            raise self._bad(piece, by_rank)
        if piece.call == BACKWARD and weight <= 0:
            raise LossError(
                "can't take the mean loss over the ranks",
                f"its weights add up to {weight:g}",
                "make sure that every batch has something to predict, and hand in its number: job.backward(loss, n)",
            )
        if self.comms.axes["tensor"].size > 1:
            self._check_alike(SPLIT, [numbers[_ARGUMENTS] for numbers in by_rank])
            if piece.call in _MAY_DIFFER:
                self._check_alike(piece.call, [numbers[_ALIKE] for numbers in by_rank])
        changed = sums[self.buffers_at :]
        return Agreed(weight, loss, stop > 0, others > 0, [round(count) for count in changed])

    def _bad(self, piece: Piece, by_rank: Sequence[Sequence[float]]) -> PacelineError:
        """Return the error of the ranks that say that something is bad."""
        bad_ranks = [self.comms.step.peers[index] for index, numbers in enumerate(by_rank) if numbers[_BAD]]
        if piece.call == SPLIT:
            return WorkloadError(
                "every rank should be able to split the model by tensor",
                f"rank {bad_ranks[0]} can't, by what it was called with there",
                "see the error of that rank",
            )
        if any(numbers[_BAD] == _BAD_WEIGHT for numbers in by_rank):
            return LossError(
                "the weight of a loss should be a number, 0 or more",
                f"that of rank {bad_ranks[0]} is negative, NaN or infinite; the parameters were left as they were",
                "write over how many samples or tokens the loss is a mean",
            )
        return _not_finite(bad_ranks)

    def _by_rank(self, sums: Sequence[float]) -> list[Sequence[float]]:
        """Return the numbers of each rank."""
        return [sums[start : start + _PER_RANK] for start in range(self.ranks_at, self.buffers_at, _PER_RANK)]

    def _check_same(self, piece: Piece, by_rank: Sequence[Sequence[float]]) -> None:
        mine = piece.code
        for rank, (code, check, *_) in zip(self.comms.step.peers, by_rank, strict=True):
            if code != mine:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"this rank {_shown(mine)}, rank {rank} {_shown(int(code))}",
                    _fix(piece, int(code)),
                )
            if check != piece.check:
                what, fix = piece.differs
                raise CollectiveError(what, f"those of rank {rank} are not those of this rank", fix)

    def _check_alike(self, call: int, numbers: Sequence[float]) -> None:
        """Check what is equal on the ranks of `tensor`, which see the same samples.

        All ranks look at all numbers: none goes on while another stops.
        """
        first: dict[int, tuple[int, float]] = {}  # rank and number, by the ranks' samples
        for rank, number in zip(self.comms.step.peers, numbers, strict=True):
            other, expected = first.setdefault(self.mesh.data_part(rank), (rank, number))
            if abs(number - expected) <= _MAY_DIFFER[call] * abs(expected):
                continue
            what, fix = _NOT_ALIKE[call]
            shown = f": {expected:.6g} and {number:.6g}" if call == BACKWARD else ""
            raise CollectiveError(what, f"those of rank {other} and rank {rank} differ{shown}", fix)


def _drop_unless_needed(shard: Shard, model: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Keep parts alone after a forward pass, unless a backward pass through it needs whole parameters."""
    if not shard.is_held and not any(tensor.requires_grad for tensor in tensors_in(output)):
        shard.reshard()


def _check_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return a number that differs where a tensor does, but for rare chances."""
    total = 0.0
    for number, tensor in enumerate(tensors):
        total += float(checksum(tensor).nan_to_num(0.5, 1.5, 2.5)) * (1 + number % 7)
    return total


def _of_host(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return what the host may read without waiting as a number, else as a tensor of float64."""
    if not isinstance(value, torch.Tensor):
        return value
    has_value = value.device.type == "cpu" and not isinstance(value, FakeTensor)
    return float(value) if has_value else value.double()


def _badness(loss: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return what is wrong with a loss and its weight: 0, 1 for the loss, `_BAD_WEIGHT` for the weight."""
    is_bad = ~torch.isfinite(loss) if isinstance(loss, torch.Tensor) else not math.isfinite(loss)
    if not isinstance(weight, torch.Tensor):
        return is_bad if 0 <= weight < math.inf else _BAD_WEIGHT
    is_weight = torch.isfinite(weight) & (weight >= 0)
    return torch.where(is_weight, is_bad, _BAD_WEIGHT)


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a gradient has: of a sparse one those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _made_elsewhere(name: str) -> UsageError:
    return UsageError(
        "gradients should be made by job.backward, and changed only once they are sums over the ranks",
        f"the gradient of {name} was made or changed by something else than job.backward, while it was that of "
        "this rank's samples alone",
        "write job.backward(loss) in place of loss.backward(), job.clip(max_norm) in place of "
        "clip_grad_norm_, and call job.gradients() before other changes",
    )


def _lost_write() -> UsageError:
    return UsageError(
        "gradients and parameters that are in parts should be changed whole",
        "rows of one, such as gradient[0] or gradient.split(2)[0], were written into: they were a copy, as other ranks "
        "have some of these rows, so that the change would be lost",
        "add zero=1 to the plan, where gradients and parameters are whole; or change them by operations on the whole "
        "tensor, such as gradient.mul_(0.5), gradient.clamp_(-1, 1)",
    )


def _shown(code: int) -> str:
    call, target = divmod(code, _MOST_OPTIMIZERS)
    which = ""
    if target:
        which = f" (model {target})" if call in (CALL, SPLIT) else f" (optimizer {target})"
    return f"{_CALLS.get(call, 'does something else')}{which}"


def _fix(piece: Piece, other_code: int) -> str:
    if CALL in (piece.call, other_code // _MOST_OPTIMIZERS):
        return (
            "let no rank leave out a call of a model; inside `with job.gathered():` each rank may call models as often "
            "as it likes"
        )
    if READ in (piece.call, other_code // _MOST_OPTIMIZERS):
        return (
            "read it on every rank, such as norm = float(gradient.norm()), and print the number under "
            "`if job.rank == 0`"
        )
    return (
        "let no rank leave out a batch, a backward pass or an update; one without samples hands in its loss with "
        "weight 0"
    )


def _not_finite(ranks: Sequence[int]) -> LossError:
    plural = "s" if len(ranks) > 1 else ""
    error = LossError(
        "the loss should be a finite number",
        f"it is NaN or infinite on rank{plural} {', '.join(map(str, ranks))}; the parameters were left as they were",
        "lower the learning rate, clip the gradients with job.clip(1.0), or look for bad samples in this batch",
    )
    error.rank = ranks[0]
    return error
