"""Check the parts of a workload, and advise the user where a part is something else.

Nothing here imports torch: classes of torch are known by their names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Set
from typing import Any

from paceline.nouns.errors import WorkloadError

# The arguments with which each function is called, and an example of it.
_CALLS = {
    "model": ((), "model=lambda: Net(...)"),
    "loss": (("model", "batch"), "def loss(model, batch): ... that returns (sum, weight)"),
    "optimizer": (("model",), "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"),
    "scheduler": (
        ("optimizer",),
        "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
    ),
    "collate": (("samples",), "def collate(samples): ... that returns a batch"),
    "score": (("model", "batch"), "def score(model, batch): ... that returns a dict of (sum, weight)"),
    "before_update": (("gradients",), "def before_update(gradients): ... that changes the tensors of a dict in place"),
}
_IN_THE_OPTIMIZER = "set it in the optimizer: optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"
_ON_THE_COMMAND_LINE = "leave it out; `paceline run -n N --plan PLAN` says where it trains"
_IN_THE_RUN = "leave it out; `paceline run` has --checkpoint-every, --keep and --resume"
_ORDER = "leave it out: the order is shuffled by the seed, and a short last batch is used"
_ACCUMULATION = (
    "write micro_batch_size=N, the samples that one rank takes at a time: gradients of a rank's part of batch_size are "
    "accumulated by so many"
)
_PRECISION = "write precision='bf16' or 'fp16' (autocast, for fp16 with a loss scale), or leave it out (float32)"
# The names that other libraries have for a part, and the advice for each.
_ADVICE = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas", "momentum"), _IN_THE_OPTIMIZER),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "grad_accumulation_steps"),
        _ACCUMULATION,
    ),
    **dict.fromkeys(
        ("device", "devices", "ranks", "world_size", "num_processes", "num_gpus", "strategy", "plan", "mesh"),
        _ON_THE_COMMAND_LINE,
    ),
    **dict.fromkeys(("save_steps", "checkpoint_every", "resume", "output_dir", "save_dir"), _IN_THE_RUN),
    **dict.fromkeys(("shuffle", "drop_last", "sampler"), _ORDER),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision", "dtype", "half"), _PRECISION),
    **dict.fromkeys(
        ("per_device_batch_size", "per_device_train_batch_size", "train_batch_size", "global_batch_size"),
        "write batch_size=N, the samples of one optimizer step over all ranks",
    ),
    **dict.fromkeys(
        ("dataset", "train_data", "train_dataset", "training_data"),
        "write data=..., a data set with len() and [], or a stream",
    ),
    **dict.fromkeys(
        ("dataloader", "train_loader", "train_dataloader"),
        "write data=..., the loader's data set, and batch_size, collate and loader_workers",
    ),
    **dict.fromkeys(
        ("eval_data", "eval_dataset", "val_data", "val_dataset", "valid_data", "validation", "test_data"),
        "write evaluation=..., a data set with len() and []",
    ),
    **dict.fromkeys(
        ("criterion", "loss_fn", "loss_function"),
        "write loss=..., a function of (model, batch) that returns (sum, weight)",
    ),
    **dict.fromkeys(
        ("metrics", "compute_metrics"), "write score=..., a function of (model, batch) that returns a dict"
    ),
    **dict.fromkeys(("optim", "optimizer_class"), f"write {_CALLS['optimizer'][1]}"),
    **dict.fromkeys(("lr_scheduler", "scheduler_class"), f"write {_CALLS['scheduler'][1]}"),
    **dict.fromkeys(("collate_fn", "collator", "data_collator"), "write collate=..."),
    **dict.fromkeys(("num_workers", "workers", "dataloader_num_workers"), "write loader_workers=N"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "iterations"), "write steps=N"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs", "n_epochs"), "write epochs=N"),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "grad_clip", "clip_grad_norm"),
        "write clip_norm=..., the largest norm of the whole gradient",
    ),
    **dict.fromkeys(("random_seed", "manual_seed"), "write seed=N"),
    **dict.fromkeys(
        ("callbacks", "logger", "loggers", "report_to", "log_with", "tensorboard", "wandb"),
        "write sinks=[...], functions that make event sinks, e.g. [paceline.TensorBoard]",
    ),
}


def advice_for(name: str) -> str | None:
    """Return the advice for a part that other libraries have under this name; None where it is not known."""
    return _ADVICE.get(name.lower())


def check_function(name: str, value: object, may_be_none: bool) -> None:
    """Raise WorkloadError unless `value` is a function that can be called as the part `name` is.

    Args:
        name: the name of the part.
        value: the value that the user passed.
        may_be_none: True where the part may be left out.
    """
    if value is None and may_be_none:
        return
    arguments, example = _CALLS[name]
    asked = f"the workload's {name} should be a function of {_joined(arguments)}"
    mistake = _mistaken_for_function(name, value)
    if mistake:
        raise WorkloadError(asked, mistake, f"write {example}")
    _check_call(asked, value, arguments, f"write {example}")


def check_sinks(value: object) -> None:
    """Raise WorkloadError unless `value` is a list of functions that make event sinks."""
    asked = "the workload's sinks should be a list of functions of (run_dir)"
    fix = "write sinks=[paceline.TensorBoard], or sinks=[lambda run_dir: MySink(...)]"
    if not isinstance(value, list | tuple):
        raise WorkloadError(asked, f"it is {shown(value)}", fix)
    for make in value:
        if hasattr(make, "write") and not isinstance(make, type):
            raise WorkloadError(asked, f"one is a sink that has been made already, {shown(make)}", fix)
        _check_call(asked, make, ("run_dir",), fix)


def _check_call(asked: str, value: object, arguments: tuple[str, ...], fix: str) -> None:
    """Raise WorkloadError unless `value` can be called with these arguments."""
    if not callable(value):
        raise WorkloadError(asked, f"it is {shown(value)}", fix)
    try:
        inspect.signature(value).bind(*arguments)  # without calling it: a model may be large
    except ValueError:
        return  # its arguments are not known
    except TypeError as error:
        raise WorkloadError(asked, f"{_name(value)} can't be called so: {error}", fix) from None


def _takes_parameters(optimizer: type) -> bool:
    """Return True if the first argument takes parameters, as torch's; a class of one's own may take a model."""
    parameters = list(inspect.signature(optimizer).parameters.values())
    if not parameters:
        return True
    first = parameters[0]
    return first.kind is first.VAR_POSITIONAL or first.name.startswith("param")


def _mistaken_for_function(name: str, value: object) -> str:
    """Return the reason why `value`, which can be called, is not the right function; "" if it may be."""
    if name == "model" and _is_torch(type(value), "Module"):
        return f"it is a model that has been made already, {shown(value)}"
    if name == "optimizer":
        factory = value.func if isinstance(value, functools.partial) else value
        if isinstance(factory, type) and _is_torch(factory, "Optimizer") and _takes_parameters(factory):
            return f"it is the class {factory.__name__}, which takes parameters, and not a model"
    if name in ("loss", "score") and (_is_torch(type(value), "_Loss") or _is_functional(value)):
        return f"it is torch's {_name(value)}, which takes predictions and targets"
    return ""


def _is_torch(kind: type, name: str) -> bool:
    """Return True if a class is torch's class of that name, or a subclass of it: torch is not imported here."""
    return any(base.__name__ == name and base.__module__.startswith("torch.") for base in kind.__mro__)


