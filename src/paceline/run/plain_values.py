"""Write and read plain data that a function returned on another process: JSON, with the tensors beside it.

One file of safetensors: its metadata has the value as JSON, in which {"tensor": 3} stands for the tensor "3". A reader
gets no code to run, whoever wrote the file.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.parts import shown
from paceline.nouns.reading import parse_json, reason_of, regular

RETURNED = "returned.safetensors"  # in a run directory: what rank 0 returned
_KEY = "value"  # of the metadata
_PLAIN = (str, int, float)  # and bool, which is an int
_FIX = "return None, numbers, texts, bytes, lists, tuples, dicts, tensors or arrays; write others to a file"


def write_value(path: Path, value: Any, who: str) -> None:
    """Write plain data.

    Args:
        path: the file.
        value: what it is.
        who: returned it.

    Raises:
        UsageError: it is not plain, or can't be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    try:
        text = json.dumps(_encoded(value, tensors))
        save_file(tensors, path, {_KEY: text})
    except _NotPlainError as error:
        raise UsageError(f"{who} should return plain data", f"it returned {error.args[0]}", _FIX) from None
    except (RecursionError, ValueError, OSError) as error:
        raise UsageError(f"can't hand on what {who} returned", reason_of(error), _FIX) from None


def read_value(path: Path) -> Any:
    """Read plain data.

    Raises:
        ReadError: the file is missing, damaged or forged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        return _decoded(parse_json(text, str(path)), tensors)
    except ReadError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReadError(f"can't read {path}", reason_of(error), "return plain data from the function") from None


class _NotPlainError(Exception):
    """Something is no plain data."""


def _encoded(value: Any, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, *_PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()  # a file's tensors share no memory
        return {"tensor": name}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(tensors))
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, tensors) for item in value]}
    for kind in (bool, *_PLAIN):  # a class of the user's own, such as an enumeration of integers
        if isinstance(value, kind):
            return kind(value)
    raise _NotPlainError(shown(value))


def _decoded(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list stands alone")
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "bytes":
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    if kind == "dict":
        return {_decoded(key, tensors): _decoded(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decoded(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"{kind} is no kind of plain data")
