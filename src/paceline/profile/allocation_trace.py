"""Every piece of memory that a step takes and gives back, written down while it runs.

Works on fake tensors (FakeTensorMode) as on real ones: it sees the storages of whatever an operation
returns, and hears when the last tensor of a storage goes. What kernels take and give back inside themselves it does
not see.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from paceline.comm.fully_shard import has_parts, is_part, local
from paceline.nouns.profile import ACTIVATIONS, GATHERED, TEMPORARY, Block, Recording, Work
from paceline.profile.cpu_workspace import scratch_bytes

aten = torch.ops.aten
MOST_ANSWERS = 2000  # outside of the update
_ASKED = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


class Allocations(TorchDispatchMode):
    """Writes while it is entered, and hears of frees ever after.

    Attributes:
        recording: what was written.
        phase: the moment of the step, as the rehearsal says; backward passes are known without.
    """

    def __init__(self, names: dict[torch.nn.Module, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.names = names or {}
        self.phase, self.stream = "start", 0
        self.is_answering = self.sees_scratch = True
        self.asked: Counter[str] = Counter()  # in which module's forward pass a value was wanted
        self.operations: dict[str, Work] = {}
        self.modules: dict[str, Work] = {}
        self.alive: dict[int, int] = {}  # by storage: its block
        self.sizes: dict[int, int] = {}
        self.path: list[str] = [""]
        self.entries: list[tuple[int, str]] = []  # autograd's numbers from which on operations were in a module
        self.told_phase, self.answers = "", 0
        self.fake_mode: Any = None
        self.has_ended = False  # what goes from now on goes with the recording's own objects

    # --- what is written

    def note(self, tensor: torch.Tensor, kind: str | None = None, holder: str | None = None) -> None:
        """See a tensor: new memory is a block of its own; `kind` and `holder` say what a block is, once known."""
        own = local(tensor)
        is_other = getattr(own, "fake_mode", self.fake_mode) is not self.fake_mode  # somebody asks for shapes
        if is_other or own.device.type == "meta" or own.layout != torch.strided:
            return
        storage = own.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self._born(key, size)
            weakref.finalize(storage, self._gone, key).atexit = False
        elif self.sizes[key] != size:
            self._resized(key, size)
        if kind is not None:
            block = self.recording.blocks[self.alive[key]]
            block.kind, block.holder = kind, holder or block.holder

    def note_all(self, tensors: Iterable[tuple[str, torch.Tensor]], kind: str) -> None:
        """Say what these are, by name; who was named before keeps its name."""
        for name, tensor in tensors:
            if not self._is_named(tensor):
                self.note(tensor, kind, name)

    def enter_module(self, path: str) -> None:
        """From here on operations are of this module."""
        self.path.append(path)
        self._note_place()

    def leave_module(self) -> None:
        """Back to its caller."""
        self.path.pop()
        self._note_place()

    def _note_place(self) -> None:
        self.entries.append((torch.autograd._get_sequence_nr(), self.path[-1]))  # type: ignore[attr-defined]

    def _is_named(self, tensor: torch.Tensor) -> bool:
        own = local(tensor)
        if own.device.type == "meta" or own.layout != torch.strided:
            return False
        block = self.alive.get(own.untyped_storage()._cdata)
        return block is not None and self.recording.blocks[block].kind not in (ACTIVATIONS, TEMPORARY)

    def _born(self, key: int, size: int) -> None:
        phase, holder = self._moment()
        self._tell(phase)
        recording = self.recording
        self.alive[key], self.sizes[key] = len(recording.blocks), size
        recording.events.append(len(recording.blocks) + 1)
        recording.blocks.append(Block(size, TEMPORARY, holder, phase, self.stream))

    def _pass_by(self, size: int) -> None:
        """Memory that a kernel took and has given back."""
        phase, holder = self._moment()
        self.recording.events += [len(self.recording.blocks) + 1, -(len(self.recording.blocks) + 1)]
        self.recording.blocks.append(Block(size, TEMPORARY, holder, phase, self.stream))

    def _gone(self, key: int) -> None:
        block = self.alive.pop(key)
        del self.sizes[key]
        if self.has_ended:
            return
        phase, _ = self._moment()
        self._tell(phase)
        one = self.recording.blocks[block]
        if one.kind == TEMPORARY and one.phase == "forward" and phase != "forward":
            one.kind = ACTIVATIONS  # the forward pass left it for the backward pass
        elif one.kind == TEMPORARY and one.phase == "gather" and phase != "gather":
            one.kind = GATHERED
        self.recording.events.append(-(block + 1))

    def _resized(self, key: int, size: int) -> None:
        old = self.recording.blocks[self.alive[key]]
        if self.sizes[key]:
            self.recording.events.append(-(self.alive[key] + 1))
        self._born(key, size)
        if not size:
            self.recording.events.pop()
        new = self.recording.blocks[self.alive[key]]
        new.kind, new.holder = old.kind, old.holder

    def _tell(self, phase: str) -> None:
        if phase != self.told_phase:
            self.told_phase = phase
            self.recording.phases.append((len(self.recording.events), phase))

    def _moment(self) -> tuple[str, str]:
        """The phase, and the module."""
        if torch._C._current_graph_task_id() == -1:
            return self.phase, self.path[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return "backward", ""
        at = bisect.bisect_right(self.entries, (node._sequence_nr(), "\uffff")) - 1  # type: ignore[attr-defined]
        return "backward", self.entries[at][1] if at >= 0 else ""

    # --- how it sees

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns. Where tensors have no values, every number is 1."""
        if has_parts(types):
            return NotImplemented  # it comes again, as operations on what this rank holds
        if func in _ASKED and self.is_answering:
            return self._answer(func, args[0])
        result = func(*args, **(kwargs or {}))
        for value in _tensors(result):
            self.note(value)
            if func._overloadpacket is aten.any:
                value.is_none = True  # type: ignore[attr-defined]
        if self.sees_scratch and (scratch := scratch_bytes(func, args, kwargs or {})):
            self._pass_by(scratch)
        self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation's work to its name's and its module's."""
        if func.is_view or any(is_part(value) for value in args):
            return
        came = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        nbytes = sum(value.nbytes for value in [*came, *_tensors(result)] if value.layout == torch.strided)
        flops = 0
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            flops = count(*args, **kwargs, out_val=result)
        shapes = "x".join(str(tuple(value.shape)) for value in came)
        dtype = str(came[0].dtype)[6:] if came else ""
        name = f"{func._overloadpacket} {shapes} {dtype}"
        for table, key in ((self.operations, name), (self.modules, self._moment()[1])):
            work = table.setdefault(key, Work())
            work.count, work.flops, work.nbytes = work.count + 1, work.flops + flops, work.nbytes + nbytes

    def _answer(self, function: Any, tensor: torch.Tensor) -> Any:
        """A likely one: all is well, nothing is out of bounds, every number is 1."""
        known = getattr(tensor, "constant", None)
        if known is not None:
            return known.item()
        if self.phase == "forward" and torch._C._current_graph_task_id() == -1:
            self.asked[self.path[-1]] += 1
        self.answers += self.phase in ("start", "forward")
        if self.answers > MOST_ANSWERS:  # a loop that waits for another one
            raise DataDependentOutputException(function)
        if function is not aten._local_scalar_dense.default or tensor.dtype == torch.bool:
            return not getattr(tensor, "is_none", False)
        return 1.0 if tensor.dtype.is_floating_point else 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also see modules begin and end, and storages that are emptied and filled again in place."""
        resize = torch.UntypedStorage.resize_
        own = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in own.alive and own.sizes[storage._cdata] != storage.nbytes():
                own._resized(storage._cdata, storage.nbytes())
            return result

        def get_rng_state() -> torch.Tensor:  # checkpointing keeps one for each block; no operation makes it
            state = rng_state()
            own.note(state)
            return state

        rng_state = torch.get_rng_state
        hooks: list[Any] = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]
        try:
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", resize_),
                mock.patch.object(torch, "get_rng_state", get_rng_state),
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
    """Something that adds to a graph which module its operations come from."""

    def enter(path: str) -> None:
        recorder.path[-1] = path
        recorder._note_place()

    def watch(graph: torch.fx.Graph) -> None:
        before = None
        for node in list(graph.nodes):
            place = node.meta.get("module")
            if node.op == "call_function" and place is not None and place != before:
                with graph.inserting_before(node):
                    graph.call_function(enter, (place,))
                before = place

    return watch
