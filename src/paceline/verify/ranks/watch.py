"""Watch a step: what each module, or each operation of a graph, makes, and what gradient comes back to it.

The same hooks are used on the ranks and in the one process that does their step again. A place is a module path with
the number of its call, or a node of the captured graph with the number of the micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from paceline.comm.pytree import dense_tensors_in
from paceline.torch_private.autograd import is_in_backward
from paceline.torch_private.tensors import tree_leaves
from paceline.verify.judge.fingerprints import Print

Take = Callable[[torch.Tensor], torch.Tensor | None]  # gives the part of a value that is looked at, if any
# Of the weights' cosines: two weightings by place, so that what cancels in one sum shows in the other.
_PHASES = (1.2345678, 0.7071067)


def fingerprint(values: torch.Tensor, places: torch.Tensor | None = None) -> Print:
    """Return the fingerprint of a tensor or of a piece of one.

    Args:
        values: the values of a tensor, or of a piece of one.
        places: the place of each element in the flattened full tensor, in the shape of `values`; None: it is whole.
    """
    flat = values.detach().reshape(-1).to(torch.float64)
    if places is None:
        places = torch.arange(flat.numel(), dtype=torch.float64)
    angles = places.reshape(-1).double()
    sums = [float((flat * torch.cos(angles * phase + 0.3)).sum()) for phase in _PHASES]
    return [*sums, float((flat * flat).sum()), float(flat.numel())]


def prints_of(batch: Any) -> list[Print]:
    """Return the fingerprints of a batch's tensors, complex ones apart."""
    return [fingerprint(tensor.to_dense()) for tensor in dense_tensors_in(batch) if not tensor.is_complex()]


