"""Data parallelism by sharding (ZeRO): every rank holds a part of each parameter, whole ones come and go.

One step on a `shard` axis of R ranks, with the model's repeated blocks as groups and the rest as the root's
group (`blocks.py`):

    forward            the root's group is gathered; with zero=3 each block's before it runs, to be dropped
                       after it; with zero=2 all are gathered when the step begins, and kept
    backward           with zero=3 a block is gathered again; its gradients are summed and each rank keeps
                       those of its own rows (reduce_scatter). Where the loss took a gradient itself
                       (`torch.autograd.grad`), all blocks stay whole until the end of the backward pass
    finish_backward    only parts are left; parameters that no rank used lose their gradient; those that
                       stay whole are summed
    update             by the optimizer, on this rank's rows; or on whole parameters (`whole_update.py`)

Rajbhandari et al. 2020, ZeRO: zero=2 splits gradients and the optimizer's state, zero=3 also parameters; zero=1 is
`owned_update.py`. Built on torch's `fully_shard`, on the eager, unmodified model.

Needs: the loss as (sum, weight), called through `forward`. Every rank of the axis runs the same number of
micro-batches: one that has fewer repeats one with its loss times 0 and `is_padding`. The same goes for
evaluation. Blocks are called in the same order on every rank. With zero=3 a block's parameters are used in
its own forward only, with zero=2 in it or after it. An optimizer that updates each parameter by itself
(`elementwise.py` tries it out).
Promises: gradients are the sum over the axis, undivided. After a step rank r holds rows r of R, as
`torch.chunk` cuts them, of each parameter, its gradient and its optimizer state; scalars and a group's
minority dtypes stay whole. Between steps nothing else is held, and with zero=3 during a step one block
besides the root. Without compression the parameters equal those of one rank on the whole batch, up to
rounding; bf16 rounds what is on the wire, parameters and gradients, and nothing that is kept.
Traffic per step: per group a 1/R of its padded bytes into each
all_gather and all of them into each reduce_scatter; one all_reduce of 8 (trained parameters + 1 + R) bytes; one
more per dtype of trained parameters that stay whole. At the start, one broadcast per parameter and buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from paceline.comm import fully_shard
from paceline.comm.collectives import AxisComm
from paceline.comm.dtensor_parts import is_part, local
from paceline.comm.fully_shard import CollectiveOrder, Grouping, Groups
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.parallel.effects import SHARDS
from paceline.parallel.observer import StepObserver
from paceline.parallel.parameter_writes import ParameterWrites
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.shard.blocks import check_dense, find_blocks, kept_whole, owners
from paceline.parallel.shard.grad_usage import GradUsage
from paceline.parallel.whole_update import CutParameter, cut_parameters
from paceline.torch_private.tensors import is_view

__all__ = ["Shard", "local"]
_NARROW = {"none": None, "bf16": torch.bfloat16}


class Shard:
    """The strategy on this rank; see the top of this file for its needs, promises and traffic.

    Args:
        model: the model, which is split in place. What is not on the meta device becomes rank 0's first, the rest
            gets memory for this rank's part and waits for `fill`.
        comm: the `shard` axis. On one of size 1 the model stays as it is.
        plan: the job's plan, with zero=2 or 3, offload and compression.
        device: the device where the model is, or will be.

    Raises:
        PlanError: the plan asks for another compression than bf16, or torch is too old.
        WorkloadError: the model has sparse gradients.
    """

    def __init__(self, model: nn.Module, comm: AxisComm, plan: Plan, device: torch.device) -> None:
        self.model = model
        self.comm = comm
        self.plan = plan
        self.device = device
        self.blocks: dict[str, nn.Module] = {}
        if comm.size > 1:
            self.blocks = find_blocks(model)
        parameters = dict(model.named_parameters())
        self.replicated = set(parameters)
        if comm.size > 1:
            self.replicated = set(kept_whole(model, self.blocks))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.called: set[str] = set()  # names of the blocks that were called in this forward pass
        self.frozen: dict[str, list[nn.Parameter]] = {}  # by prefix of a block, when its uses were last noted
        self.is_inside = False  # a forward pass
        self.is_held = False  # parameters stay whole between forward passes
        self.groups: Groups | None = None
        self.is_open = False  # a step has begun and not finished
        self.phase: tuple[bool, bool] | None = None
        if comm.size > 1:
            check_can_split(model, plan)
            self.groups = self._split()
        collective_order = self.groups.collective_order if self.groups else CollectiveOrder(comm)
        self.grad_usage = GradUsage(self.trained, self.replicated, comm, collective_order)
        self.parameters = dict(model.named_parameters())  # anew: `fully_shard` puts DTensors in their places
        self.observer = StepObserver()
        self.peer_values = PeerValues()
        # Compiled code is none that a dispatch mode could see.
        self.writes = ParameterWrites(SHARDS, self.groups is not None and not plan.is_compiled)

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of gathered blocks, and the uses of parameters read by `peer_values`."""
        self.observer = observer
        self.peer_values = peer_values
        if self.groups is not None:
            self.groups.collective_order.sums_on_cpu = peer_values.sums_on_cpu

    def forward(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Call `function(model, batch)`, a loss or a score; the root's parameters are whole while it runs.

        Raises:
            WorkloadError: it uses a parameter of which this rank holds only a part.
        """
        if self.groups is None:
            return function(self.model, batch)
        has_grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            # FSDP2 keeps its buffers: made in inference mode they could never be trained with.
            return self._forward(self.groups, functools.partial(function, self.model, batch))

    def begin_step(self) -> None:
        """Forget the step before."""
        if self.groups is None:
            return
        if self.is_open:  # it raised
            self.groups.forget_failed_step()
        self.reshard()
        # Parameters may be frozen, or trained again, between steps.
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self.grad_usage.clear(self.trained)
        # The checksums of the order are compared once per step.
        self.groups.collective_order.crc = 0
        self.groups.took_gradient = False
        self.is_open = True

    def begin_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Prepare for a micro-batch's backward pass.

        Args:
            is_last: whether it is the step's last one.
            is_padding: whether its loss was multiplied by 0, so that it does not show which parameters were used.
        """
        if self.groups is None:
            return
        self.grad_usage.is_counting = not is_padding
        # With zero=2 a parameter may be used outside its block, so its values are kept to the end. So does the graph
        # of a gradient that the loss took.
        drops_blocks = self.plan.zero == 3 and not self.groups.took_gradient
        # What FSDP2 does in this backward pass: drop blocks after use, end the step.
        phase = (drops_blocks, is_last)
        if self.groups.took_gradient:
            self.groups.gather()
        if phase != self.phase:
            self.groups.set_phase(*phase)
            self.phase = phase

    def finish_backward(self) -> None:
        """Make gradients the sum over the axis, and None where no rank had one, after the last backward pass.

        Raises:
            WorkloadError: ranks called the blocks in different orders, or a block's gradient came too late.
        """
        if self.groups is None:
            return
        # Collective, and first: it also says whether the ranks' collectives met, before their results are used.
        unused = set(self.peer_values.unused(self.grad_usage))
        self._reduce_whole(unused)
        self.reshard()
        # FSDP2 leaves zeros where no rank had a gradient: AdamW would decay the parameter.
        for name in unused:
            self.parameters[name].grad = None
        self.is_open = False

    def hold(self, is_held: bool) -> None:
        """Have whole parameters, also between forward passes, until this is called with False. Collective."""
        self.is_held = is_held
        if self.groups is None:
            return
        self.groups.drop_after_forward(not is_held and self.plan.zero == 3)
        if is_held:
            self.groups.gather()
        elif not torch.is_grad_enabled():
            self.reshard()

    def reshard(self) -> None:
        """Keep parts only; forward passes that no backward pass followed leave whole parameters."""
        if self.groups is not None:
            self.groups.drop()

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Return the shard spec of each parameter, by its name in `model.named_parameters()`."""
        return {name: self._placement(name, shape) for name, shape in self.shapes.items()}

    def cut_parameters(self, names: Collection[str]) -> dict[str, CutParameter]:
        """Return the cut and the owner of each parameter in `names` that the axis cuts, by name."""
        specs = {name: spec for name, spec in self.shard_specs().items() if spec.cuts and name in names}
        return cut_parameters(specs, self.comm.size)

    def fill(self, name: str, full: torch.Tensor) -> None:
        """Write this rank's rows of the `full` tensor into the parameter `name`."""
        shape = self.shapes[name]
        if tuple(full.shape) != shape:
            raise ValueError(f"{name} has the shape {shape}, not {tuple(full.shape)}")
        self.reshard()
        with torch.no_grad():
            local(self.parameters[name]).copy_(self.rows_of(name, full))

    def rows_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor of the shape of the parameter `name`."""
        cuts = self._placement(name, self.shapes[name]).cuts
        return full[slice(*cuts[0].ranges[0])] if cuts else full

    def close(self) -> None:
        """Let go of the other ranks; the model keeps this rank's parts."""
        self.reshard()

    def _split(self) -> Groups:
        """Split the model in place: `fully_shard` groups, and hooks that see what is called."""
        # While every rank still has whole tensors: rank 0's are the start of all.
        self._broadcast()
        for parameter in self.model.parameters():
            if not parameter.is_contiguous():  # channels_last, say; its rows would be scattered in memory
                parameter.data = parameter.data.contiguous()
        parameters = dict(self.model.named_parameters())
        grouping = Grouping(
            list(self.blocks.values()),
            {parameters[name] for name in self.replicated},
            self.plan.zero == 3,
            self.plan.offload == "on",
            _NARROW[self.plan.compression],
        )
        if self.plan.zero == 3:  # before FSDP2's own hooks on the output
            for block in self.blocks.values():
                block.register_forward_hook(_without_views)
        # From here on the model's parameters are DTensors of this rank's rows.
        groups = fully_shard.split(self.model, self.comm, self.device, grouping)
        self.model.forward = self._outside_too(self.model.forward)
        for name, block in self.blocks.items():
            block.register_forward_pre_hook(functools.partial(self._block_is_whole, name))
        self._materialize(groups)
        return groups

    def _broadcast(self) -> None:
        # Tensors on the meta device have no values yet: each rank fills its own part later.
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta:
                start = tensor.detach().contiguous()
                self.comm.broadcast(start)
                tensor.data.copy_(start)

    def _materialize(self, groups: Groups) -> None:
        """Give parameters on the meta device memory for this rank's part; tied ones stay tied."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            return
        places = owners(self.model)
        device = torch.device("cpu") if self.plan.offload == "on" else self.device

        def allocated(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

        groups.root._apply(allocated)  # type: ignore[no-untyped-call]
        for (module, name), *tied in places.values():
            for tied_module, tied_name in tied:  # `_apply` gave each place a parameter of its own
                tied_module._parameters[tied_name] = module._parameters[name]

    def _forward(self, groups: Groups, call: Callable[[], Any]) -> Any:
        self.called.clear()
        self.is_inside = True
        try:
            result = groups.forward(functools.partial(self._whole_call, groups, call))
        # torch refuses operations on plain tensors and DTensors together: so a parameter was used while only its rows
        # are here.
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "DTensor" in str(error):
                raise self._used_in_part(str(error).splitlines()[0]) from error
            raise
        finally:
            self.is_inside = False
        results = result if isinstance(result, tuple) else (result,)
        if any(is_part(value) for value in results):
            raise self._used_in_part("the result is spread over the ranks")
        if not torch.is_grad_enabled() and not self.is_held:
            self.reshard()  # no backward pass will
        return result

    def _whole_call(self, groups: Groups, call: Callable[[], Any]) -> Any:
        if self.plan.zero < 3:  # they stay whole anyhow, so a loss may use any of them, anywhere
            groups.gather()
        with self.writes.watching():
            self._note_gathered("", self.model)
            return call()

    def _block_is_whole(self, name: str, block: nn.Module, inputs: Any) -> None:
        self.called.add(name)
        self._note_gathered(f"{name}.", block)

    def _note_gathered(self, prefix: str, module: nn.Module) -> None:
        """Note from now on which parameters of `module` are used, and tell the observer that they are gathered."""
        self._note_uses(prefix, module)
        self.observer.block_gathered(prefix, module)

    def _note_uses(self, prefix: str, module: nn.Module) -> None:
        frozen = self.frozen.get(prefix)
        # FSDP2 keeps these tensors, so once is enough for each that is trained.
        is_noted = frozen is not None and not any(parameter.requires_grad for parameter in frozen)
        if is_noted and self.writes.mode is None:
            return
        unsplit = {}
        for name, parameter in module.named_parameters():
            if not is_part(parameter):
                unsplit[f"{prefix}{name}"] = parameter
        self.writes.add(unsplit)
        if is_noted:
            return
        self.grad_usage.watch(unsplit)
        self.frozen[prefix] = [parameter for parameter in unsplit.values() if not parameter.requires_grad]

    def _outside_too(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's own forward, right as well where a user calls it: then it is a forward pass too."""

        @functools.wraps(forward)
        def forward_pass(*arguments: Any, **named: Any) -> Any:
            if self.is_inside:
                return forward(*arguments, **named)
            return self.forward(lambda model, batch: forward(*arguments, **named), None)

        return forward_pass

    def _reduce_whole(self, unused: set[str]) -> None:
        """Sum the gradients of parameters that every rank holds, one message per dtype."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for name in self.trained:
            if name in self.replicated and name not in unused:
                parameter = self.parameters[name]
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            flat = torch.cat([_or_zeros(parameter).reshape(-1) for parameter in parameters])
            self.comm.all_reduce(flat)
            gradients = flat.split([parameter.numel() for parameter in parameters])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def _placement(self, name: str, shape: tuple[int, ...]) -> ShardSpec:
        if name in self.replicated:
            return ShardSpec(shape)
        return ShardSpec(shape, (Cut(0, (shape[0],), self.comm.rank, self.comm.size),))

    def _used_in_part(self, reason: str) -> WorkloadError:
        missed = [name for name in self.blocks if name not in self.called]
        found = f"{', '.join(missed[:3])} was never called" if missed else "every block was called"
        return WorkloadError(
            "a parameter should be whole where it is used: with zero=3 a block's are in its own forward only",
            f"{found}, and a parameter was used in part ({reason})",
            "call the block itself, block(x); or write zero=2, or zero=1 if it is used before its block",
        )


def check_can_split(model: nn.Module, plan: Plan) -> None:
    """Raise unless `model` can be split under `plan` with this torch."""
    if plan.compression not in _NARROW:
        raise PlanError(
            f"the plan's compression is {plan.compression}",
            "the axis shard has none and bf16",
            "write compression=bf16, or replicate in place of shard",
        )
    if not fully_shard.can_reduce_unused():
        raise PlanError(
            "the plan has an axis shard of more than one rank",
            f"torch {torch.__version__} can't sum a gradient that only some ranks have",
            "install torch 2.13 or newer, or write replicate in place of shard",
        )
    check_dense(model)


def _or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient; zeros where this rank has none and another one has."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return a block's output as a tensor of its own.

    FSDP2 fetches a block's parameters for the backward pass by a hook on its output. A later in-place
    change of a view loses that hook, and the gradient with it.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if is_view(output) and output.requires_grad else output
    if type(output) in (tuple, list):
        return type(output)(_without_views(module, inputs, part) for part in output)
    return output
