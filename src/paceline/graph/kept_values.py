"""Python values that a model's code carries from one batch to the next, which its graph would not carry.

A graph repeats tensor operations. A counter (`self.steps += 1`), a list that grows, a value kept from the first
batch: all of that happens while the code is traced, once, and never again. `PythonStateWatch` compares the attributes
of every module that the code touches, and the variables of the loss function, before and after; what the code reads
and then changes is suspected. Afterwards everything is as it was before, so that no fake tensor stays behind.

An attribute set to 0 and added to, or a list cleared and filled, begins anew with each batch. So a suspicion is tried:
a second call begins with what the first one left, and a third with other numbers in its place (`max(self.longest, n)`
comes to rest on batches of only one shape). Where they compute the same and leave the same, with none of the first
one's tensors, so does every later one.
"""

from __future__ import annotations

import collections
import functools
import numbers
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from paceline.nouns.errors import WorkloadError
from paceline.nouns.module_names import PACKAGE
from paceline.torch_private.modules import FLAT_WEIGHTS

_SLOTS = ("_parameters", "_buffers", "_modules")  # what the graph and the checks of buffers see already
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.Size, torch.dtype, torch.device)
_VERIFY = str(Path(__file__).parents[1] / "verify") + os.sep
_MISSING = object()  # in a place where there is no value: None is one
_DEPTH = 2  # of containers in containers; it also ends the walk of those that hold themselves
_MOST = 200  # elements of a container that are looked at
_FAR = 1_000_003  # added to a number: no size or count of a batch comes near


