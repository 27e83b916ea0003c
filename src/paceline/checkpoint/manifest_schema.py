"""Check the form of a manifest that was read, before anything in it is used. No torch, no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.shard_geometry import fault_of_cover, is_sound, most_pieces
from paceline.checkpoint.tensor_file import DTYPES, METADATA
from paceline.nouns.reading import COUNT, LARGEST, fault_of, is_shape, shown
from paceline.nouns.shard_spec import ShardSpec

_HASH = re.compile("[0-9a-f]{64}")
_TENSOR_HASH = re.compile("[0-9a-f]{32}")
CONFIGS = ("config", "generation_config")  # of a transformers model, where the job's is one
# How many boxes the parts of all tensors may have: for each part, and where there are few. A part of a matrix that
# `tensor` and `shard` have cut has up to 20 (three blocks, and a stretch of each).
_BOXES_OF_A_PART = 64
_BOXES = 2**16


def fault_of_form(manifest: Mapping[str, Any]) -> str | None:
    """Return the first key that is missing or whose value has the wrong form, as the end of a sentence."""
    for key, is_right in _FORM.items():
        if key not in manifest:
            return f"lacks {key}"
        if not is_right(manifest[key]):
            return f"has {key} in the wrong form: {shown(manifest[key])}"
    # After _FORM, which has shown that it is there and a dict.
    fault = _fault_of_optimizer(manifest["optimizer"])
    if fault is not None:
        return f"has an optimizer in the wrong form: {fault}"
    for key, is_right in _MAY_HAVE.items():
        if key in manifest and not is_right(manifest[key]):
            return f"has {key} in the wrong form: {shown(manifest[key])}"
    return None


def fault_of_files(manifest: Mapping[str, Any], file_name: Callable[[int], str]) -> str | None:
    """Return what is wrong with the names of the files; None if there is one for each rank and no other."""
    names = [entry["name"] for entry in manifest["files"]]
    # First their number: a list for as many ranks as somebody wrote could fill the memory.
    if len(names) == manifest["world_size"]:
        expected = [file_name(rank) for rank in range(len(names))]
        if names == expected:
            return None
    return f"names the files {shown(names)} of {manifest['world_size']} ranks"


def fault_of_tensors(manifest: Mapping[str, Any]) -> str | None:
    """Return the first tensor whose parts can't lie in the files, or can't be put together to all of it.

    The time and memory that this takes grow with the manifest's length, whatever is in it.
    """
    # Each file's bytes are used up by its parts: a short manifest can't claim tensors that fill the memory.
    left = {entry["name"]: entry["bytes"] for entry in manifest["files"]}  # bytes that no tensor has yet
    boxes = _Boxes(manifest["tensors"])
    for name, entry in manifest["tensors"].items():
        if not _is_name(name) or not _is_tensor(entry):
            return f"has the tensor {shown(name)} in the wrong form"
        fault = _fault_of_parts(entry, left, boxes)
        if fault is not None:
            return f"has the tensor {shown(name)}, but it can't be put together: {fault}"
    return None


def _fault_of_parts(entry: Mapping[str, Any], left: dict[str, int], boxes: _Boxes) -> str | None:
    shape = tuple(entry["shape"])
    shard_specs = shard_specs_of(entry)
    item_bytes = DTYPES[entry["dtype"]][1]
    for part, shard_spec in zip(entry["parts"], shard_specs, strict=True):
        file = part["file"]
        if file not in left:
            return "one of its parts is in none of the files"
        # Before `local_shape` is computed, which takes a sound spec for granted.
        if shard_spec.shape != shape or not is_sound(shard_spec):
            return "one of its parts can't be one"
        left[file] -= math.prod(shard_spec.local_shape) * item_bytes
        if left[file] < 0:
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
        self.left = max(_BOXES, _BOXES_OF_A_PART * parts)
        self.counted: set[ShardSpec] = set()

    def may_have(self, shard_spec: ShardSpec) -> bool:
        """Count this shard spec in; return True if there are few enough boxes."""
        if shard_spec not in self.counted:
            self.counted.add(shard_spec)
            self.left -= most_pieces(shard_spec)
        return self.left >= 0


def shard_specs_of(entry: Mapping[str, Any]) -> list[ShardSpec]:
    """Return the shard specs of the parts of a manifest's tensor."""
    return [ShardSpec.of_json(part["placement"]) for part in entry["parts"]]


