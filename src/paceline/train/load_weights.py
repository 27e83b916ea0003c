"""Start from weights: `job.load(path, weights_only=True)` reads parameters and buffers, and nothing else.

They come from a checkpoint of any mesh, or from plain safetensors, as `paceline export` and transformers write them.
Each rank reads its own parts of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.load import check_files_together, read_parts
from paceline.checkpoint.manifest import MANIFEST, MODEL, find_good, read_manifest
from paceline.checkpoint.reshard import LocalTensor
from paceline.checkpoint.tensor_file import TensorFile
from paceline.comm.collectives import AxisComm
from paceline.nouns import arguments
from paceline.nouns.errors import CheckpointError, UsageError

_WEIGHTS = "model.safetensors"
OF_TORCH = (
    "read a file of torch.save before the job is made, by torch.load with weights_only=True, into model.load_state_dict"
)
_NAMED = 5  # names that an error gives


def read_weights(
    path: Path,
    parts: Mapping[str, LocalTensor],
    names: Mapping[str, str],
    strict: bool,
    comm: AxisComm,
    notice: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the tensors at `path`, by the names that the model has them under. Collective.

    Args:
        path: the path of a checkpoint, a folder of checkpoints, a file of safetensors, or a folder with
            model.safetensors.
        parts: the model's parts on this rank, by name; the result has their shapes.
        names: the names of all the model's tensors, as `snapshot` gives them.
        strict: True to refuse names that only one side has; else they stay as they are, with a notice.
        comm: the communicator of all ranks.
        notice: a function that prints a line.

    Raises:
        CheckpointError: there are no weights, or they are of another model.
    """
    folder, saved = _find(path, comm, notice)
    unexpected = [_bare(name) for name in saved if name not in names]
    # A file may have a tied tensor under any of its names, or under all of them.
    tensors = {names[name]: entry for name, entry in saved.items() if name in names}
    missing = [_bare(name) for name in dict.fromkeys(names.values()) if name not in tensors]
    shard_specs = {name: part.shard.shard_spec for name, part in parts.items() if name in tensors}
    for name, spec in shard_specs.items():
        saved_shape = tuple(tensors[name]["shape"])
        if saved_shape != tuple(spec.shape):
            found = f"{_bare(name)} has the shape {saved_shape} there and {tuple(spec.shape)} in the model"
            raise _mismatch(path, found, "take the weights of this model")
    if not tensors:
        raise _mismatch(path, "they have no name in common", "take the weights of this model")
    found = "; ".join(filter(None, (_listed(missing, "not there"), _listed(unexpected, "not in the model"))))
    if found and strict:
        fix = "take the weights of this model; strict=False leaves names that only one side has"
        raise _mismatch(path, found, fix)
    if found:
        notice(f"the weights of {path} are taken but for some: {found}")
    return read_parts(folder, {"tensors": tensors}, shard_specs)


def _find(path: Path, comm: AxisComm, notice: Callable[[str], None]) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of the files, and a manifest's entries of the tensors."""
    if path.is_dir() and not (path / MANIFEST).exists() and (path / _WEIGHTS).is_file():
        path = path / _WEIGHTS
    if path.is_file():
        return path.parent, _entries_of(path)
    if not path.exists():
        raise CheckpointError(
            f"weights to start from in {path}",
            "there is neither a file nor a folder of that name",
            f"name a checkpoint, a .safetensors file, or a folder with {_WEIGHTS}",
        )
    folder = find_good(path, notice, partial(check_files_together, comm=comm))
    saved = read_manifest(folder)["tensors"]
    return folder, {name: entry for name, entry in saved.items() if name.startswith(MODEL)}


def _entries_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file as a manifest has them, whole in this one file."""
    entries = {}
    try:
        file = TensorFile.open(path)
    except CheckpointError as error:
        raise CheckpointError(error.asked, error.found, f"name a file of safetensors; {OF_TORCH}") from None
    for key, form in file.forms().items():
        shape = list(form.shape)
        placed = {"file": path.name, "key": key, "placement": {"shape": shape, "cuts": []}}
        entries[MODEL + key] = {"shape": shape, "dtype": form.dtype, "hash": "", "parts": [placed]}
    return entries


def _listed(names: list[str], reason: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}: {reason}"


def _mismatch(path: Path, found: str, fix: str) -> CheckpointError:
    error = CheckpointError(f"the weights of {path} should be of this model", found, fix)
    error.exit_code = 2
    return error


def _bare(name: str) -> str:
    return name.removeprefix(MODEL)


def check_flags(weights_only: Any, strict: Any) -> None:
    """Raise UsageError unless both are True or False, and `strict` has an effect."""
    for name, value in (("weights_only", weights_only), ("strict", strict)):
        arguments.flag("job.load", name, value)
    if not strict and not weights_only:
        raise UsageError(
            "strict=False leaves out weights that only one side has",
            "job.load(path) takes the whole state of the job, which must fit",
            "write job.load(path, weights_only=True, strict=False)",
        )
