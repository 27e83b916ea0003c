"""The loops of `paceline.integrations.lightning.Trainer`: the passes of a training, and an evaluation.

Hooks come in Lightning's order: those of callbacks before that of the module, but for what monitors a metric at the end
of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from paceline.integrations.lightning_hooks import overrides, parameters_of
from paceline.integrations.lightning_log import Log, kept_counts
from paceline.nouns.errors import LossError, UsageError
from paceline.nouns.parts import shown
from paceline.train.device_batches import moved
from paceline.train.loop_loader import Place, load_pass

if TYPE_CHECKING:
    from paceline.integrations.lightning import Trainer


class FitLoop:
    """The passes over the training loader.

    Args:
        trainer: whose job is prepared.
        loader: that `paceline.prepare` returned.
    """

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.trainer = trainer
        self.job = trainer.job
        self.module = trainer.lightning_module
        self.loader = loader
        assert trainer.job.cut is not None
        self.cut = trainer.job.cut
        self.log = Log(self.job, is_training=True)
        if not math.isinf(trainer.num_training_batches):
            self.cut.limit = int(trainer.num_training_batches)
        self.takes_index = len(parameters_of(self.module.training_step)) > 1

    def run(self) -> None:
        """Make the passes that are to be made, from that at which the job is."""
        trainer = self.trainer
        trainer.sanity_check()
        trainer.enter("train", self.log)
        trainer.call("on_train_start")
        for epoch in self.job.epochs(trainer.num_epochs):
            trainer.current_epoch = epoch
            if self._is_done():
                break
            if self.cut.batch < trainer.num_training_batches:  # else a limit ended the pass before the job resumed
                self._run_epoch(self.cut.batch)
            if self._is_done():
                break
        self.job.end_step()
        trainer.call("on_train_end")

    def _is_done(self) -> bool:
        trainer = self.trainer
        return trainer.has_all_steps or (trainer.should_stop and trainer.may_stop)

    def _run_epoch(self, begin: int) -> None:
        trainer = self.trainer
        if begin == 0:
            self.log.clear()
            trainer.call("on_train_epoch_start")
        is_checked = False
        for index, batch in zip(count(begin), self.loader, strict=False):
            is_last = index + 1 == trainer.num_training_batches
            goes_on = self._run_batch(batch, index, is_last)
            is_checked = goes_on and trainer.is_validation_due(index, is_last)
            if is_checked:
                if not trainer.accumulates(index, is_last):
                    trainer.call("on_validation_model_zero_grad")
                trainer.validate_in_fit()
                trainer.enter("train", self.log)
            if goes_on and not trainer.accumulates(index, is_last):
                self._schedule("step", index, on_plateau=True)
            if is_last or not goes_on or self._is_done():
                break
        self._end_epoch(is_checked)

    def _run_batch(self, batch: Any, index: int, is_last: bool) -> bool:
        """Train on a batch; return False if the module leaves out the rest of the epoch."""
        trainer = self.trainer
        part = self.job.part
        assert part is not None
        self.log.begin_batch(part.samples, not part.keeps_pace)
        batch = trainer.data_hook("on_after_batch_transfer", batch, 0)
        goes_on = trainer.call("on_train_batch_start", batch, index) != -1
        outputs: Any = {}
        if goes_on:
            with kept_counts(self.module) if part.keeps_pace else nullcontext():
                outputs = self._train(batch, index, is_last)
            if not trainer.accumulates(index, is_last):
                self._schedule("step", index, on_plateau=False)
        if is_last or not goes_on:
            self._schedule("epoch", trainer.current_epoch, on_plateau=False)
        if not goes_on:
            return False
        trainer.call("on_train_batch_end", outputs, batch, index)
        trainer.take_values(self.log.of_step())
        if not trainer.accumulates(index, is_last) or not self.module.automatic_optimization:
            trainer.write_step()
        return True

    def _train(self, batch: Any, index: int, is_last: bool) -> Any:
        trainer = self.trainer
        arguments = (batch, index) if self.takes_index else (batch,)
        with trainer.precision_plugin.forward_context():
            output = trainer.call_module("training_step", *arguments)
        if not self.module.automatic_optimization:
            return _shown_output(output)
        loss, weight, outputs = _read_output(output, trainer.accumulate_grad_batches)
        optimizer = trainer.optimizers[0]
        if index % trainer.accumulate_grad_batches == 0:
            trainer.call("on_before_zero_grad", optimizer)
            trainer.call_module("optimizer_zero_grad", trainer.current_epoch, index, optimizer)
        goes_on = trainer.accumulates(index, is_last)
        with trainer.job.accumulate(goes_on and not trainer.looks_at_gradients("on_after_backward")):
            trainer.strategy.backward(loss, optimizer, weight=weight)
        if not goes_on:
            trainer.update(optimizer)
        return outputs

    def _schedule(self, interval: str, number: int, on_plateau: bool) -> None:
        """Step the schedulers that are due after a step or an epoch of this number."""
        trainer = self.trainer
        if not self.module.automatic_optimization:
            return
        for config in trainer.lr_scheduler_configs:
            is_due = config.interval == interval and (number + 1) % config.frequency == 0
            if config.reduce_on_plateau != on_plateau or not is_due:
                continue
            metric = None
            if on_plateau:
                metric = trainer.callback_metrics.get(str(config.monitor))
                if metric is None and not config.strict:
                    continue
                if metric is None:
                    raise UsageError(
                        "ReduceLROnPlateau needs a metric that is logged",
                        f"{config.monitor!r} is none of {', '.join(map(repr, trainer.callback_metrics)) or 'nothing'}",
                        "log it before the scheduler is due, or write 'strict': False in its dict",
                    )
            trainer.call_module("lr_scheduler_step", config.scheduler, metric)

    def _end_epoch(self, is_checked: bool) -> None:
        trainer = self.trainer
        if math.isinf(trainer.num_training_batches):  # only now it is known that the last batch was the last
            self._schedule("epoch", trainer.current_epoch, on_plateau=False)
            if not is_checked and trainer.is_validation_due_with_epoch():
                trainer.call("on_validation_model_zero_grad")
                trainer.validate_in_fit()
                trainer.enter("train", self.log)
        self.job.settle()
        self.log.end_batches()
        trainer.take_values(self.log.of_epoch())
        trainer.call_callbacks("on_train_epoch_end", monitors=False)
        trainer.call_module("on_train_epoch_end")
        values = self.log.of_epoch()
        trainer.take_values(values)
        trainer.call_callbacks("on_train_epoch_end", monitors=True)
        trainer.save_best(with_epoch=True)
        self._schedule("epoch", trainer.current_epoch, on_plateau=True)
        trainer.write(values.logged, "logged")
        self.log.clear()


class EvaluationLoop:
    """One pass over the loaders of an evaluation; each rank has its part of every batch.

    Args:
        trainer: whose job is prepared.
        stage: "validation" or "test".
        loaders: the person's own.
        limits: of each, how many batches are taken.
    """

    def __init__(self, trainer: Trainer, stage: str, loaders: list[Any], limits: list[float]) -> None:
        self.trainer = trainer
        self.stage = stage
        self.loaders = loaders
        self.limits = limits
        self.log = Log(trainer.job, is_training=False)
        self.step = getattr(trainer.lightning_module, f"{stage}_step")

    def run(self) -> list[dict[str, float]]:
        """Evaluate, and return what was logged, a dict for each loader. Collective."""
        trainer = self.trainer
        module = trainer.lightning_module
        trainer.job.settle()
        trainer.enter("test" if self.stage == "test" else "validate", self.log)
        modes = [(each, each.training) for each in module.modules()]
        trainer.call(f"on_{self.stage}_model_eval")
        with torch.no_grad():
            trainer.call(f"on_{self.stage}_start")
            trainer.call(f"on_{self.stage}_epoch_start")
            for number in range(len(self.loaders)):
                self._run_loader(number)
            self.log.end_batches()
            trainer.take_values(self.log.of_epoch())
            trainer.call(f"on_{self.stage}_epoch_end")
            values = self.log.of_epoch()
            trainer.take_values(values)
            if not trainer.sanity_checking:
                trainer.write(values.logged, "evaluation")
            trainer.call(f"on_{self.stage}_end")
        name = f"on_{self.stage}_model_train"
        if overrides(module, name, trainer.base):
            trainer.call(name)
        else:
            for each, was_training in modes:
                each.training = was_training
        self.log.clear()
        return self._by_loader({name: float(value) for name, value in values.logged.items()})

    def _run_loader(self, number: int) -> None:
        trainer = self.trainer
        is_one_of_several = len(self.loaders) > 1
        count = len(parameters_of(self.step))
        for index, part in enumerate(self._parts(number)):
            batch = moved(part.batch, trainer.job.device, trainer.job.to_float64)
            self.log.begin_batch(part.samples, not part.keeps_pace, number if is_one_of_several else None)
            batch = trainer.data_hook("on_after_batch_transfer", batch, number)
            place = (index, number) if is_one_of_several else (index,)
            trainer.call(f"on_{self.stage}_batch_start", batch, *place)
            counts = kept_counts(trainer.lightning_module) if part.keeps_pace else nullcontext()
            with counts, trainer.precision_plugin.forward_context():
                output = trainer.call_module(f"{self.stage}_step", batch, *place[: count - 1])
            trainer.call(f"on_{self.stage}_batch_end", output, batch, *place)
            trainer.take_values(self.log.of_step())

    def _parts(self, number: int) -> Iterator[Any]:
        job = self.trainer.job
        place = Place(job.data_rank, job.data_size, job.seed, self.trainer.current_epoch)
        limit = None if math.isinf(self.limits[number]) else int(self.limits[number])
        yield from load_pass(self.loaders[number], place, 0, limit)

    def _by_loader(self, values: dict[str, float]) -> list[dict[str, float]]:
        """Return the values of each loader; those of no loader are in every dict."""
        if len(self.loaders) == 1:
            return [values]
        found = []
        for number in range(len(self.loaders)):
            own = {}
            for name, value in values.items():
                if "/dataloader_idx_" not in name or name.endswith(f"/dataloader_idx_{number}"):
                    own[name] = value
            found.append(own)
        return found


def _read_output(output: Any, batches: int) -> tuple[torch.Tensor, Any, dict[str, Any]]:
    """Return the loss of a training step, its weight, and what hooks get of it.

    Raises:
        LossError: there is no loss.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        found = "it returned None" if output is None else f"it returned {shown(output)}"
        raise LossError(
            "training_step should return the loss, or a dict with it under 'loss'",
            found,
            "return a loss for every batch, on every rank: one that is not to count is 0 * loss",
        )
    weight = None
    extra: dict[str, Any] = {}
    if isinstance(output, dict):
        extra = {name: value for name, value in output.items() if name != "loss"}
        weight = extra.pop("loss_weight", None)
    loss = loss / batches
    return loss, weight, {"loss": loss.detach().clone(), **extra}


def _shown_output(output: Any) -> Any:
    """Return what hooks get of a step that optimizes by itself."""
    if isinstance(output, torch.Tensor):
        return {"loss": output.detach()}
    return {} if output is None else output
