"""Cut a captured graph into pipeline stages of about equal cost.

Values that depend only on the batch (masks, positions) are computed again in every stage that needs them; all others
cross from one stage to the next, and are passed on by stages that only need to hand them further.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.expert.find_experts import find_experts
from paceline.graph.functional import state_groups, written_groups
from paceline.graph.labels import node_order, tensor_inputs
from paceline.graph.own_code import OwnCall
from paceline.graph.tensor.choices import operations
from paceline.graph.tensor.tensor_layout import gradients_of
from paceline.graph.writes import memory_written, storage_of
from paceline.nouns.errors import PlanError
from paceline.torch_private.operations import OpOverload

Owners = dict[str, tuple[int, ...]]  # of each state the stages that use it, in rising order
_MOST_PLACES = 200  # to cut that are tried: the search takes the square of their number
_CROSSING_WEIGHT = 0.02  # of a stage's share of the work: what an exchange of median size counts for


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
    """The cut of one graph, for other graphs of the same model to follow."""

    targets: list[object]  # the operations, in order
    stages: list[int]
    owners: Owners


def assign_stages(captured: Captured, count: int, first: Assignment | None = None) -> dict[fx.Node, int]:
    """Return the stage of every node that is not computed anew wherever it is needed.

    Args:
        captured: the captured graph.
        count: the number of stages.
        first: the assignment of an earlier graph of the same model; states stay where it put them.

    Raises:
        PlanError: there are fewer places to cut than stages need.
    """
    anew = computed_anew(captured)
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    nodes = [node for node in calls if node not in anew]
    if first is not None:
        if [_operation_of(node) for node in nodes] == first.targets:  # the same code, other shapes
            return dict(zip(nodes, first.stages, strict=True))
        return _by_owner(captured, nodes, first.owners)
    if count == 1:
        return dict.fromkeys(nodes, 0)
    cuts = _cuts(captured, nodes, count)
    stages = {}
    stage = 0
    for index, node in enumerate(nodes):
        while stage < len(cuts) and index >= cuts[stage]:
            stage += 1
        stages[node] = stage
    return stages


def assignment_of(captured: Captured, stages: Mapping[fx.Node, int]) -> Assignment:
    """Return the facts of this graph that later graphs of the model need."""
    targets = [_operation_of(node) for node in stages]
    return Assignment(targets, list(stages.values()), owners_of(captured, stages))


def _operation_of(node: fx.Node) -> object:
    """Return the operation of a node, to be compared with that of another graph of the same code."""
    return node.target.__name__ if isinstance(node.target, OwnCall) else node.target


def owners_of(captured: Captured, stages: Mapping[fx.Node, int]) -> Owners:
    """Return the stages that use each state."""
    owners: Owners = {}
    for name, state in captured.states.items():
        users = {stages[user] for user in state.users if user in stages}
        owners[name] = tuple(sorted(users)) or (0,)  # without readers: kept by the first
    return owners


def computed_anew(captured: Captured) -> set[fx.Node]:
    """Return the nodes that depend only on the batch, plain numbers and unwritten buffers, and draw nothing."""
    groups = written_groups(captured.graph)
    sent: set[int] = set()  # memory whose content is sent to other stages, and not computed anew
    while True:
        plain = _plain_nodes(captured, groups, sent)
        # What shares written memory with an operation that is not computed anew runs in one stage with it, and so does
        # whatever reads that memory: its content depends on more than the node that made it.
        mixed = {shared for node, shared in groups.items() if node not in plain}
        if mixed <= sent:
            return plain
        sent |= mixed


def _plain_nodes(captured: Captured, groups: Mapping[fx.Node, int], sent: set[int]) -> set[fx.Node]:
    """Return the nodes that every stage can compute, without those that lie in memory which is sent."""
    written = memory_written(captured.graph)
    # Every rank of the pipeline has the batch and all unwritten buffers, so these values need no message.
    plain: set[fx.Node] = set(captured.inputs)
    for name, state in captured.states.items():
        if name in captured.buffers and storage_of(state) not in written:
            plain.add(state)
    for node in captured.graph.nodes:
        is_plain = node.op == "get_attr"
        # A second draw would give other numbers: what draws runs in one stage, and its result is sent.
        if node.op == "call_function" and groups.get(node) not in sent and not _draws(node):
            is_plain = plain.issuperset(node.all_input_nodes)
        if is_plain:
            plain.add(node)
    return plain


def cut_out(captured: Captured, stages: Mapping[fx.Node, int], count: int) -> list[Stage]:
    """Return the graph of every stage."""
    output = next(iter(reversed(captured.graph.nodes)))
    results = tensor_inputs(output)
    facts = _Facts.of(captured.graph)
    crossing = _crossing_values(stages, count, results, facts)
    with_gradient = gradients_of(captured)
    built = []
    for stage in range(count):
        is_last = stage == count - 1
        piece = _build(captured, stages, stage, crossing, results if is_last else None, facts)
        piece.has_gradient = [node in with_gradient for node in crossing[stage]]
        piece.sent = [node.meta["val"] for node in crossing[stage + 1]]
        piece.sends_gradient = [node in with_gradient for node in crossing[stage + 1]]
        built.append(piece)
    return built


def _crossing_values(
    stages: Mapping[fx.Node, int], count: int, results: list[fx.Node], facts: _Facts
) -> list[list[fx.Node]]:
    """Return the values that each stage receives, in the graph's order; nothing crosses into the first.

    The list has one entry more than there are stages, empty too: nothing crosses out of the last.
    """
    needed: list[set[fx.Node]] = [set() for _ in range(count)]  # staged values that each stage reads
    # Step 1: what each stage reads of staged values; the last one also hands out the function's results.
    for node, stage in stages.items():
        needed[stage].update(source for source in node.all_input_nodes if source in stages)
    for result in results:
        if result in stages:
            needed[count - 1].add(result)
        else:
            needed[count - 1] |= _closure(result, stages, facts)[1]
    # Step 2: a stage receives what it or any later stage reads: messages only go from a stage to the next.
    crossing: list[list[fx.Node]] = [[]]
    for stage in range(1, count):
        read_later = set().union(*needed[stage:])
        received = [node for node in read_later if stages[node] < stage]
        crossing.append(sorted(received, key=facts.order.__getitem__))
    crossing.append([])
    return crossing


def _draws(node: fx.Node) -> bool:
    """True if a node draws random numbers; composite `dropout` carries no tag."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target is torch.ops.aten.dropout.default


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is asked of a graph many times while it is cut.

    Attributes:
        order: the place of every node.
        groups: of the nodes that share memory which one of them writes into, the number of the memory.
        members: these nodes by that number.
    """

    order: Mapping[fx.Node, int]
    groups: Mapping[fx.Node, int]
    members: Mapping[int, list[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph) -> _Facts:
        """Look at a graph."""
        groups = written_groups(graph)
        members: dict[int, list[fx.Node]] = {}
        for member, shared in groups.items():
            members.setdefault(shared, []).append(member)
        return cls(node_order(graph), groups, members)


def _closure(node: fx.Node, stages: Mapping[fx.Node, int], facts: _Facts) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the nodes to compute anew for `node`, in order, and the staged values that it needs (normally none)."""
    anew: set[fx.Node] = set()
    staged: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in stages:
            staged.add(current)
        elif current.op == "call_function" and current not in anew:
            anew.add(current)
            pending.extend(current.all_input_nodes)
            # Operations that write into one memory belong together: a copy of only one would read an unwritten value.
            if current in facts.groups:
                together = facts.members[facts.groups[current]]
                pending.extend(writer for writer in together if writer.op == "call_function")
    return sorted(anew, key=facts.order.__getitem__), staged


