"""Turn `function(model, batch)` into a graph of ATen operations, without running it on values.

The model's code runs once on fake tensors, which know shape, dtype and device and hold nothing; every
operation it performs, before autograd takes it apart, is written down (`make_fx`, pre-dispatch). What the graph
then computes is what the model computes for every batch of the same shapes, provided that the code's path
depends on shapes alone. Where it depends on values, fake tensors can't answer, and that is the refusal.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from paceline.comm.pytree import map_tensors, plain_values, tensors_in
from paceline.graph.factories import rejoin_copies
from paceline.graph.functional import (
    check_states_unwritten,
    copy_inputs_that_are_written,
    copy_states_that_are_read,
    drop_empty_parts,
    drop_unread,
    make_functional,
)
from paceline.graph.kept_values import Beginning, KeptValues
from paceline.graph.refused_calls import effects_as_written
from paceline.graph.writes import Write, WriteLog, check_same_writes, run_on_fakes, wants_gradient, written_inputs
from paceline.nouns.errors import PacelineError, WorkloadError

Function = Callable[[torch.nn.Module, Any], Any]
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

    @property
    def output(self) -> list[Any]:
        """The flat outputs: nodes or plain values."""
        return list(next(iter(reversed(self.graph.nodes))).args[0])  # type: ignore[arg-type]


class _Running:
    """A context that says whether it is entered, to other threads."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


_running = _Running()


def is_capturing() -> bool:
    """Whether a capture runs in this process. Look at no thread's frames then: a frame keeps its values alive."""
    return _running.depth > 0


def capture(model: torch.nn.Module, function: Function, batch: Any, device: torch.device) -> Captured:
    """Write down what `function(model, batch)` computes.

    Args:
        model: its parameters and buffers give shapes and dtypes; they may be on the meta device.
        function: e.g. a workload's loss.
        batch: a batch of the shapes to capture for.
        device: where the graph will run.

    Raises:
        WorkloadError: the code's path depends on values, draws from Python's or numpy's random numbers, or
            replaces a buffer instead of writing into it.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
    call = _Call(model, function, batch, tensors)
    state_before = _plain_random_state()
    traced, entries = _trace(call, device, fake)
    if _plain_random_state() != state_before:
        raise WorkloadError(
            "a model whose every step computes the same operations",
            "it draws from Python's or numpy's random numbers, and the path it takes may depend on them",
            "draw from torch, or train it by replicate or shard, which run the model's own code",
        )
    _check_next_call(call, traced, device, fake)
    traced.graph.set_codegen(fx.graph.CodeGen())  # flat arguments, no trees
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    captured = Captured(
        graph=traced.graph,
        states=dict(zip(tensors, placeholders, strict=False)),
        inputs=placeholders[len(tensors) :],
        constants={
            str(node.target): getattr(traced, str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"
        },
        rebuild=call.rebuild,
        module_path=_places(traced.graph, entries),
        trained=trained,
        buffers={name for name, _ in model.named_buffers()},
        device=device,
        log=call.log,
    )
    _take_out_grad_mode(captured)
    _without_side_effects(captured)
    check_states_unwritten(captured.graph, captured.states, captured.trained)
    _drop_unused(captured)
    _run_once(captured, fake)
    for node in captured.graph.nodes:  # what the graphs that are made of this one carry along
        node.meta["original"], node.meta["module"] = node.name, captured.module_path.get(node, "")
    return captured


def _trace(call: _Call, device: torch.device, fake: FakeTensorMode) -> tuple[fx.GraphModule, list[tuple[int, str]]]:
    """The operations of a call, and at which of them each module begins."""
    with fake:
        states = [_fake_like(tensor, device) for tensor in call.tensors.values()]
        inputs = [_fake_like(tensor, device) for tensor in tensors_in(call.batch)]
    held = dict(zip(call.tensors, states, strict=True))
    with _watched_modules(call.wrapper.model) as entries, _refusals(), effects_as_written(held), _running, fake:
        traced = make_fx(call, pre_dispatch=True)(states, inputs)
    rejoin_copies(traced)
    _check_constants({str(n.target): getattr(traced, str(n.target)) for n in traced.graph.nodes if n.op == "get_attr"})
    return traced, entries


def _check_next_call(call: _Call, traced: fx.GraphModule, device: torch.device, fake: FakeTensorMode) -> None:
    """Raise the suspicion of a call's kept values unless calls that begin with them, or with others, do the same."""
    kept = call.wrapper.kept[-1]
    if kept.suspicion is None:
        return
    for is_moved in (False, True):
        begins = Beginning(kept.suspects, is_moved)
        following = _Call(call.wrapper.model, call.wrapper.function, call.batch, call.tensors, begins)
        try:
            again, _ = _trace(following, device, fake)
            is_same = following.wrapper.kept[-1].leaves_the_same and _are_same(traced, again)
            is_same = is_same and plain_values(call.result) == plain_values(following.result)
        except Exception:  # it met a tensor of the first call, or a number that can't be
            is_same = False
        if not is_same:
            raise kept.suspicion


