"""Read data from other programs: JSON, TOML, numbers and text from disks, peers, variables and child processes.

All of these can hold anything. What a function here returns is bounded: JSON and TOML are UTF-8, at most DEEPEST levels
deep, have no key twice and no number of over MOST_DIGITS digits. Anything else is one ReadError, which is also a
ValueError. Each takes time in proportion to what is read.
`fault_of` checks by a form, and `as_type` by a class, whether the values are those that are wanted.

Files that others may have made are opened by `open(path, mode, opener=regular)`, here and elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import reprlib
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from paceline.nouns.errors import ReadError, UsageError

DEEPEST = 100  # levels of lists and objects; Python's own recursion ends at about 1,000
MOST_DIGITS = 300  # the most digits of a whole number: it then still fits in a float
MOST_BYTES = 2**24  # the largest file, where the caller names no other limit
LONGEST_LINE = 2**21  # bytes; the longest that a job writes, a text that its loop logs, has 1.2 million
LARGEST = 2**63 - 1  # the largest whole number that torch, numpy and the kernel take
_READ_BYTES = LONGEST_LINE  # bytes that are read at once of a file that grows
_BLOCK = 2**16  # the same from a file's end
_MOST_DIMS = 64  # the most dimensions of a tensor: numpy's limit
_LONGEST_SHOWN = 200  # characters of a value in an error
_CHUNK_BYTES = 2**20
_NOT_REGULAR = "not a regular file"
_FIX = "make it again with this version of Paceline"
# Tried where digits begin: a text of many numbers that are almost as long would take 300 times as long otherwise.
_LONG_NUMBER = re.compile(f"(?<![0-9])[0-9]{{{MOST_DIGITS + 1}}}")
# Texts and comments of TOML; one that does not end goes to the end of its line, or of the file.
_TOML_TEXT = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)|"(?:\\.|[^"\\\n])*"?|#[^\n]*'''
    r"""|'''.*?(?:'{3,5}|\Z)|'[^'\n]*'?""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _LONGEST_SHOWN
_SHORT.maxother = _LONGEST_SHOWN
_SHORT.maxlong = _LONGEST_SHOWN
_SHORT.maxlevel = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """The form of a whole number within limits, for `fault_of`."""

    least: int = 0
    most: int = LARGEST


COUNT = Whole()
NUMBER = "number"
_T = TypeVar("_T")
# A form is one of: bool, str, list, dict, object (anything), None; int (64 bits, signed); float (such an int, or a
# finite float); NUMBER (as float, or an infinity or NaN); a Whole; a tuple of forms, of which one is enough; [form], a
# list; {str: form}, an object with any keys; {"key": form}, an object with these keys and maybe others. A key that
# ends with "?" may be missing.
Form = Any


def shown(value: Any) -> str:
    """Return the value as an error shows it: at most 200 characters."""
    text = _SHORT.repr(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[: _LONGEST_SHOWN - 3]}..."


def reason_of(error: Exception) -> str:
    """Return the reason why something could not be read, for an error of the caller's own."""
    if isinstance(error, ReadError):
        return error.found
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def regular(path: str, flags: int) -> int:
    """Open a regular file, and nothing else: the `opener` of `open`.

    Opening a FIFO waits for its other end, and a device such as /dev/zero never ends.

    Args:
        path: the path of the file, or of a link to it.
        flags: the flags of `os.open`.

    Returns:
        The descriptor of the open file.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO that is to be written and that nobody reads
            raise OSError(errno.EINVAL, _NOT_REGULAR, path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _NOT_REGULAR, path)


class LineFollower:
    """Read the lines of a file that grows, each once and only when it is whole, in chunks of a bounded size.

    Args:
        path: the path of the file, which may be missing yet.
        offset: the byte to begin with.

    Attributes:
        offset: the byte up to which the file has been read.
        size: the size of the file when it was last read, without a last line that has no end yet.
        num_too_long: the number of lines that are longer than a chunk; they are passed over.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.size = 0
        self.num_too_long = 0
        self._is_in_long_line = False

    @classmethod
    def at_end(cls, path: Path) -> LineFollower:
        """Return a follower that reads only lines that are written from now on."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self, seconds: float = math.inf) -> Iterator[tuple[int, bytes]]:
        """Yield the offset of each line since the last call, and the line; stop after about `seconds`.

        Raises:
            OSError: the file can't be read.
        """
        until_s = time.perf_counter() + seconds
        with open(self.path, "rb", opener=regular) as file:
            self.size = os.fstat(file.fileno()).st_size
            file.seek(self.offset)
            while time.perf_counter() < until_s:
                chunk = file.read(_READ_BYTES)
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) < _READ_BYTES:
                    self.size = self.offset  # the last line is being written
                    return
                if not end:
                    end = len(chunk)
                    self.num_too_long += not self._is_in_long_line
                    self._is_in_long_line = True
                yield from self._lines_in(chunk[:end])
                file.seek(self.offset)

    def _lines_in(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        for line in io.BytesIO(chunk):
            offset = self.offset
            self.offset += len(line)
            if not self._is_in_long_line:
                yield offset, line
            self._is_in_long_line = self._is_in_long_line and not line.endswith(b"\n")


def lines_backwards(path: Path, most_bytes: int = LARGEST) -> Iterator[bytes]:
    """Yield the lines of a file without their ends, the last one first; nothing where it can't be read.

    A line of which only the end is read is left out. Of one that is longer than LONGEST_LINE a part may come.

    Args:
        path: the path of the file.
        most_bytes: the largest number of bytes that are read, from the file's end.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            end = file.seek(0, os.SEEK_END)
            least = max(0, end - most_bytes)
            line_end = b""  # the end of a line that begins in an earlier block
            while end > least:
                begin = max(least, end - _BLOCK)
                file.seek(begin)
                first, *lines = (file.read(end - begin) + line_end).split(b"\n")
                yield from reversed(lines)
                end = begin
                line_end = first if len(first) <= LONGEST_LINE else b""
            if not least:
                yield line_end
    except OSError:
        return


def read_by_rank(folder: Path, form: Form) -> dict[int, Any]:
    """Return the JSON in each rank's file `RANK.json` of a folder, by rank; files of another form are left out."""
    found = {}
    for path in folder.glob("*.json"):
        rank = parse_whole(path.stem)
        if rank is not None:
            with contextlib.suppress(ReadError):
                found[rank] = read_json(path, form)
    return dict(sorted(found.items()))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it sees the old content, or all of the text.

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read all of a file.

    Raises:
        ReadError: it can't be read, or is longer than `most_bytes`.
    """
    content = bytearray()
    try:
        with open(path, "rb", opener=regular) as file:
            while len(content) <= most_bytes:  # in chunks: a file that never ends must not fill the memory
                chunk = file.read(_CHUNK_BYTES)
                if not chunk:
                    break
                content += chunk
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = reason_of(error)
        fix = "write it to a regular file" if reason == _NOT_REGULAR else "see that it is there"
        raise ReadError(f"can't read {path}", f"it can't be read ({reason})", fix) from None
    if len(content) > most_bytes:
        raise ReadError(f"can't read {path}", f"it has more than {most_bytes} bytes", "see what wrote it")
    return bytes(content)


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read all of a file of UTF-8.

    Raises:
        ReadError: it can't be read, is longer than `most_bytes`, or is not UTF-8.
    """
    return _decoded(read_bytes(path, most_bytes), str(path))


def read_json(path: Path, form: Form = object, most_bytes: int = MOST_BYTES) -> Any:
    """Read the JSON in a file and check it against a form.

    Raises:
        ReadError: it can't be read, is no JSON within the limits, or is not of the form.
    """
    return parse_json(read_bytes(path, most_bytes), str(path), form)


def read_toml(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read the TOML in a file.

    Raises:
        ReadError: it can't be read, or is no TOML within the limits.
    """
    import tomllib  # few commands need it

    text = read_text(path, most_bytes).removeprefix("\ufeff")  # as editors on Windows begin it
    source = str(path)
    # Before it is parsed: tomllib takes time and memory quadratic in the parts of a key, and int() in the digits.
    outside_texts = _TOML_TEXT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(outside_texts.split("\n"), 1):
        if line.count(".") > DEEPEST:
            raise _bad(source, f"line {number} has more than {DEEPEST} dots outside of texts")
        if _LONG_NUMBER.search(line.replace("_", "")):
            raise _bad(source, f"line {number} has a number of more than {MOST_DIGITS} digits")
    try:
        value = tomllib.loads(text)
        _check_depth(value)
    except RecursionError:
        raise _bad(source, _TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise _bad(source, f"it is not TOML ({error})") from None
    except ValueError as error:
        raise _bad(source, str(error)) from None
    return value


def parse_json(
    content: str | bytes | bytearray | memoryview,
    source: str,
    form: Form = object,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Decode JSON and check it against a form.

    Args:
        content: the JSON as text or UTF-8.
        source: the name of the source, for the error.
        form: the form that the value should have; see `Form`.
        pairs: a function that makes an object of its keys and values; without it, a key that stands twice is refused.

    Raises:
        ReadError: it is no JSON within the limits, or is not of the form.
    """
    text = content if isinstance(content, str) else _decoded(content, source)
    try:
        # int() takes time quadratic in the digits. A hook for each number is slow, so it is set only for a text that
        # has so many digits in a row.
        parse_int = _int_of_json if _LONG_NUMBER.search(text) else None
        value = json.loads(text, parse_int=parse_int, object_pairs_hook=pairs or _object_of)
        if text.count("[") + text.count("{") > DEEPEST:
            _check_depth(value)
    except json.JSONDecodeError as error:
        raise _bad(source, f"it is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise _bad(source, _TOO_DEEP) from None
    except ValueError as error:
        raise _bad(source, str(error)) from None
    fault = fault_of(value, form)
    if fault is not None:
        raise _bad(source, fault)
    return value


def parse_whole(text: str, least: int = 0, most: int = LARGEST) -> int | None:
    """Return the whole number in a text of ASCII digits, perhaps after a minus sign; None if out of range."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(LARGEST)):  # before int(): see `parse_json`
        return None
    number = int(digits)
    if text.startswith("-"):
        number = -number
    return number if least <= number <= most else None


def parse_number(text: str) -> float | None:
    """Return the finite number in a text, such as 5, 0.5 or 1e-3; None if it is none."""
    if len(text) > MOST_DIGITS or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def number(text: str) -> float:
    """Return the finite number in an argument of a command, for argparse.

    Raises:
        ValueError: it is none.
    """
    parsed = parse_number(text)
    if parsed is None:
        raise ValueError(text)
    return parsed


def parse_steps(text: str, name: str) -> tuple[int, int]:
    """Return the first and the last step of a range that a flag or a variable states.

    Args:
        text: FIRST:LAST, both included, such as 20:25; or one step, such as 20.
        name: the name of the flag or variable, for the error.

    Raises:
        UsageError: the text is no such range; steps count from 1.

    Examples:
        >>> from paceline.nouns.reading import parse_steps
        >>> parse_steps("20:25", "--steps"), parse_steps("7", "--steps")
        ((20, 25), (7, 7))
    """
    words = text.split(":")
    numbers = [parse_whole(word) for word in words]
    first, last = numbers[0], numbers[-1]
    if len(words) > 2 or first is None or last is None or not 1 <= first <= last:
        found = "it is no range of steps, which count from 1"
        raise UsageError(f"{name} {shown(text)[1:-1]}", found, f"write {name} 10:20")
    return first, last


def fault_of(value: object, form: Form, place: str = "") -> str | None:
    """Return the first fault by which `value` is not of `form`, in a sentence that begins with "it"; None: no fault.

    Args:
        value: a value of decoded JSON.
        form: the form that it should have; see `Form`.
        place: the way to `value` in the whole, such as `workers[0].clock`.
    """
    if isinstance(form, tuple):
        # Of several forms none of which fits, the last one's fault is told.
        faults = [fault_of(value, alternative, place) for alternative in form]
        return None if None in faults else faults[-1]
    if isinstance(form, list):
        return _fault_of_list(value, form[0], place)
    if isinstance(form, dict):
        return _fault_of_object(value, form, place)
    return None if _is_of(value, form) else _mismatch(place, value)


def as_type(value: object, kind: type[_T], place: str) -> _T:
    """Return decoded JSON as a dataclass or a msgspec.Struct, after a check of every value.

    Args:
        value: a value of decoded JSON.
        kind: a class whose annotations describe the values.
        place: the name of `value` in the error.

    Raises:
        ValueError: it is something else.
    """
    import msgspec  # takes a tenth of the time in which a command starts, and most commands don't need it

    try:
        return msgspec.convert(value, kind)
    except ValueError as error:
        # Such as "Expected `int`, got `str` - at `$.rows[0]`". An unknown key in it can be of any length.
        raise ValueError(f"{error!s:.{_LONGEST_SHOWN}}".replace("`$", f"`{place}")) from None


def is_shape(value: Any, item_bytes: int) -> TypeGuard[list[int]]:
    """Return True if decoded JSON is the shape of a tensor that a file or a computer's memory could hold."""
    if fault_of(value, [COUNT]) or len(value) > _MOST_DIMS:
        return False
    # Sizes of 0 are left out: strides are computed from the others in an empty tensor too.
    return bool(math.prod(size for size in value if size) * item_bytes <= LARGEST)


def _fault_of_list(value: object, form: Form, place: str) -> str | None:
    if not isinstance(value, list):
        return _mismatch(place, value)
    for index, item in enumerate(value):
        fault = fault_of(item, form, f"{place}[{index}]")
        if fault is not None:
            return fault
    return None


def _fault_of_object(value: object, form: Mapping[Any, Form], place: str) -> str | None:
    if not isinstance(value, dict):
        return _mismatch(place, value)
    if str in form:
        forms = dict.fromkeys(value, form[str])
    else:
        for key in form:
            if not key.endswith("?") and key not in value:
                return f"it lacks {_within(place, key)}"
        forms = {key.removesuffix("?"): form_of_key for key, form_of_key in form.items()}
    for key, form_of_key in forms.items():
        if key not in value:  # it may be missing
            continue
        fault = fault_of(value[key], form_of_key, _within(place, key))
        if fault is not None:
            return fault
    return None


def _is_of(value: object, form: Form) -> bool:
    """Return True if a value is of a form that is no tuple, list or dict of forms."""
    if isinstance(form, Whole):
        return type(value) is int and form.least <= value <= form.most  # bool is an int, but no number of anything
    if form is int:
        return type(value) is int and -LARGEST - 1 <= value <= LARGEST
    if form is float:
        return _is_of(value, int) or (type(value) is float and math.isfinite(value))
    if form is NUMBER:
        return type(value) is float or _is_of(value, int)
    if form is None:
        return value is None
    return isinstance(value, form)


def _within(place: str, key: str) -> str:
    """Return the way to a key of the object at `place`."""
    key = key.removesuffix("?")
    return f"{place}.{key[:_LONGEST_SHOWN]}" if place else key[:_LONGEST_SHOWN]


def _mismatch(place: str, value: object) -> str:
    return f"its {place} is {shown(value)}" if place else f"it is {shown(value)}"


_TOO_DEEP = f"it is nested more than {DEEPEST} deep"


def _object_of(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    """Return an object of its keys and values; raise ValueError if a key stands twice."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise ValueError(f"it has the key {shown(key)} twice in one object")
        keys.add(key)
    return result


def _int_of_json(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits.lstrip('-'))} digits")
    return int(digits)


def _check_depth(value: object) -> None:
    """Raise ValueError where lists and objects are nested more than DEEPEST deep."""
    # Level by level, without recursion: a value may be nested as deep as json.loads lets it.
    level = [value]
    for _ in range(DEEPEST):
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level.extend(item.values())
            elif isinstance(item, list):
                next_level.extend(item)
        if not next_level:
            return
        level = next_level
    raise ValueError(_TOO_DEEP)


def _decoded(content: bytes | bytearray | memoryview, source: str) -> str:
    try:
        return bytes(content).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(source, f"it is not UTF-8 (byte {error.start})") from None


def _bad(source: str, found: str) -> ReadError:
    return ReadError(f"can't read {source}", found, _FIX)
