"""Make a model without memory for its tensors: what its factory would put into each is noted, and done later.

`defer` runs the user's factory with every tensor on the meta device, and notes each operation on the way.
`Deferred.tensors` does them again on real memory, in the same order and with the same random numbers, so what
comes out is bit for bit what the factory would have made; only what somebody wants is computed and held.

How it works:

- What is noted is storages, not tensors: a view, a tied weight and `.data` are the same storage, seen with
  other sizes and strides, so no view has to be noted and none can be missed.
- Walking the notes backwards gives, for each storage, the last operation that matters and those before it that
  are overwritten. A random operation is done even when nobody wants its result, and then dropped: the numbers
  after it depend on it.
- The factory is told that its tensors are on the CPU. transformers leaves the initialisation out where it finds
  itself on the meta device, so "meta" may not be seen.
- A value that the factory looks at (`.item()`, `if mask.any()`) is computed on the spot if no random number is in
  it. Otherwise there is no way to know it in time: `CantDefer`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from paceline.deferred_init.record import META, CantDefer, Recorder, recording
from paceline.deferred_init.replay import ReplayedMemory, View, plan

__all__ = ["CantDefer", "Deferred", "defer", "replace_tensors"]

NOT_WALKED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, torch.device)


@dataclass
class Deferred:
    """A model on the meta device, and how to make its tensors.

    Args:
        model: as the factory returned it, with shapes, dtypes, `requires_grad` and tying, but without values.
            Plain tensors that its modules hold as attributes, or in lists, dicts or objects there, neither
            parameter nor buffer, become real in the first `tensors` that is gone through to its end.
    """

    model: nn.Module
    _recorder: Recorder = field(repr=False)
    _views: Mapping[str, View] = field(repr=False)
    _attributes: list[tuple[torch.Tensor, View]] = field(repr=False)

    @property
    def has_plain_tensors(self) -> bool:
        """True if modules hold tensors that are neither parameters nor buffers, not yet made real."""
        return bool(self._attributes)

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each named parameter or buffer, as soon as it is final; nothing here holds it afterwards.

        Go through to the end: only then do the global random numbers stand where the factory would have left
        them (between two tensors they are the caller's own), and only then are the plain tensors real. The order
        is that of the factory's last touch. Names of tied tensors come one after the other with the same memory.

        Args:
            names: as in `named_parameters` and `named_buffers`, tied and non-persistent ones too.

        Raises:
            ValueError: a name is of nothing in the model.
            RuntimeError: a real tensor that the factory copied from has changed since.
        """
        unknown = sorted(set(names) - self._views.keys())
        if unknown:
            raise ValueError(f"the model has no {unknown[0]!r} ({len(unknown)} of {len(names)} names are unknown)")
        # The notes refer to real tensors that were there before the factory: replay would copy what is in them now.
        for storage in self._recorder.storages:
            if any(tensor._version != version for tensor, version in storage.watched):
                raise RuntimeError("a tensor that the factory copied from was changed before the copy could be made")
        return self._tensors(names)

    def _tensors(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        named = _by_storage((name, self._views[name]) for name in dict.fromkeys(names))
        attributes = _by_storage(self._attributes)
        real: dict[int, torch.Tensor] = {}
        draws = self._recorder.draws
        memory = ReplayedMemory(self._recorder.storages)
        rng = torch.default_generator
        steps, untouched = plan(self._recorder.ops, named.keys() | attributes.keys())
        callers = rng.get_state()  # the first operation that draws sets its own
        try:
            # Storages that no operation touches come first: they are final already.
            for op, final, unused in [(None, untouched, untouched), *steps]:
                if op:
                    memory.do(op)
                for attribute, view in _members(attributes, final):
                    real[id(attribute)] = _real(attribute, memory.tensor(view).clone())
                ready = [(name, memory.tensor(view, is_written=True)) for name, view in _members(named, final)]
                memory.forget(unused)
                if ready:  # the caller may draw as well
                    replayed = _swap_state(rng, callers)
                    try:
                        while ready:  # taken out of the list: only the caller holds what it was given
                            yield ready.pop(0)
                    finally:
                        callers = _swap_state(rng, replayed)
            # As if the factory had run: the generators end where it would have left them.
            for end in draws.ends:
                end.begin()
            callers = rng.get_state()
        finally:
            rng.set_state(callers)
        # Only when all went through: a caller that stops halfway can begin again.
        replace_tensors(self.model, real)
        self._attributes = []


def _by_storage(views: Iterable[tuple[object, View]]) -> dict[int, list[tuple[Any, View]]]:
    """Return tensors' names, or stand-ins, with their views, by storage."""
    groups: dict[int, list[tuple[Any, View]]] = {}
    for key, view in views:
        groups.setdefault(view.storage, []).append((key, view))
    return groups


def _members(groups: Mapping[int, list[tuple[Any, View]]], storages: Iterable[int]) -> Iterator[tuple[Any, View]]:
    """Yield the members of some storages, with their views."""
    for storage in storages:
        yield from groups.get(storage, ())


def defer(factory: Callable[[], nn.Module]) -> Deferred:
    """Run `factory` without memory for its tensors.

    torch's random numbers are then as they were before; those that the factory would draw are drawn in
    `Deferred.tensors`, from the state they have now. Python's and NumPy's are drawn now.

    Raises:
        CantDefer: what the factory does depends on values that are not there, or it failed. All random numbers
            are as they were: call it for real, and it works or says itself what is wrong.
    """
    recorder = Recorder()
    # Kept only for a failure: on success what the factory drew from Python and NumPy counts as drawn.
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    try:
        try:
            with recording(recorder):
                model = factory()
        finally:
            recorder.draws.close()
        if recorder.failure:  # raised already, but the factory caught it
            raise recorder.failure
        return _deferred(model, recorder)
    except Exception as error:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if recorder.failure or isinstance(error, CantDefer):
            raise recorder.failure or error from error
        raise CantDefer(f"the factory failed with {type(error).__name__}: {error}") from error


def _deferred(model: nn.Module, recorder: Recorder) -> Deferred:
    """Find every tensor of the model; what is real in it gets a stand-in on the meta device."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stand_ins: dict[int, torch.Tensor] = {}
    views: dict[str, View] = {}
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise CantDefer(f"{name} gets its shape in the first forward pass")
        views[name] = recorder.view(tensor)
        if not tensor.is_meta and id(tensor) not in stand_ins:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
            stand_ins[id(tensor)] = _real(tensor, empty)
    replace_tensors(model, stand_ins)
    # Tensors that modules hold beside parameters and buffers: `tensors` has no name for them.
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    attributes: dict[int, torch.Tensor] = {}

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta and id(tensor) not in registered:
            attributes[id(tensor)] = tensor
        return tensor

    _walk(model, collect, set())
    return Deferred(model, recorder, views, [(tensor, recorder.view(tensor)) for tensor in attributes.values()])


def replace_tensors(model: nn.Module, replacements: Mapping[int, torch.Tensor]) -> None:
    """Put other tensors into a model, keyed by the `id` of those that they replace, wherever its modules hold them.

    That is more than the parameters and buffers: a list of weights, such as an LSTM's, or a second attribute.
    """
    _walk(model, lambda tensor: replacements.get(id(tensor), tensor), set())


def _walk(value: object, change: Callable[[torch.Tensor], torch.Tensor], visited: set[int]) -> Any:
    """Change the tensors in a module, its attributes, and the containers and objects there; return the new value."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _walk_tuple(value, change, visited)
    if id(value) in visited or isinstance(value, NOT_WALKED):
        return value
    # Modules refer to each other in circles.
    visited.add(id(value))
    if isinstance(value, list):
        holder: Any = value
        items = list(enumerate(value))
    else:
        holder = _entries(value)
        items = list(holder.items())
    for key, item in items:
        new = _walk(item, change, visited)
        if new is not item:
            holder[key] = new
    return value


def _walk_tuple(value: tuple[object, ...], change: Callable[[torch.Tensor], torch.Tensor], visited: set[int]) -> Any:
    """Return a tuple with its tensors changed; the same one where none is."""
    items = [_walk(item, change, visited) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*items)
    return type(value)(items)


def _entries(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _real(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` as what `old` is: a parameter or not, with its attributes."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    elif old.is_leaf and old.requires_grad:
        new.requires_grad_()
    new.__dict__.update(old.__dict__)
    return new


def _swap_state(generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
    old = generator.get_state()
    generator.set_state(state)
    return old
