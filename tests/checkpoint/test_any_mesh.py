"""Whole jobs: saved under any mesh, loaded under any other, bit for bit, and the next step is the same."""

from __future__ import annotations

import warnings

import pytest
import torch

from paceline.checkpoint.reshard import take
from paceline.cli.main import main
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train import snapshot
from paceline.train.job import Job

from support.models import MODELS, workload
from support.ranks import run_ranks

pytestmark = pytest.mark.integration

MESHES = {
    2: ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2"),
    4: ("pipeline=2,tensor=2", "shard=2,tensor=2"),
}
EVERY = [mesh for meshes in MESHES.values() for mesh in meshes]
MODEL = "gpt2"  # its head is its embedding: two stages of a pipeline hold it
LAYERS = 2  # one for each stage


def small_model():
    return MODELS[MODEL][0](LAYERS)


def open_job(mesh):
    return Job(workload(MODEL, model=small_model, clip_norm=0.5, steps=3), Plan.parse(mesh))


def state_of(job):
    """Every tensor of model and optimizer that this rank holds, and which part each is."""
    held = job.parallel.local_shards()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, _ = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    return {name: (part.tensor.clone(), part.shard.shard_spec) for name, part in {**parts, **more}.items()}


def save_all(rank, folder, meshes):
    """Two steps under each mesh, saved; what was saved, and the loss of the third."""
    api.init()
    found = {}
    for mesh in meshes:
        job = open_job(mesh)
        batches = job.batches()
        for _ in range(2):
            job.step(next(batches))
        job.save(f"{folder}/{mesh}")
        found[mesh] = state_of(job), job.step(next(batches))
        job.close()
    return found


def load_all(rank, folder, meshes):
    """What each mesh of this many ranks makes of each checkpoint.

    A job loads one after another and takes a step with each: what a load leaves as it was differs from then on. The
    first, into a new job, is of another mesh.
    """
    api.init()
    found = {}
    for mesh in meshes:
        job, first = open_job(mesh), EVERY.index(mesh) + 1
        for saved in EVERY[first:] + EVERY[:first]:
            job.load(f"{folder}/{saved}")
            assert job.step_number == 2
            found[saved, mesh] = state_of(job), job.step(next(job.batches()))
        job.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


@pytest.fixture(scope="module")
def saved(folder):
    """Of each mesh: full tensors put together from all ranks' parts, and the next loss."""
    found = {}
    for ranks, meshes in MESHES.items():
        results = run_ranks(ranks, save_all, str(folder), meshes, timeout_s=400)
        for mesh in meshes:
            found[mesh] = assembled([result[mesh][0] for result in results]), results[0][mesh][1]
    return found


@pytest.fixture(scope="module")
def loaded(folder, saved):
    found = {}
    for ranks, meshes in MESHES.items():
        results = run_ranks(ranks, load_all, str(folder), meshes, timeout_s=600)
        for cell in results[0]:
            found[cell] = [result[cell] for result in results]
    return found


def assembled(states):
    """Full tensors; where two ranks hold the same element they hold the same bits."""
    from paceline.checkpoint.reshard import put

    full, is_set = {}, {}
    for state in states:
        for name, (tensor, shard_spec) in state.items():
            if name not in full:
                full[name] = torch.zeros(shard_spec.shape, dtype=tensor.dtype)
                is_set[name] = torch.zeros(shard_spec.shape, dtype=torch.bool)
            before, known = take(full[name], shard_spec), take(is_set[name], shard_spec)
            assert torch.equal(before[known], tensor[known]), f"{name}: two ranks hold other bits"
            put(full[name], shard_spec, tensor)
            put(is_set[name], shard_spec, torch.ones_like(tensor, dtype=torch.bool))
    missing = [name for name, known in is_set.items() if not known.all()]
    assert not missing, f"nobody holds all of {missing}"
    return full


@pytest.mark.parametrize("mesh", EVERY)
def test_every_mesh_saves_the_same_names(saved, mesh):
    full, _ = saved[mesh]
    names = {f"model/{name}" for name in small_model().state_dict()} - {"model/lm_head.weight"}
    assert {name for name in full if name.startswith("model/")} == names
    assert {name for name in full if name.startswith("optimizer/exp_avg/")} == {
        f"optimizer/exp_avg/{name.removeprefix('model/')}" for name in names
    }
    assert full.keys() == saved["replicate=2"][0].keys()


@pytest.mark.parametrize("mesh", EVERY)
@pytest.mark.parametrize("before", EVERY)
def test_what_one_mesh_saved_another_goes_on_with(saved, loaded, before, mesh):
    full, loss = saved[before]
    seen = set()
    for state, next_loss in loaded[before, mesh]:
        assert next_loss == pytest.approx(loss, rel=1e-12)
        for name, (tensor, shard_spec) in state.items():
            assert torch.equal(tensor, take(full[name], shard_spec)), name
        seen |= state.keys()
    assert seen == full.keys()


@pytest.mark.parametrize("mesh", ["pipeline=2,tensor=2", "shard=2"])
def test_transformers_loads_what_a_mesh_saved(folder, saved, mesh, tmp_path):
    full, _ = saved[mesh]
    assert main(["export", str(folder / mesh), "--to", "hf", str(tmp_path / "out")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2LMHeadModel

        model, told = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    for name, tensor in model.state_dict().items():
        wanted = full["model/" + name.replace("lm_head.weight", "transformer.wte.weight")]
        assert torch.equal(tensor, wanted), name
    ours = small_model().double()
    ours.load_state_dict(
        {name.removeprefix("model/"): t for name, t in full.items() if name.startswith("model/")}, strict=False
    )
    tokens = torch.arange(24).view(3, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, ours.eval()(input_ids=tokens).logits)
