"""The manifest: what a checkpoint holds, and the hashes that prove it, of itself too. No torch: commands read it too.

checkpoints/
  step-00000020/
    manifest.json            written last; without it, there is no checkpoint
    rank-00000.safetensors   parts of tensors that it holds, alone or as one of several, and its own state
    rank-00001.safetensors
  .partial-step-00000040/    being written, or left by a job that was killed: never read
  .replaced-step-00000020/   the older of two, until the newer stands in its place; it counts where that is missing
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint.form import fault_of_files, fault_of_form, fault_of_tensors, shown
from paceline.nouns.errors import CheckpointError, PacelineError

FORMAT, VERSION = "paceline-checkpoint", 3  # 2: the manifest has a hash of itself; 3: tensors lie in parts
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # of a run directory: the folder of its checkpoints
MODEL, OPTIMIZER, OWN = "model/", "optimizer/", "own/"  # how names of tensors begin; OWN: of a rank's alone
_PARTIAL, _REPLACED, _PROBE = ".partial-", ".replaced-", ".probe-"
_CHUNK_BYTES = 2**22


def file_name(rank: int) -> str:
    """The file of one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def folder_name(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def partial_of(folder: Path) -> Path:
    """Where the checkpoint `folder` is written before it is whole."""
    return folder.parent / (_PARTIAL + folder.name)


def replaced_by(folder: Path) -> Path:
    """Where the checkpoint lies that `folder` is about to replace."""
    return folder.parent / (_REPLACED + folder.name)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest as JSON keeps it, with the hash of all that it says."""
    content = json.loads(json.dumps(manifest))
    return {**content, "sha256": _own_hash(content)}


def _own_hash(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and check its hash and its form, not yet its files.

    Raises:
        CheckpointError: it is missing, not JSON, altered, or not of this format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise _bad(folder, f"{MANIFEST} can't be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _bad(folder, f"{MANIFEST} is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _bad(folder, f"{MANIFEST} is not one of Paceline")
    if manifest.get("version") != VERSION:
        raise _bad(folder, f"it is of version {shown(manifest.get('version'))}, this Paceline reads {VERSION}")
    if manifest.get("sha256") != _own_hash(manifest):
        raise _bad(folder, f"{MANIFEST} was altered: its SHA-256 is not the one in it")
    # The hash finds damage; somebody who writes a manifest can make it fit, so nothing in it is trusted yet.
    fault = fault_of_form(manifest) or fault_of_files(manifest, file_name) or fault_of_tensors(manifest)
    if fault is not None:
        raise _bad(folder, f"{MANIFEST} {fault}")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError unless every file has the manifest's size and SHA-256."""
    for entry in manifest["files"]:
        path = folder / entry["name"]
        if not path.is_file():
            raise _bad(folder, f"{path.name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise _bad(folder, f"{path.name} has {path.stat().st_size} bytes, not the {entry['bytes']} written")
        if file_hash(path) != entry["sha256"]:
            raise _bad(folder, f"{path.name} was altered: its SHA-256 is not the manifest's")


def find_good(
    path: Path, report: Callable[[str], None], check: Callable[[Path, dict[str, Any]], None] = check_files
) -> Path:
    """The checkpoint to read at `path`: itself, or the newest good one in the folder.

    Args:
        path: a checkpoint, or a folder of checkpoints such as `runs/JOB/checkpoints`.
        report: told, in a sentence, of every checkpoint that is passed over.
        check: raises CheckpointError when the files of the folder are not those of the manifest.

    Raises:
        CheckpointError: there is none that is whole.
    """
    for folder in (path, replaced_by(path)):
        if (folder / MANIFEST).exists():
            if folder != path:
                report(f"{path.name} was being replaced when its job ended: the copy before it is read")
            check(folder, read_manifest(folder))
            return folder
    candidates = list_checkpoints(path)
    for candidate in candidates:
        try:
            check(candidate, read_manifest(candidate))
        except CheckpointError as error:
            report(f"{candidate.name} is passed over: {error.found}")
        else:
            return candidate
    raise no_checkpoint(path, len(candidates))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first, good or not; of one that was being replaced, the copy that is left."""
    found = {
        path.name.removeprefix(prefix): path
        for prefix in (_REPLACED, "")
        for path in folder.glob(f"{prefix}step-*")
        if path.is_dir()
    }
    return [found[name] for name in sorted(found, reverse=True)]


def later_than(checkpoint: Path) -> list[Path]:
    """The checkpoints beside `checkpoint` of later steps: a job that went back to an earlier step leaves them."""
    return [other for other in list_checkpoints(checkpoint.parent) if step_name(other) > checkpoint.name]


def step_name(checkpoint: Path) -> str:
    """The name of the folder, also of a copy that was being replaced."""
    return checkpoint.name.removeprefix(_REPLACED)


def remove_others(newest: Path, keep: int) -> None:
    """Remove checkpoints of steps later than `newest`, and then all but the newest `keep`."""
    for later in later_than(newest):
        shutil.rmtree(later, ignore_errors=True)
    for old in list_checkpoints(newest.parent)[keep:]:
        if old != newest:  # it is beyond the limit only where a later one could not be removed
            shutil.rmtree(old, ignore_errors=True)


def try_writing(folder: Path, name: str) -> None:
    """Make `folder`, and write and remove a small file in it.

    Args:
        folder: to be written to later.
        name: of the file; processes that try at the same time need different ones.

    Raises:
        OSError: it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f"{_PROBE}{name}"
    try:
        write_durably(probe, b"paceline")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def remove_partial(folder: Path) -> None:
    """Remove what a killed job left of its writing to the checkpoint `folder`, but never the last whole copy."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)
    if (folder / MANIFEST).exists():
        shutil.rmtree(replaced_by(folder), ignore_errors=True)


def remove_partial_in(folder: Path) -> None:
    """Do so for every checkpoint of `folder`, which is one job's own."""
    for prefix in (_PARTIAL, _REPLACED):
        for left in folder.glob(prefix + "*"):
            remove_partial(folder / left.name.removeprefix(prefix))


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_checkpoint(path: Path, looked_at: int) -> PacelineError:
    """The error of a folder without a whole checkpoint."""
    found = f"none of the {looked_at} there is whole" if looked_at else "there is none"
    return CheckpointError(
        f"a checkpoint in {path}", found, "name another run or checkpoint, or start without --resume"
    )


def _bad(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} should be whole",
        found,
        "use an earlier one: `paceline run --resume` takes the newest that is whole",
    )
