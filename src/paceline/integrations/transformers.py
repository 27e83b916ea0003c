"""`Trainer`: transformers' own Trainer trains on Paceline's engine, under its plans.

    from transformers import TrainingArguments
    from paceline.integrations.transformers import Trainer  # from transformers import Trainer

    trainer = Trainer(model, TrainingArguments("out"), train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("model")

transformers keeps its loop, callbacks, logs, evaluation and checkpoint folders. It is handed the `Accelerator` of
`paceline.integrations.accelerate` in place of Accelerate's; what ranks have parts of is saved and loaded here.

Needs: every rank makes the same calls.
Promises: on N data ranks the parameters, logs and metrics of `transformers.Trainer` on N processes, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import transformers.trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import paceline
from paceline.integrations.accelerate import STATE, Accelerator, join_ranks, load_parts, other_plan
from paceline.integrations.saving import names_of_parts, prefix_of
from paceline.nouns.errors import CheckpointError, ReadError, UsageError
from paceline.nouns.patching import patched
from paceline.nouns.reading import read_json
from paceline.train.whole_state import whole_state

# Fields of TrainingArguments that another rank would wait for ever for, or that change nothing here: what to write.
_REFUSED = {
    "ddp_backend": "leave it out: gloo or nccl is chosen by the device",
    "ddp_timeout": "leave it out: paceline run ends a job that has lost a rank",
    "auto_find_batch_size": "try batch sizes by paceline plan, which says what each needs",
}


class TrainerMixin:
    """What makes a subclass of `transformers.Trainer` train on Paceline's engine.

    Name it before the class of the library: `class Mine(TrainerMixin, trl.KTOTrainer)`.

    Args:
        arguments: those of the other class.
        plan: the plan, such as "shard=2,zero=2"; that of `paceline run` where None, or plain replication.
        named: those of the other class, by name.

    Raises:
        UsageError: an argument asks for another engine, or for what several ranks can't do.
        PlanError: the plan contradicts that of the command, the number of ranks, or what a loop can have.
        PeerLostError: not all ranks came.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, Seq2SeqTrainer, Seq2SeqTrainingArguments
        >>> from paceline.integrations.transformers import TrainerMixin
        >>> class Mine(TrainerMixin, Seq2SeqTrainer):
        ...     pass
        >>> config = BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                     num_attention_heads=2)
        >>> data = [{"input_ids": torch.arange(3, 11), "label": 1}] * 32
        >>> args = Seq2SeqTrainingArguments(
        ...     "out", save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False
        ... )
        >>> Mine(BertForSequenceClassification(config), args, train_dataset=data).train().global_step
        {'train_runtime': ...}
        12
    """

    accelerator: Accelerator
    args: Any
    model: Any

    def __init__(self, *arguments: Any, plan: str | None = None, **named: Any) -> None:
        self._plan_line = plan
        # Before a subclass asks which rank it is.
        join_ranks(plan, cpu=False)
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which is Paceline's.

        Raises:
            UsageError: an argument asks for another engine, or for what several ranks can't do.
        """
        join_ranks(self._plan_line, bool(self.args.use_cpu))
        _check_arguments(self.args)
        accelerator = partial(Accelerator, plan=self._plan_line)
        with patched(transformers.trainer, Accelerator=accelerator):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if paceline.size() > 1:
            # TrainingArguments was made before the ranks met, and has the device of a single process.
            vars(self.args)["_setup_devices"] = self.accelerator.device
            self.args._n_gpu = 1
        if self.accelerator.is_cut:
            _check_of_parts(self.args)

    @property
    def job(self) -> Any:
        """The job of `paceline.prepare`; None until `train` opens it."""
        return self.accelerator.job

    # Checkpoints.

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """Train as transformers' Trainer does; with `True`, go on from the last checkpoint that is complete.

        Raises:
            CheckpointError: no checkpoint is complete, or this plan can't load it.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(_last_complete(Path(self.args.output_dir)))
        if resume_from_checkpoint:
            self._check_plan_of(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *arguments, **named)  # type: ignore[misc]

    def _check_plan_of(self, folder: Path) -> None:
        """Raise CheckpointError where transformers would leave the optimizer's state out, without a word."""
        is_ours = (folder / STATE).exists()
        if not is_ours and self.accelerator.is_cut and (folder / TRAINER_STATE_NAME).exists():
            raise other_plan(folder, self.accelerator.plan.mesh)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.job is None or not self.accelerator.is_cut:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        self.job.save(Path(output_dir, STATE))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, STATE).exists():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load_parts(self.job, Path(checkpoint))
        state = accelerate.utils.load(Path(checkpoint, SCHEDULER_NAME))
        self.lr_scheduler.load_state_dict(state)  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        if self.job is not None and self.accelerator.is_cut:
            load_parts(self.job, best, weights_only=True)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.job is not None and self.accelerator.is_cut:  # it trains for the second time
            load_parts(self.job, Path(resume_from_checkpoint), weights_only=True)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(_own_folder(self.accelerator, output_dir))  # type: ignore[misc]
        # The file that makes a checkpoint complete comes next, and all ranks' are to be there.
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        folder = checkpoint and _own_folder(self.accelerator, checkpoint)
        super()._load_rng_state(folder)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and self.job is not None and self.accelerator.is_cut:
            prefix = prefix_of(self.job, self.model, "save_model")
            state_dict = whole_state(self.job, prefix, _is_saved(self.model))
        with names_of_parts():
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    # Numbers of the whole model.

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        if self.job is None:
            counts: dict[bool, int] = {}
            if hasattr(self.model, "num_parameters"):
                counts = {exclude: self.model.num_parameters(exclude_embeddings=exclude) for exclude in (False, True)}
            self._whole_counts = counts
        return super()._prepare_for_training(*arguments, **named)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return this rank's share of a step's operations, which transformers adds up over the ranks."""
        counts = self._whole_counts

        def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
            return counts[exclude_embeddings]

        if not counts or not self.accelerator.is_cut:
            return super().floating_point_ops(inputs)  # type: ignore[misc, no-any-return]
        owner = type(self.model.num_parameters.__self__)  # of a PeftModel, the base
        with patched(owner, num_parameters=staticmethod(num_parameters)):
            return super().floating_point_ops(inputs) // self.accelerator.mesh.places  # type: ignore[misc, no-any-return]


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose model is held, and whose gradients are summed, by Paceline.

    Its arguments are those of transformers', and `plan` of `TrainerMixin`. docs/transformers.md says what differs.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> from paceline.integrations.transformers import Trainer
        >>> config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> row = torch.arange(3, 11)
        >>> data = [{"input_ids": row, "labels": row}] * 32
        >>> args = TrainingArguments(
        ...     "out", num_train_epochs=2, learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True,
        ...     dataloader_pin_memory=False
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


def _is_saved(model: Any) -> Callable[[str], bool]:
    """Return a predicate of the names that `save_pretrained` writes: of a PeftModel, those of the adapters."""
    if not hasattr(model, "peft_config"):
        return lambda name: True
    from paceline.integrations.peft import names_of_adapters  # peft is another extra

    return names_of_adapters(model).__contains__


def _check_arguments(args: Any) -> None:
    """Raise UsageError where a field of TrainingArguments asks for what is Paceline's, on several ranks."""
    if paceline.size() == 1:
        return
    defaults = transformers.TrainingArguments.__dataclass_fields__
    for name, fix in _REFUSED.items():
        value = getattr(args, name)
        if value != defaults[name].default:
            raise UsageError(f"on several ranks Trainer does not take {name}", f"{name}={value!r}", fix)


