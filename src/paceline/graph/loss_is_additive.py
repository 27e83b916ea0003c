"""Is the loss a sum over samples? If not, cutting the batch changes it: batch norm, contrastive losses.

The batch's first dimension is followed through the graph by the rules of `rules.py`. As long as every operation
works on each sample by itself, and samples only meet in sums that nothing but further sums and scalings follow,
the loss of a batch is the sum of its parts' losses.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.expert.find_experts import Experts, find_experts, is_counted_for_others
from paceline.graph.functional import written_groups
from paceline.graph.labels import tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.sample_rules import samples_after
from paceline.graph.tensor.choices import Choice, Options, choices

aten = torch.ops.aten
_SUM = "sum over samples"  # in the place of a placement
_KEEPS_SUM = (
    aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten.to.dtype, aten.clone.default, aten.reshape.default,
    aten.view.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.squeeze.default,
)  # fmt: skip
_ADDS = (aten.add.Tensor, aten.sub.Tensor)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLED = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default,
)  # fmt: skip
_SAME_NUMBERS = (
    aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.clone.default, aten.alias.default, aten.slice.Tensor, aten.expand.default,
)  # fmt: skip


def _layers_of_experts(captured: Captured) -> dict[fx.Node, Experts]:
    """Return the layer of experts of each node that is in one."""
    layers: dict[fx.Node, Experts] = {}
    for layer in find_experts(captured):
        layers |= dict.fromkeys(layer.roles, layer)
    return layers


def coupled_at(captured: Captured) -> fx.Node | None:
    """Return the first operation in which samples meet, or of which that can't be told; None where there is none.

    Batch norm comes last: its statistics can be shared, so it must not hide another operation behind it.
    """
    samples = _samples(captured)
    # With one sample nothing can be cut, so nothing can meet.
    if samples is None or samples < 2:
        return None
    placements: dict[fx.Node, Any] = {}
    for node in captured.inputs:
        if node.meta["val"].shape[:1] == (samples,):
            placements[node] = Split(0, (samples,))
    written = written_groups(captured.graph)
    layers = _layers_of_experts(captured)
    batch_norm = None
    for node in captured.graph.nodes:
        if node.op != "call_function" or _keeps_tokens_apart(node, layers.get(node), placements):
            continue
        is_counted = node in layers and is_counted_for_others(node, layers[node])  # the rows of all samples
        if not is_counted and _follow(node, placements, samples, node in written):
            continue
        if node.target is not aten.batch_norm.default:
            return node  # type: ignore[no-any-return]
        if batch_norm is None:
            batch_norm = node
        # Go on as if it kept samples apart: whatever else lets them meet must be found.
        placements[node] = placements.get(tensor_inputs(node)[0])
    loss = captured.output[0] if captured.output else None
    if isinstance(loss, fx.Node) and loss.op == "call_function" and placements.get(loss) != _SUM:
        return loss  # it counts once for each part: a penalty that depends only on the weights
    return batch_norm


def _keeps_tokens_apart(node: fx.Node, layer: Experts | None, placements: dict[fx.Node, Any]) -> bool:
    """Follow the tokens of a layer of experts, each of which is computed by itself, in whatever order they lie.

    True if what comes in from outside has the samples along its rows.
    """
    if layer is None or is_counted_for_others(node, layer):
        return False
    for source in node.all_input_nodes:
        if source not in layer.roles and source in layer.aligned:
            if placements.get(source) != Split(0, (layer.aligned[source],)):
                return False
        elif source in placements:
            return False
    if layer.roles[node].kind == "restored":
        placements[node] = Split(0, (node.meta["val"].shape[0],))
    return True


def _follow(node: fx.Node, placements: dict[fx.Node, Any], samples: int, is_written: bool) -> bool:
    """Note where the samples lie in the node's output; False when they meet in it."""
    inputs = tensor_inputs(node)
    if node.target is operator.getitem:
        of_outputs = placements.get(inputs[0])
        if isinstance(of_outputs, tuple):
            _note(node, of_outputs[node.args[1]], placements)  # type: ignore[index]
        return True
    now = [placements.get(source) for source in inputs]
    if _is_same_for_all(node, samples):
        placements[node] = Split(0, (samples,))
        return True
    if node.target in _FILLED:
        return True  # takes only dtype and device from its input
    if node.target is aten.index.Tensor:
        picked = _rows_picked(node, now, samples)
        if picked is not None:
            placements[node] = picked
            return True
    return _follow_inputs(node, inputs, now, placements, samples, is_written)


