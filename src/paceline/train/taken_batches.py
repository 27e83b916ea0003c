"""Find the batches of a loss among those that a loop has taken.

Most loops train on a batch before they take the next. Others are ahead of themselves: they prefetch, read several
batches into a list or a queue, or compute one loss of two batches. A loss has the weight of its own batches, so these
are looked for, once a loop is ahead:

    a model is called        the batch is that whose memory the arguments have, or views of it; or that from whose loss
                             the arguments come. Else it is guessed by the number of rows. The outputs are marked
    job.backward(loss)       the loss is of the batches of the marks, and of the targets, that its graph has

A guess takes the batches in their order. Where nothing has as many rows, or batches are left over in each step, it may
be wrong: then `Found.is_told` is False.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]

from paceline.comm.pytree import tensors_in
from paceline.torch_private.tensors import key_of
from paceline.train.loader import Part

_MARK = "paceline batch"  # in the metadata of a node of the autograd graph
_MOST_NODES = 256  # of a graph that are looked at: a loss is computed in few, and models that are called have marks


class Memory:
    """The address range of a tensor of a batch; the tensor may be freed."""

    def __init__(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(storage)  # while there is one, no other storage has its number
        self.start = tensor.data_ptr()
        self.stop = self.start + tensor.numel() * tensor.element_size()

    def has(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is this one, or a view of it."""
        return key_of(storage) == self.storage.cdata and self.start <= tensor.data_ptr() < self.stop


