"""The compiler stays unloaded in a job that does not compile, and works in one that does."""

import subprocess
import sys

import pytest

from support.jobs import paceline

STEP = """
import sys, torch
from paceline.train.compiler_import import defer_compiler_import
defer_compiler_import()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
torch.optim.lr_scheduler.StepLR(optimizer, 1)
model(torch.ones(1, 2)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
"""
LOADED = "any(name.startswith('torch._dynamo.') for name in sys.modules)"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_steps_without_the_compiler():
    run(STEP + f"assert not {LOADED}, 'the compiler was imported'")


@pytest.mark.slow
def test_compiles_afterwards():
    run(
        STEP
        + "compiled = torch.compile(model, backend='eager')\n"
        + "assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))\n"
        + f"assert {LOADED}\n"
        + "import torch._dynamo\nassert torch._dynamo.is_compiling() is False\n"
        + "optimizer.step()\n"
    )


@pytest.mark.slow
def test_imports_of_its_parts_get_the_real_one():
    run(STEP + "from torch._dynamo import explain\nimport torch._dynamo.config\nassert callable(explain)\n")


@pytest.mark.slow
def test_compiler_trace_rules_are_the_real_ones_when_needed():
    run(
        STEP
        + "from torch._dynamo import trace_rules\nassert trace_rules.lookup(len) is not None\n"
        + f"assert {LOADED}"
    )


@pytest.mark.slow
def test_a_users_function_is_kept_out_of_the_compiler():
    run(
        STEP
        + "@torch.compiler.disable\n"
        + "def alone(x):\n    assert not torch.compiler.is_compiling()\n    return x + 1\n"
        + "whole = torch.compile(lambda x: alone(x * 2), backend='eager')\n"
        + "assert whole(torch.ones(1)).item() == 3\n"
    )


TRIAL = """
import sys, torch, paceline
workload = paceline.Workload(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    data=list(torch.randn(8, 2)), batch_size=4, micro_batch_size=2,
)
job = paceline.distribute(workload)
for batch in job.batches():
    job.step(batch)
"""


def test_compiler_stays_unloaded_when_the_loss_is_tried():
    run(TRIAL + f"assert not {LOADED}, 'the compiler was imported'")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launched_job_starts_without_the_compiler(tmp_path, ranks):
    # The launcher defers the import before the process group is made, which asks a loaded compiler for more.
    file = tmp_path / "train.py"
    file.write_text(TRIAL + f"assert not {LOADED}, 'the compiler was imported'\n")
    ended = paceline(tmp_path, "run", "-n", str(ranks), file)
    assert ended.code == 0, ended.err
