"""Makes inputs that a reader should accept or refuse: valid ones, changed byte by byte or part by part, and noise."""

from __future__ import annotations

import json
import random
import re
from typing import Any

MANY_DIGITS = 6000  # Python refuses to read a number of more than 4,300
MANY_LEVELS = 100_000
_DIGITS, _LEVELS = "@digits@", "@levels@"  # become what json.dumps can't write
_NUMBER = re.compile(rb"[0-9]+")
_WORDS = [b"", b"=", b",", b":", b"/", b"-", b"[", b"]", b"(", b")", b"x", b"#", b"\n", b"\0", b" ", b"\t", b"%", b"'"]
_WORDS += [b'"', b".a", b"{a: ", b"&a ", b"*a, "]
_ODD = [
    "\u0663".encode(),
    "\xb2".encode(),
    b"\xff",
    b"\xed\xa0\x80",
    "\ufeff".encode(),
    b"1e999",
    b"nan",
    b"inf",
    b"-1",
]
_NUMBERS = [0, 1, -1, 2, 255, 65536, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**15, 10**18, 10**40, 10**299, 10**4000]
_REALS = [0.0, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]
_TEXTS = ["", "x", "0", "1" * 30, "../..", "a\0b", "\udcff", "ä", "x" * 10_000, "[", "=", "1=2", "None", _DIGITS]


def changed(seed: bytes, dice: random.Random) -> bytes:
    """One input: the seed as it is, changed a few times, or replaced by noise."""
    kind = dice.random()
    if kind < 0.03:
        return seed
    if kind < 0.08:
        return dice.randbytes(dice.choice([0, 1, 7, 100, 5000]))
    is_json = seed.lstrip()[:1] in (b"{", b"[") or b'{"' in seed
    if is_json and kind < 0.75:
        return _changed_json(seed, dice)
    content = seed
    for _ in range(dice.choice([1, 1, 1, 2, 3, 8])):
        content = _changed_bytes(content, dice)
    return content


def _changed_bytes(content: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(content) + 1)
    end = min(len(content), at + dice.choice([1, 1, 2, 5, 20, 200]))
    ways = dice.randrange(9)
    if ways == 0:  # cut off
        return content[:at]
    if ways == 1:  # a part is missing
        return content[:at] + content[end:]
    if ways == 2:  # a part twice, or very often
        return content[:at] + content[at:end] * dice.choice([2, 3, 1000]) + content[end:]
    if ways == 3 and content:  # a bit
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]
    if ways == 4:  # another number
        return _other_number(content, dice)
    if ways == 5:
        return content[:at] + dice.choice(_WORDS) * dice.choice([1, 1, 2, 50, 20_000]) + content[at:]
    if ways == 6:
        return content[:at] + dice.choice(_ODD) + content[end:]
    if ways == 7:
        return content[:at] + dice.randbytes(dice.choice([1, 4, 64])) + content[end:]
    other = dice.randrange(len(content) + 1)  # two parts are exchanged
    low, high = sorted((at, other))
    return content[high:] + content[low:high] + content[:low]


def _other_number(content: bytes, dice: random.Random) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return content + b"9" * MANY_DIGITS
    match = dice.choice(found)
    number = dice.choice([b"9" * MANY_DIGITS, b"0" * MANY_DIGITS + match[0], b"%d" % dice.choice(_NUMBERS), b""])
    return content[: match.start()] + number + content[match.end() :]


def _changed_json(seed: bytes, dice: random.Random) -> bytes:
    """JSON, or lines of it, with another value, a key less, more or twice somewhere."""
    lines = seed.split(b"\n")
    number = dice.choice([at for at, line in enumerate(lines) if line.strip()])
    try:
        value = json.loads(lines[number]) if len(lines) > 2 else json.loads(seed)
    except ValueError:
        return _changed_bytes(seed, dice)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        value = changed_value(value, dice)
    content = written(value, dice)
    if len(lines) <= 2:
        return content
    return b"\n".join([*lines[:number], content, *lines[number + 1 :]])


def written(value: Any, dice: random.Random) -> bytes:
    """A changed value as JSON, with numbers and levels that the library would not write."""
    content = json.dumps(value).encode()
    content = content.replace(b'"%s"' % _DIGITS.encode(), b"9" * MANY_DIGITS)
    if _LEVELS.encode() in content:
        content = content.replace(b'"%s"' % _LEVELS.encode(), _nested(dice))
    if dice.random() < 0.05 and content[:1] == b"{":  # every key twice
        content = content[:-1] + (b", " if len(content) > 2 else b"") + content[1:]
    return content


def _nested(dice: random.Random) -> bytes:
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = dice.choice([50, 99, 101, 900, MANY_LEVELS])
    return opening * depth + b"1" + (closing * depth if dice.random() < 0.7 else b"")


def changed_value(value: Any, dice: random.Random) -> Any:
    """A copy of decoded JSON with one change somewhere."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.1:
        return _odd_value(value, dice)
    if isinstance(value, dict):
        key = dice.choice(list(value))
        way = dice.random()
        if way < 0.15:
            return {other: one for other, one in value.items() if other != key}
        if way < 0.2:
            return {**value, dice.choice(_TEXTS): _odd_value(None, dice)}
        return {**value, key: changed_value(value[key], dice)}
    at = dice.randrange(len(value))
    way = dice.random()
    if way < 0.1:
        return value[:at] + value[at + 1 :]
    if way < 0.15:
        return [*value, value[at]]
    return [*value[:at], changed_value(value[at], dice), *value[at + 1 :]]


def _odd_value(before: Any, dice: random.Random) -> Any:
    ways: list[Any] = [
        None,
        True,
        False,
        dice.choice(_NUMBERS),
        -dice.choice(_NUMBERS),
        dice.choice(_REALS),
        dice.choice(_TEXTS),
        [],
        {},
        [before],
        {"a": before},
        [before, before],
        _LEVELS,
        _DIGITS,
    ]
    return dice.choice(ways)
