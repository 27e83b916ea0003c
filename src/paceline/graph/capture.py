"""Turn `function(model, batch)` into a graph of ATen operations, without running it on values.

The model's code runs once on fake tensors, which know shape, dtype and device and hold nothing; every
operation it performs, before autograd takes it apart, is traced (`make_fx`, pre-dispatch). The graph computes what
the model computes for every batch of the same shapes, provided that the code's path depends only on shapes. Where
a module's depends on values, fake tensors can't answer: it runs by its own code (`own_modules.py`), or the model is
refused.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from paceline.comm.pytree import map_tensors, plain_values, tensors_in
from paceline.graph.capture_workarounds import WithoutChunks, install_recording_hooks, rejoin_copies
from paceline.graph.functional import (
    check_states_unwritten,
    choose_where_masks_write,
    copy_inputs_that_are_written,
    copy_states_that_are_read,
    drop_empty_parts,
    drop_unread,
    make_functional,
)
from paceline.graph.grouped_mm import KnownCounts, register_fake
from paceline.graph.kept_values import InitialState, PythonStateWatch
from paceline.graph.own_code import NoGraphError
from paceline.graph.own_modules import Leaks, OwnModules, kept_modules, note_written_results
from paceline.graph.refused_calls import effects_as_written
from paceline.graph.writes import (
    Write,
    WriteLog,
    check_same_writes,
    run_on_fakes,
    running_statistics,
    wants_gradient,
    written_inputs,
)
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.own_errors import note_own_error
from paceline.torch_private.operations import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    set_grad_enabled,
)
from paceline.torch_private.tensors import storage_key

Function = Callable[[torch.nn.Module, Any], Any]
_NOT_OF_THE_USER = ("/torch/", "/paceline/graph/", "/paceline/parallel/", "/paceline/verify/")  # parts of paths
aten = torch.ops.aten


@dataclass(slots=True)
class Captured:
    """A function of the model's state and a batch, as a graph.

    Attributes:
        graph: placeholders are the state tensors and then the batch's tensors; the output is a flat list.
        states: placeholder of each state tensor that is used, by name.
        inputs: placeholder of each of the batch's tensors.
        constants: tensors that the code made of plain numbers, by the name of their `get_attr` node.
        rebuild: puts the flat outputs back into what `function` returns.
        module_path: path of the module that each node was computed in.
        trained: names of the states that want a gradient.
        buffers: names of those that are no parameters.
    """

    graph: fx.Graph
    states: dict[str, fx.Node]
    inputs: list[fx.Node]
    constants: dict[str, torch.Tensor]
    rebuild: Callable[[list[Any]], Any]
    module_path: dict[fx.Node, str]
    trained: set[str]
    buffers: set[str]
    device: torch.device
    no_grad: set[fx.Node] = field(default_factory=set)  # computed under torch.no_grad
    log: list[Write] = field(default_factory=list)  # what the code wrote into the states
    has_whole_loss: bool = False  # of a large vocabulary, which the code computes by chunks

    @property
    def output(self) -> list[Any]:
        """Return the flat outputs: nodes or plain values."""
        return list(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]


def capture(
    model: torch.nn.Module, function: Function, batch: Any, device: torch.device, own_modules: OwnModules | None = None
) -> Captured:
    """Trace the computation of `function(model, batch)`.

    Args:
        model: its parameters and buffers give shapes and dtypes; they may be on the meta device.
        function: the function to trace, such as a workload's loss.
        batch: a batch of the shapes to capture for.
        device: where the graph will run.
        own: the modules that an earlier capture of the model found to run by their own code; those that this one
            finds are added.

    Raises:
        WorkloadError: the code's path depends on values, draws from Python's or numpy's random numbers, or
            replaces a buffer instead of writing into it.
    """
    _check_not_nested(batch)
    register_fake()
    install_recording_hooks(model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # tensors that the code makes of plain numbers are real
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    # Trace one call. numpy's and Python's draws are no operations of torch: the graph would hold the numbers of this
    # call and repeat them in every step.
    call = _TracedCall(model, function, batch, tensors, OwnModules() if own_modules is None else own_modules)
    state_before = _plain_random_state()
    traced, entries = _trace(call, device, fake)
    if _plain_random_state() != state_before:
        # A thread of the process may have drawn, such as one that waits before it asks a server again.
        state_before = _plain_random_state()
        traced, entries = _trace(call, device, fake)
    if _plain_random_state() != state_before:
        raise WorkloadError(
            "the model should compute the same operations in every step",
            "it draws from Python's or numpy's random numbers, and the path it takes may depend on them",
            "draw from torch, or train it by replicate or shard, which run the model's own code",
        )
    # Nor are values that the code keeps in Python from call to call. Where some are suspected, later calls are traced
    # too.
    _check_next_call(call, traced, device, fake)
    call.batch = None  # `rebuild` keeps the call, and the graph needs no batch's memory
    traced.graph.set_codegen(fx.graph.CodeGen())  # flat arguments, no trees
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    # `_TracedCall` takes (states, inputs): so the placeholders are the states, in the order of `tensors`, then the
    # batch.
    captured = Captured(
        graph=traced.graph,
        states=dict(zip(tensors, placeholders, strict=False)),
        inputs=placeholders[len(tensors) :],
        constants=_constants_of(traced),
        rebuild=call.rebuild,
        module_path=_module_paths(traced.graph, entries),
        trained=trained,
        buffers={name for name, _ in model.named_buffers()},
        device=device,
        log=call.log,
        has_whole_loss=call.has_whole_loss,
    )
    # Make it a graph of operations without side effects, which can be cut between any two nodes.
    _take_out_grad_mode(captured)
    _without_side_effects(captured)
    check_states_unwritten(captured.graph, captured.states, captured.trained)
    _drop_unused(captured)
    # Last, on the graph as it is split later: a pass above may have lost a write, or changed where gradients flow.
    _run_once(captured, fake)
    # The graphs that are made of this one copy `meta`, and have no `module_path` of their own.
    for node in captured.graph.nodes:
        node.meta["original"] = node.name
        node.meta["module"] = captured.module_path.get(node, "")
    return captured


def _check_not_nested(batch: Any) -> None:
    if any(tensor.is_nested for tensor in tensors_in(batch)):
        raise WorkloadError(
            "to be split, the model should compute with plain tensors",
            "the batch has a nested one, whose samples differ in size",
            "pad the samples in the collate function, or train it by replicate or shard, which run the model's code",
        )


def _trace(
    call: _TracedCall, device: torch.device, fake: FakeTensorMode
) -> tuple[fx.GraphModule, list[tuple[int, str]]]:
    """Return the operations of a call, and at which of them each module begins.

    A module whose code is no graph of operations becomes one of them, and the call is traced again.
    """
    while True:
        try:
            return _trace_once(call, device, fake)
        except NoGraphError as error:
            call.own_modules.add(call.module.model, error)
            _end_frames(error)


def _end_frames(error: BaseException | None) -> None:
    """Let go of the frames that an error came through.

    In one of them a checkpoint may have begun: its hooks are on every tensor that autograd saves until its generator is
    gone, and the error would keep that alive.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _trace_once(
    call: _TracedCall, device: torch.device, fake: FakeTensorMode
) -> tuple[fx.GraphModule, list[tuple[int, str]]]:
    with fake:
        states = [_fake_like(tensor, device) for tensor in call.tensors.values()]
        inputs = [_fake_like(tensor, device) for tensor in tensors_in(call.batch)]
    state_by_name = dict(zip(call.tensors, states, strict=True))
    model = call.module.model
    leaks = Leaks()
    # Pre-dispatch: operations as the code calls them (`linear`, attention), which the rules of layouts know, before
    # autograd takes them apart.
    with (
        _watched_modules(model) as entries,
        _refusals(),
        WithoutChunks() as chunks,
        KnownCounts(),
        effects_as_written(state_by_name),
        kept_modules(model, call.own_modules, leaks),
        fake,
    ):
        traced = make_fx(call, pre_dispatch=True)(states, inputs)
    call.has_whole_loss |= chunks.is_met
    # First, because a factory's lost result looks like a value from elsewhere, which the check refuses.
    rejoin_copies(traced)
    note_written_results(traced.graph)
    leaks.check(list(_constants_of(traced).values()))
    _check_constants(_constants_of(traced))
    return traced, entries


