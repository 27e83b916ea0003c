"""What the command says of the first step of the loops and Trainers that the pages show."""

from __future__ import annotations

import pytest

from support.documented_commands import ROOT
from support.jobs import paceline

pytestmark = pytest.mark.integration
EQUAL = "first step checked: equal to one process"
OWN_BATCHES = "first step not checked: the loop makes its own batches"
PARTS = "ranks have parts of the loop's models; `paceline verify --plan replicate=2 distillation.py`"
SAID = {
    "lightning/lightning_module.py": OWN_BATCHES,
    "finetune.py": EQUAL,
    "lora.py": EQUAL,
    "loops/gan.py": EQUAL,
    "loops/distillation.py": PARTS,
    "loops/ppo.py": OWN_BATCHES,
}


@pytest.mark.parametrize("file", SAID)
def test_the_first_step_of_an_example(tmp_path, file):
    ended = paceline(tmp_path, "run", "-n", "2", ROOT / "examples" / file)
    assert ended.code == 0, ended.err
    (said,) = [line for line in ended.out.splitlines() if "first step " in line]
    assert SAID[file] in said


LOOP = """
import torch
import paceline
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(SAMPLES, 4), batch_size=8)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for batch in loader:
    # HERE
    optimizer.zero_grad()
    job.backward(model(batch).square().mean())
    optimizer.step()
"""
WHOLE = 'if len(batch) == 8: raise ValueError("a batch of eight\\nrows")'
LOOPS = {
    "one step": (8, "", EQUAL),
    "a rank without samples": (1, "", "not checked: a rank without samples in the batch draws random numbers too"),
    "fails on a whole batch": (32, WHOLE, "not checked: one process can't take it (ValueError: a batch of eight)"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_as_ever(tmp_path, name):
    samples, line, expected = LOOPS[name]
    (tmp_path / "train.py").write_text(LOOP.replace("SAMPLES", str(samples)).replace("# HERE", line))
    ended = paceline(tmp_path, "run", "-n", "2", "train.py")
    assert ended.code == 0, ended.err
    assert expected in ended.out
    assert not list(tmp_path.glob("runs/*/failures/*"))


def test_a_loop_that_fails_in_its_first_step_says_so(tmp_path):
    (tmp_path / "train.py").write_text(LOOP.replace("SAMPLES", "8").replace("# HERE", 'raise ValueError("mine")'))
    ended = paceline(tmp_path, "run", "-n", "2", "train.py")
    assert ended.code == 1
    assert "ValueError: mine" in ended.err
    assert "one process takes longer" not in ended.out + ended.err
