"""State of whole parameters: saved once by its owner, loaded under another mesh, bit for bit under the same one."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.reshard import put, take
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import ShardSpec
from paceline.train import snapshot
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import CountsInGroups, workload

KINDS = ("lamb", "muon and adamw", "adafactor")
SAVED = "shard=2"
GOES_ON = {1: ("replicate=1",), 2: ("tensor=2", "shard=2,zero=1", "shard=2"), 4: ("shard=2,tensor=2",)}
CELLS = [(kind, plan) for kind in KINDS for plans in GOES_ON.values() for plan in plans]


def state_of(job):
    held = job.parallel.local_shards()
    parts = snapshot.model_parts(job.model, held, job.size)
    more, description = snapshot.optimizer_state(job.model, job.optimizer, held, job.size)
    state = {name: (part.tensor.clone(), part.shard.shard_spec) for name, part in {**parts, **more}.items()}
    for name, number in description["numbers"].items():
        state[name] = (torch.tensor(number), ShardSpec(()))
    return state


def save_all(rank, folder):
    """Two steps, saved, and what comes of two more."""
    api.init()
    found = {}
    for kind in KINDS:
        job = Job(workload(kind), Plan.parse(SAVED))
        batches = job.batches()
        for _ in range(2):
            job.step(next(batches))
        job.save(f"{folder}/{kind}")
        saved = state_of(job)
        losses = [job.step(next(batches)) for _ in range(2)]
        found[kind] = saved, losses, state_of(job)
        job.close()
    return found


def load_all(rank, folder, plans):
    """Two steps from the checkpoint, saved again right after it was loaded."""
    api.init()
    found = {}
    for kind in KINDS:
        for plan in plans:
            job = Job(workload(kind), Plan.parse(plan))
            job.step(next(job.batches()))  # what it has of its own is overwritten
            job.load(f"{folder}/{kind}")
            loaded = state_of(job)
            batches = job.batches()
            losses = [job.step(next(batches)) for _ in range(2)]
            found[kind, plan] = loaded, losses, state_of(job)
            job.close()
    return found


def whole(states):
    """Full tensors, put together from all ranks' parts."""
    full = {}
    for state in states:
        for name, (tensor, shard_spec) in state.items():
            full.setdefault(name, torch.zeros(shard_spec.shape, dtype=tensor.dtype))
            put(full[name], shard_spec, tensor)
    return full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def saved(folder):
    return run_ranks(2, save_all, str(folder), timeout_s=200)


@pytest.fixture(scope="module")
def loaded(folder, saved):
    found = {}
    for size, plans in GOES_ON.items():
        results = run_ranks(size, load_all, str(folder), plans, timeout_s=200)
        found |= {cell: [result[cell] for result in results] for cell in results[0]}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_owner_saves_its_parameters_state_once(folder, saved, kind):
    states = [{name for name in result[kind][0] if name.startswith("optimizer/")} for result in saved]
    shared = states[0] & states[1]
    # What no axis cuts is on both ranks.
    assert all(name.endswith("/gain") for name in shared)
    assert states[0] - shared
    assert states[1] - shared
    tensors = read_manifest(folder / kind)["tensors"]
    numbers = read_manifest(folder / kind)["optimizer"]["numbers"]
    saved_names = {name for name in tensors if name.startswith("optimizer/")}
    assert saved_names | numbers.keys() == states[0] | states[1]
    for name in saved_names:
        assert len(tensors[name]["parts"]) == 1, name


@pytest.mark.parametrize(("kind", "plan"), CELLS)
def test_it_goes_on_under_any_mesh(saved, loaded, kind, plan):
    before, after = whole([result[kind][0] for result in saved]), whole([result[kind][2] for result in saved])
    losses = saved[0][kind][1]
    seen = set()
    for found, next_losses, end in loaded[kind, plan]:
        for name, (tensor, shard_spec) in found.items():
            assert torch.equal(tensor, take(before[name], shard_spec)), name
        for name, (tensor, shard_spec) in end.items():
            torch.testing.assert_close(tensor, take(after[name], shard_spec), rtol=1e-10, atol=1e-10)
        assert next_losses == pytest.approx(losses, rel=1e-12)
        seen |= found.keys()
    assert seen == before.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_under_the_same_mesh_every_bit_is_the_same(saved, loaded, kind):
    for result, (_, losses, end) in zip(saved, loaded[kind, SAVED], strict=True):
        assert losses == result[kind][1]
        assert end.keys() == result[kind][2].keys()
        for name, (tensor, _) in end.items():
            assert torch.equal(tensor, result[kind][2][name][0]), name


def with_groups_of_one(model):
    """Groups of one parameter each, so that each rank owns nothing of some of them."""
    return CountsInGroups([{"params": [parameter]} for parameter in model.parameters() if parameter.requires_grad])


def save_with_groups_of_one(rank, folder):
    api.init()
    job = Job(workload("lamb", optimizer=with_groups_of_one), Plan.parse("shard=2"))
    batches = job.batches()
    for _ in range(2):
        job.step(next(batches))
    job.save(folder)


def train_with_groups_of_one(rank, plan, folder):
    """The losses from the third step on; from a checkpoint if there is a folder."""
    api.init()
    job = Job(workload("lamb", optimizer=with_groups_of_one), Plan.parse(plan))
    if folder:
        job.load(folder)
    return [job.step(batch) for batch in job.batches()][-3:]


def test_whole_state_group_counts_resume_on_ranks_without_a_part(tmp_path):
    expected = run_ranks(1, train_with_groups_of_one, "replicate=1", "")[0]
    run_ranks(2, save_with_groups_of_one, str(tmp_path / "saved"))
    for plan in ("replicate=1", "shard=2"):
        for losses in run_ranks(Plan.parse(plan).world_size, train_with_groups_of_one, plan, str(tmp_path / "saved")):
            assert losses == pytest.approx(expected, rel=1e-10)