def _operations_of(
    captured: Captured, stages: Mapping[fx.Node, int], stage: int, results: list[fx.Node] | None, facts: _Facts
) -> set[fx.Node]:
    """Return the operations that a stage runs: those assigned to it, and those that it computes anew."""
    assigned = [node for node in captured.graph.nodes if stages.get(node) == stage]
    operations_here = set(assigned)
    readers = assigned + (results or [])
    for node in readers:
        sources = list(node.all_input_nodes)
        if node not in stages:  # a result that is computed anew
            sources.append(node)
        for source in sources:
            if source not in stages:
                operations_here.update(_closure(source, stages, facts)[0])
    return operations_here


def _build(
    captured: Captured,
    stages: Mapping[fx.Node, int],
    stage: int,
    crossing: list[list[fx.Node]],
    results: list[fx.Node] | None,
    facts: _Facts,
) -> Stage:
    """Return the graph of one stage.

    Args:
        captured: the graph that it is cut from.
        stages: the stage of each node.
        stage: the one to build.
        crossing: what each stage receives.
        results: the function's outputs, for the last stage.
        facts: of the captured graph.
    """
    operations_here = _operations_of(captured, stages, stage, results, facts)
    used = set(results or [])
    for node in operations_here:
        used.update(node.all_input_nodes)
    state_names = [name for name, state in captured.states.items() if state in used]
    input_indices = [index for index, leaf in enumerate(captured.inputs) if leaf in used]
    # Placeholders in the order that `Stage` promises and `StageProgram` calls with: states, inputs, received.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def add_placeholder(old: fx.Node, name: str) -> None:
        copies[old] = graph.placeholder(name)
        copies[old].meta = old.meta

    for name in state_names:
        add_placeholder(captured.states[name], captured.states[name].name)
    for index in input_indices:
        add_placeholder(captured.inputs[index], captured.inputs[index].name)
    for old in crossing[stage]:
        add_placeholder(old, f"from_before_{old.name}")
    # The old graph's order is a topological one, so all sources are copied before their readers.
    for old in captured.graph.nodes:
        is_constant = old.op == "get_attr" and old in used
        if is_constant or old in operations_here:
            copies[old] = graph.node_copy(old, lambda source: copies[source])
    outputs: Any = crossing[stage + 1]
    if results is not None:
        outputs = next(iter(reversed(captured.graph.nodes))).args[0]
    graph.output(fx.node.map_arg(outputs, lambda old: copies[old]))
    return Stage(graph, state_names, input_indices, [node.meta["val"] for node in crossing[stage]], [])


