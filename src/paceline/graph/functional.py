"""In-place operations become ordinary ones, so that a graph can be cut anywhere.

`y = relu_(x)` becomes `y = relu(x)`, and whoever read x afterwards reads y. That is the same only while no
view shares x's memory; where one does, the operation stays as it is and everything that shares the memory is
marked: it is computed whole, in order, on one rank (`written_groups`). A write into memory that outlives the graph
(a parameter, a buffer) always stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paceline.graph.labels import node_order
from paceline.graph.writes import (
    memories_of,
    memory_written,
    running_statistics,
    storage_of,
    written_by,
    written_inputs,
)
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.operations import OpOverload, overload_of, schema_of

aten = torch.ops.aten


def make_functional(graph: fx.Graph) -> None:
    """Replace every in-place operation whose input nothing else shares, and that nobody sees after the graph."""
    order = node_order(graph)
    # Memory that somebody sees after the graph: a write into it is an effect, and stays one.
    outside = {storage_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in list(graph.nodes):
        written = _only_written_input(node)
        if written is None or written.op == "get_attr" or storage_of(written) in outside:
            continue
        ordinary = _ordinary(node)
        if ordinary is None or _is_shared(node, written, order):
            continue
        node.target = ordinary
        # Only later readers: those before the write read the old value.
        written.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)  # type: ignore[misc]


def choose_where_masks_write(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Turn `x[mask] = value`, where the value is the same in every place, into `where(mask, value, x)`.

    That is computed element by element, so it can be split, and its gradient has a shape that no value decides.

    Returns:
        For every new node the one that it stands for.
    """
    writers = {}
    for node in list(graph.nodes):
        if node.target is not aten.index_put.default or (len(node.args) > 3 and node.args[3]):
            continue
        written, indices, value = node.args[:3]
        mask = indices[0] if indices else None
        if mask is None or mask.meta["val"].dtype is not torch.bool or any(index is not None for index in indices[1:]):
            continue
        inner = written.meta["val"].dim() - mask.meta["val"].dim()
        if value.meta["val"].dim() > inner:
            continue  # a row for each place
        with graph.inserting_before(node):
            for _ in range(inner):
                mask = _new(graph, aten.unsqueeze.default, mask, -1)
                writers[mask] = node
            chosen = _new(graph, aten.where.self, mask, value, written)
        writers[chosen] = node
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
    return writers


def _new(graph: fx.Graph, operation: OpOverload, *arguments: Any) -> fx.Node:
    """Add an operation, with what it gives on its arguments' fake values."""
    node = graph.call_function(operation, arguments)
    node.meta["val"] = operation(*fx.node.map_arg(arguments, lambda source: source.meta["val"]))
    return node


def _is_shared(node: fx.Node, written: fx.Node, order: dict[fx.Node, int]) -> bool:
    """True if a view of what `node` writes into is read after it, or by it."""
    shared = storage_of(written)
    if shared is None:
        return False
    # An unread view does no harm.
    for reader in order:
        if reader is written or reader is node or storage_of(reader) != shared:
            continue
        if _used_after(reader, order[node], order):
            return True
        if order[reader] < order[node] and reader in node.all_input_nodes:
            return True
    return False


def drop_empty_parts(graph: fx.Graph) -> None:
    """Replace a concatenation with nothing (an empty key and value cache) by its other part."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.cat.default:
            continue
        # `cat` passes over tensors of shape (0,), whatever the shape of the others; no rule knows such an input.
        filled = [part for part in node.args[0] if tuple(part.meta["val"].shape) != (0,)]
        if len(filled) == 1:
            node.replace_all_uses_with(filled[0])
            graph.erase_node(node)
        elif filled and len(filled) < len(node.args[0]):
            node.args = (filled, *node.args[1:])


def drop_unread(graph: fx.Graph) -> None:
    """Take out what nothing reads and what writes nowhere; a norm's schema does not say that it writes."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(running_statistics(node)))


def copy_inputs_that_are_written(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
    """Have operations write into copies of the batch's tensors: every stage gets the batch as it was.

    Returns:
        The copies.
    """
    written = _memory_written(graph)
    copies = []
    for node in inputs:
        if storage_of(node) not in written:
            continue
        value = node.meta["val"]
        first_operation = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first_operation):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)  # type: ignore[misc]
        # Views of the tensor share this memory in their `meta`: it goes to the copy, which they are views of now.
        copied.meta["val"] = value
        with value.fake_mode:  # memory of its own, which nothing writes into
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copies.append(copied)
    return copies


