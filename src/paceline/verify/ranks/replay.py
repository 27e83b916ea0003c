"""The watched step once more in one process: `python -m paceline.verify.ranks.replay SETTINGS.json`.

Every rank's micro-batches go through the whole model, with the same looks at its modules (or, where the ranks ran a
graph, at the operations of that graph before it was split), so that the first value that differs can be found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload
from paceline.train.seed import seed_everything
from paceline.verify.child_setup import read_settings
from paceline.verify.ranks.fingerprint import prints_of
from paceline.verify.ranks.randomness import controlled
from paceline.verify.ranks.reference_step import checked, data_of, micro_batch
from paceline.verify.ranks.watch import ModuleWatch, watch_graph, watch_modules


def main(path: Path) -> int:
    """Write replay.json: by part of the batch, what was seen, and each micro-batch's loss."""
    settings, folder = read_settings(path)
    workload = find_workload(settings["script"])
    parts: dict[int, list[list[int]]] = {}
    for rank in range(settings["ranks"]):
        facts = json.loads((folder / f"watched-{rank}.json").read_text())
        parts.setdefault(facts["data_part"], facts["pieces"])
    mesh = Mesh.parse(Plan.of(settings["plan"], "the settings").mesh)
    is_graph = mesh.size("tensor") * mesh.size("pipeline") > 1
    answer = {part: replay(workload, pieces, parts, is_graph) for part, pieces in parts.items()}
    (folder / "replay.json").write_text(json.dumps(answer))
    return 0


def replay(
    workload: Workload, pieces: list[list[int]], parts: dict[int, list[list[int]]], is_graph: bool
) -> dict[str, Any]:
    """One part's micro-batches, forwards and backwards; batch norm sees the whole batch, as it does on the ranks."""
    seed_everything(workload.seed)
    model = workload.model().double().train()
    data, watch = data_of(workload), ModuleWatch()
    samples = [prints_of(micro_batch(workload, data, range(start, stop), True)) for start, stop in pieces]
    micro, losses = [0], []
    norms = any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
    every = [position for rows in parts.values() for start, stop in rows for position in range(start, stop)]
    if norms and len(parts) > 1:
        if is_graph:
            return {
                **watch.to_json(),
                "samples": samples,
                "losses": [],
            }  # its graph would need the other parts' statistics
        rows = _rows_of(every, pieces)
        batches = [micro_batch(workload, data, every, True)]
        take = _taker(len(every), rows)
    else:
        batches = [micro_batch(workload, data, range(start, stop), True) for start, stop in pieces]
        take = None
    with ExitStack() as stack:
        stack.enter_context(controlled())
        run = _graph_runner(workload, model, watch) if is_graph else _module_runner(workload, model, watch, micro, take)
        for number, batch in enumerate(batches):
            micro[0] = number
            total, weight = checked(run(batch))
            total.backward()  # type: ignore[no-untyped-call]
            losses.append([float(total.detach()), float(weight)])
    return {**watch.to_json(), "samples": samples, "losses": losses if take is None else []}


def _rows_of(every: list[int], pieces: list[list[int]]) -> slice:
    start = every.index(pieces[0][0])
    return slice(start, start + sum(stop - start for start, stop in pieces))


def _taker(samples: int, rows: slice) -> Callable[[torch.Tensor], torch.Tensor | None]:
    return lambda value: value[rows] if value.dim() and value.shape[0] == samples else None


def _module_runner(workload: Workload, model: torch.nn.Module, watch: ModuleWatch, micro: list[int], take: Any) -> Any:
    watch_modules(model, watch, lambda: str(micro[0]), take)
    return lambda batch: workload.loss(model, batch)


def _graph_runner(workload: Workload, model: torch.nn.Module, watch: ModuleWatch) -> Any:
    from paceline.graph.capture import capture

    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def run(batch: Any) -> Any:
        captured = capture(model, workload.loss, batch, torch.device("cpu"))
        names = {node: name for name, node in captured.states.items()}
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        given = {**{n: states[name] for n, name in names.items()}, **dict(zip(captured.inputs, tensors, strict=True))}
        placeholders = [given[node] for node in captured.graph.nodes if node.op == "placeholder"]
        watch_graph(watch, 0, 1)(captured.graph)
        return captured.rebuild(fx.GraphModule(captured.constants, captured.graph)(*placeholders))

    return run


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