@dataclass(slots=True)
class _Snapshot:
    """A value, and the items of the container or object that it is; None where they were not looked at."""

    value: Any
    items: dict[Any, _Snapshot] | None


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A value that the code read and changed.

    Attributes:
        name: the variable's or attribute's name, for errors.
        holder, key: where it is.
        before, after: the value before the call, and the one that it left.
    """

    name: str
    holder: Any
    key: Any
    before: _Snapshot
    after: _Snapshot


@dataclass(frozen=True, slots=True)
class InitialState:
    """The Python state that a call starts with.

    Attributes:
        suspects: of the first call; what it left in them is put there.
        is_moved: put other plain values there instead.
    """

    suspects: list[_Suspect]
    is_moved: bool


class PythonStateWatch:
    """A watch over the Python values that one call of a function may change.

    Args:
        model: whose modules are named in errors; other modules are watched too once they are touched.
        function: its closure, and the global variables that it names, are watched.
        depends: whether a tensor depends on the batch, a parameter or a buffer.
        initial: the suspects of an earlier call, to start with what it left in them; None: with what is there.

    Attributes:
        suspects: what may reach the next call.
        leaves_the_same: whether the suspects of both calls were left as equals, by values of their own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        function: Callable[..., Any],
        depends: Callable[[torch.Tensor], bool],
        initial: InitialState | None = None,
    ) -> None:
        self.earlier: list[_Suspect] = [] if initial is None else initial.suspects
        self.is_moved = initial is not None and initial.is_moved
        self.suspects: list[_Suspect] = []
        self.leaves_the_same = False
        self.names = {id(module): name for name, module in model.named_modules()}
        self.depends = depends
        self.modules: dict[int, tuple[torch.nn.Module, dict[str, _Snapshot]]] = {}
        self.reads: dict[int, set[str]] = {}
        mode = get_proxy_mode()
        # The tracer's own module, which holds constants.
        self.recorder = None if mode is None else getattr(mode.tracer, "root", None)
        self.variables = list(_variables(function, set()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the code does inside; afterwards put everything back.

        Raises:
            WorkloadError: it put another tensor in a buffer's place.
        """
        # Before the snapshots, so that what the first call left counts as what this one found.
        for suspect in self.earlier:
            _put(suspect, suspect.after)
            if self.is_moved:
                _move(suspect)
        before = []
        for name, holder, key in self.variables:
            before.append((name, holder, key, _snapshot(_get(holder, key))))
        original = torch.nn.Module.__getattribute__
        # On the class, where Python looks special methods up; Module has none of its own, so `del` restores object's.
        torch.nn.Module.__getattribute__ = self._watched_lookup(original)  # type: ignore[method-assign, assignment]
        replaced_buffer = None
        try:
            yield
            self.suspects = list(self._find_suspects(before))
            self.leaves_the_same = self._leaves_the_same()
            replaced_buffer = self._find_replaced_buffer()
        finally:
            del torch.nn.Module.__getattribute__  # type: ignore[misc]
            # In this order: first what this call changed goes, then what the first call left.
            self._put_back(before)
            for suspect in self.earlier:
                _put(suspect, suspect.before)
        if replaced_buffer is not None:
            raise self.suspicion or replaced_buffer

    @property
    def suspicion(self) -> WorkloadError | None:
        """Return the error of the first suspect."""
        if not self.suspects:
            return None
        return WorkloadError(
            "to be split, the model's forward pass and loss should keep values from batch to batch in buffers alone",
            f"they change {self.suspects[0].name}, and the graph of operations that runs instead would not",
            "keep it in a buffer that is written in place (self.register_buffer(...), then self.steps.add_(1)), count "
            "in the training loop, or train it by replicate or shard",
        )

    def _watched_lookup(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """Return a `__getattribute__` for modules that notes what is read before it is written."""
        modules = self.modules
        reads = self.reads
        recorder = self.recorder

        def look_up(module: torch.nn.Module, key: str) -> Any:
            # Python's own look-ups, and what the graph or another check sees.
            if key[:2] == "__" or key in _SLOTS or module is recorder:
                return original(module, key)
            values = original(module, "__dict__")
            # `modules` holds the module itself: no other one can get its id while the watch runs.
            if id(module) not in modules:  # the first touch: it is as the call found it
                modules[id(module)] = (module, {name: _snapshot(value) for name, value in values.items()})
                reads[id(module)] = set()
            snapshot = modules[id(module)][1].get(key)
            initial_value = _MISSING if snapshot is None else snapshot.value
            if values.get(key, _MISSING) is initial_value:
                reads[id(module)].add(key)  # it sees what an earlier batch left
            return original(module, key)

        return look_up

    def _find_suspects(self, before: list[tuple[str, Any, Any, _Snapshot]]) -> Iterator[_Suspect]:
        """Yield the values that the code read and changed: variables first, then attributes of modules."""
        for name, holder, key, snapshot in before:
            now = _get(holder, key)
            if self._is_changed(snapshot, now, True):
                yield _Suspect(f"the variable {name}", holder, key, snapshot, _snapshot(now))
        for number, (module, snapshots) in self.modules.items():
            if type(module).__module__.startswith("torch."):
                continue
            path = self.names.get(number, type(module).__name__)
            values = vars(module)
            for key in _keys_of_both(snapshots, values):
                if key in _SLOTS or key.startswith(FLAT_WEIGHTS):  # of recurrent modules: their weights in a list
                    continue
                start = snapshots.get(key)
                now = values.get(key, _MISSING)
                if self._is_changed(start, now, key in self.reads[number]):
                    yield _Suspect(_joined(path, key), values, key, start or _snapshot(_MISSING), _snapshot(now))

    def _leaves_the_same(self) -> bool:
        """True if this call changed nothing but the earlier call's suspects, and left them alike."""
        earlier = {(id(suspect.holder), suspect.key) for suspect in self.earlier}
        for suspect in self.suspects:
            if (id(suspect.holder), suspect.key) not in earlier:
                return False
        for suspect in self.earlier:
            now = _snapshot(_get(suspect.holder, suspect.key))
            if not _are_alike(suspect.after, now):
                return False
        return True

    def _find_replaced_buffer(self) -> WorkloadError | None:
        """Return the error of the first module in which another tensor stands for a parameter or buffer."""
        for number, (module, snapshots) in self.modules.items():
            key = _replaced(module, snapshots)
            if key is not None:
                path = self.names.get(number, type(module).__name__)
                return WorkloadError(
                    "the model should write its buffers in place",
                    f"its forward puts another tensor in the place of {_joined(path, key)}",
                    f"write self.{key}.copy_(...) instead of assigning it",
                )
        return None

    def _is_changed(self, snapshot: _Snapshot | None, now: Any, is_read: bool) -> bool:
        """True if a value that was read is another one now, and not just a constant that is kept for later."""
        if snapshot is None or now is not snapshot.value:
            if not is_read:
                return False
            if isinstance(now, torch.Tensor):
                # One that depends on no argument is the same in every call, so the constant in the graph stands for it.
                return self.depends(now)
            return not _are_equal(_MISSING if snapshot is None else snapshot.value, now)
        if snapshot.items is None:
            return False
        items = _children(now)
        if _has_other_keys(now, items, snapshot.items):
            return True
        common = [key for key in snapshot.items if key in items]
        return any(self._is_changed(snapshot.items[key], items[key], True) for key in common)

    def _put_back(self, before: list[tuple[str, Any, Any, _Snapshot]]) -> None:
        """Give variables and attributes of modules the values that they had before the call."""
        for _, holder, key, snapshot in before:
            _restore(snapshot)
            if _get(holder, key) is not snapshot.value:
                _set(holder, key, snapshot.value)
        for module, snapshots in self.modules.values():
            values = vars(module)
            new_keys = [key for key in values if key not in snapshots]
            for key in new_keys:
                del values[key]
            for key, snapshot in snapshots.items():
                _restore(snapshot)
                values[key] = snapshot.value


def _keys_of_both(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of two mappings, the earlier one's first."""
    new_keys = [key for key in now if key not in before]
    return [*before, *new_keys]


def _joined(path: str, key: str) -> str:
    """Return the dotted name of a module's attribute; the outermost module's path is empty."""
    return f"{path}.{key}" if path else key


def _has_other_keys(now: Any, items: dict[Any, Any], before: dict[Any, _Snapshot]) -> bool:
    """True if a container lost items, or won some that a later batch could compute with.

    Args:
        now: the container as it is.
        items: the items that are in it now.
        before: the items that were in it.
    """
    if isinstance(now, dict):  # a new key: a value for later in the same batch, or a constant kept
        return not items.keys() >= before.keys()
    if items.keys() == before.keys():
        return False
    # A list may grow by what nothing computes with (frames, errors), but not shrink.
    if isinstance(now, list | collections.deque):
        new_items = [item for key, item in items.items() if key not in before]
        return any(map(_is_a_value, new_items)) or len(items) < len(before)
    return True


def _replaced(module: torch.nn.Module, snapshots: dict[str, _Snapshot]) -> str | None:
    """Return the name of the first parameter or buffer that is another tensor now."""
    for slot in ("_parameters", "_buffers"):
        if slot not in snapshots:
            continue
        now = vars(module)[slot]
        before = snapshots[slot].items or {}
        for key in _keys_of_both(before, now):
            tensor_before = before[key].value if key in before else _MISSING
            if now.get(key, _MISSING) is not tensor_before:
                return str(key)
    return None


def _variables(function: Any, visited: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, holder and key of what a function can change.

    These are its closure, the attributes of its object, the globals that it names, and those of the user's
    functions among them.
    """
    # `visited` ends the walk of functions that name each other.
    if id(function) in visited or len(visited) > _MOST:
        return
    visited.add(id(function))
    if isinstance(function, functools.partial):
        yield from _variables(function.func, visited)
        return
    if isinstance(function, types.MethodType):
        yield from _attributes(function.__self__)
        function = function.__func__
    # An object that can be called: what it keeps is in its attributes.
    if not isinstance(function, types.FunctionType):
        if not isinstance(function, type | types.BuiltinFunctionType):
            yield from _attributes(function)
        return
    # A function of the user's is followed, not watched: what it names can change as well.
    for name, holder, key in _named_variables(function):
        value = _get(holder, key)
        if isinstance(value, types.FunctionType) and _is_user_code(value.__module__):
            yield from _variables(value, visited)
        elif _is_watched(value):
            yield name, holder, key


def _named_variables(function: types.FunctionType) -> list[tuple[str, Any, Any]]:
    """Return name, holder and key of the variables of a function's closure and of the globals that it names."""
    code = function.__code__
    cells = function.__closure__ or ()
    variables: list[tuple[str, Any, Any]] = []
    for name, cell in zip(code.co_freevars, cells, strict=True):
        variables.append((name, cell, None))
    for name in code.co_names:  # globals and attributes alike
        if name in function.__globals__:
            variables.append((name, function.__globals__, name))
    return variables


def _attributes(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, holder and key of each attribute of an object of the user's own class."""
    if isinstance(value, torch.nn.Module) or not _is_user_code(type(value).__module__):
        return  # modules are watched as they are touched
    for key in getattr(value, "__dict__", {}):
        yield f"{type(value).__name__}.{key}", value.__dict__, key


def _is_watched(value: Any) -> bool:
    # Modules are watched as they are touched.
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return isinstance(value, torch.Tensor)
    if isinstance(value, (*_PLAIN, list, dict, set, collections.deque)):
        return True
    return not isinstance(value, type | types.ModuleType) and _is_user_code(type(value).__module__)


def _is_user_code(module: str) -> bool:
    """True if a Python module is neither of the standard library nor installed, nor Paceline's own."""
    if module != "__main__":
        return _is_of_the_user(module)
    # A rank of `verify` runs one of Paceline's own files.
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    return not file.startswith(_VERIFY)


@functools.cache
def _is_of_the_user(module: str) -> bool:
    if module.partition(".")[0] == PACKAGE and not module.startswith(f"{PACKAGE}.demo"):
        return False  # also where it is not installed but run from a checkout
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not file or "site-packages" in file:
        return False
    return module.partition(".")[0] not in sys.stdlib_module_names


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
    items = _children(value)
    if not depth or len(items) > _MOST:
        return _Snapshot(value, None)
    return _Snapshot(value, {key: _snapshot(item, depth - 1) for key, item in items.items()})


def _children(value: Any) -> dict[Any, Any]:
    """Return the items of a container, or the attributes of an object of the user's own class, by key."""
    if not _is_looked_into(value):
        return {}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | collections.deque):
        return dict(enumerate(value))
    if isinstance(value, set):
        return {item: item for item in value}
    return dict(getattr(value, "__dict__", {}))


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, dict | list | collections.deque | set):
        return True
    if isinstance(value, torch.Tensor | torch.nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    return _is_user_code(type(value).__module__)


def _put(suspect: _Suspect, snapshot: _Snapshot) -> None:
    _set(suspect.holder, suspect.key, snapshot.value)
    _restore(snapshot)


def _move(suspect: _Suspect) -> None:
    """Put other plain values in the place of what a call left."""
    value = suspect.after.value
    if _moved(value) is not value:
        _set(suspect.holder, suspect.key, _moved(value))
    elif isinstance(value, list | collections.deque):
        for index, item in enumerate(value):
            value[index] = _moved(item)
    elif isinstance(value, dict):
        value.update({key: _moved(item) for key, item in value.items()})
    elif _is_looked_into(value) and not isinstance(value, set):
        vars(value).update({key: _moved(item) for key, item in vars(value).items()})


def _moved(value: Any) -> Any:
    """Return another value of the same type, or the value itself where none is known."""
    # Before numbers: in Python a bool is one.
    if isinstance(value, bool):
        return not value
    if isinstance(value, numbers.Number):
        return value + _FAR  # type: ignore[operator]
    if type(value) is str:
        return value + "?"
    if type(value) in (tuple, torch.Size) and value:
        return type(value)(map(_moved, value))
    return value


def _are_alike(first: _Snapshot, second: _Snapshot) -> bool:
    """True if two calls left equal plain values, and tensors of which none is of both."""
    if isinstance(first.value, torch.Tensor) and isinstance(second.value, torch.Tensor):
        # The later call left the first call's tensor: in a graph that is a constant of the wrong batch.
        if first.value is second.value:
            return False
        return (first.value.shape, first.value.dtype) == (second.value.shape, second.value.dtype)
    if not _is_looked_into(first.value):
        return _are_equal(first.value, second.value)
    if first.items is None or second.items is None or type(first.value) is not type(second.value):
        return False
    if list(first.items) != list(second.items):
        return False
    return all(map(_are_alike, first.items.values(), second.items.values()))


def _restore(snapshot: _Snapshot) -> None:
    """Put back what a container or object held; one that holds the same stays as it is."""
    if snapshot.items is None:
        return
    container = snapshot.value
    before = {key: item.value for key, item in snapshot.items.items()}
    if not _holds(container, before):
        _refill(container, before)
    for item in snapshot.items.values():
        _restore(item)


def _holds(container: Any, items: dict[Any, Any]) -> bool:
    """True if a container holds these very items."""
    now = _children(container)
    if now.keys() != items.keys():
        return False
    # `is` and not `==`, which of tensors gives no single truth value.
    return all(now[key] is items[key] for key in items)


def _refill(container: Any, items: dict[Any, Any]) -> None:
    """Give a container or object these items instead of those that it has."""
    if isinstance(container, dict):
        container.clear()
        container.update(items)
    elif isinstance(container, list):
        # A list of no values (frames, errors) may belong to whoever looks on.
        if any(_is_a_value(item) for item in [*container, *items.values()]):
            container[:] = list(items.values())
    elif isinstance(container, set):
        container.clear()
        container.update(items.values())
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(items.values())
    elif hasattr(container, "__dict__"):
        vars(container).clear()
        vars(container).update(items)


def _is_a_value(item: Any) -> bool:
    """True if a later batch could compute with it; a kept frame or error is none."""
    return isinstance(item, (torch.Tensor, *_PLAIN))


def _are_equal(before: Any, now: Any) -> bool:
    """True if two plain values are equal; others must be the same object."""
    if isinstance(before, tuple) and isinstance(now, tuple):
        return len(before) == len(now) and all(map(_are_equal, before, now))
    if before is now:
        return True
    if not isinstance(before, _PLAIN) or not isinstance(now, _PLAIN):
        return False
    return bool(before == now)
