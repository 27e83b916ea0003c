"""Export a checkpoint's model as plain safetensors under its own names, as `from_pretrained` reads it. No torch.

    DIR/model.safetensors                       all tensors, where they fit in one file
    DIR/model-00001-of-00002.safetensors ...    else, with model.safetensors.index.json: which tensor is where
    DIR/config.json  generation_config.json     of a transformers model, for the form "hf"

One tensor is in memory at a time. The folder appears when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.manifest import MODEL, find_good, read_manifest, sync_folder
from paceline.checkpoint.manifest_schema import CONFIGS, shard_specs_of
from paceline.checkpoint.shard_geometry import move
from paceline.checkpoint.tensor_file import TensorFile, TensorFormat, write_tensors, written_order
from paceline.nouns.errors import UsageError, how_to_write
from paceline.nouns.shard_spec import ShardSpec

FORMS = ("hf", "safetensors")
SHARD_BYTES = 5 * 10**9  # of a file, as Hugging Face's Hub asks for; a larger tensor has a file of its own
_NONE = (
    "name a run or a folder that has one: a job writes one after its last step, one every --checkpoint-every steps "
    "before, and one wherever it calls job.save"
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Export:
    """A plan of what to write: the names of each file's tensors, and the other files as JSON."""

    source: Path
    step: int
    tensors: Mapping[str, TensorFormat]
    files: Mapping[str, Sequence[str]]
    texts: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.tensors.values())

    def to_json(self) -> dict[str, Any]:
        """Return the files that were or would be written, as a JSON object."""
        return {
            "checkpoint": str(self.source),
            "step": self.step,
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
            "files": [*self.files, *self.texts],
        }


def plan_export(path: Path, form: str, report: Callable[[str], None], shard_bytes: int = SHARD_BYTES) -> Export:
    """Find the checkpoint at `path` and plan its model's files.

    Args:
        path: the path of a checkpoint, a folder of checkpoints, or a run; of several checkpoints the newest whole one
            is taken.
        form: the form of the files, one of FORMS.
        report: a function that is told, in a sentence, of facts that a user should know.
        shard_bytes: the most bytes of one file.

    Raises:
        UsageError: there is nothing at `path`.
        CheckpointError: there is no checkpoint that is whole.
    """
    if not path.is_dir():
        reason = "that is a file" if path.exists() else "there is no such folder"
        raise UsageError(
            f"can't read the checkpoint {path}", reason, "name a checkpoint, or a run by its folder: runs/JOB"
        )
    inside = path / "checkpoints"
    source = find_good(inside if inside.is_dir() else path, report, fix=_NONE)
    manifest = read_manifest(source)
    tensors = _tensors_of(manifest, report)
    texts = {}
    if form == "hf":
        for key in CONFIGS:
            if key in manifest:
                texts[f"{key}.json"] = _json(manifest[key])
        if "config" not in manifest:
            report("the model that was trained has no transformers config: no config.json is written")
    shards = _shards(tensors, shard_bytes)
    files = {"model.safetensors": shards[0]} if len(shards) == 1 else _numbered(shards)
    export = Export(source, manifest["step"], tensors, files, texts)
    if len(files) > 1:
        weight_map = {}
        for file, names in files.items():
            weight_map.update(dict.fromkeys(names, file))
        texts[_INDEX] = _json({"metadata": {"total_size": export.nbytes}, "weight_map": weight_map})
    return export


def _tensors_of(manifest: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, TensorFormat]:
    """Return the model's tensors by name; report which of them can't be read as they are."""
    tensors = {}
    for name, entry in manifest["tensors"].items():
        if name.startswith(MODEL):
            tensors[name.removeprefix(MODEL)] = TensorFormat(tuple(entry["shape"]), entry["dtype"])
    paired = [name for name, form in tensors.items() if form.stored_shape != list(form.shape)]
    if paired:
        report(
            f"{', '.join(paired)}: complex128 is none of safetensors' dtypes, so it is written as float64, with the "
            "real and the imaginary part in a last dimension of size 2: torch.view_as_complex takes that"
        )
    return tensors


def check_may_export(folder: Path) -> None:
    """Raise UsageError unless `folder` is new or empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(
            f"can't export to {folder}", "there is something else", "name a new folder; nothing was written"
        )


def write_export(export: Export, folder: Path, wrote: Callable[[int], None] = lambda nbytes: None) -> None:
    """Write the files of `export` to `folder`, which appears when they are complete.

    Args:
        export: the plan of the export.
        folder: the folder, which is new or empty.
        wrote: a function that is told the bytes of each tensor, after it was written.

    Raises:
        UsageError: `folder` is not empty, or can't be written.
        CheckpointError: a tensor can't be read.
    """
    # Again: the folder may have been filled since the plan was made.
    check_may_export(folder)
    # Beside the target, hence on the same file system: a rename there is atomic. By process, as two exports may run.
    partial = folder.parent / f".partial-{folder.name}-{os.getpid()}"
    manifest = read_manifest(export.source)
    try:
        partial.mkdir(parents=True)
        for name, names in export.files.items():
            forms = {tensor: export.tensors[tensor] for tensor in names}
            with (partial / name).open("wb") as file:
                # The metadata are those that transformers' save_pretrained writes.
                write_tensors(file, forms, _contents(export.source, manifest, forms, wrote), {"format": "pt"})
                os.fsync(file.fileno())
        for name, text in export.texts.items():
            (partial / name).write_text(text)
        sync_folder(partial)
        if folder.is_dir():
            folder.rmdir()  # it is empty
        partial.rename(folder)
    except OSError as error:
        raise UsageError(
            f"can't export {export.nbytes / 2**20:.0f} MiB to {folder}",
            f"it can't be written ({error.strerror})",
            how_to_write(error, "for the model"),
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _contents(
    source: Path, manifest: Mapping[str, Any], forms: Mapping[str, TensorFormat], wrote: Callable[[int], None]
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of one file as arrays of bits, each put together from its parts."""
    opened: dict[str, TensorFile] = {}
    for name in written_order(forms):
        form = forms[name]
        entry = manifest["tensors"][MODEL + name]
        # Elements as plain bytes: numpy has no bfloat16 or float8, and only bits are copied.
        bits = np.dtype(f"V{form.item_bytes}")
        full = np.empty(form.shape, bits)
        for part, shard_spec in zip(entry["parts"], shard_specs_of(entry), strict=True):
            if part["file"] not in opened:
                opened[part["file"]] = TensorFile.open(source / part["file"])
            file = opened[part["file"]]
            offset, numel = file.place(part["key"], TensorFormat(shard_spec.local_shape, form.dtype))
            part_bits = np.frombuffer(file.content, bits, numel, offset).reshape(shard_spec.local_shape)
            move(full, ShardSpec(form.shape), part_bits, shard_spec)
        yield name, full.data if full.size else b""
        wrote(form.nbytes)


def _shards(tensors: Mapping[str, TensorFormat], shard_bytes: int) -> list[list[str]]:
    """Return the names of each file's tensors, in the model's order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, form in tensors.items():
        if shards[-1] and filled + form.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += form.nbytes
    return shards


def _numbered(shards: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    count = len(shards)
    files = {}
    for number, names in enumerate(shards, 1):
        files[f"model-{number:05d}-of-{count:05d}.safetensors"] = names
    return files


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
