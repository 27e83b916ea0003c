"""Spread a graph's experts over the ranks of `expert`: each holds some of them, and computes its samples of the batch.

Samples are followed through the graph as `context` follows positions (`context_layout.py`): what mixes them in a way
that no rule knows runs whole on every rank. So a loss over all tokens, as the router's, is that of one rank. In a layer
of experts (`find_experts.py`) rows go to the ranks with their experts and come back. Where a layer's tokens are whole
on every rank, because they don't divide, each computes the rows of its experts and the results are joined.

Gradients are partial but for those of the weights of experts, which see the rows of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.context_layout import ContextLayout, Walk
from paceline.graph.find_experts import PRODUCT, Experts, Role, find_experts, inside
from paceline.graph.labels import node_order, tensor_inputs
from paceline.graph.own_experts import OwnExperts, own_experts
from paceline.graph.own_modules import OwnModule
from paceline.graph.placement import Placement, Split, whole_block
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.sharding_strategies import Choice
from paceline.nouns.errors import PlanError
from paceline.nouns.shard_spec import chunk_range

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default)


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """A layer of experts, and how it is spread.

    Attributes:
        layer: as it was found.
        inside: its nodes that run where the experts are.
        sends: whether rows are sent; else every rank has them all, and computes those of its experts.
        name: path of the module that sorts its rows.
    """

    layer: Experts
    inside: frozenset[fx.Node]
    sends: bool
    name: str


@dataclass(frozen=True, slots=True)
class ExpertLine:
    """What a person is told of a layer of experts.

    Attributes:
        module: path of the module that sorts its rows.
        experts: of the layer.
        per_rank: of the first rank.
        choices: experts that a token goes to; 0 where its own code decides.
        weights: names of the parameters that are spread.
        way: "rows sent", or "rows of all on each".
        why: in words.
    """

    module: str
    experts: int
    per_rank: int
    choices: int
    weights: tuple[str, ...]
    way: str
    why: str


@dataclass(slots=True)
class ExpertLayout(ContextLayout):
    """A layout of the samples.

    Attributes:
        spread: the layers whose experts are on several ranks.
        called: the calls of modules whose experts are.
        owners: the rank that has each parameter of these modules' experts.
        refused: why other modules that run by their own code have none, by their paths.
    """

    spread: list[SpreadExperts] = field(default_factory=list)
    called: dict[fx.Node, OwnExperts] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _ExpertWalk(Walk):
    """The walk over a graph whose samples are split.

    Attributes:
        inside: the nodes that run where the experts are, by layer.
        called: calls of modules that run by their own code, with other experts on each rank.
    """

    inside: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    called: dict[fx.Node, OwnExperts] = field(default_factory=dict)

    def _choose(self, node: fx.Node) -> Choice:
        if node in self.called:
            return self._whole(node, tensor_inputs(node))
        return Walk._choose(self, node)

    def with_experts(self, node: fx.Node, inputs: Sequence[fx.Node], layer: Experts) -> Choice | None:
        """Return the way to run a node of a layer; where the experts are, weights are split by expert."""
        choice = Walk.with_experts(self, node, inputs, layer)
        if node not in self.inside.get(layer.sort, ()):
            return choice
        if choice is None:
            choice = Choice((None,) * len(inputs), self._whole(node, inputs).output, True, 0.0, kind="experts")
        if node.target is not PRODUCT:
            return choice
        rows, _, ends = choice.inputs
        return Choice((rows, Split(0, (layer.count,)), ends), choice.output, True, 0.0, kind="experts")


def spread_experts(captured: Captured, num_ranks: int) -> ExpertLayout:
    """Return the layout of `captured` over `num_ranks` ranks that hold other experts and compute other samples.

    Raises:
        PlanError: a layer has fewer experts than there are ranks.
    """
    walk = _ExpertWalk(captured, num_ranks, "auto", 1, by_samples=True)
    order = node_order(captured.graph)
    states: dict[str, Placement] = dict.fromkeys(captured.states)
    names = {node: name for name, node in captured.states.items()}
    for layer in find_experts(captured):
        walk.layers.update(dict.fromkeys(layer.roles, layer))
        nodes = frozenset(inside(layer, order.__getitem__))
        if not _can_be_sent(layer, nodes):
            continue
        _check_count(captured.module_path.get(layer.sort, ""), layer.count, num_ranks)
        walk.inside[layer.sort] = nodes
        for product in layer.products:
            state = _state_of(product, layer.count)
            if state in names:
                walk.placements[state] = whole_block(shape_of(state), 0)
                states[names[state]] = walk.placements[state]
    owners, refused = _find_called(captured, walk, num_ranks)
    size = samples_of(captured)
    if size >= num_ranks:
        walk.want_by_batch(0, size)
    walk.walk()
    spread = [
        SpreadExperts(layer, walk.inside[layer.sort], walk.blocks_of(layer) is not None, _name_of(layer))
        for layer in dict.fromkeys(walk.layers.values())
        if layer.sort in walk.inside
    ]
    unordered = walk.unordered()
    for one in spread:
        unordered |= one.inside
    return ExpertLayout(
        walk.choices, states, 0.0, [], walk.gathered, {}, {}, unordered, spread, walk.called, owners, refused
    )


def _find_called(captured: Captured, walk: _ExpertWalk, num_ranks: int) -> tuple[dict[str, int], dict[str, str]]:
    """Note in the walk which modules' own code has experts; return who has their parameters, and why others have none.

    A parameter that is used elsewhere too stays on every rank, and its module whole.
    """
    names = {node: name for name, node in captured.states.items()}
    owners: dict[str, int] = {}
    refused: dict[str, str] = {}
    for node in captured.graph.nodes:
        if not isinstance(node.target, OwnModule):
            continue
        path = node.target.part.path
        experts = own_experts(node.target, num_ranks)
        if isinstance(experts, str):
            refused[path] = experts
            continue
        states = {name: source for name, source in zip(node.target.names, node.args, strict=False)}
        of_experts = [states[name] for of_one in experts.states for name in of_one]
        shared = next((source for source in of_experts if len(source.users) > 1 or source not in names), None)
        if shared is not None:
            refused[path] = f"{names.get(shared, 'a weight of its experts')} is used more than once"
            continue
        _check_count(path, experts.count, num_ranks)
        walk.called[node] = experts
        for rank in range(num_ranks):
            for number in range(*chunk_range(experts.count, rank, num_ranks)):
                owners.update(dict.fromkeys((names[states[name]] for name in experts.states[number]), rank))
    return owners, refused


def _name_of(layer: Experts) -> str:
    return str(layer.sort.meta.get("module", "")) or "the model or the loss"


def describe_experts(captured: Captured, layout: ExpertLayout, num_ranks: int) -> list[ExpertLine]:
    """Return a line per layer of experts."""
    names = {node: name for name, node in captured.states.items()}
    lines = []
    for node, experts in layout.called.items():
        lines.append(
            ExpertLine(
                node.target.part.path,  # type: ignore[union-attr]
                experts.count,
                len(range(*chunk_range(experts.count, 0, num_ranks))),
                0,
                tuple(f"{path}.*" for path in experts.paths[0]),
                "rows of all on each",
                "its own code adds up what modules make that are alike",
            )
        )
    for spread in layout.spread:
        layer = spread.layer
        states = [names.get(_state_of(product, layer.count), "") for product in layer.products]
        way, why = "rows sent", f"{len(layer.products)} grouped products of rows that {layer.sort.name} sorts"
        if not spread.sends:
            way, why = "rows of all on each", f"the ranks' samples don't have equal parts of {layer.tokens} tokens"
        lines.append(
            ExpertLine(
                spread.name,
                layer.count,
                len(range(*chunk_range(layer.count, 0, num_ranks))),
                layer.slots // layer.tokens,
                tuple(name for name in states if name),
                way,
                why,
            )
        )
    return lines


def samples_of(captured: Captured) -> int:
    """Return the samples of the batch that a graph is of: the first dimension of most of its tensors."""
    sizes = Counter(shape_of(node)[0] for node in captured.inputs if shape_of(node))
    return sizes.most_common(1)[0][0] if sizes else 0


def check_samples(captured: Captured, num_ranks: int) -> None:
    """Raise PlanError unless every rank has a sample of the batch."""
    size = samples_of(captured)
    if size < num_ranks:
        raise PlanError(
            f"the plan's expert={num_ranks} should give every rank samples of a batch of its own",
            f"the batch, or micro-batch, that these ranks share has {size}",
            "use a larger batch_size, fewer micro-batches, or fewer ranks on that axis",
        )


def _can_be_sent(layer: Experts, nodes: frozenset[fx.Node]) -> bool:
    """True if rows are the first dimension of all that goes to the experts and comes from them."""
    for node in nodes:
        if any(user not in nodes for user in node.users) and layer.roles[node] != Role("rows"):
            return False
        for source in node.all_input_nodes:
            role = layer.roles.get(source)
            if role is None or source in nodes:
                continue
            is_float = source.meta["val"].is_floating_point()
            if role.kind != "ends" and not (role.kind == "rows" and role.dim == 0 and is_float):
                return False
    return True


def _state_of(product: fx.Node, count: int) -> fx.Node:
    """Return the value that a product's weight is a rearrangement of, with the experts still first."""
    node: fx.Node = product.args[1]  # type: ignore[assignment]
    whole = Split(0, (count,))
    while node.op == "call_function":
        sources = tensor_inputs(node)
        is_kept = node.target in _CASTS or (is_rearrangement(node) and carry(node, whole, 1) == whole)
        if len(sources) != 1 or not is_kept or shape_of(sources[0])[:1] != (count,):
            break
        (node,) = sources
    return node


