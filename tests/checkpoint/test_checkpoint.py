"""A checkpoint is whole or it is none; what it gives back is what was saved, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import save
from paceline.checkpoint.manifest import check_files, file_hash, file_name, find_good, read_manifest, sealed
from paceline.comm import api
from paceline.nouns.errors import CheckpointError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks

SLOW = pytest.mark.slow


def make(width=8, seed=0, optimizer=torch.optim.AdamW, tied=False):
    def model():
        layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 4))
        if tied:
            layers.append(nn.Linear(4, 4))
            layers[4].weight = nn.Parameter(torch.zeros(4, 4))
            layers.append(nn.Linear(4, 4))
            layers[5].weight = layers[4].weight
        return layers

    return paceline.Workload(
        model=model,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: optimizer(
            [{"params": model[0].parameters(), "lr": 0.01}, {"params": list(model[1:].parameters())}], lr=0.1
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        data=list(torch.randn(24, 4, generator=torch.Generator().manual_seed(1))),
        batch_size=8,
        seed=seed,
        epochs=4,
    )


def job_of(workload, **plan):
    api.init()
    return Job(workload, Plan(mesh=f"replicate={api.size()}", **plan))


def steps(job, count):
    batches = job.batches()
    return [job.step(next(batches)) for _ in range(count)]


def save_after_five(rank, folder, tied, plan):
    job = job_of(make(tied=tied), **plan)
    steps(job, 5)
    job.save(folder)
    return steps(job, 3), {name: t.clone() for name, t in job.model.state_dict().items()}


def load_and_go_on(rank, folder, tied, plan):
    job = job_of(make(tied=tied), **plan)
    job.load(folder)
    assert job.step_number == 5
    assert job.position == 40
    return steps(job, 3), {name: t.clone() for name, t in job.model.state_dict().items()}


@pytest.mark.parametrize(
    "plan",
    [{}, pytest.param({"compression": "topk"}, marks=SLOW), pytest.param({"compression": "powersgd"}, marks=SLOW)],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_by_as_many_ranks_it_goes_on_bit_for_bit(tmp_path, plan, tied):
    folder = str(tmp_path / "saved")
    saved = run_ranks(2, save_after_five, folder, tied, plan)
    loaded = run_ranks(2, load_and_go_on, folder, tied, plan)
    for (losses, state), (other_losses, other) in zip(saved, loaded, strict=True):
        assert losses == other_losses
        assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "step-00000005"
    run_ranks(2, save_after_five, str(folder), False, {})
    return folder


def copy_of(saved, tmp_path, name="step-00000005"):
    folder = tmp_path / name
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_manifest_says_what_is_in_it(saved):
    manifest = read_manifest(saved)
    check_files(saved, manifest)
    assert (manifest["step"], manifest["position"], manifest["world_size"]) == (5, 40, 2)
    tensor = manifest["tensors"]["model/0.weight"]
    assert (tensor["shape"], tensor["dtype"]) == ([8, 4], "float32")
    assert tensor["parts"] == [
        {"file": file_name(0), "key": "model/0.weight", "placement": {"shape": [8, 4], "cuts": []}}
    ]
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
    ]  # fmt: skip


def truncate(folder):
    path = folder / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder):
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def remove_a_shard(folder):
    (folder / "rank-00001.safetensors").unlink()


def escape_the_folder(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["name"] = "../rank-00000.safetensors"
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def change_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"position": 40', '"position": 48'))


def hash_what_is_no_tensor(folder):
    path = folder / "rank-00000.safetensors"
    content = b"no tensor at all" * 2**6
    path.write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0].update(bytes=len(content), sha256=file_hash(path))
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def after_so_many_samples(folder, position):
    """A job of 4 passes over 24 samples, and its checkpoint after step 5, changed as its author could."""
    job = job_of(make())
    steps(job, 5)
    job.save(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(sealed({**manifest, "position": position})))
    return job_of(make())


@pytest.mark.parametrize("position", [121, 10**15])
def test_more_samples_than_the_steps_can_have_taken_are_refused(position, tmp_path):
    job = after_so_many_samples(tmp_path / "saved", position)
    with pytest.raises(
        CheckpointError, match=f"its step 5 is after {position} samples, and a step takes at most the 24"
    ):
        job.load(tmp_path / "saved")
    assert job.step_number == 0, "nothing was changed"


def test_a_job_whose_data_ends_before_its_checkpoint_says_so(tmp_path, capsys):
    job = after_so_many_samples(tmp_path / "saved", 120)
    job.load(tmp_path / "saved")
    assert not list(job.batches())
    told = "step 5 was saved after 120 samples, and the 4 epochs of this workload have 96: no step is left"
    assert told in capsys.readouterr().out


DAMAGES = {
    truncate: "rank-00001.safetensors has",
    flip_a_bit: "rank-00000.safetensors was altered",
    remove_a_shard: "rank-00001.safetensors is missing",
    escape_the_folder: "names the files",
    change_the_manifest: "manifest.json was altered",
    lambda folder: (folder / "manifest.json").write_text("{"): "is not JSON",
    lambda folder: (folder / "manifest.json").write_text('{"format": "else"}'): "is not one of Paceline",
    lambda folder: (folder / "manifest.json").unlink(): "can't be read",
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.items(), ids=range(len(DAMAGES)))
def test_a_damaged_checkpoint_is_refused_and_passed_over(saved, tmp_path, damage, said):
    good = copy_of(saved, tmp_path, "step-00000004")
    bad = copy_of(saved, tmp_path)
    damage(bad)
    with pytest.raises(CheckpointError, match=said):
        check_files(bad, read_manifest(bad))
    told = []
    assert find_good(tmp_path, told.append) == good
    assert len(told) == 1
    assert "step-00000005 is passed over" in told[0]


def load_only(rank, folder, options):
    try:
        job_of(make(**options)).load(folder)
    except paceline.PacelineError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 9}, "0.weight has the shape (8, 4) in it and (9, 4) in the model"),
        ({"tied": True}, "4.weight of shape (4, 4) is not in it"),
        ({"optimizer": torch.optim.SGD}, "this one is SGD"),
        ({"seed": 3}, "saved with seed=0, the workload has seed=3"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(saved, options, said):
    assert said in run_ranks(1, load_only, str(saved), options)[0]


def test_a_file_of_no_tensors_with_the_right_hash_is_refused(saved, tmp_path):
    bad = copy_of(saved, tmp_path)
    hash_what_is_no_tensor(bad)
    assert "rank-00000.safetensors should hold tensors\n  found: it is" in run_ranks(1, load_only, str(bad), {})[0]


def test_no_checkpoint_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is none"):
        find_good(tmp_path, print)


def save_over(rank, folder):
    job = job_of(make())
    steps(job, 1)
    try:
        job.save(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_something_else_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "there is something else" in run_ranks(1, save_over, str(tmp_path))[0]
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    (tmp_path / ".partial-other").mkdir()
    assert run_ranks(1, save_over, str(tmp_path / "new"))[0] == "saved"
    assert run_ranks(1, save_over, str(tmp_path / "new"))[0] == "saved"
    assert (tmp_path / ".partial-other").is_dir(), "what another job was writing was removed"


def save_without_space(rank, folder):
    import resource
    import signal

    job = job_of(make(width=4096))
    before = steps(job, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        job.save(folder)
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return text, len(steps(job, 2)) + len(before)


def test_save_rank_0_does_not_wait_for_ranks_with_a_failure_mark(tmp_path, monkeypatch):
    polls = []
    monkeypatch.setattr(save.time, "sleep", polls.append)
    monkeypatch.setattr(save, "_LAST_WORDS_S", 0.2)
    save._leave_note(tmp_path, 1, {"error": "x"})
    save._failure_mark(tmp_path, 2).touch()
    save._let_others_finish(tmp_path, 3)
    assert not polls
    save._let_others_finish(tmp_path, 4)
    assert polls, "it waits for nobody: the test is void"


def test_a_full_disk_is_told_and_training_goes_on(tmp_path):
    for text, done in run_ranks(2, save_without_space, str(tmp_path / "saved")):
        assert "could not be written: " in text
        assert done == 3
    assert os.listdir(tmp_path) == [], "a torn checkpoint was left"


def make_with(has_scheduler):
    return make() if has_scheduler else dataclasses.replace(make(), scheduler=None)


def load_with_other_parts(rank, folder, has_scheduler, plan):
    job = job_of(make_with(has_scheduler), **plan)
    told = []
    job.notice = lambda text, everywhere=False: told.append(text)
    job.load(folder)
    steps(job, 1)
    return told


@pytest.mark.parametrize(("before", "after"), [("topk", "none"), ("none", "topk"), ("topk", "powersgd")])
@SLOW
def test_other_compression_is_told_and_goes_on(tmp_path, before, after):
    folder = str(tmp_path / "saved")
    run_ranks(2, save_after_five, folder, False, {"compression": before})
    for told in run_ranks(2, load_with_other_parts, folder, True, {"compression": after}):
        assert len(told) == 1
        assert "saved with other compression" in told[0]


def test_a_scheduler_on_one_side_only_is_told(saved, tmp_path):
    told = run_ranks(2, load_with_other_parts, str(saved), False, {})[0]
    assert told == ["the checkpoint has a learning-rate scheduler, the workload has none: the rate may jump"]
    folder = str(tmp_path / "saved")
    run_ranks(1, save_one_step, folder, False)
    told = run_ranks(1, load_with_other_parts, folder, True, {})[0]
    assert told == ["the workload has a learning-rate scheduler, the checkpoint has none: the rate may jump"]


def save_one_step(rank, folder, has_scheduler):
    job = job_of(make_with(has_scheduler))
    steps(job, 1)
    job.save(folder)


def test_fewer_ranks_go_on_with_the_same_state(saved):
    told = run_ranks(1, load_with_other_parts, str(saved), True, {})[0]
    assert told == ["2 ranks (replicate=2) saved step-00000005, 1 (replicate=1) go on: dropout draws other numbers"]
