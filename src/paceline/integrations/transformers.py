"""`Trainer`: a fine-tuning script for `transformers.Trainer` trains by `paceline.prepare`, under its plans.

    from transformers import TrainingArguments
    from paceline.integrations.transformers import Trainer  # in place of transformers.Trainer

    trainer = Trainer(model, TrainingArguments("out"), train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("model")

What the arguments mean is in `training_arguments.py`. The loop is here, and calls `paceline.prepare` as a user's own
does, so `paceline run`, `paceline verify` and `paceline plan` take the script as they take a loop.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers.optimization import get_scheduler
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    RemoveColumnsCollator,
    TrainOutput,
    denumpify_detensorize,
    enable_full_determinism,
    has_length,
    set_seed,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_loss, find_labels

import paceline
from paceline.integrations.saving import save_model
from paceline.integrations.trainer_data import SeededOrder, batches_of, steps_of
from paceline.integrations.trainer_evaluation import Evaluated, Scored, evaluate
from paceline.integrations.trainer_loss import TrainerLoss, inner_model
from paceline.integrations.trainer_parts import (
    KeptState,
    as_on_rank_0,
    checked_model,
    checkpoints,
    collator_of,
    logits_of,
    speed,
)
from paceline.integrations.training_arguments import check_arguments
from paceline.nouns.errors import CheckpointError, UsageError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.parts import shown
from paceline.train.loop_job import LoopJob
from paceline.train.prepare import data_parts, read_plan

_OVERRIDABLE = frozenset(
    {
        "compute_loss",
        "create_optimizer",
        "create_scheduler",
        "get_decay_parameter_names",
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "log",
    }
)
_BEST = "best"  # the folder of the best model in output_dir
_LOOP = "write the loop yourself, with paceline.prepare: docs/loops.md"


class _NotHere(UsageError, AttributeError):
    """A method of transformers' Trainer that this one has not."""


