"""What a model's code keeps in Python from one batch to the next, which its graph would not keep.

A graph repeats tensor operations. A counter (`self.steps += 1`), a list that grows, a value kept from the first
batch: all of that happens while the code is traced, once, and never again. `KeptValues` compares the attributes of
every module that the code touches, and the variables of the loss function, before and after; what the code reads
and then changes is suspected. Afterwards everything is as it was before, so that no fake tensor stays behind.

An attribute set to 0 and added to, or a list cleared and filled, begins anew with each batch. So a suspicion is tried:
a second call begins with what the first one left, and a third with other numbers in its place (`max(self.longest, n)`
comes to rest on batches of one shape alone). Where they compute the same and leave the same, with none of the first
one's tensors, so does every later one.
"""

from __future__ import annotations

import collections
import functools
import numbers
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from paceline.nouns.errors import WorkloadError

_SLOTS = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.Size, torch.dtype, torch.device)
_MISSING = object()
_DEPTH = 2  # of containers in containers
_MOST = 200  # elements of a container that are looked at
_FAR = 1_000_003  # added to a number: no size or count of a batch comes near


@dataclass(slots=True)
class _Snapshot:
    """A value, and what it held; None where that was not looked at."""

    value: Any
    held: dict[Any, _Snapshot] | None


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A value that the code read and changed.

    Attributes:
        what: its name, for errors.
        holder, key: where it is.
        before, after: what it was and what the call left.
    """

    what: str
    holder: Any
    key: Any
    before: _Snapshot
    after: _Snapshot


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a call begins with: what the first one left in its suspects; with `is_moved`, other plain values."""

    suspects: list[_Suspect]
    is_moved: bool


