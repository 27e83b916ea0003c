"""Write a checkpoint: every rank its file, rank 0 the manifest, last; a torn save is no checkpoint.

Training stops for one copy of the tensors. A thread of each rank then writes, hashes and syncs its file
and leaves a note beside it that lists the parts in it; rank 0's thread waits for all notes, joins them to
the manifest (every tensor must be there whole, each element once), writes it, renames the folder into
place and removes the oldest. No collective runs outside the training thread.
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
    put_in_place,
    remove_others,
    sealed,
    sync_folder,
    write_durably,
)
from paceline.checkpoint.manifest_merge import as_hex, merged_optimizer, merged_tensors
from paceline.checkpoint.manifest_schema import fault_of_form
from paceline.checkpoint.owner import RunTakenError
from paceline.checkpoint.reshard import LocalTensor, dtype_of, hash_of
from paceline.checkpoint.tensor_file import DTYPES, TensorFormat, pairs_metadata
from paceline.nouns.errors import CheckpointError, ReadError, how_to_write
from paceline.nouns.reading import COUNT, read_json
from paceline.nouns.shard_spec import ShardSpec

# Ranks speak to rank 0 by files: a collective in this thread could interleave with the training thread's.
NOTES_TIMEOUT_S = 600  # for the slowest rank's file
_POLL_S = 0.02
# After a failure: a rank that writes later finds no folder, which is no harm.
_LAST_WORDS_S = 5
_MOST_NOTE_BYTES = 2**30
_NOTE = {
    "name": str, "bytes": COUNT, "sha256": str, "tensors": {str: dict},
    "groups": list, "numbers": dict, "owners": {str: COUNT},
}  # fmt: skip
_FIX = "see that the folder is there, can be written and has space, or name another place with --runs"


@dataclass(slots=True)
class CheckpointWriter:
    """Write the checkpoints of one job, one at a time.

    Args:
        rank: the number of this rank.
        size: the number of all ranks.
        report: a function that is told of each save that ended, by an event.
        stale: the checkpoints of the run that its job went back from; its next one takes their place.
        check_owner: a function that raises RunTakenError where another job has the run directory by now.
    """

    rank: int
    size: int
    report: Callable[[dict[str, Any]], None]
    thread: threading.Thread | None = None
    failure: list[CheckpointError] = field(default_factory=list)
    stale: list[Path] = field(default_factory=list)
    check_owner: Callable[[], object] = bool

    def begin(
        self,
        folder: Path,
        parts: Mapping[str, LocalTensor],
        own_tensors: Mapping[str, torch.Tensor],
        metadata: dict[str, Any],
        keep: int,
    ) -> None:
        """Copy the state and write it to `folder` in a thread, while training goes on.

        Args:
            folder: the checkpoint's folder.
            parts: the part of each tensor that this rank holds; one of a part's holders writes it.
            own_tensors: the tensors that only this rank has.
            metadata: the other entries of the manifest, equal on all ranks but for the members of the optimizer's
                groups, its numbers and the owners of its state.
            keep: the number of checkpoints of its run that may stay, itself included; stale ones are removed. 0: it
                is of no run, and nothing beside it is removed.

        Raises:
            CheckpointError: a tensor is of a dtype that no file can keep.
        """
        # One save at a time: two would hold two copies of the state, and may write the same folder.
        self.wait()
        tensors: dict[str, torch.Tensor] = {}
        shard_specs: dict[str, ShardSpec] = {}
        # Replicated parts are written once: their holders divide them by size.
        for name in assigned(parts, self.rank):
            part = parts[name]
            _check_dtype(name, part.tensor)
            tensors[name] = part.tensor
            shard_specs[name] = part.shard.shard_spec
        tensors.update(own_tensors)
        # A copy even on the CPU: the next step changes the tensors in place. Contiguous, as safetensors wants it.
        # Training stops only for this line.
        copies = {name: _copied(tensor) for name, tensor in tensors.items()}
        manifest = {"format": FORMAT, "version": VERSION, **metadata}
        # daemon: a job that is ended does not wait for its save; what it leaves is no checkpoint.
        self.thread = threading.Thread(
            target=self._write, args=(folder, copies, shard_specs, manifest, keep), name="checkpoint", daemon=True
        )
        self.thread.start()

    def wait(self) -> CheckpointError | None:
        """Wait for the save under way; return its error, if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        return self.failure.pop() if self.failure else None

    def _write(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        shard_specs: Mapping[str, ShardSpec],
        manifest: dict[str, Any],
        keep: int,
    ) -> None:
        began_s = time.monotonic()
        removed: list[str] = []
        partial = partial_of(folder)
        try:
            # Every rank makes it: whichever comes first.
            partial.mkdir(parents=True, exist_ok=True)
            # File, then note: rank 0 takes a note as word that the file is on the disk.
            note = _write_rank(partial, self.rank, tensors, shard_specs, manifest["optimizer"])
            _leave_note(partial, self.rank, note)
            if self.rank == 0:
                notes = _wait_for_notes(partial, self.size)
                manifest["files"] = [_file_entry(note) for note in notes]
                # Raises unless the parts are each tensor's elements once: what can't be loaded whole becomes no
                # checkpoint.
                manifest["tensors"] = merged_tensors(notes)
                manifest["optimizer"] = merged_optimizer(manifest["optimizer"], notes)
                self.check_owner()  # the others' files may have taken long
                _publish(partial, folder, manifest)
                if keep:
                    # After the new one stands: a save that fails removes nothing.
                    removed = remove_others(folder, keep, self.stale)
                    self.stale = []
        except Exception as error:  # whatever ends this thread, the training and rank 0 must hear of it
            self._fail(folder, partial, error)
        else:
            if self.rank == 0:
                event: dict[str, Any] = {
                    "event": "checkpoint" if keep else "saved",  # --resume finds only those of the run
                    "path": str(folder),
                    "step": manifest["step"],
                    "seconds": round(time.monotonic() - began_s, 3),
                }
                if removed:
                    event["removed"] = removed
                self.report(event)

    def _fail(self, folder: Path, partial: Path, error: Exception) -> None:
        """Keep the error for `wait`, and let the other ranks know of it by this rank's note."""
        reason = str(error) or type(error).__name__
        fix = _FIX
        if isinstance(error, CheckpointError):
            reason = error.found
            fix = error.fix
        elif isinstance(error, OSError):
            reason = error.strerror or reason
            fix = f"{how_to_write(error)}; older checkpoints are untouched"
        failure = CheckpointError(
            f"rank {self.rank} should write its part of the checkpoint {folder}",
            f"it could not be written: {reason}",
            fix,
        )
        self.failure.append(failure)
        if isinstance(error, RunTakenError):
            return  # what stands there is another job's
        if self.rank == 0:
            self.report({"event": "checkpoint_failed", "path": str(folder), "found": reason})
            # Removing the folder while others write would turn the first cause into their "no such folder".
            _let_others_finish(partial, self.size)
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # on a full disk this makes room for the note
                (partial / file_name(self.rank)).unlink(missing_ok=True)
            _leave_note(partial, self.rank, {"error": reason})


