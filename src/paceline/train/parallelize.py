"""Make the workload's model as this rank holds it: replicated, sharded, or split as a graph.

What splits a model imports much of torch, seconds of it; plans that only replicate never come to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.batch_norm import SharedStatistics, share_statistics, without_sync
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import checksum
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import STAGES_PER_RANK
from paceline.nouns.workload import Workload
from paceline.parallel.effects import check_effects, placement_of
from paceline.parallel.engine.engine import Comms
from paceline.parallel.float8 import use_float8
from paceline.parallel.model_adapter import Autocast, EagerAdapter, ModelAdapter
from paceline.parallel.offload_activations import (
    OffloadedActivations,
    check_can_offload,
    nothing_offloaded,
    offload_blocks,
)
from paceline.parallel.replicate.replicate_strategy import broadcast_state
from paceline.train import prepare
from paceline.train.precision import autocast_dtype, autocast_of

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 4 * 2**20

Fake = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Build:
    """The arguments for building a model that ranks hold in parts.

    Attributes:
        autocast: the autocast context of the workload's precision.
        example: a micro-batch, from which shapes are known.
        fake: a function that returns a context in which tensors have no values; None where they have some.
    """

    autocast: Autocast
    example: object
    fake: Fake | None

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which this rank's tensors are made."""
        return contextlib.nullcontext() if self.fake is None else self.fake()


def parallelize_model(
    workload: Workload, comms: Comms, plan: Plan, device: torch.device, example: Any, fake: Fake | None = None
) -> ModelAdapter:
    """Make the model as the plan wants it on this rank.

    Args:
        workload: the workload, which makes the model.
        comms: the communicators of the mesh's axes.
        plan: the mesh and the options.
        device: the device on which this rank computes.
        example: a micro-batch, from which the shapes that a split model is captured for are known.
        fake: a function that returns a context in which tensors have no values; then the model is made in it, to try a
            step out.

    Raises:
        WorkloadError, PlanError: the model can't be split so.
    """
    mesh = Mesh.parse(plan.mesh)
    context = autocast_of(workload.precision, device.type)
    is_split = bool(mesh.used(GRAPH_AXES))
    if plan.checkpointing == "offload" and fake is None:
        check_can_offload(device.type)
    # Before tensors are made: the setting holds for blocks that are allocated after it.
    if is_split or mesh.size("shard") > 1:
        _return_freed_memory()
    if is_split:
        return _split(workload, comms, plan, device, _Build(context, example, fake))
    if mesh.size("shard") > 1 and not plan.shares_updates:
        return _sharded(workload, comms, plan, device, _Build(context, example, fake))
    if fake is None:
        model = prepare.make_model(workload, device, comms.data)
        check_effects(model, (), placement_of(plan, is_loop=False))
        # A factory need not draw from the seed here: rank 0's values are sent to all.
        broadcast_state([*model.parameters(), *model.buffers()], comms.data)
    else:
        # Made there, as tensors without values can't be moved.
        place = contextlib.nullcontext() if device.type == "cpu" else device
        with fake(), place:
            model = prepare.make_model_without_values(workload)
    notices, offloaded = change_blocks(model, plan, device, fake is None)
    placed = _unsplit(model, context, comms, plan, _statistics(workload, model, comms), example)
    placed.notices = notices
    placed.offloaded = offloaded
    return placed


def _unsplit(
    model: torch.nn.Module,
    context: Autocast,
    comms: Comms,
    plan: Plan,
    shared: SharedStatistics | None,
    example: Any,
) -> EagerAdapter:
    if not plan.shares_updates:
        return EagerAdapter(model, context, shared, example)
    from paceline.parallel.shard.blocks import check_dense
    from paceline.parallel.shard.owner_adapter import OwnerAdapter

    check_dense(model)
    return OwnerAdapter(model, context, comms.axes, plan, shared, example)


