"""Read and write a checkpoint's manifest, which lists its tensors and hashes. No torch: commands read it too.

checkpoints/
  step-00000020/
    manifest.json            written last; without it, there is no checkpoint
    rank-00000.safetensors   parts of tensors that it holds, by itself or as one of several ranks, and its own state
    rank-00001.safetensors
  .partial-step-00000040/    being written, or left by a job that was killed: never read
  .replaced-step-00000020/   the older of two, until the newer stands in its place; it counts where that is missing
  .left-step-00000050/       a step that the job went back from; a checkpoint once the job ends without another one
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest_schema import fault_of_files, fault_of_form, fault_of_tensors
from paceline.checkpoint.tensor_file import TensorFile
from paceline.nouns.errors import MEETS_NOT, CheckpointError, ReadError
from paceline.nouns.reading import parse_whole, read_json, regular, shown

FORMAT = "paceline-checkpoint"
VERSION = 5  # docs/formats.md says what each version has, and what is promised
WITHOUT_OWN_HASH = 1  # a version: its manifests have no SHA-256 of themselves
WITH_WHOLE_TENSORS = (1, 2)  # versions: each tensor lies whole in one file
NO_HASH = ""  # the hash of a tensor that was saved without one
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # of a run directory: the folder of its checkpoints
# How names of tensors begin. AVERAGE: of `job.ema`; OWN: of tensors that only one rank has.
MODEL, OPTIMIZER, AVERAGE, OWN = "model/", "optimizer/", "average/", "own/"
_PARTIAL = ".partial-"
REPLACED = ".replaced-"
_ABANDONED = ".left-"
_PROBE = ".probe-"
_CHUNK_BYTES = 2**22
_MOST_BYTES = 2**30  # of a manifest: 10,000 tensors on 1,000 ranks


class NewerCheckpointError(CheckpointError):
    """A checkpoint is whole, and of a version that a later Paceline writes.

    It is not passed over as a damaged one is: the job would go on from an earlier step, and replace what it can't read.
    """

    exit_code = MEETS_NOT


def file_name(rank: int) -> str:
    """Return the name of the file of one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for another folder, such as a copy that somebody named."""
    step = parse_whole(name.removeprefix("step-"))
    if step is None or name != folder_name(step):
        return None
    return step


def partial_of(folder: Path) -> Path:
    """Return the folder into which the checkpoint `folder` is written before it is complete."""
    return folder.parent / (_PARTIAL + folder.name)


def replaced_by(folder: Path) -> Path:
    """Return the folder of the older checkpoint while `folder` takes its place."""
    return folder.parent / (REPLACED + folder.name)


def left_of(folder: Path) -> Path:
    """Return the hidden folder for a step that the job went back from and that no checkpoint of the run has."""
    return folder.parent / (_ABANDONED + folder.name)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest as JSON keeps it, with a hash of its content."""
    content = json.loads(json.dumps(manifest))  # the hash is of what a reader will see: lists for tuples, text keys
    return {**content, "sha256": _own_hash(content)}