def _note(node: fx.Node, placement: Any, placements: dict[fx.Node, Any]) -> None:
    if placement is not None:
        placements[node] = placement


def _follow_inputs(
    node: fx.Node,
    inputs: list[fx.Node],
    now: list[Any],
    placements: dict[fx.Node, Any],
    samples: int,
    is_written: bool,
) -> bool:
    """Note where the samples of a node's inputs lie in its output; False when they meet in it."""
    # After the sum only further sums and scalings may follow.
    if any(placement == _SUM for placement in now):
        placements[node] = _SUM
        return _keeps_sum(node, inputs, now)
    if is_written and any(isinstance(placement, Split) for placement in now):
        placements[node] = Split(0, (samples,))  # rows written into place, each its own
        return True
    if all(placement is None for placement in now):
        return True
    match = _matching(node, now, samples)
    if match is None:
        placements[node] = samples_after(node, now, samples)
        return placements[node] is not None
    placements[node] = match.output if match.after is None else _SUM
    return True


def _keeps_sum(node: fx.Node, inputs: list[fx.Node], now: list[Any]) -> bool:
    """True if an operation on sums over samples gives such a sum.

    What is added to a sum, a constant or a penalty on the weights, would count once for each part of the batch.
    """
    if any(isinstance(placement, Split) for placement in now):
        return False
    are_sums = [placement == _SUM for placement in now]
    if node.target in _ADDS:
        numbers = [argument for argument in node.args[:2] if not isinstance(argument, fx.Node)]
        for source, is_sum in zip(inputs, are_sums, strict=True):
            if not is_sum and source.target not in _ZEROS:
                return False
        return not any(bool(number) for number in numbers)
    if node.target is aten.mul.Tensor:
        return are_sums.count(True) == 1
    if node.target is aten.div.Tensor:
        return isinstance(node.args[0], fx.Node) and are_sums in ([True], [True, False])
    return bool(node.target in _KEEPS_SUM)


def _matching(node: fx.Node, now: list[Any], samples: int) -> Choice | None:
    """Return the way to run the node that takes its inputs as they lie, one sample on each of as many ranks.

    Two ranks would say that neighbours which the model pairs don't meet, and that those of an odd batch do.
    """
    placements = tuple(now)
    for choice in choices(node, now, [True] * len(now), Options(samples, {}, {}, set(), set())):
        if choice.is_split and choice.inputs == placements and choice.after != "scatter":
            return choice
    return None


def _is_same_for_all(node: fx.Node, samples: int) -> bool:
    """True for rows made for as many samples as there are, all alike: an expanded row, a filled tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != samples:
        return False
    if node.target in _FILLED:
        return True
    if node.target is not aten.expand.default:
        return False
    shape_before = tuple(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    return len(shape_before) < value.dim() or shape_before[0] == 1


def _rows_picked(node: fx.Node, now: list[Any], samples: int) -> Split | None:
    """Place the samples of `x[rows, ...]` with rows = arange(samples): each picks its own row."""
    indices: Any = node.args[1]
    if now[0] != Split(0, (samples,)) or any(placement is not None for placement in now[1:]) or indices[0] is None:
        return None
    rows = indices[0]
    rows_shape = tuple(rows.meta["val"].shape)
    if not _counts_samples(rows, samples) or samples not in rows_shape or any(index is None for index in indices):
        return None
    shape = tuple(node.meta["val"].shape)
    if len(shape) != max(len(index.meta["val"].shape) for index in indices):
        return None
    dim = len(shape) - len(rows_shape) + rows_shape.index(samples)
    return Split(dim, (samples,)) if shape[dim] == samples else None


def _counts_samples(rows: fx.Node, samples: int) -> bool:
    """True if a node holds the numbers of the samples: `arange(samples)`, reshaped or cast."""
    source: Any = rows
    while source.op == "call_function" and source.target in _SAME_NUMBERS:
        source = source.args[0]
    if source.target not in (aten.arange.default, aten.arange.start):
        return False
    return bool(source.meta["val"].shape[0] == samples)


def _samples(captured: Captured) -> int | None:
    """Return the number of samples: the first dimension that most of the batch's tensors have."""
    sizes = [node.meta["val"].shape[0] for node in captured.inputs if node.meta["val"].dim()]
    if not sizes:
        return None
    return int(max(set(sizes), key=sizes.count))
