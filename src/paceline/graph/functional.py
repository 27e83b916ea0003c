"""In-place operations become ordinary ones, so that a graph can be cut anywhere.

`y = relu_(x)` becomes `y = relu(x)`, and whoever read x afterwards reads y. That is the same only while no
view shares x's memory; where one does, the operation stays as it is and everything that shares the memory is
marked: it is computed whole, in order, on one rank (`written_groups`). A write into memory that outlives the graph
(a parameter, a buffer) always stays.
"""

from __future__ import annotations

import torch
from torch import fx

from paceline.graph.writes import memories_of, running_statistics, states_written, storage_of, written_inputs
from paceline.nouns.errors import WorkloadError


def make_functional(graph: fx.Graph) -> None:
    """Replace every in-place operation whose input nothing else shares, and that nobody sees after the graph."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    outside = {storage_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in list(graph.nodes):
        written = _only_written_input(node)
        if written is None or written.op == "get_attr" or storage_of(written) in outside:
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


def drop_unread(graph: fx.Graph) -> None:
    """Take out what nothing reads and what writes nowhere."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(running_statistics(node)))


def copy_inputs_that_are_written(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
    """Have operations write into copies of the batch's tensors: every stage gets the batch as it was.

    Returns:
        The copies.
    """
    written = {storage_of(source) for node in graph.nodes for source in written_inputs(node)}
    made = []
    for node in inputs:
        if storage_of(node) not in written:
            continue
        value = node.meta["val"]
        with graph.inserting_before(next(one for one in graph.nodes if one.op != "placeholder")):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)  # type: ignore[misc]
        copied.meta["val"] = value
        with value.fake_mode:
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made.append(copied)
    return made


def copy_states_that_are_read(graph: fx.Graph, states: dict[str, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have operations that only read a written state read a copy of what it holds at that moment.

    Autograd may keep what they read, or another stage may receive it, until the next micro-batch writes again.

    Returns:
        Of each copy, the operation that it was made for.
    """
    names = {storage_of(states[name]) for found in states_written(graph, states).values() for name in found}
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = {shared: _last_write(shared, order) for shared in names}
    copies: dict[tuple[fx.Node, bool], fx.Node] = {}
    made = {}
    for source in [node for node in order if storage_of(node) in names]:
        shared = storage_of(source)
        for user in list(source.users):
            if shared in memories_of(user) | _written_by(user):
                continue
            is_final = order[user] > order[last[shared]]
            if not is_final or (source, True) not in copies:
                at = last[shared] if is_final else None
                at = source if is_final and order[source] > order[last[shared]] else at
                with graph.inserting_after(at) if at is not None else graph.inserting_before(user):
                    copied = graph.call_function(torch.ops.aten.clone.default, (source,))
                copied.meta["val"] = torch.empty_like(source.meta["val"])
                copies[source, is_final] = copied
                made[copied] = user
            user.replace_input_with(source, copies[source, is_final])
    return made


def written_groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes that share memory which some node writes into, with the number of the memory."""
    written = {storage_of(source) for node in graph.nodes for source in written_inputs(node)}
    return {node: shared for node in graph.nodes for shared in memories_of(node) if shared in written}


def state_groups(graph: fx.Graph, states: dict[str, fx.Node]) -> dict[fx.Node, set[int]]:
    """Of every operation that reads or writes a state that is written, or a view of it, the memory it touches."""
    names = [name for found in states_written(graph, states).values() for name in found]
    written = {storage_of(states[name]) for name in names}
    found = {}
    for node in graph.nodes:
        touched = memories_of(node).union(*(memories_of(source) for source in node.all_input_nodes))
        if node.op == "call_function" and touched & written:
            found[node] = touched & written
    return found


def written_states(graph: fx.Graph, states: dict[str, fx.Node]) -> list[str]:
    """Names of the states that the graph writes into, a norm's running statistics apart."""
    written = {storage_of(source) for node in graph.nodes for source in written_inputs(node)}
    return [name for name, node in states.items() if storage_of(node) in written]


def check_states_unwritten(graph: fx.Graph, states: dict[str, fx.Node], trained: set[str]) -> None:
    """Raise WorkloadError when the model writes into a parameter in its forward pass."""
    for name in written_states(graph, states):
        if name in trained:
            raise WorkloadError(
                "the model's forward pass should not write to its parameters",
                f"it writes into {name}",
                "write into a buffer, or train it by replicate or shard",
            )


def _written_by(node: fx.Node) -> set[int | None]:
    return {storage_of(source) for source in [*written_inputs(node), *running_statistics(node)]}


def _last_write(shared: int | None, order: dict[fx.Node, int]) -> fx.Node:
    return [node for node in order if shared in _written_by(node)][-1]


def _only_written_input(node: fx.Node) -> fx.Node | None:
    written = written_inputs(node)
    return written[0] if len(written) == 1 else None


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