def _constants_of(traced: fx.GraphModule) -> dict[str, Any]:
    """Return the values of the `get_attr` nodes of a trace, by the nodes' targets."""
    constants = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            constants[name] = getattr(traced, name)
    return constants


def _check_next_call(call: _TracedCall, traced: fx.GraphModule, device: torch.device, fake: FakeTensorMode) -> None:
    """Raise the suspicion of a call's Python state unless calls that start with it, or with others, do the same."""
    watch = call.module.watches[-1]
    if watch.suspicion is None:
        return
    # Trace a call that begins with what the first one left, then one that begins with other numbers (see
    # `kept_values`).
    for is_moved in (False, True):
        initial = InitialState(watch.suspects, is_moved)
        following = _TracedCall(
            call.module.model, call.module.function, call.batch, call.tensors, call.own_modules, initial
        )
        try:
            is_same = _repeats(following, call, traced, device, fake)
        except Exception:  # it met a tensor of the first call, or a number that can't be
            is_same = False
        if not is_same:
            raise watch.suspicion


def _repeats(
    following: _TracedCall, call: _TracedCall, traced: fx.GraphModule, device: torch.device, fake: FakeTensorMode
) -> bool:
    """Trace a later call; True if it computes, returns and leaves the same as the first one."""
    traced_again, _ = _trace(following, device, fake)
    if not following.module.watches[-1].leaves_the_same:
        return False
    if not _are_same(traced, traced_again):
        return False
    return bool(plain_values(call.result) == plain_values(following.result))