def _by_owner(captured: Captured, nodes: list[fx.Node], owners: Mapping[str, Sequence[int]]) -> dict[fx.Node, int]:
    """Return stages for another graph of a model whose states are placed: each node as early as its inputs allow."""
    holders = {}
    for name, state in captured.states.items():
        if name in owners:
            holders[state] = owners[name]
    index_of = {node: index for index, node in enumerate(nodes)}
    groups = _tied_together(captured, index_of)
    earliest = [0] * len(nodes)
    while True:
        before = list(earliest)
        _move_behind_inputs(nodes, holders, earliest)
        for members in groups:
            together = max(earliest[index] for index in members)
            for index in members:
                earliest[index] = together
        if earliest == before:
            return dict(zip(nodes, earliest, strict=True))


def _move_behind_inputs(nodes: list[fx.Node], holders: Mapping[fx.Node, Sequence[int]], earliest: list[int]) -> None:
    """Raise the stage of each node to the earliest in which its inputs and states are there."""
    stages: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        sources = node.all_input_nodes
        stage = max([earliest[index], *(stages.get(source, 0) for source in sources)])
        for source in sources:
            if source in holders:
                reachable = [holder for holder in holders[source] if holder >= stage]
                stage = max(stage, min(reachable, default=max(holders[source])))
        stages[node] = stage
        earliest[index] = stage


