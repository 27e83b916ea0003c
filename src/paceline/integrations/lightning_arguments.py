"""Every argument of `lightning.Trainer`: taken over, without effect, or refused with what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import PacelineError, PlanError, UsageError
from paceline.nouns.parts import shown

TAKEN, WITHOUT_EFFECT, REFUSED = "taken", "without effect", "refused"
PRECISIONS = {
    None: "32-true",
    32: "32-true",
    "32": "32-true",
    "32-true": "32-true",
    64: "64-true",
    "64": "64-true",
    "64-true": "64-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    16: "16-mixed",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
}


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_limit(value: Any) -> bool:
    return value is None or _is_whole(value, 0) or (isinstance(value, float) and 0.0 <= value <= 1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_interval(value: Any) -> bool:
    return value is None or _is_whole(value, 1) or (isinstance(value, float) and 0.0 < value <= 1.0)


def _is_precision(value: Any) -> bool:
    return (isinstance(value, str | int) or value is None) and value in PRECISIONS


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of `lightning.Trainer`.

    Attributes:
        default: Lightning's.
        way: TAKEN, WITHOUT_EFFECT or REFUSED.
        text: what to write instead; of one that is taken, what values there are; of one without effect, why.
        fits: whether a value is one that is taken.
    """

    default: Any
    way: str
    text: str
    fits: Callable[[Any], bool] = lambda value: True


