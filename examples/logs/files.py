"""Files of data sets: plain or packed with xz, and an error that says where to get one that is missing."""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Iterator
from pathlib import Path

from paceline.nouns.errors import DataError, UsageError


def present(folder: Path, name: str, fix: str) -> Path:
    """Return the file of this name in a folder, or the one with .xz.

    Raises:
        UsageError: there is neither.
    """
    for path in (folder / name, folder / f"{name}.xz"):
        if path.is_file():
            return path
    asked = f"--data {folder} needs {name} (or {name}.xz)"
    if not folder.is_dir():
        raise UsageError(asked, "there is no such folder", fix)
    there = sorted(path.name for path in folder.iterdir())[:8]
    raise UsageError(asked, f"the folder holds {', '.join(there) or 'nothing'}", fix)


def read_text(path: Path) -> str:
    """Return the file's text.

    Raises:
        DataError: it is not whole, or no UTF-8.
    """
    try:
        content = path.read_bytes()
        return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except lzma.LZMAError as error:
        raise DataError(f"{path} should be xz-compressed", f"it is not whole ({error})", "take it anew") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} should be text in UTF-8", f"byte {error.start + 1} is no part of it", "mend it"
        ) from None


def open_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line that is not empty, with its number from 1."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows by the names in the first line."""
    return list(csv.DictReader(io.StringIO(read_text(path))))
