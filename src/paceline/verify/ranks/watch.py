"""Looks on while a step runs: what each module, or each operation of a graph, makes and what gradient comes back.

The same hooks are used on the ranks and in the one process that does their step again. A place is a module path with
the number of its call, or a node of the captured graph with the number of the micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from paceline.verify.judge.fingerprints import Print
from paceline.verify.ranks.fingerprint import fingerprint, is_shown

Take = Callable[[torch.Tensor], torch.Tensor | None]  # the part of a value that is looked at


class ModuleWatch:
    """Everything that was seen: `made` going forward, `back` the gradients, by place."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.made: dict[str, Print] = {}
        self.back: dict[str, Print] = {}
        self.modules: dict[str, str] = {}  # place to module path
        self.splits: set[str] = set()  # places whose numbers are this rank's share
        self.count: Counter[str] = Counter()
        self.graph: list[list[str]] = []  # what a rank's graph does: original node, module, exchange, made for

    def note(
        self, place: str, value: Any, module: str, places: torch.Tensor | None = None, take: Take | None = None
    ) -> None:
        """Look at a value, and later at its gradient."""
        seen = take(value) if take is not None and is_shown(value) else value
        if not isinstance(seen, torch.Tensor) or not is_shown(seen) or place in self.made:
            return
        self.order.append(place)
        self.made[place], self.modules[place] = fingerprint(seen, places), module
        if places is not None:
            self.splits.add(place)
        if value.requires_grad:

            def came_back(gradient: torch.Tensor) -> None:
                part = take(gradient) if take is not None else gradient
                if part is not None:
                    self.back[place] = fingerprint(part, places)

            value.register_hook(came_back)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "order": self.order, "made": self.made, "back": self.back, "modules": self.modules,
            "splits": sorted(self.splits), "graph": self.graph,
        }  # fmt: skip


def watch_modules(
    model: torch.nn.Module, watch: ModuleWatch, number: Callable[[], str], take: Take | None = None
) -> None:
    """Note what every module returns, as `MODULE#CALL/OUTPUT`.

    Args:
        model: the person's.
        watch: where it is noted.
        number: the present micro-batch, in words.
        take: the part of each value that is looked at.
    """
    for name, module in model.named_modules():

        def leave(module: torch.nn.Module, arguments: Any, result: Any, name: str = name) -> None:
            if torch._C._current_graph_task_id() != -1:  # computed again in a backward pass
                return
            call = watch.count[f"{number()}:{name}"]
            watch.count[f"{number()}:{name}"] += 1
            values = [one for one in tree_leaves(_plain(result)) if is_shown(one)]
            for index, value in enumerate(values):
                watch.note(f"{number()}:{name}#{call}/{index}", value, name, take=take)

        module.register_forward_hook(leave)


def _plain(result: Any) -> Any:
    return dict(result) if hasattr(result, "items") else result


def watch_graph(watch: ModuleWatch, part: int, parts: int) -> Callable[[fx.Graph], None]:
    """A function that adds to a graph's every value a look at it, as `MICRO-BATCH:NODE`."""

    def add(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            exchange = getattr(node.target, "__name__", "") if hasattr(node.target, "__self__") else ""
            if node.op == "call_function":
                facts = [
                    node.meta.get("original", ""),
                    node.meta.get("module", ""),
                    exchange,
                    node.meta.get("made_for", ""),
                ]
                watch.graph.append([str(fact) for fact in facts])
            if node.op != "call_function" or "original" not in node.meta:
                continue
            with graph.inserting_after(node):
                graph.call_function(_look(watch, node, part, parts), (node,))

    return add


def _look(watch: ModuleWatch, node: fx.Node, part: int, parts: int) -> Callable[[Any], None]:
    from paceline.comm.differentiable import take_piece

    name, module, placement = node.meta["original"], node.meta.get("module", ""), node.meta.get("lies")

    def look(value: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not is_shown(value):
            return
        micro = watch.count[name]
        watch.count[name] += 1
        places = None
        if placement is not None and not isinstance(placement, tuple):
            full = [*value.shape]
            full[placement.dim] = sum(placement.blocks)
            numel = torch.Size(full).numel()
            numbers = torch.arange(numel, dtype=torch.float64).view(full)
            places = take_piece(numbers, (placement.dim, placement.blocks), part, parts)
        elif isinstance(placement, tuple):
            return
        watch.note(f"{micro}:{name}", value, module, places)

    look.__name__ = "look"
    return look
