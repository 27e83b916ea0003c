"""Record every allocation and free of a step while it runs.

Works on fake tensors (FakeTensorMode) as on real ones: it looks at the storages of whatever an operation returns, and
is called when the last tensor of a storage goes. What kernels allocate inside themselves it does not see.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.flop_counter import flop_registry

from paceline.comm.dtensor_parts import has_parts, is_part, local
from paceline.graph.capture_workarounds import body_of
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.nouns.profile import ACTIVATIONS, GATHERED, TEMPORARY, Block, Recording, Work
from paceline.profile.cpu_workspace import scratch_bytes
from paceline.torch_private.autograd import is_in_backward, next_node_number, running_node_number
from paceline.torch_private.operations import (
    DataDependentOutputException,
    DisableTorchFunction,
    TorchDispatchMode,
    overloads_of,
)
from paceline.torch_private.tensors import key_of, storage_key, tree_iter

aten = torch.ops.aten
MOST_ANSWERS = 2000  # before and in forward passes; after so many, a loop waits for another answer
_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # of which the counter of operations knows the other
_DEVICE = torch.ops.prim.device.default
_ASKED = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


class Allocations(TorchDispatchMode):
    """A dispatch mode that records allocations while it is entered, and frees ever after.

    Attributes:
        recording: the blocks and events so far.
        names: the path of each module.
        phase: the phase of the step, as the simulation sets it; backward passes are recognised without it.
        stream: the number of the GPU's current stream; its allocator keeps a pool for each stream.
        is_answering: True if a request for a fake tensor's value is answered by a guess.
        sees_scratch: True if memory that CPU kernels allocate for themselves is measured and recorded.
        capacity: the bytes that may live at once; None: any number.
        is_over: True if more bytes have lived at once.
    """

    def __init__(self, names: dict[torch.nn.Module, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.names = names or {}
        self.phase = "start"
        self.stream = 0
        self.is_answering = True
        self.sees_scratch = True
        self.asked: Counter[str] = Counter()  # in which module's forward pass a value was wanted
        self.operations: dict[str, Work] = {}
        self.modules: dict[str, Work] = {}
        self.alive: dict[int, int] = {}  # by storage: its block
        self.sizes: dict[int, int] = {}  # by storage: bytes
        self.live = 0  # bytes, of all of them
        self.capacity: int | None = None
        self.is_over = False
        self.path: list[str] = [""]
        self.entries: list[tuple[int, str]] = []  # autograd's numbers from which on operations were in a module
        self.last_phase = ""  # the last that was entered in the recording
        self.answers = 0
        self.fake_mode: Any = None
        self.has_ended = False  # what is freed from now on is not the step's doing

    # --- what is recorded

    def record(self, tensor: torch.Tensor, kind: str | None = None, holder: str | None = None) -> None:
        """Enter a tensor's memory as a block if it is new, and what the block is and whose, once that is known."""
        tensor = local(tensor)
        is_other = getattr(tensor, "fake_mode", self.fake_mode) is not self.fake_mode  # somebody asks for shapes
        if is_other or tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        # By storage, not by tensor: views share one, and memory is freed with the last of them.
        storage = tensor.untyped_storage()
        key = key_of(storage)
        size = storage.nbytes()
        if key not in self.alive:
            self._allocate(key, size)
            # torch keeps a storage's Python object as long as the C++ one lives, so this runs when the memory goes.
            weakref.finalize(storage, self._free, key).atexit = False
        elif self.sizes[key] != size:
            self._resize(key, size)
        if kind is not None:
            block = self.recording.blocks[self.alive[key]]
            block.kind = kind
            block.holder = holder or block.holder

    def record_all(self, tensors: Iterable[tuple[str, torch.Tensor]], kind: str) -> None:
        """Enter what these tensors are, by name; one that was named before keeps its name."""
        for name, tensor in tensors:
            if not self._is_named(tensor):
                self.record(tensor, kind, name)

    def enter_module(self, path: str) -> None:
        """Count operations from here on to this module."""
        self.path.append(path)
        self._record_place()

    def leave_module(self) -> None:
        """Count operations from here on to the module that called this one."""
        self.path.pop()
        self._record_place()

    def _record_place(self) -> None:
        # Autograd gives its nodes rising numbers as they are made, so a backward node's number tells its module.
        self.entries.append((next_node_number(), self.path[-1]))

    def _is_named(self, tensor: torch.Tensor) -> bool:
        tensor = local(tensor)
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return False
        block = self.alive.get(storage_key(tensor))
        return block is not None and self.recording.blocks[block].kind not in (ACTIVATIONS, TEMPORARY)

    def _allocate(self, key: int, size: int) -> None:
        phase, holder = self._phase_and_module()
        self._enter_phase(phase)
        recording = self.recording
        self.alive[key] = len(recording.blocks)
        self.sizes[key] = size
        self.live += size
        recording.events.append(len(recording.blocks) + 1)  # index + 1: 0 would have no sign
        recording.blocks.append(Block(size, TEMPORARY, holder, phase, self.stream))
        if self.capacity is not None and self.live > self.capacity:
            self.is_over = True
            self.check_fits()

    def check_fits(self) -> None:
        """Raise WorkloadError if more bytes than the capacity have lived at once."""
        if self.is_over:
            raise WorkloadError(
                "the step should fit its device",
                f"more than {self.capacity} bytes live at once in it",
                "hold less: `paceline plan --explain-oom` tries what does",
            )

    def _allocate_and_free(self, size: int) -> None:
        """Enter memory that a kernel allocated and has freed."""
        phase, holder = self._phase_and_module()
        event = len(self.recording.blocks) + 1
        self.recording.events += [event, -event]
        self.recording.blocks.append(Block(size, TEMPORARY, holder, phase, self.stream))

    def _free(self, key: int) -> None:
        index = self.alive.pop(key)
        self.live -= self.sizes.pop(key)
        if self.has_ended:
            return
        phase, _ = self._phase_and_module()
        self._enter_phase(phase)
        # What a block was for is known at its end: by the phases in which it was made and freed.
        block = self.recording.blocks[index]
        if block.kind == TEMPORARY and block.phase == "forward" and phase != "forward":
            block.kind = ACTIVATIONS  # the forward pass left it for the backward pass
        elif block.kind == TEMPORARY and block.phase == "gather" and phase != "gather":
            block.kind = GATHERED
        self.recording.events.append(-(index + 1))

    def _resize(self, key: int, size: int) -> None:
        """Enter that a storage was emptied or filled in place, as FSDP2 does: a new block of the same kind."""
        old_block = self.recording.blocks[self.alive[key]]
        if self.sizes[key]:
            self.live -= self.sizes[key]
            self.recording.events.append(-(self.alive[key] + 1))
        self._allocate(key, size)
        if not size:  # an empty one allocates nothing
            self.recording.events.pop()
        new_block = self.recording.blocks[self.alive[key]]
        new_block.kind = old_block.kind
        new_block.holder = old_block.holder

    def _enter_phase(self, phase: str) -> None:
        if phase != self.last_phase:
            self.last_phase = phase
            self.recording.phases.append((len(self.recording.events), phase))

    def _phase_and_module(self) -> tuple[str, str]:
        if not is_in_backward():  # no backward pass runs
            return self.phase, self.path[-1]
        # The operations of a backward pass are in no module's call. A node has the sequence number of the forward
        # operation that made it; it belongs to the last module that was entered before that number.
        number = running_node_number()
        if number is None:
            return "backward", ""
        last = (number, "\uffff")  # after every path of that number
        index = bisect.bisect_right(self.entries, last) - 1
        if index < 0:
            return "backward", ""
        return "backward", self.entries[index][1]

    # --- what is watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns. Where tensors have no values, every number is 1."""
        if func is _DEVICE:  # two of three calls, and no operation
            return func(*args)
        if has_parts(types):
            return NotImplemented  # it comes again, as operations on what this rank holds
        if func in _ASKED and self.is_answering:
            return self._answer(func, args[0])
        kwargs = kwargs or {}
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        # Modes of functions have seen the call; without this they see each attribute that is read in here, too.
        with DisableTorchFunction():
            result = func(*args, **kwargs)
            for value in _tensors(result):
                self.record(value)
                if overloads_of(func) is aten.any:
                    value.is_none = True  # type: ignore[attr-defined]  # for `_answer`: nothing is out of bounds
            if self.sees_scratch:
                scratch = scratch_bytes(func, args, kwargs)
                if scratch:
                    self._allocate_and_free(scratch)
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation's work to its name's and its module's."""
        if func.is_view or any(is_part(value) for value in args):
            return
        inputs = _tensors((args, kwargs))
        # Each input read once and each result written once.
        nbytes = sum(value.nbytes for value in [*inputs, *_tensors(result)] if value.layout == torch.strided)
        flops = 0
        packet = overloads_of(func)
        count_flops = flop_registry.get(_IN_PLACE.get(packet, packet))
        if count_flops is not None:
            flops = count_flops(*args, **kwargs, out_val=result)
        shapes = "x".join(str(tuple(value.shape)) for value in inputs)
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else ""
        name = f"{overloads_of(func)} {shapes} {dtype}"
        _, module = self._phase_and_module()
        for table, key in ((self.operations, name), (self.modules, module)):
            work = table.setdefault(key, Work())
            work.count += 1
            work.flops += flops
            work.nbytes += nbytes

    def _answer(self, function: Any, tensor: torch.Tensor) -> Any:
        """Return a likely value of a fake tensor: all is well, nothing is out of bounds, every number is 1."""
        constant = getattr(tensor, "constant", None)  # some fake tensors know theirs
        if constant is not None:
            return constant.item()
        if self.phase == "forward" and not is_in_backward():
            self.asked[self.path[-1]] += 1
        # A loop such as `while error > limit` never ends on constant answers; the step is then measured instead.
        if self.phase in ("start", "forward"):
            self.answers += 1
        if self.answers > MOST_ANSWERS:
            raise DataDependentOutputException(function)
        if function is not aten._local_scalar_dense.default or tensor.dtype == torch.bool:
            return not getattr(tensor, "is_none", False)
        return 1.0 if tensor.dtype.is_floating_point else 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enter the mode; also watch modules begin and end, and storages that are emptied and filled in place."""
        original_resize = torch.UntypedStorage.resize_
        original_rng_state = torch.get_rng_state
        trace = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original_resize(storage, size)
            if key_of(storage) in trace.alive and trace.sizes[key_of(storage)] != storage.nbytes():
                trace._resize(key_of(storage), storage.nbytes())
            return result

        def get_rng_state() -> torch.Tensor:  # checkpointing keeps one for each block; no operation makes it
            state = original_rng_state()
            trace.record(state)
            return state

        hooks: list[Any] = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]
        try:
            with (
                patched(torch.UntypedStorage, resize_=resize_),
                patched(torch, get_rng_state=get_rng_state),
                self,
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_module(self, module: torch.nn.Module, arguments: Any) -> None:
        self.enter_module(self.names.get(module, self.path[-1]))

    def _after_module(self, module: torch.nn.Module, arguments: Any, result: Any) -> None:
        self.leave_module()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]


Watch = Callable[[torch.fx.Graph], None]


def with_places(recorder: Allocations) -> Watch:
    """Return a function that lets a graph tell `recorder` which module its operations come from."""

    def enter(path: str) -> None:
        recorder.path[-1] = path
        recorder._record_place()

    def watch(graph: torch.fx.Graph) -> None:
        current = None
        for node in list(graph.nodes):
            module = node.meta.get("module")
            if node.op == "call_function" and module is not None and module != current:
                with graph.inserting_before(node):
                    graph.call_function(enter, (module,))
                current = module

    return watch
