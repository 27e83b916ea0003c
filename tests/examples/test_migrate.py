"""docs/migrate.md: every word of other libraries exists, and every word of Paceline works on two ranks."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import paceline as product
from paceline.cli.main import _parse
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload

from support.documented_commands import ROOT
from support.jobs import marked, paceline

PAGE = (ROOT / "docs" / "migrate.md").read_text()
SCRIPTS = ROOT / "docs" / "migrate"
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
NOT_INSTALLED = ("Horovod", "DeepSpeed")
RESULT = 24.172092311368083  # what plain torch ends with: test_the_result_is_plain_torchs


def rows() -> list[tuple[str, str, str]]:
    """The section, first and second cell of every row."""
    found = []
    for name, text in SECTION.findall(PAGE):
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| ") and len(cells) == 3 and not cells[1].startswith("Paceline"):
                found.append((name, cells[0], cells[1]))
    return found


ROWS = rows()


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


OURS = list(dict.fromkeys(span for _, _, cell in ROWS for span in spans(cell)))
COMMANDS = [span for span in OURS if span.startswith("paceline ")]
FLAGS = [span for span in OURS if span.startswith("--")]
VARIABLES = [span for span in OURS if span.startswith("PACELINE_")]
DECLARED = [span for span in OURS if span.startswith("Workload(")]
CODE = [span for span in OURS if span not in {*COMMANDS, *FLAGS, *VARIABLES, *DECLARED}]
THEIRS = [(section, span) for section, cell, _ in ROWS for span in spans(cell) if section not in NOT_INSTALLED]


def test_every_cell_is_code_or_says_that_there_is_nothing():
    assert len(ROWS) > 110
    assert {section for section, _, _ in ROWS} >= {"DistributedDataParallel", "Accelerate", *NOT_INSTALLED}
    bad = [row for row in ROWS if not spans(row[2]) and row[2] != "nothing"]
    assert bad == []
    assert min(map(len, (COMMANDS, FLAGS, VARIABLES, DECLARED, CODE))) >= 3


def test_every_row_without_a_counterpart_says_what_to_do():
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] == "nothing":
            assert cells[2], line


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_is_read(text):
    words = text.split()[1:]
    _parse(words, words[0], importlib.import_module(f"paceline.cli.{words[0]}_command"))


@pytest.mark.parametrize("text", FLAGS)
def test_an_option_is_runs_and_its_plan_is_one(text):
    words = text.split()
    parsed = _parse(["run", *words, "train.py"], "run", importlib.import_module("paceline.cli.run_command"))
    assert isinstance(parsed, argparse.Namespace)
    if words[0] == "--plan":
        assert Plan.parse(words[1]).world_size == 2


def test_variables_are_those_of_a_rank(tmp_path):
    (tmp_path / "show.py").write_text(
        f"import os\nimport paceline\npaceline.init()\nprint([os.environ[name] for name in {VARIABLES!r}])\n"
    )
    done = paceline(tmp_path, "run", "-n", "2", "show.py")
    assert done.code == 0, done.err
    assert "[1] ['1'" in done.out


NAMES = {
    "loss": lambda model, batch: (model(batch).sum(), len(batch)),
    "score": lambda model, batch: {"loss": (1.0, 1)},
    "make_optimizer": lambda model: torch.optim.AdamW(model.parameters()),
    "make_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    "data": torch.utils.data.TensorDataset(torch.ones(4, 2)),
    "paceline": product,
}
BASE = {"model": object, "loss": NAMES["loss"], "optimizer": NAMES["make_optimizer"], "data": NAMES["data"]}


@pytest.mark.parametrize("text", DECLARED)
def test_a_part_of_a_workload_is_taken(text):
    given = eval(text, {"Workload": dict, **NAMES})
    made = Workload(**{**BASE, "batch_size": 64, **given})
    assert set(given) <= {field.name for field in fields(made)}
    assert all(getattr(made, name) == value for name, value in given.items())


# Each piece of code gets a step of its own, so that calls such as job.clip come after a backward pass.
STEP = """
import json, sys
import torch
import paceline
from torch.utils.data import DataLoader, TensorDataset

def fresh():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}

def pass_over(loader):
    for (inputs,) in loader:
        optimizer.zero_grad()
        job.backward(model(inputs).pow(2).mean())
        optimizer.step()

codes = json.loads(sys.argv[1])
# A line that begins a block gets one that does nothing.
codes = [code + " pass" if code.endswith(":") else code for code in codes]
tensor = torch.ones(4, 2)
is_not_the_last = False
if "prepare(" in codes[0]:
    names = {"paceline": paceline, **fresh()}
    for code in codes:
        exec(code if code.startswith("job, ") else f"job, model, optimizer = {code}", names)
    job, model, optimizer = (names[name] for name in ("job", "model", "optimizer"))
    for (inputs,) in names["loader"]:
        optimizer.zero_grad()
        job.backward(model(inputs).pow(2).mean(), weight=4)
        optimizer.step()
else:
    made = fresh()
    job, model, optimizer, loader = paceline.prepare(made["model"], made["optimizer"], made["loader"])
    inputs = torch.ones(4, 3)
    for code in codes:
        if "epochs" in code or "backward" in code:
            continue
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean()
        if "gathered" not in code:
            job.backward(loss, weight=4)
        if "job.load" in code:
            job.save("folder")
        exec(code)
        if "gathered" not in code:
            optimizer.step()
    for code in codes:
        if "epochs" in code:
            exec(code)
        if "backward" in code:
            for (inputs,) in loader:
                optimizer.zero_grad()
                loss = model(inputs).pow(2).mean()
                exec(code)
                optimizer.step()
