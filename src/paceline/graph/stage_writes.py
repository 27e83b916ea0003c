"""Check that the stages of a graph, as one rank runs them, write into the states as the model's code did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.comm.collectives import AxisComm
from paceline.graph.capture import Captured
from paceline.graph.fake_run import fake_state, ledger_of, mode_of
from paceline.graph.stages import Stage
from paceline.graph.writes import Write, check_same_writes, run_on_fakes
from paceline.nouns.errors import WorkloadError


def check_stage_writes(
    stages: Sequence[Stage],
    captured: Captured,
    shapes: Mapping[str, tuple[int, ...]],
    comms: Sequence[AxisComm],
    precision: torch.dtype | None = None,
) -> None:
    """Raise WorkloadError unless the stages, one after another, write what the model's code wrote.

    Args:
        stages: all of them, cut out of `captured`.
        captured: the graph, with the log of what the code wrote.
        shapes: the states' local shapes.
        comms: the axes that the graphs talk on; nothing is sent.
        precision: run under autocast to this dtype.
    """
    # Most models write nothing: the check costs them nothing.
    if not captured.log:
        return
    writes: list[Write] = []
    autocast = torch.autocast(captured.device.type, dtype=precision, enabled=precision is not None)
    with ledger_of(comms), mode_of(captured), autocast:
        for stage in stages:
            writes += _writes_of(stage, captured, shapes)
    check_same_writes(captured.log, writes, "the graph of this rank")
    # Two stages hold copies of the same buffer: what one writes, the other would not read.
    for state in dict.fromkeys(write.state for write in captured.log):
        holders = [number for number, stage in enumerate(stages) if state in stage.states]
        if len(holders) != 1:
            raise WorkloadError(
                "a buffer should be read and written in one pipeline stage",
                f"{state} is written in one stage and read in another",
                "use fewer pipeline stages, or tensor, replicate or shard",
            )


def _writes_of(stage: Stage, captured: Captured, shapes: Mapping[str, tuple[int, ...]]) -> list[Write]:
    """Run a stage on fake tensors; return what it writes into its states."""
    placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
    state_nodes = dict(zip(stage.states, placeholders, strict=False))
    arguments = {node: torch.empty_like(node.meta["val"]) for node in placeholders}
    for name, node in state_nodes.items():
        full_shape = tuple(captured.states[name].meta["val"].shape)
        arguments[node] = fake_state(captured, name, shapes.get(name, full_shape))
    received = placeholders[len(placeholders) - len(stage.received) :]
    for node, flows in zip(received, stage.has_gradient, strict=True):
        arguments[node].requires_grad_(flows)
    writes, _ = run_on_fakes(stage.graph, arguments, state_nodes, captured.constants)
    return writes