def _split(workload: Workload, comms: Comms, plan: Plan, device: torch.device, build: _Build) -> ModelAdapter:
    from paceline.parallel.graph_adapter import GraphAdapter

    if plan.offload == "on":
        raise PlanError(
            "optimizer state in host memory (offload=on)",
            "beside tensor, context or pipeline it stays on the rank's device",
            "leave offload out, or write shard alone",
        )
    # Step 1: the model's form; its values are made in step 3, unless its factory can't be deferred.
    values, form = _values_and_form(workload, build.fake)
    check_effects(form, (), placement_of(plan, is_loop=False))
    split = split_model(workload, form, comms.axes, plan, device)
    # Step 2: the layout and the stages, from one micro-batch.
    split.decide(workload.loss, build.example)
    _check_writable(split, mesh=Mesh.parse(plan.mesh))
    with build.allocating():
        split.allocate()
    if workload.micro_batch_size is None and comms.data.size > 1:
        split.shared = SharedStatistics(comms.data)
    # Step 3: values, one tensor at a time: each rank keeps its shard and drops the rest.
    digests = []
    for name, tensor in values:
        split.fill(name, tensor)
        digests.append(_digest(tensor))
    if build.fake is None:
        _check_same_everywhere(digests, comms.step)
    with build.allocating():
        return GraphAdapter(split, comms.axes, plan, comms.step.peers[comms.step.rank], build.autocast)


def split_model(
    workload: Workload, form: torch.nn.Module, axes: Mapping[str, AxisComm], plan: Plan, device: torch.device
) -> Any:
    """Return the model as `SplitModel` cuts it on one rank, before `decide`.

    Args:
        workload: the workload, for its precision.
        form: the model, with or without values.
        axes: the communicators of `tensor`, `context`, `expert` and `pipeline` of this rank; without process groups if
            nothing is to run.
        plan: the plan, for its schedule and options.
        device: the device on which the rank computes.
    """
    from paceline.graph.skeleton import skeleton
    from paceline.parallel.graph_model import SplitModel

    stages = 1
    if axes["pipeline"].size > 1:
        stages = axes["pipeline"].size * STAGES_PER_RANK[plan.schedule]
    model = skeleton(form, _dtype(workload)).train()
    context = axes["context"] if axes["context"].size > 1 else None
    expert = axes["expert"] if axes["expert"].size > 1 else None
    split = SplitModel(model, axes["tensor"], axes["pipeline"], plan, device, stages, context, expert)
    split.precision = autocast_dtype(workload.precision)
    return split


def _check_writable(split: Any, mesh: Mesh) -> None:
    """Raise WorkloadError where the forward pass writes to a frozen parameter that ranks have in part or apart."""
    parameters = dict(split.form.named_parameters())
    written = [name for name in split.written if name in parameters]
    axes = mesh.used(("shard", "pipeline"))
    if written and axes:
        raise WorkloadError(
            f"under {axes[0]}, the model's forward pass should not write to its parameters",
            f"it writes into {written[0]}",
            "write replicate in the plan, which keeps the write",
        )


def _sharded(workload: Workload, comms: Comms, plan: Plan, device: torch.device, build: _Build) -> ModelAdapter:
    from paceline.graph.skeleton import skeleton
    from paceline.parallel.shard.fsdp_adapter import ForwardSettings, FsdpAdapter

    values, form = _values_and_form(workload, build.fake)
    check_effects(form, (), placement_of(plan, is_loop=False))
    model = skeleton(form, _dtype(workload)).train()
    shared = _statistics(workload, model, comms)
    notices, offloaded = change_blocks(model, plan, device, build.fake is None)
    with build.allocating():
        settings = ForwardSettings(build.autocast, build.example, shared)
        sharded = FsdpAdapter(model, comms.axes, plan, device, settings)
    sharded.notices = notices
    sharded.offloaded = offloaded
    digests = []
    for name, tensor in values:
        sharded.fill(name, tensor)
        digests.append(_digest(tensor))
    if build.fake is None:
        _check_same_everywhere(digests, comms.step)
    return sharded


