"""Modules that a graph keeps as they are: one call of a module's forward is one node.

A path or a shape that depends on values, `torch.autograd.grad`, a hook of a tensor: no graph of forward operations has
them. The innermost module whose code does so runs by that code, forward and backward, on whole values; the rest is
a graph as ever. It is called with its parameters and buffers and with the tensors that it is handed.

What it returns is learnt from a call on made-up values: how many tensors, of which shapes, may not depend on values.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from paceline.graph.own_code import PLAIN, NoGraphError, OwnCall, own_code_running
from paceline.graph.skeleton import skeleton
from paceline.graph.writes import memories_of, storage_of, written_inputs
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.modules import CALL, FLAT_WEIGHTS, HOOKS, NormBase, list_weights_again
from paceline.torch_private.operations import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    is_functorch_wrapped_tensor,
    no_python_dispatcher,
)
from paceline.torch_private.tensors import TreeSpec, storage_key, tree_flatten, tree_leaves, tree_unflatten

_OF_TORCH = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in a module's dictionary
_MISSING = object()
_LARGE = 1 << 22  # elements
_generator = torch.default_generator  # by another name: while a model is traced, torch's own refuses to be seeded
_FIX = "train it by replicate or shard, which run the model's own code"
Attributes = dict[tuple[str, str], tuple[Any, Any]]  # by path and name: a value, and the items of a container
Place = tuple[torch.nn.Module, str, str]  # of a state: who holds it, in `_parameters` or `_buffers`, by which key
PATHS: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # of the copies that run


class _NotKeptError(NoGraphError):
    """A module can't be one call of a graph; one that calls it may be.

    Attributes:
        path: its name in the model.
    """

    path = ""


@dataclass(slots=True)
class OwnModules:
    """Which modules of a model run by their own code.

    Attributes:
        reasons: the reason of each module, by its path, as shown to users.
        impossible: the reasons of modules that can't, by their paths.
        first: the refusal that each is there for.
        callers: the paths of the modules that call each one, the innermost first.
        copies: a copy of each, which runs; its tensors are put in for each call.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)
    first: dict[str, WorkloadError] = field(default_factory=dict)
    callers: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def notices(self) -> list[str]:
        """Return notices for the user about these modules: a line for each reason."""
        paths: dict[str, list[str]] = {}
        for path, reason in self.reasons.items():
            paths.setdefault(reason, []).append(path)
        lines = []
        for reason, alike in paths.items():
            more = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
            run = "run by their own code" if more else "runs by its own code"
            lines.append(
                f"{alike[0]}{more} {run}, on whole values, as {reason}; "
                "`paceline plan` does not count what is held within"
            )
        return lines

    def add(self, model: torch.nn.Module, error: NoGraphError) -> None:
        """Let the innermost module that raised `error`, or one that calls it, run by its own code.

        Raises:
            WorkloadError: none but the model itself is left.
        """
        # Without what an error holds on to: frames, and in them fake tensors.
        refusal = WorkloadError(error.asked, error.found, error.fix)
        called = _called_modules(model, error.__cause__ or error)
        if isinstance(error, _NotKeptError):
            self.reasons.pop(error.path, None)
            self.impossible[error.path] = error.found
            refusal = self.first.get(error.path, refusal)
            called = called or self.callers.get(error.path, [])
        for number, path in enumerate(called):
            if path in self.impossible or path in self.reasons:
                continue
            for alike in _of_same_class(model, path):
                if alike not in self.impossible:
                    self.reasons[alike] = refusal.found
                    self.first.setdefault(alike, refusal)
            self.callers[path] = called[number + 1 :]
            return
        if isinstance(error, _NotKeptError) and error.path in self.first:
            found = f"{refusal.found}; {error.path} can't run by its own code, as {error.found}"
            raise WorkloadError(refusal.asked, found, refusal.fix) from error
        raise error