def _check_of_parts(args: Any) -> None:
    """Raise UsageError where a field of TrainingArguments needs whole tensors, and ranks have parts."""
    if args.bf16_full_eval or args.fp16_full_eval:
        raise UsageError(
            "where ranks have parts of the model, evaluation is in the precision of training",
            "bf16_full_eval or fp16_full_eval is set",
            "leave it out, or write replicate in the plan",
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise UsageError(
            "load_best_model_at_end needs the parts of the ranks",
            "save_only_model=True leaves them out of checkpoints",
            "leave save_only_model out",
        )


def _last_complete(folder: Path) -> Path:
    """Return the last checkpoint of a folder that was written to its end.

    Raises:
        CheckpointError: there is none.
    """
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if number.isdecimal():
            found.append((int(number), path))
    for _, path in sorted(found, reverse=True):
        try:
            read_json(path / TRAINER_STATE_NAME)
        except ReadError:
            continue
        return path
    raise CheckpointError(
        f"resume_from_checkpoint=True goes on from a checkpoint in {folder}",
        f"{len(found)} are there, none of them complete" if found else "there is none",
        "name a checkpoint's folder, or leave resume_from_checkpoint out",
    )


def _own_folder(accelerator: Accelerator, folder: str) -> str:
    """Return where a rank's random state goes: transformers' names tell data ranks apart, and no others."""
    return str(Path(folder, f"rank-{paceline.rank()}")) if accelerator.mesh.places > 1 else folder
