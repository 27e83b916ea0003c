"""Labels of dimensions: the form in which a rule says what may be split. See `rules.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

Label = str | None
Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """Labels of the dimensions of every tensor input, in the order of `tensor_inputs`, and of the output."""

    inputs: tuple[Labels, ...]
    output: Labels
    summed: frozenset[str] = frozenset()
    heavy: bool = False  # a matrix product: what its weight is split by decides the layout
    bias: int | None = None  # the input that is added once, after the sum

    @property
    def labels(self) -> list[str]:
        """All labels, each once, in the order in which they are met."""
        return list(dict.fromkeys(label for labels in (*self.inputs, self.output) for label in labels if label))


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The node's tensor inputs in the order of its arguments; one that is given twice stands twice."""
    found: list[fx.Node] = []

    def note(value: fx.Node) -> fx.Node:
        found.append(value)
        return value

    fx.node.map_arg((node.args, node.kwargs), note)
    return found


def argument(node: fx.Node, place: int, name: str, otherwise: Any = None) -> Any:
    """An argument of the node, by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, otherwise)


def outer_labels(rank: int) -> Labels:
    """Labels of so many leading dimensions."""
    return tuple(f"b{index}" for index in range(rank))