def _called_modules(model: torch.nn.Module, error: BaseException) -> list[str]:
    """Return the paths of the modules in whose calls an error was raised, the innermost first, without the model."""
    names = {id(module): name for name, module in model.named_modules()}
    called: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is CALL:
            name = names.get(id(trace.tb_frame.f_locals["self"]))
            if name:
                called.append(name)
        trace = trace.tb_next
    return list(dict.fromkeys(reversed(called)))


def _of_same_class(model: torch.nn.Module, path: str) -> list[str]:
    """Return the path and those of other modules of the same class, if it is the user's: they do the same."""
    kind = type(model.get_submodule(path))
    if kind.__module__.startswith("torch."):
        return [path]
    return [name for name, module in model.named_modules() if name and type(module) is kind]


class Leaks:
    """The values that were made while a module's own code ran at capture: a graph that has one would repeat it."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, str]] = {}

    def note(self, tensor: torch.Tensor, path: str) -> None:
        """Note a value that the module at `path` made."""
        reference = StorageWeakRef(tensor.untyped_storage())
        self.storages[reference.cdata] = (reference, path)

    def check(self, constants: Sequence[Any]) -> None:
        """Raise where a constant of a graph is such a value."""
        for value in constants:
            if (
                isinstance(value, torch.Tensor)
                and not isinstance(value, FakeTensor)
                and not is_functorch_wrapped_tensor(value)
            ):
                reference, path = self.storages.get(storage_key(value), (None, ""))
                if reference is not None and not reference.expired():
                    raise _not_kept(path, "a value that it does not return is used outside it")


@contextmanager
def kept_modules(model: torch.nn.Module, own_modules: OwnModules, leaks: Leaks) -> Iterator[None]:
    """While the model is traced, make each call of these modules one node of the graph."""
    before = []
    for path in own_modules.reasons:
        module = model.get_submodule(path)
        if path not in own_modules.copies:
            own_modules.copies[path] = copy_of(module, path)
        before.append((module, vars(module).get("forward", _MISSING)))
    for (module, _), path in zip(before, own_modules.reasons, strict=True):
        module.__dict__["forward"] = functools.partial(_kept_call, _Part(module, own_modules.copies[path], path, leaks))
    try:
        yield
    finally:
        for module, forward in before:
            if forward is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def copy_of(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return a copy of a module without values, which is known by the module's path in the model."""
    copy = skeleton(module)
    for name, part in copy.named_modules():
        PATHS[part] = f"{path}.{name}" if name else path
    return copy


@dataclass(frozen=True, slots=True)
class _Part:
    """A module that is kept.

    Attributes:
        module: of the model, as it is traced.
        copy: the one that runs.
        path: its name in the model.
        leaks: notes what the code makes while it runs on made-up values.
    """

    module: torch.nn.Module
    copy: torch.nn.Module
    path: str
    leaks: Leaks

    def with_copy(self, copy: torch.nn.Module) -> _Part:
        """Return the same with another copy."""
        return _Part(self.module, copy, self.path, self.leaks)


def _kept_call(part: _Part, *arguments: Any, **named: Any) -> Any:
    """Call a module within a trace, as one node of the graph."""
    mode = get_proxy_mode()
    assert mode is not None, "modules are kept while a model is traced"
    buffers = dict(part.module.named_buffers())
    states = {**dict(part.module.named_parameters()), **buffers}
    leaves, form = tree_flatten((arguments, named))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    for leaf, is_one in zip(leaves, is_tensor, strict=True):
        if not is_one and leaf is not None and not isinstance(leaf, PLAIN):
            raise _not_kept(part.path, f"it is called with a {type(leaf).__name__}")
    constants = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]
    tensors = [*states.values(), *(leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if is_one)]
    for name, module in part.module.named_modules():
        if isinstance(module, NormBase) and module.training:
            # Its statistics are of the whole batch: other ranks may have a part of it.
            raise _not_kept(part.path, f"it has batch norm ({name or type(module).__name__})")
    for module, copy in zip(part.module.modules(), part.copy.modules(), strict=True):
        if any(getattr(module, hooks).keys() != getattr(copy, hooks).keys() for hooks in HOOKS):
            raise _not_kept(part.path, f"hooks of its {type(module).__name__} are put on or taken off in forward")
    call = OwnModule(part, list(states), constants, is_tensor, form)
    call.kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    tracer: Any = mode.tracer
    proxies = [tracer.unwrap_proxy(tensor) for tensor in tensors]
    with disable_proxy_modes_tracing():
        results = call(*tensors)
    node = tracer.create_proxy("call_function", call, tuple(proxies), {})
    track_tensor_tree(results, node, constant=None, tracer=tracer)
    every = list(results) if isinstance(results, tuple) else [results]
    # What it writes into its buffers is written by the graph: the call itself works on copies.
    with torch.no_grad():
        for name in reversed(call.written):
            buffers[name].copy_(every.pop())
    return call.rebuild(every)