def _are_same(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """True if two traces have the same operations and constants."""

    # fx numbers names in the order in which nodes are made, so equal traces have equal names in their arguments.
    def text(node: fx.Node) -> tuple[str, ...]:
        return node.op, repr(node.target), repr(node.args), repr(node.kwargs)

    if list(map(text, first.graph.nodes)) != list(map(text, second.graph.nodes)):
        return False
    constants = _constants_of(first)
    other_constants = _constants_of(second)
    return all(_are_same_constants(constants[name], other_constants[name]) for name in constants)


def _are_same_constants(first: Any, second: Any) -> bool:
    """True if two constants, tensors or the graphs of nested calls, are the same."""
    if isinstance(first, fx.GraphModule):
        return _are_same(first, second)
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))


def _without_side_effects(captured: Captured) -> None:
    """Leave in the graph what its outputs and its states need, in a form that can be cut anywhere."""
    drop_empty_parts(captured.graph)
    drop_unread(captured.graph)
    for node in copy_inputs_that_are_written(captured.graph, captured.inputs):
        captured.module_path[node] = ""
    # Now the only memory left that outlives the graph is that of the states.
    make_functional(captured.graph)
    for node, before in choose_where_masks_write(captured.graph).items():
        captured.module_path[node] = captured.module_path.get(before, "")
        if before in captured.no_grad:
            captured.no_grad.add(node)
    # Again: an in-place operation counts as impure and stays, its ordinary form goes where nothing reads it.
    drop_unread(captured.graph)
    for node, reader in copy_states_that_are_read(captured.graph, captured.states).items():
        captured.module_path[node] = captured.module_path.get(reader, "")


def _run_once(captured: Captured, fake: FakeTensorMode) -> None:
    """Run the graph on fake tensors: note where gradients flow, and check that it writes what the code wrote."""
    with fake:
        placeholders = [*captured.states.values(), *captured.inputs]
        arguments = {node: torch.empty_like(node.meta["val"]) for node in placeholders}
        for name in captured.trained & captured.states.keys():
            arguments[captured.states[name]].requires_grad_()
        writes, values = run_on_fakes(captured.graph, arguments, captured.states, captured.constants)
    check_same_writes(captured.log, writes, "its graph")
    for node in captured.graph.nodes:
        node.meta["flows"] = wants_gradient(values.get(node))
    _check_statistics_are_kept(captured)


def _check_statistics_are_kept(captured: Captured) -> None:
    """Raise WorkloadError where the gradient of a norm depends on when a later call writes its statistics.

    torch's kernel writes them without notice to autograd, which then takes the gradient of an earlier call in
    evaluation mode at the new ones. A graph, of which other ranks run parts, would take it at the old ones.
    """
    read: dict[fx.Node, fx.Node] = {}  # by state: a norm in evaluation mode
    for node in captured.graph.nodes:
        for state in running_statistics(node):
            if state in read:
                raise WorkloadError(
                    "to be split, a model that is called in evaluation and in training mode in one step should have "
                    "no gradient of the first call in evaluation mode",
                    f"that of batch norm {captured.module_path.get(node, '')} depends on its running statistics, which "
                    "the later call writes before the backward pass",
                    "call it under torch.no_grad(), or after the call in training mode; or train it by replicate or "
                    "shard, which run the model's own code",
                )
        if node.target is torch.ops.aten.batch_norm.default and not node.args[5] and node.meta["flows"]:
            statistics = node.args[3]
            is_copy = statistics.target is torch.ops.aten.clone.default
            read[statistics.args[0] if is_copy else statistics] = node


