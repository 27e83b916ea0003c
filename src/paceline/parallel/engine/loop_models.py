"""How the ranks hold the models of a loop: whole, in rows under `shard`, in pieces under `tensor`.

The loop calls its models as one process does. Whole models need nothing. Of models in rows
(`shard/sharded_loop_models.py`) or pieces (`split_forward.py`) a call gathers or computes what it needs, an update
changes this rank's part, and `gathered` makes them whole for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.batch_norm import share_by
from paceline.comm.collectives import AxisComm
from paceline.comm.dtensor_parts import gathered
from paceline.comm.dtypes import checksum
from paceline.comm.pytree import tensors_in
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.engine.agreement import FORWARD, GATHER, READ, Agreement, Call
from paceline.parallel.engine.engine import Comms
from paceline.parallel.engine.gradient_sums import Target, made_elsewhere
from paceline.parallel.model_adapter import EagerAdapter
from paceline.parallel.norm import global_norm
from paceline.parallel.replicate.buffers import KeptBuffers, sums_of
from paceline.parallel.shard.owned_update import OwnedUpdates

if TYPE_CHECKING:
    from paceline.parallel.shard.shard_strategy import Shard
    from paceline.parallel.shard.sharded_loop_models import LoopShards
    from paceline.parallel.split_forward import SplitForward, SplitForwards

_OTHER_CHANGES = (
    "every rank should change parameters in job.gathered in the same way",
    "draw from a generator with the same seed on every rank, or on rank 0 and send it by paceline.broadcast",
)


class _GatheredTensor:
    """A tensor that is whole for a while, and the function that writes its values into the ranks' parts."""

    def __init__(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> None:
        self.tensor = tensor
        self.fill = fill
        self.sums = sums_of(tensor.detach())

    def has_changed(self) -> bool:
        """Return whether its values are others, also where they were written past the counter of writes."""
        if not self.tensor.untyped_storage().nbytes():  # a checkpoint inside of `gathered` has let it go
            return False
        return not torch.equal(self.sums, sums_of(self.tensor.detach()))


class LoopModels:
    """The models of a loop on this rank.

    Args:
        placed: the adapter of all models as one module.
        comms: the communicators of the mesh's axes.
        plan: the job's plan, with its mesh and options.
        device: the device on which this rank computes.

    Attributes:
        shards: the frozen models in rows, by the prefix of their names.
        parts: the trained models in rows; None where there are none.
        tensor: the models in pieces; None where there are none.
        owned: the updates that are split between ranks with whole parameters.
        shares_updates: whether each parameter is updated by one rank of `shard`, and whole on all of them.
        are_whole: whether every rank has all parameters whole, and updates them all.
    """

    def __init__(self, placed: EagerAdapter, comms: Comms, plan: Plan, device: torch.device) -> None:
        self.placed = placed
        self.comms = comms
        self.plan = plan
        self.device = device
        self.shards: dict[str, Shard] = {}
        self.parts: LoopShards | None = None
        self.tensor: SplitForwards | None = None
        self.owned = OwnedUpdates(comms.axes["shard"], tuple(sorted(comms.axes["replicate"].peers)))
        self.shares_updates = comms.axes["shard"].size > 1
        self.are_whole = not self.shares_updates and comms.same_samples.size == 1
        self.agreement: Agreement | None = None
        self.saved_buffers: KeptBuffers | None = None  # during forward passes that count nothing

    def cut_rows(self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Keep rows of each of these models on each rank, for the optimizers too (ZeRO-2, ZeRO-3). Collective.

        models: the trained models, by the prefix of their names in the job's model.
            optimizers: the loop's optimizers.
            optimizers: of the loop.

        Returns:
            The names of the parameters to which something else still refers.

        Raises:
            WorkloadError: two models share a parameter, or an optimizer has state already.
        """
        from paceline.comm.dtensor_rules import read_whole
        from paceline.parallel.shard.sharded_loop_models import LoopShards
        from paceline.parallel.shard.state_dicts import WholeStateDicts

        self.parts = LoopShards(models, self.comms.axes, self.plan, self.device)
        self.shares_updates = False
        self.placed.parameters = dict(self.placed.model.named_parameters())
        still_used = self.parts.exchange(optimizers)
        for number, shard in enumerate(self.parts.shards, 1):
            shard.before_call = partial(self._meet, Call(FORWARD, len(self.shards) + number))
            WholeStateDicts(shard.model, shard)
        read_whole(self.placed.parameters.values(), partial(self._meet, Call(READ)))
        self.placed.keeps_pace = True  # the collectives of a forward pass want every rank there
        return still_used

    def shard_frozen(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Keep rows of each frozen model on each rank, and gather its blocks as it is called (ZeRO-3). Collective.

        models: the frozen models, by the prefix of their names in the job's model.
            models: by the prefix of their names in the job's model.
        """
        from paceline.parallel.shard.shard_strategy import Shard
        from paceline.parallel.shard.state_dicts import WholeStateDicts

        plan = Plan(mesh=f"shard={self.comms.data.size}")
        for prefix, model in models.items():
            if self.tensor is not None:
                self.share_statistics([model])
            self.shards[prefix] = shard = Shard(model, self.comms.data, plan, self.device)
            model.register_forward_hook(partial(_drop_unless_needed, shard))
            model.register_forward_pre_hook(partial(self._meet_at_call, shard, len(self.shards)))
            WholeStateDicts(model, shard)
        self.placed.parameters = dict(self.placed.model.named_parameters())  # the whole ones are let go

    def share_statistics(self, models: Sequence[torch.nn.Module]) -> None:
        """Have batch norm of models that run by their own code under `tensor` take the whole batch's statistics."""
        if self.placed.shared is not None:
            for model in models:
                share_by(model, self.placed.shared)

    def split(self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Split each model over the axis `tensor` when it is called first.

        Args:
            models: the loop's models, by the prefix of their names in the job's model.
            optimizers: the loop's optimizers, in the order of their numbers.
        """
        from paceline.parallel.split_forward import SplitForwards

        self.tensor = SplitForwards(models, optimizers, self.comms, self.plan, self.device, self.placed.shared)

    def update_in_parts(self, targets: Sequence[Target], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Have the optimizers update this rank's rows.

        Raises:
            PlanError: one updates parameters from each other, or can't be tried.
        """
        assert self.parts is not None
        for target, optimizer in zip(targets, optimizers, strict=True):
            target.updates = self.parts.updates_of(optimizer, target.parameters)

    def regroup(self, number: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Follow an optimizer, counted from 1, that was given other parameters."""
        self.owned.assign(parameters)
        if self.tensor is not None:
            self.tensor.regroup(number)

    def _meet(self, call: Call) -> None:
        assert self.agreement is not None
        self.agreement.meet(call)

    def _meet_at_call(self, shard: Shard, number: int, model: torch.nn.Module, inputs: Any) -> None:
        """Find out whether all ranks call this frozen model."""
        if not shard.is_held:
            self._meet(Call(FORWARD, number))

    def finish_gradients(self) -> None:
        """Make gradients of rows ready for an update. Collective.

        Raises:
            UsageError: a backward pass of the loop's own has made one, or a change of one would be lost.
        """
        if self.parts is None:
            return
        from paceline.comm.dtensor_rules import take_lost_write

        if take_lost_write():
            raise _lost_write()
        for shard in self.parts.shards:
            for name in shard.raw_gradients():
                raise made_elsewhere(name)
        self.parts.finish()

    def begin_update(self, optimizer: torch.optim.Optimizer, number: int, target: Target) -> None:
        """Let an optimizer, counted from 1, update what this rank is to update."""
        if target.updates is not None:
            target.updates.begin()
        elif self.shares_updates:
            self.owned.begin(optimizer, target.parameters)
        if self.tensor is not None:
            self.tensor.guard(False)
            self.tensor.begin_update(optimizer, number)

    def end_update(self, number: int, target: Target) -> None:
        """Give every rank what the others have updated. Collective."""
        if target.updates is not None:
            target.updates.end()
        elif self.shares_updates:
            self.owned.end()
            self.owned.spread(target.parameters)
        if self.tensor is not None:
            self.tensor.end_update(number)
            self.tensor.guard(True)

    def counts_samples(self, counts: bool) -> None:
        """Have forward passes count from here on; if not, they leave no trace in buffers, and only keep pace."""
        if self.placed.shared is not None:
            self.placed.shared.counts = counts
        if self.saved_buffers is not None:
            self.saved_buffers.__exit__()
            self.saved_buffers = None
        if not counts:
            self.saved_buffers = KeptBuffers(self.placed.written_alone())
            self.saved_buffers.__enter__()

    def have_whole_gradients(self) -> bool:
        """Return True if every rank has gradients whole."""
        return self.parts is None and self.tensor is None

    def in_rows(self) -> Iterator[tuple[str, Shard]]:
        """Yield the models in rows, with the prefix of their names in the job's model."""
        yield from self.shards.items()
        if self.parts is not None:
            for shard in self.parts.shards:
                yield shard.prefix, shard

    def reshard(self) -> None:
        """Drop whole parameters that a call has gathered; a backward pass of it gathers them again."""
        for shard in self.shards.values():
            shard.reshard()
        if self.parts is not None:
            self.parts.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make parameters whole of which ranks have parts, to be read and changed. Collective.

        Raises:
            CollectiveError: ranks have made other changes.
        """
        shards = [shard for _, shard in self.in_rows()]
        forwards = [] if self.tensor is None else self.tensor.forwards
        if not shards and not forwards:
            yield
            return
        self._meet(Call(GATHER))
        entries: list[_GatheredTensor] = []
        try:
            for shard in shards:
                shard.hold(True)
                for name, parameter in shard.model.named_parameters():
                    if name not in shard.replicated:
                        entries.append(_GatheredTensor(parameter, partial(shard.fill, name)))
            for forward in forwards:
                for name, tensor in forward.hold().items():
                    entries.append(_GatheredTensor(tensor, partial(forward.fill, name)))
            yield
            changed = [entry for entry in entries if entry.has_changed()]
            with torch.no_grad():
                check = _check_of(entry.tensor for entry in changed)
                values = [entry.tensor.detach().clone() for entry in changed]  # whole tensors are about to go
            self._meet(Call(GATHER, 0, check, _OTHER_CHANGES))
        finally:
            for shard in shards:
                shard.hold(False)
            for forward in forwards:
                forward.release()
        for entry, value in zip(changed, values, strict=True):
            entry.fill(value)

    def norm_of(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Return the norm of these parameters' gradients, as they are whole. Collective under `tensor` and in rows."""
        if self.parts is not None:
            comm, counted = self.comms.axes["shard"], self.parts.counted()
        elif self.tensor is not None:
            comm, counted = self.comms.same_samples, self.tensor.counted()
        else:
            return global_norm(parameters, {}, [])
        # What all ranks of the axis have, its first one counts.
        counts = {parameter: counted.get(parameter, comm.rank == 0) for parameter in parameters}
        return global_norm(counts, counts, [comm])

    def spreading(self) -> list[AxisComm]:
        """Return the axes over which gradients are spread."""
        comms = []
        if self.parts is not None:
            comms.append(self.comms.axes["shard"])
        if self.tensor is not None:
            comms.append(self.comms.same_samples)
        return comms

    def full_tensor(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the values of a parameter, whole. Collective where ranks have rows or pieces of it."""
        found = self._pieces().get(parameter)
        if found is None:
            return gathered(parameter.detach())
        forward, name = found
        return forward.full_tensor(name, parameter)

    def has_pieces(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return True if this rank has a piece of one of these parameters."""
        pieces = self._pieces()
        return any(parameter in pieces for parameter in parameters)

    def _pieces(self) -> Mapping[torch.nn.Parameter, tuple[SplitForward, str]]:
        """Return the parameters of which this rank has a piece."""
        return {} if self.tensor is None else self.tensor.pieces()

    def local_shards(self, targets: Sequence[Target]) -> dict[str, LocalShard]:
        """Return this rank's shards of models, and of optimizer state that is not on every rank."""
        shards = self.owned.state_shards() if self.shares_updates else {}
        if self.parts is not None:
            shards |= self.parts.local_shards()
        for target in targets:
            if target.updates is not None:
                shards |= target.updates.state_shards()
        for prefix, shard in self.shards.items():
            for name, shard_spec in shard.shard_specs().items():
                if shard_spec.cuts:
                    shards[prefix + name] = LocalShard(shard_spec, tuple(sorted(self.comms.same_samples.peers)))
        if self.tensor is not None:
            shards |= self.tensor.local_shards()
        return shards


def _drop_unless_needed(shard: Shard, model: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Keep only rows after a forward pass, unless a backward pass through it needs whole parameters."""
    if not shard.is_held and not any(tensor.requires_grad for tensor in tensors_in(output)):
        shard.reshard()


def _check_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return a number that differs where a tensor does, but for rare chances."""
    total = 0.0
    for number, tensor in enumerate(tensors):
        total += float(checksum(tensor).nan_to_num(0.5, 1.5, 2.5)) * (1 + number % 7)
    return total


def _lost_write() -> UsageError:
    return UsageError(
        "gradients and parameters that are in parts should be changed whole",
        "rows of one, such as gradient[0] or gradient.split(2)[0], were written into: they were a copy, as other ranks "
        "have some of these rows, so that the change would be lost",
        "add zero=1 to the plan, where gradients and parameters are whole; or change them by operations on the whole "
        "tensor, such as gradient.mul_(0.5), gradient.clamp_(-1, 1)",
    )
