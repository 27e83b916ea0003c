"""Where other people's training steps are tried out: one rank of theirs, on fake tensors, as on a GPU.

Each source of measurements has a file here that builds its model and its step as its authors' code does; what crosses
the network needs no partner. The parts of a model that other ranks hold are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from paceline.comm.fake_process_group import fake_world
from paceline.nouns.profile import BUFFERS, PARAMETERS, Recording
from paceline.plan.allocator import OutOfMemoryError, play
from paceline.profile.allocation_trace import Allocations
from paceline.profile.gpu_dispatch import as_on_gpu
from paceline.profile.simulate import unnoticed

CUTS = (2, 5)  # layers, of which a whole model's memory is extrapolated where it need not be exact
STEPS = 2  # in the first the optimizer makes its state


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step takes from a GPU, in bytes.

    Attributes:
        allocated: `torch.cuda.max_memory_allocated` would say.
        reserved: `torch.cuda.max_memory_reserved` would say.
        is_too_large: the device's memory is not enough.
    """

    allocated: int
    reserved: int
    is_too_large: bool


class Stage:
    """A rank and its recorder.

    Attributes:
        recorder: writes down what is allocated.
        mesh: of all ranks; None where there is one.
    """

    def __init__(self, ranks: int, sees_making: bool) -> None:
        self.sees_making = sees_making
        self.mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        self.recorder = Allocations()
        self.recorder.sees_scratch = False
        self.recorder.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def note(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say of memory that was made before the steps."""
        self.recorder.record_all((("", one) for one in tensors), kind)

    def run(self, model: nn.Module, step: Callable[[], None], steps: int = STEPS) -> Recording:
        """Take some steps; `model` is the whole of what stays, `step` one step of training."""
        recorder = self.recorder
        recorder.record_all(model.named_parameters(), PARAMETERS)
        recorder.record_all(model.named_buffers(), BUFFERS)
        recorder.names = {module: name for name, module in model.named_modules()}
        with contextlib.nullcontext() if self.sees_making else recorder.watching():
            for _ in range(steps):
                recorder.phase = "forward"
                recorder.recording.last_step = len(recorder.recording.events)
                step()
        recorder.has_ended = True
        return recorder.recording


@dataclass(slots=True)
class _Depth:
    """How many of a model's layers are made, and how many it has."""

    cut: int | None = None
    whole: int = 0


_depth = _Depth()


def depth(layers: int) -> int:
    """So many layers, or fewer where a trial is cut."""
    _depth.whole = layers
    return layers if _depth.cut is None else min(layers, _depth.cut)


def extrapolated(run: Callable[[], Sequence[Recording]]) -> int:
    """About how many bytes are reserved for the fullest of `run`'s recordings, from trials of few layers."""
    reserved = []
    try:
        for _depth.cut in CUTS:
            reserved.append(max(taken(one).reserved for one in run()))
    finally:
        _depth.cut = None
    low, high = CUTS
    return round(reserved[0] + (reserved[1] - reserved[0]) / (high - low) * max(_depth.whole - low, 0))


def steps_for(row: dict[str, str]) -> int:
    """Steps to try out: where only what ran is told, the states are there and one is enough."""
    return STEPS if "memory" in row["metric"] else 1


@contextmanager
def stage(ranks: int = 1, sees_making: bool = False) -> Iterator[Stage]:
    """One rank of so many, on a GPU that is not there.

    Args:
        ranks: how many.
        sees_making: the model is made on the GPU, whole, before it is cut: that counts too.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    made: Stage

    def unseen(*arguments: Any, **named: Any) -> Any:
        """DTensor asks for shapes with tensors that nobody will have."""
        mode, made.recorder.fake_mode = made.recorder.fake_mode, None
        try:
            return propagate(*arguments, **named)
        finally:
            made.recorder.fake_mode = mode

    with fake_world(0, ranks), mock.patch.object(ShardingPropagator, propagate.__name__, unseen), unnoticed():
        made = Stage(ranks, sees_making)
        watching = made.recorder.watching() if sees_making else contextlib.nullcontext()
        with as_on_gpu("cuda", made.recorder), made.recorder.fake_mode, watching:
            yield made


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made here are of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def taken(recording: Recording, capacity: int | None = None) -> Taken:
    """What torch's caching allocator takes for a recording.

    Args:
        recording: of a step.
        capacity: bytes that the allocator may have.
    """
    sizes = [block.nbytes for block in recording.blocks]
    streams = [block.stream for block in recording.blocks]
    try:
        allocator, is_too_large = play(recording.events, sizes, streams, capacity), False
    except OutOfMemoryError:
        allocator, is_too_large = play(recording.events, sizes, streams), True
    return Taken(allocator.peak_allocated, allocator.peak_reserved, is_too_large)
