"""What few jobs need is not imported before the first step: every job would wait for it."""

import subprocess
import sys

import pytest

# By what is imported at the start, modules that it leaves out: other plans, hosts and reports have them.
LEFT_OUT = {
    "import paceline.cli.main, paceline.cli.run_command": (
        "torch",
        "numpy",
        "asyncio",
        "ssl",
        "psutil",
        "paceline.run.job_facts",
        "paceline.server.protocol.messages",
        "paceline.launch.kubernetes.kubernetes_request",
    ),
    "from paceline.run.rank import forkserver": ("torch", "numpy", "asyncio", "ssl", "paceline.server.setup"),
    "from paceline.run.rank.forkserver import preload; preload(['paceline'])": (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
        "paceline.train.loop_job",
        "paceline.server.setup",
        "paceline.run.job_facts",
    ),
}


@pytest.mark.parametrize("imports", LEFT_OUT, ids=["command", "fork server", "rank"])
def test_a_job_starts_without_what_few_jobs_need(imports):
    code = f"import sys\n{imports}\nprint(*(name for name in {LEFT_OUT[imports]!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


DECLARED = """
import sys
import torch
import paceline
job = paceline.distribute(paceline.Workload(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    data=torch.utils.data.TensorDataset(torch.randn(16, 4)),
    batch_size=8,
    micro_batch_size=2,
))
for batch in job.batches():
    job.step(batch)
    break
"""
LOOP = """
import sys
import torch
import paceline
from paceline.train.compiler_import import defer_compiler_import
defer_compiler_import()  # as a rank's process does before it runs the file
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=8)
job, model, optimizer, batches = paceline.prepare(model, optimizer, batches)
for (inputs,) in batches:
    optimizer.zero_grad()
    job.backward(model(inputs).square().mean())
    optimizer.step()
"""
# FSDP2 and DTensors are imported where a plan shards, the compiler where something is compiled.
OF_OTHER_PLANS = ("torch._dynamo.eval_frame", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy")


@pytest.mark.parametrize("code", [DECLARED, LOOP], ids=["declared", "loop"])
def test_a_first_step_is_taken_without_what_few_jobs_need(code, tmp_path):
    code += f"\nprint(*(name for name in {OF_OTHER_PLANS} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == []
