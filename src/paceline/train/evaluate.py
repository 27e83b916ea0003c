"""Evaluate over all ranks: each sample once, sums added up, divided at the end.

A ratio such as accuracy is `(sum, weight)` like the loss, so it is exact however the data is split.
Measures that are no ratio (F1, Matthews correlation) come from torchmetrics objects, whose counts are
added up over the ranks before they compute: never a mean of the ranks' values.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import LossError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.parallel.engine.engine import Engine
from paceline.parallel.micro_batches import checked_loss
from paceline.train.agree import fail_together
from paceline.train.data import Batch

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_MAX_DIMS = 8  # of a measure's state; an image has four

Score = Callable[[Any, Any], dict[str, tuple[Any, Any]]]


def evaluate(
    parallel: Engine,
    batches: Iterable[Batch],
    score: Score,
    comm: AxisComm,
    metrics: Any = None,
    is_apart: bool = False,
) -> dict[str, float]:
    """Return the global ratio of every name that `score` returns; NaN where nothing counted.

    Args:
        parallel: the engine with the model as this rank holds it, which is put into evaluation mode for the duration.
        batches: this rank's parts of the batches of the data.
        score: the function `score(model, batch)`, which returns a dict of (sum, weight).
        comm: the axis over which the data is split.
        metrics: the torchmetrics object that `score` updates, if any.
        is_apart: True if ranks compute without each other, so that the others are told where one fails.

    Raises:
        FailedTogetherError: another rank has failed.
        WorkloadError: `score` returned no dict, or the ranks' dicts have different names.
    """
    totals: dict[str, torch.Tensor] = {}  # (sum, weight) by name, on the device: no micro-batch is waited for
    model = parallel.model
    # Of each module: a frozen part may be in evaluation mode while the rest is trained.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    failure = None
    try:
        with torch.no_grad():
            for batch in batches:
                for number, microbatch in enumerate(parallel.in_step(batch.microbatches, batch.longest)):
                    # `in_step` fills up where every rank must run as many; what it adds does not count.
                    is_own = number < len(batch.microbatches)
                    states = [] if is_own else _states(metrics)
                    scores = _checked(parallel.evaluate("score", score, microbatch))
                    if is_own:
                        _add(scores, totals, parallel.device)
                    _put_back(states)
    except Exception as error:
        if not is_apart:
            raise
        failure = error
    finally:
        for module, was_training in modes:
            module.training = was_training
    if is_apart:
        fail_together("job.evaluate", failure, comm)
    # A rank without samples has no names, but must take part in the sum below with the others' rows.
    names = _names_everywhere(sorted(totals), comm)
    zero = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    if not names:
        return {}
    table = torch.stack([totals.get(name, zero) for name in names])  # (names, 2)
    comm.all_reduce(table)
    ratios = {}
    for name, (total, weight) in zip(names, table.tolist(), strict=True):
        ratios[name] = total / weight if weight else float("nan")
    return ratios


def _members(metrics: Any) -> list[Any]:
    """Return the metrics of a MetricCollection, or the one; none for None."""
    if metrics is None:
        return []
    return list(metrics.values()) if hasattr(metrics, "items") else [metrics]


def check_metrics(metrics: object) -> None:
    """Raise UsageError unless it is None, or counts and computes as torchmetrics' objects do."""
    if metrics is not None and not (hasattr(metrics, "compute") and hasattr(metrics, "reset")):
        raise UsageError(
            "metrics of job.evaluate should be a Metric or a MetricCollection of torchmetrics",
            f"it is {shown(metrics)}",
            "hand in the object that score updates, or leave it out where score returns ratios",
        )


def _states(metrics: object) -> list[tuple[Any, dict[str, Any], int]]:
    """Return each metric with a copy of what it has counted, as `score` may count in place."""
    members = _members(metrics)
    return [(member, copy.deepcopy(member.metric_state), member._update_count) for member in members]


def _put_back(states: list[tuple[Any, dict[str, Any], int]]) -> None:
    """Have metrics count what they had counted when `_states` was called."""
    for member, state, updates in states:
        for name, value in state.items():
            setattr(member, name, value)
        member._update_count = updates