def is_shown(value: Any) -> bool:
    """True if a value is a tensor that can be fingerprinted: dense, with floating numbers and memory."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    return value.is_floating_point() and not value.is_meta and not value.is_sparse


class ModuleWatch:
    """Fingerprints of values and gradients, by place: `made` going forward, `back` in the backward pass."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.made: dict[str, Print] = {}
        self.back: dict[str, Print] = {}
        self.modules: dict[str, str] = {}  # place to module path
        self.splits: set[str] = set()  # places whose numbers are this rank's share
        self.count: Counter[str] = Counter()
        self.graph: list[list[str]] = []  # what a rank's graph does: original node, module, exchange, made for, axis

    def enter(
        self,
        place: str,
        value: Any,
        module: str,
        places: torch.Tensor | None = None,
        take: Take | None = None,
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Enter a value, and later its gradient.

        Args:
            place: the place where it is made.
            value: the result of the module or operation; anything but a tensor of floating numbers is passed over.
            module: the path of the module that makes it.
            places: the place of each of its elements in the full tensor; None: it is whole.
            take: a function that returns the part of it that is looked at.
            shares: the shares of the value and of its gradient that this rank counts.
        """
        part = value
        if take is not None and is_shown(value):
            part = take(value)
        if not is_shown(part) or place in self.made:
            return
        self.order.append(place)
        self.made[place] = [number * shares[0] for number in fingerprint(part, places)]
        self.modules[place] = module
        if places is not None:
            self.splits.add(place)
        # Of the value itself, not of `part`: a slice is outside of the model's graph, and gets no gradient.
        if value.requires_grad:

            def came_back(gradient: torch.Tensor) -> None:
                gradient_part = take(gradient) if take is not None else gradient
                if gradient_part is not None:
                    *sums, numel = fingerprint(gradient_part, places)
                    self.back[place] = [*(number * shares[1] for number in sums), numel * shares[0]]

            value.register_hook(came_back)

    def to_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            "order": self.order, "made": self.made, "back": self.back, "modules": self.modules,
            "splits": sorted(self.splits), "graph": self.graph,
        }  # fmt: skip


def watch_modules(
    model: torch.nn.Module, watch: ModuleWatch, number: Callable[[], str], take: Take | None = None
) -> None:
    """Enter what every module returns, at the place `MICRO-BATCH:MODULE#CALL/OUTPUT`.

    Args:
        model: the user's model.
        watch: the watch in which it is entered.
        number: a function that returns the number of the current micro-batch.
        take: a function that returns the part of each value that is looked at.
    """
    for name, module in model.named_modules():

        def leave(module: torch.nn.Module, arguments: Any, result: Any, name: str = name) -> None:
            if is_in_backward():  # computed again in a backward pass
                return
            call = watch.count[f"{number()}:{name}"]
            watch.count[f"{number()}:{name}"] += 1
            values = filter(is_shown, tree_leaves(_plain(result)))
            for index, value in enumerate(values):
                watch.enter(f"{number()}:{name}#{call}/{index}", value, name, take=take)

        module.register_forward_hook(leave)


def _plain(result: Any) -> Any:
    """Return a mapping as a dict, into which `tree_leaves` looks whatever the mapping's own class is."""
    return dict(result) if hasattr(result, "items") else result


AxisPlaces = Mapping[str, tuple[int, int]]  # by axis, this rank's place and the axis's size


def watch_graph(watch: ModuleWatch, axes: AxisPlaces) -> Callable[[fx.Graph], None]:
    """Return a function that adds to every value of a graph a look at it, at the place `MICRO-BATCH:NODE`.

    Args:
        watch: the watch in which it is entered.
        axes: this rank's place on `context`, `expert` and `tensor`, and the size of each axis.
    """

    def add(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            watch.graph.append(_describe_node(node))
            if "original" in node.meta:
                with graph.inserting_after(node):
                    graph.call_function(_look(watch, node, axes), (node,))

    return add


def _describe_node(node: fx.Node) -> list[str]:
    """Return the original node, the module, the exchange, the node for which the exchange was made, and the axis."""
    # Exchanges are bound methods of `comm.differentiable.Exchanges`, and their axis is that of its ranks.
    owner = getattr(node.target, "__self__", None)
    exchange = getattr(node.target, "__name__", "") if hasattr(owner, "comm") else ""
    axis = owner.comm.axis if exchange else ""  # type: ignore[union-attr]
    meta = node.meta
    names = str(meta.get("original", "")), str(meta.get("module", ""))
    return [*names, str(exchange), str(meta.get("made_for", "")), axis]


def _look(watch: ModuleWatch, node: fx.Node, axes: AxisPlaces) -> Callable[[Any], None]:
    from paceline.comm.differentiable import take_piece
    from paceline.nouns.shard_spec import total_of

    name = node.meta["original"]
    module = node.meta.get("module", "")
    by_axis = {  # in the order in which they have split the graph
        "context": node.meta.get("lies_on_context"),
        "expert": node.meta.get("lies_on_expert"),
        "tensor": node.meta.get("lies"),
    }
    splits = {axis: placement for axis, placement in by_axis.items() if placement is not None}
    # Under `context` and `expert` every gradient is partial, also of what is whole. So values are shares too: of equal
    # ones each rank has its part.
    shares = (1.0, 1.0)
    is_partial = axes["context"][1] * axes["expert"][1] > 1
    if is_partial:
        alike = {axis: 1 if axis in splits else size for axis, (_, size) in axes.items()}
        shares = (1 / math.prod(alike.values()), 1 / alike["tensor"])

    def look(value: Any) -> None:
        if is_in_backward() or not is_shown(value):
            return
        micro_batch = watch.count[name]
        watch.count[name] += 1
        if any(isinstance(placement, tuple) for placement in splits.values()):
            return
        places = None
        if splits or is_partial:
            shape = [*value.shape]
            for placement in reversed(splits.values()):  # an earlier axis's piece is larger than a later one's
                shape[placement.dim] = total_of(placement.blocks)
            numel = torch.Size(shape).numel()
            places = torch.arange(numel, dtype=torch.float64).view(shape)
            for axis, placement in splits.items():
                places = take_piece(places, (placement.dim, placement.blocks), *axes[axis])
        watch.enter(f"{micro_batch}:{name}", value, module, places, shares=shares)

    look.__name__ = "look"
    return look
