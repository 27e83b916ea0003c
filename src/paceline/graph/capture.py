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
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from paceline.comm.leaves import map_tensors, tensors_in
from paceline.graph.factories import rejoin_copies
from paceline.graph.functional import drop_empty_parts, make_functional
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
        place: path of the module that each node was computed in.
        trained: names of the states that want a gradient.
        buffers: names of those that are no parameters.
    """

    graph: fx.Graph
    states: dict[str, fx.Node]
    inputs: list[fx.Node]
    constants: dict[str, torch.Tensor]
    rebuild: Callable[[list[Any]], Any]
    place: dict[fx.Node, str]
    trained: set[str]
    buffers: set[str]
    device: torch.device
    no_grad: set[fx.Node] = field(default_factory=set)  # computed under torch.no_grad

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
    with fake:
        states = [_fake_like(tensor, device) for tensor in tensors.values()]
        inputs = [_fake_like(tensor, device) for tensor in tensors_in(batch)]
    call = _Call(model, function, batch, list(tensors))
    state_before = _plain_random_state()
    with _watched_modules(model) as entries, _refusals(call), _gradients_as_written(), _running, fake:
        traced = make_fx(call, pre_dispatch=True)(states, inputs)
    rejoin_copies(traced)
    _check_constants({str(n.target): getattr(traced, str(n.target)) for n in traced.graph.nodes if n.op == "get_attr"})
    if _plain_random_state() != state_before:
        raise WorkloadError(
            "a model whose every step computes the same operations",
            "it draws from Python's or numpy's random numbers, and the path it takes may depend on them",
            "draw from torch, or train it by replicate or shard, which run the model's own code",
        )
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
        place=_places(traced.graph, entries),
        trained=trained,
        buffers={name for name, _ in model.named_buffers()},
        device=device,
    )
    _take_out_grad_mode(captured)
    drop_empty_parts(captured.graph)
    captured.graph.eliminate_dead_code()
    make_functional(captured.graph)
    captured.graph.eliminate_dead_code()
    _drop_unused(captured)
    for node in captured.graph.nodes:  # what the graphs that are made of this one carry along
        node.meta["original"], node.meta["module"] = node.name, captured.place.get(node, "")
    return captured


class _Call:
    """The function of (states, inputs) that is traced."""

    def __init__(self, model: torch.nn.Module, function: Function, batch: Any, names: list[str]) -> None:
        self.batch, self.names = batch, names
        self.wrapper = _Wrapper(model, function)
        self.result: Any = None

    def __call__(self, states: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        left = iter(inputs)
        batch = map_tensors(self.batch, lambda _: next(left))
        given = {f"model.{name}": tensor for name, tensor in zip(self.names, states, strict=True)}
        self.wrapper.expected = given
        self.result = functional_call(self.wrapper, given, (batch,))
        return tensors_in(self.result)

    def rebuild(self, outputs: list[Any]) -> Any:
        """The flat outputs as `function` returned them."""
        left = iter(outputs)
        return map_tensors(self.result, lambda _: next(left))


class _Wrapper(torch.nn.Module):
    """Lets `functional_call` reach the model that a plain function calls."""

    def __init__(self, model: torch.nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function
        self.expected: dict[str, torch.Tensor] = {}

    def forward(self, batch: Any) -> Any:
        """Call the function, and see that it left every buffer where it was."""
        result = self.function(self.model, batch)
        for name, tensor in self.model.named_buffers():
            if tensor is not self.expected.get(f"model.{name}", tensor):
                raise WorkloadError(
                    "a model that writes its buffers in place",
                    f"its forward puts another tensor in the place of {name}",
                    f"write self.{name.rpartition('.')[2]}.copy_(...) instead of assigning it",
                )
        return result


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
    place, here, left = {}, "", iter([*entries, (sys.maxsize, "")])
    following = next(left)
    for index, node in enumerate(graph.nodes):
        while following[0] <= index:
            here = following[1]
            following = next(left)
        place[node] = here
    return place


@contextmanager
def _gradients_as_written() -> Iterator[None]:
    """Refuse what a graph of forward operations would lose without a word: gradients that are written by hand."""
    apply, hook, grad = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook, torch.autograd.grad

    def refuse(what: str, name: str) -> NoReturn:
        raise WorkloadError(
            "a model whose gradients follow from its operations, so that it can be split",
            f"{what} {name} changes them",
            "write it with torch operations, use checkpoint(..., use_reentrant=False) if that is what it is, or train "
            "it by replicate or shard, which run the model's own code",
        )

    def checked(cls: Any, *arguments: Any, **named: Any) -> Any:
        if cls.__name__ == "_NoopSaveInputs":  # of non-reentrant checkpoint: passes no gradient
            return apply.__func__(cls, *arguments, **named)
        refuse("the autograd function", f"{cls.__module__}.{cls.__qualname__}")

    def hooked(tensor: torch.Tensor, function: Any) -> Any:
        refuse("the tensor hook", getattr(function, "__qualname__", repr(function)))

    def differentiated(*arguments: Any, **named: Any) -> Any:
        refuse("torch.autograd.grad", "in the forward pass or the loss")

    torch.autograd.grad = differentiated
    torch.autograd.Function.apply = classmethod(checked)  # type: ignore[method-assign, assignment]
    torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.autograd.grad = grad
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


@contextmanager
def _refusals(call: _Call) -> Iterator[None]:
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
        raise WorkloadError(
            "a model that can be written down as a graph of torch operations, so that it can be split",
            f"{type(error).__name__} at {_where(error)}: {str(error).strip().partition(chr(10))[0]:.200}",
            f"see that it trains on one rank, leave out what that line does, {fix}",
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
        for source in node.all_input_nodes:
            if source not in captured.no_grad and isinstance(source.meta.get("val"), torch.Tensor):
                with captured.graph.inserting_before(node):
                    cut = captured.graph.call_function(aten.detach.default, (source,))
                cut.meta["val"] = source.meta["val"].detach()
                captured.place[cut] = captured.place.get(node, "")
                node.replace_input_with(source, cut)


def _drop_unused(captured: Captured) -> None:
    nodes = set(captured.graph.nodes)
    captured.place = {node: name for node, name in captured.place.items() if node in nodes}
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
