"""Read a checkpoint back under any mesh: each rank its own parts, verified against the manifest and the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MODEL, NO_HASH, OWN, check_files, file_name, read_manifest
from paceline.checkpoint.manifest_merge import as_hex, of_hex
from paceline.checkpoint.manifest_schema import shard_specs_of
from paceline.checkpoint.reshard import LocalTensor, copy_common, dtype_of, hash_of
from paceline.checkpoint.save import assigned
from paceline.checkpoint.shard_geometry import is_needed
from paceline.checkpoint.tensor_file import TensorFile, TensorFormat
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError
from paceline.nouns.shard_spec import ShardSpec


def read_checkpoint(
    folder: Path, rank: int, shard_specs: Mapping[str, ShardSpec | None]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read the manifest, the wanted parts, and the tensors that only `rank` had (none if it did not exist then).

    Args:
        folder: the folder of the checkpoint.
        rank: the rank whose own tensors are read.
        shard_specs: the shard spec of the part to read of each tensor, by name; None is all of it.

    Raises:
        CheckpointError: a file is missing, torn or altered, or a tensor is not there or of another shape.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest, read_parts(folder, manifest, shard_specs), read_own(folder, manifest, rank)


def read_parts(
    folder: Path, manifest: Mapping[str, Any], shard_specs: Mapping[str, ShardSpec | None]
) -> dict[str, torch.Tensor]:
    """Read the wanted parts to the CPU. Only they are held, and of the files only what they need is read."""
    files: dict[str, TensorFile] = {}
    parts = {}
    for name, shard_spec in shard_specs.items():
        parts[name] = _read_part(folder, manifest, files, name, shard_spec)
    return parts


def _read_part(
    folder: Path,
    manifest: Mapping[str, Any],
    files: dict[str, TensorFile],
    name: str,
    shard_spec: ShardSpec | None,
) -> torch.Tensor:
    entry = manifest["tensors"].get(name)
    if entry is None:
        raise _wrong_model(folder, f"{name} is not in it")
    shape = tuple(entry["shape"])
    shard_spec = shard_spec or ShardSpec(shape)
    if shard_spec.shape != shape:
        raise _wrong_model(folder, f"{name} has the shape {shape} in it, not {shard_spec.shape}")
    # All of it is filled: the manifest's parts are each element once (`fault_of_cover`).
    part = torch.empty(shard_spec.local_shape, dtype=getattr(torch, entry["dtype"]))
    for saved, saved_spec in zip(entry["parts"], shard_specs_of(entry), strict=True):
        # A file that has nothing of this part is not even opened: a rank of a large job needs few.
        if is_needed(shard_spec, saved_spec):
            file = _opened(folder, files, saved["file"])
            saved_part = _mapped(file, saved["key"], saved_spec.local_shape, part.dtype)
            copy_common(part, shard_spec, saved_part, saved_spec)
    return part


def _opened(folder: Path, files: dict[str, TensorFile], name: str) -> TensorFile:
    if name not in files:
        files[name] = TensorFile.open(folder / name)
    return files[name]


def _mapped(file: TensorFile, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the file, not read yet: the kernel reads what is copied from it."""
    offset, numel = file.place(key, TensorFormat(shape, str(dtype).removeprefix("torch.")))
    if dtype is torch.complex128:  # a copy: it begins at a multiple of 8 bytes, and torch wants 16
        pairs = torch.frombuffer(file.content, dtype=torch.float64, count=2 * numel, offset=offset)
        return torch.view_as_complex(pairs.clone().view(*shape, 2))
    return torch.frombuffer(file.content, dtype=dtype, count=numel, offset=offset).view(shape)


