"""Keep what a backward pass needs in the host's memory until shortly before it is needed.

A step of blocks 1 to N; every copy is done on a stream of its own, and the host waits for none:

    forward of block i     meanwhile block i-1's tensors are copied to pinned memory; at its end they leave the device
    backward of block i    meanwhile block i-1's tensors are copied back

The tensors of the block that ran last are not copied: they are needed first. So at most two blocks' tensors are on the
device. Small tensors, parameters, buffers and what is computed only from a parameter stay there.

Needs: a device with streams; a backward pass on the streams of its forward pass, as autograd runs it.
Promises: the gradients are those without it, bit for bit, whatever the order of passes. What is written in place after
it was saved is an error, as in torch.

No `record_stream`: memory that a copy reads or writes is held on to until the computing stream waits for the copy.
Rhu et al. 2016 (vDNN) copy and prefetch layer by layer; torchtune's OffloadActivations does it by the same hooks.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from paceline.nouns.errors import PlanError
from paceline.nouns.profile import NOTHING_TO_OFFLOAD
from paceline.parallel.observer import StepObserver
from paceline.parallel.shard.blocks import find_blocks
from paceline.torch_private.operations import FakeTensor
from paceline.torch_private.tensors import key_of, storage_key

LEAST_BYTES = 2**16  # a smaller copy costs more in its two launches than it saves (an assumption, not measured)
_MOST_COPIES = 4  # operations between a parameter and its copy in another type
_COPIES = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "ReshapeBackward0",
}
_WRITTEN = -1  # a version that no tensor has
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)

Function = Callable[..., Any]
Tensors = Callable[[], Iterable[torch.Tensor]]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Memory:
    """A storage that saved tensors are views of: on the device, in the host's memory, or both.

    Attributes:
        flat: all of the storage on the device, in one dimension; None while it is only in the host's memory.
        storage: the device's memory as it was saved, if somebody still has it.
        stream: the stream on which its blocks compute.
        free: the pinned memory that is not in use, by size; what this holds goes back there.
        is_original: whether `flat` is what was saved, and not what was copied back.
        version: the version of the tensors when they were copied.
        views: the bytes of each saved view, by its geometry.
        host, copied: the pinned memory, and the values there.
        arrival: the copy back to the device that is under way; None without one.
        last: the number of the pass that saved it last.
    """

    flat: torch.Tensor | None
    storage: weakref.ref[torch.UntypedStorage]
    stream: Any
    free: dict[int, list[torch.Tensor]]
    is_original: bool = True
    version: int = 0
    views: dict[Any, int] = field(default_factory=dict)
    host: torch.Tensor | None = None
    copied: torch.Tensor | None = None
    arrival: _Arrival | None = None
    last: int = 0

    def __del__(self) -> None:
        # Every copy is on one stream: what is copied there next comes after what this was copied for.
        if self.host is not None:
            self.free.setdefault(self.host.numel(), []).append(self.host)

    def current_version(self) -> int:
        """Return the version of the values that it has."""
        if self.is_original and self.flat is not None and self.flat._version != self.version:
            # Before it was copied another version is well: `saved` compares. Later the copy may have read both.
            return self.flat._version if self.host is None else _WRITTEN
        return self.version

    def is_to_be_copied(self) -> bool:
        """True if it was not copied yet, and half of it or more was saved: of less, most of a copy would be in vain."""
        if self.host is not None or self.flat is None:
            return False
        return 2 * sum(self.views.values()) >= self.flat.nbytes

    def can_take(self, values: torch.Tensor, stream: Any) -> bool:
        """True if a tensor of this storage can be had from here: it has the values that were or will be copied."""
        values_here = self.copied if self.flat is None else self.flat
        if values_here is None or values_here.dtype != values.dtype or self.stream != stream:
            return False
        return values._version == self.current_version()


@dataclass(slots=True, eq=False)
class _Arrival:
    """What is being copied back: held on to until the computing stream waits, whoever else lets go of it."""

    event: Any
    stream: Any
    tensors: list[torch.Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Pass:
    """A block's forward pass.

    Attributes:
        number: the number of the pass, counted over all blocks.
        stream: the stream on which it computes.
        states: the storages of parameters and buffers.
        memories: the storages of the tensors that it saved.
        is_backward: whether its backward pass has begun.
    """

    number: int
    stream: Any
    states: frozenset[int]
    memories: list[weakref.ref[_Memory]] = field(default_factory=list)
    is_backward: bool = False

    def saved(self) -> list[_Memory]:
        """Return those of the memories that a backward pass may still need."""
        return [memory for reference in self.memories if (memory := reference()) is not None]


@dataclass(slots=True, eq=False)
class _Saved:
    """A saved tensor, as autograd keeps it.

    Attributes:
        version: the version of the tensor when it was saved.
        tensor: the tensor itself, without its history, if it stays on the device; else None.
        memory, owner: the storage of its values, and the pass that saved it.
        geometry: its size, strides and offset in the storage.
    """

    version: int
    tensor: torch.Tensor | None = None
    memory: _Memory | None = None
    owner: _Pass | None = None
    geometry: tuple[Any, Any, Any] = ((), (), 0)


class OffloadedActivations:
    """The saved tensors of one model's blocks.

    Args:
        device: the device where the model computes.
        streams: torch's module of the device's streams; None looks it up in the first pass.

    Attributes:
        observer: the observer of copies and allocations.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self.streams = streams
        self.observer = StepObserver()
        self.copying: Any = None  # the stream of copies
        self.numbers = itertools.count(1)
        self.known: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()  # by storage
        self.passes: list[weakref.ref[_Pass]] = []  # that are over, in order
        self.waiting: list[weakref.ref[_Pass]] = []  # of those, the ones that are not copied yet
        self.leaving: list[tuple[Any, _Pass, list[_Memory]]] = []  # being copied; the event is after the copy
        self.arriving: list[_Arrival] = []
        self.free: dict[int, list[torch.Tensor]] = {}  # pinned memory by bytes

    def around(self, function: Function, states: Tensors) -> Function:
        """Return `function`, whose saved tensors are in the host's memory until its backward pass.

        Args:
            function: a block's forward pass.
            states: a function that returns the parameters and buffers that it may read; they stay where they are.
        """

        @functools.wraps(function, updated=())
        def run(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*arguments, **named)
            owner = self._begin(states)
            try:
                with saved_tensors_hooks(functools.partial(self._save, owner), self._give_back):
                    result = function(*arguments, **named)
            finally:
                self._let_go()
            # Not after an error: what the pass saved then stays on the device, for whoever uses it.
            self.passes.append(weakref.ref(owner))
            self.waiting.append(weakref.ref(owner))
            return result

        return run

    # --- forward

    def _begin(self, states: Tensors) -> _Pass:
        """Copy what the passes before have saved, while the block that begins computes."""
        if self.streams is None:
            self.streams = torch.get_device_module(self.device)
        if self.copying is None:
            self.copying = self.streams.Stream(device=self.device)
        for arrival in list(self.arriving):  # of a graph that was dropped before its backward pass came to it
            self._wait(arrival)
        self.passes = [reference for reference in self.passes if reference() is not None]
        waiting = [owner for reference in self.waiting if (owner := reference()) is not None]
        self.waiting = []
        for owner in waiting:
            self._copy(owner)
        # Another class is a part of a parameter under `shard`, which no block reads.
        state_keys = frozenset(storage_key(state) for state in states() if type(state) in _PLAIN)
        return _Pass(next(self.numbers), self.streams.current_stream(self.device), state_keys)

    def _copy(self, owner: _Pass) -> None:
        memories = owner.saved()
        self.copying.wait_stream(owner.stream)
        nbytes = 0
        with self.streams.stream(self.copying):
            for memory in memories:
                if memory.flat is None or not memory.is_to_be_copied():
                    continue
                memory.version = memory.flat._version
                memory.host = self._pinned(memory.flat.nbytes)
                memory.copied = memory.host[: memory.flat.nbytes].view(memory.flat.dtype)
                memory.copied.copy_(memory.flat, non_blocking=True)
                nbytes += memory.flat.nbytes
        self.observer.activations_copied(nbytes)
        self.leaving.append((self.copying.record_event(), owner, memories))

    def _let_go(self) -> None:
        """Let the device's memory go of what was copied while this pass computed."""
        for event, owner, memories in self.leaving:
            # From here on the stream may use the memory again: the copy is behind it.
            owner.stream.wait_event(event)
            owner.is_backward = False
            for memory in memories:
                # A later pass may have saved it again, such as a mask that all blocks read.
                if memory.host is not None and memory.is_original and memory.last == owner.number:
                    memory.version = memory.current_version()
                    memory.flat = None
        self.leaving = []

    def _save(self, owner: _Pass, tensor: torch.Tensor) -> _Saved:
        """Return the object that autograd keeps in place of a tensor."""
        version = tensor._version
        values = tensor.detach()  # its history would lead back to who saves it: memory that is never freed
        if not self._can_leave(owner, tensor):
            return _Saved(version, values)
        storage = values.untyped_storage()
        key = key_of(storage)
        memory = self.known.get(key)
        if memory is None or memory.storage() is not storage or not memory.can_take(values, owner.stream):
            memory = _Memory(_flat(values), weakref.ref(storage), owner.stream, self.free, version=version)
            self.known[key] = memory
        elif memory.flat is None:
            memory.flat, memory.is_original = _flat(values), True
        if memory.last != owner.number:
            memory.last = owner.number
            owner.memories.append(weakref.ref(memory))
        geometry = (values.size(), values.stride(), values.storage_offset())
        memory.views[geometry] = values.nbytes
        return _Saved(version, None, memory, owner, geometry)

    def _can_leave(self, owner: _Pass, tensor: torch.Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or key_of(storage) in owner.states:
            return False
        if tensor.is_conj() or tensor.is_neg() or storage.nbytes() % tensor.element_size():
            return False
        if self.streams.current_stream(self.device) != owner.stream:  # when it is ready, `owner.stream` doesn't know
            return False
        return not _is_of_parameter(tensor)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory of at least so many bytes; a power of two, as torch would take it."""
        size = 1 << (nbytes - 1).bit_length()
        free = self.free.get(size)
        if free:
            return free.pop()
        # In a trial the CPU stands for a device that is not there, and can pin nothing.
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        self.observer.host_memory_taken(memory)
        return memory

    # --- backward

    def _give_back(self, saved: _Saved) -> torch.Tensor:
        """Return a saved tensor; begin to copy back those of the block before."""
        if saved.tensor is not None:
            _check_version(saved, saved.tensor._version)
            return saved.tensor
        memory, owner = saved.memory, saved.owner
        assert memory is not None
        assert owner is not None
        if memory.flat is None:
            self._fetch(owner)
        if not owner.is_backward:
            owner.is_backward = True
            before = self._before(owner)
            if before is not None:
                self._fetch(before)
        if memory.arrival is not None:
            self._wait(memory.arrival)
            memory.arrival = None
        _check_version(saved, memory.current_version())
        assert memory.flat is not None
        return memory.flat.as_strided(*saved.geometry)

    def _before(self, owner: _Pass) -> _Pass | None:
        """Return the pass that came before one, of those whose backward pass is still to come."""
        for reference in reversed(self.passes):
            earlier = reference()
            if earlier is not None and earlier.number < owner.number:
                return earlier
        return None

    def _fetch(self, owner: _Pass) -> None:
        """Begin to copy back what a pass saved."""
        memories = [memory for memory in owner.saved() if memory.flat is None]
        if not memories:
            return
        tensors = []
        with self.streams.stream(owner.stream):  # whose memory it is: it is freed as that stream goes on
            for memory in memories:
                assert memory.copied is not None
                memory.flat = torch.empty(memory.copied.shape, dtype=memory.copied.dtype, device=self.device)
                memory.is_original = False
                tensors.append(memory.flat)
        # What had the memory before may still be in use by what the stream was given so far.
        self.copying.wait_stream(owner.stream)
        with self.streams.stream(self.copying):
            for memory, tensor in zip(memories, tensors, strict=True):
                assert memory.copied is not None
                tensor.copy_(memory.copied, non_blocking=True)
        arrival = _Arrival(self.copying.record_event(), owner.stream, tensors)
        for memory in memories:
            memory.arrival = arrival
        self.arriving.append(arrival)
        self.observer.activations_return(tensors)

    def _wait(self, arrival: _Arrival) -> None:
        """Have the computing stream wait for a copy, once."""
        if arrival in self.arriving:
            arrival.stream.wait_event(arrival.event)
            self.arriving.remove(arrival)


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage, in one dimension."""
    return values.as_strided((values.untyped_storage().nbytes() // values.element_size(),), (1,), 0)


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """True for a copy or view of only a parameter, such as autocast's in half precision, which autocast keeps."""
    node: Any = tensor.grad_fn
    for _ in range(_MOST_COPIES):
        if node is None or node.name() not in _COPIES:
            return False
        node = node.next_functions[0][0]
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return True
    return False


def _check_version(saved: _Saved, version: int) -> None:
    """Raise RuntimeError where a saved tensor has been written since: torch does not look where tensors have hooks."""
    if version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it was "
            f"saved at version {saved.version} for the backward pass, and is at version {max(version, 0)} or later now"
        )


def offload_blocks(model: torch.nn.Module, device: torch.device) -> OffloadedActivations | None:
    """Offload what the repeated blocks of a model save that runs by its own code; return None if it has none.

    Args:
        model: the model, changed in place.
        device: the device where the model computes.
    """
    blocks = list(find_blocks(model).values())
    if not blocks:
        return None
    offloaded = OffloadedActivations(device)
    inside: set[torch.nn.Module] = set()
    for block in blocks:
        inside.update(block.modules())
    outside = [module for module in model.modules() if module not in inside]
    for block in blocks:
        # Asked anew in each pass: under `shard` a parameter is whole while its block runs, and other memory each time.
        states = functools.partial(_states, [*block.modules(), *outside])
        block.forward = offloaded.around(block.forward, states)
    return offloaded


def _states(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for state in (*module._parameters.values(), *module._buffers.values()):
            if state is not None:
                yield state


def nothing_offloaded() -> str:
    """Return the notice for a plan under which no block's activations leave the device."""
    return f"checkpointing=offload {NOTHING_TO_OFFLOAD}: the model has no repeated blocks"


def check_can_offload(kind: str) -> None:
    """Raise PlanError where the model is on the CPU, whose memory is the host's."""
    if kind == "cpu":
        raise PlanError(
            "the plan's checkpointing is offload, which copies activations from a GPU to the host's memory",
            f"the model is on {kind}",
            "write checkpointing=full or selective, or leave it out",
        )
