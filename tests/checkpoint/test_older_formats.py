"""Runs and checkpoints of older versions are read and go on; those of later versions are refused and left alone.

`older/` has a run of each version that there was: two ranks, 10 steps, the checkpoint after 6 of them. The code that
wrote the versions made them; its events have the losses of the steps that a resumed job takes again.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoint.load import read_checkpoint
from paceline.checkpoint.manifest import (
    VERSION,
    NewerCheckpointError,
    find_good,
    left_of,
    publish_left,
    read_manifest,
    sealed,
)
from paceline.cli.main import main
from paceline.nouns.errors import CheckpointError, PlanError, UsageError
from paceline.nouns.plan import Plan
from paceline.run import directory

from support.jobs import losses, paceline

OLDER = Path(__file__).parent / "older"
RUNS = sorted(path.name for path in OLDER.iterdir() if path.is_dir() and path.name.startswith("run-"))
AT = "step-00000006"
# What a run printed in the end: the loss of the average, the state that it kept, the extra state of a module.
ENDED = {
    "run-1_checkpoint-4_kept": [
        "1.068890324e+01 3.276670476e+00 5.163632095 0.835765104",
        "1.068890324e+01 3.276670476e+00 5.163632095 0.908112885",
    ],
    "run-1_checkpoint-5_values": ["10 calls", "10 calls"],
}
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def version_of(name):
    """The version of a run's checkpoint, as its folder says it."""
    return int(re.search(r"checkpoint-(\d+)", name)[1])


def copy_run(name, folder):
    """A copy of an older run in `folder`, with the file that it ran; the run directory and the file's name."""
    kind = name.partition("_")[2].partition("_")[2]
    file = f"older_{kind or 'workload'}.py"
    for source in OLDER.glob("*.py"):  # one imports another
        shutil.copy(source, folder)
    return Path(shutil.copytree(OLDER / name, folder / "runs" / name)), file


