"""examples/finetune.py and lora.py: transformers itself ends where the ported script does, by the command, too."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from support.documented_commands import ROOT
from support.jobs import marked, paceline

EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "transformers.md").read_text()
AFTER = (EXAMPLES / "finetune.py").read_text()
OURS = "from paceline.integrations.transformers import Trainer  # from transformers import Trainer"
BEFORE = AFTER.replace(OURS, "from transformers import Trainer")
# In float32, and sums of 40 steps in another order.
TOLERANCE = 2e-3
# Ends as kill -9 does, in the middle of the training.
KILL = """
import os, signal
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        if state.global_step == 25 and "KILLED" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
"""
RESUMED = AFTER.replace("trainer.train()", "trainer.train(resume_from_checkpoint='RESUMED' in os.environ)").replace(
    "Trainer(model=model,", "Trainer(callbacks=[Kill()], model=model,"
)


def test_the_script_changes_one_line():
    changed = [line for line in difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines()) if line[0] in "+-"]
    assert len(changed) == 2  # one is another
    assert OURS in PAGE


def test_the_page_shows_the_example():
    (shown,) = re.findall(r"^<!-- test: lora.py -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    _, _, code = (EXAMPLES / "lora.py").read_text().partition('"""\n\n')
    assert shown == code


def python(folder, text):
    (folder / "script.py").write_text(text)
    environment = marked(folder, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return python(tmp_path_factory.mktemp("before"), BEFORE)


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.integration
@pytest.mark.complete  # two ranks do, below
def test_one_process_ends_as_before(before, tmp_path):
    check_same(python(tmp_path, AFTER), before)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2"])
def test_ranks_end_as_before_also_after_a_kill(plan, before, tmp_path):
    (tmp_path / "finetune.py").write_text(KILL + RESUMED)
    words = ("run", "--plan", plan, "finetune.py")
    killed = paceline(tmp_path, *words, KILLED="1")
    assert killed.code != 0
    assert not (tmp_path / "model").exists()
    refused = paceline(tmp_path, "run", "--plan", plan, "--resume", "finetune.py")
    assert refused.code == 2
    assert "fix: leave --resume out; write trainer.train(resume_from_checkpoint=True)" in refused.err
    # As if the kill had come while it was written.
    (tmp_path / "out" / "checkpoint-25").mkdir()
    resumed = paceline(tmp_path, *words, RESUMED="1")
    assert resumed.code == 0, resumed.err
    check_same(load_file(tmp_path / "model" / "model.safetensors"), before)
    # A shorter training would end elsewhere, and a longer one too.
    state = json.loads((tmp_path / "out" / "checkpoint-40" / "trainer_state.json").read_text())
    assert state["global_step"] == 40


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_commands_that_take_steps_of_a_loop_refuse_the_script(command, tmp_path):
    (tmp_path / "finetune.py").write_text(AFTER)
    refused = paceline(tmp_path, command, "-n", "2", "finetune.py")
    assert refused.code == 2
    assert "transformers' Trainer, in which each rank has batches of its own" in refused.err


@pytest.mark.integration
@pytest.mark.complete  # tests/integrations/test_peft.py
def test_the_adapter_by_the_command(tmp_path):
    shutil.copy(EXAMPLES / "lora.py", tmp_path)
    saved = []
    for words in (("-n", "1"), ("-n", "2"), ("--plan", "tensor=2")):
        done = paceline(tmp_path, "run", *words, "lora.py")
        assert done.code == 0, done.err
        saved.append(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    for each in saved[1:]:
        check_same(each, saved[0])
    assert os.listdir(tmp_path / "adapter")
