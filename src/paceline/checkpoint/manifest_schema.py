"""Check the form of a manifest that was read, before anything in it is used. No torch, no I/O."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from paceline.checkpoint.shard_geometry import fault_of_cover, is_sound, most_boxes
from paceline.checkpoint.tensor_file import DTYPES, METADATA
from paceline.nouns.reading import LARGEST, as_type, fault_of, is_shape, shown
from paceline.nouns.shard_spec import ShardSpec

_Count = Annotated[int, Meta(ge=0, le=LARGEST)]
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # and no NaN
CONFIGS = ("config", "generation_config")  # of a transformers model, where the job's is one
# How many boxes the parts of all tensors may have: for each part, and where there are few. A part of a matrix that
# `tensor` and `shard` have cut has up to 20 (three blocks, and a stretch of each).
_BOXES_OF_A_PART = 64
_BOXES = 2**16


class _File(Struct, forbid_unknown_fields=True):
    name: str
    bytes: _Count
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Placement(Struct, forbid_unknown_fields=True):
    shape: list[_Count]
    # Of a cut its dim, which is -1 in the flattened part (shard_spec.FLAT), blocks, part and number of parts.
    cuts: list[tuple[int, list[_Count], _Count, _Count]]


class _Part(Struct, forbid_unknown_fields=True):
    file: str
    key: str
    placement: _Placement


class _Tensor(Struct, forbid_unknown_fields=True):
    shape: list[_Count]
    dtype: str
    hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]  # empty: manifest.NO_HASH
    parts: list[_Part]


class _Group(Struct):
    parameters: list[str]
    lr: _Finite | None = None


class _Optimizer(Struct):
    kind: str = field(name="class")
    groups: list[_Group]
    numbers: dict[str, Any]
    owners: dict[str, _Count] = {}


class _Loop(Struct):
    # A resumed loop asks its sampler again for every pass that was made: a forged number must not take years.
    number: Annotated[int, Meta(ge=0, le=1_000_000)] = field(name="pass")
    batch: _Count
    batches_a_step: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class _Stream(Struct, forbid_unknown_fields=True):
    epoch: Annotated[int, Meta(ge=0, le=1_000_000)]
    batch: _Count
    taken: _Count
    state: dict[str, Any] | None = None


class _LossScale(Struct, forbid_unknown_fields=True):
    value: Annotated[float, Meta(gt=0, le=2.0**127)]
    updates: _Count


class _Manifest(Struct):
    """What a manifest must have; what it may have is that where it is there."""

    step: _Count
    position: _Count
    seed: int
    samples: _Count
    world_size: Annotated[int, Meta(ge=1, le=LARGEST)]
    files: list[_File]
    tensors: dict[str, Any]
    optimizer: _Optimizer
    scheduler: dict[str, Any] | None
    mesh: str = ""
    batch_size: _Count = 0
    config: dict[str, Any] = {}
    generation_config: dict[str, Any] = {}
    loop: _Loop | None = None
    stream: _Stream | None = None
    kept: dict[str, bool] = {}
    loss_scale: _LossScale | None = None


def fault_of_form(manifest: Mapping[str, Any]) -> str | None:
    """Return the first key that is missing or whose value has the wrong form, as the end of a sentence.

    Tensors are left to `fault_of_tensors`, which knows their names.
    """
    try:
        checked = as_type(manifest, _Manifest, "manifest")
    except ValueError as error:
        return f"is in the wrong form: {error}"
    if not -(2**63) <= checked.seed < 2**64:
        return f"has a seed that torch can't take: {shown(checked.seed)}"
    if not _is_plain(manifest["optimizer"]) or not _is_plain(manifest["scheduler"]):
        return "has a whole number of more than 64 bits in the state of its optimizer or scheduler"
    if not _is_plain(manifest.get("stream")):
        return "has a whole number of more than 64 bits in the state of its stream"
    for name, number in checked.optimizer.numbers.items():
        if not _is_number(name, number):
            return f"has an optimizer whose number {shown(name)} is {shown(number)}"
    return None


def fault_of_files(manifest: Mapping[str, Any], file_name: Callable[[int], str]) -> str | None:
    """Return the fault in the names of the files; None if there is one for each rank and no other."""
    names = [entry["name"] for entry in manifest["files"]]
    # First their number: a list for as many ranks as somebody wrote could fill the memory.
    if len(names) == manifest["world_size"]:
        expected = [file_name(rank) for rank in range(len(names))]
        if names == expected:
            return None
    return f"names the files {shown(names)} of {manifest['world_size']} ranks"


def fault_of_tensors(manifest: Mapping[str, Any]) -> str | None:
    """Return the first tensor whose parts can't be in the files, or can't be put together to all of it.

    The time and memory that this takes grow with the manifest's length, whatever is in it.
    """
    # Each file's bytes are used up by its parts: a short manifest can't claim tensors that fill the memory.
    free_bytes = {entry["name"]: entry["bytes"] for entry in manifest["files"]}  # bytes that no tensor has yet
    boxes = _Boxes(manifest["tensors"])
    for name, entry in manifest["tensors"].items():
        if not _is_name(name) or not _is_tensor(entry):
            return f"has the tensor {shown(name)} in the wrong form"
        fault = _fault_of_parts(entry, free_bytes, boxes)
        if fault is not None:
            return f"has the tensor {shown(name)}, but it can't be put together: {fault}"
    return None


def _fault_of_parts(entry: Mapping[str, Any], free_bytes: dict[str, int], boxes: _Boxes) -> str | None:
    shape = tuple(entry["shape"])
    shard_specs = shard_specs_of(entry)
    item_bytes = DTYPES[entry["dtype"]][1]
    for part, shard_spec in zip(entry["parts"], shard_specs, strict=True):
        file = part["file"]
        if file not in free_bytes:
            return "one of its parts is in none of the files"
        # Before `local_shape` is computed, which takes a sound spec for granted.
        if shard_spec.shape != shape or not is_sound(shard_spec):
            return "one of its parts can't be one"
        free_bytes[file] -= math.prod(shard_spec.local_shape) * item_bytes
        if free_bytes[file] < 0:
            return f"its part is longer than what is left of {file}"
        # Before `fault_of_cover`, whose time grows with the number of boxes.
        if not boxes.may_have(shard_spec):
            return "its parts are cut into too many boxes"
    return fault_of_cover(shape, tuple(shard_specs))


class _Boxes:
    """A budget of boxes for the parts of all tensors. Parts with the same shard spec count once, as they are cached."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        parts = 0
        for entry in tensors.values():
            if _is_tensor(entry):
                parts += len(entry["parts"])
        self.budget = max(_BOXES, _BOXES_OF_A_PART * parts)
        self.counted: set[ShardSpec] = set()

    def may_have(self, shard_spec: ShardSpec) -> bool:
        """Count this shard spec in; return True if there are few enough boxes."""
        if shard_spec not in self.counted:
            self.counted.add(shard_spec)
            self.budget -= most_boxes(shard_spec)
        return self.budget >= 0


def shard_specs_of(entry: Mapping[str, Any]) -> list[ShardSpec]:
    """Return the shard specs of the parts of a manifest's tensor."""
    return [ShardSpec.of_json(part["placement"]) for part in entry["parts"]]


def _is_name(name: str) -> bool:
    """True if a file of tensors can have it as a key, and an exported one what follows the first slash."""
    is_unicode = not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_unicode and name.partition("/")[2] not in ("", METADATA)


def _is_tensor(entry: Any) -> bool:
    try:
        tensor = as_type(entry, _Tensor, "tensor")
    except ValueError:
        return False
    return tensor.dtype in DTYPES and is_shape(entry["shape"], DTYPES[tensor.dtype][1])


def _is_plain(value: Any) -> bool:
    """True if every whole number in it fits in 64 bits, as torch wants them."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) is not int or -LARGEST - 1 <= value <= LARGEST


def _is_number(name: str, value: Any) -> bool:
    """True if it is `optimizer/KEY/NAME` and a value that this key can have: a count of steps is a number."""
    prefix, _, key_and_parameter = name.partition("/")
    key, _, parameter = key_and_parameter.partition("/")
    if prefix != "optimizer" or not key or not parameter:
        return False
    return key != "step" or fault_of(value, float) is None
