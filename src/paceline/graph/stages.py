"""Cut a captured graph into pipeline stages of about equal cost.

What depends on the batch alone (masks, positions) is computed again in every stage that needs it; all else
crosses from one stage to the next, and is passed on by stages that only need to hand it further.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.functional import state_groups, written_groups
from paceline.graph.labels import tensor_inputs
from paceline.graph.layout import gradients_of
from paceline.graph.sharding_strategies import operations
from paceline.graph.writes import running_statistics, storage_of, written_inputs
from paceline.nouns.errors import PlanError

Owners = dict[str, tuple[int, ...]]  # of each state the stages that use it, in rising order


@dataclass(slots=True)
class Stage:
    """One stage of a captured graph, as a graph of its own.

    Attributes:
        graph: placeholders are `states`, then `inputs`, then `received`; the output is the flat list `sent`.
        states: names of the state tensors that it reads.
        inputs: which of the batch's tensors it reads.
        received: what the stage before sends: fake tensors that say shape and dtype.
        has_gradient: for each of `received`, whether a gradient flows back.
        sent: what it sends, likewise; empty for the last stage, whose output is the function's.
    """

    graph: fx.Graph
    states: list[str]
    inputs: list[int]
    received: list[torch.Tensor]
    has_gradient: list[bool]
    sent: list[torch.Tensor] = field(default_factory=list)
    sends_gradient: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one graph was cut, for other graphs of the same model to follow."""

    targets: list[object]  # the operations, in order
    stages: list[int]
    owners: Owners


def assign_stages(captured: Captured, count: int, first: Assignment | None = None) -> dict[fx.Node, int]:
    """The stage of every node that is not computed anew wherever it is needed.

    Args:
        captured: the graph.
        count: stages.
        first: how an earlier graph of the same model was cut; states stay where it put them.

    Raises:
        PlanError: there are fewer places to cut than stages need.
    """
    anew = computed_anew(captured)
    nodes = [node for node in captured.graph.nodes if node.op == "call_function" and node not in anew]
    if first is not None:
        if [node.target for node in nodes] == first.targets:  # the same code, other shapes
            return dict(zip(nodes, first.stages, strict=True))
        return _by_owner(captured, nodes, first.owners)
    if count == 1:
        return dict.fromkeys(nodes, 0)
    cuts = _cuts(captured, nodes, count)
    stage, stages = 0, {}
    for index, node in enumerate(nodes):
        while stage < len(cuts) and index >= cuts[stage]:
            stage += 1
        stages[node] = stage
    return stages


def assignment_of(captured: Captured, stages: Mapping[fx.Node, int]) -> Assignment:
    """What later graphs need to know of this one."""
    return Assignment([node.target for node in stages], list(stages.values()), owners_of(captured, stages))


def owners_of(captured: Captured, stages: Mapping[fx.Node, int]) -> Owners:
    """The stages that use each state."""
    owners: Owners = {}
    for name, state in captured.states.items():
        used = {stages[user] for user in state.users if user in stages}
        owners[name] = tuple(sorted(used)) or (0,)
    return owners


def computed_anew(captured: Captured) -> set[fx.Node]:
    """Nodes that depend on the batch, plain numbers and unwritten buffers alone, and draw nothing."""
    written = {storage_of(source) for node in captured.graph.nodes for source in written_inputs(node)}
    written |= {storage_of(source) for node in captured.graph.nodes for source in running_statistics(node)}
    plain: set[fx.Node] = set(captured.inputs)
    for name, state in captured.states.items():
        if name not in captured.buffers or storage_of(state) in written:
            continue
        plain.add(state)
    for node in captured.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and not _draws(node) and plain.issuperset(node.all_input_nodes)
        ):
            plain.add(node)
    groups = written_groups(captured.graph)
    mixed = {shared for node, shared in groups.items() if node not in plain}
    return {node for node in plain if groups.get(node) not in mixed or node.op != "call_function"}