@dataclass(slots=True, eq=False)
class TakenBatch:
    """A batch that the loop has taken.

    Attributes:
        part: this rank's part of it, without the samples.
        place: the pass, and the batch in it.
        memory: the memory of its tensors.
        rows: the lengths of its tensors.
        is_trained: True if a loss of it was handed to `job.backward`.
    """

    part: Part
    place: tuple[int, int]
    memory: list[Memory]
    rows: set[int]
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The batches of a loss or of a model's call.

    Attributes:
        batches: the batches, in the loop's order.
        is_seen: True if their own tensors were found; otherwise they are guessed.
        is_told: True if the weight is that of these batches; False where it may be another's.
        is_one: True if several batches are one: the model was called with all of their rows.
    """

    batches: tuple[TakenBatch, ...]
    is_seen: bool = True
    is_told: bool = True
    is_one: bool = False

    @property
    def check(self) -> int:
        """Return the number by which ranks compare the batch; 0 where it is guessed, which ranks may do differently."""
        return self.batches[-1].part.check if self.is_seen and self.batches else 0

    @property
    def is_fresh(self) -> bool:
        """True if nothing was trained on these batches yet."""
        return bool(self.batches) and not any(batch.is_trained for batch in self.batches)


class TakenBatches:
    """The batches that a loop has taken since the last that it trained on, and those of the step that is under way."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.waiting: list[TakenBatch] = []  # not yet of an update, in the loop's order
        self.updated: list[TakenBatch] = []  # of the update that was made in this step
        self.newest: TakenBatch | None = None  # None at the end of a pass
        self.is_ahead = False  # the loop has taken a batch before it trained on the one before
        self.is_in_order = False  # it did so from its beginning: it takes all batches that it trains on
        self.has_thread = False  # another thread takes batches
        self.has_trained = False
        self.depth = 0  # how many were waiting to be trained on at the first loss

    def take(self, part: Part, place: tuple[int, int], batch: Any) -> None:
        """Record a batch that the loop gets, and the memory of its tensors."""
        self.has_thread |= threading.get_ident() != self.thread
        self.is_ahead |= self.has_thread or bool(self.waiting and not self.waiting[-1].is_trained)
        memory, rows = [], set()
        for tensor in tensors_in(batch):
            storage = _storage(tensor)
            if storage is not None:
                memory.append(Memory(storage, tensor))
            if tensor.dim():
                rows.add(len(tensor))
        self.newest = TakenBatch(part._replace(batch=None), place, memory, rows)
        self.waiting.append(self.newest)

    def end_pass(self) -> None:
        """Record the end of the loader's batches."""
        self.is_ahead |= bool(self.waiting and not self.waiting[-1].is_trained)
        self.newest = None

    def clear(self) -> None:
        """Forget all batches: the loop goes elsewhere in the data."""
        self.waiting, self.updated, self.newest = [], [], None

    def of_call(self, values: Any, follows: bool) -> Found:
        """Return the batches with which a model is called.

        Args:
            values: the arguments of the call.
            follows: True if unseen tensors belong to the step whose update was made.
        """
        tensors = tensors_in(values)
        seen = self._seen(tensors)
        marks = _marks(tensors, self._at)
        if seen or any(mark.is_seen for mark in marks):
            return _joined([*marks, Found(seen)])
        if marks:
            return _joined(marks)
        return self._guessed({len(tensor) for tensor in tensors if tensor.dim()}, follows)

    def of_loss(self, loss: torch.Tensor, follows: bool) -> Found:
        """Return the batches of a loss; none where the loop has none."""
        has_batch = self.newest is not None or bool(self.waiting)
        if not self.is_ahead:
            return Found(tuple(self.waiting[-1:] or self.updated[-1:]) if has_batch else ())
        marks = _joined(_marks([loss], self._at))
        if marks.batches and (has_batch or follows or marks.is_seen):
            return marks
        return self._guessed(None, follows) if has_batch or follows else Found(())

    def mark_trained(self, found: Found) -> None:
        """Mark these batches: a loss of them was handed to `job.backward`."""
        fresh = []
        for batch in self.waiting:
            if not batch.is_trained:
                fresh.append(batch)
        if not self.has_trained or (found.is_seen and fresh and found.batches and found.batches[-1] is not fresh[-1]):
            self.is_in_order |= self.has_thread or len(fresh) > 1
        if not self.has_trained:
            self.depth = len(fresh)
        self.has_trained = True
        for batch in found.batches:
            batch.is_trained = True

    def end_update(self) -> int:
        """Take the batches of a step's update; return their samples. Batches before the last trained one count too."""
        last = len(self.waiting)
        while last and not self.waiting[last - 1].is_trained:
            last -= 1
        last = last or len(self.waiting)  # an update without a loss
        self.updated = self.waiting[:last]
        self.waiting = self.waiting[last:]
        samples = 0
        for batch in self.updated:
            samples += batch.part.of
        return samples

    def end_step(self) -> None:
        """Forget the batches of the step that has ended."""
        self.updated = []

    @property
    def has_one_size(self) -> bool:
        """True if the batches that a loss may be of are equally large."""
        return len({batch.part.of for batch in [*self.updated, *self.waiting]}) <= 1

    def place(self, current: tuple[int, int], counts_passes: bool) -> tuple[int, int]:
        """Return the pass and the batch at which a resumed job goes on.

        Args:
            current: the current pass, and the number of its batches that were taken.
            counts_passes: True if the loop does something between passes, which is not to be done again: of a pass that
                is over, batches that a gradient is made of already are not taken again.
        """
        for batch in self.waiting:
            if not counts_passes or not batch.is_trained or batch.place[0] == current[0]:
                return batch.place
        return current

    def _at(self, tensor: torch.Tensor) -> tuple[TakenBatch, ...]:
        return self._seen([tensor])

    def _seen(self, tensors: Iterable[torch.Tensor]) -> tuple[TakenBatch, ...]:
        """Return the batches of which these tensors are, or views."""
        found: list[TakenBatch] = []
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is None:
                continue
            matching = []
            for batch in [*self.updated, *self.waiting]:
                if any(memory.has(storage, tensor) for memory in batch.memory):
                    matching.append(batch)
            if len(matching) == 1 and matching[0] not in found:  # all may be views of the data set
                found.append(matching[0])
        return tuple(found)

    def _guessed(self, rows: set[int] | None, follows: bool) -> Found:
        """Return the batch that has as many rows, in the loop's order; any where `rows` is None."""
        fresh = [batch for batch in self.waiting if not batch.is_trained]
        candidates = [*self.updated, *self.waiting]
        together = {sum(max(batch.part.samples, 1) for batch in fresh)}
        matching = [batch for batch in candidates if rows is None or batch.rows & rows]
        if rows is not None and not matching and len(fresh) > 1 and together & rows:
            return Found(tuple(fresh), is_seen=False, is_one=True)
        is_told = rows is not None and bool(matching)
        matching = matching or candidates
        trained = [batch for batch in matching if batch.is_trained]
        new = [batch for batch in matching if not batch.is_trained]
        if follows and trained:
            new = []
        chosen = new[-1:] if self.has_trained and not self.is_in_order else new[:1]
        chosen = chosen or trained[-1:]
        # Where batches are left over in each step, a loss was of two.
        is_told &= self.has_thread or not self.has_trained or len(fresh) <= self.depth
        return Found(tuple(chosen), is_seen=False, is_told=is_told or (self.has_trained and not self.is_in_order))


