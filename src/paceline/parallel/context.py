"""Context parallelism: each rank computes its positions of every sequence, with all of the model.

Attention is found in the captured graph, torch's operation or a softmax of a product written by hand, and is shared by
ring, by heads or by both (`graph/context_layout.py`, `comm/sequence.py`); everything else runs on the rank's positions,
or whole where positions meet in a way that no rule knows.

Needs: a model whose path depends on shapes alone, and sequences with a position for every rank.
Promises: losses, gradients and parameters are those of one rank, up to rounding; dropout too, on CPUs. Attention that
drops is not shared by ring or heads: each rank has the keys of all.
Traffic: per micro-batch what the graph says, counted by a dry run on fake tensors; per step the gradients of all
parameters, in one sum with those of `replicate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from paceline.comm.collectives import AxisComm
from paceline.comm.sequence import SequenceExchanges
from paceline.graph.capture import Captured
from paceline.graph.context_layout import ContextLayout, split_sequence
from paceline.graph.emit_context import emit_context


def layout_of(
    captured: Captured, comm: AxisComm, way: str, tensor_ranks: int, may_stay_whole: bool = False
) -> ContextLayout:
    """Return how the ranks of `comm`, the axis, share the sequences of a graph.

    Args:
        captured: the graph.
        comm: the `context` axis.
        way: the plan's context_by.
        tensor_ranks: size of the `tensor` axis, which splits heads too.
        may_stay_whole: sequences that are too short run whole on every rank.

    Raises:
        PlanError: no sequence can be shared, or not in this way.
    """
    return split_sequence(captured, comm.size, way, tensor_ranks, may_stay_whole)


def emit_positions(
    captured: Captured, layout: ContextLayout, comm: AxisComm, stages: Mapping[fx.Node, int]
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the graph as this rank of `comm` runs it, and for each new node the old one it was made for."""
    return emit_context(captured, layout, SequenceExchanges(comm), stages)


def as_first(comm: AxisComm) -> AxisComm:
    """Return the axis as its first rank sees it: by one rank's graph all decide where weights are split."""
    return replace(comm, rank=0)
