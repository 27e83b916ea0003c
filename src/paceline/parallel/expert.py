"""Expert parallelism: the ranks hold other experts of each layer, and compute other samples of the same batch.

Layers of experts are found in the captured graph by what they compute: grouped products of rows that are sorted by
expert (`graph/find_experts.py`). Rows go to the ranks with their experts and come back; none is dropped. Everything
else runs on the rank's samples, or whole where samples meet in a way that no rule knows (`graph/expert_layout.py`).

Needs: a model whose path depends on shapes alone, experts computed by grouped products, an expert of each layer and a
sample for every rank.
Promises: losses (those of the router too), gradients and parameters are those of one rank, up to rounding.
Traffic: per micro-batch and layer an all_to_all of counts and one of rows each way, forward and backward, counted as
the rows of the rank's own tokens (`comm/experts.py`); per step the gradients of all parameters but the experts', in one
sum with those of `replicate` and `context`, and the experts' over these two.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from paceline.comm.collectives import AxisComm
from paceline.comm.experts import ExpertExchanges, ExpertLoads
from paceline.graph.capture import Captured
from paceline.graph.emit_experts import emit_experts
from paceline.graph.expert_layout import ExpertLayout, check_samples, no_experts, spread_experts


def first_layout(captured: Captured, comm: AxisComm) -> ExpertLayout:
    """Return how the ranks of `comm`, the axis, spread the experts of the graph of a training batch.

    Raises:
        PlanError: there are no experts, too few of them, or too few samples.
    """
    check_samples(captured, comm.size)
    layout = spread_experts(captured, comm.size)
    if not layout.spread and not layout.called:
        raise no_experts(captured, comm.size, layout.refused)
    return layout


def layout_of(captured: Captured, comm: AxisComm) -> ExpertLayout:
    """Return the same for any batch and function: an evaluation may have few samples, or leave experts out."""
    return spread_experts(captured, comm.size)


def emit_samples(
    captured: Captured, layout: ExpertLayout, comm: AxisComm, stages: Mapping[fx.Node, int], loads: ExpertLoads
) -> tuple[Captured, dict[fx.Node, fx.Node]]:
    """Return the graph as this rank of `comm` runs it, and for each new node the old one it was made for.

    Args:
        captured: the graph.
        layout: how its experts and samples are spread.
        comm: the axis.
        stages: of its nodes.
        loads: counts the rows that go to each expert.
    """
    return emit_experts(captured, layout, ExpertExchanges(comm, loads), stages)