_RANKS = "leave it out, and write in the command: paceline run --plan shard=2 train.py"
_LIMIT = "write a number of batches, or a share of them from 0.0 to 1.0"
ARGUMENTS = {
    "accelerator": Argument("auto", REFUSED, "leave it out: each rank takes the device of its host that is its own"),
    "strategy": Argument("auto", REFUSED, _RANKS),
    "devices": Argument("auto", REFUSED, _RANKS),
    "num_nodes": Argument(1, REFUSED, "leave it out, and write: paceline run --on ssh -H host1:4,host2:4 train.py"),
    "precision": Argument(
        None,
        TAKEN,
        'write "32-true", "64-true", "bf16-mixed" or "16-mixed"; for other dtypes convert it: module.bfloat16()',
        _is_precision,
    ),
    "logger": Argument(
        None,
        TAKEN,
        "write True, False, a Logger or a list of Loggers",
        lambda value: _is_flag(value) or _are_loggers(value),
    ),
    "callbacks": Argument(None, TAKEN, "write a Callback or a list of them"),
    "fast_dev_run": Argument(
        False,
        TAKEN,
        "write True or a number of batches",
        lambda value: isinstance(value, bool) or _is_whole(value, 1),
    ),
    "max_epochs": Argument(
        None, TAKEN, "write a number of epochs", lambda value: value is None or _is_whole(value, 1) or value == -1
    ),
    "min_epochs": Argument(None, TAKEN, "write a number of epochs", lambda value: value is None or _is_whole(value, 0)),
    "max_steps": Argument(
        -1, TAKEN, "write a number of optimizer steps", lambda value: _is_whole(value, 1) or value == -1
    ),
    "min_steps": Argument(
        None, TAKEN, "write a number of optimizer steps", lambda value: value is None or _is_whole(value, 0)
    ),
    "max_time": Argument(
        None,
        REFUSED,
        "leave it out: a job that gets SIGTERM saves and stops after its step, and goes on by --resume",
    ),
    "limit_train_batches": Argument(None, TAKEN, _LIMIT, _is_limit),
    "limit_val_batches": Argument(None, TAKEN, _LIMIT, _is_limit),
    "limit_test_batches": Argument(None, TAKEN, _LIMIT, _is_limit),
    "limit_predict_batches": Argument(None, REFUSED, "leave it out: Trainer.predict is not offered"),
    "overfit_batches": Argument(0.0, REFUSED, "leave it out, and make a loader of few samples"),
    "val_check_interval": Argument(
        None, TAKEN, "write a number of batches, or a share of an epoch from 0.0 to 1.0", _is_interval
    ),
    "check_val_every_n_epoch": Argument(
        1, TAKEN, "write a number of epochs, or None", lambda value: value is None or _is_whole(value, 1)
    ),
    "num_sanity_val_steps": Argument(
        None, TAKEN, "write a number of batches, or -1", lambda value: value is None or _is_whole(value, -1)
    ),
    "log_every_n_steps": Argument(
        None, TAKEN, "write a number of steps", lambda value: value is None or _is_whole(value, 1)
    ),
    "enable_checkpointing": Argument(
        None, WITHOUT_EFFECT, "checkpoints are asked for in the command: --checkpoint-every 100", _is_flag
    ),
    "enable_progress_bar": Argument(None, WITHOUT_EFFECT, "`paceline run` shows the progress", _is_flag),
    "enable_model_summary": Argument(None, WITHOUT_EFFECT, "no table is printed; `paceline plan` has one", _is_flag),
    "accumulate_grad_batches": Argument(1, TAKEN, "write a number of batches", lambda value: _is_whole(value, 1)),
    "gradient_clip_val": Argument(
        None, TAKEN, "write a number, 0 or more", lambda value: value is None or _is_number(value)
    ),
    "gradient_clip_algorithm": Argument(
        None, TAKEN, 'write "norm" or "value"', lambda value: value is None or value in ("norm", "value")
    ),
    "deterministic": Argument(
        None, TAKEN, 'write True, False or "warn"', lambda value: _is_flag(value) or value == "warn"
    ),
    "benchmark": Argument(None, TAKEN, "write True or False", _is_flag),
    "inference_mode": Argument(
        True, WITHOUT_EFFECT, "evaluations run under torch.no_grad, with the same results", _is_flag
    ),
    "use_distributed_sampler": Argument(
        True, WITHOUT_EFFECT, "each rank gets its part of every batch, of any sampler", _is_flag
    ),
    "profiler": Argument(None, REFUSED, "leave it out, and run torch.profiler around trainer.fit"),
    "detect_anomaly": Argument(False, TAKEN, "write True or False", _is_flag),
    "barebones": Argument(False, REFUSED, "leave it out"),
    "plugins": Argument(None, REFUSED, "leave it out; the plan is in the command: --plan shard=2"),
    "sync_batchnorm": Argument(
        False, WITHOUT_EFFECT, "batch norm takes the statistics of the whole batch anyhow", _is_flag
    ),
    "reload_dataloaders_every_n_epochs": Argument(
        0, REFUSED, "leave it out, and have the data set or the sampler change what it gives"
    ),
    "default_root_dir": Argument(None, REFUSED, "leave it out; with --job NAME in the command the run is in runs/NAME"),
    "enable_autolog_hparams": Argument(True, TAKEN, "write True or False", _is_flag),
    "model_registry": Argument(None, REFUSED, "leave it out, and upload what `paceline export` writes"),
}


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every argument.

    Raises:
        UsageError: one is unknown, refused, or has no value of its kind.
        PlanError: one says how to train in parallel, which the command says.
    """
    for name, value in given.items():
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            fix = f"did you mean {near[0]}? Write that" if near else "leave it out"
            raise UsageError("the arguments of Trainer are those of lightning.Trainer", f"{name!r} is none", fix)
        argument = ARGUMENTS[name]
        if argument.way == REFUSED and not _is_default(argument, value):
            kind: type[PacelineError] = UsageError
            if name in ("accelerator", "strategy", "devices", "num_nodes"):
                kind = PlanError
            raise kind(f"Trainer does not take {name}", f"it is {value!r:.60}", argument.text)
        if argument.way != REFUSED and not argument.fits(value):
            text = argument.text if argument.way == TAKEN else "write True or False"
            raise UsageError(f"Trainer can't take this value of {name}", f"it is {shown(value)}", text)
    values = {name: argument.default for name, argument in ARGUMENTS.items()} | given
    if values["max_epochs"] == -1 and values["max_steps"] == -1:
        raise UsageError(
            "Trainer needs to know when training ends",
            "max_epochs is -1, without max_steps",
            "write max_epochs=N or max_steps=N",
        )
    return values


def _is_default(argument: Argument, value: Any) -> bool:
    if isinstance(value, list | tuple | set | dict) and not value:
        return argument.default is None  # plugins=[]
    return type(value) is type(argument.default) and bool(value == argument.default)


def _are_loggers(value: Any) -> bool:
    loggers = value if isinstance(value, list | tuple) else [value]
    return all(callable(getattr(each, "log_metrics", None)) for each in loggers)
