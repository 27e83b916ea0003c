"""Labels of dimensions: the form in which a rule says what may be split. See `rules.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from paceline.torch_private.operations import schema_of

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
        """Return all labels, each once, in the order in which they are met."""
        labels: dict[str, None] = {}
        for of_tensor in (*self.inputs, self.output):
            labels.update(dict.fromkeys(filter(None, of_tensor)))
        return list(labels)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the node's tensor inputs in the order of its arguments; one that is given twice stands twice."""
    # Not `node.all_input_nodes`, which has each input once: rules count arguments.
    inputs: list[fx.Node] = []

    def note(value: fx.Node) -> fx.Node:
        inputs.append(value)
        return value

    fx.node.map_arg((node.args, node.kwargs), note)
    return inputs


def argument(node: fx.Node, place: int, name: str, otherwise: Any = None) -> Any:
    """Return an argument of the node, by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, otherwise)


def arguments_by_name(node: fx.Node, arguments: Any, named: Any) -> dict[str, Any]:
    """Return the arguments of an operation of torch by name, in its order, those left out by default.

    Args:
        node: a call of the operation.
        arguments, named: in place of the node's own.
    """
    schema = schema_of(node.target).arguments  # type: ignore[arg-type]
    by_name = {of.name: of.default_value if of.has_default_value() else None for of in schema}
    return by_name | dict(zip(by_name, arguments, strict=False)) | dict(named)


def node_order(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the place of every node in its graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def outer_labels(rank: int) -> tuple[str, ...]:
    """Return labels of so many leading dimensions."""
    return tuple(f"b{index}" for index in range(rank))


def unless_broadcast(names: Sequence[str], shape: Sequence[int]) -> Labels:
    """Return the names of a tensor's dimensions, None for those of size 1, which are broadcast and never split."""
    labels: list[Label] = []
    for name, size in zip(names, shape, strict=True):
        labels.append(None if size == 1 else name)
    return tuple(labels)


def unlabelled(rank: int) -> Labels:
    """Return the labels of so many dimensions that must be whole."""
    return (None,) * rank


def labels_without(dims: Collection[int], rank: int) -> Labels:
    """Return labels of so many dimensions, of which those in `dims` must be whole."""
    labels: list[Label] = [f"d{dim}" for dim in range(rank)]
    for dim in dims:
        labels[dim] = None
    return tuple(labels)