class _TracedCall:
    """The function of (states, inputs) that is traced.

    Attributes:
        result: what the user's function returned.
        has_whole_loss: a loss by chunks was computed as a whole.
        log: what it wrote into the states.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        function: Function,
        batch: Any,
        tensors: Mapping[str, torch.Tensor],
        own_modules: OwnModules,
        initial: InitialState | None = None,
    ) -> None:
        self.batch = batch
        self.own_modules = own_modules
        self.tensors = tensors
        self.module = _FunctionModule(model, function, initial)
        self.result: Any = None
        self.log: list[Write] = []
        self.has_whole_loss = False

    def __call__(self, states: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        remaining_inputs = iter(inputs)
        batch = map_tensors(self.batch, lambda _: next(remaining_inputs))
        state_by_name = dict(zip(self.tensors, states, strict=True))
        # Other memory, or a gradient, given to a state is no value of the graph: it would be lost without a trace.
        memory_before = {name: _memory(tensor) for name, tensor in state_by_name.items()}
        module_states = {f"model.{name}": tensor for name, tensor in state_by_name.items()}
        log = WriteLog(state_by_name)
        with log:
            self.result = functional_call(self.module, module_states, (batch,))
        self.log = log.writes
        for name, tensor in state_by_name.items():
            if _memory(tensor) != memory_before[name] or tensor.grad is not None:
                raise WorkloadError(
                    "the model should write its buffers in place and leave gradients to the backward pass",
                    f"its forward gives {name} other memory, or a gradient",
                    "write in place under torch.no_grad(): tensor.copy_(...)",
                )
        return tensors_in(self.result)

    def rebuild(self, outputs: list[Any]) -> Any:
        """Return the flat outputs in the structure that `function` returned."""
        remaining_outputs = iter(outputs)
        return map_tensors(self.result, lambda _: next(remaining_outputs))


class _FunctionModule(torch.nn.Module):
    """A module that calls a plain function, so that `functional_call` reaches the function's model."""

    def __init__(self, model: torch.nn.Module, function: Function, initial: InitialState | None) -> None:
        super().__init__()
        self.model = model
        self.function = function
        self.initial = initial
        self.watches: list[PythonStateWatch] = []

    def forward(self, batch: Any) -> Any:
        """Call the function, and note the Python state that it changes."""
        # Read before the watch begins: this module is no part of what is watched.
        model = self.model
        function = self.function
        watch = PythonStateWatch(model, function, _depends_on_arguments, self.initial)
        self.watches.append(watch)
        with watch.watching():
            return function(model, batch)


def _depends_on_arguments(tensor: torch.Tensor) -> bool:
    """True if a value of the trace under way depends on a state or on the batch, as far as that can be told."""
    mode = get_proxy_mode()
    slot: Any = None
    if mode is not None:
        slot = get_proxy_slot(tensor, mode.tracer, None)
    # The tracer does not know it: a fake tensor may come from anywhere, a real one was made of plain numbers.
    if slot is None:
        return isinstance(tensor, FakeTensor)
    # Walk back from its node to a placeholder.
    pending = [slot.proxy.node]
    visited = set()
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        if node not in visited:
            visited.add(node)
            pending.extend(node.all_input_nodes)
    return False


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the address of a tensor's storage object, its shape and its strides.

    The address is unique only as long as somebody holds the tensor.
    """
    return storage_key(tensor), tuple(tensor.shape), tensor.stride()


def _fake_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _plain_random_state() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's random numbers; a numpy that nobody imported draws none."""
    numpy: Any = sys.modules.get("numpy")
    state: Any = (None, b"", 0)  # name, MT19937's words, the place in them
    if numpy:
        state = numpy.random.get_state()
    return random.getstate(), state[2], bytes(state[1])


@contextmanager
def _watched_modules(model: torch.nn.Module) -> Iterator[list[tuple[int, str]]]:
    """Note at which node of the graph each module begins, and where its caller goes on."""
    names = {module: name for name, module in model.named_modules()}
    entries: list[tuple[int, str]] = []  # (nodes in the graph so far, the path from here on)
    stack: list[str] = []

    def current() -> str:
        return stack[-1] if stack else ""

    def note() -> None:
        mode = get_proxy_mode()
        if mode is not None:
            entries.append((len(mode.tracer.graph.nodes), current()))

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        stack.append(names.get(module, current()))  # one made on the way counts as its caller
        note()

    def leave(module: torch.nn.Module, arguments: Any, result: Any) -> None:
        stack.pop()
        note()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        # also after an error: a model that catches it goes on in the caller
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield entries
    finally:
        for handle in handles:
            handle.remove()


