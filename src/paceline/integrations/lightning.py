"""Train a LightningModule on any number of ranks: a Trainer with the arguments and hooks of Lightning's.

    from paceline.integrations.lightning import Trainer

    trainer = Trainer(max_epochs=3)
    trainer.fit(module, loader)

It is a loop over `paceline.prepare`: what docs/loops.md says of such loops holds here. Nothing of Lightning is imported
but what the module's own file has imported.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

import paceline
from paceline.integrations.lightning_arguments import PRECISIONS, checked
from paceline.integrations.lightning_callbacks import CheckpointHooks, checked_callbacks, keeps
from paceline.integrations.lightning_hooks import (
    REFUSED_OF_DATA,
    base_of,
    check_hooks,
    checked_module,
    overrides,
    part_of,
)
from paceline.integrations.lightning_log import Log, Values
from paceline.integrations.lightning_loops import EvaluationLoop, FitLoop
from paceline.integrations.lightning_optimizers import SchedulerConfig, read_optimizers
from paceline.integrations.lightning_strategy import Precision, Strategy
from paceline.nouns.errors import PlanError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.train.log import field_of
from paceline.train.loop_job import LoopJob
from paceline.train.seed import kept_random_state


class _Progress:
    """What a resumed training has to know, for `job.keep`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {
            "global_step": self.trainer.global_step,
            "should_stop": self.trainer.should_stop,
            "metrics": metrics,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self.trainer.global_step = state["global_step"]
        self.trainer.should_stop = state["should_stop"]
        for name, value in state["metrics"].items():
            self.trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.get_default_dtype())