def cut_out(captured: Captured, stages: Mapping[fx.Node, int], count: int) -> list[Stage]:
    """The graph of every stage."""
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    results = tensor_inputs(next(iter(reversed(captured.graph.nodes))))
    needed: list[set[fx.Node]] = [set() for _ in range(count + 1)]  # at or after each stage, from outside
    for node, stage in stages.items():
        for source in _sources(node, stages, captured, order):
            needed[stage].add(source)
    for result in results:
        for source in [result] if result in stages else _closure(result, stages, captured, order)[1]:
            needed[count - 1].add(source)
    crossing: list[list[fx.Node]] = [[]]
    for stage in range(1, count):
        later = set().union(*needed[stage:])
        crossing.append(sorted((v for v in later if stages[v] < stage), key=lambda v: order[v]))
    crossing.append([])
    with_gradient = gradients_of(captured)
    made = []
    for stage in range(count):
        made.append(_build(captured, stages, stage, crossing, results if stage == count - 1 else None))
        made[-1].has_gradient = [node in with_gradient for node in crossing[stage]]
        made[-1].sent = [node.meta["val"] for node in crossing[stage + 1]]
        made[-1].sends_gradient = [node in with_gradient for node in crossing[stage + 1]]
    return made


def _draws(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or target is torch.ops.aten.dropout.default
    )


def _closure(
    node: fx.Node, stages: Mapping[fx.Node, int], captured: Captured, order: Mapping[fx.Node, int]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """What must be computed anew for `node`, in order, and the staged values that it needs (none, normally)."""
    groups = written_groups(captured.graph)
    members: dict[int, list[fx.Node]] = {}
    for member, shared in groups.items():
        members.setdefault(shared, []).append(member)
    seen: set[fx.Node] = set()
    staged: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in stages:
            staged.add(current)
        elif current.op == "call_function" and current not in seen:
            seen.add(current)
            todo.extend(current.all_input_nodes)
            if current in groups:  # what others write into the same memory belongs to it
                todo.extend(other for other in members[groups[current]] if other.op == "call_function")
    return sorted(seen, key=lambda one: order[one]), staged


def _sources(
    node: fx.Node, stages: Mapping[fx.Node, int], captured: Captured, order: Mapping[fx.Node, int]
) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source in stages]


def _build(
    captured: Captured,
    stages: Mapping[fx.Node, int],
    stage: int,
    crossing: list[list[fx.Node]],
    results: list[fx.Node] | None,
) -> Stage:
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    own = [node for node in captured.graph.nodes if stages.get(node) == stage]
    wanted = set(own)
    for node in [*own, *(results or [])]:
        for source in [*node.all_input_nodes, *([node] if node not in stages else [])]:
            if source not in stages:
                wanted.update(_closure(source, stages, captured, order)[0])
    body = sorted(wanted, key=lambda node: order[node])
    used = {source for node in [*body] for source in node.all_input_nodes} | set(results or [])
    names = [name for name, state in captured.states.items() if state in used]
    inputs = [index for index, leaf in enumerate(captured.inputs) if leaf in used]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for old in [*(captured.states[name] for name in names), *(captured.inputs[index] for index in inputs)]:
        made[old] = graph.placeholder(old.name)
        made[old].meta = old.meta
    for old in crossing[stage]:
        made[old] = graph.placeholder(f"from_before_{old.name}")
        made[old].meta = old.meta
    for old in captured.graph.nodes:
        if old.op == "get_attr" and old in used:
            made[old] = graph.node_copy(old)
        elif old in wanted:
            made[old] = graph.node_copy(old, lambda source: made[source])
    final = next(iter(reversed(captured.graph.nodes))).args[0] if results is not None else crossing[stage + 1]
    graph.output(fx.node.map_arg(final, lambda old: made[old]))
    return Stage(graph, names, inputs, [node.meta["val"] for node in crossing[stage]], [])


def _by_owner(captured: Captured, nodes: list[fx.Node], owners: Mapping[str, Sequence[int]]) -> dict[fx.Node, int]:
    holders = {captured.states[name]: stages for name, stages in owners.items() if name in captured.states}
    stages: dict[fx.Node, int] = {}
    for node in nodes:
        least = max((stages.get(source, 0) for source in node.all_input_nodes), default=0)
        for source in node.all_input_nodes:
            if source in holders:
                least = max(least, min((s for s in holders[source] if s >= least), default=max(holders[source])))
        stages[node] = least
    return stages