def _module_paths(graph: fx.Graph, entries: list[tuple[int, str]]) -> dict[fx.Node, str]:
    """Return the path of the module that each node was computed in.

    Args:
        graph: of the trace.
        entries: from which node on which module runs, in rising order.
    """
    module_path = {}
    current_path = ""
    remaining = iter([*entries, (sys.maxsize, "")])  # no node reaches the last one, so `next` never ends
    next_start, next_path = next(remaining)
    for index, node in enumerate(graph.nodes):
        while next_start <= index:
            current_path = next_path
            next_start, next_path = next(remaining)
        module_path[node] = current_path
    return module_path


@contextmanager
def _refusals() -> Iterator[None]:
    fix = "or train it by replicate or shard, which run the model's own code"
    try:
        yield
    except PacelineError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise NoGraphError(
            "to be split, the model's path should depend on shapes alone",
            f"it looks at values: {_line_of(error)}",
            "compute both sides and choose by torch.where (rows that don't count: times a mask, or ignore_index), "
            + fix,
        ) from error
    except Exception as error:
        if note_own_error(error):
            raise
        raise NoGraphError(
            "to be split, the model should be a graph of torch operations",
            f"{type(error).__name__} at {_line_of(error)}: {str(error).strip().partition(chr(10))[0]:.200}",
            "start it alone (python FILE); if it trains so, leave out what that line does, " + fix,
        ) from error


def _check_constants(constants: Mapping[str, Any]) -> None:
    for value in constants.values():
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                "the model should draw from torch's own random numbers",
                f"it uses a {type(value).__name__} of its own, which would begin anew with every graph",
                "draw without generator=..., or train it by replicate or shard",
            )
        if isinstance(value, FakeTensor):
            raise WorkloadError(
                "to be split, every value of the model should follow from its operations",
                f"a value of shape {tuple(value.shape)} came from elsewhere (torch.func, kept from an earlier batch)",
                "compute it with plain torch operations in forward, or train it by replicate or shard",
            )


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that asked for a value: the innermost that is not torch's or ours."""
    place = str(error).splitlines()[0]
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not any(part in file for part in _NOT_OF_THE_USER):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _take_out_grad_mode(captured: Captured) -> None:
    """Mark what ran under `torch.no_grad`, and take the switches out: a cut between two would lose them."""
    is_off = False
    for node in list(captured.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is set_grad_enabled:
            is_off = not node.args[0]
            captured.graph.erase_node(node)
        elif is_off:
            captured.no_grad.add(node)
    for node in captured.no_grad:
        written = written_inputs(node)
        if len(written) == 1 and written[0] not in captured.no_grad and written[0].op == "call_function":
            node.replace_all_uses_with(written[0])  # autograd does not see the write: readers keep their gradient
        _detach_inputs(captured, node)


def _detach_inputs(captured: Captured, node: fx.Node) -> None:
    """Let a node that ran under `torch.no_grad` read detached values of nodes that did not.

    Stages run with gradients on: `detach` stands for the switch that was taken out.
    """
    for source in node.all_input_nodes:
        if source in captured.no_grad or not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        with captured.graph.inserting_before(node):
            detached = captured.graph.call_function(aten.detach.default, (source,))
        detached.meta["val"] = source.meta["val"].detach()
        captured.module_path[detached] = captured.module_path.get(node, "")
        node.replace_input_with(source, detached)


def _drop_unused(captured: Captured) -> None:
    """Forget the states, constants and nodes that the graph does not use any more."""
    nodes = set(captured.graph.nodes)
    captured.module_path = {node: path for node, path in captured.module_path.items() if node in nodes}
    captured.no_grad &= nodes
    used = {node.target for node in nodes if node.op == "get_attr"}
    captured.constants = {name: value for name, value in captured.constants.items() if name in used}
    # A state without readers belongs to no operation: ranks hold it, but no graph takes it as an argument.
    for name, node in list(captured.states.items()):
        if not node.users:
            del captured.states[name]
            captured.graph.erase_node(node)
