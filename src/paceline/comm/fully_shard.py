"""Apply torch's `fully_shard` (FSDP2) on one axis, with its collectives in our ledger: the one file that imports it.

On CPUs a reduce_scatter is an all_to_all and a sum in rank order: the same bits on every run, in about half
the time of Gloo's own (16 MB on 2 cores: 10.4 against 17.5 ms on 2 ranks, 17 against 33 ms on 4).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from paceline.comm.collectives import AxisComm, named_failure
from paceline.torch_private import fsdp
from paceline.torch_private.fsdp import AllGather, ReduceScatter

# torch 2.13 renamed them; the old names warn there, the new ones are not in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class CollectiveOrder:
    """A checksum of the order in which this rank's groups sent: ranks that differ here have mixed up their tensors."""

    comm: AxisComm
    crc: int = 0
    sums_on_cpu: bool = True  # False: on the CPU too, do as on a GPU, to try a step out

    def enter(self, collective: str, group: int, tensor: torch.Tensor) -> None:
        """Enter one call in the ledger and in the checksum of the order."""
        self.comm.ledger.add(collective, self.comm.axis, tensor.nbytes)
        # Ranks compare the checksum: a different order would gather and sum tensors of different groups without an
        # error.
        self.crc = zlib.crc32(f"{collective} {group} {tensor.numel()}".encode(), self.crc)


class _Counted:
    """A collective of FSDP2's group `number` that is counted, and sends floats in the dtype `narrow` where given."""

    def __init__(self, collective_order: CollectiveOrder, number: int, narrow: torch.dtype | None) -> None:
        self.collective_order = collective_order
        self.number = number
        self.narrow = narrow

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as it is sent."""
        if self.narrow is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.narrow)


class CountedAllGather(_Counted, AllGather):  # type: ignore[misc]
    """FSDP2's all_gather, counted."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; narrow numbers are widened again before anybody sees them."""
        sent = self.narrowed(input_tensor)
        is_narrow = sent is not input_tensor
        received = torch.empty_like(output_tensor, dtype=sent.dtype) if is_narrow else output_tensor
        # What is narrow must be here before it can be widened, so it is waited for.
        async_op = async_op and not is_narrow
        self.collective_order.enter("all_gather", self.number, sent)
        with named_failure("all_gather", self.collective_order.comm.axis):
            work: dist.Work | None = _all_gather(received, sent, group=group, async_op=async_op)
        if is_narrow:
            output_tensor.copy_(received)
        return work


