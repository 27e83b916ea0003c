"""Take the watched step once more in one process: `python -m paceline.verify.ranks.replay_step SETTINGS.json`.

Every rank's micro-batches go through the whole model, with the same looks at its modules (or, where the ranks ran a
graph, at the operations of that graph before it was split), so that the first value that differs can be found.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import fx

from paceline.comm.dtypes import widen
from paceline.launch.process_exit import exit_process
from paceline.nouns.mesh import GRAPH_AXES, PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.torch_private.modules import BatchNorm
from paceline.torch_private.tensors import tree_leaves
from paceline.train.plain_step import checked, data_of, micro_batch
from paceline.train.seed import seed_everything
from paceline.verify.ranks.child import answer
from paceline.verify.ranks.placed_draws import call_of_the_loss
from paceline.verify.ranks.randomness import controlled
from paceline.verify.ranks.watch import ModuleWatch, Take, prints_of, watch_graph, watch_modules


def main(workload: Workload, settings: dict[str, Any], folder: Path) -> None:
    """Write replay.json: by part of the batch, what was watched, and each micro-batch's loss."""
    ranges_of_parts: dict[int, list[list[int]]] = {}
    weight = 1.0
    for rank in range(settings["ranks"]):
        # Ranks of `tensor` and `pipeline` have the same part, and one of them is enough.
        watched = json.loads((folder / f"watched-{rank}.json").read_text())
        ranges_of_parts.setdefault(watched["data_part"], watched["pieces"])
        weight = watched["weights"][0]
    mesh = Mesh.parse(Plan.of(settings["plan"], "the settings").mesh)
    is_graph = bool(mesh.used(GRAPH_AXES))
    replayed = {}
    for part, ranges in ranges_of_parts.items():
        replayed[part] = replay(workload, ranges, ranges_of_parts, is_graph, weight)
    (folder / "replay.json").write_text(json.dumps(replayed))


def replay(
    workload: Workload,
    ranges: list[list[int]],
    ranges_of_parts: dict[int, list[list[int]]],
    is_graph: bool,
    weight: float,
) -> dict[str, Any]:
    """Take one part's micro-batches forwards and backwards; batch norm sees the whole batch, as it does on the ranks.

    Args:
        workload: the user's workload.
        ranges: the first and last position (exclusive) of each micro-batch of the part.
        ranges_of_parts: the ranges of all parts.
        is_graph: True if the ranks ran a graph.
        weight: the weight of the whole batch.
    """
    # Ranks with one micro-batch take the gradient of the mean, those with several that of the sum.
    has_one_each = all(len(part_ranges) <= 1 for part_ranges in ranges_of_parts.values())
    divisor = weight if has_one_each else 1.0
    seed_everything(workload.seed)
    model = widen(workload.model()).train()
    data = data_of(workload)
    watch = ModuleWatch()
    batches = [micro_batch(workload, data, range(start, stop), True) for start, stop in ranges]
    samples = [prints_of(batch) for batch in batches]
    has_batch_norm = any(isinstance(module, BatchNorm) for module in model.modules())
    needs_whole_batch = has_batch_norm and len(ranges_of_parts) > 1
    if needs_whole_batch and is_graph:  # its graph would need the other parts' statistics
        return {**watch.to_json(), "samples": samples, "losses": []}
    # Batch norm takes its statistics over all ranks' samples. So the whole batch goes through the model, and of every
    # value with a row per sample this part's rows are looked at.
    take = None
    if needs_whole_batch:
        positions = _all_positions(ranges_of_parts)
        batches = [micro_batch(workload, data, positions, True)]
        take = _taker(len(positions), _rows_of(positions, ranges))
    losses = []
    number = [0]  # of the micro-batch that runs
    with ExitStack() as stack:
        stack.enter_context(controlled())
        if is_graph:
            run = _graph_runner(workload, model, watch)
        else:
            run = _module_runner(workload, model, watch, number, take)
        for index, batch in enumerate(batches):
            number[0] = index
            loss_sum, own_weight = checked(run(batch))
            (loss_sum / divisor).backward()
            losses.append([float(loss_sum.detach()), float(own_weight)])
    if needs_whole_batch:  # the loss is not this part's
        losses = []
    return {**watch.to_json(), "samples": samples, "losses": losses}


def _all_positions(ranges_of_parts: dict[int, list[list[int]]]) -> list[int]:
    positions: list[int] = []
    for ranges in ranges_of_parts.values():
        for start, stop in ranges:
            positions += range(start, stop)
    return positions


def _rows_of(positions: list[int], ranges: list[list[int]]) -> slice:
    """Return the rows of a part's samples, which follow each other, in the whole batch."""
    start = positions.index(ranges[0][0])
    return slice(start, start + sum(stop - start for start, stop in ranges))


def _taker(samples: int, rows: slice) -> Take:
    """Return a function that takes a part's rows of a value that has a row for each of all samples, else None."""

    def take(value: torch.Tensor) -> torch.Tensor | None:
        if value.dim() and value.shape[0] == samples:
            return value[rows]
        return None

    return take


def _module_runner(
    workload: Workload, model: torch.nn.Module, watch: ModuleWatch, number: list[int], take: Take | None
) -> Callable[[Any], Any]:
    """Return the loss of a batch, in which every module is watched."""
    watch_modules(model, watch, lambda: str(number[0]), take)
    return lambda batch: _loss(workload, model, batch)


def _loss(workload: Workload, model: torch.nn.Module, batch: Any) -> Any:
    with call_of_the_loss(model):
        return workload.loss(model, batch)


def _graph_runner(workload: Workload, model: torch.nn.Module, watch: ModuleWatch) -> Callable[[Any], Any]:
    """Return the loss of a batch by its captured graph, in which every operation is watched."""
    from paceline.graph.capture import capture

    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def run(batch: Any) -> Any:
        captured = capture(model, functools.partial(_loss, workload), batch, torch.device("cpu"))
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        values = {node: states[name] for name, node in captured.states.items()}
        values.update(zip(captured.inputs, tensors, strict=True))
        arguments = [values[node] for node in captured.graph.nodes if node.op == "placeholder"]
        watch_graph(watch, dict.fromkeys(PLACE_AXES, (0, 1)))(captured.graph)
        return captured.rebuild(fx.GraphModule(captured.constants, captured.graph)(*arguments))

    return run


if __name__ == "__main__":
    exit_process(answer(main))
