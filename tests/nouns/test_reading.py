"""What others wrote is read within limits, or refused in one error."""

from __future__ import annotations

import io
import json
import math
import re
import time
import tomllib
from dataclasses import dataclass

import pytest

from paceline.nouns import reading
from paceline.nouns.errors import PacelineError, ReadError
from paceline.nouns.reading import (
    DEEPEST,
    LARGEST,
    MOST_DIGITS,
    LineFollower,
    Whole,
    as_type,
    fault_of,
    lines_backwards,
    parse_json,
    parse_number,
    parse_whole,
    read_by_rank,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    reason_of,
    shown,
    write_whole,
)

REFUSED = {
    "nothing": (b"", "not JSON"),
    "cut off": (b'{"a": [1, 2', "not JSON"),
    "two values": (b"1 2", "not JSON"),
    "not UTF-8": (b'"\xff"', "not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "nested lists": (b"[" * 100_000, "nested"),
    "nested objects": (b'{"a":' * 100_000, "nested"),
    "nested and closed": (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "nested"),
    "a long number": (b"9" * 5000, "a number of 5000 digits"),
    "a long number in an object": (
        b'{"a": -' + b"9" * (MOST_DIGITS + 1) + b"}",
        f"a number of {MOST_DIGITS + 1} digits",
    ),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_json_within_limits_is_one_error(case):
    content, said = REFUSED[case]
    with pytest.raises(ReadError, match=said) as caught:
        parse_json(content, "plan.json")
    assert caught.value.asked == "can't read plan.json"
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PacelineError)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "value",
    [None, {}, [], "1" * 400, "ä\udcff", 1.5, -3, 10 ** (MOST_DIGITS - 1), [[1], {"a": {"b": [True]}}], math.inf],
)
def test_json_within_limits_is_read_as_it_was_written(value):
    assert parse_json(json.dumps(value), "x") == value


def test_the_deepest_json_is_read():
    value = parse_json("[" * DEEPEST + "]" * DEEPEST, "x")
    for _ in range(DEEPEST - 1):
        (value,) = value
    assert value == []


def test_reading_numbers_near_the_limit_is_as_fast_as_short_ones():
    def least_s(digits):
        text = json.dumps([int("1" * digits)] * (300_000 // digits))
        took_s = []
        for _ in range(5):
            began_s = time.process_time()
            parse_json(text, "x")
            took_s.append(time.process_time() - began_s)
        return min(took_s)

    assert least_s(MOST_DIGITS) < 4 * least_s(MOST_DIGITS // 10)


KEY = ".a" * 20_000
TOML_REFUSED = {
    "a key of many parts": (f"a{KEY} = 1", "line 1 has more than 100 dots"),
    "with spaces": (f"a{KEY.replace('.', ' . ')} = 1", "line 1 has more than 100 dots"),
    "a table of many parts": (f"\n\n[a{KEY}]", "line 3 has more than 100 dots"),
    "quoted parts": ("a" + '."a"' * 20_000 + " = 1", "line 1 has more than 100 dots"),
    "in an inline table": (f"a = {{ a{KEY} = 1 }}", "line 1 has more than 100 dots"),
    "after a text that ends with a quote": (f'a = {{b = """x"""", a{KEY} = 1, "c" = 2}}', "line 1 has more"),
    "after lines of a text": (f'a = """\n"\n"""\nb{KEY} = 1', "line 4 has more than 100 dots"),
    "after an escaped quote": (f'"a\\"".a{KEY} = "b"', "line 1 has more than 100 dots"),
    "after a single quote in a text": (f"\"a'\".b{KEY} = 'c'", "line 1 has more than 100 dots"),
    "a whole number": (f"a = {'9' * 60_000}", "line 1 has a number of more than 300 digits"),
    "a whole number with lines": (f"a = {'9_' * 30_000}9", "line 1 has a number of more than 300 digits"),
    "a fraction": (f"a = 0.{'9' * 60_000}", "line 1 has a number of more than 300 digits"),
}


@pytest.mark.parametrize("case", TOML_REFUSED)
def test_reading_slow_toml_is_refused_before_it_is_parsed(case, tmp_path, monkeypatch):
    content, said = TOML_REFUSED[case]
    (tmp_path / "a.toml").write_text(content)
    monkeypatch.setattr(tomllib, "loads", None)  # it must not be called
    with pytest.raises(ReadError, match=said):
        read_toml(tmp_path / "a.toml")


@pytest.mark.parametrize("opening", ["[", "{a = "])
def test_toml_that_is_nested_too_deep_is_one_error(opening, tmp_path):
    for content in ("a = " + opening * 20_000, f"a = {'[' * 150}{']' * 150}"):
        (tmp_path / "a.toml").write_text(content)
        with pytest.raises(ReadError, match="nested"):
            read_toml(tmp_path / "a.toml")


DOTS, DIGITS = "1." * 5000, "1" * 5000
TOML_READ = {
    "text": f'a = "{DOTS}{DIGITS}"',
    "escapes": f'a = "\\"{DOTS}\\\\"',
    "lines": f'a = """\n{DOTS}\n\\"""{DIGITS}"""""',
    "literal": f"a = '{DOTS}\"'\nb = '''\n{DIGITS}'''''",
    "comment": f"# {DOTS} {DIGITS} 'x\na = 1 # \"",
    "numbers": "a = [" + "1.5,\n" * 500 + "]",
}


@pytest.mark.parametrize("case", TOML_READ)
def test_toml_within_limits_is_read_as_tomllib_reads_it(case, tmp_path):
    (tmp_path / "a.toml").write_text(TOML_READ[case])
    assert read_toml(tmp_path / "a.toml") == tomllib.loads(TOML_READ[case])


def test_files(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ReadError, match="No such file"):
        read_json(path)
    with pytest.raises(ReadError, match="Is a directory"):
        read_json(tmp_path)
    with pytest.raises(ReadError, match="can't be read"):
        read_text(tmp_path / "a\0b")
    path.write_bytes(b'{"a": 1}')
    assert read_json(path, {"a": int}) == {"a": 1}
    assert read_bytes(path, 8) == b'{"a": 1}'
    with pytest.raises(ReadError, match="more than 7 bytes"):
        read_bytes(path, 7)
    with pytest.raises(ReadError, match="its a is 1"):
        read_json(path, {"a": str})


WHOLE = {"0": 0, "7": 7, "0" * 6000 + "7": 7, str(LARGEST): LARGEST, "00": 0}
NO_WHOLE = [
    "",
    "-",
    "+1",
    " 1",
    "1 ",
    "1_000",
    "1.0",
    "1e3",
    "\u0663",
    "\xb2",
    "0x1",
    "-1",
    str(LARGEST + 1),
    "9" * 5000,
]


def test_whole_numbers():
    assert {text: parse_whole(text) for text in WHOLE} == WHOLE
    assert [text for text in NO_WHOLE if parse_whole(text) is not None] == []
    assert parse_whole("-5", least=-5) == -5
    assert parse_whole("-6", least=-5) is None
    assert parse_whole("65536", 1, 65535) is None


def test_numbers():
    found = [parse_number(text) for text in ("1", "-.5", "2.", "1e-3", "+4E2")]
    assert found == [1.0, -0.5, 2.0, 0.001, 400.0]
    refused = ["", "nan", "inf", "-inf", "1e999", "1_0", "soon", ".", "1e", "\u0663", "1" * 5000]
    assert [text for text in refused if parse_number(text) is not None] == []


FORM = {"step": int, "at?": float, "rows": [{"name": str, "size": Whole(1, 9)}], "more?": {str: (None, [bool])}}
FITS = [
    {"step": 1, "rows": []},
    {"step": -LARGEST - 1, "rows": [{"name": "a", "size": 9, "else": {}}], "at": 3, "other": 1},
    {"step": 0, "rows": [], "more": {"x": None, "y": [True]}},
]
FAULTS = {
    "its step is True": {"step": True, "rows": []},
    "its step is 1.0": {"step": 1.0, "rows": []},
    f"its step is {LARGEST + 1}": {"step": LARGEST + 1, "rows": []},
    "it lacks rows": {"step": 1},
    "its rows is {}": {"step": 1, "rows": {}},
    "it lacks rows[1].size": {"step": 1, "rows": [{"name": "a", "size": 1}, {"name": "a"}]},
    "its rows[0].size is 10": {"step": 1, "rows": [{"name": "a", "size": 10}]},
    "its at is nan": {"step": 1, "rows": [], "at": math.nan},
    "its at is None": {"step": 1, "rows": [], "at": None},
    "its more.x[0] is 1": {"step": 1, "rows": [], "more": {"x": [1]}},
    "it is [1]": [1],
}


def test_a_form_is_held_against_what_was_read():
    assert [fault_of(value, FORM) for value in FITS] == [None] * len(FITS)
    assert {fault_of(value, FORM): value for value in FAULTS.values()} == FAULTS


@dataclass
class Row:
    name: str
    sizes: tuple[int, ...]
    rate: float = 0.5


def test_values_of_a_class():
    assert as_type({"name": "a", "sizes": [1, 2], "rate": 3, "more": {}}, Row, "row") == Row("a", (1, 2), 3.0)
    faults = {
        "Expected `int`, got `bool` - at `row.sizes[1]`": {"name": "a", "sizes": [1, True]},
        "Expected `int`, got `float` - at `row.sizes[0]`": {"name": "a", "sizes": [1.0]},
        "Expected `float`, got `str` - at `row.rate`": {"name": "a", "sizes": [], "rate": "1"},
        "Object missing required field `name`": {"sizes": []},
        "Expected `object`, got `array`": [],
    }
    for fault, value in faults.items():
        with pytest.raises(ValueError, match=re.escape(fault)):
            as_type(value, Row, "row")


def test_a_value_in_an_error_is_short():
    for value in ("x" * 10**6, ["y" * 1000] * 1000, {str(n): list(range(100)) for n in range(100)}, 10**299):
        assert len(shown(value)) <= 200
    assert shown("short") == "'short'"


def test_reasons_are_a_few_words():
    assert reason_of(ReadError("can't read x", "it is short", "y")) == "it is short"
    assert reason_of(FileNotFoundError(2, "No such file")) == "No such file"
    assert reason_of(KeyError("a")) == "KeyError: 'a'"


def test_no_error_is_longer_than_a_screen():
    error = ReadError("can't read " + "a" * 10**6, "b" * 10**6, "c" * 10**6)
    assert len(str(error)) < 6100
    assert error.asked.startswith("can't read aaa")
    assert error.asked.endswith("...")


def test_lines_that_come_are_read_once_and_when_they_are_whole(tmp_path):
    path = tmp_path / "lines"
    follower = LineFollower.at_end(path)
    with pytest.raises(FileNotFoundError):
        list(follower.lines())
    path.write_bytes(b"one\ntw\ro\nthr")
    assert list(follower.lines()) == [(0, b"one\n"), (4, b"tw\ro\n")]
    assert list(follower.lines()) == []
    assert (follower.offset, follower.size) == (9, 9), "the last line is being written"
    path.write_bytes(b"one\ntw\ro\nthree\n")
    assert list(follower.lines()) == [(9, b"three\n")]
    assert list(LineFollower.at_end(path).lines()) == []


class Watched(io.FileIO):
    """A file that notes the longest piece that is read of it at once."""

    longest = 0

    def read(self, size=-1):
        piece = super().read(size)
        Watched.longest = max(Watched.longest, len(piece))
        return piece


def test_a_long_line_that_comes_in_pieces_is_passed_over_once(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_READ_BYTES", 10)
    monkeypatch.setattr(reading, "open", lambda path, *_, opener: Watched(path, opener=opener), raising=False)
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 25)
    follower = LineFollower(path)
    assert [line for _, line in follower.lines()] == [b"one\n"]
    assert follower.offset >= 24, "what was read of it is not read again"
    path.write_bytes(b"one\n" + b"x" * 25 + b"\ntwo\n" + b"y" * 9 + b"\n")
    assert [line for _, line in follower.lines()] == [b"two\n", b"y" * 9 + b"\n"]
    assert follower.num_too_long == 1
    assert Watched.longest == 10, "it was never in memory as a whole"


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_lines_from_the_end_on(tmp_path, monkeypatch, block):
    monkeypatch.setattr(reading, "_BLOCK", block)
    path = tmp_path / "lines"
    assert list(lines_backwards(path)) == []
    path.write_bytes(b"one\n\ntwo\nthr")
    assert list(lines_backwards(path)) == [b"thr", b"two", b"", b"one"]
    assert list(lines_backwards(path, most_bytes=5)) == [b"thr"]
    monkeypatch.setattr(reading, "LONGEST_LINE", 4)
    path.write_bytes(b"one\n" + b"x" * 50 + b"\ntwo\n")
    assert [line for line in lines_backwards(path) if line.strip(b"x")] == [b"two", b"one"]


def test_what_ranks_have_written_is_read_by_rank(tmp_path):
    assert read_by_rank(tmp_path / "nowhere", dict) == {}
    for name, text in {"10": '{"a": 1}', "2": '{"a": 2}', "3": "{", "4": "[]", "x": '{"a": 3}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert list(read_by_rank(tmp_path, {"a": int}).items()) == [(2, {"a": 2}), (10, {"a": 1})]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "one")
    monkeypatch.setattr("pathlib.Path.replace", raise_full)
    with pytest.raises(OSError, match="full"):
        write_whole(path, "two")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def raise_full(*_):
    raise OSError(28, "the disk is full")
