"""Spread a graph's experts over the ranks of `expert`: each holds some of them, and computes its samples of the batch.

Samples are followed through the graph as `context` follows positions (`walk.py`): what mixes them in a way that no rule
knows runs whole on every rank. So a loss over all tokens, as the router's, is that of one rank. In a layer of experts
(`find_experts.py`) rows go to the ranks with their experts and come back. Where a layer's tokens are whole on every
rank, because they don't divide, each computes the rows of its experts and the results are joined.

Needs: a model whose path depends only on shapes, experts computed by grouped products, an expert of each layer and a
sample for every rank.
Promises: losses (those of the router too), gradients and parameters are those of one rank, up to rounding.
Traffic: per micro-batch and layer an all_to_all of counts and one of rows each way, forward and backward, counted as
the rows of the rank's own tokens (`expert_exchanges.py`); per step the gradients of all parameters but the experts',
in one sum with those of `replicate` and `context`, and the experts' over these two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.expert.find_experts import PRODUCT, Experts, Role, inside
from paceline.graph.expert.own_experts import own_experts
from paceline.graph.labels import node_order, tensor_inputs
from paceline.graph.own_modules import OwnModule
from paceline.graph.placement import Split, whole_block
from paceline.graph.reshape_rules import carry, is_rearrangement, shape_of
from paceline.graph.walk import SpreadLayout, Walk
from paceline.nouns.errors import PlanError
from paceline.nouns.shard_spec import chunk_range

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default)


@dataclass(frozen=True, slots=True)
class ExpertLine:
    """What a user is told of a layer of experts.

    Attributes:
        module: path of the module that sorts its rows.
        experts: of the layer.
        per_rank: of the first rank.
        choices: the number of experts that a token goes to; 0 where its own code decides.
        weights: the names of the parameters that are spread.
        way: "rows sent", or "rows of all on each".
        why: the reason, in words.
    """

    module: str
    experts: int
    per_rank: int
    choices: int
    weights: tuple[str, ...]
    way: str
    why: str


def spread_experts(captured: Captured, num_ranks: int, spreads_modules: bool = True) -> SpreadLayout:
    """Return the layout of `captured` over `num_ranks` ranks that hold other experts and compute other samples.

    Args:
        captured: the captured graph.
        num_ranks: the number of ranks on the axis.
        spreads_modules: whether experts that are modules, called by the code of others, are on one rank each.

    Raises:
        PlanError: a layer has fewer experts than there are ranks.
    """
    walk = Walk(captured, num_ranks)
    order = node_order(captured.graph)
    states = set(captured.states.values())
    for layer in dict.fromkeys(walk.layers.values()):
        nodes = frozenset(inside(layer, order.__getitem__))
        if not _can_be_sent(layer, nodes):
            continue
        _check_count(captured.module_path.get(layer.sort, ""), layer.count, num_ranks)
        walk.inside[layer.sort] = nodes
        for product in layer.products:
            state = _state_of(product, layer.count)
            if state in states:
                walk.placements[state] = whole_block(shape_of(state), 0)
    owners: dict[str, int] = {}
    refused: dict[str, str] = {}
    if spreads_modules:
        owners, refused = _find_called(captured, walk, num_ranks)
    size = samples_of(captured)
    if size >= num_ranks:
        walk.want_by_batch(0, size)
    layout = walk.run()
    layout.owners, layout.refused = owners, refused
    return layout


def first_layout(captured: Captured, num_ranks: int, spreads_modules: bool = True) -> SpreadLayout:
    """Return the layout of the graph of a training batch; others may have few samples, or leave experts out.

    Raises:
        PlanError: there are no experts, too few of them, or too few samples.
    """
    check_samples(captured, num_ranks)
    layout = spread_experts(captured, num_ranks, spreads_modules)
    if not layout.spread and not layout.called:
        raise no_experts(captured, num_ranks, layout.refused)
    return layout


def _find_called(captured: Captured, walk: Walk, num_ranks: int) -> tuple[dict[str, int], dict[str, str]]:
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
        of_experts = [states[name] for name in itertools.chain.from_iterable(experts.states)]
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


def describe_experts(captured: Captured, layout: SpreadLayout, num_ranks: int) -> list[ExpertLine]:
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
        way, reason = "rows sent", f"{len(layer.products)} grouped products of rows that {layer.sort.name} sorts"
        if not spread.sends:
            way, reason = "rows of all on each", f"the ranks' samples don't have equal parts of {layer.tokens} tokens"
        lines.append(
            ExpertLine(
                spread.name,
                layer.count,
                len(range(*chunk_range(layer.count, 0, num_ranks))),
                layer.slots // layer.tokens,
                tuple(name for name in states if name),
                way,
                reason,
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
    all_experts = Split(0, (count,))
    while node.op == "call_function":
        sources = tensor_inputs(node)
        is_kept = node.target in _CASTS or (is_rearrangement(node) and carry(node, all_experts, 1) == all_experts)
        if len(sources) != 1 or not is_kept or shape_of(sources[0])[:1] != (count,):
            break
        (node,) = sources
    return node


def _check_count(path: str, count: int, num_ranks: int) -> None:
    """Raise PlanError unless each rank has an expert of a layer.

    Args:
        path: the path of the layer's module.
        count: the number of its experts.
        num_ranks: the number of ranks on the axis.
    """
    first, last = chunk_range(count, num_ranks - 1, num_ranks)
    if first < last:
        return
    fitting = max(ranks for ranks in range(1, num_ranks) if len(range(*chunk_range(count, ranks - 1, ranks))))
    raise PlanError(
        f"the plan's expert={num_ranks} should give every rank experts of each layer",
        f"{path or 'the model'} has {count}, which leave a rank without one",
        f"write expert={fitting}, and replicate or shard for the other ranks",
    )


def no_experts(captured: Captured, num_ranks: int, refused: Mapping[str, str]) -> PlanError:
    """Return the error for a training batch's graph without a layer of experts.

    Args:
        captured: the captured graph.
        num_ranks: the number of ranks on the axis.
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
        path, reason = next(iter(refused.items()))
        found += f"; {path}, which runs by its own code, can't be spread: {reason}"
    return PlanError(
        f"the plan's expert={num_ranks} should spread experts over {num_ranks} ranks",
        found,
        "compute experts by grouped_mm (in transformers experts_implementation='grouped_mm'), or use replicate, shard, "
        "tensor or pipeline",
    )
