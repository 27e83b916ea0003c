"""Check before a long job that the picture that it is to draw at its end can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.nouns.errors import UsageError

_SUFFIXES = (".png", ".pdf", ".svg")


def check_picture(path: Path | None) -> None:
    """Raise UsageError for a file, given by --picture, that matplotlib could not write; None is none."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        fix = "pip install matplotlib, or leave --picture out"
        raise UsageError(f"--picture {path}", "matplotlib is not installed", fix)
    if path.suffix not in _SUFFIXES:
        fix = "name a file that ends in .png, .pdf or .svg"
        raise UsageError(f"--picture {path}", f"its name ends in {path.suffix or 'nothing'}", fix)
