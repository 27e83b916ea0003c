"""Run a graph on fake tensors, for the shapes of every node and for the collectives that it would enter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.graph.capture import Captured
from paceline.graph.stages import Stage
from paceline.graph.writes import run_on_fakes, wants_gradient
from paceline.torch_private.operations import FakeTensorMode


def dry_run(
    captured: Captured,
    shapes: Mapping[str, tuple[int, ...]],
    comms: Sequence[AxisComm],
    precision: torch.dtype | None = None,
    with_backward: bool = False,
) -> Ledger:
    """Note the shape of every node of `captured` in its `meta`.

    Args:
        captured: the captured graph; its placeholders' `meta` says dtypes and full shapes.
        shapes: the states' local shapes.
        comms: the axes that the graph communicates over; nothing is sent.
        precision: run under autocast to this dtype.
        with_backward: also run the first output's backward pass.

    Returns:
        What a rank would enter in the ledger.
    """
    mode = mode_of(captured)
    names = {node: name for name, node in captured.states.items()}
    autocast = torch.autocast(captured.device.type, dtype=precision, enabled=precision is not None)
    with ledger_of(comms) as ledger, mode, autocast:
        placeholders = {}
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                full, name = node.meta["val"], names.get(node, "")
                full_shape = tuple(full.shape)
                placeholders[node] = fake_state(captured, name, shapes.get(name, full_shape)) if name else full.detach()
        constants = {name: mode.from_tensor(value) for name, value in captured.constants.items()}
        _, values = run_on_fakes(captured.graph, placeholders, captured.states, constants)
        for node in captured.graph.nodes:
            node.meta["flows"] = wants_gradient(values.get(node))
            node.meta["val"] = _detached(values.get(node))
        if with_backward:
            first = captured.output[0]
            if values[first].requires_grad:
                values[first].backward()
    return ledger


@contextmanager
def ledger_of(comms: Sequence[AxisComm]) -> Iterator[Ledger]:
    """Enter the messages of these axes in a ledger of its own, which is returned, and not in theirs."""
    ledger = Ledger()
    before = [comm.ledger for comm in comms]
    for comm in comms:
        comm.ledger = ledger
    try:
        yield ledger
    finally:
        for comm, ledger in zip(comms, before, strict=True):
            comm.ledger = ledger


def mode_of(captured: Captured) -> FakeTensorMode:
    """Return the fake mode that the graph's values are of: fake tensors of two modes can't be mixed."""
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            mode: FakeTensorMode = value.fake_mode  # type: ignore[attr-defined]
            return mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_state(captured: Captured, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that stands for this rank's piece of a state; the graph's fake mode must be entered."""
    full = captured.states[name].meta["val"]
    piece = torch.empty(shape, dtype=full.dtype, device=full.device)
    return piece.requires_grad_(name in captured.trained)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return [_detached(item) for item in value]
    return value


def stage_traffic(
    stage: Stage,
    captured: Captured,
    shapes: Mapping[str, tuple[int, ...]],
    comms: Sequence[AxisComm],
    recompute: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
    precision: torch.dtype | None = None,
) -> Ledger:
    """Return a ledger of one micro-batch's forward and backward passes through a stage; nothing is sent.

    Args:
        stage: cut out of `captured`.
        captured: the graph, whose inputs' `meta` says shapes.
        shapes: the states' local shapes.
        comms: the axes that the graph talks on.
        recompute: wraps what is computed again in the backward pass.
        precision: run under autocast to this dtype.
    """
    module = fx.GraphModule(captured.constants, stage.graph)
    # Collectives on fake tensors send nothing, but enter themselves in the ledger of their axis.
    with ledger_of(comms) as ledger, mode_of(captured) as mode:
        mode.allow_non_fake_inputs = True
        states = [fake_state(captured, name, shapes[name]) for name in stage.states]
        inputs = [captured.inputs[index].meta["val"] for index in stage.inputs]
        received = []
        for value, flows in zip(stage.received, stage.has_gradient, strict=True):
            received.append(torch.empty_like(value).requires_grad_(flows))
        with torch.autocast(captured.device.type, dtype=precision, enabled=precision is not None):
            outputs = recompute(module)(*states, *inputs, *received)
        roots = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
        if not stage.sent:
            roots = roots[:1]  # the loss, without what else the function returns
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return ledger
