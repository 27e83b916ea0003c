"""Write a checkpoint: every rank its file, rank 0 the manifest, last; a torn save is no checkpoint.

Training stops for one copy of the tensors. A thread of each rank then writes, hashes and syncs its file
and leaves a note beside it; rank 0's thread waits for all notes, writes the manifest, renames the folder
into place and removes the oldest. No collective runs outside the training thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    file_name,
    partial_of,
    remove_old,
    replaced_by,
    sealed,
    sync_folder,
    write_durably,
)
from paceline.nouns.errors import CheckpointError

NOTES_TIMEOUT_S = 600  # for the slowest rank's file
_POLL_S = 0.02
_LAST_WORDS_S = 5


@dataclass(slots=True)
class Writer:
    """Saves of one job, one at a time.

    Args:
        rank: this rank.
        size: all ranks.
        report: told of each save that ended: an event.
    """

    rank: int
    size: int
    report: Callable[[dict[str, Any]], None]
    thread: threading.Thread | None = None
    failure: list[CheckpointError] = field(default_factory=list)

    def begin(
        self,
        folder: Path,
        shared: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        facts: dict[str, Any],
        keep: int,
    ) -> None:
        """Copy the state and write it to `folder` behind the training's back.

        Args:
            folder: the checkpoint's folder.
            shared: tensors that are equal on all ranks; each rank writes some of them.
            own: tensors of this rank alone.
            facts: the rest of the manifest, equal on all ranks.
            keep: how many checkpoints may stay beside it; 0 leaves all.
        """
        self.wait()
        mine = {name: shared[name] for name in assigned(shared, self.size)[self.rank]}
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in {**mine, **own}.items()}
        shapes = {name: {"shape": list(t.shape), "dtype": str(t.dtype)[6:]} for name, t in shared.items()}
        manifest = {"format": FORMAT, "version": VERSION, **facts, "tensors": shapes}
        self.thread = threading.Thread(
            target=self._write, args=(folder, copies, manifest, keep), name="checkpoint", daemon=True
        )
        self.thread.start()

    def wait(self) -> CheckpointError | None:
        """Wait for the save under way; its error, if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        return self.failure.pop() if self.failure else None

    def _write(self, folder: Path, tensors: dict[str, torch.Tensor], manifest: dict[str, Any], keep: int) -> None:
        began_s = time.monotonic()
        partial = partial_of(folder)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            _write_rank(partial, self.rank, tensors)
            if self.rank == 0:
                manifest["files"] = _wait_for_notes(partial, self.size)
                _publish(partial, folder, manifest)
                if keep:
                    remove_old(folder.parent, keep)
        except (OSError, CheckpointError) as error:
            self._fail(folder, partial, error)
        else:
            if self.rank == 0:
                seconds = round(time.monotonic() - began_s, 3)
                self.report({"event": "checkpoint", "path": str(folder), "step": manifest["step"], "seconds": seconds})

    def _fail(self, folder: Path, partial: Path, error: OSError | CheckpointError) -> None:
        found = f"{error.strerror or error}" if isinstance(error, OSError) else error.found
        failure = CheckpointError(
            f"rank {self.rank}'s part of the checkpoint {folder}",
            f"it could not be written: {found}",
            "free space there or name another place with --runs; older checkpoints are untouched",
        )
        self.failure.append(failure)
        if self.rank == 0:
            self.report({"event": "checkpoint_failed", "path": str(folder), "found": found})
            _let_others_finish(partial, self.size)
            shutil.rmtree(partial, ignore_errors=True)
        else:
            _leave_note(partial, self.rank, {"error": found})


def assigned(shared: Mapping[str, torch.Tensor], size: int) -> list[list[str]]:
    """Which rank writes which tensors: the largest first, each to the rank that has least."""
    names: list[list[str]] = [[] for _ in range(size)]
    held = [0] * size
    for name in sorted(shared, key=lambda name: (-shared[name].nbytes, name)):
        rank = held.index(min(held))
        names[rank].append(name)
        held[rank] += shared[name].nbytes
    return names


def _write_rank(partial: Path, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    content = safetensors.torch.save(tensors)
    write_durably(partial / file_name(rank), content)
    note = {"name": file_name(rank), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _leave_note(partial, rank, note)


def _leave_note(partial: Path, rank: int, note: dict[str, Any]) -> None:
    draft = partial / f"note-{rank:05d}.draft"
    try:
        draft.write_text(json.dumps(note))
        draft.rename(partial / f"note-{rank:05d}.json")
    except OSError:
        return  # rank 0 finds no note and gives up the save after its deadline


def _wait_for_notes(partial: Path, size: int) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + NOTES_TIMEOUT_S
    notes = []
    for rank in range(size):
        path = partial / f"note-{rank:05d}.json"
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise _no_note(rank, f"it said nothing for {NOTES_TIMEOUT_S} s")
            time.sleep(_POLL_S)
        note = json.loads(path.read_text())
        if "error" in note:
            raise _no_note(rank, note["error"])
        notes.append(note)
    return notes


def _let_others_finish(partial: Path, size: int) -> None:
    """Wait until the other ranks have written their notes, or long enough: one that is slower writes into nothing."""
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline_s and len(list(partial.glob("note-*.json"))) < size - 1:
        time.sleep(_POLL_S)


def _no_note(rank: int, found: str) -> CheckpointError:
    return CheckpointError(f"rank {rank}'s file", f"rank {rank}: {found}", "free space there")


def _publish(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    for note in partial.glob("note-*"):
        note.unlink()
    write_durably(partial / MANIFEST, json.dumps(sealed(manifest)).encode())
    sync_folder(partial)
    replaced = replaced_by(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()  # an empty folder replaces nothing
    # A crash between the two renames leaves the older copy aside and nothing in its place: the next save
    # must not remove that copy before it stands there itself.
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