class BatchMarks:
    """Hooks of a model that mark what it returns with the batches that it was called with.

    A copy of the model has the same hooks, and a serialized copy has hooks that do nothing.

    Args:
        batches: the batches that the loop has taken.
        follows: a function that returns True if unseen tensors belong to the update that was made.
        begin: a function that is called before the model is, with its batches.
    """

    def __init__(self, batches: TakenBatches, follows: Callable[[], bool], begin: Callable[[Found], None]) -> None:
        self.batches = batches
        self.follows = follows
        self.begin = begin

    def __deepcopy__(self, memo: Any) -> BatchMarks:
        return self

    def __reduce__(self) -> Any:
        return _NoMarks, ()

    def watch(self, model: torch.nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True)

    def before(self, model: torch.nn.Module, arguments: Any, named: Any) -> None:
        """Report the batches with which the model is called."""
        found = self._find(model, (arguments, named))
        if found is not None:
            self.begin(found)

    def after(self, model: torch.nn.Module, arguments: Any, named: Any, outputs: Any) -> None:
        """Mark what the model returns."""
        found = self._find(model, (arguments, named))
        if found is None:
            return
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                _facts(tensor.grad_fn)[_MARK] = found

    def _find(self, model: torch.nn.Module, values: Any) -> Found | None:
        """Return the batches that a model is called with; None where no loss comes of it."""
        is_trained = model.training and torch.is_grad_enabled()
        if not is_trained or threading.get_ident() != self.batches.thread:
            return None
        return self.batches.of_call(values, self.follows())


class _NoMarks:
    """The stand-in for `BatchMarks` in a serialized model."""

    def before(self, *arguments: Any) -> None:
        """Do nothing."""

    after = before


def _joined(found: Iterable[Found]) -> Found:
    """Return the batches of several as one; where tensors of some are seen, what is guessed does not count."""
    parts = [item for item in found if item.batches]
    seen = [item for item in parts if item.is_seen]
    if seen:
        parts = [item for item in parts if item.is_seen or len(item.batches) > 1]
    batches: list[TakenBatch] = []
    for item in parts:
        batches += [batch for batch in item.batches if batch not in batches]
    is_one = all(item.is_one and len(item.batches) == len(batches) for item in parts)
    return Found(tuple(batches), bool(seen), all(item.is_told for item in parts), is_one)


def _marks(tensors: Iterable[torch.Tensor], at: Callable[[torch.Tensor], tuple[TakenBatch, ...]]) -> list[Found]:
    """Return the marks in the graphs of these tensors, and the batches whose tensors were saved on the way to them."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen_nodes = set(nodes)
    found: list[Found] = []
    for node in nodes:  # grows
        mark = _facts(node).get(_MARK)
        if mark is not None:
            found.append(mark)
            continue
        batches = tuple(batch for tensor in _saved(node) for batch in at(tensor))
        if batches:
            found.append(Found(batches))
        for after, _ in node.next_functions:
            if after is not None and after not in seen_nodes and len(nodes) < _MOST_NODES:
                seen_nodes.add(after)
                nodes.append(after)
    return found


def _facts(node: Any) -> dict[str, Any]:
    """Return the metadata of a node of the graph, which live as long as the node."""
    return node.metadata  # type: ignore[no-any-return]


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of torch's own has saved."""
    for name in _saved_names(node.__class__):
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward pass
            continue
        if isinstance(value, torch.Tensor):
            yield value


@cache
def _saved_names(kind: Any) -> list[str]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return [name for name in names if not name.endswith(("_sym_sizes", "_sym_strides"))]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's memory; None where it has none, as a sparse one, or is empty."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage()
