"""Evaluation over all ranks: each sample once, sums added up, divided at the end.

A ratio such as accuracy is `(sum, weight)` like the loss, so it is exact however the data is split.
Measures that are no ratio (F1, Matthews correlation) come from torchmetrics objects, whose counts are
added up over the ranks before they compute: never a mean of the ranks' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError
from paceline.parallel.local import checked_loss

Score = Callable[[Any, Any], dict[str, tuple[Any, Any]]]


def evaluate(
    model: torch.nn.Module, batches: Iterable[Any], score: Score, comm: AxisComm, device: torch.device
) -> dict[str, float]:
    """The global ratio of every name that `score` returns; NaN where nothing counted.

    Args:
        model: put into evaluation mode for the duration.
        batches: this rank's micro-batches.
        score: `score(model, batch)`, a dict of (sum, weight).
        comm: the axis over which the data is split.
        device: where the sums are kept.

    Raises:
        WorkloadError: `score` returned no dict, or the ranks' dicts have different names.
    """
    totals: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                for name, pair in _checked(score(model, batch)).items():
                    total, weight = checked_loss(pair)
                    entry = totals.setdefault(name, torch.zeros(2, dtype=torch.float64, device=device))
                    entry[0] += total
                    entry[1] += weight
    finally:
        model.train(was_training)
    names = _names_everywhere(sorted(totals), comm)
    zero = torch.zeros(2, dtype=torch.float64, device=device)
    if not names:
        return {}
    table = torch.stack([totals.get(name, zero) for name in names])
    comm.all_reduce(table)
    return {
        name: total / weight if weight else float("nan")
        for name, (total, weight) in zip(names, table.tolist(), strict=True)
    }


def reduce_metric(metric: Any, comm: AxisComm) -> Any:
    """Compute a torchmetrics Metric or MetricCollection from the counts of all ranks, and reset it."""
    metrics = list(metric.values()) if hasattr(metric, "items") else [metric]
    for one in metrics:
        one.distributed_available_fn = lambda: comm.size > 1
        one.dist_sync_fn = lambda tensor, group=None: gather_rows(tensor, comm)
        one._to_sync = True
    value = metric.compute()
    metric.reset()
    return value


def gather_rows(tensor: torch.Tensor, comm: AxisComm) -> list[torch.Tensor]:
    """Every rank's tensor, scalars too: what torchmetrics wants of its gather function."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return [part.reshape(()) if tensor.dim() == 0 else part for part in comm.all_gather(flat)]


def _checked(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise WorkloadError(
            "score should return a dict of (sum, weight)",
            f"it returned a {type(result).__name__}",
            "return e.g. {'accuracy': (correct.sum(), correct.numel())}",
        )
    return result


def _names_everywhere(names: list[str], comm: AxisComm) -> list[str]:
    """The names that any rank has: a rank without a batch has none."""
    packed = torch.frombuffer(bytearray("\n".join(["", *names]).encode() or b"\n"), dtype=torch.uint8)
    gathered = comm.all_gather(packed)
    return sorted({name for part in gathered for name in bytes(part.tolist()).decode().split("\n") if name})