def _add(scores: dict[str, Any], totals: dict[str, torch.Tensor], device: torch.device) -> None:
    for name, pair in scores.items():
        try:
            total, weight = checked_loss(_as_float(pair))
        except LossError:
            if name == "loss":
                raise
            raise LossError(
                f"the score {name!r} should be (sum, weight)",
                f"it is {_described(pair)}",
                "return what is added up, and of how many: (predictions == labels).sum(), len(labels)",
            ) from None
        entry = totals.setdefault(name, torch.zeros(2, dtype=torch.float64, device=device))
        entry[0] += total
        entry[1] += weight


def _as_float(pair: object) -> Any:
    """Return a pair whose sum is a count or a plain number with a tensor of a float, which `checked_loss` wants."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        return pair
    if type(pair[0]) in (int, float):  # no gradient is taken of it
        return torch.tensor(pair[0], dtype=torch.float64), pair[1]
    if getattr(pair[0], "dtype", None) not in _COUNTS:
        return pair
    return pair[0].double(), pair[1]


def _described(value: object) -> str:
    """Return a description of a value on one line."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple) and len(value) == 2:
        return f"a pair of {_described(value[0])} and {_described(value[1])}"
    return shown(value)


def reduce_metric(metric: Any, comm: AxisComm) -> Any:
    """Compute a torchmetrics Metric or MetricCollection from the counts of all ranks, and reset it."""
    metrics = _members(metric)
    # torchmetrics gathers its counts in `compute` by these functions; `_to_sync` is its private switch.
    for member in metrics:
        member.distributed_available_fn = lambda: comm.size > 1
        member.dist_sync_fn = lambda tensor, group=None: gather_rows(tensor, comm)
        member._to_sync = True
    value = metric.compute()
    metric.reset()
    return value


def gather_rows(tensor: torch.Tensor, comm: AxisComm) -> list[torch.Tensor]:
    """Return every rank's tensor, scalars too, as torchmetrics' gather function does.

    A rank that saw no sample can't know the dtype and shape of the rows that others have (torchmetrics gives
    it an empty vector of floats), so each rank sends its form first; an empty one takes the others'.
    """
    if comm.size == 1:
        return [tensor]
    # Step 1: the forms, as rows of one length. With different dtypes or shapes Gloo ended the process, or read numbers
    # as another type.
    padding = [0] * (_MAX_DIMS - tensor.dim())
    form = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]
    dtypes: list[torch.dtype] = []  # of each rank
    shapes: list[tuple[int, ...]] = []
    for row in comm.all_gather(torch.tensor([form], device=tensor.device)):
        number, dims, *sizes = row.flatten().tolist()
        dtypes.append(_DTYPES[number])  # the same list on all ranks
        shapes.append(tuple(sizes[:dims]))
    # Step 2: agree on the form of ranks that have rows; the others take it over.
    filled = [rank for rank, shape in enumerate(shapes) if 0 not in shape]
    dtype = tensor.dtype
    if filled:
        dtype = functools.reduce(torch.promote_types, [dtypes[rank] for rank in filled])
        row_shape = shapes[filled[0]][1:]
        for rank in range(len(shapes)):
            if rank not in filled:
                shapes[rank] = (0, *row_shape)
    # As bytes: Gloo and NCCL do not carry every dtype.
    sent = tensor.detach().to(dtype).reshape(-1).view(torch.uint8)
    gathered = comm.all_gather(sent)
    return [received.view(dtype).view(shape) for received, shape in zip(gathered, shapes, strict=True)]


def _checked(result: object) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise WorkloadError(
            "score should return a dict of (sum, weight)",
            f"it returned a {type(result).__name__}",
            "return e.g. {'accuracy': (correct.sum(), correct.numel())}",
        )
    return result


def _names_everywhere(local_names: list[str], comm: AxisComm) -> list[str]:
    """Return the names that any rank has: a rank without a batch has none."""
    texts = comm.all_gather_text("\n".join(local_names))
    names: set[str] = set()
    for text in texts:
        names.update(text.split("\n"))
    return sorted(names - {""})