print("did", len(codes))
"""
PREPARE = [text for text in CODE if "prepare(" in text]
PASSES = [text for text in CODE if "epochs" in text or "backward" in text]
BY_JOB = [
    *([text] for text in PREPARE),  # one job in a file
    PASSES,
    [text for text in CODE if text not in PREPARE + PASSES],
]


@pytest.mark.integration
@pytest.mark.parametrize("codes", BY_JOB, ids=lambda codes: codes[0][:60])
def test_code_runs_on_two_ranks(codes, tmp_path):
    (tmp_path / "step.py").write_text(STEP)
    done = paceline(tmp_path, "run", "-n", "2", "step.py", json.dumps(codes))
    assert done.code == 0, done.err
    for rank in range(2):
        assert f"[{rank}] did {len(codes)}" in done.out


PREFIXES = {
    "sampler": "torch.utils.data.DistributedSampler",
    "loss": "torch.Tensor",
    "model": "torch.nn.parallel.DistributedDataParallel",
    "accelerator": "accelerate.Accelerator",
    "Accelerator": "accelerate.Accelerator",
    "fabric": "lightning.fabric.Fabric",
    "Fabric": "lightning.fabric.Fabric",
    "Trainer": "lightning.Trainer",
    "trainer": "lightning.Trainer",
    "LightningModule": "lightning.LightningModule",
}


def resolved(text: str):
    """What a dotted name means."""
    path = re.match(r"[\w.]+", text).group(0)
    head, _, rest = path.partition(".")
    names = [*PREFIXES.get(head, head).split("."), *(rest.split(".") if rest else [])]
    found = importlib.import_module(names[0])
    for at, name in enumerate(names[1:], 1):
        if not hasattr(found, name):
            importlib.import_module(".".join(names[: at + 1]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("section", "text"), THEIRS)
def test_the_other_librarys_word_exists(section, text):
    if section in ("Accelerate", "Fabric and Lightning"):
        pytest.importorskip("accelerate" if section == "Accelerate" else "lightning")
    if text.startswith(("torchrun", "accelerate ", "fabric ")):
        words = text.split()
        programs = {
            "torchrun": ["torch.distributed.run"],
            "accelerate": ["accelerate.commands.accelerate_cli", words[1]],
            "fabric": ["lightning.fabric.cli", words[1]],
        }
        shown = subprocess.run([sys.executable, "-m", *programs[words[0]], "--help"], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        for flag in (word for word in words if word.startswith("--")):
            assert flag in shown.stdout.replace("_", "-") or flag in shown.stdout
        return
    if text.isupper():  # a variable of torchrun's
        source = inspect.getsource(
            importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
        )
        assert f'"{text}"' in source
        return
    found = resolved(text)
    named = re.findall(r"(\w+)=", text)
    if named:
        made = found.__init__ if inspect.isclass(found) else found
        parameters = inspect.signature(made).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            assert set(named) <= set(parameters)


def result_of(text: str) -> float:
    return float(re.search(r"result ([\d.]+)", text).group(1))


def test_the_result_is_plain_torchs():
    torch.manual_seed(0)
    x = torch.randn(16, 6, dtype=torch.float64)
    torch.manual_seed(0)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.randn(16, 6)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    finally:
        torch.set_default_dtype(kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :1].sin()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    total = sum(parameter.detach().abs().sum() for parameter in model.parameters())
    assert float(total) == pytest.approx(RESULT, rel=1e-12)


PLANS = {"deepspeed": ["--plan", "shard=2,zero=2"], "fsdp": ["--plan", "shard=2"]}
PAIRS = sorted(path.name.removesuffix("_after.py") for path in SCRIPTS.glob("*_after.py"))


def test_the_page_names_every_pair():
    assert len(PAIRS) == 7
    for name in PAIRS:
        assert f"`{name}_before.py`, `{name}_after.py`" in PAGE


def library_of(name: str) -> str:
    return {"ddp": "torch", "fsdp": "torch", "fabric": "lightning", "horovod": "horovod.torch"}.get(name, name)


@pytest.mark.integration
@pytest.mark.parametrize("name", PAIRS)
def test_a_script_before_runs_as_it_is(name, tmp_path):
    command = ["run", "-n", "2"]
    if name == "horovod":
        command = ["horovodrun", "-np", "2", "python"]
    else:
        pytest.importorskip(library_of(name))
    done = paceline(tmp_path, *command, SCRIPTS / f"{name}_before.py")
    assert done.code == 0, done.err
    assert result_of(done.out) == pytest.approx(RESULT, rel=1e-12)


@pytest.mark.integration
@pytest.mark.parametrize("name", PAIRS)
def test_a_script_before(name, tmp_path):
    pytest.importorskip(library_of(name))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / f"{name}_before.py")]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env=marked(tmp_path, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}),
    )
    # A thread of torch's Gloo may abort a process that has ended its file; what it printed before is whole.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    assert result_of(done.stdout) == pytest.approx(RESULT, rel=1e-12)


@pytest.mark.integration
@pytest.mark.parametrize("name", PAIRS)
def test_a_script_after(name, tmp_path):
    plan = PLANS.get(name, ["-n", "2"])
    file = SCRIPTS / f"{name}_after.py"
    assert " ".join(["paceline", "run", *plan, file.name]) in file.read_text().splitlines()[0]
    done = paceline(tmp_path, "run", *plan, file)
    assert done.code == 0, done.err
    assert result_of(done.out) == pytest.approx(RESULT, rel=1e-12)
