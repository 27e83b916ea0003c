"""The form of a manifest: what it must say, checked before a word of it is believed. No torch, no I/O."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from paceline.checkpoint.boxes import fault_of_cover, is_sound
from paceline.checkpoint.tensor_file import DTYPES
from paceline.nouns.placement import Placement

_HASH, _TENSOR_HASH = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{32}")
CONFIGS = ("config", "generation_config")  # of a transformers model, where the job's is one


def fault_of_form(manifest: Mapping[str, Any]) -> str | None:
    """The first key that is missing or whose value has the wrong form, as the end of a sentence."""
    for key, is_right in _FORM.items():
        if key not in manifest:
            return f"lacks {key}"
        if not is_right(manifest[key]):
            return f"has {key} in the wrong form: {shown(manifest[key])}"
    for key in CONFIGS:
        if not isinstance(manifest.get(key, {}), dict):
            return f"has {key} in the wrong form: {shown(manifest[key])}"
    return None


def fault_of_files(manifest: Mapping[str, Any], file_name: Callable[[int], str]) -> str | None:
    """What is wrong with the names of the files: there is one for each rank, and no name leaves the folder."""
    names = [entry["name"] for entry in manifest["files"]]
    if names == [file_name(rank) for rank in range(manifest["world_size"])]:
        return None
    return f"names the files {shown(names)} of {manifest['world_size']} ranks"


def fault_of_tensors(manifest: Mapping[str, Any]) -> str | None:
    """The first tensor whose parts can't be put together to all of it."""
    files = {entry["name"] for entry in manifest["files"]}
    for name, entry in manifest["tensors"].items():
        if not _is_tensor(entry):
            return f"has the tensor {shown(name)} in the wrong form"
        shape, placements = tuple(entry["shape"]), placements_of(entry)
        fault = None
        if any(part["file"] not in files for part in entry["parts"]):
            fault = "one of its parts is in none of the files"
        elif any(placement.shape != shape or not is_sound(placement) for placement in placements):
            fault = "one of its parts can't be one"
        if fault := fault or fault_of_cover(shape, tuple(placements)):
            return f"has the tensor {shown(name)}, but it can't be put together: {fault}"
    return None


def placements_of(entry: Mapping[str, Any]) -> list[Placement]:
    """Which parts of a manifest's tensor lie in the files."""
    return [Placement.of_json(part["placement"]) for part in entry["parts"]]


def shown(value: Any) -> str:
    """The value as an error shows it: not all of it where there is much."""
    return reprlib.repr(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int, but no count


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


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
        and _is_list(entry["shape"], _is_count)
        and _is_text(entry["dtype"])
        and entry["dtype"] in DTYPES
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
    return type(dim) is int and _is_list(blocks, _is_count) and _is_count(part) and _is_count(parts)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and _is_list(group.get("parameters"), _is_text)


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("class"))
        and _is_list(value.get("groups"), _is_group)
        and isinstance(value.get("numbers"), dict)
    )


# What a manifest must have, and whether a value of JSON is that.
_FORM: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "position": _is_count,
    "seed": lambda value: type(value) is int,
    "samples": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "files": lambda value: _is_list(value, _is_file),
    "tensors": lambda value: isinstance(value, dict),
    "optimizer": _is_optimizer,
    "scheduler": lambda value: value is None or isinstance(value, dict),
}
