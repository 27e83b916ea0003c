"""Align the cells of tables that commands print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_COLUMN = re.compile(r"\{(?::([<>])(\d*))?\}")


def printable(text: str) -> str:
    """Return a text without what a terminal would take for a command, or for the end of a line."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def without_commands(text: str) -> str:
    """Return a text without what a terminal would take for a command, but for colours and tabs."""
    parts = _COLOUR.split(text)
    return "".join(part if at % 2 else "\t".join(map(printable, part.split("\t"))) for at, part in enumerate(parts))


def without_colours(text: str) -> str:
    """Return a text without what a terminal would take for a colour or another command, but for tabs."""
    return without_commands("".join(_COLOUR.split(text)[::2]))


def aligned(rows: Iterable[Sequence[object]], form: str) -> list[str]:
    """Return a line for each row, its cells in columns.

    Args:
        rows: each with a cell for every column of the form.
        form: a line as `str.format` takes it: `{:<8}` is a column of 8 characters, `{:<}` and `{:>}` one as wide as its
            widest cell, `{}` a cell as it is.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    columns = iter(widths)

    def sized(column: re.Match[str]) -> str:
        widest = next(columns, 0)
        alignment, width = column.groups()
        return f"{{:{alignment}{width or widest}}}" if alignment else "{}"

    sized_form = _COLUMN.sub(sized, form)
    return [sized_form.format(*row) for row in texts]