def copy_states_that_are_read(graph: fx.Graph, states: dict[str, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have operations that only read a written state read a copy of what it holds at that moment.

    Autograd may keep what they read, or another stage may receive it, until the next micro-batch writes again.

    Returns:
        For each copy, the operation that it was made for.
    """
    written = _written_state_memory(graph, states)
    order = node_order(graph)
    last_write = {shared: _last_write(shared, order) for shared in written}
    sources = [node for node in order if storage_of(node) in written]
    copies: dict[tuple[fx.Node, bool], fx.Node] = {}
    made_for = {}
    for source in sources:
        shared = storage_of(source)
        last = last_write[shared]
        for user in list(source.users):
            if shared in memories_of(user) | written_by(user):
                continue
            # All that read after the last write read the same: one copy does for them.
            is_final = order[user] > order[last]
            if not is_final or (source, True) not in copies:
                # A reader before the last write gets a copy of its own, made where it reads.
                if not is_final:
                    place = graph.inserting_before(user)
                elif order[source] > order[last]:  # a view that is made after the last write
                    place = graph.inserting_after(source)
                else:
                    place = graph.inserting_after(last)
                with place:
                    copied = graph.call_function(torch.ops.aten.clone.default, (source,))
                copied.meta["val"] = torch.empty_like(source.meta["val"])
                copies[source, is_final] = copied
                made_for[copied] = user
            user.replace_input_with(source, copies[source, is_final])
    return made_for


def written_groups(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the nodes that share memory which some node writes into, with the number of the memory."""
    written = _memory_written(graph)
    groups = {}
    for node in graph.nodes:
        for shared in memories_of(node):
            if shared in written:
                groups[node] = shared
    return groups


def state_groups(graph: fx.Graph, states: dict[str, fx.Node]) -> dict[fx.Node, set[int]]:
    """Return the memory of written states that each operation touches: reads or writes, through views too."""
    written = _written_state_memory(graph, states)
    groups = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        touched = memories_of(node).union(*(memories_of(source) for source in node.all_input_nodes))
        if touched & written:
            groups[node] = touched & written
    return groups


def _memory_written(graph: fx.Graph) -> set[int | None]:
    """Return the memory that operations say they write into; a norm's running statistics are not among it."""
    written: set[int | None] = set()
    for node in graph.nodes:
        written.update(storage_of(source) for source in written_inputs(node))
    return written


def _written_state_memory(graph: fx.Graph, states: dict[str, fx.Node]) -> set[int | None]:
    """Return the memory of the states that any operation writes into, a norm's running statistics too."""
    return memory_written(graph) & {storage_of(node) for node in states.values()}


def check_states_unwritten(graph: fx.Graph, states: dict[str, fx.Node], trained: set[str]) -> None:
    """Raise WorkloadError when the model writes into a parameter in its forward pass."""
    written = _memory_written(graph)
    for name, node in states.items():
        if name in trained and storage_of(node) in written:
            raise WorkloadError(
                "the model's forward pass should not write to its parameters",
                f"it writes into {name}",
                "write replicate in the plan, which keeps the write",
            )


def _last_write(shared: int | None, order: dict[fx.Node, int]) -> fx.Node:
    return [node for node in order if shared in written_by(node)][-1]


def _only_written_input(node: fx.Node) -> fx.Node | None:
    written = written_inputs(node)
    return written[0] if len(written) == 1 else None


def _ordinary(node: fx.Node) -> OpOverload | None:
    """Return the operation that computes what an in-place one writes: `relu` for `relu_`."""
    target = node.target
    assert isinstance(target, OpOverload)
    space, _, name = schema_of(target).name.partition("::")
    # `__iand__` and its like have no counterpart of the name without its last underscore.
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, space), name[:-1], None)
    if packet is None:
        return None
    return overload_of(packet, target)


def _used_after(node: fx.Node, index: int, order: dict[fx.Node, int]) -> bool:
    """True if a node after `index` reads this one; nodes that were added since have no place and count as later."""
    return any(order.get(user, index + 1) > index for user in node.users)