def assigned(parts: Mapping[str, LocalTensor], rank: int) -> list[str]:
    """Return the tensors whose part here `rank` is to write, or to verify: each part falls to one of its holders.

    Those who hold the same parts see the same tensors, so they agree without a message: the largest first, each
    to the holder that has least. A part without elements falls to nobody, but for a tensor that has none.
    """
    bytes_of_holders: dict[tuple[int, ...], list[int]] = {}
    names = []
    # By size, then by name: the order must be the same on all holders, whatever order their models have.
    for name in sorted(parts, key=lambda name: (-parts[name].tensor.nbytes, name)):
        part = parts[name]
        if part.tensor.numel() == 0 and part.shard.shard_spec.numel > 0:
            continue
        holders = part.shard.holders
        # Bytes that each holder has to write so far. min and index take the first of equal ones, on every rank alike.
        load = bytes_of_holders.setdefault(holders, [0] * len(holders))
        index = load.index(min(load))
        load[index] += part.tensor.nbytes
        if holders[index] == rank:
            names.append(name)
    return names


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if dtype_of(tensor) not in DTYPES:
        raise CheckpointError(
            f"the tensor {name} should be of a dtype that a checkpoint can keep",
            f"it is {tensor.dtype}",
            f"use one of {', '.join(DTYPES)}",
        )


