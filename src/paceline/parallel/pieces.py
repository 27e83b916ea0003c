"""A step in pieces: backward passes, sums over the ranks and updates, each called by the user's own loop.

`apply.py` runs a step from one loss function. Here the loop calls its models as often as it likes, and its optimizers
one after another. This can be right for any loop, because gradients are linear in the losses:

    backward(loss, weight)   adds the gradient of weight * loss / (the sum of the ranks' weights)
    reduce(optimizer)        sums the gradients of the optimizer's parameters over the ranks
    end_step()               makes buffers equal, and learns whether a rank was asked to stop

With one optimizer `backward` sums the gradients, bucket by bucket while they are made, and `reduce` finds them summed.
Gradients of earlier passes are set aside meanwhile, and added to the sums. Inside `accumulate`, and with several
optimizers, of which a pass may reach any, gradients stay this rank's until `reduce`.

A piece that communicates begins with one small sum in which every rank says what it is about to do, and what it has
done since the last one. Ranks that are at different pieces find that out there, before a collective of one meets
another's. The end of a step has none where the last one has said all that it would: nobody was asked to stop, nothing
is compared, and buffers, which nothing has changed, do not belong to the models' state.

Needs: every rank calls the same pieces in the same order.
Promises: after `reduce` gradients are those of one rank that calls the same pieces with the whole batch.
Traffic per step: for each piece that says something, and each call of a model in parts, one all_reduce of
8 (4 + 6 R + buffers) bytes; for each pass or update that sums gradients that of `replicate`, without the numbers of the
step, and with `shard` that of `shard/owned_update.py` (zero=1) or `shard/loop_models.py`. On GPUs the hosts exchange
one more for each backward pass.
"""

from __future__ import annotations

import math
import zlib
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
from paceline.parallel.replicate.strategy import Replicate
from paceline.parallel.shard.owned_update import OwnedUpdates
from paceline.parallel.step_stats import write_numbers

if TYPE_CHECKING:
    from paceline.parallel.shard.loop_models import LoopShards, RowUpdates
    from paceline.parallel.shard.strategy import Shard
    from paceline.parallel.split_forward import SplitForward, SplitForwards

BACKWARD, REDUCE, END, CALL, GATHER, SPLIT, READ, UPDATE = range(1, 9)
_CALLS = {
    BACKWARD: "calls job.backward",
    REDUCE: "sums gradients, for optimizer.step(), job.clip or job.gradients",
    END: "ends the step, for the next batch or the end of the loop",
    CALL: "calls a model of which each rank has a part",
    GATHER: "enters job.gathered",
    SPLIT: "calls a model for the first time",
    READ: "reads a number of a parameter or gradient that is in parts",
    UPDATE: "updates",
}
# Places in the message: sums over the ranks, and then numbers of each rank; _ALIKE and _ARGUMENTS are equal on some
# ranks, and _DONE is a checksum of the pieces without a message of their own that came since the last message.
# At the end of a step _STOP says that a rank was asked to stop; before an update, that the step's end has more to say.
# _LEFT_OUT says that a loss with weight 0 is not finite.
_WEIGHT, _LOSS, _STOP, _LEFT_OUT, _FIRST_RANK = range(5)
_CODE, _CHECK, _BAD, _ALIKE, _ARGUMENTS, _DONE, _PER_RANK = range(7)
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
        call: one of the constants above, from BACKWARD to UPDATE.
        target: the number of the optimizer, or of the model for CALL and SPLIT, from 1; 0 means all. Of BACKWARD: 1
            inside `accumulate`.
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
        whole_weight: what the ranks' weights should add up to.
    """

    piece: Piece
    whole_weight: int


class _Target:
    """The parameters of one optimizer, and whether their gradients are still each rank's own.

    Attributes:
        replicate: sums gradients of whole parameters over all ranks.
        parts: sums those of parts over the ranks that hold the same; None where nothing is in parts.
        updates: how the optimizer updates parts; None where nothing is.
        known: what is known of the parameters' gradients.
        updated: how often the optimizer has updated.
        awaits_pass: no backward pass has come since the newest update.
        is_uncleared: the newest backward passes have added to the gradients of the update before.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], replicate: Replicate, parts: Replicate | None
    ) -> None:
        self.parameters = parameters
        self.replicate = replicate
        self.parts = parts
        self.updates: RowUpdates | None = None
        self.is_summed = True  # there is nothing to sum
        self.known: list[KnownGradient] = []
        self.updated = 0
        self.awaits_pass = True
        self.is_uncleared = False

    def sums(self) -> list[Replicate]:
        """Return what makes sums of the gradients."""
        return [self.replicate] if self.parts is None else [self.replicate, self.parts]


