"""Saving over a checkpoint: at every moment one whole copy is on the disk, and other jobs' files are left alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.checkpoint import save
from paceline.checkpoint.manifest import (
    FORMAT,
    VERSION,
    file_name,
    find_good,
    list_checkpoints,
    remove_others,
    remove_partial,
    remove_partial_in,
)
from paceline.nouns.errors import CheckpointError
from paceline.run.directory import find_resume_point


class Crash(BaseException):
    """The process ends here."""


def publish(folder: Path, step: int) -> None:
    """Save a checkpoint of one tiny file, as a rank alone would."""
    content = b"tensors of step %d" % step
    partial = save.partial_of(folder)
    partial.mkdir(parents=True, exist_ok=True)
    (partial / file_name(0)).write_bytes(content)
    files = [{"name": file_name(0), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    optimizer = {"class": "SGD", "groups": [], "numbers": {}}
    facts = {"step": step, "position": 8 * step, "seed": 0, "samples": 24, "world_size": 1}
    state = {"files": files, "tensors": {}, "optimizer": optimizer, "scheduler": None}
    save._publish(partial, folder, {"format": FORMAT, "version": VERSION, **facts, **state})


def crash_between_the_renames(folder: Path, step: int, monkeypatch) -> None:
    rename = Path.rename

    def crash(path, target):
        if path == save.partial_of(folder):
            raise Crash
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(Crash):
        publish(folder, step)
    monkeypatch.setattr(Path, "rename", rename)


def content_of(folder: Path) -> bytes:
    return (find_good(folder, print) / file_name(0)).read_bytes()


def test_a_crash_between_the_renames_leaves_the_copy_before_it(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    publish(folder, 1)
    crash_between_the_renames(folder, 2, monkeypatch)
    assert not folder.exists()
    assert content_of(folder) == b"tensors of step 1"
    remove_partial(folder)
    crash_between_the_renames(folder, 3, monkeypatch)
    assert content_of(folder) == b"tensors of step 1", "the second crash lost what the first had left"
    publish(folder, 4)
    assert content_of(folder) == b"tensors of step 4"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_job_goes_on_from_a_checkpoint_that_was_being_replaced(tmp_path, monkeypatch):
    checkpoints = tmp_path / "checkpoints"
    publish(checkpoints / "step-00000005", 5)
    publish(checkpoints / "step-00000010", 10)
    crash_between_the_renames(checkpoints / "step-00000010", 10, monkeypatch)
    found = find_resume_point(tmp_path, print)
    assert (found / file_name(0)).read_bytes() == b"tensors of step 10"
    remove_partial_in(checkpoints)
    publish(checkpoints / "step-00000015", 15)
    assert [path.name[-2:] for path in list_checkpoints(checkpoints)] == ["15", "10", "05"]


def test_replace_keeps_the_only_checkpoint_findable_after_a_kill(tmp_path, monkeypatch):
    publish(tmp_path / "checkpoints" / "step-00000005", 5)
    crash_between_the_renames(tmp_path / "checkpoints" / "step-00000005", 5, monkeypatch)
    assert find_resume_point(tmp_path, print) is not None


def test_resume_with_all_checkpoints_damaged_says_how_to_retrain(tmp_path):
    publish(tmp_path / "checkpoints" / "step-00000005", 5)
    (tmp_path / "checkpoints" / "step-00000005" / file_name(0)).unlink()
    with pytest.raises(CheckpointError) as caught:
        find_resume_point(tmp_path, print)
    assert caught.value.found == "none of the 1 there is whole"
    assert "start under another --job, without --resume" in caught.value.fix, "this run's name is taken"


def test_only_this_checkpoints_remains_are_removed(tmp_path):
    mine, other = save.partial_of(tmp_path / "mine"), save.partial_of(tmp_path / "other")
    for folder in (mine, other):
        folder.mkdir()
    remove_partial(tmp_path / "mine")
    assert not mine.exists()
    assert other.exists()


def test_checkpoint_list_ignores_folders_with_other_names(tmp_path):
    names = ["step-00000009", "step-00000010", "step-99999999", "step-100000000"]
    others = ["step-best", "step-00000010-copy", "step-10", "step-\u0661", f"step-{10**30}", ".replaced-step-x"]
    for name in [*names, *others]:
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == names[::-1]
    remove_others(tmp_path / "step-100000000", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["step-100000000", *others])
