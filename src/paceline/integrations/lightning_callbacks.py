"""Callbacks of Lightning: EarlyStopping and a person's own run as they are; ModelCheckpoint becomes `job.save_best`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.integrations.lightning_hooks import base_of, overrides
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown

if TYPE_CHECKING:
    from paceline.integrations.lightning import Trainer

_RUN = ("EarlyStopping", "LambdaCallback")  # of Lightning's own: they ask for nothing but the hooks
_AVERAGE = "leave it out, and write a callback with ema = trainer.job.ema(0.999) and ema.update()"
_INSTEAD = {
    "LearningRateMonitor": "log the rate in training_step: self.log('rate', self.optimizers().param_groups[0]['lr'])",
    "ModelSummary": "leave it out: `paceline plan` prints what a model has",
    "RichModelSummary": "leave it out: `paceline plan` prints what a model has",
    "TQDMProgressBar": "leave it out: `paceline run` shows the progress",
    "RichProgressBar": "leave it out: `paceline run` shows the progress",
    "Timer": "leave it out: a job that gets SIGTERM saves and stops, and goes on by --resume",
    "OnExceptionCheckpoint": "leave it out, and write in the command: --checkpoint-every 100",
    "EMAWeightAveraging": _AVERAGE,
    "StochasticWeightAveraging": _AVERAGE,
    "WeightAveraging": _AVERAGE,
    "GradientAccumulationScheduler": "leave it out, and write Trainer(accumulate_grad_batches=4)",
}
# Arguments of ModelCheckpoint that `job.save_best` has no counterpart of: the attribute, what it may be, what to write.
_OF_CHECKPOINTS = {
    "filename": ((None,), "leave filename out: the folder `best` of the run, or dirpath, has the best checkpoint"),
    "save_top_k": ((1,), "write save_top_k=1; the newest ones are kept by `paceline run --keep 3`"),
    "save_last": ((None, False), "leave save_last out; the command saves: --checkpoint-every 100"),
    "save_weights_only": ((False,), "leave save_weights_only out; `paceline export` writes weights alone"),
    "save_on_exception": ((False,), "leave save_on_exception out; the command saves: --checkpoint-every 100"),
    "_every_n_train_steps": ((None, 0), "leave every_n_train_steps out; the command saves: --checkpoint-every 100"),
    "_train_time_interval": ((None,), "leave train_time_interval out; the command saves: --checkpoint-every 100"),
    "_every_n_epochs": ((None, 1), "leave every_n_epochs out"),
}


def checked_callbacks(callbacks: Any) -> tuple[list[Any], list[BestCheckpoint]]:
    """Return the callbacks whose hooks are called, and those that save the best state.

    Raises:
        WorkloadError: one is no Callback.
        UsageError: one is Lightning's, and needs Lightning's own trainer.
    """
    called = []
    best = []
    for each in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
        base = base_of(each, "Callback")
        if base is None:
            raise WorkloadError(
                "callbacks are objects of lightning.pytorch.Callback", f"one is {shown(each)}", "leave it out"
            )
        if base_of(each, "ModelCheckpoint") is not None:
            best.append(BestCheckpoint(each))
            continue
        own = next(
            kind for kind in type(each).__mro__ if kind.__module__.startswith(base.__module__.split(".callbacks.")[0])
        )
        if own is not base and own.__name__ not in _RUN:
            fix = _INSTEAD.get(own.__name__, "leave it out, and write what it does as a Callback of your own")
            raise UsageError(
                "of Lightning's callbacks Trainer takes EarlyStopping, ModelCheckpoint and LambdaCallback",
                f"one is a {own.__name__}",
                fix,
            )
        called.append(each)
    return called, best


class BestCheckpoint:
    """A ModelCheckpoint with a metric: the best state goes to a folder, as `job.save_best` writes it.

    Args:
        checkpoint: the person's, whose `best_model_path` and `best_model_score` are set.

    Raises:
        UsageError: it asks for what `job.save_best` does not do.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        if type(checkpoint).__name__ != "ModelCheckpoint":
            fix = "use ModelCheckpoint itself, or a Callback that calls trainer.job.save_best(metric)"
            raise UsageError(
                "ModelCheckpoint becomes job.save_best", f"a {type(checkpoint).__name__} is more than that", fix
            )
        if checkpoint.monitor is None:
            raise UsageError(
                "ModelCheckpoint becomes job.save_best, which needs a metric",
                "it has no monitor",
                "write ModelCheckpoint(monitor='val_loss'), or leave it out: the command saves: --checkpoint-every 100",
            )
        for name, (values, fix) in _OF_CHECKPOINTS.items():
            value = getattr(checkpoint, name, values[0])
            if not any(type(value) is type(each) and value == each for each in values):
                raise UsageError(
                    f"ModelCheckpoint becomes job.save_best, which has no {name.strip('_')}",
                    f"it is {value!r:.60}",
                    fix,
                )

    @property
    def monitor(self) -> str:
        """Return the name of the metric."""
        return str(self.checkpoint.monitor)

    @property
    def folder(self) -> str | None:
        """Return where it saves; None: the folder `best` of the run."""
        return None if self.checkpoint.dirpath is None else str(self.checkpoint.dirpath)

    def is_due_with_epoch(self, trainer: Trainer) -> bool:
        """True if it saves at the end of a training epoch; else after each validation."""
        asked = self.checkpoint._save_on_train_epoch_end
        if asked is not None:
            return bool(asked)
        if not trainer.num_val_batches:
            return True
        return trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def save(self, trainer: Trainer) -> None:
        """Save if the metric is better than before. Collective.

        Raises:
            UsageError: there is no such metric.
        """
        metric = trainer.callback_metrics.get(self.monitor)
        if metric is None:
            raise UsageError(
                "ModelCheckpoint needs a metric that is logged",
                f"{self.monitor!r} is none of {', '.join(map(repr, trainer.callback_metrics)) or 'nothing'}",
                f"write self.log({self.monitor!r}, ...) with on_epoch=True",
            )
        if trainer.job.save_best(float(metric), self.checkpoint.mode, self.folder):
            self.checkpoint.best_model_path = self.path(trainer)
            self.checkpoint.best_model_score = metric.detach().clone()

    def path(self, trainer: Trainer) -> str:
        """Return the folder of the best state."""
        return self.folder or str(Path(trainer.job.run_dir or ".", "best"))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job shows as the best."""
        score = self.checkpoint.best_model_score
        return {
            "path": self.checkpoint.best_model_path,
            "score": None if score is None else float(score),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Show the best of a checkpoint."""
        self.checkpoint.best_model_path = state["path"]
        self.checkpoint.best_model_score = None if state["score"] is None else torch.tensor(state["score"])


