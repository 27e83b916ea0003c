"""Find the operations of a graph that write into memory that outlives it, and check that none of them is lost.

A model may write into its buffers in the forward pass: running statistics, a codebook, a counter. Such a write is
an effect: no value of the graph need depend on it, so every pass over a graph could drop it. `WriteLog` notes what
the model's code writes while it is traced. Every graph that is made of the trace is run once more on fake tensors,
under a log of its own; a write that is missing there raises WorkloadError.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.nouns.errors import WorkloadError
from paceline.torch_private.operations import FakeTensor, OpOverload, TorchDispatchMode, schema_of
from paceline.torch_private.tensors import storage_key

aten = torch.ops.aten
# Norms that update running statistics, which their schema does not say: arguments 3 and 4, where argument 5 is set.
_NORMS = (
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.native_batch_norm.default,
    aten._batch_norm_impl_index.default,
)


@dataclass(frozen=True, slots=True)
class Write:
    """One write of the model's code into a state.

    Attributes:
        state: the parameter's or buffer's name.
        operation: the operation's name, such as "aten.add_.Tensor".
        line: "file:line" of the code that asked for it.
    """

    state: str
    operation: str
    line: str


class WriteLog(TorchDispatchMode):
    """Notes every write into a state while the model's code runs on fake tensors.

    Raises WorkloadError where the code writes into a tensor that is neither a parameter nor a buffer of the model,
    nor made in this forward pass: ranks hold no copy of it, and no checkpoint has it.

    Args:
        states: the fake states, by name.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The caller holds the states, so no other tensor gets their addresses.
        self.names = {storage_key(tensor): name for name, tensor in states.items()}
        self.writes: list[Write] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then run the operation."""
        # Some schemas of batch norm mark no argument as written, although the kernel updates the statistics in place.
        named = kwargs or {}
        if "batch_norm" in schema_of(function).name and len(args) > 5:  # which one runs depends on more than the model
            # In evaluation the kernel may be one that takes no such argument: number 5 is its momentum.
            is_training = args[5] and not schema_of(function).name.endswith(("_no_training", "_no_update"))
            statistics = args[3:5] if is_training else ()
            for value in statistics:
                if isinstance(value, torch.Tensor):  # one overload has no statistics, and other arguments there
                    self._note("aten.batch_norm", value)
        elif schema_of(function).is_mutable:
            for value in written_values(schema_of(function), args, named):
                self._note(str(function), value)
        return function(*args, **named)

    def _note(self, function: str, value: torch.Tensor) -> None:
        if not isinstance(value, FakeTensor):
            raise WorkloadError(
                "the model should write to parameters and buffers alone",
                f"{function} at {user_line()} writes into a tensor of shape {tuple(value.shape)} that is neither",
                "register it in the model: self.register_buffer(name, tensor)",
            )
        name = self.names.get(storage_key(value))
        if name is not None:
            self.writes.append(Write(name, function, user_line()))


def wants_gradient(value: Any) -> bool:
    """True if a gradient flows back through a node's value."""
    return any(tensor.requires_grad for tensor in _tensors_of(value))


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value, which may be one, several or none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def user_line() -> str:
    """Return the innermost line that is neither torch's nor of this package's capture."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/paceline/graph/", "/paceline/verify/")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that this node's schema says it writes into; a norm's statistics are not among them."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    values = written_values(schema_of(node.target), node.args, node.kwargs)
    return [value for value in values if isinstance(value, fx.Node)]


def running_statistics(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a norm updates, which its schema does not say."""
    if node.target not in _NORMS or not node.args[5]:
        return []
    return [source for source in node.args[3:5] if isinstance(source, fx.Node)]


def storage_of(node: fx.Node) -> int | None:
    """Return the number of the memory that a node's tensor lies in, or None when it is no tensor."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def memories_of(node: fx.Node) -> set[int]:
    """Return the numbers of the memory of a node's tensor, or of its several tensors."""
    return {storage_key(tensor) for tensor in _tensors_of(node.meta.get("val"))}


def written_by(node: fx.Node) -> set[int | None]:
    """Return the memory that a node writes into, through views too; that of a norm's statistics is among it."""
    return {storage_of(source) for source in [*written_inputs(node), *running_statistics(node)]}


def memory_written(graph: fx.Graph) -> set[int | None]:
    """Return the memory that any operation of a graph writes into."""
    return set().union(*map(written_by, graph.nodes))


def check_same_writes(expected: Sequence[Write], actual: Sequence[Write], graph_name: str) -> None:
    """Raise WorkloadError unless a graph writes into every state as the model's code did, write for write.

    Args:
        expected: the writes of the code.
        actual: the writes of the graph.
        graph_name: the graph's name, for the message.
    """
    for state in dict.fromkeys(write.state for write in expected):  # each once, in order
        missing = [write for write in expected if write.state == state]
        operations = [write.operation for write in actual if write.state == state]
        if [write.operation for write in missing] == operations:
            continue
        # What is left in `missing` has no counterpart: the first of it is named.
        for operation in operations:
            same = next((write for write in missing if write.operation == operation), None)
            if same is not None and len(missing) > 1:  # one stays: the message needs it
                missing.remove(same)
        raise WorkloadError(
            "the split model should write to its buffers as the model does",
            f"{missing[0].operation} at {missing[0].line} writes into {state}, and {graph_name} would not",
            "write once, by buffer.copy_(new value) under torch.no_grad(), or train it by replicate or shard",
        )


def run_on_fakes(
    graph: fx.Graph,
    placeholders: Mapping[fx.Node, torch.Tensor],
    states: Mapping[str, fx.Node],
    constants: Mapping[str, Any],
) -> tuple[list[Write], dict[fx.Node, Any]]:
    """Run a graph on fake tensors; return what it writes into its states, and the value of every node.

    Args:
        graph: a graph of operations.
        placeholders: a fake tensor for each placeholder.
        states: which placeholders are states.
        constants: tensors by the name of their `get_attr` node.
    """
    log = WriteLog({name: placeholders[node] for name, node in states.items()})
    values: dict[fx.Node, Any] = dict(placeholders)
    with torch.enable_grad(), log:  # what a norm runs, and what its schema says, depends on whether a gradient is due
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node] = constants[str(node.target)]
            elif node.op == "call_function":
                arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
                values[node] = node.target(*arguments, **named)
    return log.writes, values


def written_values(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a schema marks as written; a list of tensors as its elements."""
    written: list[Any] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        written.extend(value if isinstance(value, list | tuple) else [value])
    return [value for value in written if value is not None]