def _own_hash(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    # Sorted keys and fixed separators: one text for one content, however the file is laid out.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and check its hash and its form, not yet its files.

    Returns:
        The manifest in the form of today's version; its `version` is that of the checkpoint.

    Raises:
        NewerCheckpointError: a later Paceline wrote it.
        CheckpointError: it is missing, not JSON, altered, or not of this format.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path, most_bytes=_MOST_BYTES)
    except ReadError as error:
        raise _bad(folder, f"{MANIFEST} is no manifest: {error.found}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _bad(folder, f"{MANIFEST} is not one of Paceline")
    version = manifest.get("version")
    is_known = type(version) is int and 1 <= version <= VERSION
    is_sound = manifest.get("sha256") == _own_hash(manifest)
    # Versions to come keep the hash: one of them is told from damage in the number.
    if is_sound and type(version) is int and version > VERSION:
        raise _newer(folder, version)
    if not is_known:
        raise _bad(folder, f"it is of version {shown(version)}, this Paceline reads 1 to {VERSION}")
    if not is_sound and version != WITHOUT_OWN_HASH:
        raise _bad(folder, f"{MANIFEST} was altered: its SHA-256 is not the one in it")
    # The hash finds damage; somebody who writes a manifest can make it fit, so nothing in it is trusted yet.
    fault = fault_of_form(manifest) or fault_of_files(manifest, file_name)
    if fault is not None:
        raise _bad(folder, f"{MANIFEST} {fault}")
    current = upgraded(manifest, folder)
    if (fault := fault_of_tensors(current)) is not None:
        raise _bad(folder, f"{MANIFEST} {fault}")
    return current


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError unless every file has the manifest's size and SHA-256."""
    for entry in manifest["files"]:
        path = folder / entry["name"]
        if not path.is_file():
            raise _bad(folder, f"{path.name} is missing")
        # The size first: it finds a torn file without reading it.
        if path.stat().st_size != entry["bytes"]:
            raise _bad(folder, f"{path.name} has {path.stat().st_size} bytes, not the {entry['bytes']} written")
        try:
            digest = file_hash(path)
        except OSError as error:
            raise _bad(folder, f"{path.name} can't be read ({error.strerror})") from None
        if digest != entry["sha256"]:
            raise _bad(folder, f"{path.name} was altered: its SHA-256 is not the manifest's")


def find_good(
    path: Path,
    report: Callable[[str], None],
    check: Callable[[Path, dict[str, Any]], None] = check_files,
    fix: str = "name another run or checkpoint",
) -> Path:
    """Return the checkpoint to read at `path`: itself, or the newest good one in the folder.

    Args:
        path: the path of a checkpoint, or of a folder of checkpoints such as `runs/JOB/checkpoints`.
        report: a function that is told, in a sentence, of every checkpoint that is skipped.
        check: a function that raises CheckpointError when the files of the folder are not those of the manifest.
        fix: the advice of the error where there is none.

    Raises:
        NewerCheckpointError: a later Paceline wrote it, or the newest one that is whole.
        CheckpointError: there is none that is whole.
    """
    # `path` itself may be a checkpoint. A crash between the two renames of `put_in_place` leaves only its older copy.
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
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            report(f"{candidate.name} is passed over: {error.found}")
        else:
            return candidate
    finding = "there is none"
    if candidates:
        finding = f"none of the {len(candidates)} there is whole"
    raise CheckpointError(f"a checkpoint in {path}", finding, fix)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first, good or not; of one that was being replaced, what is left."""
    by_step: dict[int, Path] = {}
    for prefix in (REPLACED, ""):  # where both are there, the newer one counts
        for path in folder.glob(f"{prefix}step-*"):
            step = step_of(path.name.removeprefix(prefix))
            if step is not None and path.is_dir():
                by_step[step] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def list_left(folder: Path) -> list[Path]:
    """Return the states in `folder` of steps that a job went back from, newest first, complete or not."""
    states = [path for path in folder.glob(_ABANDONED + "*") if step_of(step_name(path)) is not None]
    return sorted(states, reverse=True)


def publish_left(folder: Path) -> Path | None:
    """Turn the newest left state of `folder` into a checkpoint, if it is of a later step than all checkpoints.

    A job that crashed could not do so itself. States without a valid manifest are removed; others stay, and so do those
    of a later Paceline.

    Returns:
        The checkpoint that it became.

    Raises:
        OSError: it can't be written.
    """
    # A branch that went on from the loaded checkpoint and came further takes precedence over the step that was left.
    newest = max((_step(path) for path in list_checkpoints(folder)), default=-1)
    published = None
    for state in list_left(folder):
        try:
            read_manifest(state)
        except NewerCheckpointError:
            continue
        except CheckpointError:
            shutil.rmtree(state, ignore_errors=True)
            continue
        if published is None and _step(state) > newest:
            published = folder / step_name(state)
            put_in_place(state, published)
    return published


def has_resume_point(folder: Path) -> bool:
    """True if a job can go on from `folder`: from a checkpoint, or a state that `publish_left` makes one."""
    if list_checkpoints(folder):
        return True
    return any((state / MANIFEST).exists() for state in list_left(folder))


def later_than(step: int, folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` of steps after `step`."""
    return [checkpoint for checkpoint in list_checkpoints(folder) if _step(checkpoint) > step]


def step_name(checkpoint: Path) -> str:
    """Return the name of the folder, also of a copy that was being replaced and of a state that was left."""
    return checkpoint.name.removeprefix(REPLACED).removeprefix(_ABANDONED)


def _step(checkpoint: Path) -> int:
    return step_of(step_name(checkpoint)) or 0


def remove_others(newest: Path, keep: int, stale: Iterable[Path] = (), used: Iterable[Path] = ()) -> list[str]:
    """Remove the checkpoints `stale`, and then all but the newest `keep`.

    Args:
        newest: the checkpoint that has just been saved, and stays.
        keep: the number of checkpoints that stay, `newest` included.
        stale: the checkpoints of steps that the job went back from before it came to this one.
        used: the checkpoints that stay too, and do not count.

    Returns:
        The names of the stale ones that were removed.
    """
    # By resolved path: the same folder may be named through a link.
    staying = {newest.resolve()}
    staying.update(path.resolve() for path in used)
    removed = set()
    for path in stale:
        if path.resolve() not in staying and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            removed.add(step_name(path))
    for old in list_checkpoints(newest.parent)[keep:]:
        if old.resolve() not in staying:  # the newest is beyond the limit only where a later one could not be removed
            shutil.rmtree(old, ignore_errors=True)
    return sorted(removed - {newest.name})


def try_writing(folder: Path, name: str) -> None:
    """Make `folder`, and write and remove a small file in it.

    Args:
        folder: the folder that is to be written to later.
        name: the name of the file; processes that try at the same time need different ones.

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
    """Remove what a killed job had written of the checkpoint `folder`, but never the last complete copy."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)
    # Else the copy aside is the only complete one.
    if (folder / MANIFEST).exists():
        shutil.rmtree(replaced_by(folder), ignore_errors=True)


def remove_partial_in(folder: Path) -> None:
    """Call `remove_partial` for every checkpoint of `folder`, a run's; publish a step that its job went back from."""
    for prefix in (_PARTIAL, REPLACED):
        for remainder in folder.glob(prefix + "*"):
            remove_partial(folder / remainder.name.removeprefix(prefix))
    publish_left(folder)


def put_in_place(complete: Path, folder: Path) -> None:
    """Rename the checkpoint `complete`, which is on the disk, to `folder`; then remove the one that had this name."""
    replaced = replaced_by(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()  # an empty folder replaces nothing
    # A crash between the two renames leaves the older copy aside and nothing in its place: the next save
    # must not remove that copy before it stands there itself.
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    complete.rename(folder)
    # A rename is durable only when the folder that has the names is synced (fsync(2)); the older copy goes after that.
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        # Python's buffer first, then the kernel's.
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newer(folder: Path, version: int) -> NewerCheckpointError:
    return NewerCheckpointError(
        f"can't read the checkpoint {folder}",
        f"it is of version {version}, and this Paceline reads versions 1 to {VERSION}",
        "use the Paceline that wrote it, or a later one",
    )


def _bad(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} should be whole",
        found,
        "use an earlier one: `paceline run --resume` and `paceline export RUN` take the newest that is whole",
    )


def upgraded(manifest: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the manifest of an older version in today's form; the files stay as they are.

    docs/formats.md says what each version has. Versions 1 and 2 saved every tensor whole, in one of the files. Their
    manifests do not say in which; the headers of the files do. They have no hash of a tensor either, so loaded tensors
    are not hashed again; the SHA-256 of the files are checked as for every version.

    Args:
        manifest: a manifest of a version that can be read. Its form and the names of its files are checked, its
            tensors are not.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: a file is missing, or is no file of tensors.
    """
    if manifest["version"] not in WITH_WHOLE_TENSORS:
        return dict(manifest)
    files: dict[str, str] = {}
    for entry in manifest["files"]:
        for key in TensorFile.open(folder / entry["name"]).header:
            files[key] = entry["name"]
    tensors = {name: _in_one_part(name, entry, files.get(name)) for name, entry in manifest["tensors"].items()}
    return {**manifest, "tensors": tensors}


def _in_one_part(name: str, entry: Any, file: str | None) -> Any:
    """Return the entry of a tensor that lies whole in one file.

    An entry of the wrong form is returned as it is: `fault_of_tensors` refuses it later.
    """
    if not isinstance(entry, dict) or file is None:
        return entry
    placement: dict[str, Any] = {"shape": entry.get("shape"), "cuts": []}
    part = {"file": file, "key": name, "placement": placement}
    return {**entry, "hash": NO_HASH, "parts": [part]}