def _check_count(where: str, count: int, num_ranks: int) -> None:
    """Raise PlanError unless each rank has an expert of a layer.

    Args:
        where: the path of the layer's module.
        count: its experts.
        num_ranks: of the axis.
    """
    first, last = chunk_range(count, num_ranks - 1, num_ranks)
    if first < last:
        return
    fitting = max(ranks for ranks in range(1, num_ranks) if len(range(*chunk_range(count, ranks - 1, ranks))))
    raise PlanError(
        f"the plan's expert={num_ranks} should give every rank experts of each layer",
        f"{where or 'the model'} has {count}, which leave a rank without one",
        f"write expert={fitting}, and replicate or shard for the other ranks",
    )


def no_experts(captured: Captured, num_ranks: int, refused: Mapping[str, str]) -> PlanError:
    """Return the error for a training batch's graph without a layer of experts.

    Args:
        captured: the graph.
        num_ranks: of the axis.
        refused: why modules that run by their own code have none.
    """
    products = sum(node.target is PRODUCT for node in captured.graph.nodes)
    found = "the model has no grouped matrix products (torch.nn.functional.grouped_mm) of rows sorted by expert"
    if products:
        found = (
            f"of the model's {products} grouped matrix products none is of rows that are sorted by expert, multiplied "
            "row by row and put back"
        )
    if refused:
        path, why = next(iter(refused.items()))
        found += f"; {path}, which runs by its own code, can't be spread: {why}"
    return PlanError(
        f"the plan's expert={num_ranks} should spread experts over {num_ranks} ranks",
        found,
        "compute experts by grouped_mm (in transformers experts_implementation='grouped_mm'), or use replicate, shard, "
        "tensor or pipeline",
    )