class OwnModule(OwnCall):
    """A module with the arguments of one call but for its tensors: its states, and then those that it was handed.

    Args:
        part: the module and its copy.
        names: the names of its states.
        constants, is_tensor, form: the description of the other arguments; see `OwnCall`.

    Attributes:
        written: the names of the buffers that it writes into; what it leaves in them comes after its results.
        operations: that a call takes, forward, roughly.
        kinds: shapes and dtypes of the tensors that it was traced with.
        returns_handed: a call has returned a tensor that it was handed.
        is_written: the graph writes into a result.
        reaches_all: whether other ranks' paths may reach tensors that this rank's does not.
    """

    def __init__(
        self, part: _Part, names: list[str], constants: list[Any], is_tensor: list[bool], form: TreeSpec
    ) -> None:
        super().__init__(part.copy.forward, self._on_fakes, f"the code of {part.path}", constants, is_tensor, form)
        self.part = part
        self.names = names
        self.written: list[str] = []
        self.operations = 0.0
        self.kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.returns_handed = False
        self.is_written = False
        self.reaches_all = False
        self._slots = [_slots_of(part.copy, name) for name in names]
        self._buffers = {name for name, slots in zip(names, self._slots, strict=True) if slots[0][1] == "_buffers"}
        self._modes = [module.training for module in part.module.modules()]
        self._learnt: dict[Any, list[torch.Tensor]] = {}  # what it returns for tensors of a kind, on the meta device
        self._shapes: list[tuple[int, ...]] = []  # of what it returns
        self._results: tuple[list[Any], TreeSpec] | None = None  # what it returns, None where a tensor is

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Call the module; return only its tensors: one, or a tuple.

        Raises:
            WorkloadError: how many it returns, or their shapes, depends on values, or it writes into its arguments.
        """
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_fakes(*tensors)
        outputs = self._run(tensors)
        if [tuple(tensor.shape) for tensor in outputs] != self._shapes:
            raise self._not_kept("the shapes of what it returns depend on values")
        sources = [tensor for tensor in tensors if tensor.requires_grad]
        if sources and torch.is_grad_enabled():
            # The graph counts on a gradient's way back: other ranks may wait for it.
            results = len(outputs) - len(self.written)
            outputs = [_reached(tensor, sources, self.reaches_all) for tensor in outputs[:results]] + outputs[results:]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def check_unwritten(self) -> None:
        """Raise WorkloadError if a result that others write into is a tensor that the module was handed."""
        if self.returns_handed and self.is_written:
            raise self._not_kept("it returns a tensor that it is handed, and that is written into afterwards")

    def rebuild(self, results: Sequence[torch.Tensor]) -> Any:
        """Return the tensors of a call in the structure that the module returns."""
        assert self._results is not None, "it was called"
        remaining = iter(results)
        constants, form = self._results
        return tree_unflatten([next(remaining) if item is None else item[0] for item in constants], form)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the module on real tensors; return those that it returns, and what it leaves in its buffers."""
        count = len(self.names)
        states = dict(zip(self.names, tensors, strict=False))
        for name in self._buffers:
            states[name] = states[name].clone()
        handed = [*states.values(), *tensors[count:]]
        versions = [tensor._version for tensor in handed]
        arguments, named = self.arguments_of(tensors[count:])
        # The tensors stay in the module: a part of it that is computed again in the backward pass finds them there.
        self._put(states)
        for module, is_training in zip(self.part.copy.modules(), self._modes, strict=True):
            module.training = is_training
        with own_code_running():
            result = self.function(*arguments, **named)
        for (name, state), slots in zip(states.items(), self._slots, strict=True):
            if any(_value_at(place) is not state for place in slots):
                raise self._not_kept(f"it puts another tensor in the place of {name}")
        changed = [number for number, tensor in enumerate(handed) if tensor._version != versions[number]]
        outputs = self._note_results(result, [self.names[number] if number < count else "" for number in changed])
        # A copy of what it was handed: the graph takes every result for memory of its own.
        memories = {storage_key(tensor) for tensor in handed}
        for number, tensor in enumerate(outputs):
            if storage_key(tensor) in memories:
                self.returns_handed = True
                self.check_unwritten()
                outputs[number] = tensor.clone()
        return [*outputs, *(states[name].detach() for name in self.written)]

    def _put(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put tensors into the module that runs."""
        for name, slots in zip(self.names, self._slots, strict=True):
            for owner, slot, key in slots:
                getattr(owner, slot)[key] = states[name]
        for module in self.part.copy.modules():
            if isinstance(module, torch.nn.RNNBase):  # it holds its weights in a list, too
                list_weights_again(module)

    def _note_results(self, result: Any, written: list[str]) -> list[torch.Tensor]:
        """Return the tensors that a call returns; all else must be the same in every call.

        Args:
            result: what it returned.
            written: the names of the states that it wrote into; "" for another tensor.
        """
        for name in written:
            if name not in self._buffers:
                raise self._not_kept(f"it writes into {name or 'a tensor that it is handed'}")
            if name not in self.written and self._results is not None:
                raise self._not_kept(f"whether it writes into {name} depends on values")
        leaves, form = tree_flatten(result)
        constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        for item in constants:
            if item is not None and item[0] is not None and not isinstance(item[0], PLAIN):
                raise self._not_kept(f"it returns a {type(item[0]).__name__}")
        if self._results is None:
            self._results = constants, form
            self.written = written
        elif self._results != (constants, form):
            raise self._not_kept("what it returns beside tensors depends on values")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise self._not_kept("it returns no tensor")
        return tensors

    def _not_kept(self, found: str) -> _NotKeptError:
        return _not_kept(self.part.path, found)

    def _on_fakes(self, *tensors: torch.Tensor) -> Any:
        """Return tensors as a call would return, without values."""
        expected = self._expected_of(tensors)
        device = next(tensor.device for tensor in tensors)
        sources = [tensor for tensor in tensors if tensor.requires_grad and torch.is_grad_enabled()]
        with own_code_running():
            outputs = _Unknown.apply(device, expected, len(self.written), *sources)  # type: ignore[no-untyped-call]
        return outputs[0] if len(outputs) == 1 else outputs

    def _expected_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of a call for tensors of such shapes, on the meta device."""
        device = next(tensor.device.type for tensor in tensors)
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (autocast, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
        if key not in self._learnt:
            self._learnt[key] = self._learn(tensors, device, autocast)
        return self._learnt[key]

    def _learn(self, tensors: Sequence[torch.Tensor], device: str, autocast: torch.dtype | None) -> list[torch.Tensor]:
        """Call the module on made-up values."""
        is_first = self._results is None
        copy = self.part.copy
        before = _attributes(copy)
        if device != "cpu" and not torch.get_device_module(device).is_available():
            device = "cpu"
        flops = FlopCounterMode(display=False)
        empty = {name: _value_at(places[0]) for name, places in zip(self.names, self._slots, strict=True)}
        try:
            with ExitStack() as stack:
                stack.enter_context(disable_current_modes())
                stack.enter_context(DisableTorchFunction())
                # Kernels in Python, which a trace prefers, may return other shapes (torch 2.11's LSTM).
                stack.enter_context(no_python_dispatcher())
                stack.enter_context(random_state_kept())
                stack.enter_context(torch.enable_grad())
                stack.enter_context(torch.autocast(device, dtype=autocast, enabled=autocast is not None))
                examples = [_example(tensor, device) for tensor in tensors]
                # What it is handed was computed: it is no leaf of autograd.
                count = len(self.names)
                examples[count:] = [tensor.clone() for tensor in examples[count:]]
                stack.enter_context(flops)
                stack.enter_context(_Watch(self.part.path, self.part.leaks))
                results = self._run(examples)
        except _NotKeptError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise self._not_kept(f"on made-up values it raises {type(error).__name__}: {text:.200}") from error
        finally:
            self._put(empty)
        if is_first:
            self._shapes = [tuple(result.shape) for result in results]
            self._show_attributes(before)
            self.operations = float(flops.get_total_flops()) or _operations_of(tensors, len(self.names))
        _restore(copy, before)
        return [
            torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta") for result in results
        ]

    def _show_attributes(self, before: Attributes) -> None:
        """Put what the code has set in its attributes into the module that is traced, without values.

        So who computes with them outside is told: a graph would have the made-up ones.
        """
        modules = dict(self.part.module.named_modules())
        for place, now in _attributes(self.part.copy).items():
            earlier = before.get(place, (_MISSING, None))
            if _are_same(earlier, now):
                continue
            name, key = place
            if isinstance(now[0], torch.Tensor) and (earlier[0] is _MISSING or earlier[0] is None):
                modules[name].__dict__[key] = torch.empty_like(now[0], device="meta")
            elif earlier[0] is _MISSING and isinstance(now[0], PLAIN):
                modules[name].__dict__[key] = now[0]
            else:
                raise self._not_kept(f"it changes its attribute {key}, which the graph would not know")


class _Watch(TorchDispatchMode):
    """Refuses tensors of the trace in a module's code, and notes what the code makes."""

    def __init__(self, path: str, leaks: Leaks | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path
        self.leaks = leaks

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta):
                raise _not_kept(self.path, f"{function} in it uses a tensor that is none of its own or its arguments")
        result = function(*args, **kwargs)
        if self.leaks is not None:
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    self.leaks.note(value, self.path)
        return result


def _reached(tensor: torch.Tensor, sources: list[torch.Tensor], is_every: bool) -> torch.Tensor:
    """Return a result from which a gradient, be it none, goes back to the sources; to every one if `is_every`."""
    if not tensor.is_floating_point() or (tensor.requires_grad and not is_every):
        return tensor
    reached: torch.Tensor = _Reached.apply(tensor, *sources)  # type: ignore[no-untyped-call]
    return reached


class _Reached(torch.autograd.Function):
    """Returns a value as it is; its sources get no gradient of it, but are on its way through the graph."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        """Return `value`."""
        ctx.sources = len(sources)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the value's gradient, and none for the sources."""
        return gradients[0], *(None for _ in range(ctx.sources))


class _Unknown(torch.autograd.Function):
    """Returns tensors without values, and gradients without values for all that they depend on."""

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, expected: list[torch.Tensor], written: int, *sources: torch.Tensor
    ) -> Any:
        """Return tensors as `expected` on `device`; no gradient flows through the last ones, `written` buffers."""
        ctx.sources = [(tuple(source.shape), source.dtype, source.device) for source in sources]
        outputs = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device) for tensor in expected
        ]
        results = len(outputs) - written
        without = [
            tensor for number, tensor in enumerate(outputs) if number >= results or not tensor.is_floating_point()
        ]
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return a gradient for each source."""
        gradients_of_sources = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.sources]
        return None, None, None, *gradients_of_sources


def _not_kept(path: str, found: str) -> _NotKeptError:
    error = _NotKeptError(f"to be split, {path} should compute from the tensors that it is handed", found, _FIX)
    error.path = path
    return error


def _example(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return made-up values for a tensor: numbers around a half over its rows' length, zeros (an index), True."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bool:
        return torch.ones(shape, dtype=tensor.dtype, device=device)
    if not tensor.is_floating_point():
        return torch.zeros(shape, dtype=tensor.dtype, device=device)
    values = fractions(shape, torch.Generator().manual_seed(len(shape)), torch.float32) + 0.1
    if len(shape) > 1:
        values = values / shape[-1]
    return values.to(device, tensor.dtype).expand(shape).requires_grad_(tensor.requires_grad)


def fractions(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers between 0 and 1 that can be expanded to a shape: of a large one its last dimension, or one.

    A module may be a large part of a model that no rank can hold.
    """
    of = shape
    if math.prod(shape) > _LARGE:
        of = shape[-1:] if shape[-1] <= _LARGE else (1,)
    return torch.rand(of, generator=generator, dtype=dtype)