class CheckpointHooks:
    """What `on_save_checkpoint` and `state_dict` of a module or a callback add to a checkpoint, for `job.keep`.

    Args:
        value: the module, data module or callback.
        arguments: the hooks' first ones.
        has_state: `state_dict` and `load_state_dict` are the object's own.
    """

    def __init__(self, value: Any, arguments: tuple[Any, ...], trainer: Trainer, has_state: bool) -> None:
        self.value = value
        self.arguments = arguments
        self.trainer = trainer
        self.has_state = has_state

    def state_dict(self) -> dict[str, Any]:
        """Return what the hooks put into a checkpoint."""
        checkpoint: dict[str, Any] = {}
        if hasattr(self.value, "on_save_checkpoint"):
            checkpoint = {"epoch": self.trainer.current_epoch, "global_step": self.trainer.global_step}
            self.value.on_save_checkpoint(*self.arguments, checkpoint)
        return {"checkpoint": checkpoint, "state": self.value.state_dict() if self.has_state else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the hooks what they have put there."""
        if self.has_state:
            self.value.load_state_dict(state["state"])
        if hasattr(self.value, "on_load_checkpoint"):
            self.value.on_load_checkpoint(*self.arguments, state["checkpoint"])


def keeps(value: Any, base: type, names: Sequence[str]) -> bool:
    """True if an object has one of these functions as its own."""
    return any(overrides(value, name, base) for name in names)
