"""A step in pieces: backward passes, sums over the ranks and updates, each called by the user's own loop.

`apply.py` runs a step from one loss function. Here the loop calls its models as often as it likes, and its optimizers
one after another. This can be right for any loop, because gradients are linear in the losses:

    backward(loss, weight)   adds the gradient of weight * loss / (the sum of the ranks' weights)
    reduce(optimizer)        sums the gradients of the optimizer's parameters over the ranks
    end_step()               makes buffers equal, and learns whether a rank was asked to stop

Each piece begins with one small sum in which every rank says what it is about to do. Ranks that are at different pieces
find that out there, before a collective of one meets another's.

Needs: every rank calls the same pieces in the same order.
Promises: after `reduce` gradients are those of one rank that calls the same pieces with the whole batch.
Traffic per step: for each piece one all_reduce of 8 (3 + 3 R + buffers) bytes; for each update that of `replicate`,
without the numbers of the step, and with `shard` that of `shard/owned_update.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.pytree import tensors_in
from paceline.comm.reducer import Reducer, exact_reducer
from paceline.nouns.errors import CollectiveError, LossError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel.apply import Comms, Parallel, RankPlace
from paceline.parallel.model_adapter import EagerAdapter
from paceline.parallel.norm import global_norm, scale_gradients
from paceline.parallel.replicate.bucket import local_gradient
from paceline.parallel.replicate.buffers import KeptBuffers
from paceline.parallel.replicate.strategy import Replicate
from paceline.parallel.shard.owned_update import OwnedUpdates

if TYPE_CHECKING:
    from paceline.parallel.shard.strategy import Shard

BACKWARD, REDUCE, END = range(1, 4)
_CALLS = {
    BACKWARD: "calls job.backward",
    REDUCE: "sums gradients, for optimizer.step(), job.clip or job.gradients",
    END: "ends the step, for the next batch or the end of the loop",
}
# Places in the message: sums over the ranks, and then three numbers of each rank.
_WEIGHT, _LOSS, _STOP, _FIRST_RANK = range(4)
_CODE, _CHECK, _BAD, _PER_RANK = range(4)
_MOST_OPTIMIZERS = 1000
_BAD_WEIGHT = 2  # in the place of _BAD, where 1 means the loss


class Piece(NamedTuple):
    """What a rank is about to do.

    Attributes:
        call: BACKWARD, REDUCE or END.
        target: the number of the optimizer, from 1; 0 means all.
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


