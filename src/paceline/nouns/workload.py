"""The workload: the parts of training that a user declares in Python, once, for every command and every plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import WorkloadError, did_you_mean
from paceline.nouns.parts import advice_for, check_data, check_function, check_sinks, shown
from paceline.nouns.sink import MakeSink

PRECISIONS = ("float32", "bf16", "fp16", "float64")


@dataclass(frozen=True)
class Workload:
    """A model with its loss, optimizer and data. The loop stays the user's own: see `paceline.distribute`.

    Args:
        model: a function that makes the model, e.g. `lambda: BertForMaskedLM(config)`. Called once per rank, after the
            seed is set.
        loss: a function of the model and one micro-batch that returns `(sum, weight)`: the losses of the samples or
            tokens added up, a tensor with one element, and how many there were, a number. The mean is taken once, over
            the whole global batch, so no split of it can change the result. A loss that does not add up over samples is
            refused before the first step; a penalty on the weights adds up once it is multiplied by the weight.
        optimizer: a function of the model that makes the optimizer, e.g. `lambda m: AdamW(m.parameters())`; or a list
            of several functions, each for parameters of its own. All the optimizers step together.
        data: a data set with `len` and `[]`, or a function that makes one. Random numbers drawn in
            `[]` (torch, random, numpy) depend only on the seed and the sample's position. Or a stream: an
            IterableDataset or another object that can be iterated over again and again, or a generator function. Every
            rank reads all of it, in its own order, and keeps its part of each batch. None: the loop makes its own
            batches, a part of each on every rank, and hands them to `job.step`.
        batch_size: the samples per optimizer step, over all ranks. Where data is None, those of `job.evaluate`, and it
            may be left out.
        scheduler: a function of the optimizer that makes a learning-rate scheduler, or a list of several; each steps
            after each update. A scheduler that steps by a metric, such as ReduceLROnPlateau, steps by `job.schedule` in
            the loop.
        collate: a function that makes a batch of a list of samples; torch's default where None.
        evaluation: a data set for `job.evaluate`, like `data`.
        score: a function of the model and one batch that returns a dict of `(sum, weight)`; `{"loss": loss(...)}` where
            None.
        epochs: the passes over the data; ignored where `steps` is given. Of a stream each ends where the stream does.
        steps: the number of optimizer steps. A loop with batches of its own may leave it out, and can't take more.
        micro_batch_size: the samples that one rank takes through the model at a time; all where None.
        precision: the dtype of the computation: "float32", "bf16" or "fp16" (autocast; parameters stay float32), or
            "float64". With "fp16" the loss is scaled for backward passes, and a step whose gradients overflow on some
            rank changes no parameter.
        clip_norm: the largest norm of the whole gradient; no clipping where None.
        seed: the seed of initial parameters, data order and dropout.
        deterministic: True to ask torch for deterministic algorithms.
        loader_workers: the processes per rank that load samples ahead; 0 loads in the rank itself. Of a stream, at most
            1.
        sinks: the functions that make event sinks, e.g. `[paceline.TensorBoard]`: rank 0 calls each with the run
            directory (None where there is none) and hands it every event of `events.jsonl`. See docs/extending.md.
        before_update: a function that changes the gradients of the whole batch's mean loss, a dict by the parameters'
            names, in place, before they are clipped. It must do the same on every rank; random numbers that it draws
            are the same there. Only under the axis replicate.

    Raises:
        WorkloadError: a part is missing, unknown or of the wrong kind.

    Examples:
        A classifier. The loss is a sum over samples, and returns how many there are:

        >>> def cross_entropy(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
        >>> workload = paceline.Workload(
        ...     model=lambda: torch.nn.Linear(4, 3),
        ...     loss=cross_entropy,
        ...     optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        ...     scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10),
        ...     data=torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(3, (100,))),
        ...     batch_size=32,
        ...     micro_batch_size=8,
        ...     epochs=3,
        ...     clip_norm=1.0,
        ... )
        >>> job = paceline.distribute(workload)
        >>> job.total_steps  # 100 / 32, rounded up, in each epoch
        12

        Tokens instead of samples: the weight is the number of tokens that count.

        >>> def masked_lm(model, batch):
        ...     tokens, labels = batch
        ...     logits = model(tokens).flatten(0, 1)
        ...     total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        ...     return total, (labels != -100).sum()
    """

    model: Callable[[], Any]
    loss: Callable[[Any, Any], tuple[Any, Any]]
    optimizer: Callable[[Any], Any]
    data: Any
    batch_size: int = 0
    scheduler: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    evaluation: Any = None
    score: Callable[[Any, Any], dict[str, tuple[Any, Any]]] | None = None
    epochs: int = 1
    steps: int | None = None
    micro_batch_size: int | None = None
    precision: str = "float32"
    clip_norm: float | None = None
    seed: int = 0
    deterministic: bool = False
    loader_workers: int = 0
    sinks: Sequence[MakeSink] = ()
    before_update: Callable[[dict[str, Any]], None] | None = None

    def __new__(cls, *values: object, **parts: object) -> Workload:
        """Check the names of the parts before Python does, so that the error can name the part that was meant."""
        positional = dict(zip(PARTS, values, strict=False))
        names = [*positional, *parts]
        data = {**positional, **parts}.get("data")
        # Without `data` it is missing; None says that the loop makes the batches.
        check_part_names(names, has_data=data is not None or "data" not in names)
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, such as the one that `paceline.launch` sends, has parts that were checked: `__new__` is for new ones.
        return object.__new__, (type(self),), self.__dict__

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "scheduler", "collate", "score", "before_update"):
            check_function(name, getattr(self, name), name not in NEEDED)
        for name in ("data", "evaluation"):
            if getattr(self, name) is not None:
                check_data(name, getattr(self, name))
        check_sinks(self.sinks)
        if self.data is None:
            self._check_without_data()
        else:
            _check_count("batch_size", self.batch_size, 1)
        _check_count("epochs", self.epochs, 1)
        _check_count("steps", self.steps, 1, may_be_none=True)
        _check_count("micro_batch_size", self.micro_batch_size, 1, may_be_none=True)
        _check_count("loader_workers", self.loader_workers, 0)
        _check_count("seed", self.seed, 0)
        if self.precision not in PRECISIONS:
            raise WorkloadError(
                f"the workload's precision is {self.precision!r}",
                f"the choices are {', '.join(PRECISIONS)}",
                _precision_advice(str(self.precision)),
            )
        if self.clip_norm is not None:
            object.__setattr__(self, "clip_norm", _checked_norm(self.clip_norm))
        if not isinstance(self.deterministic, bool):
            raise WorkloadError(
                "the workload's deterministic should be True or False",
                f"it is {shown(self.deterministic)}",
                "write deterministic=True or leave it out",
            )

    def _check_without_data(self) -> None:
        """Raise WorkloadError for a part that is about `data`, where there is none."""
        _check_count("batch_size", self.batch_size, 0)
        for name, value, otherwise in (
            ("epochs", self.epochs, "write steps=... instead"),
            ("micro_batch_size", self.micro_batch_size, "leave it out: job.step takes each batch whole, as one step"),
        ):
            if value != PARTS_DEFAULTS[name]:
                raise WorkloadError(
                    f"the workload has {name}={value!r}",
                    "its data is None: its loop makes the batches, and each goes through the model whole",
                    otherwise,
                )

    def check_ranks(self, ranks: int) -> None:
        """Raise WorkloadError unless every one of `ranks` ranks gets a sample of a full batch."""
        if self.data is not None and self.batch_size < ranks:
            raise too_small_batch(self.batch_size, ranks)


def _checked_norm(value: Any) -> float:
    """Return `value` as a number of Python's; numpy's and torch's numbers are taken, too.

    Raises:
        WorkloadError: it is no number above 0.
    """
    number = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    elif not isinstance(value, bool | str):  # float() would also take True and "1"; a tensor of several raises
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            number = float(value)
    if number > 0:
        return number
    raise WorkloadError(
        "the workload's clip_norm should be a number above 0",
        f"it is {value!r}",
        "leave it out for no clipping, or write e.g. clip_norm=1.0",
    )


PARTS = tuple(field.name for field in dataclasses.fields(Workload))
PARTS_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Workload)}
NEEDED = tuple(name for name, default in PARTS_DEFAULTS.items() if default is dataclasses.MISSING)


def check_part_names(names: list[str], has_data: bool = True) -> None:
    """Raise WorkloadError when a needed part is missing or a name is none of a workload's parts.

    Args:
        names: the names of the parts that the user wrote.
        has_data: True where the part `data` is not None.
    """
    needed = (*NEEDED, "batch_size") if has_data else NEEDED
    missing = [name for name in needed if name not in names]
    for name in names:
        if name not in PARTS:
            # A part that is missing is likelier to be meant than one that is there.
            likely = did_you_mean(name, missing or PARTS, did_you_mean(name, PARTS, "leave it out"))
            raise WorkloadError(
                f"the workload has a part {name!r}",
                f"a workload's parts are {', '.join(PARTS)}",
                advice_for(name) or likely,
            )
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        additions = ", ".join(f"{name}=..." for name in missing)
        raise WorkloadError(
            f"a workload needs {', '.join(needed)}",
            f"{' and '.join(missing)} {verb} missing",
            f"add {additions} to Workload(...)",
        )


def _precision_advice(asked: str) -> str:
    """Return the advice in place of a precision that does not exist."""
    if asked.lower() in ("fp8", "int8", "float8", "8", "4", "int4"):
        return "leave it out for float32, or write precision='bf16'"
    return did_you_mean(asked.removeprefix("torch."), PRECISIONS, "write one of these", _SAME_PRECISION)


_SAME_PRECISION = {
    "fp32": "float32", "32": "float32", "single": "float32", "float": "float32", "fp64": "float64", "64": "float64",
    "double": "float64", "bfloat16": "bf16", "bf16-mixed": "bf16",
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16",
}  # fmt: skip


def too_small_batch(batch_size: int, ranks: int) -> WorkloadError:
    """Return the error of a global batch that can't give every rank a sample."""
    return WorkloadError(
        f"a batch of {batch_size} samples should be split over {ranks} ranks",
        f"{ranks - batch_size} of them would get none",
        f"raise batch_size to {ranks} or more, or start at most {batch_size} ranks with -n {batch_size}",
    )


def _check_count(name: str, value: object, least: int, may_be_none: bool = False) -> None:
    """Raise WorkloadError unless a part is a whole number of at least `least`."""
    if value is None and may_be_none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        example = max(least, 32) if "batch" in name else least
        raise WorkloadError(
            f"the workload's {name} should be a whole number of at least {least}",
            f"it is {shown(value)}",
            f"write e.g. {name}={example}",
        )