class Trainer:
    """Train a model of transformers, or one around it, under any plan that `paceline.prepare` has.

    It takes what `transformers.Trainer` takes. `per_device_train_batch_size` is each data rank's, as there; with
    `accelerator_config={"split_batches": True}` it is that of all ranks, and then N ranks train as one process does.
    What differs from transformers, and which arguments are refused, is in docs/transformers.md.

    A subclass may override `compute_loss`, `create_optimizer`, `create_scheduler`, `get_decay_parameter_names`, `log`,
    and the three methods that return a DataLoader, whose batches are those of all ranks together.

    Args:
        model: a model that returns its loss, such as one of transformers or a peft.PeftModel.
        args: a `transformers.TrainingArguments`.
        data_collator: makes a batch of samples.
        train_dataset: with `[]` and a length; or iterable, and then `args.max_steps` says how long.
        eval_dataset: one, or a dict of them.
        processing_class: the tokenizer or processor, which `save_model` saves too.
        model_init: makes the model, in place of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch)`, a mean over these items; the model's own loss where
            None.
        compute_metrics: of an EvalPrediction a dict of numbers; called on every rank with the predictions of all.
        callbacks: of transformers.
        optimizers: an optimizer and a scheduler, or None for either, which is then made by `args`.
        optimizer_cls_and_kwargs: a class and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels)`, what is kept of the logits of a batch.

    Raises:
        WorkloadError: an argument is none of these, or asks for what there is not here; or the subclass overrides
            something else.

    Attributes:
        args (transformers.TrainingArguments): as they were handed in.
        model (torch.nn.Module): that is trained.
        job (LoopJob | None): of `paceline.prepare`, from the first call of `train`, `evaluate`, `predict` or
            `save_model` on.
        optimizer (torch.optim.Optimizer | None): as `create_optimizer` made it.
        lr_scheduler (Any): as `create_scheduler` made it.
        state (transformers.TrainerState): steps, logs and the best metric.
        control (transformers.TrainerControl): what callbacks ask for.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> from paceline.integrations.transformers import Trainer
        >>> config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> row = torch.arange(3, 11)
        >>> data = [{"input_ids": row, "labels": row}] * 32
        >>> args = TrainingArguments(
        ...     "out", num_train_epochs=2, learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True
        ... )
        >>> trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=data)
        >>> output = trainer.train()
        {'train_runtime': ...}
        >>> output.global_step
        8
        >>> trainer.save_model("model")
        >>> type(LlamaForCausalLM.from_pretrained("model")).__name__
        'LlamaForCausalLM'
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for name in vars(cls):
            is_theirs = callable(getattr(transformers.Trainer, name, None)) and not name.startswith("__")
            if is_theirs and name not in _OVERRIDABLE:
                raise WorkloadError(
                    f"a subclass of Trainer may override {', '.join(sorted(_OVERRIDABLE))}",
                    f"{cls.__name__} has its own {name}, which is not called here as it is in transformers",
                    f"override one of these, use a callback, or {_LOOP}",
                )

    def __init__(  # noqa: PLR0913 (transformers' own arguments)
        self,
        model: torch.nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], torch.nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.args: Any = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(self.args)
        paceline.init()
        self.rank = paceline.rank()
        self._set_log_level()
        seed = enable_full_determinism if self.args.full_determinism else set_seed
        seed(self.args.seed)
        self.model = checked_model(model, model_init)
        self.data_collator = data_collator or collator_of(processing_class)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.loss = TrainerLoss(self.model, compute_loss_func, self.args.label_smoothing_factor)
        inner = inner_model(self.model)
        self.columns = set(inspect.signature(inner.forward).parameters)
        names = self.args.label_names
        self.label_names: list[str] = list(find_labels(type(inner)) if names is None else names)
        self.can_return_loss = can_return_loss(type(inner))
        self.job: LoopJob | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.steps: int | None = None  # of a pass
        self.batches: int | None = None
        self._check_together(optimizers)
        self.control = TrainerControl()
        self._begin_callbacks(callbacks or [])
        config: Any = getattr(inner, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(transformers.Trainer, name):
            raise _NotHere(f"Trainer.{name} is of transformers' Trainer", "this one has no such method", _LOOP)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _set_log_level(self) -> None:
        level = self.args.log_level if self.rank == 0 else self.args.log_level_replica
        if level != "passive":
            logging.set_verbosity(logging.get_log_levels_dict()[level])

    def _check_together(self, optimizers: tuple[Any, Any]) -> None:
        """Raise WorkloadError where arguments contradict each other."""
        args = self.args
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise WorkloadError(
                f"eval_strategy={args.eval_strategy.value!r} evaluates while it trains",
                "there is no eval_dataset",
                "write Trainer(eval_dataset=...), or leave eval_strategy out",
            )
        if args.save_strategy == "best" and args.eval_strategy == "no":
            raise WorkloadError(
                "save_strategy='best' saves where an evaluation is better than those before",
                "eval_strategy is 'no'",
                "write eval_strategy='epoch', or save_strategy='epoch'",
            )
        if optimizers[0] is not None and self.optimizer_cls_and_kwargs is not None:
            raise WorkloadError(
                "the optimizer is handed in, or made by optimizer_cls_and_kwargs", "both are given", "leave one out"
            )
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise WorkloadError(
                "the length of training should be known: the learning rate follows from it",
                "train_dataset has no length, and max_steps is not set",
                "write TrainingArguments(max_steps=...)",
            )
        if args.gradient_accumulation_steps < 1 or args.per_device_train_batch_size < 1:
            raise WorkloadError(
                "per_device_train_batch_size and gradient_accumulation_steps should be 1 or more",
                f"they are {args.per_device_train_batch_size} and {args.gradient_accumulation_steps}",
                "write whole numbers above 0",
            )

    # Callbacks.

    def _begin_callbacks(self, callbacks: list[Any]) -> None:
        from transformers.integrations.integration_utils import get_reporting_integration_callbacks

        shows = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        reports = get_reporting_integration_callbacks(self.args.report_to)
        every = [DefaultFlowCallback, *reports, *callbacks, shows]
        self.callback_handler: Any = CallbackHandler(
            every, self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.state: Any = self._new_state()
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def _new_state(self) -> TrainerState:
        return TrainerState(is_local_process_zero=paceline.local_rank() == 0, is_world_process_zero=self.rank == 0)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of one."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def _call(self, event: str, *more: Any) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, *more)

    # Data.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of training; its batches are those of all ranks together.

        Raises:
            WorkloadError: there is no train_dataset, or fewer samples of a batch than ranks.
        """
        if self.train_dataset is None:
            raise WorkloadError(
                "training needs samples", "there is no train_dataset", "write Trainer(train_dataset=...)"
            )
        size = self.args.per_device_train_batch_size
        parts = data_parts(os.environ, paceline.size())
        if not self.args.accelerator_config.split_batches:
            size *= parts
        elif size < parts:
            raise WorkloadError(
                "each rank should have a sample of every batch",
                f"with split_batches a batch has {size}, for {parts} ranks",
                f"write per_device_train_batch_size={parts} or more",
            )
        options: dict[str, Any] = {"batch_size": size}
        if not isinstance(self.train_dataset, IterableDataset):
            options |= {"sampler": self._sampler(size), "drop_last": self.args.dataloader_drop_last}
        return self._loader(self.train_dataset, "training", options)

    def _sampler(self, size: int) -> Any:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy == "sequential":
            return SequentialSampler(self.train_dataset)
        if strategy == "group_by_length" or getattr(self.args, "group_by_length", False):
            names = getattr(self.processing_class, "model_input_names", None)
            return LengthGroupedSampler(
                size * self.args.gradient_accumulation_steps,
                dataset=self.train_dataset,
                lengths=self._lengths(),
                model_input_name=names[0] if names else None,
                generator=torch.Generator().manual_seed(seed),
            )
        return SeededOrder(self.train_dataset, seed)

    def _lengths(self) -> list[int] | None:
        """Return the samples' lengths where the data set has a column of them."""
        name = self.args.length_column_name
        if name in (getattr(self.train_dataset, "column_names", None) or []):
            return list(self.train_dataset[name])
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of an evaluation: whole batches, which the ranks share out.

        Args:
            eval_dataset: a data set, or the name of one in the trainer's dict of them; the trainer's where None.

        Raises:
            WorkloadError: there is none.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise WorkloadError(
                "evaluation needs samples", "there is no eval_dataset", "write Trainer(eval_dataset=...)"
            )
        return self._loader(data, "evaluation", {"batch_size": self.args.per_device_eval_batch_size})

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of `predict`."""
        return self._loader(test_dataset, "test", {"batch_size": self.args.per_device_eval_batch_size})

    def _loader(self, data: Any, what: str, options: dict[str, Any]) -> DataLoader[Any]:
        args = self.args
        collate = self.data_collator
        if args.remove_unused_columns:
            columns = [*self.columns, "label", "label_ids", *self.label_names]
            collate = RemoveColumnsCollator(
                collate, columns, logging.get_logger("transformers"), type(inner_model(self.model)).__name__, what
            )
        return DataLoader(
            data,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            **options,
        )

    # The update.

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the parameters that decay: all but biases and norms, as in transformers."""
        names: list[str] = transformers.Trainer.get_decay_parameter_names(self, model)  # type: ignore[arg-type]
        return names

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer that was handed in, or make that of the arguments."""
        if self.optimizer is not None:
            return self.optimizer  # type: ignore[no-any-return]
        model = self.model if model is None else model
        decaying = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = []
        for decays in (True, False):
            parameters = [
                parameter
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and (name in decaying) == decays
            ]
            groups.append({"params": parameters, "weight_decay": self.args.weight_decay if decays else 0.0})
        kind, options = self.optimizer_cls_and_kwargs or transformers.Trainer.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = kind(groups, **options)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the scheduler that was handed in, or make that of the arguments.

        Args:
            num_training_steps: updates of the whole training.
            optimizer: whose rates it changes; the trainer's where None.
        """
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch.

        Args:
            model: to be called, as `model(...)`.
            inputs: its arguments.
            return_outputs: return what the model returned too.
            num_items_in_batch: over how many labels, of this rank's micro-batch, the loss should be a mean.

        Returns:
            The mean; or it and the outputs.
        """
        loss, outputs = self.loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    # The job.

    def _begin(self) -> LoopJob:
        """Return the job; made once, with all that training needs if there are samples for it."""
        if self.job is not None:
            return self.job
        args = self.args
        if args.activation_checkpointing if hasattr(args, "activation_checkpointing") else args.gradient_checkpointing:
            self._recompute()
        parts = data_parts(os.environ, paceline.size())
        cuts = min(parts, paceline.size())  # verify's one process has the batches of several, and cuts none
        loader = None
        total = max(args.max_steps, 1)
        if self.train_dataset is not None or type(self).get_train_dataloader is not Trainer.get_train_dataloader:
            plain = self.get_train_dataloader()
            self.batches = batches_of(plain)
            loader = steps_of(plain, args.gradient_accumulation_steps, cuts)
            total = self._count_steps()
        self.optimizer = self.create_optimizer()
        self.lr_scheduler = self.create_scheduler(total, self.optimizer)
        if args.fp16:
            self.scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        self._check_loss_is_additive(cuts)
        objects = [self.model, self.optimizer, self.lr_scheduler, loader, self.scaler]
        job, *prepared = paceline.prepare(*[each for each in objects if each is not None], seed=args.seed)
        self.job = job
        if loader is not None:
            self.loader = prepared[3]
        self.kept = job.keep("trainer", KeptState(self, self._samples_of_a_step(parts)))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        return job  # type: ignore[no-any-return]

    def _samples_of_a_step(self, parts: int) -> int:
        size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return int(size if self.args.accelerator_config.split_batches else size * parts)

    def _check_loss_is_additive(self, parts: int) -> None:
        if self.can_return_loss and not self.label_names and parts > 1:
            raise WorkloadError(
                "the loss of several ranks should be the mean of the ranks' losses",
                f"that of {type(inner_model(self.model)).__name__} compares the samples of a batch with each other",
                f"train by -n 1 or tensor=N, which cut no batch; or {_LOOP}, and gather the samples by job.all_gather",
            )

    def _recompute(self) -> None:
        """Have the model compute activations again in the backward pass."""
        settings = getattr(self.args, "activation_checkpointing_kwargs", self.args.gradient_checkpointing_kwargs)
        if Mesh.parse(read_plan(os.environ, paceline.size()).mesh).places > 1:
            raise WorkloadError(
                "gradient_checkpointing runs parts of the model a second time",
                "under tensor, context and expert the model runs as one graph, which keeps its activations",
                "leave it out, or write shard=N in the plan",
            )
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        if enable is not None:
            chosen = dict(settings or {})
            own = {name: chosen.pop(name) for name in ("every_n_layers", "offload") if name in chosen}
            enable(activation_checkpointing_kwargs=chosen or None, **own)
            return
        enable = getattr(self.model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise WorkloadError(
                "gradient_checkpointing is done by the model",
                f"{type(self.model).__name__} has no gradient_checkpointing_enable",
                "call torch.utils.checkpoint in its forward, and leave the argument out",
            )
        enable(gradient_checkpointing_kwargs=settings)

    def _count_steps(self) -> int:
        """Return how many updates the whole training has; note how many a pass has."""
        args = self.args
        if self.batches is None:
            return int(args.max_steps)
        steps: int = max(-(-self.batches // args.gradient_accumulation_steps), 1)
        self.steps = steps
        if args.max_steps > 0:
            return int(args.max_steps)
        return math.ceil(float(args.num_train_epochs) * steps)

    # Training.

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train, and return the number of steps, the mean loss and the times.

        Args:
            resume_from_checkpoint: a folder `checkpoint-N` of `output_dir`, or True for the newest there. A job of
                `paceline run --resume` goes on from the run's own checkpoint, whatever is written here.
            trial: None: there is no search here.
            ignore_keys_for_eval: names in the model's output that are no predictions.

        Returns:
            `global_step`, `training_loss` and `metrics`, the same on every rank.

        Raises:
            UsageError: the trainer has trained already, or a trial is asked for.
            CheckpointError: there is nothing to go on from, or it can't be read.
            LossError: the loss is not finite on some rank, or the model has none.
            PeerLostError: another rank has gone.

        Examples:
            >>> from transformers import TrainingArguments
            >>> from paceline.integrations.transformers import Trainer
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, inputs, labels):
            ...         outputs = super().forward(inputs)
            ...         return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}
            >>> data = [{"inputs": row, "labels": total} for row, total in zip(x, y)]
            >>> args = TrainingArguments("out", max_steps=4, save_strategy="no", disable_tqdm=True)
            >>> trainer = Trainer(Model(4, 1), args, train_dataset=data, eval_dataset=data[:16])
            >>> output = trainer.train()
            {'train_runtime': ...}
            >>> output.global_step
            4
        """
        if trial is not None:
            raise UsageError("Trainer.train takes no trial", f"it is {shown(trial)}", "leave it out")
        if self.train_dataset is None and type(self).get_train_dataloader is Trainer.get_train_dataloader:
            self.get_train_dataloader()  # raises
        job = self._begin()
        if self.state.max_steps:
            raise UsageError(
                "a Trainer trains once: its job ends with the last step",
                "train was called before",
                "write a larger num_train_epochs, or make another Trainer, in a run of its own",
            )
        if resume_from_checkpoint:
            self._resume(job, resume_from_checkpoint)
        total = self._count_steps()
        epochs = math.ceil(self.args.num_train_epochs)
        if self.args.max_steps > 0:
            epochs = sys.maxsize if self.steps is None else -(-total // self.steps)
        self.state.compute_steps(self.args, total)
        self.state.max_steps, self.state.num_train_epochs = total, epochs
        self.state.global_step = first = job.step_number
        self.ignored = ignore_keys_for_eval
        self.losses: list[torch.Tensor] = []  # of each step since the last log, its sum and its labels
        self.logged_step, self.total_loss = first, 0.0
        self.rate = self._rate()
        began_s = job.clock.now_s()
        self._call("on_train_begin")
        if self.args.eval_on_start and not first:
            self.evaluate(ignore_keys=ignore_keys_for_eval)
        if first < total:
            self._train_epochs(job, epochs)
        return self._finish(job, first, began_s)

    def _resume(self, job: LoopJob, folder: str | bool) -> None:
        loaded = job.checkpoints.loaded_folder
        if loaded is not None:
            job.notice(f"goes on from the run's {loaded.name}; resume_from_checkpoint is not looked at")
            return
        if folder is True:
            saved = checkpoints(Path(self.args.output_dir))
            if not saved:
                raise CheckpointError(
                    f"a checkpoint in {self.args.output_dir}",
                    "there is none",
                    "name its folder in resume_from_checkpoint, or leave that out to begin anew",
                )
            folder = str(saved[-1])
        job.load(str(folder))

    def _train_epochs(self, job: LoopJob, epochs: int) -> None:
        for epoch in job.epochs(epochs):
            self._call("on_epoch_begin")
            is_empty = True
            for micro_batches in self.loader:
                is_empty = False
                self._call("on_step_begin")
                norm = self._step(job, micro_batches)
                self._after_step(job, epoch, norm)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            if is_empty:
                raise WorkloadError(
                    "each pass over the data should have a batch",
                    "train_dataset gave none",
                    "check the data set, and dataloader_drop_last, which leaves a short batch out",
                )
            self._call("on_epoch_end")
            self._do_asked(job, None)
            if self.control.should_training_stop:
                break

    def _step(self, job: LoopJob, micro_batches: list[Any]) -> float | None:
        """Take one step; return the norm of the gradient if it is clipped."""
        assert self.optimizer is not None
        self.model.train()
        items, shares = self._shares(job, micro_batches)
        total = torch.zeros((), dtype=torch.float64, device=job.device)
        last = max((number for number, share in enumerate(shares) if share), default=0)
        for number, share in enumerate(shares):
            if not share and len(shares) > 1:  # no rank has a label there
                continue
            # A rank that has fewer micro-batches than others takes its last one again, which does not count.
            inputs = micro_batches[min(number, len(micro_batches) - 1)]
            with self._precision(job):
                loss = self.compute_loss(self.model, inputs, num_items_in_batch=items[number].clamp(min=1))
            loss = loss[0] if isinstance(loss, tuple) else loss
            total += torch.where(items[number] > 0, loss.detach() * items[number], 0.0)
            loss = loss * share if len(shares) > 1 else loss
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            with job.accumulate(number < last):
                job.backward(loss, weight=items[number], share=share)
            if number < len(shares) - 1:
                self._call("on_substep_end")
        self.losses.append(torch.stack([total, items.sum()]))
        norm = self._clip(job)
        self._call("on_pre_optimizer_step")
        self._update()
        self._call("on_optimizer_step")
        self.rate = self._rate()  # of this update
        if not job.is_skipped and not self._steps_by_metric():
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def _shares(self, job: LoopJob, micro_batches: list[Any]) -> tuple[torch.Tensor, list[float]]:
        """Return the items of this rank's micro-batches, and which share of the step's items each has on all ranks."""
        counts = [self.loss.items(inputs) for inputs in micro_batches]
        # One process that takes a step of all ranks, to compare the first, has the micro-batches of all.
        number = max(self.args.gradient_accumulation_steps, len(counts))
        items = torch.zeros(number, dtype=torch.float64, device=job.device)
        assert job.part is not None
        if not job.part.keeps_pace:
            items[: len(counts)] = torch.stack([torch.as_tensor(count, device=job.device) for count in counts]).double()
        if len(items) == 1:
            return items, [1.0]
        everywhere = job.all_reduce(items).tolist()
        whole = sum(everywhere)
        if not whole:  # job.backward says that nothing counts
            return items[:1], [1.0]
        return items, [count / whole for count in everywhere]

    def _precision(self, job: LoopJob) -> Any:
        if self.args.bf16 or self.args.fp16:
            return torch.autocast(job.device.type, torch.bfloat16 if self.args.bf16 else torch.float16)
        return contextlib.nullcontext()

    def _clip(self, job: LoopJob) -> float | None:
        largest = self.args.max_grad_norm
        if not largest or largest < 0:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return job.clip(float(largest))

    def _update(self) -> None:
        assert self.optimizer is not None
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _steps_by_metric(self) -> bool:
        return isinstance(self.lr_scheduler, ReduceLROnPlateau)

    def _after_step(self, job: LoopJob, epoch: int, norm: float | None) -> None:
        self.state.global_step = job.step_number
        cut = job.cut
        assert cut is not None
        if self.batches:
            done = min(cut.batch * self.args.gradient_accumulation_steps, self.batches)
            self.state.epoch = epoch + done / self.batches
        else:
            self.state.epoch = job.step_number / self.state.max_steps
        self._call("on_step_end")
        self._do_asked(job, norm)

    def _do_asked(self, job: LoopJob, norm: float | None) -> None:
        """Log, evaluate and save, as the callbacks have asked for."""
        if self.control.should_log and self.state.global_step > self.logged_step:
            logs: dict[str, Any] = {"loss": self._mean_loss(job) / (self.state.global_step - self.logged_step)}
            if norm is not None:
                logs["grad_norm"] = norm
            logs["learning_rate"] = self.rate
            self.logged_step = self.state.global_step
            self.log(logs)
        if self.control.should_evaluate:
            self._evaluate_in_training(job)
        if self.control.should_save and self.args.save_strategy != "best":
            self._save_checkpoint(job)

    def _rate(self) -> float:
        assert self.optimizer is not None
        return float(
            self.optimizer.param_groups[0]["lr"] if self._steps_by_metric() else self.lr_scheduler.get_last_lr()[0]
        )

    def _mean_loss(self, job: LoopJob) -> float:
        """Return the sum of the steps' mean losses since the last log; of all ranks. Collective."""
        if not self.losses:
            return 0.0
        sums, weights = job.all_reduce(torch.stack(self.losses)).T
        self.losses = []
        total = float(as_on_rank_0(job, {"loss": float((sums / weights).sum())})["loss"])
        self.total_loss += total
        return total

    def _evaluate_in_training(self, job: LoopJob) -> None:
        metrics = self.evaluate(ignore_keys=self.ignored)
        args = self.args
        if args.metric_for_best_model is None:
            return
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise WorkloadError(
                f"metric_for_best_model={args.metric_for_best_model!r} should be in the evaluation's metrics",
                f"these are {', '.join(sorted(metrics))}",
                "write one of them, or have compute_metrics return it",
            )
        if self._steps_by_metric():
            self.lr_scheduler.step(metrics[name])
        self._note_best(job, metrics[name])

    def _note_best(self, job: LoopJob, metric: float) -> None:
        """Save the model if it is the best so far, and the arguments want it saved."""
        args, state = self.args, self.state
        if args.load_best_model_at_end or args.save_strategy == "best":
            folder = Path(args.output_dir, _BEST)
            is_best = job.save_best(metric, "max" if args.greater_is_better else "min", folder)
            if is_best:
                state.best_model_checkpoint = str(folder)
                self._call("on_save")
        else:
            best = state.best_metric
            is_best = best is None or (metric > best if args.greater_is_better else metric < best)
        if is_best:
            state.best_metric, state.best_global_step = metric, state.global_step

    def _save_checkpoint(self, job: LoopJob) -> None:
        output = Path(self.args.output_dir)
        job.save(output / f"checkpoint-{self.state.global_step}")
        limit = self.args.save_total_limit
        if job.rank == 0 and limit is not None and limit > 0:
            for folder in checkpoints(output)[:-limit]:
                shutil.rmtree(folder, ignore_errors=True)
        self._call("on_save")

    def _finish(self, job: LoopJob, first: int, began_s: float) -> TrainOutput:
        job.end_step()
        self._mean_loss(job)
        steps = self.state.global_step - first
        loss = self.total_loss / max(steps, 0.001)
        samples = steps * self._samples_of_a_step(job.data_size)
        metrics = as_on_rank_0(job, speed("train", job.clock.now_s() - began_s, samples, steps))
        metrics["train_loss"] = loss
        self.log(metrics)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            job.load(best, weights_only=True)
        self._call("on_train_end")
        return TrainOutput(self.state.global_step, loss, metrics)

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the model, and return the metrics. Collective.

        Args:
            eval_dataset: a data set, or a dict of several; that of the trainer where None.
            ignore_keys: names in the model's output that are no predictions.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            The loss, what `compute_metrics` returned, and the times; the same on every rank.

        Raises:
            WorkloadError: there is no data set.
            PeerLostError: another rank has gone.

        Examples:
            >>> from transformers import TrainingArguments
            >>> from paceline.integrations.transformers import Trainer
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, inputs, labels):
            ...         outputs = super().forward(inputs)
            ...         return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}
            >>> data = [{"inputs": row, "labels": total} for row, total in zip(x, y)]
            >>> args = TrainingArguments("out", max_steps=4, save_strategy="no", disable_tqdm=True)
            >>> trainer = Trainer(Model(4, 1), args, train_dataset=data, eval_dataset=data[:16])
            >>> metrics = trainer.evaluate()
            {'eval_loss': ...}
            >>> metrics["eval_loss"] > 0
            True
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            metrics: dict[str, float] = {}
            for name, each in data.items():
                metrics |= self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        loader = self.get_eval_dataloader(data)
        wants = self.compute_metrics is not None and not self.args.prediction_loss_only
        _, metrics = self._evaluate(loader, wants, ignore_keys, metric_key_prefix)
        self.log(metrics)
        self._call("on_evaluate", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the predictions for a data set, on every rank. Collective.

        Args:
            test_dataset: with or without labels.
            ignore_keys: names in the model's output that are no predictions.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `predictions`, `label_ids` and `metrics`, as transformers has them.

        Raises:
            PeerLostError: another rank has gone.

        Examples:
            >>> from transformers import TrainingArguments
            >>> from paceline.integrations.transformers import Trainer
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, inputs, labels):
            ...         outputs = super().forward(inputs)
            ...         return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}
            >>> data = [{"inputs": row, "labels": total} for row, total in zip(x, y)]
            >>> args = TrainingArguments("out", max_steps=4, save_strategy="no", disable_tqdm=True)
            >>> trainer = Trainer(Model(4, 1), args, train_dataset=data, eval_dataset=data[:16])
            >>> trainer.predict(data[:3]).predictions.shape
            (3, 1)
        """
        loader = self.get_test_dataloader(test_dataset)
        wants = not self.args.prediction_loss_only
        found, metrics = self._evaluate(loader, wants, ignore_keys, metric_key_prefix)
        self._call("on_predict", metrics)
        return PredictionOutput(predictions=found.predictions, label_ids=found.labels, metrics=metrics)

    def _evaluate(
        self, loader: DataLoader[Any], wants: bool, ignored: list[str] | None, prefix: str
    ) -> tuple[Evaluated, dict[str, float]]:
        job = self._begin()
        job.settle()  # the step has ended, and its checkpoint waits for what the evaluation changes
        began_s = job.clock.now_s()
        self.callback_handler.eval_dataloader = loader
        if ignored is None:
            config = getattr(inner_model(self.model), "config", None)
            ignored = list(getattr(config, "keys_to_ignore_at_inference", []))

        def score(inputs: dict[str, Any]) -> Scored:
            return self._score(job, inputs, wants, ignored)

        found = evaluate(job, loader, score, self.args.logging_nan_inf_filter, lambda: self._call("on_prediction_step"))
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and found.predictions is not None and found.labels is not None:
            metrics = self.compute_metrics(EvalPrediction(predictions=found.predictions, label_ids=found.labels))
        metrics = denumpify_detensorize(dict(metrics))
        if found.loss is not None:
            metrics["loss"] = found.loss
        named = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()
        }
        times = speed(prefix, job.clock.now_s() - began_s, found.samples, found.batches)
        return found, as_on_rank_0(job, named | times)

    def _score(self, job: LoopJob, inputs: dict[str, Any], wants: bool, ignored: list[str]) -> Scored:
        """Return the loss, the logits and the labels of a batch; logits and labels only if they are wanted."""
        names = self.label_names
        labels = tuple(inputs.get(name) for name in names)
        has_labels = bool(names) and all(label is not None for label in labels)
        has_loss = has_labels or (not names and inputs.get("return_loss", self.can_return_loss))
        loss = None
        with self._precision(job):
            if has_loss:
                items = torch.as_tensor(self.loss.items(inputs)).clamp(min=1)
                loss, outputs = self.compute_loss(self.model, dict(inputs), True, num_items_in_batch=items)
            else:
                outputs = self.model(**inputs)
        if not wants:
            return loss, None, None
        logits = logits_of(outputs, ignored, has_loss)
        truth = (labels[0] if len(labels) == 1 else labels) if has_labels else None
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, truth)
        return loss, logits, truth

    # Logs and files.

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add numbers to the state's history, and hand them to the callbacks.

        Args:
            logs: by name.
            start_time: of training, or None.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model to a folder from which `from_pretrained` loads it, with the tokenizer. Collective.

        Ranks put together what they have parts of, and rank 0 writes. Of a PeftModel the adapters are written.

        Args:
            output_dir: the folder; `args.output_dir` where None.

        Raises:
            CheckpointError: it can't be written.
            PeerLostError: another rank has gone.

        Examples:
            >>> from transformers import TrainingArguments
            >>> from paceline.integrations.transformers import Trainer
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, inputs, labels):
            ...         outputs = super().forward(inputs)
            ...         return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}
            >>> data = [{"inputs": row, "labels": total} for row, total in zip(x, y)]
            >>> args = TrainingArguments("out", max_steps=4, save_strategy="no", disable_tqdm=True)
            >>> trainer = Trainer(Model(4, 1), args, train_dataset=data, eval_dataset=data[:16])
            >>> trainer.save_model("model")
            >>> import pathlib
            >>> [path.name for path in pathlib.Path("model").iterdir()]
            ['model.safetensors']
        """
        job = self._begin()
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if hasattr(self.model, "peft_config"):
            from paceline.integrations.peft import write_adapter

            write_adapter(job, self.model, folder, self._save_tokenizer, lambda path: None)
        else:
            save_model(job, self.model, folder, self._save_tokenizer)

    def _save_tokenizer(self, folder: Path) -> None:
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))

    def save_state(self) -> None:
        """Write the trainer's state to `trainer_state.json` in the output folder, on rank 0."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def is_local_process_zero(self) -> bool:
        """True on the first rank of a host."""
        return paceline.local_rank() == 0

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics, on rank 0.

        Args:
            split: "train", "eval" or "test".
            metrics: by name.
        """
        if self.is_world_process_zero():
            width = max(map(len, metrics), default=0)
            print(f"***** {split} metrics *****")
            for name in sorted(metrics):
                print(f"  {name:{width}} = {metrics[name]}")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `{split}_results.json` in the output folder, on rank 0, as transformers does.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: by name.
            combined: add them to `all_results.json` too.
        """
        if self.is_world_process_zero():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        transformers.Trainer.save_metrics(self, split, metrics, combined)
