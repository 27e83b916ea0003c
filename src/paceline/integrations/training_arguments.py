"""Which fields of `transformers.TrainingArguments` mean here what they mean there, and what to write for the others.

FIELDS has every field of transformers 5.24, and some that older ones have besides. A field that is not in it is
accepted only at its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from paceline.nouns.errors import WorkloadError

HONOURED, HARMLESS, REFUSED = "honoured", "harmless", "refused"
_PLAN = "write the plan in the command: paceline run --plan shard=4 FILE"
_HUB = "leave it out, and upload the folder of trainer.save_model"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field.

    Attributes:
        kind: HONOURED, it has the effect that transformers gives it; HARMLESS, what it asks for is so anyhow, or is
            none of the trainer's; REFUSED, at another value than its default it is an error.
        text: of what is refused, what to write; of what is harmless, why.
        takes: of what is honoured, whether a value is; None: all are.
    """

    kind: str
    text: str = ""
    takes: Callable[[Any], bool] | None = None


def _one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: str(getattr(value, "value", value)) in values


def _honoured(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(HONOURED))


def _harmless(text: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(HARMLESS, text))


def _refused(text: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Rule(REFUSED, text))


FIELDS: dict[str, Rule] = {
    # The batch and the steps.
    **_honoured("per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    **_refused("try batch sizes by `paceline plan`, which says what each needs", "auto_find_batch_size"),
    # The update.
    **_honoured("learning_rate", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim_args", "weight_decay"),
    **_honoured("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
    "optim": Rule(
        HONOURED,
        "write adamw_torch, adamw_torch_fused, adafactor, sgd, adagrad or rmsprop, or hand in an optimizer: "
        "Trainer(optimizers=(optimizer, scheduler))",
        _one_of("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    ),
    "lr_scheduler_type": Rule(
        HONOURED,
        "write reduce_lr_on_plateau, or hand in a scheduler: Trainer(optimizers=(optimizer, scheduler))",
        lambda value: str(getattr(value, "value", value)) != "greedy",
    ),
    **_refused("hand in an optimizer: Trainer(optimizers=(optimizer, scheduler))", "optim_target_modules"),
    "average_tokens_across_devices": Rule(
        REFUSED, "leave it out: labels count equally on all ranks, so that N ranks train as one process does"
    ),
    **_refused("add the noise in the model's embedding", "neftune_noise_alpha"),
    # Precision and memory.
    **_honoured("bf16", "fp16", "activation_checkpointing", "activation_checkpointing_kwargs"),
    **_honoured("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_cache"),
    **_harmless("TrainingArguments sets it by itself", "tf32"),
    **_refused("leave it out: evaluation runs in the precision of training", "bf16_full_eval", "fp16_full_eval"),
    **_refused("leave it out", "half_precision_backend", "fp16_backend", "fp16_opt_level", "bf16_backend"),
    **_refused(
        "leave it out, or compile the model and train it in a loop of your own: paceline.prepare(torch.compile(model))",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
    ),
    **_refused("leave it out: the model's own code is trained", "use_liger_kernel", "liger_kernel_config"),
    **_refused("call torch.cuda.empty_cache() in a callback", "torch_empty_cache_steps"),
    # The data.
    **_honoured("seed", "data_seed", "full_determinism", "remove_unused_columns", "label_names", "length_column_name"),
    **_honoured("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    **_honoured("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "group_by_length"),
    "train_sampling_strategy": Rule(
        HONOURED,
        "write random, sequential or group_by_length",
        _one_of("random", "sequential", "group_by_length"),
    ),
    **_refused("leave it out: workers end with each pass over the data", "dataloader_persistent_workers"),
    **_refused("leave it out: samples come in the sampler's order", "dataloader_in_order"),
    **_refused("leave it out: a resumed job goes on at its place in the data", "ignore_data_skip"),
    # Logs.
    **_honoured("logging_strategy", "logging_steps", "logging_first_step", "log_level", "log_level_replica"),
    **_honoured("disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
    **_honoured("trackio_static_space_id", "logging_dir"),
    **_harmless("rank 0 alone writes logs", "log_on_each_node"),
    **_harmless("a loss that is not finite ends the job with an error", "logging_nan_inf_filter"),
    **_refused("count them in data_collator", "include_num_input_tokens_seen", "include_tokens_per_second"),
    # Evaluation.
    **_honoured("eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
    **_honoured("eval_on_start", "metric_for_best_model", "greater_is_better"),
    **_harmless("predictions go to the CPU after every batch", "eval_accumulation_steps"),
    **_refused("leave it out: predictions are tensors", "eval_use_gather_object"),
    **_refused(
        "compute the metric in compute_metrics, which has predictions and labels",
        "eval_do_concat_batches",
        "include_for_metrics",
        "include_inputs_for_metrics",
        "batch_eval_metrics",
    ),
    # Saving.
    **_honoured("output_dir", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end"),
    **_harmless("checkpoints have the states of callbacks", "restore_callback_states_from_checkpoint"),
    **_refused("leave it out, and call trainer.save_model for a folder of weights", "save_only_model"),
    **_refused("leave it out: checkpoints are safetensors", "save_safetensors"),
    **_refused("leave it out: all ranks write into one folder, which every host sees", "save_on_each_node"),
    **_refused("leave it out: a job of `paceline run` saves itself when it is asked to stop", "enable_jit_checkpoint"),
    **_refused(_HUB, "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    **_refused(_HUB, "hub_always_push", "hub_revision", "push_to_hub_model_id", "push_to_hub_organization"),
    **_refused(_HUB, "push_to_hub_token"),
    # Ranks.
    "use_cpu": Rule(
        HONOURED,
        "hide the GPUs: CUDA_VISIBLE_DEVICES= paceline run -n 2 FILE",
        lambda value: not (value and torch.cuda.is_available()),
    ),
    **_refused("leave it out: the device is the rank's", "no_cuda", "use_mps_device", "jit_mode_eval", "use_ipex"),
    "accelerator_config": Rule(
        HONOURED,
        "write split_batches alone: accelerator_config={'split_batches': True}",
        lambda value: not _set_of_accelerator(value),
    ),
    **_refused(_PLAN, "parallelism_config", "fsdp", "fsdp_config", "fsdp_min_num_params"),
    **_refused(_PLAN, "fsdp_transformer_layer_cls_to_wrap"),
    **_refused("write the plan in the command: paceline run --plan shard=4,zero=2 FILE", "deepspeed"),
    **_refused("write it in the plan: paceline run --plan replicate=4,bucket_bytes=26214400 FILE", "ddp_bucket_cap_mb"),
    **_refused("leave it out: buffers are made equal on all ranks after each step", "ddp_broadcast_buffers"),
    **_refused("leave it out: gloo or nccl is chosen by the device", "ddp_backend"),
    **_refused("leave it out: `paceline run` ends a job that has lost a rank", "ddp_timeout"),
    **_harmless("parameters without a gradient need no flag", "ddp_find_unused_parameters", "ddp_static_graph"),
    **_harmless("the launcher's variables say it", "local_rank"),
    # For scripts, and for those who look for mistakes.
    **_harmless("it is for the script", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    **_harmless("it is for the script", "overwrite_output_dir"),
    **_refused("look at the memory by `paceline plan --explain-memory`", "skip_memory_metrics"),
    **_refused("compare the ranks with one process by `paceline verify`", "debug"),
    **_refused("leave it out", "past_index", "mp_parameters", "ray_scope", "tpu_num_cores", "tpu_metrics_debug"),
    **_refused("leave it out", "torchdynamo", "dispatch_batches", "split_batches", "per_gpu_train_batch_size"),
    **_refused("leave it out", "per_gpu_eval_batch_size", "evaluation_strategy"),
}


def _set_of_accelerator(value: Any) -> list[str]:
    """Return what of an AcceleratorConfig is set, and is not honoured."""
    if value is None:
        return []
    usual = type(value)()
    allowed = {"split_batches", "even_batches"}  # no sample is ever taken twice to even out batches
    names = [each.name for each in dataclasses.fields(value) if each.name not in allowed]
    return [name for name in names if getattr(value, name, None) != getattr(usual, name)]


def check_arguments(arguments: object) -> None:
    """Raise WorkloadError unless every field has its default or is honoured.

    Args:
        arguments: a `transformers.TrainingArguments`, or of a class made from it.
    """
    if not isinstance(arguments, transformers.TrainingArguments):
        raise WorkloadError(
            "Trainer takes the arguments as transformers has them",
            f"args is a {type(arguments).__name__}",
            "write args=transformers.TrainingArguments(output_dir=...)",
        )
    if type(arguments).__name__ == "Seq2SeqTrainingArguments":
        raise WorkloadError(
            "Trainer evaluates by the model's loss and logits",
            "args are Seq2SeqTrainingArguments, which ask for generated text",
            "write TrainingArguments, and generate between steps by job.generate in a loop of your own",
        )
    usual = {each.name: _default_of(each) for each in dataclasses.fields(transformers.TrainingArguments)}
    for name, default in usual.items():
        value = getattr(arguments, name)
        rule = FIELDS.get(name, Rule(REFUSED, "leave it out: it is of a transformers that this Paceline does not know"))
        if not _is_taken(rule, value, default):
            raise WorkloadError(
                f"Trainer can't do what TrainingArguments({name}={_shown(value)}) asks for",
                "it would have no effect here, or another one",
                rule.text,
            )


def _is_taken(rule: Rule, value: object, default: object) -> bool:
    if rule.kind == HARMLESS or _is_same(value, default):
        return True
    if rule.kind == REFUSED:
        return False
    return rule.takes is None or rule.takes(value)


def _is_same(value: object, default: object) -> bool:
    """True for the default, and for what TrainingArguments makes of it."""
    plain = getattr(value, "value", value)  # of an enumeration
    if type(default) is bool:
        return bool(plain) == default
    is_empty = plain is None or plain in ("", [], {})
    return bool(plain == default) or (is_empty and default in (None, "", "none"))


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(value: object) -> str:
    return f"{getattr(value, 'value', value)!r:.60}"
