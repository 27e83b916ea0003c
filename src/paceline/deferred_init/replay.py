"""Replay what a factory did to its tensors, a list of operations, on real memory. `defer.py` says why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a piece of a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor, of that real storage."""
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=CPU).set_(storage, self.offset, self.size, self.stride)

    def covers(self, num_bytes: int) -> bool:
        """True if it is the whole storage, every element once."""
        by_stride = sorted(zip(self.stride, self.size, strict=True))
        expected = 1  # stride of the next dimension, if the elements lie without gaps
        for stride, size in by_stride:
            if size != 1 and stride != expected:
                return expected == 0 == num_bytes
            expected *= size
        return expected * self.dtype.itemsize == num_bytes


@dataclass(slots=True)
class Storage:
    """A storage of the factory's: on the meta device, or with a `source` of real bytes that nobody may write to."""

    storage: torch.UntypedStorage  # held, so that its id stays its own
    source: torch.UntypedStorage | None = None
    watched: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # real tensors and their versions when read


@dataclass(eq=False, slots=True)
class Draw:
    """A random operation's generator, and where it finds it: where the one before left it, or at a state set since."""

    generator: torch.Generator
    start: torch.Tensor | Draw | None
    is_returned_to: bool = False
    end: torch.Tensor | None = None

    def begin(self) -> None:
        """Put the generator to where the operation found it."""
        state = self.start.end if isinstance(self.start, Draw) else self.start
        if state is not None:
            self.generator.set_state(state)

    def finish(self) -> None:
        """Note where the operation left it, if something comes back to that."""
        if self.is_returned_to:
            self.end = self.generator.get_state()


@dataclass(slots=True)
class Op:
    """An operation that changed or made storages."""

    call: Callable[..., Any]
    args: tuple[Any, ...]  # with views in the place of tensors
    kwargs: dict[str, Any]
    outputs: list[View | None]  # of the tensors it returns, those that it made
    reads: set[int]
    writes: set[int]
    fills: set[int]  # those of `writes` in which nothing is left of what was there
    default_dtype: torch.dtype
    draw: Draw | None


class Step(NamedTuple):
    """An operation to do again."""

    op: Op
    final: set[int]  # of the wanted storages: nothing to be done touches them afterwards
    unused: set[int]  # nothing that is to be done needs their contents


def plan(ops: Collection[Op], wanted: Collection[int], with_draws: bool = True) -> tuple[list[Step], set[int]]:
    """Find the operations after which the `wanted` storages hold what they held in the end, and random numbers fit.

    Returns:
        The steps in order, and those of `wanted` that none of them touches.
    """
    steps = []
    pending = set(wanted)  # storages that no operation found so far touches
    needed = set[int]()  # storages whose contents the operations found so far read
    # From the end: the first operation met that touches a wanted storage makes it final.
    for op in reversed(list(ops)):
        is_draw = op.draw is not None and with_draws
        if op.writes.isdisjoint(needed) and op.writes.isdisjoint(pending) and not is_draw:
            continue
        # What later steps do not read can go after this one.
        touched = op.reads | op.writes
        steps.append(Step(op, pending & touched, touched - needed))
        written_in_part = (op.writes & (needed | pending)) - op.fills  # so the rest has to be there
        needed = (needed - op.fills) | written_in_part | op.reads
        pending = pending - touched
    return steps[::-1], pending


class ReplayedMemory:
    """The storages that are real at one moment of the replay."""

    def __init__(self, storages: list[Storage]) -> None:
        self.storages = storages
        self.held: dict[int, torch.UntypedStorage] = {}

    def do(self, op: Op) -> None:
        """Do one operation with what it found: its random numbers and its default dtype."""
        args, kwargs = changed((op.args, op.kwargs), View, lambda view: self.tensor(view, view.storage in op.writes))
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(op.default_dtype)
        try:
            if op.draw:
                op.draw.begin()
            # The notes are of operations below autocast: its casts are among them already.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                result = op.call(*args, **kwargs)
                for view, tensor in zip(op.outputs, find_all(result), strict=True):
                    if view:
                        self._adopt(view, tensor)
            if op.draw:
                op.draw.finish()
        finally:
            torch.set_default_dtype(default_dtype)

    def tensor(self, view: View, is_written: bool = False) -> torch.Tensor:
        """Return a real tensor; what was there before the factory is handed out itself only to be read."""
        if view.storage not in self.held:
            recorded = self.storages[view.storage]
            if recorded.source is None:
                self.held[view.storage] = torch.UntypedStorage(recorded.storage.nbytes(), device=CPU)
            elif is_written:
                self.held[view.storage] = recorded.source.clone()
            else:
                return view.on(recorded.source)
        return view.on(self.held[view.storage])

    def forget(self, storages: Iterable[int]) -> None:
        """Give their memory back."""
        for storage in storages:
            self.held.pop(storage, None)

    def _adopt(self, view: View, tensor: torch.Tensor) -> None:
        if (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset):
            self.held[view.storage] = tensor.untyped_storage()
        else:  # the meta device foresaw another layout
            self.tensor(view, is_written=True).copy_(tensor)


def find_all(value: Any, kind: Any = torch.Tensor) -> Iterator[Any]:
    """Yield everything of a kind in an operation's arguments or results."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_all(item, kind)
    elif isinstance(value, dict):
        yield from find_all(list(value.values()), kind)


def changed(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same arguments or results with everything of a kind changed, in the order of `find_all`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([changed(item, kind, change) for item in value])
    if isinstance(value, dict):
        return {key: changed(item, kind, change) for key, item in value.items()}
    return value