class Trainer:
    """Train a LightningModule as `lightning.Trainer` does, on the ranks of `paceline run` or alone.

    N ranks do what one process does with the whole batches: the loader's `batch_size` is that of all ranks together.
    The plan is in the command. docs/lightning.md lists the arguments and hooks.

    Args:
        arguments: those of `lightning.Trainer`, by name. One that asks for something that is not done is refused.

    Attributes:
        job (LoopJob): what `paceline.prepare` returned; there is one from `fit` on.
        callback_metrics (dict[str, torch.Tensor]): what was logged last, over all ranks.
        logged_metrics (dict[str, torch.Tensor]): the same, under the names that the run's events have.
        current_epoch (int): passes over the loader that are done.
        global_step (int): updates by optimizers that are done.
        should_stop (bool): training is to end with this batch; set it on every rank.

    Raises:
        UsageError: an argument is unknown, has another value than it can have, or is refused.
        PlanError: one says how to train in parallel.
        WorkloadError: a callback is none.

    Examples:
        >>> import lightning
        >>> from paceline.integrations.lightning import Trainer
        >>> class Line(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, index):
        ...         inputs, targets = batch
        ...         loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        ...         self.log("loss", loss, on_step=False, on_epoch=True)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
        >>> trainer = Trainer(max_epochs=10)
        >>> trainer.fit(Line(), loader)
        >>> trainer.global_step, f"{trainer.callback_metrics['loss']:.2f}"
        (40, '0.00')
    """

    job: LoopJob
    barebones = False
    received_sigterm = False
    progress_bar_callback = None

    def __init__(self, **arguments: Any) -> None:
        values = checked(arguments)
        callbacks = values["callbacks"]
        self.callbacks, self.best = checked_callbacks([] if callbacks is None else callbacks)
        if values["enable_checkpointing"] is False and self.best:
            raise UsageError(
                "ModelCheckpoint saves checkpoints", "enable_checkpointing is False", "leave one of them out"
            )
        self._take(values)
        self.enable_autolog_hparams = values["enable_autolog_hparams"]
        self.loggers = _loggers_of(values["logger"])
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.current_epoch = 0
        self.global_step = 0
        self.should_stop = False
        self.strategy = Strategy(self)
        self.precision = PRECISIONS[values["precision"]]
        self.precision_plugin = Precision(self, self.precision)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.datamodule: Any = None
        self.lightning_module: Any = None
        self.base: type = object
        self.stage: str | None = None
        self.function: str | None = None
        self.sanity_checking = False
        self.num_training_batches: float = math.inf
        self.val_loaders: list[Any] = []
        self.num_val_batches: list[float] = []
        self.train_dataloader: Any = None
        self.hook: str | None = None
        self.log: Log | None = None
        if values["benchmark"] is not None:
            torch.backends.cudnn.benchmark = values["benchmark"]
        if values["deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=values["deterministic"] == "warn")
        if values["detect_anomaly"]:
            torch.autograd.set_detect_anomaly(True)

    def _take(self, values: dict[str, Any]) -> None:
        """Set what loops are made by."""
        self.fast_dev_run = values["fast_dev_run"]
        batches = int(self.fast_dev_run)
        names = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
        for name in names:
            setattr(self, name, batches or (1.0 if values[name] is None else values[name]))
        self.max_steps: int = batches or values["max_steps"]
        self.max_epochs = values["max_epochs"]
        if batches:
            self.max_epochs = 1
        if self.max_epochs is None:
            self.max_epochs = 1000 if self.max_steps == -1 else -1
        self.min_epochs = values["min_epochs"]
        self.min_steps = values["min_steps"]
        self.num_sanity_val_steps = 2 if values["num_sanity_val_steps"] is None else values["num_sanity_val_steps"]
        if batches:
            self.num_sanity_val_steps = 0
        self.val_check_interval = 1.0 if values["val_check_interval"] is None else values["val_check_interval"]
        self.check_val_every_n_epoch = values["check_val_every_n_epoch"]
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise UsageError(
                "without check_val_every_n_epoch validation comes every so many batches",
                f"val_check_interval is {self.val_check_interval}",
                "write a number of batches: val_check_interval=100",
            )
        self.log_every_n_steps = 50 if values["log_every_n_steps"] is None else values["log_every_n_steps"]
        self.accumulate_grad_batches = values["accumulate_grad_batches"]
        self.gradient_clip_val = values["gradient_clip_val"]
        self.gradient_clip_algorithm = values["gradient_clip_algorithm"]

    def __getattr__(self, name: str) -> Any:
        what = "this Trainer has no job before fit" if name == "job" else f"Paceline's Trainer has no {name}"
        raise AttributeError(f"{what}; docs/lightning.md lists what it has")

    @property
    def global_rank(self) -> int:
        """Return the rank."""
        return paceline.rank() if paceline.is_initialized() else int(os.environ.get("PACELINE_RANK", "0"))

    @property
    def local_rank(self) -> int:
        """Return the rank among those of this host."""
        return paceline.local_rank() if paceline.is_initialized() else int(os.environ.get("PACELINE_LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return paceline.size() if paceline.is_initialized() else int(os.environ.get("PACELINE_WORLD_SIZE", "1"))

    num_devices = world_size

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.global_rank == 0

    @property
    def logger(self) -> Any:
        """Return the first of the Loggers that the trainer was handed; None without any."""
        return self.loggers[0] if self.loggers else None

    @property
    def model(self) -> Any:
        """Return the module."""
        return self.lightning_module

    @property
    def training(self) -> bool:
        """True while batches are trained on."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """True in a validation."""
        return self.stage == "validate" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """True in a test."""
        return self.stage == "test"

    @property
    def evaluating(self) -> bool:
        """True in a validation or test."""
        return self.stage in ("validate", "test")

    @property
    def predicting(self) -> bool:
        """Return False: there is no prediction."""
        return False

    @property
    def state(self) -> Any:
        """Return Lightning's TrainerState of what the trainer does."""
        states = part_of(self.base, "trainer.states")
        state = states.TrainerState()
        state.fn = None if self.function is None else states.TrainerFn(self.function)
        stage = "sanity_check" if self.sanity_checking else self.stage
        state.stage = None if stage is None else states.RunningStage(stage)
        return state

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Return the callbacks that are an EarlyStopping."""
        return [each for each in self.callbacks if base_of(each, "EarlyStopping") is not None]

    @property
    def early_stopping_callback(self) -> Any:
        """Return the first EarlyStopping; None without any."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Return the ModelCheckpoints."""
        return [each.checkpoint for each in self.best]

    @property
    def checkpoint_callback(self) -> Any:
        """Return the first ModelCheckpoint; None without any."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def val_dataloaders(self) -> Any:
        """Return the loaders of validation: one, a list, or None."""
        if len(self.val_loaders) > 1:
            return self.val_loaders
        return self.val_loaders[0] if self.val_loaders else None

    @property
    def num_epochs(self) -> int:
        """Return how many passes over the loader there are at most."""
        if self.max_epochs != -1:
            return int(self.max_epochs)
        if math.isinf(self.num_training_batches):
            return sys.maxsize
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        epochs: int = math.ceil(self.max_steps / steps)
        return epochs

    @property
    def estimated_stepping_batches(self) -> float:
        """Return how many steps the whole training takes; infinite where the loader has no length."""
        if math.isinf(self.num_training_batches):
            return math.inf if self.max_steps == -1 else float(self.max_steps)
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.num_epochs
        return steps if self.max_steps == -1 else int(min(steps, self.max_steps))

    @property
    def has_all_steps(self) -> bool:
        """True if as many updates are done as are asked for."""
        return self.max_steps != -1 and self.global_step >= self.max_steps

    @property
    def may_stop(self) -> bool:
        """True if training may stop before its end."""
        has_epochs = not self.min_epochs or self.current_epoch + 1 >= self.min_epochs
        return has_epochs and (not self.min_steps or self.global_step >= self.min_steps)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: Any = None,
    ) -> None:
        """Train the module, from the checkpoint with which the command resumes, or from the beginning.

        Args:
            model: the LightningModule.
            train_dataloaders: the DataLoader of training, with the batches of all ranks together; the module's
                `train_dataloader()` where None. Or a LightningDataModule.
            val_dataloaders: one DataLoader or several of validation; the module's `val_dataloader()` where None.
            datamodule: a LightningDataModule, which has the loaders.
            ckpt_path: refused: write `paceline run --resume`.
            weights_only: refused, too.

        Raises:
            WorkloadError: it is no LightningModule, or a loader or an optimizer is missing, or can't be used.
            UsageError: a hook is overridden that is never called, or an argument has no effect here.
            PlanError: the plan can't train it.
            LossError: `training_step` returned no loss, or one that is not finite.
            CheckpointError: the job resumes, and its checkpoint can't be used.
            CollectiveError: ranks differ in what they do.
            PeerLostError: another rank has gone.

        Examples:
            >>> import lightning
            >>> from paceline.integrations.lightning import Trainer
            >>> class Line(lightning.LightningModule):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layer = torch.nn.Linear(4, 1)
            ...     def training_step(self, batch):
            ...         inputs, targets = batch
            ...         return torch.nn.functional.mse_loss(self.layer(inputs), targets)
            ...     def configure_optimizers(self):
            ...         return torch.optim.SGD(self.parameters(), lr=0.1)
            ...     def train_dataloader(self):
            ...         return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
            >>> trainer = Trainer(max_steps=6)
            >>> trainer.fit(Line())
            >>> trainer.global_step, trainer.current_epoch
            (6, 2)
        """
        if self.lightning_module is not None:
            raise UsageError("a Trainer fits once", "it was handed a module before", "make another Trainer")
        for name, value in (("ckpt_path", ckpt_path), ("weights_only", weights_only)):
            if value is not None:
                raise UsageError(
                    f"Trainer.fit does not take {name}",
                    f"it is {value!r:.60}",
                    "write in the command: paceline run --resume",
                )
        self.function = "fit"
        self.stage = "train"
        train, self.datamodule = _loader_and_datamodule(train_dataloaders, datamodule)
        self._connect(model)
        try:
            self._set_up("fit")
            self._check_automatic()
            loader = self._prepare(self._train_loader(train), val_dataloaders)
            loop = FitLoop(self, loader)
            self.job.keep("lightning.logged", loop.log)
            self.call("on_fit_start")
            self._log_hyperparameters()
            loop.run()
            if not self.should_stop and not self.has_all_steps:
                self.current_epoch = self.num_epochs
            else:
                self.current_epoch += 1
            self.stage = None
            self.call("on_fit_end")
            self.call_data("teardown", "fit")
        except Exception as error:
            self._tell_exception(error)
            raise

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: Any = None,
    ) -> list[dict[str, float]]:
        """Evaluate by `validation_step`, each sample once over all ranks.

        Args:
            model: the module; that of `fit` where None.
            dataloaders: one or several; those of the module or data module where None.
            ckpt_path: "best": the state that ModelCheckpoint saved. Without a model that is the default where there
                is one.
            verbose: print what was logged.
            datamodule: a LightningDataModule, which has the loaders.
            weights_only: refused.

        Returns:
            What was logged, a dict for each loader; the same on every rank.

        Raises:
            WorkloadError: there is no loader, or the module has no `validation_step`.
            UsageError: there is no module, or another than that of `fit`; or `ckpt_path` is something else.

        Examples:
            >>> import lightning
            >>> from paceline.integrations.lightning import Trainer
            >>> class Line(lightning.LightningModule):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layer = torch.nn.Linear(4, 1)
            ...     def validation_step(self, batch):
            ...         inputs, targets = batch
            ...         self.log("error", (self.layer(inputs) - targets).abs().mean())
            ...     def configure_optimizers(self):
            ...         return torch.optim.SGD(self.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
            >>> (found,) = Trainer().validate(Line(), loader, verbose=False)
            >>> sorted(found)
            ['error']
        """
        self._check_unused("validate", weights_only)
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: Any = None,
    ) -> list[dict[str, float]]:
        """Evaluate by `test_step`, each sample once over all ranks.

        Args:
            model: as `validate` takes it.
            dataloaders: as `validate` takes them.
            ckpt_path: as `validate` takes it.
            verbose: print what was logged.
            datamodule: a LightningDataModule, which has the loaders.
            weights_only: refused.

        Returns:
            What was logged, a dict for each loader; the same on every rank.

        Raises:
            WorkloadError: there is no loader, or the module has no `test_step`.
            UsageError: there is no module, or another than that of `fit`; or `ckpt_path` is something else.

        Examples:
            >>> import lightning
            >>> from paceline.integrations.lightning import Trainer
            >>> class Line(lightning.LightningModule):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layer = torch.nn.Linear(4, 1)
            ...     def test_step(self, batch):
            ...         self.log("samples", float(len(batch[0])), reduce_fx="sum")
            ...     def configure_optimizers(self):
            ...         return torch.optim.SGD(self.parameters(), lr=0.1)
            >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
            >>> Trainer().test(Line(), loader, verbose=False)
            [{'samples': 64.0}]
        """
        self._check_unused("test", weights_only)
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(self, *arguments: Any, **named: Any) -> None:
        """Raise UsageError: predictions are made by Lightning, or in a loop.

        Args:
            arguments: those of `lightning.Trainer.predict`.
            named: the same.

        Raises:
            UsageError: always.

        Examples:
            >>> from paceline.integrations.lightning import Trainer
            >>> Trainer().predict()
            Traceback (most recent call last):
            ...
            paceline.nouns.errors.UsageError: Trainer.predict is not offered
              found: it was called
              fix: export the weights by `paceline export`, and predict with lightning.Trainer in one process
        """
        raise UsageError(
            "Trainer.predict is not offered",
            "it was called",
            "export the weights by `paceline export`, and predict with lightning.Trainer in one process",
        )

    def save_checkpoint(self, filepath: Any, weights_only: Any = None) -> None:
        """Save the job to a folder, as `job.save` does. Call it on every rank.

        Args:
            filepath: the folder.
            weights_only: refused: `paceline export` writes weights alone.

        Raises:
            UsageError: there is no job yet, or `weights_only` is set.
            CheckpointError: it can't be written.

        Examples:
            >>> from paceline.integrations.lightning import Trainer
            >>> try:
            ...     Trainer().save_checkpoint("saved")
            ... except paceline.PacelineError as error:
            ...     print(error.found)
            trainer.fit was not called yet
        """
        self._check_unused("save_checkpoint", weights_only)
        if "job" not in vars(self):
            raise UsageError(
                "there is something to save once there is a job", "trainer.fit was not called yet", "call it"
            )
        self.job.save(filepath)

    def _check_unused(self, call: str, weights_only: Any) -> None:
        if weights_only:
            raise UsageError(
                f"Trainer.{call} does not take weights_only", f"it is {weights_only!r:.60}", "leave it out"
            )

    # What loops call.

    def enter(self, stage: str, log: Log) -> None:
        """Do something else from here on: "train", "validate" or "test"."""
        self.stage = stage
        self.log = log

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a hook of the callbacks, and then that of the module, whose value is returned."""
        self.call_callbacks(name, *arguments)
        return self.call_module(name, *arguments)

    def call_callbacks(self, name: str, *arguments: Any, monitors: bool | None = None) -> None:
        """Call a hook of the callbacks: of all, or of those that monitor a metric, or of the others."""
        for each in self.callbacks:
            if monitors is None or monitors == bool(getattr(each, "monitor", None)):
                hook = getattr(each, name, None)
                if hook is not None:
                    self._run(name, hook, self, self.lightning_module, *arguments)

    def call_module(self, name: str, *arguments: Any) -> Any:
        """Call a hook of the module, if it has such a hook."""
        hook = getattr(self.lightning_module, name, None)
        return None if hook is None else self._run(name, hook, *arguments)

    def call_data(self, name: str, *arguments: Any) -> None:
        """Call a hook that a data module has too: of the callbacks, the data module and the module."""
        if name != "prepare_data":
            self.call_callbacks(name, *arguments)
        if self.datamodule is not None:
            getattr(self.datamodule, name)(*arguments)
        self.call_module(name, *arguments)

    def data_hook(self, name: str, batch: Any, number: int) -> Any:
        """Have the data module change a batch if it has this hook, else the module."""
        source = self.lightning_module
        if self.datamodule is not None:
            base = base_of(self.datamodule, "LightningDataModule")
            assert base is not None
            if overrides(self.datamodule, name, base):
                source = self.datamodule
        return self._run(name, getattr(source, name), batch, number)

    def _run(self, name: str, hook: Any, *arguments: Any) -> Any:
        before, self.hook = self.hook, name
        try:
            return hook(*arguments)
        finally:
            self.hook = before

    def log_value(self, name: str, value: Any, **options: Any) -> None:
        """Take what the module logs: `self.log(name, value, ...)`.

        Raises:
            UsageError: it can't be logged here, or so.
        """
        for option in ("enable_graph", "sync_dist_group", "rank_zero_only"):
            if options.get(option):
                raise UsageError(
                    f"self.log does not take {option}",
                    f"{name!r} is logged with it",
                    "leave it out: values are those of all ranks, logged on every rank, without a gradient",
                )
        if self.log is None:
            raise UsageError("self.log is for hooks of a loop", f"{name!r} is logged in {self.hook}", "log it later")
        self.log.add(self.hook, name, value, options)
        if str(self.hook).endswith("_epoch_end"):
            self.take_values(self.log.of_epoch())  # for what the hook does next

    def take_values(self, values: Values) -> None:
        """Show what was logged, over all ranks."""
        if self.sanity_checking:
            return
        self.callback_metrics.update(values.callback)
        self.logged_metrics.update(values.logged)
        self.progress_bar_metrics.update(values.shown)

    def write_step(self) -> None:
        """Write what was logged in steps, every so many of them."""
        if self.job.step_number % self.log_every_n_steps == 0 or self.fast_dev_run:
            assert self.log is not None
            self.write(self.log.last_step.logged, "logged")

    def write(self, values: dict[str, torch.Tensor], event: str) -> None:
        """Write values to the run's events, and hand them to the Loggers. Rank 0 writes."""
        if not values or not self.is_global_zero:
            return
        plain_values = {name: float(value) for name, value in values.items()}
        fields = {field_of(name): value for name, value in plain_values.items()}
        epoch = {"epoch": self.current_epoch} if event == "logged" else {}
        self.job.events.write({"event": event, "step": self.job.step_number, **epoch, **fields})
        for logger in [] if self.fast_dev_run else self.loggers:
            logger.log_metrics({"epoch": self.current_epoch, **plain_values}, step=self.global_step)
            logger.save()

    def accumulates(self, index: int, is_last: bool) -> bool:
        """True if the batch of this index leaves its gradients for a later one's update."""
        return (index + 1) % self.accumulate_grad_batches != 0 and not is_last

    def looks_at_gradients(self, name: str) -> bool:
        """True if the module or a callback has this hook, which finds gradients."""
        if overrides(self.lightning_module, name, self.base):
            return True
        for each in self.callbacks:
            base = base_of(each, "Callback")
            if base is not None and overrides(each, name, base):
                return True
        return False

    def update(self, optimizer: torch.optim.Optimizer, **named: Any) -> None:
        """Update by the gradients of the whole batch, which hooks see before."""
        scaler = self.precision_plugin.scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        elif self.looks_at_gradients("on_before_optimizer_step"):
            number = self.job.number_of(optimizer)
            assert number is not None
            self.job.sum_gradients(number)
        self.call("on_before_optimizer_step", optimizer)
        if self.lightning_module.automatic_optimization:
            algorithm = self.gradient_clip_algorithm or "norm"
            self.precision_plugin.clip_gradients(optimizer, self.gradient_clip_val or 0.0, algorithm)
        if scaler is None:
            optimizer.step(**named)
        else:
            scaler.step(optimizer, **named)
            scaler.update()
        self.global_step += 1

    def is_validation_due(self, index: int, is_last: bool) -> bool:
        """True if a validation comes after the batch of this index."""
        if not self.num_val_batches or not self._is_validated_epoch():
            return False
        if self.should_stop and self.may_stop:
            return True
        if self.val_check_interval == 1.0 and isinstance(self.val_check_interval, float):
            return is_last
        every = self.val_check_interval
        if isinstance(every, float):
            every = max(1, int(self.num_training_batches * every))
        if self.check_val_every_n_epoch is None and not math.isinf(self.num_training_batches):
            index += self.current_epoch * int(self.num_training_batches)
        return (index + 1) % every == 0

    def is_validation_due_with_epoch(self) -> bool:
        """True if a validation comes after an epoch of which nobody knew the last batch."""
        is_by_epoch = self.val_check_interval == 1.0 and isinstance(self.val_check_interval, float)
        return bool(self.num_val_batches) and is_by_epoch and self._is_validated_epoch()

    def _is_validated_epoch(self) -> bool:
        every = self.check_val_every_n_epoch
        return every is None or (self.current_epoch + 1) % every == 0

    def validate_in_fit(self) -> None:
        """Make a validation, and save the state if it is the best. Collective."""
        EvaluationLoop(self, "validation", self.val_loaders, self.num_val_batches).run()
        self.save_best(with_epoch=False)

    def save_best(self, with_epoch: bool) -> None:
        """Save the state for each ModelCheckpoint that is due now, if it is the best."""
        for each in self.best:
            if each.is_due_with_epoch(self) == with_epoch and not self.fast_dev_run:
                each.save(self)

    def sanity_check(self) -> None:
        """Validate on a few batches before the training; what is logged there does not count."""
        steps = math.inf if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        if not self.num_val_batches or not steps or self.job.step_number:
            return
        self.sanity_checking = True
        with kept_random_state():
            self.call_callbacks("on_sanity_check_start")
            limits = [min(steps, limit) for limit in self.num_val_batches]
            EvaluationLoop(self, "validation", self.val_loaders, limits).run()
            self.call_callbacks("on_sanity_check_end")
        self.sanity_checking = False

    # What makes the job.

    def _connect(self, module: Any) -> None:
        """Have the module, its parts and the callbacks call this trainer."""
        self.base = checked_module(module)
        self.lightning_module = module
        if self.datamodule is not None:
            base = base_of(self.datamodule, "LightningDataModule")
            if base is None:
                raise WorkloadError(
                    "datamodule is a LightningDataModule", f"it is {shown(self.datamodule)}", "hand in the loaders"
                )
            check_hooks(self.datamodule, base, REFUSED_OF_DATA)
            self.datamodule.trainer = self
        paceline.init()
        if "lightning_utilities.core.rank_zero" in sys.modules:
            sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = paceline.rank()
        module.trainer = self
        for each in module.modules():
            if base_of(each, "LightningModule") is not None:
                each.log = self.log_value
        found = module.configure_callbacks()
        called, best = checked_callbacks(found)
        kinds = {type(each) for each in called}
        self.callbacks = [each for each in self.callbacks if type(each) not in kinds] + called
        self.best += best
        for each in self.callbacks:
            each.log = self.log_value
            each.log_dict = module.log_dict

    def _set_up(self, stage: str) -> None:
        """Have the data made, once on each host, and the layers."""
        self._prepare_data()
        self.call_data("setup", stage)
        self.call_module("configure_model")
        if self.precision == "64-true":
            self.lightning_module.double()

    def _prepare_data(self) -> None:
        source = self.lightning_module if self.datamodule is None else self.datamodule
        by_host = getattr(source, "prepare_data_per_node", True)
        if (paceline.local_rank() if by_host else paceline.rank()) == 0:
            self.call_data("prepare_data")
        paceline.barrier()

    def _check_automatic(self) -> None:
        """Raise UsageError where the module steps by itself, and the trainer is to change steps."""
        if self.lightning_module.automatic_optimization:
            return
        for name, default in (("accumulate_grad_batches", 1), ("gradient_clip_val", None)):
            if getattr(self, name) != default:
                raise UsageError(
                    f"{name} is for steps that the trainer makes",
                    "automatic_optimization is off: training_step makes them",
                    f"leave {name} out, and do the same in training_step: self.clip_gradients(optimizer, 1.0)",
                )

    def _train_loader(self, given: Any) -> Any:
        loader = self._loaders("train_dataloader", given)
        if loader is None:
            raise WorkloadError(
                "Trainer.fit needs the DataLoader of training",
                "neither fit, nor the module, nor a data module has one",
                "write trainer.fit(module, loader)",
            )
        if not isinstance(loader, DataLoader):
            raise WorkloadError(
                "Trainer.fit trains on one DataLoader",
                f"it is {shown(loader)}",
                "make one DataLoader, over a data set that gives samples of each",
            )
        self.train_dataloader = loader
        length = _length(loader)
        self.num_training_batches = _limited("limit_train_batches", length, self.limit_train_batches)
        if not self.num_training_batches:
            raise WorkloadError(
                "Trainer.fit needs batches", "the loader has none, or limit_train_batches is 0", "hand in samples"
            )
        if math.isinf(length):
            self._check_without_length()
            return loader
        is_by_epoch = self.check_val_every_n_epoch is not None
        every = self.val_check_interval if isinstance(self.val_check_interval, int) else 0
        if is_by_epoch and every > self.num_training_batches:
            raise UsageError(
                "val_check_interval is a number of batches of one epoch",
                f"it is {every}, and an epoch has {self.num_training_batches}",
                "write check_val_every_n_epoch=None too, to count over all epochs",
            )
        return loader

    def _check_without_length(self) -> None:
        """Raise UsageError for what needs to know which batch is the last."""
        for name, is_used in (
            ("accumulate_grad_batches", self.accumulate_grad_batches > 1 and math.isinf(self.num_training_batches)),
            ("val_check_interval", isinstance(self.val_check_interval, float) and self.val_check_interval != 1.0),
            ("check_val_every_n_epoch=None", self.check_val_every_n_epoch is None),
        ):
            if is_used:
                raise UsageError(
                    f"{name} needs to know how many batches an epoch has",
                    "the loader has no length: its data set is iterable",
                    "give the data set __len__, or write limit_train_batches=N" if name[0] == "a" else "leave it out",
                )

    def _prepare(self, loader: Any, val_dataloaders: Any) -> Any:
        """Make the job of the module, its optimizers and the loader; return what the loop iterates over."""
        module = self.lightning_module
        if overrides(module, "validation_step", self.base) and self.limit_val_batches:
            self.val_loaders = _as_list(self._loaders("val_dataloader", val_dataloaders))
            limit = self.limit_val_batches
            self.num_val_batches = [_limited("limit_val_batches", _length(each), limit) for each in self.val_loaders]
            if not any(self.num_val_batches):
                self.num_val_batches = []
        result = self.call_module("configure_optimizers")
        self.optimizers, self.lr_scheduler_configs = read_optimizers(result, module.automatic_optimization)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        loaders = [] if loader is None else [loader]
        objects = (module, *self.optimizers, *loaders, *schedulers, *self.precision_plugin.make_scaler())
        job, *prepared = paceline.prepare(*objects, by_part=[module])
        self.job = job
        self._check_gradients_are_whole()
        if self.precision == "64-true":
            job.to_float64 = True
        wrapper = part_of(self.base, "core.optimizer").LightningOptimizer
        self.strategy._lightning_optimizers = [wrapper(each) for each in self.optimizers]
        for each in self.strategy._lightning_optimizers:
            each._strategy = self.strategy
        self._keep()
        return prepared[1 + len(self.optimizers)] if loaders else None

    def _check_gradients_are_whole(self) -> None:
        if self.job.mesh.size("tensor") == 1:
            return
        for name in ("on_after_backward", "on_before_optimizer_step"):
            if self.looks_at_gradients(name):
                raise PlanError(
                    f"{name} finds whole gradients",
                    "under tensor this rank has pieces of them",
                    "clip by Trainer(gradient_clip_val=1.0), or write replicate or shard in place of tensor",
                )

    def _keep(self) -> None:
        """Have checkpoints keep what hooks, callbacks and this trainer remember."""
        job, module = self.job, self.lightning_module
        job.keep("lightning", _Progress(self))
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        if keeps(module, self.base, hooks):
            job.keep("lightning.module", CheckpointHooks(module, (), self, has_state=False))
        states = ("state_dict", "load_state_dict")
        if self.datamodule is not None:
            base = base_of(self.datamodule, "LightningDataModule")
            assert base is not None
            if keeps(self.datamodule, base, states):
                job.keep("lightning.datamodule", CheckpointHooks(self.datamodule, (), self, has_state=True))
        for number, each in enumerate(self.callbacks):
            base = base_of(each, "Callback")
            assert base is not None
            if keeps(each, base, (*hooks, *states)):
                hooked = CheckpointHooks(each, (self, module), self, keeps(each, base, states))
                job.keep(f"lightning.callback.{number}", hooked)
        for number, best in enumerate(self.best):
            job.keep(f"lightning.best.{number}", best)

    def _loaders(self, name: str, given: Any) -> Any:
        """Return what a loader hook returns, unless loaders were handed in."""
        if given is not None:
            return given
        if self.datamodule is not None:
            base = base_of(self.datamodule, "LightningDataModule")
            assert base is not None
            if overrides(self.datamodule, name, base):
                return getattr(self.datamodule, name)()
        if overrides(self.lightning_module, name, self.base):
            return self.call_module(name)
        return None

    def _log_hyperparameters(self) -> None:
        """Hand the Loggers what `save_hyperparameters` has saved."""
        if not self.enable_autolog_hparams or not self.is_global_zero:
            return
        found: dict[str, Any] = {}
        for each in (self.datamodule, self.lightning_module):
            if each is not None and getattr(each, "_log_hyperparams", False):
                found.update(each.hparams_initial)
        for logger in self.loggers:
            if found:
                logger.log_hyperparams(found)

    def _tell_exception(self, error: Exception) -> None:
        """Call the hooks `on_exception`."""
        for each in self.callbacks:
            each.on_exception(self, self.lightning_module, error)
        if self.datamodule is not None:
            self.datamodule.on_exception(error)

    def _evaluate(
        self, function: str, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        loaders, data = _loader_and_datamodule(dataloaders, datamodule)
        stage, hook = ("test", "test_dataloader") if function == "test" else ("validation", "val_dataloader")
        if self.lightning_module is None and model is None:
            raise UsageError(f"Trainer.{function} needs a module", "fit was not called", "hand it in")
        is_first = self.lightning_module is None
        if not is_first and model is not None and model is not self.lightning_module:
            raise UsageError(
                "a Trainer has one module", "it was handed another before", "make another Trainer for this one"
            )
        self.function = function
        if data is not None:
            self.datamodule = data
        if is_first:
            self._connect(model)
        if not overrides(self.lightning_module, f"{stage}_step", self.base):
            raise WorkloadError(
                f"Trainer.{function} calls {stage}_step", "the module has none", f"write {stage}_step in the module"
            )
        self._set_up(function)
        if is_first:
            self._prepare(None, None)
        self._load_best(ckpt_path, is_given=model is not None)
        found = _as_list(self._loaders(hook, loaders))
        if not found:
            raise WorkloadError(f"Trainer.{function} needs a DataLoader", "there is none", "hand it in")
        limit = self.limit_test_batches if function == "test" else self.limit_val_batches
        limits = [_limited(f"limit_{function[:3]}_batches", _length(each), limit) for each in found]
        values = EvaluationLoop(self, stage, found, limits).run()
        self.stage = None
        self.call_data("teardown", function)
        if verbose and self.is_global_zero:
            for each in values:
                print("\n".join(f"{name}  {value:.6g}" for name, value in each.items()), flush=True)
        return values

    def _load_best(self, ckpt_path: Any, is_given: bool) -> None:
        """Take the weights of the best state, where they are asked for."""
        paths = [each.checkpoint.best_model_path for each in self.best if each.checkpoint.best_model_path]
        if ckpt_path is None and not is_given and paths:
            ckpt_path = "best"  # as Lightning does
        if ckpt_path is None:
            return
        if ckpt_path != "best" or not paths:
            raise UsageError(
                "ckpt_path is 'best', of a ModelCheckpoint that has saved",
                f"it is {ckpt_path!r:.60}" if paths else "none has",
                "load weights before: trainer.job.load(folder, weights_only=True)",
            )
        self.job.load(paths[0], weights_only=True)


def _as_list(loaders: Any) -> list[Any]:
    """Return one loader or several as a list.

    Raises:
        WorkloadError: one is no DataLoader.
    """
    if loaders is None:
        return []
    found = list(loaders) if isinstance(loaders, Sequence) else [loaders]
    for each in found:
        if not isinstance(each, DataLoader):
            raise WorkloadError(
                "evaluations are over one DataLoader or a list of them", f"one is {shown(each)}", "hand in DataLoaders"
            )
    return found


def _loader_and_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Return loaders and data module; a data module may come in the loaders' place."""
    if base_of(loaders, "LightningDataModule") is None:
        if loaders is not None and datamodule is not None:
            raise UsageError("loaders come from one place", "there are loaders and a data module", "leave one out")
        return loaders, datamodule
    return None, loaders


def _loggers_of(value: Any) -> list[Any]:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _length(loader: Any) -> float:
    """Return how many batches a loader has; infinite where it does not know."""
    with suppress(TypeError):
        return len(loader)
    return math.inf


def _limited(name: str, length: float, limit: float) -> float:
    """Return how many batches of a loader are taken.

    Raises:
        UsageError: a share of an unknown number, or none of some.
    """
    if isinstance(limit, int):
        return min(length, limit)
    if limit == 1.0 or limit == 0.0:
        return length if limit else 0
    share = math.nan if math.isinf(length) else int(length * limit)
    if not share > 0:
        raise UsageError(
            f"{name} is a share of the batches", f"it is {limit}, of {length} batches", "write a number of batches"
        )
    return share