def change(path, **values):
    """Change values of a manifest or another JSON file; a manifest's hash fits again."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(sealed(content) if path.name == "manifest.json" else content))


def load_complex(file):
    """The tensors of a file, complex ones as such."""
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        pairs = json.loads((opened.metadata() or {}).get("complex128", "[]"))
    return {key: torch.view_as_complex(tensor) if key in pairs else tensor for key, tensor in tensors.items()}


def test_there_is_a_run_of_every_version():
    assert {version_of(name) for name in RUNS} == {*range(1, VERSION + 1)}
    assert {int(name[4]) for name in RUNS} == {*range(directory.VERSION + 1)}
    for name in RUNS:
        assert json.loads((OLDER / name / "checkpoints" / AT / "manifest.json").read_text())["version"] == version_of(
            name
        )
        assert json.loads((OLDER / name / "job.json").read_text()).get("version", 0) == int(name[4])


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_is_read_as_it_was_saved(name):
    folder = OLDER / name / "checkpoints" / AT
    raw = {}
    for file in folder.glob("rank-*.safetensors"):
        raw.update({key: value for key, value in load_complex(file).items() if not key.startswith("own/")})
    manifest = read_manifest(folder)
    if version_of(name) < 3:  # later, parts have names of their own
        assert {*manifest["tensors"]} == {*raw}
    _, tensors, own = read_checkpoint(folder, 0, dict.fromkeys(manifest["tensors"]))
    assert len(tensors) > 10
    assert all(tensor.equal(raw[key]) for key, tensor in tensors.items() if key in raw)
    assert own


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_older_run_goes_on_as_if_it_had_not_ended(name, tmp_path):
    run, file = copy_run(name, tmp_path)
    before = losses(run)
    assert [*before] == [*range(1, 11)]
    (run / "events.jsonl").unlink()
    ended = paceline(tmp_path, "run", "--resume", "-n", "2", "--job", name, file)
    assert ended.code == 0, ended.err
    assert f"goes on at {AT}" in ended.err
    again = {step: before[step] for step in range(7, 11)}
    assert losses(run) == pytest.approx(again, rel=1e-9)  # sums in another order may differ in their last digits
    if name in ENDED:
        assert sorted(re.findall(r"ends with (.*)", ended.out)) == ENDED[name]
    newest = read_manifest(run / "checkpoints" / "step-00000010")
    assert newest["version"] == VERSION
    assert json.loads((run / "job.json").read_text())["version"] == directory.VERSION


@pytest.mark.parametrize("name", RUNS)
def test_an_older_run_is_exported(name, tmp_path, capsys):
    assert main(["export", str(OLDER / name), "--to", "safetensors", str(tmp_path / "out")]) == 0
    exported = load_complex(tmp_path / "out" / "model.safetensors")
    folder = OLDER / name / "checkpoints" / AT
    manifest = read_manifest(folder)
    _, tensors, _ = read_checkpoint(folder, 0, dict.fromkeys(manifest["tensors"]))
    saved = {key.removeprefix("model/"): value for key, value in tensors.items() if key.startswith("model/")}
    assert exported.keys() == saved.keys()
    assert all(exported[key].equal(saved[key]) for key in saved)


@pytest.mark.parametrize("name", RUNS)
def test_older_run_events_have_the_documented_fields(name):
    lines = [json.loads(line) for line in (OLDER / name / "events.jsonl").read_text().splitlines()]
    assert {line.get("version", 1) for line in lines if line["event"] == "start"} == {1}
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) == 10
    assert all({"step", "position", "loss", "weight", "samples", "seconds"} <= {*step} for step in steps)


# A change of a checkpoint of version 1 or 2, and what the error says.
def lose_a_file(folder):
    (folder / "rank-00001.safetensors").unlink()


def empty_a_file(folder):
    (folder / "rank-00001.safetensors").write_bytes(b"")


def name_a_tensor_that_is_nowhere(folder):
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    change(folder / "manifest.json", tensors={**tensors, "model/9": {"shape": [2], "dtype": "float64"}})


def enlarge_a_tensor(folder):
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    change(folder / "manifest.json", tensors={**tensors, "model/0.bias": {"shape": [8000], "dtype": "float64"}})


def make_a_tensor_a_number(folder):
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    change(folder / "manifest.json", tensors={**tensors, "model/0.bias": 7})


def lose_the_step(folder):
    content = json.loads((folder / "manifest.json").read_text())
    del content["step"]
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))


DAMAGES = {
    lose_a_file: "rank-00001.safetensors should hold tensors|rank-00001.safetensors is missing",
    empty_a_file: "should hold tensors",
    name_a_tensor_that_is_nowhere: "'model/9' in the wrong form",
    enlarge_a_tensor: "it can't be put together",
    make_a_tensor_a_number: "'model/0.bias' in the wrong form",
    lose_the_step: "step",
}


@pytest.mark.parametrize("name", [name for name in RUNS if version_of(name) < 3])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_older_checkpoint_is_refused(name, damage, tmp_path):
    folder = Path(shutil.copytree(OLDER / name / "checkpoints" / AT, tmp_path / AT))
    damage(folder)
    with pytest.raises(CheckpointError) as raised:
        read_manifest(folder)
    assert not isinstance(raised.value, NewerCheckpointError)
    assert re.search(DAMAGES[damage], str(raised.value)), raised.value


def test_a_changed_manifest_of_version_2_is_damaged(tmp_path):
    folder = Path(shutil.copytree(OLDER / "run-0_checkpoint-2" / "checkpoints" / AT, tmp_path / AT))
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"position": 45', '"position": 46'))
    with pytest.raises(CheckpointError, match="was altered"):
        read_manifest(folder)


def newer(folder, version=VERSION + 1):
    """A checkpoint in `folder` that a later Paceline wrote: nothing is known of it but format, version and hash."""
    shutil.copytree(OLDER / RUNS[-1] / "checkpoints" / AT, folder)
    content = {"format": "paceline-checkpoint", "version": version, "pieces": [1, 2]}
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))
    return folder


def test_a_newer_checkpoint_is_refused_in_words(tmp_path):
    folder = newer(tmp_path / "step-00000009")
    shutil.copytree(OLDER / RUNS[-1] / "checkpoints" / AT, tmp_path / AT)  # not taken in its place
    told = []
    for path in (folder, tmp_path):
        with pytest.raises(NewerCheckpointError) as raised:
            find_good(path, told.append)
        assert raised.value.found == f"it is of version {VERSION + 1}, and this Paceline reads versions 1 to {VERSION}"
        assert raised.value.fix == "use the Paceline that wrote it, or a later one"
    assert told == []


@pytest.mark.parametrize("version", [0, -1, True, None, "3", 2.0, [3], VERSION + 1])
def test_other_version_with_a_wrong_hash_is_skipped_as_damaged(version, tmp_path):
    good = shutil.copytree(OLDER / RUNS[-1] / "checkpoints" / AT, tmp_path / AT)
    folder = newer(tmp_path / "step-00000009")
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "version": version, "sha256": "0" * 64}))
    told = []
    assert find_good(tmp_path, told.append) == good
    assert "it is of version" in told[0]


def test_a_newer_state_that_was_left_is_not_removed(tmp_path):
    folder = newer(left_of(tmp_path / "step-00000009"))
    assert publish_left(tmp_path) is None
    assert (folder / "manifest.json").is_file()


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_newer_checkpoint(run):
    newer(run / "checkpoints" / "step-00000009")


def with_newer_directory(run):
    # A state that a resume would publish.
    shutil.copytree(run / "checkpoints" / AT, left_of(run / "checkpoints" / "step-00000009"))
    change(run / "job.json", version=directory.VERSION + 1)


# What a later Paceline left, and what is said of it.
NEWER = {
    with_newer_checkpoint: f"can't read the checkpoint .*\n  found: it is of version {VERSION + 1}, ",
    with_newer_directory: f"can't resume the job .*\n  found: its run .* of version {directory.VERSION + 1}, ",
}


@pytest.mark.parametrize("resume", ["--resume", "--resume-or-start"])
@pytest.mark.parametrize("make", NEWER, ids=lambda make: make.__name__)
def test_newer_run_is_refused_before_start_and_left_unchanged(make, resume, tmp_path, monkeypatch, capsys):
    run, file = copy_run(RUNS[-1], tmp_path)
    make(run)
    before = files_of(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    assert main(["run", resume, "-n", "2", "--job", run.name, file]) == 2
    error = capsys.readouterr().err
    assert re.search(NEWER[make], error), error
    assert "  fix: use the Paceline that " in error
    assert files_of(run) == before


def refuse_to_start(*_, **__):
    raise AssertionError("a process was started")


def test_a_newer_checkpoint_is_not_exported(tmp_path, capsys):
    folder = newer(tmp_path / AT)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert f"it is of version {VERSION + 1}, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_of_other_launchers_refuse_a_newer_run_too(tmp_path):
    run, _ = copy_run(RUNS[-1], tmp_path)
    with_newer_directory(run)
    before = files_of(run)
    with pytest.raises(UsageError, match="its run directory is of version"):
        directory.write_start(run, Plan.read(run / "plan.json"), tmp_path / "a.py", [])
    assert files_of(run) == before


def test_a_newer_plan_is_refused_by_its_version_not_by_its_keys(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 2, "warp": 9}))
    with pytest.raises(PlanError, match="is of version 2\n  found: this Paceline reads version 1"):
        Plan.read(path)


def test_the_page_names_the_versions():
    page = PAGE.read_text()
    assert f"`version` {VERSION}" in page
    for version in range(1, VERSION + 1):
        assert re.search(rf"^\| {version} \|", page, re.MULTILINE), version