def _operations_of(tensors: Sequence[torch.Tensor], states: int) -> float:
    """Return a guess: each row of the first value meets every weight."""
    weights = sum(tensor.numel() for tensor in tensors[:states])
    rows = next((tensor.numel() / max(1, tensor.shape[-1]) for tensor in tensors[states:] if tensor.dim()), 1.0)
    return 2.0 * weights * rows


def _value_at(place: Place) -> Any:
    owner, slot, key = place
    return getattr(owner, slot).get(key)


def _slots_of(module: torch.nn.Module, name: str) -> list[Place]:
    """Return the places where a module and its parts hold a state: owner, `_parameters` or `_buffers`, key."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    state: torch.Tensor | None = owner._parameters.get(key)
    if state is None:
        state = owner._buffers[key]
    found = []
    for part in module.modules():
        for slot in ("_parameters", "_buffers"):
            found += [(part, slot, key) for key, value in vars(part)[slot].items() if value is state]
    return found


def _attributes(module: torch.nn.Module) -> Attributes:
    """Return the attributes of a module and its parts: each value, and the items of a container."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _OF_TORCH and key != "forward" and not key.startswith(FLAT_WEIGHTS):
                items = list(value.items()) if isinstance(value, dict) else None
                if isinstance(value, list | set):
                    items = list(value)
                found[name, key] = (value, items)
    return found