class _Running(NamedTuple):
    """A backward pass that sums gradients.

    Attributes:
        target: whose gradients.
        earlier: sums of earlier passes, which are set aside.
        local: copies of gradients that were this rank's alone, where the pass is known to fail.
    """

    target: _Target
    earlier: dict[torch.nn.Parameter, torch.Tensor]
    local: dict[torch.nn.Parameter, torch.Tensor]


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
        # A rank without samples may take part in forward passes that count nothing.
        self.may_keep_pace = comms.step.size > 1
        # No other rank counts the same samples, as those of a tensor group would.
        self.counts_its_samples = comms.axes["tensor"].rank == 0
        # Each parameter is updated by one rank, and whole on all of them.
        self.shares_updates = comms.axes["shard"].size > 1

    def replicate_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return a strategy without parameters: `split` makes one for each optimizer."""
        return self._summed_over({})

    def _summed_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return what sums gradients over all ranks, which see different samples. Collective."""
        sparse = self.placed.sparse() & parameters.keys()
        return Replicate(parameters, sparse, self.comms.data, self.plan, self.device)

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
        self.shares_updates = False
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
        self.said.write(self.own_at + _BAD, failure is not None)
        self.said.write(self.own_at + _ALIKE, forward.form_of(call))
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
                target.replicate = self._summed_over(target.parameters)

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
        self.is_doubtful = False  # a rank had a loss that is not finite, and has weight 0
        self.is_end_said = False  # at this step's newest sums no rank had something to say at its end
        comm = self.comms.step
        self.ranks_at = _FIRST_RANK
        self.own_at = _FIRST_RANK + _PER_RANK * comm.rank
        self.buffers_at = _FIRST_RANK + _PER_RANK * comm.size
        length = self.buffers_at + len(self.buffers.tensors)
        shared = self.replicate.shared if comm is self.comms.data else None
        # What the host knows by itself travels without the device, which the answer would have to wait for.
        self.on_device = _Message(comm, shared, length, self.device)
        host = torch.device("cpu")
        self.on_host = self.on_device if self.device == host else _Message(comm, None, length, host)
        self.said = self.on_device
        self.is_accumulating = False
        self.has_backward = False  # `backward` was called
        self.looks_for_uncleared = True  # some optimizer has not updated twice
        self.overlaps = False  # sums begin in a backward pass, not after it
        self.running: _Running | None = None  # a backward pass that sums gradients; or one that has raised
        self.must_sum_after = False  # some backward pass had collectives of its own, or made a gradient twice
        self.done: list[int] = []  # codes of the pieces without a message since the last message
        self.last_done: list[int] = []  # of those that the last message told of
        self.coming: _Coming | None = None
        self.unread: list[tuple[Piece, Callable[[], list[float]]]] = []  # reads the sums
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
        self._finish_failed()
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

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside to this rank, until a pass or an update outside sums them."""
        was_accumulating, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = was_accumulating

    def backward(
        self, own: OwnLoss, piece: Piece, keeps_pace: bool, retain_graph: bool, is_stopping: bool = False
    ) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        Where the sum of the weights is known the ranks do not wait for each other: what they say is read after the
        backward pass, whose gradients are then taken back if a loss is bad.

        Args:
            own: this rank's loss.
            piece: this call.
            keeps_pace: this rank has no samples: its loss counts nothing.
            retain_graph: as `torch.Tensor.backward` takes it.
            is_stopping: this rank was asked to stop; the end of the step will say so.

        Raises:
            LossError: it is not finite on some rank, or the weights add up to 0; gradients are as they were.
            CollectiveError: another rank is at another piece, or the weights add up to something else.
        """
        self._settle()
        if self.looks_for_uncleared:
            self._look_for_uncleared()
        target = self._summed_in_backward()
        if target is None:
            self._count_once()
        if self.on_host is not self.on_device:
            self._meet_on_host(piece)
        loss, own_weight = self._say_loss(own, piece, keeps_pace, is_stopping)
        failure = None
        # One rank waits for nobody, and knows what is wrong before its pass.
        if own.whole_weight is not None and self.comms.step.size > 1 and self._may_take_back():
            self.said.begin()
            self.coming = _Coming(piece, own.whole_weight)
            share: Any = torch.tensor(own_weight / own.whole_weight, dtype=torch.float64)
        else:
            self.said.begin()
            sums = self._finish_sum()
            self.unread.append((piece, self._to_read(sums)))
            # A GPU is not waited for: what its ranks have said is read before the update.
            if self.device.type == "cpu":
                failure = self._read_for(target)
            share = own_weight / sums[_WEIGHT]
        if target is None:
            self._run_backward(loss * share.to(loss.dtype), keeps_pace, retain_graph)
            if self.coming is not None:
                self._take_coming()
            for each in self.targets:
                each.is_summed = each.awaits_pass = False
            self._note()
        else:
            self._run_and_sum(target, loss * share.to(loss.dtype), (keeps_pace, retain_graph), failure)

    def _summed_in_backward(self) -> _Target | None:
        """Return whose gradients the next backward pass sums; None where they wait for `reduce`."""
        # Of several optimizers a pass may reach any. FSDP2 sums the gradients of parts by itself, and of pieces the
        # loop could not tell whether they are sums.
        if len(self.targets) > 1 or self.parts is not None or self.tensor is not None or self.is_accumulating:
            return None
        return self.targets[0]

    def _say_loss(
        self, own: OwnLoss, piece: Piece, keeps_pace: bool, is_stopping: bool
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Write the message of a backward pass; return what it begins at, and its weight on this rank."""
        loss = own.loss.reshape(())
        self._say(piece)
        own_weight = 0.0 if keeps_pace else _of_host(own.weight)
        if isinstance(own_weight, torch.Tensor) or own_weight == 0:
            is_left_out = ~torch.isfinite(loss.detach()) & (own_weight == 0)
            loss = torch.where(is_left_out, 0.0, loss)
            self.said.write(_LEFT_OUT, is_left_out)
        detached = loss.detach()
        if own.factor is not None:
            detached = detached / own.factor
        value = _of_host(detached)
        if self.counts_its_samples:
            self.said.write(_WEIGHT, own_weight)
            self.said.write(_LOSS, own_weight * value)
        if self._has_more_to_say(is_stopping):
            self.said.write(_STOP, 1)
        self.said.write(self.own_at + _BAD, _badness(value, own_weight))
        if self.tensor is not None:
            self.said.write(self.own_at + _ALIKE, value)
        return loss, own_weight

    def _read_for(self, target: _Target | None) -> LossError | None:
        """Read what the ranks have said; return what is wrong with a loss where the pass runs all the same.

        Ranks that know the weight without waiting hear of it after the pass, and want this rank in its sums.
        """
        try:
            if self.coming is None:
                self._read_all()
            else:
                self._read_coming()
        except LossError as error:
            if target is None or self.comms.step.size == 1:
                raise
            return error
        except CollectiveError:
            if self.running is not None:
                self._take_back()
            raise
        return None

    def _may_take_back(self) -> bool:
        """Return True if a backward pass can be undone: no gradients of this rank alone are there before it."""
        if self.device.type != "cpu" or self.parts is not None or self.tensor is not None:
            return False
        for parameter, known in self.known.items():
            if parameter.grad is not None and known.summed is not parameter.grad:
                return False
        return True

    def _take_coming(self) -> None:
        """Read what was said before the backward pass.

        Raises:
            LossError: a loss is not finite, and gradients are as they were.
            CollectiveError: another rank is at another piece, or weights add up to something else.
        """
        try:
            self._read_coming()
        except PacelineError:
            for parameter in self.known:
                parameter.grad = None
            raise

    def _read_coming(self) -> None:
        coming, self.coming = self.coming, None
        assert coming is not None
        self.unread.append((coming.piece, self._to_read(self._finish_sum())))
        self._read_all()
        self._check_weights(self.losses[-1].weight, coming.whole_weight)

    def _check_weights(self, found: float, expected: int) -> None:
        if found != expected:
            raise CollectiveError(
                "the weights of a loss should add up to the number of the batch's samples where it is left out",
                f"they add up to {found:g}, and the batch has {expected} samples",
                "hand in the weight on every rank, or on none",
            )

    def _run_and_sum(
        self, target: _Target, loss: torch.Tensor, options: tuple[bool, bool], failure: LossError | None
    ) -> None:
        """Run a backward pass, sum its gradients over the ranks, and add them to those that are sums already.

        Args:
            target: whose gradients.
            loss: this rank's share of the mean.
            options: whether the loss counts nothing, and whether the graph is kept.
            failure: what is known to be wrong already.

        Raises:
            LossError: a loss is not finite; gradients are as they were.
        """
        made_elsewhere = self._find_raw(target) if self.raw else ""
        earlier = self._set_sums_aside(target)
        self.running = _Running(target, earlier, _copies_of(target.parameters.values()) if failure is not None else {})
        with self._as_trained(target):
            target.replicate.begin_step(_no_scale)
            if self.overlaps:
                target.replicate.begin_last_backward()
            self._run_backward(loss, *options)
            if self.coming is not None:  # before this rank waits for one that is at another piece
                failure = self._read_for(target)
            target.replicate.reduce_gradients()
        error: PacelineError | None = failure
        if made_elsewhere:
            error = error or _made_elsewhere(made_elsewhere)
        if self.is_doubtful and self.device.type == "cpu":
            error = self._left_out() or error
        if error is not None:
            self._take_back()
            raise error
        self.running = None
        if self.gradient_hooks.hooks or earlier:
            self.gradient_hooks.call(target.parameters.values(), earlier)
        self._note_summed(target)
        target.awaits_pass = False

    def _take_back(self) -> None:
        """Give the parameters the gradients that they had before the backward pass."""
        running, self.running = self.running, None
        assert running is not None
        for known in running.target.known:
            known.summed = running.earlier.get(known.parameter)
            known.parameter.grad = running.local.get(known.parameter, known.summed)

    def _find_raw(self, target: _Target) -> str:
        """Return the name of a parameter that has a gradient of a backward pass of the loop's own; "" if none has."""
        for known in target.known:
            gradient = known.parameter.grad
            if known.parameter in self.raw and gradient is not None and _values_of(gradient).count_nonzero():
                return known.name
        return ""

    def _set_sums_aside(self, target: _Target) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Take away gradients that are sums already, which the loop has kept: the next pass adds to them."""
        earlier = {}
        for known in target.known:
            summed, known.summed = known.summed, None
            gradient = known.parameter.grad
            if gradient is None or not (target.is_summed or summed is gradient):
                continue
            if known.parameter in self.raw:
                continue
            if self.comms.step.size > 1:
                earlier[known.parameter] = gradient.clone()  # the next sums come to where these are
                known.parameter.grad = None
        return earlier

    def _run_backward(self, loss: torch.Tensor, keeps_pace: bool, retain_graph: bool) -> None:
        if self.parts is not None:
            self.parts.open_backward(loss, keeps_pace)
        collectives = self._collectives() if self.comms.step.size > 1 else 0
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
        # Sums of gradients must not come between collectives of the pass itself, in another order on each rank. By
        # re-entrant checkpointing a gradient comes twice.
        if self.comms.step.size > 1:
            self.must_sum_after |= self._collectives() != collectives or len(set(map(id, reached))) < len(reached)
            self.overlaps = not self.must_sum_after
        self.last_reached = reached or self.last_reached
        self.has_backward = True
        if self.gradient_hooks.hooks:
            self.gradient_hooks.note_backward(reached)
        if self.parts is not None:
            self.parts.close_backward()

    def _collectives(self) -> int:
        """Return how many collectives there were, without those that have sent gradients of this pass."""
        sent = 0 if self.running is None else self.running.target.replicate.next_bucket
        return self.comms.step.ledger.calls.total() - sent

    def _finish_failed(self) -> None:
        """Finish the sums of a backward pass that has raised, for which ranks without an error wait. Collective."""
        running = self.running
        if running is not None:
            with self._as_trained(running.target):
                running.target.replicate.reduce_gradients()
            self._take_back()

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
        self._settle()
        targets = self.targets if not piece.target else [self.targets[piece.target - 1]]
        if len(targets) == 1 and not targets[0].updated:
            self._check_not_cleared(targets[0])
        if self._needs_meeting(targets):
            self._say(piece)
            if self._has_more_to_say(is_stopping):
                self.said.write(_STOP, 1)
            self._agree(piece)
        else:
            if self.unread:
                self._read_all()
            self.done.append(piece.code)
        for target in targets:
            self._check_untouched(target)
        if self.parts is not None:
            self._finish_parts()
        for target in targets:
            if not target.is_summed:
                self._reduce(target)
        error = self._left_out() if self.is_doubtful else None
        if error is not None:
            raise error

    def _finish_parts(self) -> None:
        """Make gradients of parts ready for an update. Collective.

        Raises:
            UsageError: a backward pass of the loop's own has made one.
        """
        assert self.parts is not None
        if take_lost_write():
            raise _lost_write()
        for shard in self.parts.shards:
            for name in shard.raw_gradients():
                raise _made_elsewhere(name)
        self.parts.finish()

    def _needs_meeting(self, targets: Sequence[_Target]) -> bool:
        """Return whether the sums of these gradients, or the update after them, communicate."""
        if self.parts is not None or self.tensor is not None or self.shares_updates or len(self.targets) > 1:
            return True
        return not targets[0].is_summed or targets[0].awaits_pass

    def begin_update(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        """Let the optimizer update what this rank is to update; its gradients are sums."""
        self.done.append(Piece(UPDATE, target).code)
        this = self.targets[target - 1]
        this.updated += 1
        this.awaits_pass = True
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
    def notices(self) -> Sequence[str]:
        """Return what the person should know of how the models run."""
        split = [] if self.tensor is None else self.tensor.notices()
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
        self._settle()
        if self.may_keep_pace:
            self.counts_samples(True)
        if self.comms.step.size == 1:
            self._read_all()
            is_stopping = is_asked_to_stop()
            if self.buffers.slots:
                self.buffers.reduce(self.buffers.find_changed())
                self.buffers.begin_step()
        else:
            # A loss that is not read belongs to this step.
            skips_message = may_skip_message and self.is_end_said and not self.unread
            is_stopping = not skips_message and self._agree_on_end(piece, is_asked_to_stop())
        self.is_end_said = False
        if self.sharded or self.parts is not None:
            self.reshard()
        weight = loss = 0.0
        for each in self.losses:
            weight += each.weight
            loss += each.loss
        self.losses = []
        return Ended(weight, loss, is_stopping)

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
        self.said.write(_STOP, is_stopping)
        changed = self.buffers.find_changed()
        if any(changed):
            for place, flag in enumerate(changed, self.buffers_at):
                self.said.write(place, flag)
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
        self.unread.append((piece, self._to_read(sums)))
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

    def _settle(self) -> None:
        """Before a piece: note what backward passes of the loop's own have reached, and end one that has raised."""
        if self.reached:
            for parameter in self.reached:
                known = self.known[parameter]
                known.noted = known.summed = None
                self.raw.add(parameter)
            self.reached.clear()
        if self.raw:
            self.raw = {parameter for parameter in self.raw if parameter.grad is not None}
        if self.running is not None:
            self._finish_failed()

    def _check_not_cleared(self, target: _Target) -> None:
        """Raise UsageError if the first backward pass reached an optimizer's parameters, and all gradients are gone."""
        if not self.has_backward or any(each.parameter.grad is not None for each in target.known):
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
        self.looks_for_uncleared = False
        for target in self.targets:
            self.looks_for_uncleared |= target.updated < 2
            if target.updated != 1 or not target.awaits_pass:
                continue
            gradients = [each.parameter.grad for each in target.known]
            if not all(gradient is not None and _values_of(local(gradient)).any() for gradient in gradients):
                target.is_uncleared = False
            elif any(each.summed is each.parameter.grad for each in target.known):  # else this step has added to them
                target.is_uncleared = True

    def _left_out(self) -> LossError | None:
        """Return an error if a loss that has no weight, and is not finite, has left such gradients on some rank."""
        self.is_doubtful = False
        for parameter, known in self.known.items():
            gradient = local_gradient(parameter)
            if gradient is not None and not _values_of(gradient).isfinite().all():
                return LossError(
                    "a loss with weight 0 should leave gradients as they are",
                    f"it is NaN or infinite on a rank, and so is the gradient of {known.name}",
                    "divide by the number of labels or by 1 if there are none: loss.sum() / count.clamp(min=1)",
                )
        return None

    def _reduce(self, target: _Target) -> None:
        # A parameter of two optimizers may have a sum already.
        self._count_once(target)
        with self._as_trained(target):
            for sums in target.sums():
                sums.begin_step(_no_scale)
                sums.reduce_gradients()
        self.gradient_hooks.call(target.parameters.values())
        self._note_summed(target)

    def _note_summed(self, target: _Target) -> None:
        """Remember that the gradients of an optimizer's parameters are sums."""
        target.is_summed = True
        for known in target.known:
            known.is_unsummed = False
            known.summed = known.parameter.grad

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

    @property
    def reducers(self) -> list[Reducer]:
        """Return what sums messages."""
        messages = [self.on_device] if self.on_host is self.on_device else [self.on_device, self.on_host]
        return [message.reducer for message in messages]

    def _say(self, piece: Piece) -> None:
        if self.running is not None or self.coming is not None:  # of a backward pass that has raised
            self._finish_failed()
            if self.coming is not None:
                self._take_coming()
        # A loss is the device's, and so is the digest of what models are called with under `tensor`.
        is_of_host = piece.call != BACKWARD and self.tensor is None
        self.said = self.on_host if is_of_host else self.on_device
        self.said.clear()
        self.said.write(self.own_at + _CODE, piece.code)
        self.said.write(self.own_at + _CHECK, piece.check)
        if self.done:
            self.said.write(self.own_at + _DONE, zlib.crc32(repr(self.done).encode()) + 1)
        self.last_done, self.done = self.done, []
        if self.tensor is not None:
            self.said.write(self.own_at + _ARGUMENTS, self.tensor.take_digest())

    def _meet_on_host(self, piece: Piece) -> None:
        """Find out whether all ranks are at a piece, before the device is given what waits for the others' devices."""
        if self.comms.step.size == 1 or self.tensor is not None:
            return
        self.said = self.on_host
        self.said.clear()
        self.said.write(self.own_at + _CODE, piece.code)
        self.said.write(self.own_at + _CHECK, piece.check)
        self._check_same(piece, self._by_rank(self._sum().tolist()))

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

    def _to_read(self, sums: torch.Tensor) -> Callable[[], list[float]]:
        """Return what reads these numbers once they are there; a device goes on meanwhile with what comes after."""
        if sums.device.type == "cpu":
            return sums.tolist  # type: ignore[no-any-return]
        copy = HostCopy(sums.numel(), sums.dtype, sums.device)
        copy.begin(lambda: sums)
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
            agreed = self._read(piece, read())
            if piece.call == BACKWARD:
                self.losses.append(agreed)

    def _read(self, piece: Piece, sums: Sequence[float]) -> Agreed:
        weight, loss, stop, left_out = sums[: self.ranks_at]
        by_rank = self._by_rank(sums)
        is_bad = self._check_same(piece, by_rank)
        self.is_doubtful |= left_out > 0
        if piece.call in (BACKWARD, REDUCE):
            self.is_end_said = not stop  # no rank has more to say
        if is_bad:
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
        return Agreed(weight, loss, stop > 0, list(map(round, sums[self.buffers_at :])))

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
        by_rank = []
        for start in range(self.ranks_at, self.buffers_at, _PER_RANK):
            by_rank.append(sums[start : start + _PER_RANK])
        return by_rank

    def _check_same(self, piece: Piece, by_rank: Sequence[Sequence[float]]) -> bool:
        """Check that all ranks are at the same piece; return whether one says that something is bad."""
        is_bad = False
        mine = piece.code
        done = by_rank[self.comms.step.rank][_DONE]
        for rank, numbers in zip(self.comms.step.peers, by_rank, strict=True):
            code, check = numbers[_CODE], numbers[_CHECK]
            if numbers[_DONE] != done:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"before this one, where it {_shown(mine)}, this rank {_listed(self.last_done)}; rank {rank} did "
                    "something else",
                    _fix(piece, int(code)),
                )
            if code != mine:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"this rank {_shown(mine)}, rank {rank} {_shown(int(code))}",
                    _fix(piece, int(code)),
                )
            if check != piece.check:
                what, fix = piece.differs
                raise CollectiveError(what, f"those of rank {rank} are not those of this rank", fix)
            is_bad |= bool(numbers[_BAD])
        return is_bad

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


def _no_scale() -> None:
    """Return that gradients are those of the mean already."""


def _copies_of(parameters: Iterable[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return copies of the gradients that these parameters have."""
    copies = {}
    for parameter in parameters:
        if parameter.grad is not None:
            copies[parameter] = parameter.grad.clone()
    return copies


def _listed(codes: Sequence[int]) -> str:
    """Return what a rank has done, such as `updates (optimizer 1)`."""
    return ", ".join(map(_shown, codes)) or "did nothing"


def _shown(code: int) -> str:
    call, target = divmod(code, _MOST_OPTIMIZERS)
    which = ""
    if call == BACKWARD:
        return _CALLS[call] + (" inside job.accumulate" if target else "")
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