class KeptValues:
    """The Python values that one call of a function may change.

    Args:
        model: whose modules are named in errors; other modules are watched too once they are touched.
        function: its closure, and the global variables that it names, are watched.
        depends: whether a tensor depends on the batch, a parameter or a buffer.
        begins: of a call before, with whose suspects' last values this one begins; None: with those that are there.

    Attributes:
        suspects: what may reach the next call.
        leaves_the_same: whether the suspects of both calls were left as equals, by values of their own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        function: Callable[..., Any],
        depends: Callable[[torch.Tensor], bool],
        begins: Beginning | None = None,
    ) -> None:
        self.earlier: list[_Suspect] = [] if begins is None else begins.suspects
        self.is_moved = begins is not None and begins.is_moved
        self.suspects: list[_Suspect] = []
        self.leaves_the_same = False
        self.names = {id(module): name for name, module in model.named_modules()}
        self.depends = depends
        self.modules: dict[int, tuple[torch.nn.Module, dict[str, _Snapshot]]] = {}
        self.reads: dict[int, set[str]] = {}
        mode = get_proxy_mode()
        # The tracer's own module, which holds constants.
        self.recorder = getattr(mode.tracer, "root", None) if mode is not None else None
        self.variables = list(_variables(function, set()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the code does inside; afterwards put everything back.

        Raises:
            WorkloadError: it put another tensor in a buffer's place.
        """
        for suspect in self.earlier:
            _put(suspect, suspect.after)
            if self.is_moved:
                _move(suspect)
        before = [(name, holder, key, _snapshot(_get(holder, key))) for name, holder, key in self.variables]
        looked_up = torch.nn.Module.__getattribute__
        torch.nn.Module.__getattribute__ = self._looking_up(looked_up)  # type: ignore[method-assign, assignment]
        found = None
        try:
            yield
            self.suspects = list(self._find_suspects(before))
            self.leaves_the_same = self._leaves_the_same()
            found = self._other_buffer()
        finally:
            del torch.nn.Module.__getattribute__  # type: ignore[misc]
            self._put_back(before)
            for suspect in self.earlier:
                _put(suspect, suspect.before)
        if found is not None:
            raise self.suspicion or found

    @property
    def suspicion(self) -> WorkloadError | None:
        """The refusal of the first suspect."""
        if not self.suspects:
            return None
        return WorkloadError(
            "a model whose forward pass and loss keep nothing from batch to batch but in buffers, so that it can be "
            "split",
            f"they change {self.suspects[0].what}, and the graph of operations that runs instead would not",
            "keep it in a buffer that is written in place (self.register_buffer(...), then self.steps.add_(1)), count "
            "in the training loop, or train it by replicate or shard",
        )

    def _looking_up(self, looked_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        modules, reads, recorder = self.modules, self.reads, self.recorder

        def look_up(module: torch.nn.Module, key: str) -> Any:
            if key[:2] == "__" or key in _SLOTS or module is recorder:
                return looked_up(module, key)
            values = looked_up(module, "__dict__")
            if id(module) not in modules:
                modules[id(module)] = (module, {name: _snapshot(value) for name, value in values.items()})
                reads[id(module)] = set()
            known = modules[id(module)][1].get(key)
            if values.get(key, _MISSING) is (known.value if known is not None else _MISSING):
                reads[id(module)].add(key)  # it sees what an earlier batch left
            return looked_up(module, key)

        return look_up

    def _find_suspects(self, before: list[tuple[str, Any, Any, _Snapshot]]) -> Iterator[_Suspect]:
        for name, holder, key, known in before:
            now = _get(holder, key)
            if self._is_changed(known, now, True):
                yield _Suspect(f"the variable {name}", holder, key, known, _snapshot(now))
        for number, (module, known_values) in self.modules.items():
            if type(module).__module__.startswith("torch."):
                continue
            where, values = self.names.get(number, type(module).__name__), vars(module)
            for key in [*known_values, *(key for key in values if key not in known_values)]:
                if key in _SLOTS or key.startswith("_flat_weight"):  # of recurrent modules: their weights in a list
                    continue
                start, now = known_values.get(key), values.get(key, _MISSING)
                if self._is_changed(start, now, key in self.reads[number]):
                    what = ".".join(part for part in (where, key) if part)
                    yield _Suspect(what, values, key, start or _snapshot(_MISSING), _snapshot(now))

    def _leaves_the_same(self) -> bool:
        earlier = {(id(suspect.holder), suspect.key) for suspect in self.earlier}
        return all((id(suspect.holder), suspect.key) in earlier for suspect in self.suspects) and all(
            _are_alike(suspect.after, _snapshot(_get(suspect.holder, suspect.key))) for suspect in self.earlier
        )

    def _other_buffer(self) -> WorkloadError | None:
        for number, (module, known_values) in self.modules.items():
            where = self.names.get(number, type(module).__name__)
            replaced = _replaced(module, known_values)
            if replaced is not None:
                return WorkloadError(
                    "a model that writes its buffers in place",
                    f"its forward puts another tensor in the place of {'.'.join(p for p in (where, replaced) if p)}",
                    f"write self.{replaced}.copy_(...) instead of assigning it",
                )
        return None

    def _is_changed(self, known: _Snapshot | None, now: Any, is_read: bool) -> bool:
        """Whether a value that was read is another one now, by more than a constant kept for later."""
        if known is None or now is not known.value:
            before = _MISSING if known is None else known.value
            if isinstance(now, torch.Tensor):
                return is_read and self.depends(now)
            return is_read and not _are_equal(before, now)
        if known.held is None:
            return False
        held = _children(now)
        is_longer = held.keys() != known.held.keys()
        if isinstance(now, dict):  # a new key: a value for later in the same batch, or a constant kept
            is_longer = not held.keys() >= known.held.keys()
        elif is_longer and isinstance(now, list | collections.deque):
            is_longer = any(_is_a_value(one) for key, one in held.items() if key not in known.held) or len(held) < len(
                known.held
            )
        return is_longer or any(
            self._is_changed(one, held[key], True) for key, one in known.held.items() if key in held
        )

    def _put_back(self, before: list[tuple[str, Any, Any, _Snapshot]]) -> None:
        for _, holder, key, known in before:
            _restore(known)
            if _get(holder, key) is not known.value:
                _set(holder, key, known.value)
        for module, known_values in self.modules.values():
            values = vars(module)
            for key in [key for key in values if key not in known_values]:
                del values[key]
            for key, known in known_values.items():
                _restore(known)
                values[key] = known.value


def _replaced(module: torch.nn.Module, known: dict[str, _Snapshot]) -> str | None:
    """The name of a parameter or buffer that is another tensor now."""
    for slot in ("_parameters", "_buffers"):
        if slot not in known:
            continue
        now, held = vars(module)[slot], known[slot].held or {}
        for key in [*held, *(key for key in now if key not in held)]:
            before = held[key].value if key in held else _MISSING
            if now.get(key, _MISSING) is not before:
                return str(key)
    return None


def _variables(function: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Name, holder and key of what a function can change: its closure, its object's values, globals that it names."""
    if id(function) in seen or len(seen) > _MOST:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _variables(function.func, seen)
        return
    if isinstance(function, types.MethodType):
        yield from _attributes(function.__self__)
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        if not isinstance(function, type | types.BuiltinFunctionType):
            yield from _attributes(function)
        return
    code = function.__code__
    holders: list[tuple[str, Any, Any]] = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        holders.append((name, cell, None))
    holders += [(name, function.__globals__, name) for name in code.co_names if name in function.__globals__]
    for name, holder, key in holders:
        value = _get(holder, key)
        if isinstance(value, types.FunctionType) and _is_user_code(value.__module__):
            yield from _variables(value, seen)
        elif _is_watched(value):
            yield name, holder, key


def _attributes(value: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, torch.nn.Module) or not _is_user_code(type(value).__module__):
        return  # modules are watched as they are touched
    for key in getattr(value, "__dict__", {}):
        yield f"{type(value).__name__}.{key}", value.__dict__, key


def _is_watched(value: Any) -> bool:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return isinstance(value, torch.Tensor)
    if isinstance(value, (*_PLAIN, list, dict, set, collections.deque)):
        return True
    return not isinstance(value, type | types.ModuleType) and _is_user_code(type(value).__module__)


@functools.cache
def _is_user_code(module: str) -> bool:
    """Whether a Python module is neither of the standard library nor installed."""
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool(file) and "site-packages" not in file and module.partition(".")[0] not in sys.stdlib_module_names


def _get(holder: Any, key: Any) -> Any:
    if not isinstance(holder, types.CellType):
        return holder.get(key, _MISSING)
    try:
        return holder.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, types.CellType):
        if value is not _MISSING:
            holder.cell_contents = value
    elif value is _MISSING:
        holder.pop(key, None)
    else:
        holder[key] = value


def _snapshot(value: Any, depth: int = _DEPTH) -> _Snapshot:
    held = _children(value)
    if not depth or len(held) > _MOST:
        return _Snapshot(value, None)
    return _Snapshot(value, {key: _snapshot(one, depth - 1) for key, one in held.items()})


def _children(value: Any) -> dict[Any, Any]:
    """What a container holds, or an object of the person's own."""
    if not _is_looked_into(value):
        return {}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | collections.deque):
        return dict(enumerate(value))
    if isinstance(value, set):
        return {one: one for one in value}
    return dict(getattr(value, "__dict__", {}))


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, dict | list | collections.deque | set):
        return True
    if isinstance(value, torch.Tensor | torch.nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    return _is_user_code(type(value).__module__)


def _put(suspect: _Suspect, known: _Snapshot) -> None:
    _set(suspect.holder, suspect.key, known.value)
    _restore(known)


def _move(suspect: _Suspect) -> None:
    """Put other plain values in the place of what a call left."""
    value = suspect.after.value
    if _moved(value) is not value:
        _set(suspect.holder, suspect.key, _moved(value))
    elif isinstance(value, list | collections.deque):
        for index, one in enumerate(value):
            value[index] = _moved(one)
    elif isinstance(value, dict):
        value.update({key: _moved(one) for key, one in value.items()})
    elif _is_looked_into(value) and not isinstance(value, set):
        vars(value).update({key: _moved(one) for key, one in vars(value).items()})


def _moved(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, numbers.Number):
        return value + _FAR  # type: ignore[operator]
    if type(value) is str:
        return value + "?"
    if type(value) in (tuple, torch.Size) and value:
        return type(value)(map(_moved, value))
    return value


def _are_alike(one: _Snapshot, other: _Snapshot) -> bool:
    """Whether two calls left equal plain values, and tensors of which none is of both."""
    if isinstance(one.value, torch.Tensor) and isinstance(other.value, torch.Tensor):
        is_fresh = one.value is not other.value
        return is_fresh and (one.value.shape, one.value.dtype) == (other.value.shape, other.value.dtype)
    if not _is_looked_into(one.value):
        return _are_equal(one.value, other.value)
    if one.held is None or other.held is None or type(one.value) is not type(other.value):
        return False
    return list(one.held) == list(other.held) and all(map(_are_alike, one.held.values(), other.held.values()))


def _restore(known: _Snapshot) -> None:
    if known.held is None:
        return
    value, held = known.value, {key: one.value for key, one in known.held.items()}
    now = _children(value)
    if now.keys() != held.keys() or any(now[key] is not one for key, one in held.items()):
        if isinstance(value, dict):
            value.clear()
            value.update(held)
        elif isinstance(value, list) and any(_is_a_value(one) for one in [*now.values(), *held.values()]):
            value[:] = list(held.values())
        elif isinstance(value, collections.deque | set):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(held.values())
        elif hasattr(value, "__dict__"):
            vars(value).clear()
            vars(value).update(held)
    for one in known.held.values():
        _restore(one)


def _is_a_value(one: Any) -> bool:
    """Whether a later batch could compute with it; a kept frame or error is none."""
    return isinstance(one, (torch.Tensor, *_PLAIN))


def _are_equal(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(_are_equal, before, now))
    return before is now or (isinstance(before, _PLAIN) and isinstance(now, _PLAIN) and bool(before == now))
