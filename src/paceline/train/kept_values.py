"""Turn a person's own state into JSON and tensors, and back. Nothing is pickled.

The JSON has numbers, strings, booleans and None as they are and lists as lists; all else is an object with one key,
which says what it is: {"tuple": [...]}, {"tensor": 3}. Tensors and arrays are kept beside it, in a numbered list.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from paceline.checkpoint.tensor_file import DTYPES
from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import shown

_DEEPEST = 100  # levels: what holds itself is found before Python's own limit
_FIX = "keep numbers, strings, lists, dicts, tensors and arrays; checkpoints hold no pickled objects"


def encode(what: str, value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON, and append its tensors to `tensors`.

    Args:
        what: `value` is, for the error: the name of the object, and where in it.
        value: of a state.
        tensors: gets the tensors, not copied.

    Raises:
        WorkloadError: something in it can be kept neither as JSON nor as a tensor.
    """
    return _Encoder(tensors).encode(what, value, 0)


class _Encoder:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def encode(self, what: str, value: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _refused(what, f"it is nested more than {_DEEPEST} levels deep, or it holds itself")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is list:
            return self._all(what, value, depth)
        return self._tagged(what, value, depth)

    def _tagged(self, what: str, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _MAPPINGS:
            pairs = []
            for key, entry in value.items():
                name = self.encode(f"a key of {what}", key, depth + 1)
                pairs.append([name, self.encode(f"{what}[{key!r:.40}]", entry, depth + 1)])
            return {_MAPPINGS[kind]: pairs}
        if kind in (tuple, torch.Size):
            return {"tuple": self._all(what, value, depth)}
        if kind is set:
            return {"set": self._all(what, sorted(value, key=repr), depth)}
        if kind is collections.deque:
            return {"deque": [self._all(what, value, depth), value.maxlen]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._number_of(what, value)}
        return self._of_numpy(what, value)

    def _all(self, what: str, values: Any, depth: int) -> list[Any]:
        return [self.encode(f"{what}[{number}]", value, depth + 1) for number, value in enumerate(values)]

    def _of_numpy(self, what: str, value: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")  # where nothing has imported it, nothing is of it
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            try:
                array = numpy.array(value)  # a copy: torch takes no negative strides, and warns of what is read-only
                tensor = torch.from_numpy(array)
            except TypeError:
                raise _refused(what, f"it is an array of {value.dtype}") from None
            word = "array" if isinstance(value, numpy.ndarray) else "scalar"
            return {word: self._number_of(what, tensor)}
        raise _refused(what, f"it is {shown(value)}")

    def _number_of(self, what: str, tensor: torch.Tensor) -> int:
        if hasattr(tensor, "to_local"):
            raise _refused(what, "it is a DTensor, of which each rank has a part", "average weights by job.ema")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided:
            raise _refused(what, f"it is a tensor of {dtype}, {tensor.layout}")
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1


_MAPPINGS = {dict: "dict", collections.OrderedDict: "ordered", collections.defaultdict: "dict"}


def _refused(what: str, found: str, fix: str = _FIX) -> WorkloadError:
    return WorkloadError(f"{what} should be something that a checkpoint can keep", found, fix)


def decode(kept: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return what `encode` was handed; tensors are on the CPU, arrays and tensors copies.

    Raises:
        ValueError, TypeError, LookupError: the JSON is not of `encode`.
    """
    if isinstance(kept, list):
        return [decode(value, tensors) for value in kept]
    if not isinstance(kept, dict):
        return kept
    ((word, content),) = kept.items()
    if word in ("tensor", "array", "scalar"):
        tensor = tensors[content].clone()
        if word == "tensor":
            return tensor
        array = tensor.numpy()
        return array if word == "array" else array[()]
    if word in ("dict", "ordered"):
        pairs = [(decode(key, tensors), decode(value, tensors)) for key, value in content]
        return dict(pairs) if word == "dict" else collections.OrderedDict(pairs)
    return _SIMPLE[word](content, tensors)


def _deque(content: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    values, longest = content
    return collections.deque(decode(values, tensors), longest)


_SIMPLE: dict[str, Any] = {
    "float": lambda content, _: float(content),
    "tuple": lambda content, tensors: tuple(decode(content, tensors)),
    "set": lambda content, tensors: set(decode(content, tensors)),
    "deque": _deque,
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
}
