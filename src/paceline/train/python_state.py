"""State that is Python objects, the user's own and the modules' extra state, as JSON and tensors. Nothing is pickled.

A module's extra state, by torch's `get_extra_state`, is no tensor that ranks have parts of: checkpoints have it as they
have what `job.keep` was handed.

The JSON has numbers, strings, booleans and None as they are and lists as lists; all else is an object with one key,
which says what it is: {"tuple": [...]}, {"tensor": 3}. Tensors and arrays are kept beside it, in a numbered list.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.checkpoint.tensor_file import DTYPES
from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import shown

EXTRA_STATE = "model.extra_state"  # the name under which checkpoints have it
_SUFFIX = "_extra_state"  # of its key in a module's state_dict; torch's own constant is private
_DEEPEST = 100  # levels: what holds itself is found before Python's own limit
_FIX = "keep numbers, strings, lists, dicts, tensors and arrays; checkpoints hold no pickled objects"


def encode(label: str, value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON, and append its tensors to `tensors`.

    Args:
        label: a name of `value` for the error: the object, and the place in it.
        value: an object in a state.
        tensors: the list that gets the tensors, not copied.

    Raises:
        WorkloadError: something in it can be kept neither as JSON nor as a tensor.
    """
    return _Encoder(tensors).encode(label, value, 0)


class _Encoder:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def encode(self, label: str, value: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _refused(label, f"it is nested more than {_DEEPEST} levels deep, or it holds itself")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is list:
            return self._all(label, value, depth)
        return self._tagged(label, value, depth)

    def _tagged(self, label: str, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _MAPPINGS:
            pairs = []
            for key, entry in value.items():
                name = self.encode(f"a key of {label}", key, depth + 1)
                pairs.append([name, self.encode(f"{label}[{key!r:.40}]", entry, depth + 1)])
            return {_MAPPINGS[kind]: pairs}
        if kind in (tuple, torch.Size):
            return {"tuple": self._all(label, value, depth)}
        if kind is set:
            return {"set": self._all(label, sorted(value, key=repr), depth)}
        if kind is collections.deque:
            return {"deque": [self._all(label, value, depth), value.maxlen]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._number_of(label, value)}
        return self._of_numpy(label, value)

    def _all(self, label: str, values: Any, depth: int) -> list[Any]:
        return [self.encode(f"{label}[{number}]", value, depth + 1) for number, value in enumerate(values)]

    def _of_numpy(self, label: str, value: Any) -> Any:
        numpy: Any = sys.modules.get("numpy")  # where nothing has imported it, nothing is of it
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            try:
                array = numpy.array(value)  # a copy: torch takes no negative strides, and warns of what is read-only
                tensor = torch.from_numpy(array)
            except TypeError:
                raise _refused(label, f"it is an array of {value.dtype}") from None
            word = "array" if isinstance(value, numpy.ndarray) else "scalar"
            return {word: self._number_of(label, tensor)}
        raise _refused(label, f"it is {shown(value)}")

    def _number_of(self, label: str, tensor: torch.Tensor) -> int:
        if hasattr(tensor, "to_local"):
            raise _refused(label, "it is a DTensor, of which each rank has a part", "average weights by job.ema")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided:
            raise _refused(label, f"it is a tensor of {dtype}, {tensor.layout}")
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1


_MAPPINGS = {dict: "dict", collections.OrderedDict: "ordered", collections.defaultdict: "dict"}


def _refused(label: str, found: str, fix: str = _FIX) -> WorkloadError:
    return WorkloadError(f"{label} should be something that a checkpoint can keep", found, fix)


def decode(form: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return the value that `encode` was handed; tensors are on the CPU, arrays and tensors copies.

    Raises:
        ValueError, TypeError, LookupError: the JSON is not of `encode`.
    """
    if isinstance(form, list):
        return [decode(value, tensors) for value in form]
    if not isinstance(form, dict):
        return form
    ((word, content),) = form.items()
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


def state_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `model.state_dict(keep_vars=True)`, without the modules' extra state."""
    extra = set(extra_names(model))
    # keep_vars: a tied tensor is one and the same object.
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in extra:
            yield name, value


def extra_names(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules with an extra state by its name in the model's `state_dict`."""
    names: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            names[f"{path}.{_SUFFIX}" if path else _SUFFIX] = module
    return names


class ExtraState:
    """The extra state of all modules of a model, as one object that a checkpoint can keep."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the extra state of each module, by its name."""
        return {name: module.get_extra_state() for name, module in extra_names(self.model).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand each module what it has returned; a module that is new keeps what it has."""
        for name, module in extra_names(self.model).items():
            if name in state:
                module.set_extra_state(state[name])
