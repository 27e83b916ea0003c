"""What `configure_optimizers` of a LightningModule returns, in each of its forms, as optimizers and schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown

_FORMS = "return an optimizer, several, lists of optimizers and schedulers, or {'optimizer': ..., 'lr_scheduler': ...}"
_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "reduce_on_plateau", "name")


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps; the names are those of Lightning's LRSchedulerConfig."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def read_optimizers(result: Any, is_automatic: bool) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and the schedulers of what `configure_optimizers` returned.

    Args:
        result: what it returned.
        is_automatic: the trainer steps them; else `training_step` does.

    Raises:
        WorkloadError: it has another form.
        UsageError: there are several optimizers, and the trainer would have to choose.
    """
    optimizers, schedulers = _sorted(result)
    if is_automatic and len(optimizers) > 1:
        raise UsageError(
            "several optimizers are stepped by training_step itself",
            f"configure_optimizers returned {len(optimizers)}, and automatic_optimization is on",
            "write self.automatic_optimization = False in __init__, and use self.optimizers() and self.manual_backward",
        )
    configs = [_config(each) for each in schedulers]
    for config in configs:
        _check(config, optimizers, is_automatic)
    return optimizers, configs


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _sorted(result: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return optimizers and schedulers; a scheduler beside a "monitor" as a dict with it."""
    if _is_optimizer(result):
        return [result], []
    if isinstance(result, dict):
        return _of_dicts([result])
    if isinstance(result, list | tuple) and result:
        if all(map(_is_optimizer, result)):
            return list(result), []
        if all(isinstance(each, dict) for each in result):
            return _of_dicts(result)
        if len(result) == 2 and isinstance(result[0], list | tuple) and all(map(_is_optimizer, result[0])):
            schedulers = result[1] if isinstance(result[1], list | tuple) else [result[1]]
            if result[0]:
                return list(result[0]), list(schedulers)
    raise WorkloadError("configure_optimizers should return optimizers", f"it returned {shown(result)}", _FORMS)


def _of_dicts(dicts: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    optimizers = []
    schedulers = []
    for each in dicts:
        unknown = sorted(set(each) - {"optimizer", "lr_scheduler", "monitor"})
        if unknown or not _is_optimizer(each.get("optimizer")):
            found = f"it has the keys {', '.join(map(repr, each))}"
            raise WorkloadError(
                "a dict of configure_optimizers needs an optimizer, and may have a scheduler", found, _FORMS
            )
        optimizers.append(each["optimizer"])
        scheduler = each.get("lr_scheduler")
        if scheduler is None:
            continue
        if not isinstance(scheduler, dict):
            scheduler = {"scheduler": scheduler}
        if "monitor" in each and "monitor" not in scheduler:
            scheduler = {**scheduler, "monitor": each["monitor"]}
        schedulers.append(scheduler)
    return optimizers, schedulers


def _config(scheduler: Any) -> SchedulerConfig:
    if not isinstance(scheduler, dict):
        scheduler = {"scheduler": scheduler}
    unknown = sorted(set(scheduler) - set(_KEYS))
    if unknown or "scheduler" not in scheduler:
        found = f"it has {unknown[0]!r}" if unknown else "it has no 'scheduler'"
        raise WorkloadError("a scheduler's dict has the keys " + ", ".join(_KEYS), found, "leave other keys out")
    return SchedulerConfig(**{"reduce_on_plateau": isinstance(scheduler["scheduler"], ReduceLROnPlateau), **scheduler})


def _check(config: SchedulerConfig, optimizers: list[torch.optim.Optimizer], is_automatic: bool) -> None:
    """Raise WorkloadError where a scheduler can't be stepped as its dict says."""
    scheduler = config.scheduler
    if not isinstance(scheduler, LRScheduler) and not (
        callable(getattr(scheduler, "step", None)) and callable(getattr(scheduler, "state_dict", None))
    ):
        raise WorkloadError("a scheduler has step() and state_dict()", f"it is {shown(scheduler)}", _FORMS)
    if not any(getattr(scheduler, "optimizer", None) is each for each in optimizers):
        raise WorkloadError(
            "schedulers should be of optimizers that configure_optimizers returns",
            f"that of a {type(scheduler).__name__} is none of them",
            "return it too",
        )
    if config.interval not in ("step", "epoch") or type(config.frequency) is not int or config.frequency < 1:
        raise WorkloadError(
            "a scheduler steps every so many steps or epochs",
            f"interval is {config.interval!r:.40} and frequency {config.frequency!r:.40}",
            "write 'step' or 'epoch', and a whole number above 0",
        )
    if is_automatic and config.reduce_on_plateau and config.monitor is None:
        raise WorkloadError(
            "ReduceLROnPlateau needs the name of a logged metric",
            "the dict has no 'monitor'",
            "write {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}",
        )
