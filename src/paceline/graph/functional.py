"""In-place operations become ordinary ones, so that a graph can be cut anywhere.

`y = relu_(x)` becomes `y = relu(x)`, and whoever read x afterwards reads y. That is the same only while no
view shares x's memory; where one does, the operation stays as it is and everything that shares the memory is
marked: it is computed whole, in order, on one rank (`shared_memory_groups`).
"""

from __future__ import annotations

import torch
from torch import fx

from paceline.nouns.errors import WorkloadError


def make_functional(graph: fx.Graph) -> None:
    """Replace every in-place operation whose input nothing else shares."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        written = written_input(node)
        if written is None or written.op in ("placeholder", "get_attr"):
            continue
        ordinary = _ordinary(node)
        shared = storage_of(written)
        others = [
            other
            for other in order
            if other is not written and other is not node and storage_of(other) == shared and shared is not None
        ]
        if ordinary is None or any(_used_after(other, order[node], order) for other in others):
            continue
        if any(order[other] < order[node] and other in node.all_input_nodes for other in others):
            continue
        node.target = ordinary
        written.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)  # type: ignore[misc]


def drop_empty_parts(graph: fx.Graph) -> None:
    """A concatenation with nothing (an empty key and value cache) is its other part."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.cat.default:
            continue
        parts = [part for part in node.args[0] if tuple(part.meta["val"].shape) != (0,)]
        if len(parts) == 1:
            node.replace_all_uses_with(parts[0])
            graph.erase_node(node)
        elif parts and len(parts) < len(node.args[0]):
            node.args = (parts, *node.args[1:])


def written_input(node: fx.Node) -> fx.Node | None:
    """The input that this node writes into, if it does; batch norm's statistics do not count."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)  # or out=...
            return value if isinstance(value, fx.Node) else None
    return None


def storage_of(node: fx.Node) -> int | None:
    """Which memory a node's tensor lies in, or None when it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def written_groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes that share memory which some node writes into, with the number of the memory."""
    written = {storage_of(source) for node in graph.nodes if (source := written_input(node)) is not None}
    return {node: shared for node in graph.nodes if (shared := storage_of(node)) is not None and shared in written}


def written_states(graph: fx.Graph, states: dict[str, fx.Node]) -> list[str]:
    """Names of the states that the graph writes into, through a view too."""
    written = {storage_of(source) for node in graph.nodes if (source := written_input(node)) is not None}
    return [name for name, node in states.items() if storage_of(node) in written]


def check_states_unwritten(graph: fx.Graph, states: dict[str, fx.Node], trained: set[str]) -> None:
    """Raise WorkloadError when the model writes into a parameter in its forward pass."""
    for name in written_states(graph, states):
        if name in trained:
            raise WorkloadError(
                "a model that leaves its parameters as they are in the forward pass",
                f"it writes into {name}",
                "write into a buffer, or train it by replicate or shard",
            )


def _ordinary(node: fx.Node) -> torch._ops.OpOverload | None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    space, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, space), name[:-1], None)
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    return overload if isinstance(overload, torch._ops.OpOverload) else None


def _used_after(node: fx.Node, at: int, order: dict[fx.Node, int]) -> bool:
    return any(order.get(user, at + 1) > at for user in node.users)