def _cuts(captured: Captured, nodes: list[fx.Node], count: int) -> list[int]:
    """Indices into `nodes` where the stages after the first begin: the slowest stage is as fast as can be."""
    work = [operations(node) for node in nodes]
    total, done, at = sum(work), 0.0, []
    for amount in work:
        at.append(done / total if total else 0.0)
        done += amount
    crossing = _crossing_bytes(captured, nodes)
    places = _good_places(crossing, at)
    if len(places) < count - 1:
        raise PlanError(
            f"the model should be cut into {count} pipeline stages",
            f"there {'is' if len(places) == 1 else 'are'} {len(places)} place{'s' * (len(places) != 1)} to cut it",
            f"write pipeline={max(1, len(places) + 1)} or less",
        )
    unit = max(sorted(crossing[place] for place in places)[len(places) // 2], 1.0)
    # best[k][j]: the slowest of k + 1 stages when the last of them ends at places[j], and where the one before ended
    ends = [*places, len(nodes)]
    positions = [*(at[place] for place in places), 1.0]
    best = [[(position, -1) for position in positions]]
    for _ in range(count - 1):
        row = []
        for j, position in enumerate(positions):
            options = [
                (max(best[-1][i][0], position - positions[i]) + 0.02 * crossing[ends[i]] / unit / count, i)
                for i in range(j)
                if best[-1][i][0] < math.inf
            ]
            row.append(min(options, default=(math.inf, -1)))
        best.append(row)
    cuts, j = [], len(ends) - 1
    for level in range(count - 1, 0, -1):
        j = best[level][j][1]
        cuts.append(ends[j])
    return cuts[::-1]


def _crossing_bytes(captured: Captured, nodes: list[fx.Node]) -> list[float]:
    """For each index into `nodes`: bytes that cross when a stage begins there; infinite where it must not."""
    index = {node: i for i, node in enumerate(nodes)}
    last = {node: max((index[user] for user in node.users if user in index), default=i) for node, i in index.items()}
    for node in captured.output:
        if node in index:
            last[node] = len(nodes)
    change = [0.0] * (len(nodes) + 2)
    for node, i in index.items():
        values = node.meta.get("val")
        is_tensor = isinstance(values, torch.Tensor)
        size = values.nbytes if is_tensor else math.inf  # type: ignore[union-attr]
        is_tied = node.target is operator.getitem
        for place in range(i + 1, last[node] + 1):
            change[place] += size
        if is_tied:  # beside what it is taken from
            change[i] = math.inf
    for members in _kept_together(captured, index):
        for place in range(min(members) + 1, max(members) + 1):
            change[place] = math.inf
    return change


def _kept_together(captured: Captured, index: Mapping[fx.Node, int]) -> list[list[int]]:
    """Operations that one stage must run: those that share memory which is written, and all that touch such a state."""
    groups: dict[int, list[int]] = {}
    for node, shared in written_groups(captured.graph).items():
        if node in index:
            groups.setdefault(shared, []).append(index[node])
    for node, memories in state_groups(captured.graph, captured.states).items():
        for shared in memories if node in index else ():  # no other stage has what was written
            groups.setdefault(shared, []).append(index[node])
    return list(groups.values())


def _good_places(crossing: list[float], at: list[float]) -> list[int]:
    """Places to cut: where least crosses among the places with the same work before them."""
    finite = [place for place in range(1, len(at)) if crossing[place] < math.inf and 0 < at[place] < 1]
    best: dict[float, int] = {}
    for place in finite:
        key = round(at[place], 6)
        if key not in best or crossing[place] <= crossing[best[key]]:
            best[key] = place
    if len(best) <= 200:
        return sorted(best.values())
    smallest = sorted(best.values(), key=lambda place: crossing[place])[:200]
    return sorted(smallest)