class CountedReduceScatter(_Counted, ReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce_scatter as a sum, counted."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum; FSDP2 asks for nothing else once its divisor is 1."""
        sent = self.narrowed(input_tensor)
        self.collective_order.enter("reduce_scatter", self.number, sent)
        with named_failure("reduce_scatter", self.collective_order.comm.axis):
            # None in place of a handle tells FSDP2 that the result is there.
            if sent.device.type == "cpu" and self.collective_order.sums_on_cpu:
                _sum_parts(output_tensor, sent, group, self.collective_order.comm.size)
                return None
            if sent is input_tensor:
                return _reduce_scatter(output_tensor, sent, group=group, async_op=async_op)  # type: ignore[no-any-return]
            received = torch.empty_like(output_tensor, dtype=sent.dtype)
            _reduce_scatter(received, sent, group=group)
            output_tensor.copy_(received)
            return None


def _sum_parts(out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> None:
    """Write the sum of the ranks' parts for this rank to `out`, in rank order and in its dtype.

    `tensor` has a part for each rank, one after the other: ranks * out.numel() elements.
    """
    parts = torch.empty_like(tensor)
    dist.all_to_all_single(parts, tensor, group=group)
    # (ranks, elements): a row from each rank
    first, second, *remaining = parts.view(ranks, -1).unbind()
    if first.dtype != out.dtype:
        first = first.to(out.dtype)  # one wide operand makes torch add in that dtype
    torch.add(first, second, out=out)
    for part in remaining:
        out += part


class Root(nn.Module):
    """A module that holds a model and calls a function as its forward pass, such as a loss.

    FSDP2 makes a module's own parameters whole while its forward runs. A loss may use the model's outside
    the model's forward, call other methods of it, or call it twice; inside this one all of it is right.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], object]) -> Any:
        """Call it."""
        return call()


@dataclass(slots=True)
class Groups:
    """A model's groups of parameters, each gathered and reduced by one message; the root's is the last.

    Attributes:
        is_forward: a forward pass is running, or none was announced as a backward pass. A gradient that is taken in it
            (`torch.autograd.grad` in a loss) must neither reduce nor drop anything.
        took_gradient: the forward pass took one. Its graph uses parameters of blocks anywhere in the backward pass.
    """

    root: Root
    modules: list[FSDPModule]
    collective_order: CollectiveOrder
    has_run: bool = False
    is_forward: bool = False
    took_gradient: bool = False

    def forward(self, call: Callable[[], object]) -> Any:
        """Run `call()` as a forward pass."""
        self.has_run = True
        before = self.is_forward
        self.is_forward = True
        try:
            return self.root(call)
        finally:
            self.is_forward = before

    def open(self) -> None:
        """Make the model FSDP2's root, whatever part of it is called first."""
        fsdp.make_root(self.modules[-1])

    def leave_state_dicts_alone(self) -> None:
        """Have `state_dict()` of the model return what its parameters are: FSDP2 would drop whole ones before."""
        self.open()
        fsdp.keep_gathered_in_state_dicts(self.modules)

    def sum_in_backward_from(self, loss: torch.Tensor) -> None:
        """Have the backward pass from `loss` sum gradients, though no output of the model may be on its way."""
        # Of the root: what FSDP2 does before the backward pass of its output, which is the loss in a workload.
        loss.register_hook(fsdp.before_backward(self.modules[-1]))

    def note_gradient(self) -> None:
        """Note that the forward pass takes a gradient."""
        self.took_gradient = True

    def set_phase(self, drops: bool, is_last: bool) -> None:
        """Set what the next backward pass does: drop full parameters, end the step."""
        # The first setter is recursive (torch's default): set at the root, it holds for all groups.
        root = self.modules[-1]
        root.set_reshard_after_backward(drops)
        root.set_is_last_backward(is_last)

    def gather(self) -> None:
        """Gather every group's parameters now."""
        # All are started before the first is waited for, so the messages overlap.
        handles = [module.unshard(async_op=True) for module in self.modules]
        for handle in handles:
            if handle is not None:
                handle.wait()

    def drop_after_forward(self, drops: bool) -> None:
        """Free a block's gathered parameters after its forward pass, or keep them."""
        for module in self.modules[:-1]:
            module.set_reshard_after_forward(drops, recurse=False)

    def drop(self) -> None:
        """Free the gathered parameters and keep this rank's parts."""
        for module in self.modules:
            module.reshard()

    def forget_failed_step(self) -> None:
        """Reset FSDP2 after a forward or backward pass that raised; its gradients are lost."""
        if self.has_run:
            self.modules[-1].reset_iter_state()


def can_reduce_unused() -> bool:
    """True if this torch can sum a gradient that some ranks have and others have not (2.13 can)."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params") and hasattr(FSDPModule, "reset_iter_state")


@dataclass(frozen=True, slots=True)
class Grouping:
    """The modules that are FSDP2's groups, the parameters that stay replicated, and how long gathered ones stay."""

    blocks: Sequence[nn.Module]
    replicated: set[nn.Parameter]  # on every rank; not FSDP2's business
    drops_after_forward: bool
    offloads: bool
    narrow: torch.dtype | None


def split(model: nn.Module, comm: AxisComm, device: torch.device, grouping: Grouping) -> Groups:
    """Leave on each rank its rows of every parameter of `model`, in place.

    The root's group stays whole from the forward to the backward pass: that begins where the forward
    ends, and a loss may use the model's own parameters after it.
    """
    # The hook that a view may lose fetches parameters; blocks return no views, the root is whole anyhow.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    mesh = DeviceMesh.from_group(comm.group or dist.group.WORLD, device.type, mesh_dim_names=(comm.axis,))  # type: ignore[arg-type]
    collective_order = CollectiveOrder(comm)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if grouping.offloads else OffloadPolicy()
    root = Root(model)
    modules: list[FSDPModule] = []
    # Blocks first, the root last: FSDP2 gives the root's group the parameters that no earlier group has.
    for number, module in enumerate([*grouping.blocks, root]):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=module is not root and grouping.drops_after_forward,
            offload_policy=offload,
            ignored_params=grouping.replicated,
        )
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(CountedAllGather(collective_order, number, grouping.narrow))
        module.set_custom_reduce_scatter(CountedReduceScatter(collective_order, number, grouping.narrow))
        # A sum: what it is divided by is known only when all micro-batches of all ranks are through.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        modules.append(module)
    # A rank without a gradient sends zeros. Otherwise it would skip the collective, and the others would wait for it.
    modules[-1].set_reduce_scatter_unused_params(True)
    groups = Groups(root, modules, collective_order)
    for group in modules:
        fsdp.limit_backward_hooks(group, lambda: groups.is_forward, groups.note_gradient)
    return groups
