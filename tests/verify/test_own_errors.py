"""An error inside the product is told as Paceline's, an error of the user's code as the user's, by the traceback."""

from __future__ import annotations

import copy
import importlib
import json
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import paceline
from paceline.nouns import own_errors
from paceline.nouns.own_errors import own_line, own_line_of_text
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram
from paceline.verify.ranks import child, dry_run, reference
from paceline.verify.ranks.randomness import controlled

OWN = "this is a bug of Paceline, and not of your code"
BLAMES_THE_USER = ("start it alone", "should run in float64", "should be the sum", "can't take a step in one process")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        return self.last(torch.relu(self.first(inputs)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def workload(**parts):
    random = torch.Generator().manual_seed(1)
    usual = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        "data": [(torch.randn(6, generator=random), torch.tensor(i % 3)) for i in range(40)],
        "batch_size": 8,
    }
    return paceline.Workload(**{**usual, **parts})


def raising(module):
    """A function that fails as if it stood in a module of the product."""
    names = {}
    file = importlib.import_module(f"paceline.{module}").__file__
    exec(compile("def failing(*arguments, **named):\n    raise KeyError('zeros')", file, "exec"), names)
    return names["failing"]


def refusal(monkeypatch, folder, main_module, plan, parts):
    """What a child of the verification refuses."""
    settings = {
        "script": "file.py",
        "plan": {"mesh": Plan.parse(plan).mesh},
        "precisions": ["float64"],
        "steps": 2,
        "folder": str(folder),
    }
    monkeypatch.setattr(child, "read_settings", lambda path: (settings, folder, UserProgram("file.py")))
    monkeypatch.setattr(child, "find_workload", lambda program: workload(**parts))
    child.answer(main_module.main, folder / "settings.json")
    return json.loads((folder / "refused.json").read_text())


# The package, what is replaced there and where it is looked up, the plan, and the process that fails.
SEEDED = {
    "graph, a layout": ("graph.tensor.tensor_layout", "parallel.graph_model", "choose_layout", "tensor=2", dry_run),
    "graph, stages": ("graph.stages", "profile.describe_split", "assign_stages", "pipeline=2", dry_run),
    "graph, a capture": ("graph.capture", "graph.capture", "_module_paths", "tensor=2", dry_run),
    "parallel": ("parallel.graph_model", "parallel.graph_model.SplitModel", "decide", "tensor=2", dry_run),
    "comm": ("comm.collectives", "comm.collectives.AxisComm", "__init__", "replicate=2", dry_run),
    "train": ("train.data", "verify.ranks.dry_run", "open_data", "replicate=2", dry_run),
    "deferred_init": ("deferred_init.defer", "profile.describe_split", "defer", "tensor=2", dry_run),
    "verify": ("verify.ranks.reference_step", "verify.ranks.reference_step", "record", "replicate=2", reference),
    "train, again": ("train.seed", "train.plain_step", "seed_sample", "replicate=2", reference),
}  # fmt: skip


def owner_of(path):
    """The module, or class of one, that a path names."""
    try:
        return importlib.import_module(f"paceline.{path}")
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"paceline.{module}"), name)


@pytest.mark.parametrize("name", SEEDED)
def test_a_failure_of_the_product_is_not_the_users(monkeypatch, tmp_path, capsys, name):
    module, owner, function, plan, process = SEEDED[name]
    monkeypatch.setattr(owner_of(owner), function, raising(module))
    refused = refusal(monkeypatch, tmp_path, process, plan, {})
    text = " ".join(refused["parts"].values())
    assert refused["is_own"], text
    assert OWN in text
    assert "KeyError: 'zeros'" in text
    assert not any(words in text for words in BLAMES_THE_USER), text
    assert "Traceback" in capsys.readouterr().err


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("zeros")


def written(model, batch):
    """Writes to what the backward pass needs."""
    hidden = model.first(batch[0]).exp()
    total = model.last(hidden).sum()
    hidden.zero_()
    return total, len(batch[1])


def stray(model, batch):
    raise KeyError("zeros")


# Parts of a workload that fail by themselves.
USERS = {
    "a loss": {"loss": stray},
    "a backward pass of the user's": {"loss": lambda model, batch: (Failing.apply(loss(model, batch)[0]), 8)},
    "a tensor written in place": {"loss": written},
    "shapes": {"model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(15, 3))},
    "a tensor that is not one": {"loss": lambda model, batch: (nn.functional.dropout(batch[9]), 8)},
    "samples that make no batch": {"data": [(torch.ones(6 + i % 2), torch.tensor(0)) for i in range(40)]},
    "an optimizer": {"optimizer": lambda model: torch.optim.SGD([{"params": model.parameters(), "colour": model.no}])},
}


@pytest.mark.parametrize("name", USERS)
def test_a_failure_of_the_file_is_not_ours(monkeypatch, tmp_path, name):
    refused = refusal(monkeypatch, tmp_path, reference, "replicate=2", USERS[name])
    assert not refused["is_own"], refused
    assert OWN not in " ".join(refused["parts"].values())


PACKAGES = (
    "graph.stages",
    "parallel.engine.declared",
    "comm.api",
    "train.step",
    "deferred_init.defer",
    "checkpoint.save",
    "verify.prove",
)


@pytest.mark.parametrize("module", PACKAGES)
def test_each_package_is_ours(module):
    function = raising(module)
    with pytest.raises(KeyError) as raised:
        function()
    line = own_line(raised.value)
    assert line.endswith(f"{module.replace('.', '/')}.py:2")
    assert own_line_of_text("".join(traceback.format_exception(raised.value))) == line


def ours(module, code, **names):
    """Run a line of code as if it stood in a module of the product."""
    exec(compile(code, importlib.import_module(f"paceline.{module}").__file__, "exec"), names)


@pytest.mark.parametrize("path", own_errors._STAND_INS)
def test_a_stand_in_of_torchs_functions_is_there(path):
    assert (Path(paceline.__file__).parent / path).is_file()


# Lines of ours whose error is of what they were handed; and, last, one that is ours.
HANDED = {
    "an update": ("optimizer.step()", True),
    "a copy": ("copy.deepcopy(model)", True),
    "a batch": ("collate([torch.ones(2), torch.ones(3)])", True),
    "a float64 that stays": ("wide()", True),
    "a product of our shapes": ("torch.ones(2) @ torch.ones(3)", False),
}


@pytest.mark.parametrize("name", HANDED)
def test_what_the_product_was_handed_is_the_users(name):
    code, is_users = HANDED[name]
    model = nn.Linear(2, 2)
    model.kept = model.weight * 1  # no leaf: torch refuses to copy it
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    names = {
        "optimizer": torch.optim.Adam(sparse.parameters()), "copy": copy, "model": model, "collate": default_collate,
        "torch": torch, "wide": lambda: torch.ones(2, dtype=torch.float64).to("nowhere"),
    }  # fmt: skip
    with pytest.raises((RuntimeError, TypeError)) as raised, controlled():
        ours("train.step", code, **names)
    assert bool(own_line(raised.value)) != is_users