class _Target:
    """The parameters of one optimizer, and whether their gradients are still each rank's own."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], replicate: Replicate) -> None:
        self.parameters = parameters
        self.replicate = replicate
        self.is_summed = True  # there is nothing to sum


class _Noted(NamedTuple):
    """A gradient, as a backward pass left it."""

    gradient: weakref.ref[torch.Tensor]
    version: int


class PiecewiseParallel(Parallel):
    """The strategies of a rank whose loop calls the pieces of a step itself.

    Every rank has whole parameters and gradients, on `replicate` and on `shard` alike; `shard` shares out the updates.
    """

    placed: EagerAdapter
    targets: list[_Target]
    message: Reducer

    def __init__(self, placed: EagerAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        super().__init__(placed, workload, comms, plan, place)
        self.sharded: dict[str, Shard] = {}

    def replicate_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return a strategy without parameters: `split` makes one for each optimizer."""
        return self._summed_over({})

    def _summed_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return what sums gradients over all ranks, which see different samples. Collective."""
        sparse = self.placed.sparse() & parameters.keys()
        return Replicate(parameters, sparse, self.comms.data, self.plan, self.device, overlaps=False)

    def shard_models(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Keep a part of each frozen model on each rank, and gather its blocks as it is called (ZeRO-3). Collective.

        Args:
            models: by the prefix of their names in `self.model`.
        """
        from paceline.parallel.shard.strategy import Shard

        plan = Plan(mesh=f"shard={self.comms.data.size}")
        for prefix, model in models.items():
            self.sharded[prefix] = shard = Shard(model, self.comms.data, plan, self.device)
            model.register_forward_hook(partial(_drop_unless_needed, shard))

    def split(self, optimizers: Sequence[Mapping[str, torch.nn.Parameter]]) -> None:
        """Sum the gradients of each optimizer's parameters apart from those of the others. Collective.

        Args:
            optimizers: of each, the parameters that it updates, by name.
        """
        self.targets = []
        self.names: dict[torch.nn.Parameter, str] = {}
        self.owned = OwnedUpdates(self.comms.axes["shard"], tuple(sorted(self.comms.axes["replicate"].peers)))
        self.hooks: list[RemovableHandle] = []
        self.is_in_backward = False
        self.raw: set[torch.nn.Parameter] = set()  # reached by a backward pass of the loop's own
        for parameters in optimizers:
            self.targets.append(_Target(parameters, self._summed_over(parameters)))
            self.owned.assign(parameters)
            self._name(parameters)
        # Trained in a backward pass whose gradients are not summed yet: they may have been frozen since.
        self.unsummed: set[torch.nn.Parameter] = set()
        # Whether this rank had a loss that is not finite, and has weight 0.
        self.is_doubtful = torch.zeros((), dtype=torch.bool, device=self.device)
        self.noted: dict[torch.nn.Parameter, _Noted] = {}
        # Gradients that are sums over the ranks, the same on all of them.
        self.summed: dict[torch.nn.Parameter, torch.Tensor] = {}
        comm = self.comms.step
        self.ranks_at = _FIRST_RANK
        self.buffers_at = _FIRST_RANK + _PER_RANK * comm.size
        length = self.buffers_at + len(self.buffers.tensors)
        self.mine = torch.zeros(length, dtype=torch.float64, device=self.device)
        self.message = exact_reducer(comm, self.replicate.shared, length, torch.float64, self.device)
        self.unscaled = torch.ones((), dtype=torch.float64, device=self.device)
        self.unread: list[tuple[Piece, torch.Tensor]] = []
        self.losses: list[Agreed] = []  # of the step's backward passes
        self.kept: KeptBuffers | None = None
        self.buffers.begin_step()

    def regroup(self, target: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Sum the gradients of other parameters with those of an optimizer, whose groups have changed. Collective."""
        before = self.targets[target - 1]
        after = _Target(parameters, self._summed_over(parameters))
        self.owned.assign(parameters)
        after.is_summed = before.is_summed
        before.replicate.close()
        self.targets[target - 1] = after
        self._name(parameters)

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

    def backward(
        self, loss: torch.Tensor, weight: torch.Tensor | float, piece: Piece, keeps_pace: bool, retain_graph: bool
    ) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        Args:
            loss: this rank's mean loss, one number.
            weight: what it counts among the ranks' losses, such as its number of samples.
            piece: this call.
            keeps_pace: this rank has no samples: its loss counts nothing.
            retain_graph: as `torch.Tensor.backward` takes it.

        Raises:
            LossError: it is not finite on some rank, or the weights add up to 0.
            CollectiveError: another rank is at another piece.
        """
        self._count_once()
        self.raw = {parameter for parameter in self.raw if parameter.grad is not None}
        loss = loss.reshape(())
        self._say(piece)
        self.mine[_WEIGHT] = 0.0 if keeps_pace else weight
        loss = self._left_out(loss)
        detached = loss.detach()
        self.mine[_LOSS] = self.mine[_WEIGHT] * detached
        is_weight = torch.isfinite(self.mine[_WEIGHT]) & (self.mine[_WEIGHT] >= 0)
        self.mine[self._place(_BAD)] = torch.where(is_weight, ~torch.isfinite(detached), _BAD_WEIGHT)
        sums = self._sum()
        self.unread.append((piece, sums))
        # A GPU is not waited for: what its ranks have said is read before the update.
        if self.device.type == "cpu":
            self._read_all()
        scale = self.mine[_WEIGHT] / sums[_WEIGHT]
        self.is_in_backward = True
        try:
            (loss * scale.to(loss.dtype)).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self.is_in_backward = False
        for target in self.targets:
            target.is_summed = False
        self._note()

    def reduce(self, piece: Piece) -> None:
        """Make the gradients of `piece.target` sums over the ranks, where they are not yet. Collective.

        Raises:
            UsageError: a gradient was changed, or made, by something else than `backward`.
            CollectiveError: another rank is at another piece.
            LossError: a gradient is not finite, of a loss with weight 0 that isn't either.
            WorkloadError: a dense parameter has a sparse gradient, or the other way round.
        """
        self._say(piece)
        self._agree(piece)
        self._check_left_out()
        targets = self.targets if not piece.target else [self.targets[piece.target - 1]]
        for target in targets:
            self._check_untouched(target)
        for target in targets:
            if not target.is_summed:
                self._reduce(target)

    def begin_update(self, optimizer: torch.optim.Optimizer, target: int) -> None:
        """Let the optimizer update what this rank is to update; its gradients are sums."""
        if self.owned.comm.size > 1:
            self.owned.begin(optimizer, self.targets[target - 1].parameters)

    def end_update(self, target: int) -> None:
        """Give every rank what the others have updated. Collective."""
        if self.owned.comm.size > 1:
            self.owned.end()
            self.owned.spread(self.targets[target - 1].parameters)

    def held(self) -> dict[str, LocalShard]:
        """Return where the optimizers' state of each parameter is, if not on every rank, and parts of frozen models."""
        held = self.owned.state_shards() if self.owned.comm.size > 1 else {}
        for prefix, shard in self.sharded.items():
            for name, shard_spec in shard.shard_specs().items():
                if shard_spec.cuts:
                    held[prefix + name] = LocalShard(shard_spec, (self.rank,))
        return held

    def end_step(self, piece: Piece, is_stopping: bool) -> Agreed:
        """Make buffers equal on all ranks, and begin the next step. Collective.

        Returns:
            The weight and the weighted loss of the step's backward passes, added up.

        Raises:
            CollectiveError: another rank is at another piece, or the ranks' parameters differ.
            WorkloadError: the ranks' buffers have different shapes.
        """
        self.counts_samples(True)
        self._say(piece)
        self.mine[_STOP] = is_stopping
        changed = self.buffers.find_changed()
        if any(changed):
            self.mine[self.buffers_at :] = torch.tensor(changed, dtype=torch.float64)
        agreed = self._agree(piece)
        self.buffers.reduce(agreed.changed)
        for shard in self.sharded.values():
            shard.reshard()
        self.buffers.begin_step()
        weight = sum(each.weight for each in self.losses)
        loss = sum(each.loss for each in self.losses)
        self.losses = []
        return agreed._replace(weight=weight, loss=loss)

    def norm_of(self, target: int) -> torch.Tensor:
        """Return the norm of the gradients of an optimizer's parameters, of all if it is 0; after `reduce`."""
        return global_norm(self.gradients_of(target), {}, [])

    def scale(self, target: int, factor: torch.Tensor) -> None:
        """Multiply the gradients of an optimizer's parameters, of all if it is 0."""
        scale_gradients(self.gradients_of(target), factor)

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
        return {name: parameter for parameter, name in self.names.items()}

    def check_of_parameters(self) -> float:
        """Return a number that differs where a parameter differs in any bit, but for rare chances."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for number, parameter in enumerate(self.names):
                total = total + parameter.detach().double().sum() * (1 + number % 7)
        return float(total.nan_to_num(0.5, 1.5, 2.5))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what compression carries from step to step, by name."""
        state = {}
        for number, target in enumerate(self.targets):
            for name, tensor in target.replicate.state().items():
                state[f"{number}.{name}"] = tensor
        return state

    def close(self) -> None:
        """Let go of the other ranks."""
        super().close()
        for target in self.targets:
            target.replicate.close()
        for hook in self.hooks:
            hook.remove()

    def _name(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Know parameters by their names, and hear of each backward pass that reaches them."""
        for name, parameter in parameters.items():
            if parameter not in self.names:
                was_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # torch registers hooks of no other
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_is_here))
                parameter.requires_grad_(was_trained)
            self.names[parameter] = name

    def _gradient_is_here(self, parameter: torch.nn.Parameter) -> None:
        """Forget a gradient to which a backward pass of the loop's own has added this rank's samples."""
        if not self.is_in_backward:
            self.noted.pop(parameter, None)
            self.summed.pop(parameter, None)
            self.raw.add(parameter)

    def _left_out(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss; 0 if it is not finite and has weight 0, as a mean over no labels is."""
        is_left_out = (self.mine[_WEIGHT] == 0) & ~torch.isfinite(loss.detach())
        self.is_doubtful |= is_left_out
        return torch.where(is_left_out, 0.0, loss)

    def _check_left_out(self) -> None:
        if not self.is_doubtful:
            return
        self.is_doubtful.zero_()
        for parameter, name in self.names.items():
            gradient = local_gradient(parameter)
            if gradient is not None and not _values_of(gradient).isfinite().all():
                raise LossError(
                    "a loss with weight 0 should leave gradients as they are",
                    f"it is NaN or infinite on this rank, and so is the gradient of {name}",
                    "divide by the number of labels or by 1 if there are none: loss.sum() / count.clamp(min=1)",
                )

    def _reduce(self, target: _Target) -> None:
        # A parameter of two optimizers may have a sum already.
        self._count_once(target)
        parameters = self.unsummed.intersection(target.parameters.values())
        self.unsummed -= parameters
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        try:
            for parameter in frozen:  # since the backward pass: its gradient counts
                parameter.requires_grad_(True)
            target.replicate.begin_step(lambda: self.unscaled)
            target.replicate.reduce_gradients()
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        target.is_summed = True
        for parameter in target.parameters.values():
            if parameter.grad is not None:
                self.summed[parameter] = parameter.grad

    def _count_once(self, target: _Target | None = None) -> None:
        """Keep a sum that the loop has not cleared on the first rank alone: the next sum counts it once."""
        parameters = list(self.summed) if target is None else list(target.parameters.values())
        is_first = self.comms.step.rank == 0
        for parameter in parameters:
            summed = self.summed.pop(parameter, None)
            if summed is None or parameter.grad is not summed:
                continue
            if not is_first:
                summed.zero_()
            self.noted[parameter] = _noted(summed)
            self.unsummed.add(parameter)

    def _note(self) -> None:
        """Remember every gradient, to tell later whether something else has changed it."""
        for parameter in self.names:
            if parameter.requires_grad:
                self.unsummed.add(parameter)
            gradient = parameter.grad
            if gradient is not None:
                self.noted[parameter] = _noted(gradient)

    def _check_untouched(self, target: _Target) -> None:
        for name, parameter in target.parameters.items():
            gradient = parameter.grad
            if gradient is None or self.summed.get(parameter) is gradient:
                continue
            noted = self.noted.get(parameter)
            if noted is not None and noted.gradient() is gradient and noted.version == gradient._version:
                continue
            if target.is_summed and parameter not in self.raw:
                self.summed[parameter] = gradient  # put in the sum's place
                continue
            local = local_gradient(parameter)
            if local is None or not _values_of(local).count_nonzero():  # cleared by zero_grad(set_to_none=False)
                continue
            raise UsageError(
                "gradients should be made by job.backward, and changed only once they are sums over the ranks",
                f"the gradient of {name} was made or changed by something else than job.backward, while it was that of "
                "this rank's samples alone",
                "write job.backward(loss) in place of loss.backward(), job.clip(max_norm) in place of "
                "clip_grad_norm_, and call job.gradients() before other changes",
            )

    def _place(self, number: int) -> int:
        """Return the place of one of this rank's numbers in the message."""
        return self.ranks_at + _PER_RANK * self.comms.step.rank + number

    def _say(self, piece: Piece) -> None:
        self.mine.zero_()
        self.mine[self._place(_CODE)] = piece.code
        self.mine[self._place(_CHECK)] = piece.check

    def _agree(self, piece: Piece) -> Agreed:
        """Add up the ranks' messages, and check that all are at the same piece.

        Raises:
            CollectiveError: they are not, or were not before.
            LossError: a loss is not finite, or nothing counts.
        """
        sums = self._sum()
        self._read_all()
        return self._read(piece, sums)

    def _sum(self) -> torch.Tensor:
        """Return the sum of all ranks' messages."""
        self.message.inboxes[self.message.turn].copy_(self.mine)
        self.message.begin()
        self.message.finish(self.unscaled)
        return self.message.outbox.clone()

    def _read_all(self) -> None:
        """Read the sums of the backward passes that have not been read."""
        unread = self.unread
        self.unread = []
        for piece, sums in unread:
            self.losses.append(self._read(piece, sums))

    def _read(self, piece: Piece, sums: torch.Tensor) -> Agreed:
        weight, loss, stop, *rest = sums.tolist()
        ranks = rest[: _PER_RANK * self.comms.step.size]
        by_rank = [ranks[start : start + _PER_RANK] for start in range(0, len(ranks), _PER_RANK)]
        self._check_same(piece, by_rank)
        bad_ranks = [self.comms.step.peers[index] for index, numbers in enumerate(by_rank) if numbers[_BAD]]
        if any(numbers[_BAD] == _BAD_WEIGHT for numbers in by_rank):
            raise LossError(
                "the weight of a loss should be a number, 0 or more",
                f"that of rank {bad_ranks[0]} is negative, NaN or infinite; the parameters were left as they were",
                "write over how many samples or tokens the loss is a mean",
            )
        if bad_ranks:
            raise _not_finite(bad_ranks)
        if piece.call == BACKWARD and weight <= 0:
            raise LossError(
                "can't take the mean loss over the ranks",
                f"its weights add up to {weight:g}",
                "make sure that every batch has something to predict, and hand in its number: job.backward(loss, n)",
            )
        changed = rest[_PER_RANK * self.comms.step.size :]
        return Agreed(weight, loss, stop > 0, [round(count) for count in changed])

    def _check_same(self, piece: Piece, by_rank: Sequence[Sequence[float]]) -> None:
        mine = piece.code
        for rank, (code, check, _) in zip(self.comms.step.peers, by_rank, strict=True):
            if code != mine:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"this rank {_shown(mine)}, rank {rank} {_shown(int(code))}",
                    "let no rank leave out a batch, a backward pass or an update; one without samples hands in its "
                    "loss with weight 0",
                )
            if check != piece.check:
                what, fix = piece.differs
                raise CollectiveError(what, f"those of rank {rank} are not those of this rank", fix)


def _drop_unless_needed(shard: Shard, model: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Keep parts alone after a forward pass, unless a backward pass through it needs whole parameters."""
    if not any(tensor.requires_grad for tensor in tensors_in(output)):
        shard.reshard()


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a gradient has: of a sparse one those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _noted(gradient: torch.Tensor) -> _Noted:
    return _Noted(weakref.ref(gradient), gradient._version)


def _shown(code: int) -> str:
    call, target = divmod(code, _MOST_OPTIMIZERS)
    which = f" (optimizer {target})" if target else ""
    return f"{_CALLS.get(call, 'does something else')}{which}"


def _not_finite(ranks: Sequence[int]) -> LossError:
    plural = "s" if len(ranks) > 1 else ""
    error = LossError(
        "the loss should be a finite number",
        f"it is NaN or infinite on rank{plural} {', '.join(map(str, ranks))}; the parameters were left as they were",
        "lower the learning rate, clip the gradients with job.clip(1.0), or look for bad samples in this batch",
    )
    error.rank = ranks[0]
    return error