def _is_count(value: Any) -> bool:
    return fault_of(value, COUNT) is None


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(name: str) -> bool:
    """True if a file of tensors can have it as a key, and an exported one what follows the first slash."""
    is_unicode = not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_unicode and name.partition("/")[2] not in ("", METADATA)


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"name", "bytes", "sha256"}
        and _is_text(entry["name"])
        and _is_count(entry["bytes"])
        and _is_text(entry["sha256"])
        and bool(_HASH.fullmatch(entry["sha256"]))
    )


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"shape", "dtype", "hash", "parts"}
        and _is_text(entry["dtype"])
        and entry["dtype"] in DTYPES
        and is_shape(entry["shape"], DTYPES[entry["dtype"]][1])
        and _is_text(entry["hash"])
        and bool(_TENSOR_HASH.fullmatch(entry["hash"]))
        and _is_list(entry["parts"], _is_part)
    )


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"file", "key", "placement"}
        and _is_text(part["file"])
        and _is_text(part["key"])
        and isinstance(part["placement"], dict)
        and part["placement"].keys() == {"shape", "cuts"}
        and _is_list(part["placement"]["shape"], _is_count)
        and _is_list(part["placement"]["cuts"], _is_cut)
    )


def _is_cut(cut: Any) -> bool:
    if not isinstance(cut, list) or len(cut) != 4:
        return False
    dim, blocks, part, parts = cut
    # dim may be -1: the cut is of the flattened part (shard_spec.FLAT).
    return type(dim) is int and _is_list(blocks, _is_count) and _is_count(part) and _is_count(parts)


def _is_plain(value: Any) -> bool:
    """True if every whole number in it fits in 64 bits, as torch wants them."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return type(value) is not int or -LARGEST - 1 <= value <= LARGEST


def _fault_of_optimizer(value: Any) -> str | None:
    fault = fault_of(value, {"class": str, "groups": [_GROUP], "numbers": {str: object}, "owners?": {str: COUNT}})
    if fault is not None:
        return fault
    if not _is_plain(value):
        return "it has a whole number of more than 64 bits"
    for name, number in value["numbers"].items():
        if not _is_number(name, number):
            return f"its number {shown(name)} is {shown(number)}"
    return None


def _is_number(name: str, value: Any) -> bool:
    """True if it is `optimizer/KEY/NAME` and a value that this key can have: a count of steps is a number."""
    prefix, _, rest = name.partition("/")
    key, _, parameter = rest.partition("/")
    if prefix != "optimizer" or not key or not parameter:
        return False
    return key != "step" or fault_of(value, float) is None


def _is_scheduler(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and _is_plain(value))


_GROUP = {"parameters": [str], "lr?": (None, float)}
# What a manifest must have, and whether a value of JSON is that.
_FORM: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "position": _is_count,
    "seed": lambda value: type(value) is int and -(2**63) <= value < 2**64,  # what torch.manual_seed takes
    "samples": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "files": lambda value: _is_list(value, _is_file),
    "tensors": lambda value: isinstance(value, dict),
    "optimizer": lambda value: isinstance(value, dict),  # and see _fault_of_optimizer
    "scheduler": _is_scheduler,
}
_MAY_HAVE: dict[str, Callable[[Any], bool]] = {
    "mesh": _is_text,
    "batch_size": _is_count,
    **dict.fromkeys(CONFIGS, lambda value: isinstance(value, dict)),
}
