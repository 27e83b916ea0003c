"""What a LightningModule logs: reduced over the ranks, as one process with the whole batches has it.

A mean is weighted by the samples of each rank's part (or by `batch_size`), sums are added up, and so on. Every rank has
the same values, bit for bit, so that what is decided by them is the same everywhere.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.fully_shard import gathered
from paceline.nouns.errors import CollectiveError, UsageError
from paceline.nouns.parts import shown
from paceline.train.evaluate import reduce_metric
from paceline.train.loop_job import LoopJob

_REDUCTIONS = ("mean", "sum", "max", "min")
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
_BY_BATCH = (
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_BY_EVALUATED_BATCH = (
    "validation_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "test_step",
    "on_test_batch_start",
    "on_test_batch_end",
)
_BY_EPOCH = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
)


@dataclass(frozen=True, slots=True)
class Key:
    """What is logged, and how; two calls of `self.log` with equal keys add up."""

    hook: str
    name: str
    dataloader: int | None
    on_step: bool
    on_epoch: bool
    reduction: str
    prog_bar: bool
    logger: bool

    def shown_as(self, on_step: bool) -> list[str]:
        """Return the names under which a value is to be had: `loss_epoch` too, where it is logged in both ways."""
        names = [self.name]
        if self.on_step and self.on_epoch:
            names.append(f"{self.name}_{'step' if on_step else 'epoch'}")
        suffix = "" if self.dataloader is None else f"/dataloader_idx_{self.dataloader}"
        return [name + suffix for name in names]


@dataclass
class Entry:
    """The values of one key that this rank has.

    Attributes:
        total: their sum, weighted; or their largest or smallest.
        weight: what they are divided by for a mean.
        step: the value of this batch; None before it is logged in it.
        metric: a torchmetrics Metric, which adds up by itself.
        dtype: in which the value over all ranks is shown.
        computed: the value over all ranks, since it was logged last.
    """

    total: torch.Tensor
    weight: float = 0.0
    dtype: torch.dtype = torch.float32
    step: torch.Tensor | None = None
    step_weight: float = 0.0
    metric: Any = None
    computed: torch.Tensor | None = None


@dataclass
class Values:
    """Values over all ranks, by name.

    Attributes:
        callback: for callbacks and schedulers.
        logged: for the record of the run.
        shown: for a progress bar.
    """

    callback: dict[str, torch.Tensor] = field(default_factory=dict)
    logged: dict[str, torch.Tensor] = field(default_factory=dict)
    shown: dict[str, float] = field(default_factory=dict)


class Log:
    """What is logged in one loop: the training, or one evaluation.

    Args:
        job: whose ranks have the other parts of the batches.
        is_training: values of single steps are for callbacks too.
    """

    def __init__(self, job: LoopJob, is_training: bool) -> None:
        self.job = job
        self.is_training = is_training
        self.entries: dict[Key, Entry] = {}
        self.samples = 1  # of this rank's part of the batch
        self.counts = True  # this rank has samples of the batch
        self.dataloader: int | None = None
        self.last_step = Values()  # of the last batch
        # Totals before the batches since the last update, which a resumed job takes again.
        self.before: dict[Key, tuple[torch.Tensor, float]] | None = None

    def begin_batch(self, samples: int, counts: bool, dataloader: int | None = None) -> None:
        """Take values as those of a batch from here on."""
        self.samples, self.counts, self.dataloader = samples, counts, dataloader
        for entry in self.entries.values():
            entry.step = None
        if self.is_training and self.job.batches_seen == 1:
            self.before = self._totals()

    def end_batches(self) -> None:
        """Take values as those of the whole epoch, the same on every rank, from here on."""
        self.samples, self.counts, self.dataloader = 1, True, None

    def add(self, hook: str | None, name: str, value: Any, options: dict[str, Any]) -> None:
        """Take a value that the module logs.

        Args:
            hook: that runs.
            name: of the value.
            value: a number, a tensor with one, or a torchmetrics Metric.
            options: the arguments of `LightningModule.log`.

        Raises:
            UsageError: it can't be logged here, or so.
        """
        key = self._key(hook, name, options)
        if key not in self.entries:
            self._check_is_new(key)
            neutral = torch.tensor(_NEUTRAL[key.reduction], dtype=torch.float64, device=self.job.device)
            self.entries[key] = Entry(neutral, dtype=torch.get_default_dtype())
        entry = self.entries[key]
        entry.computed = None
        given = options.get("batch_size")
        weight = float(self.samples if given is None else given) if self.counts else 0.0
        if callable(getattr(value, "compute", None)):
            entry.metric = value
            value = getattr(value, "_forward_cache", None)  # of this batch, if the metric was called
            if value is None:
                return
        number = self._number(name, value)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            entry.dtype = torch.promote_types(entry.dtype, value.dtype)
        if not self.counts:
            number = torch.full_like(number, _NEUTRAL[key.reduction])
        if key.on_step:
            entry.step, entry.step_weight = number, weight
        if key.reduction == "mean":
            entry.total = entry.total + number * weight
            entry.weight += weight
        elif key.reduction == "sum":
            entry.total = entry.total + number
        else:
            entry.total = getattr(torch, f"{key.reduction}imum")(entry.total, number)

    def _key(self, hook: str | None, name: str, options: dict[str, Any]) -> Key:
        on_step, on_epoch = options.get("on_step"), options.get("on_epoch")
        if hook in _BY_BATCH or hook in _BY_EVALUATED_BATCH:
            on_step = hook in _BY_BATCH if on_step is None else on_step
            on_epoch = hook in _BY_EVALUATED_BATCH if on_epoch is None else on_epoch
        elif hook in _BY_EPOCH and not on_step:
            on_step, on_epoch = False, on_epoch is not False
        else:
            hooks = "the hooks of a batch, or with on_epoch in those at the beginning and end of an epoch"
            found = f"{name!r} is logged in {hook}" if hook else f"{name!r} is logged outside of a hook"
            raise UsageError(f"self.log is for {hooks}", found, "log it in one of these, without on_step=True")
        if not (on_step or on_epoch):
            raise UsageError("self.log needs on_step or on_epoch", f"{name!r} has neither", "write one of them")
        reduction = options.get("reduce_fx", "mean")
        reduction = str(getattr(reduction, "__name__", reduction)).lower().replace("avg", "mean")
        if reduction not in _REDUCTIONS:
            raise UsageError(
                f"reduce_fx of self.log is one of {', '.join(_REDUCTIONS)}",
                f"that of {name!r} is {shown(options['reduce_fx'])}",
                "write one of them, or log a torchmetrics Metric",
            )
        dataloader = self.dataloader if options.get("add_dataloader_idx", True) else None
        shows = bool(options.get("prog_bar", False)), options.get("logger") is not False
        return Key(str(hook), name, dataloader, bool(on_step), bool(on_epoch), reduction, *shows)

    def _check_is_new(self, key: Key) -> None:
        for other in self.entries:
            if (other.hook, other.name, other.dataloader) == (key.hook, key.name, key.dataloader):
                raise UsageError(
                    "self.log takes one name with the same arguments each time",
                    f"{key.name!r} is logged in {key.hook} with others than before",
                    "give the other value another name",
                )

    def _number(self, name: str, value: Any) -> torch.Tensor:
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not is_number:
            raise UsageError(
                "self.log takes a number, a tensor with one number, or a torchmetrics Metric",
                f"{name!r} is {shown(value)}",
                "log value.mean(), or each value of a dict by self.log_dict",
            )
        if isinstance(value, torch.Tensor):
            whole: torch.Tensor = gathered(value.detach())  # the norm of a gradient in parts is in parts too
            return whole.to(self.job.device, torch.float64).reshape(())
        return torch.tensor(float(value), dtype=torch.float64, device=self.job.device)

    def of_step(self) -> Values:
        """Return what was logged for this batch, over all ranks. Collective, if something was."""
        keys = [key for key, entry in self.entries.items() if key.on_step and entry.step is not None]
        rows = []
        for key in keys:
            entry = self.entries[key]
            assert entry.step is not None
            rows.append((entry.step * entry.step_weight if key.reduction == "mean" else entry.step, entry.step_weight))
        values = Values()
        for key, value in zip(keys, self._reduced(keys, rows), strict=True):
            self._put(values, key, value, on_step=True)
        self.last_step = values
        return values

    def of_epoch(self) -> Values:
        """Return what was logged since `clear`, over all ranks. Collective, if something is new."""
        keys = [key for key, entry in self.entries.items() if key.on_epoch]
        fresh = [key for key in keys if self.entries[key].computed is None]
        plain = [key for key in fresh if self.entries[key].metric is None]
        rows = [(self.entries[key].total, self.entries[key].weight) for key in plain]
        for key, value in zip(plain, self._reduced(plain, rows), strict=True):
            self.entries[key].computed = value
        for key in fresh:
            metric = self.entries[key].metric
            if metric is not None:
                computed = compute_over(metric, self.job)
                self.entries[key].computed = self._number(key.name, computed).to(self.entries[key].dtype)
        values = Values()
        for key in keys:
            computed = self.entries[key].computed
            assert computed is not None
            self._put(values, key, computed, on_step=False)
        return values

    def _put(self, values: Values, key: Key, value: torch.Tensor, on_step: bool) -> None:
        names = key.shown_as(on_step)
        if self.is_training or not on_step:
            values.callback.update(dict.fromkeys(names, value))
        if key.logger:
            values.logged[names[-1]] = value
        if key.prog_bar:
            values.shown[names[-1]] = float(value)

    def _reduced(self, keys: Sequence[Key], rows: Sequence[tuple[torch.Tensor, float]]) -> list[torch.Tensor]:
        """Return the values of some keys over all ranks that have other samples. Collective."""
        if not keys:
            return []
        check = float(zlib.crc32(repr(keys).encode()))
        mine = torch.empty(len(keys), 3, dtype=torch.float64, device=self.job.device)
        for number, (value, weight) in enumerate(rows):
            mine[number, 0] = check
            mine[number, 1] = value
            mine[number, 2] = weight
        every = self.job.all_gather(mine)
        if len(every) != len(keys) * self.job.data_size or bool((every[:, 0] != check).any()):
            raise CollectiveError(
                "every rank should log the same names, in the same order",
                f"another rank logs others than {', '.join(repr(key.name) for key in keys)}",
                "call self.log on every rank, whatever its samples are; a mean of none has batch_size=0",
            )
        table = every.reshape(self.job.data_size, len(keys), 3)
        found = []
        for number, key in enumerate(keys):
            value = _over(key.reduction, table[:, number, 1], table[:, number, 2])
            found.append(value.to(self.entries[key].dtype))
        return found

    def clear(self) -> None:
        """Begin anew, as for the next epoch."""
        for entry in self.entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        self.entries.clear()
        self.before = None

    def _totals(self) -> dict[Key, tuple[torch.Tensor, float]]:
        """Return total and weight of what adds up over the epoch."""
        found = {}
        for key, entry in self.entries.items():
            if entry.metric is None and key.on_epoch:
                found[key] = entry.total, entry.weight
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what every rank has, for a checkpoint; counts of torchmetrics are not in it. Collective."""
        totals = self._totals() if self.before is None or not self.job.batches_seen else self.before
        if not totals:
            return {"keys": []}
        mine = torch.stack([total for total, _ in totals.values()])
        weights = torch.tensor([weight for _, weight in totals.values()], dtype=torch.float64, device=mine.device)
        rows = self.job.all_gather(torch.stack([mine, weights])[None])
        fields = [[getattr(key, name) for name in Key.__dataclass_fields__] for key in totals]
        return {"keys": fields, "rows": rows.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what a checkpoint has. On another number of ranks the first one has it all."""
        self.entries.clear()
        self.before = None
        for number, fields in enumerate(state["keys"]):
            key = Key(*fields)
            totals = state["rows"][:, 0, number].to(self.job.device)
            weights = state["rows"][:, 1, number]
            if len(totals) == self.job.data_size:
                total, weight = totals[self.job.data_rank], float(weights[self.job.data_rank])
            elif self.job.data_rank == 0:
                # Totals of a mean are weighted already: they add up as sums do.
                reduction = "sum" if key.reduction == "mean" else key.reduction
                total, weight = _over(reduction, totals, weights), float(weights.sum())
            else:
                total, weight = torch.full_like(totals[0], _NEUTRAL[key.reduction]), 0.0
            self.entries[key] = Entry(total.clone(), weight, torch.get_default_dtype())


def _over(reduction: str, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return one value for those of the ranks; NaN for a mean of nothing."""
    if reduction == "mean":
        return values.sum() / weights.sum()
    return values.sum() if reduction == "sum" else getattr(values, reduction)()


def compute_over(metric: Any, job: LoopJob) -> Any:
    """Return what a torchmetrics Metric computes from the counts of the ranks with other samples. Collective."""
    return reduce_metric(_NotReset(metric), job.comms.data)


class _NotReset:
    """A metric that keeps its counts: they are cleared when the epoch has ended."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def values(self) -> list[Any]:
        """Return the metrics that are in it."""
        return [self.metric]

    items = values

    def compute(self) -> Any:
        """Return what it computes."""
        return self.metric.compute()

    def reset(self) -> None:
        """Keep the counts."""


@contextmanager
def kept_counts(module: torch.nn.Module) -> Iterator[None]:
    """Leave the torchmetrics of a module as they were: the samples inside do not count."""
    kept = []
    for each in module.modules():
        names = getattr(each, "_defaults", None) if callable(getattr(each, "compute", None)) else None
        if names is not None:
            kept.append((each, {name: copy.deepcopy(getattr(each, name)) for name in (*names, "_update_count")}))
    try:
        yield
    finally:
        for each, states in kept:
            for name, state in states.items():
                setattr(each, name, state)
