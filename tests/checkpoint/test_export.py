"""What was trained comes out as transformers reads it: the same names, the same bits."""

from __future__ import annotations

import json
import re
import shutil
import warnings

import pytest
import safetensors.torch
import torch
from test_meshes import TENSORS, full_tensors, save_under

import paceline
from paceline.checkpoint.export import plan_export, write_export
from paceline.cli.main import main
from paceline.comm import api
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

TOKENS = torch.arange(48).view(4, 12) * 7 % 50


def transformers_model(kind):
    import transformers

    small = {"vocab_size": 50, "max_position_embeddings": 16, "num_attention_heads": 2}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    configs = {
        "BertForMaskedLM": lambda: transformers.BertConfig(**small, **sizes),
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2
        ),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**small, **sizes, num_key_value_heads=1),
    }
    return getattr(transformers, kind)(configs[kind]())


def loss(model, batch):
    return model(input_ids=batch, labels=batch).loss * batch.numel(), batch.numel()


def train(rank, folder, kind, precision):
    api.init()
    workload = paceline.Workload(
        model=lambda: transformers_model(kind),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        data=list(TOKENS),
        batch_size=2,
        precision=precision,
    )
    job = Job(workload, Plan(mesh=f"replicate={api.size()}"))
    for batch in job.batches():
        job.step(batch)
    job.save(folder)
    job.model.eval()
    with torch.no_grad():
        return job.model(input_ids=TOKENS).logits, {name: t.clone() for name, t in job.model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("BertForMaskedLM", "float32"),
        pytest.param("BertForMaskedLM", "float64", marks=pytest.mark.slow),
        pytest.param("GPT2LMHeadModel", "float32", marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", "float32", marks=pytest.mark.slow),
    ],
)
def test_transformers_loads_what_was_trained(tmp_path, kind, precision):
    logits, state = run_ranks(2, train, str(tmp_path / "saved"), kind, precision)[0]
    assert main(["export", str(tmp_path / "saved"), "--to", "hf", str(tmp_path / "out")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model, told = getattr(transformers, kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([kind], precision)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=TOKENS).logits, logits)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "out" / "generation_config.json").exists() == (kind != "BertForMaskedLM")


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    save_under(Mesh.parse("replicate=2,shard=3,tensor=2"), folder)
    return folder


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.torch.load_file(path))
    return found


def is_all_of_it(tensors):
    full = full_tensors()
    assert {"model/" + name for name in tensors} == set(TENSORS)
    for name, tensor in tensors.items():
        expected = full["model/" + name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
    return True


def test_parts_of_any_mesh_come_out_whole(saved, tmp_path, capsys):
    assert main(["export", str(saved), "--to", "safetensors", str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == ["model.safetensors"]
    assert said["written"] is True
    assert is_all_of_it(read(tmp_path / "out"))
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_large_model_comes_out_in_several_files_with_an_index(saved, tmp_path):
    export = plan_export(saved, "hf", print, shard_bytes=400)
    written = []
    write_export(export, tmp_path / "out", written.append)
    assert (sum(written), len(written)) == (export.nbytes, len(export.tensors)), "what progress is shown of"
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 2
    assert is_all_of_it(read(tmp_path / "out"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in full_tensors().values())
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(tmp_path / "out" / file)


def test_a_dry_run_writes_nothing(saved, tmp_path, capsys):
    assert main(["export", str(saved), "--to", "hf", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "model.safetensors" in said.out
    assert "no config.json is written" in said.err
    assert "would be written" in said.err
    assert not (tmp_path / "out").exists()


def nothing(saved, out):
    pass


def fill(saved, out):
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")


def tear(saved, out):
    path = saved / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def empty_run(saved, out):
    """A run that ended before its first checkpoint."""
    shutil.rmtree(saved)
    (saved / "checkpoints").mkdir(parents=True)


WRONG = {
    "a run without a checkpoint": (empty_run, "SAVED OUT", 1, "fix: name a run or a folder that has one: a job writes"),
    "a full folder": (fill, "SAVED OUT", 2, "there is something else"),
    "a torn file": (tear, "SAVED OUT", 1, "rank-00001.safetensors has"),
    "no manifest": (lambda saved, out: (saved / "manifest.json").unlink(), "SAVED OUT", 1, "there is none"),
    "no checkpoint": (nothing, "SAVED/missing OUT", 2, "there is no such folder"),
    "an unknown form": (nothing, "SAVED --to onx OUT", 2, "the choices are hf, safetensors"),
    "no folder": (nothing, "SAVED", 2, "the following arguments are required: DIR"),
    "a folder that can't be": (nothing, "SAVED SAVED/manifest.json/out", 2, "it can't be written"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_exported_is_one_error(saved, tmp_path, capsys, case):
    damage, arguments, code, said = WRONG[case]
    out = tmp_path / "out"
    damage(saved, out)
    try:
        ended = main(["export", *arguments.replace("SAVED", str(saved)).replace("OUT", str(out)).split()])
    except SystemExit as end:
        ended = end.code
    error = capsys.readouterr().err
    assert ended == code
    assert said in error
    assert re.search(r"^paceline( export)?: .+\n  found: .+\n  fix: .+$", error, re.DOTALL | re.MULTILINE)
    assert "--resume" not in error or "paceline export RUN" in error, "that is no way to export"
    assert not out.exists() or [path.name for path in out.iterdir()] == ["thesis.txt"]
