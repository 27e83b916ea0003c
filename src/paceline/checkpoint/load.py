"""Read a checkpoint back: verified against its manifest first, then against the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.checkpoint.manifest import check_files, file_name, read_manifest
from paceline.nouns.errors import CheckpointError

OWN = "own/"  # names of a rank's own tensors begin so


def read_checkpoint(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The manifest, the tensors of all ranks, and those of `rank` alone (none if it did not exist then).

    Raises:
        CheckpointError: a file is missing, torn or altered.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    shared: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    for entry in manifest["files"]:
        for name, tensor in _read_file(folder / entry["name"]).items():
            if not name.startswith(OWN):
                shared[name] = tensor
            elif entry["name"] == file_name(rank):
                own[name.removeprefix(OWN)] = tensor
    missing = [name for name in manifest["tensors"] if name not in shared]
    if missing:
        raise CheckpointError(
            f"the checkpoint {folder} should hold {len(manifest['tensors'])} tensors",
            f"{missing[0]} is in none of its files",
            "use an earlier checkpoint",
        )
    return manifest, shared, own


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} should hold tensors", f"it is {error}", "use an earlier checkpoint") from None


def check_same_model(folder: Path, saved: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError naming the first tensor in which the checkpoint and the model differ."""
    for name, tensor in model.items():
        if name not in saved:
            raise _other(folder, f"the model's {name} of shape {tuple(tensor.shape)} is not in it")
        if saved[name].shape != tensor.shape:
            raise _other(
                folder, f"{name} has the shape {tuple(saved[name].shape)} in it and {tuple(tensor.shape)} in the model"
            )
        if saved[name].dtype != tensor.dtype:
            raise _other(folder, f"{name} is {saved[name].dtype} in it and {tensor.dtype} in the model")
    extra = [name for name in saved if name not in model]
    if extra:
        raise _other(folder, f"its {extra[0]} of shape {tuple(saved[extra[0]].shape)} is not in the model")


def _other(folder: Path, found: str) -> CheckpointError:
    error = CheckpointError(
        f"the checkpoint {folder} should be of this model",
        found,
        "make the model as it was when it was saved, or start without the checkpoint",
    )
    error.exit_code = 2
    return error
