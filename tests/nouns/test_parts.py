"""First slips in a Workload: each is refused when it is made, with what to write instead."""

# ruff: noqa: E501  (a table, a case a line)

from __future__ import annotations

import functools

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline
from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter([1, 2, 3])


class Rows(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(2)


class Table:
    iloc = None

    def __len__(self):
        return 3

    def __getitem__(self, column):
        return column


class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()


class OfModel(torch.optim.SGD):
    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)


class OfParameters(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)


class HandsOn(torch.optim.SGD):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


class TextSink:
    def __init__(self, run_dir):
        """Takes what a sink gets."""

    def write(self, event):
        """Pass over it."""


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


PARTS = {
    "model": lambda: nn.Linear(2, 2),
    "loss": lambda model, batch: (model(batch).sum(), len(batch)),
    "optimizer": sgd,
    "data": Rows(),
    "batch_size": 2,
}
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1)
# The part, what it is given, and what the error says of it and of what to do.
SLIPS = {
    "a model": ("model", nn.Linear(2, 2), "a model that has been made already, Linear(", "write model=lambda: Net(...)"),
    "a model that needs sizes": ("model", Sized, "Sized can't be called so: missing a required argument: 'width'", "model=lambda"),
    "a model of one argument": ("model", lambda config: 1, "too many|missing a required argument: 'config'", "model=lambda"),
    "no model": ("model", None, "it is None", "model=lambda"),
    "an optimizer's class": ("optimizer", torch.optim.AdamW, "it is the class AdamW, which takes parameters", "optimizer=lambda model: torch.optim.AdamW(model.parameters()"),
    "an optimizer's class with options": ("optimizer", ADAMW, "it is the class AdamW, which takes parameters", "optimizer=lambda model"),
    "an optimizer's class of one's own": ("optimizer", OfParameters, "it is the class OfParameters, which takes parameters", "optimizer=lambda model"),
    "an optimizer's class that hands on": ("optimizer", HandsOn, "it is the class HandsOn, which takes parameters", "optimizer=lambda model"),
    "an optimizer": ("optimizer", sgd(nn.Linear(2, 2)), "of type SGD", "optimizer=lambda model"),
    "an optimizer without arguments": ("optimizer", lambda: 1, "too many positional arguments", "optimizer=lambda model"),
    "a scheduler's class": ("scheduler", torch.optim.lr_scheduler.StepLR, "StepLR can't be called so: missing a required argument: 'step_size'", "scheduler=lambda optimizer"),
    "a scheduler": ("scheduler", torch.optim.lr_scheduler.ConstantLR(sgd(nn.Linear(2, 2))), "of type ConstantLR", "scheduler=lambda optimizer"),
    "a loss module": ("loss", nn.CrossEntropyLoss(), "it is torch's CrossEntropyLoss, which takes predictions and targets", "returns (sum, weight)"),
    "a loss function": ("loss", F.cross_entropy, "it is torch's cross_entropy, which takes predictions and targets", "returns (sum, weight)"),
    "a loss of outputs and labels and more": ("loss", lambda outputs, labels, weights: 1, "missing a required argument: 'weights'", "returns (sum, weight)"),
    "a loss of the model alone": ("loss", lambda model: 1, "too many positional arguments", "returns (sum, weight)"),
    "a collate function of two": ("collate", lambda inputs, labels: 1, "missing a required argument", "def collate(samples)"),
    "a score of one": ("score", lambda model: 1, "too many positional arguments", "def score(model, batch)"),
    "a loader": ("data", DataLoader(Rows(), 2), "a DataLoader, which makes batches itself", "loader.dataset"),
    "a generator": ("data", (row for row in [1]), "a generator, which can be read once", "data=samples in place of"),
    "a set": ("data", {1, 2}, "in another order", "hand in a list"),
    "columns": ("data", {"x": [1], "y": [2]}, "whose [] takes a key", "a list of samples"),
    "a path": ("data", "train.csv", "'train.csv' of type str", "read it first"),
    "a table": ("data", Table(), "a table, Table, whose [] takes a column", "to_dict('records')"),
    "a loader to evaluate on": ("evaluation", DataLoader(Rows(), 2), "a DataLoader", "loader.dataset"),
    "a sink's class alone": ("sinks", TextSink, "it is <class", "sinks=[paceline.TensorBoard]"),
    "a sink": ("sinks", [TextSink(None)], "one is a sink that has been made already", "sinks=[lambda run_dir:"),
    "a sink without a folder": ("sinks", [lambda: 1], "too many positional arguments", "sinks=[lambda run_dir:"),
    "a sink's name": ("sinks", ["tensorboard"], "it is 'tensorboard' of type str", "sinks=[paceline.TensorBoard]"),
    "clipping by a text": ("clip_norm", "1.0", "it is '1.0'", "clip_norm=1.0"),
    "clipping by a switch": ("clip_norm", True, "it is True", "clip_norm=1.0"),
    "determinism by a text": ("deterministic", "no", "'no' of type str", "deterministic=True"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_refused_with_what_to_write(slip):
    part, value, found, fix = SLIPS[slip]
    with pytest.raises(WorkloadError) as caught:
        paceline.Workload(**{**PARTS, part: value})
    assert caught.value.asked.startswith(f"the workload's {part} should be")
    assert any(text in caught.value.found for text in found.split("|"))
    assert fix in caught.value.fix
    assert "\n" not in caught.value.found


@pytest.mark.parametrize("norm", [1, 1.0, numpy.float32(1.0), torch.tensor(1.0)])
def test_a_norm_may_be_any_number(norm):
    assert type(paceline.Workload(**PARTS, clip_norm=norm).clip_norm) in (int, float)


RIGHT = {
    "a class without arguments": ("model", nn.Identity),
    "a method": ("model", nn.Linear(2, 2).double),
    "a partial": ("model", functools.partial(nn.Linear, 2, out_features=2)),
    "defaults": ("loss", lambda model, batch, share=0.1, *more, **named: 1),
    "an optimizer of one's own, of a model": ("optimizer", OfModel),
    "a module of model and batch": ("loss", type("Own", (nn.Module,), {"forward": lambda self, model, batch: 1})()),
    "a scheduler's class that needs no more": ("scheduler", torch.optim.lr_scheduler.LinearLR),
    "a built-in": ("collate", torch.stack),
    "a data set's class": ("data", Rows),
    "a stream": ("data", Stream()),
    "a tensor": ("data", torch.zeros(3, 2)),
    "rows of dicts": ("data", [{"x": 1}]),
    "clipping by a whole number": ("clip_norm", 1),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_taken(case):
    part, value = RIGHT[case]
    assert getattr(paceline.Workload(**{**PARTS, part: value}), part) is value


# What other libraries call it, and what must and must not be advised.
NAMES = {
    "gradient_accumulation_steps": ("micro_batch_size", "leave"),
    "learning_rate": ("torch.optim.AdamW", "did you mean"),
    "fp16": ("precision='bf16' or 'fp16'", "did you mean"),
    "train_dataset": ("data=", "did you mean"),
    "criterion": ("loss=", "leave"),
    "num_workers": ("loader_workers", "leave"),
    "device": ("paceline run -n N", "did you mean"),
    "max_grad_norm": ("clip_norm", "leave"),
    "shuffle": ("shuffled by the seed", "did you mean"),
    "optimiser": ("'optimizer'", "leave"),
    "batchsize": ("'batch_size'", "leave"),
    "bananas": ("leave it out", "did you mean"),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_part_gets_advice_that_does_no_harm(name):
    wanted, unwanted = NAMES[name]
    with pytest.raises(WorkloadError) as caught:
        paceline.Workload(**PARTS, **{name: 1})
    assert wanted in caught.value.fix
    assert unwanted not in caught.value.fix


PRECISIONS = {
    "float16": ("did you mean 'fp16'", "float64"),
    "16-mixed": ("did you mean 'fp16'", "bf16"),
    "fp32": ("did you mean 'float32'", "bf16"),
    "double": ("did you mean 'float64'", "bf16"),
    "bfloat16": ("did you mean 'bf16'", "float64"),
    "int8": ("leave it out for float32", "did you mean"),
    "tf32": ("write one of these", "did you mean"),
}


@pytest.mark.parametrize("asked", PRECISIONS)
def test_precision_advice_never_names_a_different_precision(asked):
    wanted, unwanted = PRECISIONS[asked]
    with pytest.raises(WorkloadError) as caught:
        paceline.Workload(**PARTS, precision=asked)
    assert wanted in caught.value.fix
    assert unwanted not in caught.value.fix


def op(name):
    from paceline.comm.collectives import check_op

    return lambda: check_op(name)


ADVICE = {
    "average": (op("average"), "write 'mean'"),
    "avg": (op("avg"), "write 'mean'"),
    "prod": (op("prod"), "write 'product'"),
    "total": (op("total"), "write 'sum'"),
    "an unknown reduction": (op("median"), "write one of these"),
    "a mesh of experts": (lambda: Mesh.parse("moe=2"), "write one of these"),
    "data parallelism": (lambda: Mesh.parse("ddp=2"), "did you mean 'dp'"),
    "a misspelt axis": (lambda: Mesh.parse("replicat=2"), "did you mean 'replicate'"),
    "switched on": (lambda: Plan(offload="true"), "did you mean 'on'"),
    "switched off": (lambda: Plan(offload="no"), "did you mean 'off'"),
    "float32 on the wire": (lambda: Plan(compression="fp32"), "write one of these"),
    "eight bits on the wire": (lambda: Plan(compression="int8"), "write one of these"),
    "bfloat16 on the wire": (lambda: Plan(compression="bfloat16"), "did you mean 'bf16'"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_means_the_same_or_offers_all(case):
    call, advised = ADVICE[case]
    with pytest.raises(PacelineError) as caught:
        call()
    assert advised in caught.value.fix
    assert isinstance(caught.value, UsageError) == ("reduction" in caught.value.asked)