def as_stored(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return the tensors that safetensors saves, and the metadata by which `TensorFile` reads complex ones."""
    forms = {}
    stored = {}
    for name, tensor in tensors.items():
        forms[name] = TensorFormat(tuple(tensor.shape), dtype_of(tensor))
        stored[name] = torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor
    return stored, pairs_metadata(forms) or None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU with values of its own: a conjugate may be a mark on another tensor's."""
    return tensor.detach().to("cpu", copy=True).contiguous().resolve_conj().resolve_neg()


def _write_rank(
    partial: Path,
    rank: int,
    tensors: dict[str, torch.Tensor],
    shard_specs: Mapping[str, ShardSpec],
    optimizer: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a rank's file; return the note that rank 0 makes the manifest of."""
    # In memory: size, hash and file are of the same bytes.
    content = safetensors.torch.save(*as_stored(tensors))
    write_durably(partial / file_name(rank), content)
    entries = {}
    for name, shard_spec in shard_specs.items():
        entries[name] = {
            "shape": list(shard_spec.shape),
            "dtype": dtype_of(tensors[name]),
            "hash": as_hex(hash_of(tensors[name], shard_spec)),
            "placement": shard_spec.to_json(),
        }
    return {
        "name": file_name(rank),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tensors": entries,
        "groups": [group["parameters"] for group in optimizer["groups"]],
        "numbers": optimizer["numbers"],
        "owners": optimizer.get("owners", {}),
    }


def _file_entry(note: Mapping[str, Any]) -> dict[str, Any]:
    return {key: note[key] for key in ("name", "bytes", "sha256")}


def _leave_note(partial: Path, rank: int, note: dict[str, Any]) -> None:
    """Leave a rank's note for rank 0, by a rename: a file of that name is always complete."""
    draft = partial / f"note-{rank:05d}.draft"
    try:
        draft.write_text(json.dumps(note))
        draft.rename(partial / f"note-{rank:05d}.json")
    except OSError:
        # A full disk has no space for the note. An empty file needs none, and rank 0 need not wait for its deadline.
        with contextlib.suppress(OSError):
            _failure_mark(partial, rank).touch()


def _failure_mark(partial: Path, rank: int) -> Path:
    """Return the path of an empty file that says: this rank could write neither its part nor a note."""
    return partial / f"note-{rank:05d}.failed"


def _wait_for_notes(partial: Path, size: int) -> list[dict[str, Any]]:
    """Return the notes of all ranks; raise CheckpointError if one failed or does not answer in time."""
    deadline_s = time.monotonic() + NOTES_TIMEOUT_S
    notes = []
    # In the order of ranks, so manifest["files"] is by rank: `fault_of_files` checks that.
    for rank in range(size):
        path = partial / f"note-{rank:05d}.json"
        while not path.exists():
            if not partial.exists():
                raise _failed("it was removed while it was written")
            if _failure_mark(partial, rank).exists():
                raise _no_note(rank, "it could not be written, nor could the reason (is the disk full?)")
            if time.monotonic() > deadline_s:
                raise _no_note(rank, f"it has not answered for {NOTES_TIMEOUT_S} s")
            time.sleep(_POLL_S)
        try:
            note = read_json(path, ({"error": str}, _NOTE), _MOST_NOTE_BYTES)
        except ReadError as error:
            raise _no_note(rank, f"its note can't be read: {error.found}") from None
        if "error" in note:
            raise _no_note(rank, note["error"])
        notes.append(note)
    return notes


def _let_others_finish(partial: Path, size: int) -> None:
    """Wait until the other ranks have left notes or marks, at most _LAST_WORDS_S; later writes fail without harm."""
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline_s:
        finished = list(partial.glob("note-*.[jf]*"))  # .json and .failed; a .draft is still being written
        if len(finished) >= size - 1:
            break
        time.sleep(_POLL_S)


def _no_note(rank: int, found: str) -> CheckpointError:
    return _failed(f"rank {rank}: {found}")


def _failed(found: str) -> CheckpointError:
    return CheckpointError("all files of the checkpoint", found, _FIX)


def _publish(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest and make the folder a checkpoint, which it is from the rename on."""
    # Read back by the same rules before anybody relies on it, not at the next --resume.
    content = sealed(manifest)
    fault = fault_of_form(content)
    if fault is not None:
        fix = "use numbers of 64 bits in the optimizer's and the scheduler's settings; older checkpoints are untouched"
        raise CheckpointError(f"the checkpoint {folder} should be one that can be read back", f"it {fault}", fix)
    for note in partial.glob("note-*"):
        note.unlink()
    # The manifest last, then the folder's entries, then the rename: after a crash at any point there is either no
    # checkpoint or all of it.
    write_durably(partial / MANIFEST, json.dumps(content).encode())
    sync_folder(partial)
    put_in_place(partial, folder)
