"""ZeRO-2 and ZeRO-3 for a loop of the user's own: each rank of `shard` holds rows of its models' parameters.

The loop calls its models, and FSDP2's hooks gather what each call needs (`shard_strategy.py`). The optimizers have the
rows.

    model(...)      gathers the model's own parameters, and with zero=3 each block's before it runs
    backward        gathers again what was dropped; every backward pass sums the gradients that it makes, and each rank
                    keeps those of its rows. The rows' gradients add up as in torch
    finish          parameters that no rank used lose the zeros that FSDP2 left as their gradient; only parts are left

A gradient that the loop takes itself (`torch.autograd.grad`, as for a gradient penalty) neither sums nor drops
anything. After it, and after a call of a module by itself, parameters stay whole until `finish`.

Needs: every rank calls the same models in the same order, with or without samples; `before_call` is where they find
out. Parameters are used in calls of modules, or while they are held.
Promises: the gradients and updates of one rank, up to rounding; parameters that can't be cut (scalars, a minority's
dtype) stay whole and are summed as under `replicate`.
Traffic per step: that of `shard_strategy.py` for each model and each backward pass; for each model one all_reduce of
8 (trained parameters in parts + 1 + R) bytes at the first sum after a backward pass. For an optimizer that needs whole
parameters, that of `whole_update.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.dtensor_parts import is_part
from paceline.comm.guarded_parts import Rows
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.elementwise import LaterParameters, find_whole_parameters
from paceline.parallel.optimizer_parts import groups_of, parts_of
from paceline.parallel.shard.local_optimizer_step import StandIns, rows_of
from paceline.parallel.shard.shard_strategy import Shard
from paceline.parallel.whole_update import WholeUpdate, cut_parameters
from paceline.torch_private.autograd import is_in_backward


class LoopShard(Shard):
    """One model of the loop; a period goes from one `finish` to the next, over any number of backward passes."""

    prefix = ""  # of the parameters' names in the job's model

    def __init__(self, model: torch.nn.Module, comm: AxisComm, plan: Plan, device: torch.device) -> None:
        super().__init__(model, comm, plan, device)
        self.before_call: Callable[[], None] = lambda: None
        self.had_gradient: set[str] = set()  # parameters that have had a gradient since before the period
        assert self.groups is not None
        # Backward passes are only those of job.backward: others take a gradient.
        self.groups.is_forward = True
        # Now, or the first module that is called would be FSDP2's root.
        self.groups.open()
        for module in model.modules():
            if module is not model and next(module.parameters(), None) is not None:
                module.register_forward_pre_hook(self._called_alone, prepend=True)

    def open_backward(self, loss: torch.Tensor, is_padding: bool) -> None:
        """Prepare for a backward pass from `loss`, through this model or not."""
        assert self.groups is not None
        names = [name for name, parameter in self.parameters.items() if is_part(parameter)]
        with_gradient = {name for name in names if self.parameters[name].grad is not None}
        self.had_gradient = with_gradient & self.had_gradient if self.is_open else with_gradient
        self.is_open = True
        self.trained = [name for name in names if self.parameters[name].requires_grad]
        for name in self.trained:
            self.grad_usage.used.setdefault(name, False)
        self.begin_backward(is_last=True, is_padding=is_padding)
        if self.groups.took_gradient:
            # No output of the model may lie on the way, and then FSDP2's hooks would not hear of this backward pass.
            self.groups.sum_in_backward_from(loss)
        self.groups.is_forward = False

    def close_backward(self) -> None:
        """Take gradients that the loop takes from here on as its own."""
        assert self.groups is not None
        self.groups.is_forward = True

    def finish(self) -> None:
        """Keep only parts, and no gradient where no rank has used a parameter. Collective.

        Raises:
            WorkloadError: ranks called the blocks in different orders, or a block's gradient came too late.
        """
        assert self.groups is not None
        if not self.is_open:
            return
        unused = self.peer_values.unused(self.grad_usage)
        self.reshard()
        for name in unused:
            if name not in self.had_gradient:
                self.parameters[name].grad = None
        self.grad_usage.clear([])
        self.groups.collective_order.crc = 0
        self.groups.took_gradient = False
        self.is_open = False

    def forget(self) -> None:
        """Make ready for another forward pass after one, or a backward pass, that raised."""
        assert self.groups is not None
        self.groups.is_forward = True
        self.groups.forget_failed_step()
        self.reshard()

    def raw_gradients(self) -> list[str]:
        """Return the names of the parameters that a backward pass of the loop's own has reached."""
        found = []
        for name, parameter in self.grad_usage.watched.items():
            if name not in self.replicated and parameter.grad is not None:
                found.append(f"{self.prefix}{name}")
        return found

    def hold(self, is_held: bool) -> None:
        """As for every model; of what is computed meanwhile gradients may be taken."""
        super().hold(is_held)
        if is_held:
            self._gather()

    def forward(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Call `function(model, batch)`; the ranks agree that all of them do."""
        if not self.is_held:
            self.before_call()
        return super().forward(function, batch)

    def _gather(self) -> None:
        """Have whole parameters, to be used anywhere, until `reshard`; where gradients are taken, until `finish`."""
        assert self.groups is not None
        self.groups.gather()
        self._note_uses("", self.model)
        for name, block in self.blocks.items():
            self._note_uses(f"{name}.", block)
        if torch.is_grad_enabled():
            self.groups.took_gradient = True  # no output of the model may be on the way of the backward pass

    def _called_alone(self, module: torch.nn.Module, inputs: Any) -> None:
        """Gather for a module that the loop calls by itself; FSDP2 gathers for the model's forward pass."""
        # A backward pass may run a module again (torch.utils.checkpoint).
        if self.is_inside or self.is_held or is_in_backward():
            return
        self.before_call()
        self._gather()


class LoopShards:
    """The models of a loop, and the optimizers that update their rows.

    Args:
        models: the loop's models, by the prefix of their names in the job's model. Their parameters become DTensors, in
            place.
        axes: the communicators of the mesh's axes, by name.
        plan: the job's plan, whose mesh has `shard`, with zero=2 or 3.
        device: the device of the models.

    Raises:
        WorkloadError: two models share a parameter, or one can't be cut.
        PlanError: the plan's compression is not to be had.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], axes: Mapping[str, AxisComm], plan: Plan, device: torch.device
    ) -> None:
        _check_apart(models)
        self.axes = axes
        self.replicas = tuple(sorted(axes["replicate"].peers))
        self.before: dict[str, torch.nn.Parameter] = {}  # parameters before they were cut
        self.named: dict[str, torch.nn.Parameter] = {}
        self.shards: list[LoopShard] = []
        for prefix, model in models.items():
            for name, parameter in model.named_parameters():
                self.before[prefix + name] = parameter
            shard = LoopShard(model, axes["shard"], plan, device)
            shard.prefix = prefix
            self.shards.append(shard)
            for name, parameter in shard.parameters.items():
                self.named[prefix + name] = parameter
                if is_part(parameter):
                    parameter.__class__ = Rows  # type: ignore[assignment]

    def exchange(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Put the rows into the optimizers' groups, in the place of whole parameters.

        Returns:
            The names of the parameters to which something else still refers: whole, and not trained any more.

        Raises:
            WorkloadError: an optimizer has state of whole parameters.
        """
        rows = {self.before[name]: parameter for name, parameter in self.named.items()}
        for optimizer in optimizers:
            for part in parts_of(optimizer):
                if any(parameter in rows and part.state[parameter] for parameter in list(part.state)):
                    raise WorkloadError(
                        "under shard with zero=2 or 3 the optimizer's state is of this rank's rows",
                        f"{type(part).__name__} has state of whole parameters already",
                        "hand in an optimizer that has taken no step, or write zero=1; `--resume` brings the state of "
                        "a checkpoint",
                    )
                for parameter in [key for key in part.state if key in rows]:
                    del part.state[parameter]  # an empty one
            for group in groups_of(optimizer):
                group["params"] = [rows.get(parameter, parameter) for parameter in group["params"]]
        references = {}
        for name, parameter in self.before.items():
            if self.named[name] is not parameter:
                references[name] = weakref.ref(parameter)
        self.before = {}  # their memory is let go
        del parameter, rows
        gc.collect()  # cycles of references
        return [name for name, reference in references.items() if reference() is not None]

    def updates_of(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> RowUpdates:
        """Return an optimizer's updates of these parameters, by name.

        Raises:
            PlanError: it updates parameters from each other, or can't be tried.
        """
        found = find_whole_parameters(optimizer, ("shard",))
        whole_parameters = {parameter: name for name, parameter in parameters.items() if parameter in found}
        specs = {}
        for shard in self.shards:
            for name, shard_spec in shard.shard_specs().items():
                if shard_spec.cuts and shard.prefix + name in whole_parameters.values():
                    specs[shard.prefix + name] = shard_spec
        cut = cut_parameters(specs, self.axes["shard"].size)
        optimizer.register_load_state_dict_post_hook(partial(self._take_rows, set(whole_parameters)))
        update = None
        if cut:
            update = WholeUpdate(self.axes["shard"], cut, {name: parameters[name] for name in cut})
        return RowUpdates(optimizer, whole_parameters, update, self.named, self.replicas)

    def _take_rows(self, whole_parameters: set[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's rows of whole state that was loaded, but of parameters that are updated whole."""
        for shard in self.shards:
            for name, parameter in shard.parameters.items():
                if not is_part(parameter) or parameter in whole_parameters:
                    continue
                for part in parts_of(optimizer):
                    state = part.state.get(parameter, {})
                    for key, value in state.items():
                        if not isinstance(value, torch.Tensor) or is_part(value):  # rows, from a checkpoint
                            continue
                        if value.shape == parameter.shape and value.dim():
                            state[key] = shard.rows_of(name, value).clone()

    def open_backward(self, loss: torch.Tensor, is_padding: bool) -> None:
        """Prepare all models for a backward pass from `loss`."""
        for shard in self.shards:
            shard.open_backward(loss, is_padding)

    def close_backward(self) -> None:
        """Note that the backward pass is over."""
        for shard in self.shards:
            shard.close_backward()

    def finish(self) -> None:
        """Make the gradients ready for an update. Collective."""
        for shard in self.shards:
            shard.finish()

    def forget(self) -> None:
        """Make ready for other forward passes after an error."""
        for shard in self.shards:
            shard.forget()

    def reshard(self) -> None:
        """Keep only parts."""
        for shard in self.shards:
            shard.reshard()

    def counted(self) -> dict[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter: parts always, what stays whole on the axis' first rank."""
        is_first = self.axes["shard"].rank == 0
        return {parameter: is_part(parameter) or is_first for parameter in self.named.values()}

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the rows, and the replicas that hold the same."""
        shards = {}
        for shard in self.shards:
            for name, shard_spec in shard.shard_specs().items():
                if shard_spec.cuts:
                    shards[shard.prefix + name] = LocalShard(shard_spec, self.replicas)
        return shards


class RowUpdates:
    """An optimizer's steps on this rank's rows, and on the whole parameters that it owns."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        whole_parameters: Mapping[torch.nn.Parameter, str],
        update: WholeUpdate | None,
        named: Mapping[str, torch.nn.Parameter],
        replicas: tuple[int, ...],
    ) -> None:
        self.optimizer = optimizer
        self.update = update
        self.replicas = replicas
        self.running = StandIns()
        self.later = LaterParameters(optimizer, ("shard",), whole_parameters)
        self.named = named

    def begin(self) -> None:
        """Give the optimizer plain tensors, until `end`.

        Raises:
            PlanError: it was given parameters that it can't update in parts.
        """
        self.later.check(lambda: {parameter: name for name, parameter in self.named.items()})
        replaced = {**rows_of(self.optimizer), **(self.update.gather() if self.update is not None else {})}
        self.running.begin(self.optimizer, replaced)

    def end(self) -> None:
        """Take the updated values, and give the optimizer its parameters back. Collective."""
        self.running.end()
        if self.update is not None:
            self.update.scatter()

    def state_shards(self) -> dict[str, LocalShard]:
        """Return the shards of the optimizer's state of parameters that are updated whole."""
        return {} if self.update is None else self.update.state_shards(self.replicas)


def _check_apart(models: Mapping[str, torch.nn.Module]) -> None:
    """Raise WorkloadError if a parameter is in two models: each has its own groups."""
    seen: dict[torch.nn.Parameter, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if parameter in seen:
                raise WorkloadError(
                    "under shard with zero=2 or 3 each model gathers its own parameters",
                    f"{seen[parameter]} and {prefix}{name} are one parameter in two models",
                    "hand in one module that holds both and call that, or write zero=1",
                )
            seen[parameter] = prefix + name