def _are_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if before[0] is not now[0]:
        return isinstance(before[0], PLAIN) and isinstance(now[0], PLAIN) and bool(before[0] == now[0])
    if now[1] is None:
        return True
    return len(before[1]) == len(now[1]) and all(
        first is second or (isinstance(first, tuple) and first[0] is second[0] and first[1] is second[1])
        for first, second in zip(before[1], now[1], strict=True)
    )


def _restore(module: torch.nn.Module, before: Attributes) -> None:
    """Give a module and its parts the attributes that they had."""
    parts = dict(module.named_modules())
    for name, key in _attributes(module):
        if (name, key) not in before:
            del parts[name].__dict__[key]
    for (name, key), (value, items) in before.items():
        parts[name].__dict__[key] = value
        if isinstance(value, dict | set):
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = items


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put back the states of all random numbers of the CPU."""
    numpy: Any = sys.modules.get("numpy")
    state = _generator.get_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        _generator.set_state(state[0])
        random.setstate(state[1])
        if numpy:
            numpy.random.set_state(state[2])


def note_written_results(graph: fx.Graph) -> None:
    """Tell calls of modules that their results are written into.

    Raises:
        WorkloadError: one of these is what the module was handed, which the code would write into, too.
    """
    written: set[Any] = set()
    for node in graph.nodes:
        written.update(storage_of(source) for source in written_inputs(node))
    for node in graph.nodes:
        if isinstance(node.target, OwnModule) and memories_of(node) & written:
            node.target.is_written = True
            node.target.check_unwritten()