def change_blocks(
    model: torch.nn.Module, plan: Plan, device: torch.device, is_real: bool = True
) -> tuple[list[str], OffloadedActivations | None]:
    """Apply float8, activation checkpointing and torch.compile to a model that runs by its own code.

    Args:
        model: the model, which is changed in place.
        plan: the plan, for its options.
        device: the device on which the model computes.
        is_real: True if it computes there; False while a step is predicted.

    Returns:
        Notices, and the activations that the plan has in the host's memory, if any.

    Raises:
        PlanError: the blocks are to be compiled, and there are none.
    """
    notices = use_float8(model, plan, device, is_real)
    offloaded = None
    blocks = None
    if plan.compile == "blocks":
        from paceline.parallel.compiled_blocks import compile_blocks, forwards_of_blocks, nothing_compiled

        blocks = forwards_of_blocks(model)
    if plan.checkpointing == "offload":
        offloaded = offload_blocks(model, device)
        if offloaded is None:
            notices.append(nothing_offloaded())
    if plan.checkpointing in ("selective", "full"):
        from paceline.parallel.recompute import nothing_recomputed, recompute_blocks

        if not recompute_blocks(model, plan.checkpointing, plan.is_compiled):
            notices.append(nothing_recomputed(plan.checkpointing))
    if plan.compile == "on":
        model.compile()
    if blocks is not None and not compile_blocks(blocks):
        notices.append(nothing_compiled(plan.checkpointing))
    return notices, offloaded


def _statistics(workload: Workload, model: torch.nn.Module, comms: Comms) -> SharedStatistics | None:
    """Have batch norm use the whole batch, as one rank would, unless the workload asks for it per micro-batch."""
    if workload.micro_batch_size is not None:
        return None
    return share_statistics(model, comms.data)


def _return_freed_memory() -> None:
    """Have glibc give large freed blocks back at once: what `shard` frees must not stay with the process.

    By itself it keeps blocks of up to 32 MiB for later, in fragments: four ranks of a model of 100 million parameters
    held 2.0 GiB each instead of 0.6 (measured, glibc 2.36).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def _values_and_form(
    workload: Workload, fake: Fake | None
) -> tuple[Iterator[tuple[str, torch.Tensor]], torch.nn.Module]:
    """Return the model's tensors, none where they have no values, and the model that shows their form."""
    values: Iterator[tuple[str, torch.Tensor]]
    if fake is None:
        values, form = _values(workload)
    else:
        values, form = iter(()), _form(workload)
    prepare.check_model(form)
    without_sync(form)
    return values, form


def _values(workload: Workload) -> tuple[Iterator[tuple[str, torch.Tensor]], torch.nn.Module]:
    """Return the model's tensors, one at a time where its factory can be deferred, and its form."""
    from paceline.deferred_init.defer import CantDefer, defer

    # A factory that can't be deferred is called again, from the same random numbers.
    state = torch.get_rng_state()
    try:
        deferred = defer(workload.model)
    except CantDefer:
        torch.set_rng_state(state)
        model = workload.model()
        prepare.check_model(model)
        tensors = []
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensors.append((name, tensor.detach()))
        return iter(tensors), model
    prepare.check_model(deferred.model)
    if deferred.has_plain_tensors:  # the copy without values that runs or is captured needs theirs
        list(deferred.tensors([]))
        # The values are drawn again by `tensors` below, from the same state.
        torch.set_rng_state(state)
    names = [name for name, _ in [*deferred.model.named_parameters(), *deferred.model.named_buffers()]]
    return deferred.tensors(names), deferred.model


def _form(workload: Workload) -> torch.nn.Module:
    """Make the model on the meta device; or without values, where its factory can't be deferred."""
    from paceline.deferred_init.defer import CantDefer, defer

    try:
        return defer(workload.model).model
    except CantDefer:
        return prepare.make_model_without_values(workload)


def _dtype(workload: Workload) -> torch.dtype | None:
    return torch.float64 if workload.precision == "float64" else None


def _digest(tensor: torch.Tensor) -> float:
    return float(checksum(tensor)) + tensor.numel()


def _check_same_everywhere(digests: list[float], comm: AxisComm) -> None:
    """Raise WorkloadError unless the factory made the same values on every rank: nobody has all of them to send."""
    # A NaN is not equal to itself.
    rows = comm.all_gather(torch.tensor(digests, dtype=torch.float64).nan_to_num(0.5))
    for rank, row in enumerate(rows):
        if len(row) != len(rows[0]) or not torch.equal(row, rows[0]):
            raise WorkloadError(
                "every rank should make the same initial parameters, of which it keeps its part",
                f"those of rank {comm.peers[rank]} are not those of rank {comm.peers[0]}",
                "let the model's factory draw from torch's random numbers, which the workload's seed sets, "
                "and not look at the rank or the time",
            )
