"""Data parallelism by replication: every rank holds all parameters, gradients are averaged.

One step on a `replicate` axis of R ranks:

    forward, backward     each rank on its own micro-batches; after the last forward the loss sums, weights
                          and flags of all ranks are added up (`step_stats.py`) while the backward pass runs
    during backward       a gradient is copied to its bucket as it is made; a full bucket's sum starts
    reduce_gradients      the remaining sums; gradients divided by the global weight; buffers made equal
    update                the same on every rank

Needs: the loss as (sum, weight).
Promises: after a step, parameters and buffers are equal bit for bit on all ranks; without compression
they equal those of one rank on the whole batch, up to rounding.
Traffic per step: one all_reduce of 8 (3 + R + buffers) bytes, one all_reduce per bucket of its parameters'
bytes plus one number per parameter; for sparse parameters two all_gathers of their non-zero rows; one
all_reduce per dtype of the buffers that changed, and where one of these has a new shape somewhere, two
all_gathers of such shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.collectives import AxisComm
from paceline.comm.compression import CastReducer, PowerSGDReducer, TopKReducer
from paceline.comm.reducer import Reducer, exact_reducer
from paceline.comm.shared_memory import MAX_BYTES, SharedMemory, open_shared_memory
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.parallel.replicate.bucket import Bucket, local_gradient, make_buckets

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL = 2**16  # numbers of a gradient that is copied with others: a copy of fewer takes less time than its call
_BROADCAST_BYTES = 64 * 2**20  # copied together when the start state is sent


class Replicate:
    """The strategy on this rank.

    Args:
        parameters: the parameters that are trained here, by name: whole, or this rank's parts of them.
        sparse: the names of the parameters whose gradients are sparse.
        comm: the `replicate` axis.
        plan: the job's plan, with transport, compression and bucket size.
        device: the device of the model.
        overlaps: whether gradients may be sent while the backward pass runs; otherwise all of them after it.

    Raises:
        PlanError: the plan's transport is not to be had here.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        sparse: set[str],
        comm: AxisComm,
        plan: Plan,
        device: torch.device,
        overlaps: bool = True,
    ) -> None:
        self.comm = comm
        self.plan = plan
        self.device = device
        self.overlaps = overlaps
        self.parameters = parameters
        self.sparse_names = sparse
        self.shared = self._open_shared(device)
        self.buckets: list[Bucket] = []
        self.hooks: list[RemovableHandle] = []
        self.filled = 0  # how often the buckets were made anew
        self.trained: list[bool] = []  # by parameter, when the buckets were made
        self.is_last_backward = False
        self.next_bucket = 0
        self.scale: Callable[[], torch.Tensor | None] = lambda: None
        self._fill_buckets()

    def begin_step(self, scale: Callable[[], torch.Tensor | None]) -> None:
        """Forget the step before.

        Args:
            scale: a function that waits for the factor of the gradients, and returns it; None where they have none.
        """
        self.scale = scale
        if self.comm.size == 1:
            return
        if self._find_trained() != self.trained:
            self._fill_buckets()  # some were frozen or set free since
        self.is_last_backward = False
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.clear()

    def _find_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def begin_last_backward(self) -> None:
        """Send gradients as they come from here on."""
        # Not in earlier micro-batches: a parameter's gradient is complete after the last one.
        self.is_last_backward = self.overlaps

    def reduce_gradients(self) -> None:
        """Make every gradient that of the global batch's mean loss; the same bits on every rank."""
        if self.comm.size == 1:
            return
        # Step 1: fill and send what the hooks have not. Those that they took have no `grad` any more.
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:  # accumulated earlier, but not reached by the last backward
                    self._fill(parameter, bucket, index)
        self._send_complete(all_of_them=True)
        self.is_last_backward = False  # a backward pass of the user's own, between steps, sends nothing
        # Step 2: wait for the global weight, and then for the sums, in the order in which they were started.
        scale = self.scale()
        for bucket in self.buckets:
            bucket.receive(scale)
        self.gather_sparse()

    def gather_sparse(self) -> None:
        """Make the sparse gradients sums over the ranks. Collective."""
        scale = self.scale()
        # Sorted: Python hashes strings differently in each process, so a set's order differs between ranks, and their
        # collectives would not match.
        for name in sorted(self.sparse_names):
            if self.parameters[name].requires_grad:
                self._gather_sparse(name, self.parameters[name], scale)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that gradient compression keeps from step to step, by name."""
        state = {}
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.reducer.state().items():
                state[f"{number}.{name}"] = tensor
        return state

    def close(self) -> None:
        """Let go of the other ranks, and hear of no gradients any more."""
        self._remove_hooks()
        if self.shared is not None:
            self.shared.close()

    def _open_shared(self, device: torch.device) -> SharedMemory | None:
        """Open shared memory between the ranks where the plan allows it and the gradients fit.

        Raises:
            PlanError: the plan's transport is not to be had here.
        """
        transport = self.plan.transport
        shared = None
        if transport in ("auto", "shared_memory") and device.type == "cpu" and self._fits_shared():
            shared = open_shared_memory(self.comm)
        if self.comm.size == 1:
            return shared
        if transport == "shared_memory" and shared is None:
            # The largest gradients are half of a region, in MiB: a region has two halves.
            raise PlanError(
                "the plan's transport is shared_memory",
                f"it needs one Linux host, CPUs, 2 to 8 ranks and at most {MAX_BYTES >> 21} MiB of gradients",
                "write transport=auto",
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        if transport in ("nccl", "gloo") and transport != backend:
            raise PlanError(
                f"the plan's transport is {transport}", f"the model is on {device.type}", "write transport=auto"
            )
        return shared

    def _fits_shared(self) -> bool:
        """True if the gradients of dense parameters fit into shared memory twice: its two halves are used in turn."""
        num_bytes = sum(parameter.nbytes for parameter in self._dense())
        return 2 * num_bytes <= MAX_BYTES

    def _dense(self) -> list[torch.nn.Parameter]:
        return [parameter for name, parameter in self.parameters.items() if name not in self.sparse_names]

    def _fill_buckets(self) -> None:
        """Sort the trained parameters into buckets, and have each gradient reported as it is made."""
        self.trained = self._find_trained()
        if self.comm.size == 1:
            return
        self._remove_hooks()  # or gradients would go on to the earlier buckets
        self.filled += 1
        trained = [parameter for parameter in self._dense() if parameter.requires_grad]
        self.buckets = make_buckets(trained, self.plan.bucket_bytes, self._make_reducer)
        if not self.overlaps:
            return
        # Held weakly: Python's collector did not free a cycle through the hooks of parameters, and a job need not be
        # closed.
        weak_self = weakref.ref(self)
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.parameters):
                gradient_is_here = partial(_gradient_is_here, weak_self, self.filled, (number, index))
                self.hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_here))

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _make_reducer(
        self, shapes: Sequence[torch.Size], flags: int, dtype: torch.dtype, device: torch.device
    ) -> Reducer:
        """Return the reducer of a bucket of tensors of these shapes and so many flags, compressed as the plan says."""
        numel = sum(shape.numel() for shape in shapes) + flags
        if self.plan.compression in _NARROW:
            narrow = exact_reducer(self.comm, self.shared, numel, _NARROW[self.plan.compression], device)
            return CastReducer(torch.zeros(numel, dtype=dtype, device=device), narrow)
        if self.plan.compression == "topk":
            return TopKReducer(self.comm, torch.zeros(numel, dtype=dtype, device=device), flags)
        if self.plan.compression == "powersgd":
            return PowerSGDReducer(self.comm, torch.zeros(numel, dtype=dtype, device=device), shapes)
        return exact_reducer(self.comm, self.shared, numel, dtype, device)

    def _gradient_is_here(self, number: int, index: int, parameter: torch.nn.Parameter) -> None:
        if self.is_last_backward:
            bucket = self.buckets[number]
            self._fill(parameter, bucket, index)
            if len(bucket.filled) == len(bucket.parameters):
                self._send_complete()

    def _fill(self, parameter: torch.nn.Parameter, bucket: Bucket, index: int) -> None:
        """Copy a parameter's gradient to its bucket."""
        gradient = local_gradient(parameter) if bucket.has_parts else parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            raise WorkloadError(
                "a dense parameter should get a dense gradient",
                f"parameter of shape {tuple(parameter.shape)} got a sparse one",
                "only nn.Embedding and nn.EmbeddingBag with sparse=True may; set it on the module",
            )
        # Compressing reducers scale first: a sum over a batch can leave float16's range. Others scale in the pass that
        # adds: asked for here, the scale waits for the other ranks' forward passes.
        if gradient.numel() <= _SMALL:
            bucket.hold(index, gradient)
        else:
            bucket.fill(index, gradient, self.scale() if bucket.reducer.is_scaled_first else None)
        parameter.grad = None  # the bucket has it; free the memory before the rest of the backward pass

    def _send_complete(self, all_of_them: bool = False) -> None:
        """Start the sums of full buckets, in the same order on every rank, so that sums meet."""
        # A rank that uses other parameters fills its buckets in another order: one that is full waits for those before
        # it.
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if not all_of_them and len(bucket.filled) < len(bucket.parameters):
                return
            bucket.send(self.scale() if bucket.pending and bucket.reducer.is_scaled_first else None)
            self.next_bucket += 1

    def _gather_sparse(self, name: str, parameter: torch.nn.Parameter, scale: torch.Tensor | None) -> None:
        """Make a sparse gradient the sum over the ranks, from the rows that each has."""
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise WorkloadError(
                f"the gradient of {name} should be sparse",
                "it is a dense one",
                "use its weight in the embedding alone",
            )
        if gradient is None:
            indices = torch.zeros(0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_zeros((0, *parameter.shape[1:]))
        else:
            gradient = gradient.coalesce()
            indices = gradient.indices()[0]  # (rows,)
            values = gradient.values()  # (rows, width)
        # Ranks have different numbers of rows, perhaps none; a row of several ranks is added up by `coalesce`.
        indices = torch.cat(self.comm.all_gather(indices))
        values = torch.cat(self.comm.all_gather(values))
        if scale is not None:
            values *= scale
        if indices.numel():
            summed = torch.sparse_coo_tensor(indices[None], values, parameter.shape, check_invariants=False)
            parameter.grad = summed.coalesce()


def no_scale() -> None:
    """Return None: gradients are those of the mean already."""


def broadcast_state(tensors: Sequence[torch.Tensor], comm: AxisComm) -> None:
    """Give every rank the values of the axis' first one, several tensors in one message."""
    if comm.size == 1:
        return
    batches: dict[torch.dtype, list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            batch = batches.setdefault(tensor.dtype, [])
            batch.append(tensor)
            # Small tensors share a message; only so many, because they are copied for it.
            if sum(t.nbytes for t in batch) >= _BROADCAST_BYTES:
                _broadcast_flat(batches.pop(tensor.dtype), comm)
        for batch in batches.values():
            _broadcast_flat(batch, comm)


def _broadcast_flat(batch: list[torch.Tensor], comm: AxisComm) -> None:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
    comm.broadcast(flat)
    received = flat.split([tensor.numel() for tensor in batch])
    for tensor, values in zip(batch, received, strict=True):
        tensor.copy_(values.view_as(tensor))


def sparse_names(model: torch.nn.Module) -> set[str]:
    """Return the parameters whose gradients are sparse: embeddings made with sparse=True."""
    sparse = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            sparse.add(module.weight)
    return {name for name, parameter in model.named_parameters() if parameter in sparse}


def _gradient_is_here(
    strategy: weakref.ref[Replicate], filled: int, place: tuple[int, int], parameter: torch.nn.Parameter
) -> None:
    replicate = strategy()
    # Where the user has registered hooks later, earlier ones of ours are not removed.
    if replicate is not None and replicate.filled == filled:
        replicate._gradient_is_here(*place, parameter)
