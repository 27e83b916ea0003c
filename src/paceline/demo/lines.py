"""Choose lines of held-out code, each with one token hidden, which the demo has filled in before and after training.

The choice is a rule, made before any training. Of each held-out file in turn it takes the first statement inside a
function that stands on one line of `SHORTEST` to `LONGEST` characters and has a whole word to hide, until there are
`LINES`. The hidden token is the last whole word of the line: `LETTERS` letters or more that are one token. The model
reads it in a sequence as long as those that it is trained on, with the code before and after it. No torch here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.demo.corpus import CLS, LENGTH, MASK, SEP, held_out_files, open_tokenizer
from paceline.nouns.errors import DataError, ReadError
from paceline.nouns.reading import COUNT, read_json

LINES = 8
SHORTEST, LONGEST = 24, 46  # characters: with two tokens beside it, a row has less than 80
LETTERS = 3
GUESSES_BEFORE, GUESSES_AFTER = "guesses-before.json", "guesses-after.json"  # beside the file of the lines
_FORM = {"file": str, "left": str, "hidden": str, "right": str, "ids": [COUNT], "place": COUNT, "answer": COUNT}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code with one token hidden.

    Args:
        file: the name of its file.
        left: the line's text before the token.
        hidden: the token's text, in the file's own letters.
        right: the line's text after the token.
        ids: the sequence that the model reads, with [MASK] for the token.
        place: the index of the token in `ids`.
        answer: the token's number.
    """

    file: str
    left: str
    hidden: str
    right: str
    ids: list[int]
    place: int
    answer: int


def choose_lines(text_folder: Path) -> list[Line]:
    """Return the lines; `text_folder` is the corpus's, with the tokenizer.

    Raises:
        UsageError: the tokenizers library is missing.
    """
    tokenizer = open_tokenizer(text_folder)
    lines: list[Line] = []
    for path in held_out_files():
        line = first_line(path.name, path.read_text(encoding="utf-8", errors="ignore"), tokenizer)
        if line is not None:
            lines.append(line)
        if len(lines) == LINES:
            break
    return lines


def first_line(name: str, text: str, tokenizer: Any) -> Line | None:
    """Return a file's first line that the rule takes; None if it has none."""
    rows = text.split("\n")
    starts = [0]  # the begin of every row, in characters of the text
    for row in rows:
        starts.append(starts[-1] + len(row) + 1)
    encoded = None
    for number in _statement_rows(text):
        row = rows[number]
        if not SHORTEST <= len(row.strip()) <= LONGEST:
            continue
        encoded = encoded or tokenizer.encode(text, add_special_tokens=False)
        end = starts[number] + len(row)
        index = _last_word(text, encoded, starts[number], end)
        if index is not None:
            a, b = encoded.offsets[index]
            ids, place = _sequence(encoded.ids, index)
            prefix, suffix = text[starts[number] : a].lstrip(), text[b:end].rstrip()
            return Line(name, prefix, text[a:b], suffix, ids, place, encoded.ids[index])
    return None


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write the lines as JSON."""
    path.write_text(json.dumps([asdict(line) for line in lines]) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Read the file that `write_lines` wrote.

    Raises:
        DataError: it can't be read.
    """
    try:
        return [Line(**line) for line in read_json(path, [_FORM])]
    except ReadError as error:
        raise DataError(f"the lines in {path}", error.found, "let `paceline demo` write them") from None


def _statement_rows(text: str) -> Iterator[int]:
    """Yield the rows, counted from 0, of statements in functions that stand on one row; docstrings are none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # such as a file for tests of the parser
        return
    rows = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and node.lineno == node.end_lineno and not is_text:
                rows.add(node.lineno - 1)
    yield from sorted(rows)


def _last_word(text: str, encoded: Any, start: int, end: int) -> int | None:
    """Return the index of the last token between two characters that is a whole word of letters."""
    found = None
    for index, (a, b) in enumerate(encoded.offsets):
        if start <= a and b <= end and b - a >= LETTERS and text[a:b].isalpha() and _is_whole(encoded.tokens, index):
            found = index
    return found


def _is_whole(tokens: Sequence[str], index: int) -> bool:
    return not any(token.startswith("##") for token in tokens[index : index + 2])


def _sequence(ids: Sequence[int], index: int) -> tuple[list[int], int]:
    """Return the sequence around a token, which is in its middle unless the file ends before, and its place there."""
    body = LENGTH - 2  # without [CLS] and [SEP]
    first = max(0, min(index - body // 2, len(ids) - body))
    window = list(ids[first : first + body])
    window[index - first] = MASK
    return [CLS, *window, SEP], index - first + 1
