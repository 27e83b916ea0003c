"""Run a graph on fake tensors: shapes of every node, and the collectives that it would enter in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.graph.capture import Captured
from paceline.graph.stages import Stage


def dry_run(
    captured: Captured,
    shapes: Mapping[str, tuple[int, ...]],
    comm: AxisComm,
    precision: torch.dtype | None = None,
    with_backward: bool = False,
) -> Ledger:
    """Note the shape of every node of `captured` in its `meta`.

    Args:
        captured: the graph; its placeholders' `meta` says dtypes and full shapes.
        shapes: the states' local shapes.
        comm: the axis that the graph talks on; nothing is sent.
        precision: run under autocast to this dtype.
        with_backward: also run the first output's backward pass.

    Returns:
        What a rank would enter in the ledger.
    """
    mode = _mode_of(captured)
    kept, comm.ledger = comm.ledger, Ledger()
    values: dict[fx.Node, Any] = {}
    names = {node: name for name, node in captured.states.items()}
    try:
        with mode, ExitStack() as stack:
            if precision is not None:
                device = captured.device.type
                stack.enter_context(torch.autocast(device, dtype=precision))
            for node in captured.graph.nodes:
                values[node] = _value(node, values, captured, names, shapes, mode)
                node.meta["val"] = _detached(values[node])
            if with_backward:
                first = captured.output[0]
                if values[first].requires_grad:
                    values[first].backward()
        return comm.ledger
    finally:
        comm.ledger = kept


def _mode_of(captured: Captured) -> FakeTensorMode:
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            mode: FakeTensorMode = value.fake_mode  # type: ignore[attr-defined]
            return mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _value(
    node: fx.Node,
    values: dict[fx.Node, Any],
    captured: Captured,
    names: Mapping[fx.Node, str],
    shapes: Mapping[str, tuple[int, ...]],
    mode: FakeTensorMode,
) -> Any:
    if node.op == "placeholder":
        full = node.meta["val"]
        if node not in names:
            return full.detach()
        made = torch.empty(shapes.get(names[node], tuple(full.shape)), dtype=full.dtype, device=full.device)
        return made.requires_grad_(names[node] in captured.trained)
    if node.op == "get_attr":
        return mode.from_tensor(captured.constants[str(node.target)])
    if node.op == "output":
        return None
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
    with torch.set_grad_enabled(node not in captured.no_grad):
        return node.target(*arguments, **named)  # type: ignore[operator]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return [_detached(one) for one in value]
    return value


def stage_traffic(
    stage: Stage,
    captured: Captured,
    shapes: Mapping[str, tuple[int, ...]],
    comms: Sequence[AxisComm],
    recompute: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
    precision: torch.dtype | None = None,
) -> Ledger:
    """What one micro-batch's forward and backward through a stage enter in the ledger; nothing is sent.

    Args:
        stage: cut out of `captured`.
        captured: the graph, whose inputs' `meta` says shapes.
        shapes: the states' local shapes.
        comms: the axes that the graph talks on.
        recompute: wraps what is computed again in the backward pass.
        precision: run under autocast to this dtype.
    """
    ledger = Ledger()
    kept = [comm.ledger for comm in comms]
    for comm in comms:
        comm.ledger = ledger
    module = fx.GraphModule(captured.constants, stage.graph)
    try:
        with _mode_of(captured) as mode:
            mode.allow_non_fake_inputs = True
            states = []
            for name in stage.states:
                full = captured.states[name].meta["val"]
                made = torch.empty(shapes[name], dtype=full.dtype, device=full.device)
                states.append(made.requires_grad_(name in captured.trained))
            inputs = [captured.inputs[index].meta["val"] for index in stage.inputs]
            received = [
                torch.empty_like(value).requires_grad_(flows)
                for value, flows in zip(stage.received, stage.has_gradient, strict=True)
            ]
            with torch.autocast(captured.device.type, dtype=precision, enabled=precision is not None):
                outputs = recompute(module)(*states, *inputs, *received)
            roots = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
            roots = roots if stage.sent else roots[:1]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    finally:
        for comm, before in zip(comms, kept, strict=True):
            comm.ledger = before
    return ledger
