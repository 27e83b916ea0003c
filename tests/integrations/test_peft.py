"""LoRA under every plan: the adapter that is saved is that of one process, and peft loads it."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import paceline
from paceline.integrations.peft import save_adapter
from paceline.integrations.transformers import Trainer
from paceline.nouns.errors import CheckpointError, PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan

from support.accelerate_scripts import forget
from support.fine_tuning import LENGTH, arguments, llama, texts
from support.ranks import preload, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
preload("paceline.integrations.peft", "support.fine_tuning", "transformers.models.llama.modeling_llama")
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]
CELLS = ["loop", "head", "trainer"]


def lora(**settings):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(llama(), peft.LoraConfig(**{**config, **settings}), autocast_adapter_dtype=False)


def adapted(cell):
    return lora(modules_to_save=["lm_head"]) if cell == "head" else lora()


def rows():
    return [{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in texts()]


def looped(model):
    """A loop of one's own."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(rows(), batch_size=4))
    for _ in job.epochs(1):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            job.backward(loss, weight=(batch["labels"][:, 1:] != -100).sum())
            job.clip(1.0)
            optimizer.step()
    job.end_step()
    return job


def train_all(rank, plan, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    bases = {}
    for cell in CELLS:
        forget()
        model = adapted(cell)
        if cell == "trainer":
            # Whole batches: Accelerate fills a shorter one by samples of the first.
            trainer = Trainer(model, arguments(folder), train_dataset=texts(24), processing_class=Tokenizer())
            trainer.train()
            job = trainer.job
            trainer.save_model(Path(folder, cell))
        else:
            job = looped(model)
            before = job.ledger.total_bytes
            save_adapter(job, model, Path(folder, cell))
            bases[cell] = job.ledger.total_bytes - before
        assert job.step_number == (12 if cell == "trainer" else 6)
        job.close()
    return bases


class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text("{}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    return lambda plan: made.setdefault(plan, str(tmp_path_factory.mktemp("plan")))


@functools.cache
def results(plan, folder):
    return run_ranks(Plan.parse(plan).world_size, train_all, plan, folder, timeout_s=200)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_adapter_is_that_of_one_process(plan, cell, folders):
    results("replicate=1", folders("replicate=1"))
    results(plan, folders(plan))
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    names |= {"tokenizer.json", "training_args.bin"} if cell == "trainer" else set()
    assert {path.name for path in Path(folders(plan), cell).iterdir()} == names
    alone = load_file(Path(folders("replicate=1"), cell, "adapter_model.safetensors"))
    saved = load_file(Path(folders(plan), cell, "adapter_model.safetensors"))
    assert saved.keys() == alone.keys()
    assert len(saved) == 6 + (cell == "head")
    for name, value in alone.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(saved[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_peft_loads_it(plan, cell, folders):
    results(plan, folders(plan))
    loaded = peft.PeftModel.from_pretrained(llama(), Path(folders(plan), cell), autocast_adapter_dtype=False)
    saved = load_file(Path(folders(plan), cell, "adapter_model.safetensors"))
    found = peft.get_peft_model_state_dict(loaded)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    assert any(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name)
    batch = {name: torch.stack([row[name] for row in rows()[:4]]) for name in ("input_ids", "attention_mask")}
    assert loaded(**batch).logits.shape[:2] == (4, LENGTH)


def test_the_base_model_is_not_sent(folders):
    """What is sent is the adapter as 64-bit numbers, and some small messages: the base has 4,000 parameters."""
    for plan in ("shard=2", "tensor=2"):
        (sent, _) = results(plan, folders(plan))
        adapter = load_file(Path(folders(plan), "loop", "adapter_model.safetensors"))
        assert 0 < sent["loop"] <= 8 * sum(value.numel() for value in adapter.values()) + 500
        assert sent["loop"] < sent["head"]


def with_job(model=None):
    model = lora() if model is None else model
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    job, model, _ = paceline.prepare(model, optimizer)
    return job, model


def full(folder):
    Path(folder).mkdir()
    Path(folder, "notes.txt").write_text("mine")
    return folder


BAD = {
    "no PeftModel": (lambda: save_adapter(*with_job(llama()), "a"), WorkloadError, "LlamaForCausalLM"),
    "another model": (lambda: save_adapter(with_job()[0], lora(), "a"), UsageError, "none of the job's"),
    "no job": (lambda: save_adapter(3, lora(), "a"), UsageError, "the job is"),
    "other files": (lambda: save_adapter(*with_job(), full("a")), CheckpointError, "something else"),
    "below a file": (lambda: save_adapter(*with_job(), Path(full("b"), "notes.txt", "a")), CheckpointError, "written"),
    "a file": (lambda: save_adapter(*with_job(), Path(full("b"), "notes.txt")), CheckpointError, "something else"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save, kind, found = BAD[case]
    with pytest.raises(kind) as failure:
        save()
    assert isinstance(failure.value, PacelineError)
    assert found in failure.value.found
    assert list(tmp_path.rglob("adapter*")) == []
    assert list(tmp_path.rglob(".partial*")) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="may write"):
        save_adapter(*with_job(), tmp_path / "closed" / "a")


def fail_on_rank_0(rank, folder):
    job, model = with_job()
    with pytest.raises(CheckpointError) as failure:
        save_adapter(job, model, folder)
    return failure.value.found


def test_all_ranks_are_told(tmp_path):
    assert run_ranks(2, fail_on_rank_0, full(tmp_path / "full")) == ["there is something else"] * 2


def test_an_adapter_is_replaced(tmp_path):
    job, model = with_job()
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        save_adapter(job, model, tmp_path / "empty")
        with torch.no_grad():
            model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(7)
    saved = load_file(tmp_path / "empty" / "adapter_model.safetensors")
    assert any(bool((value == 7).all()) for value in saved.values())
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_several_adapters_have_folders(tmp_path):
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    save_adapter(*with_job(model), tmp_path / "both")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert files == ["both/adapter_model.safetensors", "both/second/adapter_model.safetensors"]
