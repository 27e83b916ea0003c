"""Cells in columns."""

from __future__ import annotations

import pytest

from paceline.nouns.table import aligned


def test_table_column_width_is_its_widest_cell_or_its_format():
    rows = [("name", "size", "why"), ("a", 12345, ""), ("longer", 1, "x{}")]
    assert aligned(rows, "{:<}  {:>6} ({})") == [
        "name      size (why)",
        "a        12345 ()",
        "longer       1 (x{})",
    ]
    assert aligned(rows, "{:<} {:>} {:>2}") == ["name    size why", "a      12345   ", "longer     1 x{}"]


def test_without_rows_there_are_no_lines():
    assert aligned([], "{:<}{}") == []


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        aligned([("a", "b"), ("a",)], "{:<}{}")