def read_own(folder: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Read the tensors that only `rank` had; none if there was no such rank.

    Raises:
        CheckpointError: its file is no file of tensors.
    """
    if rank >= manifest["world_size"]:
        return {}
    file = TensorFile.open(folder / file_name(rank))
    tensors = {}
    for key, form in file.forms().items():
        if not key.startswith(OWN):
            continue
        dtype = getattr(torch, form.dtype)
        if form.nbytes == 0:  # torch.frombuffer takes no empty stretch
            tensor = torch.empty(form.shape, dtype=dtype)
        else:
            # A copy: the tensor must not keep the file mapped.
            tensor = _mapped(file, key, form.shape, dtype).clone()
        tensors[key.removeprefix(OWN)] = tensor
    return tensors


def check_files_together(folder: Path, manifest: Mapping[str, Any], comm: AxisComm) -> None:
    """Raise CheckpointError on every rank unless all files are as the manifest says; each rank reads some of them."""
    # Each file is hashed by one rank, not by all.
    failure = None
    faults = torch.zeros(len(manifest["files"]), dtype=torch.int64)
    for number in range(comm.rank, len(faults), comm.size):
        try:
            check_files(folder, {"files": [manifest["files"][number]]})
        except CheckpointError as error:
            faults[number] = 1
            if failure is None:
                failure = error
    # Reached also by a rank that found a fault: raising before it would leave the others in the collective.
    comm.all_reduce(faults)
    if faults.any():
        name = manifest["files"][int(faults.nonzero()[0])]["name"]
        raise failure or _damaged(folder, f"{name} is missing, torn or altered")


def verify_hashes(
    folder: Path,
    manifest: Mapping[str, Any],
    parts: Mapping[str, LocalTensor],
    comm: AxisComm,
    failure: CheckpointError | None = None,
) -> None:
    """Raise CheckpointError on every rank unless what all ranks have loaded is, bit for bit, what was saved.

    Each rank hashes some of the parts it holds, each part is hashed by one of its holders, and the sums must
    be the manifest's. No tensor is gathered.

    Args:
        folder: the folder of the checkpoint, for errors.
        manifest: the manifest of the checkpoint.
        parts: the parts that this rank has loaded; a part whose copy another rank verifies may be omitted.
        comm: the communicator of all ranks.
        failure: the error by which this rank could load nothing, which it reports to the others and raises.
    """
    # Sorted: every rank must have the same row for a tensor.
    names = sorted(manifest["tensors"])
    rows = {name: number for number, name in enumerate(names)}
    table = torch.zeros(len(names) + 1, 3, dtype=torch.int64)  # two sums and a count each; last: ranks that failed
    if failure is None:
        for name in assigned(parts, comm.rank):
            part = parts[name]
            first, second = hash_of(part.tensor, part.shard.shard_spec)
            table[rows[name]] = torch.tensor([first, second, part.tensor.numel()])
    else:
        table[-1, 0] = 1
    # (tensors + 1, 3). int64 sums wrap around modulo 2^64, as the hash wants it.
    comm.all_reduce(table)
    if failure is not None or table[-1, 0]:
        raise failure or _damaged(folder, "another rank could not load its part")
    for name, (first, second, count) in zip(names, table.tolist(), strict=False):
        entry = manifest["tensors"][name]
        shape = tuple(entry["shape"])
        numel = ShardSpec(shape).numel
        # The count first: it tells a missing tensor from a damaged one.
        if count == 0 < numel:
            raise _wrong_model(folder, f"its {_bare(name)} of shape {shape} is not in the model")
        if count != numel:
            raise _wrong_model(folder, f"the ranks hold {count} of the {numel} elements of {_bare(name)}")
        if entry["hash"] != NO_HASH and (first, second) != of_hex(entry["hash"]):
            loaded = as_hex((first, second))
            raise _damaged(folder, f"{_bare(name)} was loaded with the hash {loaded}, not the {entry['hash']} saved")


def check_same_model(folder: Path, saved: Mapping[str, Mapping[str, Any]], model: Mapping[str, LocalTensor]) -> None:
    """Raise CheckpointError naming the first of this rank's tensors in which the checkpoint and the model differ.

    A tensor that only the checkpoint has is found by `verify_hashes`: another rank may hold it.
    """
    for name, part in model.items():
        shape = part.shard.shard_spec.shape
        bare = _bare(name)
        if name not in saved:
            raise _wrong_model(folder, f"the model's {bare} of shape {shape} is not in it")
        if tuple(saved[name]["shape"]) != shape:
            raise _wrong_model(
                folder, f"{bare} has the shape {tuple(saved[name]['shape'])} in it and {shape} in the model"
            )
        if saved[name]["dtype"] != dtype_of(part.tensor):
            raise _wrong_model(
                folder, f"{bare} is {saved[name]['dtype']} in it and {dtype_of(part.tensor)} in the model"
            )


def _bare(name: str) -> str:
    return name.removeprefix(MODEL)


def _damaged(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} should be whole", found, "use an earlier checkpoint")


def _wrong_model(folder: Path, found: str) -> CheckpointError:
    error = CheckpointError(
        f"the checkpoint {folder} should be of this model",
        found,
        "make the model as it was when it was saved, or start without the checkpoint",
    )
    error.exit_code = 2
    return error
