"""Read and write safetensors files tensor by tensor, without torch: mapped to be read, streamed to be written.

The format is eight bytes of the header's length, a header of JSON, and the tensors' raw bytes
(huggingface.co/docs/safetensors). The library would make tensors of one framework of it, and wants all
of a file's tensors in memory to write it; a checkpoint is read by parts of tensors, and exported without
any framework.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.nouns.errors import CheckpointError
from paceline.nouns.reading import COUNT, fault_of, is_shape, parse_json, reason_of, regular, shown

# torch's names of dtypes: the format's, and bytes an element.
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    # The format has no such dtype: the real and the imaginary part are in a last dimension of size 2.
    "complex128": ("F64", 16),
}
_PAIRS = ("complex128",)
PAIRS_KEY = "complex128"  # of the metadata: the names of the tensors that are stored so, as a list in JSON
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
METADATA = "__metadata__"  # a key of the header that is no tensor


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """A tensor's shape and dtype, as torch names it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def stored_shape(self) -> list[int]:
        """The shape that the file's header says."""
        return [*self.shape, 2] if self.dtype in _PAIRS else list(self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors, mapped: only what is looked at is read."""

    path: Path
    content: mmap.mmap
    begin: int  # of the tensors' bytes
    header: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Map the file and read its header.

        Raises:
            CheckpointError: it is missing, or no file of tensors.
        """
        try:
            with open(path, "rb", opener=regular) as file:
                # ACCESS_COPY: torch.frombuffer warns of memory that can't be written. Pages that are only read are not
                # copied.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # Bounded before it is read: a damaged length must not ask for memory.
            length = int.from_bytes(content[:8], "little")
            if length > min(len(content) - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header would be longer than the file")
            header = parse_json(content[8 : 8 + length], "its header", {str: dict})
        except (OSError, ValueError) as error:
            raise _bad(path, f"it is something else ({reason_of(error)})") from None
        return cls(path, content, 8 + length, header)

    def forms(self) -> dict[str, TensorFormat]:
        """Return the shape and dtype of every tensor in the file.

        Raises:
            CheckpointError: the header says something else of one.
        """
        names = {code: name for name, (code, _) in DTYPES.items() if name not in _PAIRS}
        pairs = self._pairs()
        forms = {}
        for key, entry in self.header.items():
            if key == METADATA:
                continue
            dtype = names.get(str(entry.get("dtype")))
            if dtype is None or not is_shape(entry.get("shape"), DTYPES[dtype][1]):
                raise _bad(self.path, f"its {shown(key)} is no tensor")
            form = TensorFormat(tuple(entry["shape"]), dtype)
            if key in pairs:
                form = TensorFormat(form.shape[:-1], PAIRS_KEY)
                if list(entry["shape"]) != form.stored_shape:
                    raise _bad(self.path, f"its {shown(key)} is no tensor of complex numbers")
            forms[key] = form
        return forms

    def _pairs(self) -> set[str]:
        """Return the names of the tensors of complex numbers that are in a last dimension of size 2."""
        text = self.header.get(METADATA, {}).get(PAIRS_KEY)
        if text is None:
            return set()
        try:
            return set(parse_json(text, f"its {PAIRS_KEY}", [str]))
        except (TypeError, ValueError) as error:
            raise _bad(self.path, f"its metadata are something else ({reason_of(error)})") from None

    def place(self, key: str, form: TensorFormat) -> tuple[int, int]:
        """Return the offset in the file and the elements of the tensor `key`, which must be of this form.

        Raises:
            CheckpointError: it is not there, or is something else.
        """
        entry = self.header.get(key)
        name = shown(key)[1:-1]  # without the quotes
        if not isinstance(entry, dict):
            raise _bad(self.path, f"it lacks {name}")
        if (entry.get("dtype"), entry.get("shape")) != (DTYPES[form.dtype][0], form.stored_shape):
            actual = f"{shown(entry.get('dtype'))} of shape {shown(entry.get('shape'))}"
            raise _bad(self.path, f"its {name} is {actual}, not {form.dtype} of shape {shown(list(form.shape))}")
        offsets: Any = entry.get("data_offsets")
        if fault_of(offsets, [COUNT]) or len(offsets) != 2:
            raise _bad(self.path, f"its {name} lies outside of it")
        start, stop = offsets
        if stop > len(self.content) - self.begin:
            raise _bad(self.path, f"its {name} lies outside of it")
        # A view by shape would otherwise reach into the next tensor.
        if stop - start != form.nbytes:
            raise _bad(self.path, f"its {name} has {stop - start} bytes, not {form.nbytes}")
        return self.begin + int(start), math.prod(form.shape)


def write_tensors(
    file: BinaryIO, forms: Mapping[str, TensorFormat], tensors: Iterable[tuple[str, Any]], metadata: Mapping[str, str]
) -> None:
    """Write a whole file; `tensors` yields names and contiguous buffers in the order of `written_order(forms)`."""
    header: dict[str, Any] = {METADATA: {**metadata, **pairs_metadata(forms)}}
    offset = 0
    for name in written_order(forms):
        form = forms[name]
        header[name] = {
            "dtype": DTYPES[form.dtype][0],
            "shape": form.stored_shape,
            "data_offsets": [offset, offset + form.nbytes],
        }
        offset += form.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format allows spaces; the tensors then begin at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for _, content in tensors:
        file.write(content)


def pairs_metadata(forms: Mapping[str, TensorFormat]) -> dict[str, str]:
    """Return the metadata of a file for tensors whose complex numbers are in a last dimension of size 2."""
    names = sorted(name for name, form in forms.items() if form.dtype in _PAIRS)
    return {PAIRS_KEY: json.dumps(names)} if names else {}


def written_order(forms: Mapping[str, TensorFormat]) -> Iterator[str]:
    """Yield names, wide elements first, so that every tensor begins at a multiple of its element's size."""
    yield from sorted(forms, key=lambda name: (-forms[name].item_bytes, name))


def _bad(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{path} should hold tensors", found, "use an earlier checkpoint")
