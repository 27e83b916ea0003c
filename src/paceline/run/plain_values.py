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

RETURNED = "returned.safetensors"  # rank 0's returned value, in a run directory
_KEY = "value"  # the key of the metadata
_PLAIN = (str, int, float)  # bool is an int, too
_FIX = "return None, numbers, texts, bytes, lists, tuples, dicts, tensors or arrays; write others to a file"
_FIX_MODEL = (
    "return its weights, on every rank: job.whole_model().state_dict(), or in a loop of your own model.state_dict() "
    "inside `with job.gathered():`"
)


def check_value(value: Any, who: str) -> tuple[str, dict[str, Any]]:
    """Return plain data as JSON and the tensors in it.

    Args:
        value: the value that was returned.
        who: the name of the function that returned it, for errors.

    Raises:
        UsageError: it is not plain.
    """
    from paceline.comm.dtypes import fault_of

    tensors: dict[str, Any] = {}
    try:
        text = json.dumps(_encoded(value, tensors))
    except _NotPlainError as error:
        (part,) = error.args
        found = f"it returned {shown(part)}"
        raise UsageError(f"{who} should return plain data", found, _FIX_MODEL if _is_model(part) else _FIX) from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"can't hand on what {who} returned", reason_of(error), _FIX) from None
    for tensor in tensors.values():
        fault = fault_of(tensor)
        if fault is not None:
            fix = fault[1].replace("hand in", "return")
            raise UsageError(f"{who} should return dense tensors", f"of one that it returned: {fault[0]}", fix)
    return text, tensors


def write_value(path: Path, value: Any, who: str) -> None:
    """Write plain data.

    Args:
        path: the file to write.
        value: the value that was returned.
        who: the name of the function that returned it, for errors.

    Raises:
        UsageError: it is not plain, or can't be written.
    """
    from safetensors.torch import save_file

    text, tensors = check_value(value, who)
    # Clones: a file's tensors share no memory.
    content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(content, path, {_KEY: text})
    except (KeyError, ValueError, OSError) as error:
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


def value_of(text: str, tensors: dict[str, Any], source: str) -> Any:
    """Return the value that `check_value` returned as JSON and tensors.

    Args:
        text: the JSON.
        tensors: by name.
        source: where the text is from, for errors.

    Raises:
        ReadError: it is damaged or forged.
    """
    try:
        return _decoded(parse_json(text, source), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReadError(f"can't read {source}", reason_of(error), "send plain data") from None


class _NotPlainError(Exception):
    """A value is no plain data; the argument of the exception is that value."""


def _is_model(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _encoded(value: Any, tensors: dict[str, Any]) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, *_PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
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
    raise _NotPlainError(value)


def _decoded(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):  # lists are written as {"list": [...]}
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