def _is_functional(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == "torch.nn.functional"


def check_data(name: str, value: object, is_made: bool = False) -> None:
    """Raise WorkloadError unless `value` is a data set with len() and [], a stream or, not yet made, a function.

    Args:
        name: the name of the part.
        value: the value that the user passed, or that its function returned.
        is_made: True where a function returned the value.
    """
    asked = f"the workload's {name} should be a data set with len() and [], or a stream"
    mistake = _mistaken_for_data(value)
    if mistake is not None:
        raise WorkloadError(asked, *mistake)
    is_data = is_stream(value) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))
    if not is_data and is_made:
        raise WorkloadError(
            asked,
            f"its function returned a {type(value).__name__}",
            "return a map-style Dataset or a list, or an IterableDataset; or write it as a generator function",
        )
    if not is_data and hasattr(value, "__getitem__") and not callable(value):
        raise WorkloadError(
            asked, f"{type(value).__name__} has [] and no len()", "add def __len__(self), the number of samples"
        )
    if not is_data and not callable(value):
        raise WorkloadError(
            f"{asked}, or a function that makes one",
            f"it is {shown(value)}",
            "hand in a torch Dataset, a list of samples, or a function that returns one",
        )


_READ_ONCE = "can be read once, and is read in each epoch and on each rank"
MAKE_ANEW = "make the iterator in __iter__, where each pass begins"


def is_stream(value: object) -> bool:
    """Return True for a value that can be read from its beginning again and again, and has no samples by number."""
    if isinstance(value, type) or not hasattr(value, "__iter__") or hasattr(value, "__next__"):
        return False
    if _is_torch(type(value), "IterableDataset"):
        return True
    return not hasattr(value, "__getitem__") and not isinstance(value, Set | Mapping)


def read_once(value: Any) -> str:
    """Return the type of the iterator that a stream hands out again and again, where that ends for good; else ""."""
    try:
        iterators = iter(value), iter(value)
    except Exception:  # the error comes again when it is read
        return ""
    # One that is the stream itself may begin anew in __iter__.
    is_one = iterators[0] is iterators[1] and iterators[0] is not value
    return type(iterators[0]).__name__ if is_one else ""


def _mistaken_for_data(value: object) -> tuple[str, str] | None:
    """Return the reason why `value` looks like a data set and is none, with the advice; None if it may be one."""
    kind = type(value)
    if is_stream(value) and (iterator := read_once(value)):
        return f"its __iter__ returns one {iterator} again and again, which {_READ_ONCE}", MAKE_ANEW
    if _is_torch(kind, "DataLoader"):
        return (
            "it is a DataLoader, which makes batches itself",
            "hand in its data set (loader.dataset), and its batch size, collate_fn and workers as batch_size, collate "
            "and loader_workers",
        )
    if hasattr(value, "__next__"):
        return (
            f"it is a {kind.__name__}, which {_READ_ONCE}",
            "hand in the function that makes it: data=samples in place of data=samples()",
        )
    if isinstance(value, Set):
        return (f"it is {shown(value)}, which each process may have in another order", "hand in a list: sorted(...)")
    if isinstance(value, Mapping):
        return (
            f"it is {shown(value)}, whose [] takes a key",
            "hand in a list of samples, or one split of it (such as data['train'])",
        )
    if isinstance(value, str | bytes):
        return (
            f"it is {shown(value)}",
            "read it first: hand in a Dataset, a list of samples, or a function that returns one",
        )
    if hasattr(value, "iloc"):
        return f"it is a table, {kind.__name__}, whose [] takes a column", "hand in its rows: table.to_dict('records')"
    return None


def shown(value: object) -> str:
    """Return `value` and its type, on one short line."""
    text = " ".join(f"{value!r:.200}".split())
    return f"{text:.60} of type {type(value).__name__}"


def _name(value: object) -> str:
    return str(getattr(value, "__name__", None) or type(value).__name__)


def _joined(arguments: tuple[str, ...]) -> str:
    return f"({', '.join(arguments)})" if arguments else "no arguments"
