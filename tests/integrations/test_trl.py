"""TRL's trainers on Paceline's engine end where they do by themselves, on as many data ranks."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import trl
from transformers import LlamaForCausalLM

from paceline.integrations.trl import DPOTrainer, SFTTrainer
from paceline.nouns.plan import Plan

from support.accelerate_scripts import forget, join_by_torch
from support.ranks import preload, run_ranks
from support.trl_scripts import SCRIPTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
preload("paceline.integrations.trl", "support.trl_scripts", "transformers.models.llama.modeling_llama")
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2", "tensor=2"]


def run_scripts(kinds):
    """The logs and the saved parameters of each script, on every rank."""
    found = {}
    for name, script in SCRIPTS.items():
        folder = Path(os.environ["PACELINE_RENDEZVOUS"]).parent / name  # all ranks write to one
        forget()
        trainer = script(kinds[name], folder)
        trainer.save_model(str(folder))
        rows = [numbers_of(row) for row in trainer.state.log_history]
        trainer.accelerator.wait_for_everyone()
        model = LlamaForCausalLM.from_pretrained(folder)
        found[name] = rows, {key: value.detach() for key, value in model.named_parameters()}
    return found


def numbers_of(row):
    """What does not depend on the time."""
    return {name: value for name, value in row.items() if "second" not in name and "time" not in name}


def theirs(rank):
    join_by_torch(rank)
    return run_scripts({"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer})


def ours(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    return run_scripts({"sft": SFTTrainer, "dpo": DPOTrainer})


@functools.cache
def expected(size):
    return run_ranks(size, theirs)


@functools.cache
def results(plan):
    return run_ranks(2, ours, plan)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_script_ends_as_with_trl(plan, name):
    wanted = [answer[name] for answer in expected(1 if plan == "tensor=2" else 2)]
    for rank, (rows, parameters) in enumerate(answer[name] for answer in results(plan)):
        history, trained = wanted[rank % len(wanted)]
        # TRL computes in float32.
        assert rows == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in history]
        assert parameters.keys() == trained.keys()
        for key, value in trained.items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-4, atol=1e-5)