def _cuts(captured: Captured, nodes: list[fx.Node], count: int) -> list[int]:
    """Return the indices into `nodes` where the stages after the first begin.

    They are chosen so that the slowest stage is as fast as can be.

    Raises:
        PlanError: there are fewer places to cut than stages need.
    """
    # A cost is a share of the stage's work, so that work and messages can be added: the unit is the whole graph's work.
    work_before = _shares_before(nodes)
    crossing = _crossing_bytes(captured, nodes)
    places = _good_places(crossing, work_before)
    if len(places) < count - 1:
        raise PlanError(
            f"the model should be cut into {count} pipeline stages",
            f"there {'is' if len(places) == 1 else 'are'} {len(places)} place{'s' * (len(places) != 1)} to cut it",
            f"write pipeline={max(1, len(places) + 1)} or less",
        )
    sizes = sorted(crossing[place] for place in places)
    median = max(sizes[len(places) // 2], 1.0)
    ends = [*places, len(nodes)]
    positions = [*(work_before[place] for place in places), 1.0]
    # The last end is that of the graph: nothing crosses there, and no stage begins.
    costs = [_CROSSING_WEIGHT * crossing[end] / median / count for end in ends]
    chosen = _fastest_ends(positions, costs, count)
    return [ends[number] for number in chosen]


def _shares_before(nodes: list[fx.Node]) -> list[float]:
    """Return for each node which share of the whole work lies before it, 0 to 1."""
    work = [operations(node) for node in nodes]
    total = sum(work)
    amount_before = 0.0
    shares = []
    for amount in work:
        shares.append(amount_before / total if total else 0.0)
        amount_before += amount
    return shares


def _fastest_ends(positions: list[float], costs: list[float], count: int) -> list[int]:
    """Return the ends of all stages but the last that make the slowest stage fastest, by dynamic programming.

    Args:
        positions: the share of the work before each possible end; the last end is the graph's.
        costs: the cost to cut at each, in the same unit.
        count: the number of stages.
    """
    # The search takes count * places^2 / 2 steps.
    # best[k][j]: the slowest of k + 1 stages when the last of them ends at j, and where the one before ended
    best = [[(position, -1) for position in positions]]
    for _ in range(count - 1):
        previous = best[-1]
        row = []
        for j, position in enumerate(positions):
            options = []
            for i in range(j):
                if previous[i][0] < math.inf:
                    slowest = max(previous[i][0], position - positions[i])
                    options.append((slowest + costs[i], i))
            row.append(min(options, default=(math.inf, -1)))
        best.append(row)
    ends = []
    end = len(positions) - 1
    for level in range(count - 1, 0, -1):
        end = best[level][end][1]
        ends.append(end)
    return ends[::-1]


def _crossing_bytes(captured: Captured, nodes: list[fx.Node]) -> list[float]:
    """Return for each index into `nodes` the bytes that cross when a stage begins there; infinite where it must not."""
    index_of = {node: index for index, node in enumerate(nodes)}
    last_use = {}
    for node, index in index_of.items():
        last_use[node] = max((index_of[user] for user in node.users if user in index_of), default=index)
    for node in captured.output:
        if node in index_of:
            last_use[node] = len(nodes)
    crossing = [0.0] * (len(nodes) + 2)  # one more than places: results are read at len(nodes)
    for node, index in index_of.items():
        value = node.meta.get("val")
        # Several outputs in one value can't be sent: only what is taken from them.
        size = value.nbytes if isinstance(value, torch.Tensor) else math.inf
        # It crosses every cut between itself and its last reader.
        for place in range(index + 1, last_use[node] + 1):
            crossing[place] += size
        if node.target is operator.getitem:  # beside what it is taken from
            crossing[index] = math.inf
    # No cut between operations that share written memory: a stage has its own memory.
    for members in _tied_together(captured, index_of):
        for place in range(min(members) + 1, max(members) + 1):
            crossing[place] = math.inf
    return crossing


def _tied_together(captured: Captured, index_of: Mapping[fx.Node, int]) -> list[list[int]]:
    """Return the groups of operations that one stage must run, as indices.

    These are the operations that share memory which is written, all that touch such a state, and layers of experts:
    under `expert` nobody knows before how many rows they have.
    """
    groups: dict[int, list[int]] = {}
    for node, shared in written_groups(captured.graph).items():
        if node in index_of:
            groups.setdefault(shared, []).append(index_of[node])
    for node, memories in state_groups(captured.graph, captured.states).items():
        if node not in index_of:
            continue
        for shared in memories:  # no other stage has what was written
            groups.setdefault(shared, []).append(index_of[node])
    layers = []
    for layer in find_experts(captured):
        layers.append([index_of[node] for node in layer.roles if node in index_of])
    return [*groups.values(), *layers]


def _good_places(crossing: list[float], work_before: list[float]) -> list[int]:
    """Return places to cut: where least crosses among the places with the same work before them."""
    best: dict[float, int] = {}
    for place in range(1, len(work_before)):
        can_be_cut = crossing[place] < math.inf and 0 < work_before[place] < 1
        if not can_be_cut:
            continue
        # Rearrangements count no work, so many places have the same share; of these only the best is tried.
        key = round(work_before[place], 6)
        if key not in best or crossing[place] <= crossing[best[key]]:
            best[key] = place
    places = list(best.values())
    if len(places) > _MOST_PLACES:
        places = sorted(places, key=lambda place: crossing[place])[:_MOST_PLACES]
    return sorted(places)