def _are_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two traces have the same operations and constants."""

    def text(node: fx.Node) -> tuple[str, ...]:
        return node.op, str(node.target), repr(node.args), repr(node.kwargs)

    if list(map(text, one.graph.nodes)) != list(map(text, other.graph.nodes)):
        return False
    pairs = [
        (getattr(one, str(n.target)), getattr(other, str(n.target))) for n in one.graph.nodes if n.op == "get_attr"
    ]
    return all(
        _are_same(a, b) if isinstance(a, fx.GraphModule) else a is b or (a.dtype == b.dtype and torch.equal(a, b))
        for a, b in pairs
    )


def _without_side_effects(captured: Captured) -> None:
    """Leave in the graph what its outputs and its states need, in a form that can be cut anywhere."""
    drop_empty_parts(captured.graph)
    drop_unread(captured.graph)
    for node in copy_inputs_that_are_written(captured.graph, captured.inputs):
        captured.module_path[node] = ""
    make_functional(captured.graph)
    drop_unread(captured.graph)
    for node, reader in copy_states_that_are_read(captured.graph, captured.states).items():
        captured.module_path[node] = captured.module_path.get(reader, "")


def _run_once(captured: Captured, fake: FakeTensorMode) -> None:
    """Run the graph on fake tensors: note where gradients flow, and see that it writes what the code wrote."""
    with fake:
        given = {node: torch.empty_like(node.meta["val"]) for node in [*captured.states.values(), *captured.inputs]}
        for name in captured.trained & captured.states.keys():
            given[captured.states[name]].requires_grad_()
        found, values = run_on_fakes(captured.graph, given, captured.states, captured.constants)
    check_same_writes(captured.log, found, "its graph")
    for node in captured.graph.nodes:
        node.meta["flows"] = wants_gradient(values.get(node))


class _Call:
    """The function of (states, inputs) that is traced."""

    def __init__(
        self,
        model: torch.nn.Module,
        function: Function,
        batch: Any,
        tensors: Mapping[str, torch.Tensor],
        begins: Beginning | None = None,
    ) -> None:
        self.batch, self.tensors = batch, tensors
        self.wrapper = _Wrapper(model, function, begins)
        self.result: Any = None
        self.log: list[Write] = []

    def __call__(self, states: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        left = iter(inputs)
        batch = map_tensors(self.batch, lambda _: next(left))
        held = dict(zip(self.tensors, states, strict=True))
        before = {name: _memory(tensor) for name, tensor in held.items()}
        log = WriteLog(held)
        with log:
            self.result = functional_call(
                self.wrapper, {f"model.{name}": tensor for name, tensor in held.items()}, (batch,)
            )
        self.log = log.writes
        for name, tensor in held.items():
            if _memory(tensor) != before[name] or tensor.grad is not None:
                raise WorkloadError(
                    "a model that writes its buffers in place and leaves gradients to the backward pass",
                    f"its forward gives {name} other memory, or a gradient",
                    "write in place under torch.no_grad(): tensor.copy_(...)",
                )
        return tensors_in(self.result)

    def rebuild(self, outputs: list[Any]) -> Any:
        """The flat outputs as `function` returned them."""
        left = iter(outputs)
        return map_tensors(self.result, lambda _: next(left))


class _Wrapper(torch.nn.Module):
    """Lets `functional_call` reach the model that a plain function calls."""

    def __init__(self, model: torch.nn.Module, function: Function, begins: Beginning | None) -> None:
        super().__init__()
        self.model, self.function, self.begins = model, function, begins
        self.kept: list[KeptValues] = []

    def forward(self, batch: Any) -> Any:
        """Call the function, and see what it keeps outside its buffers."""
        model, function = self.model, self.function
        kept = KeptValues(model, function, _depends_on_given, self.begins)
        self.kept.append(kept)
        with kept.watching():  # this module is no part of what is watched
            return function(model, batch)


def _depends_on_given(tensor: torch.Tensor) -> bool:
    """Whether a value of the trace under way depends on a state or on the batch; as far as that can be told."""
    mode = get_proxy_mode()
    slot: Any = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if slot is None:
        return isinstance(tensor, FakeTensor)
    todo, seen = [slot.proxy.node], set()
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride()


def _fake_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _plain_random_state() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else (None, b"", 0)
    return random.getstate(), state[2], bytes(state[1])


@contextmanager
def _watched_modules(model: torch.nn.Module) -> Iterator[list[tuple[int, str]]]:
    """Note at which node of the graph each module begins, and where its caller goes on."""
    names = {module: name for name, module in model.named_modules()}
    entries: list[tuple[int, str]] = []
    stack: list[str] = []

    def note() -> None:
        mode = get_proxy_mode()
        if mode is not None:
            entries.append((len(mode.tracer.graph.nodes), stack[-1] if stack else ""))

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        stack.append(names.get(module, stack[-1] if stack else ""))
        note()

    def leave(module: torch.nn.Module, arguments: Any, result: Any) -> None:
        stack.pop()
        note()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield entries
    finally:
        for handle in handles:
            handle.remove()


def _places(graph: fx.Graph, entries: list[tuple[int, str]]) -> dict[fx.Node, str]:
    module_path, here, left = {}, "", iter([*entries, (sys.maxsize, "")])
    following = next(left)
    for index, node in enumerate(graph.nodes):
        while following[0] <= index:
            here = following[1]
            following = next(left)
        module_path[node] = here
    return module_path


@contextmanager
def _refusals() -> Iterator[None]:
    fix = "or train it by replicate or shard, which run the model's own code"
    try:
        yield
    except PacelineError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise WorkloadError(
            "a model whose path depends on shapes alone, so that it can be split",
            f"it looks at values: {_where(error)}",
            "compute both sides and choose by torch.where (rows that don't count: times a mask, or ignore_index), "
            + fix,
        ) from error
    except Exception as error:
        if "BF16 type" in str(error):  # of grouped matrix products: their shapes alone are known for bfloat16 only
            fix = 'for experts of transformers write config._experts_implementation = "batched_mm", ' + fix
        raise WorkloadError(
            "a model that can be written down as a graph of torch operations, so that it can be split",
            f"{type(error).__name__} at {_where(error)}: {str(error).strip().partition(chr(10))[0]:.200}",
            "start it alone (python FILE); if it trains so, leave out what that line does, " + fix,
        ) from error


def _check_constants(constants: Mapping[str, Any]) -> None:
    for value in constants.values():
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                "a model that draws from torch's own random numbers",
                f"it uses a {type(value).__name__} of its own, which would begin anew with every graph",
                "draw without generator=..., or train it by replicate or shard",
            )
        if isinstance(value, FakeTensor):
            raise WorkloadError(
                "a model whose every value follows from its operations, so that it can be split",
                f"a value of shape {tuple(value.shape)} came from elsewhere (torch.func, kept from an earlier batch)",
                "compute it with plain torch operations in forward, or train it by replicate or shard",
            )


def _where(error: BaseException) -> str:
    """The line of the person's code that asked for a value."""
    found, trace = str(error).splitlines()[0], error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/paceline/graph/", "/paceline/verify/")):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _take_out_grad_mode(captured: Captured) -> None:
    """Mark what ran under `torch.no_grad`, and take the switches out: a cut between two would lose them."""
    is_off = False
    for node in list(captured.graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            is_off = not node.args[0]
            captured.graph.erase_node(node)
        elif is_off and node.op == "call_function":
            captured.no_grad.add(node)
    for node in captured.no_grad:
        written = written_inputs(node)
        if len(written) == 1 and written[0] not in captured.no_grad and written[0].op == "call_function":
            node.replace_all_uses_with(written[0])  # autograd does not see the write: readers keep their gradient
        for source in node.all_input_nodes:
            if source not in captured.no_grad and isinstance(source.meta.get("val"), torch.Tensor):
                with captured.graph.inserting_before(node):
                    cut = captured.graph.call_function(aten.detach.default, (source,))
                cut.meta["val"] = source.meta["val"].detach()
                captured.module_path[cut] = captured.module_path.get(node, "")
                node.replace_input_with(source, cut)


def _drop_unused(captured: Captured) -> None:
    nodes = set(captured.graph.nodes)
    captured.module_path = {node: name for node, name in captured.module_path.items() if node in nodes}
    captured.no_grad &= nodes
    captured.constants = {
        name: tensor
        for name, tensor in captured.constants.items()
        if any(node.op == "get_attr" and node.target == name for node in nodes)
    }
    for name, node in list(captured.states.items()):
        if not node.users:
            del captured.states[name]
            captured.graph.erase_node(node)


def skeleton(model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A copy of `model` whose parameters and buffers hold nothing; tied ones stay tied.

    Args:
        model: its tensors may hold values or not.
        dtype: of floating-point tensors, where it is to change.

    Raises:
        WorkloadError: a parameter has a hook, which sees whole gradients and would be lost with the values.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise WorkloadError(
                "a model whose parameters can be split",
                f"{name} has a hook on its gradient, which would see only a part of it",
                "put what the hook does into the loss or the optimizer, or train it by replicate",
            )

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="meta")

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(empty(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = empty(buffer)
    try:
        return copy.deepcopy(model, memo)
    except RuntimeError as error:
        name = next((n for n, m in model.named_modules() for v in vars(m).values() if _is_computed(v)), "a module")
        raise WorkloadError(
            "a model that can be copied without its values",
            f"{name} holds a computed tensor, or something else that can't be copied ({error!s:.60}...)",
            "use torch.nn.utils.parametrizations.weight_norm for torch.nn.utils.weight_norm, keep computed tensors out "
            "of the model, or train it by replicate",
        ) from error


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf
