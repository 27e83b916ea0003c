"""Which tests CI runs."""

from __future__ import annotations

import time

import pytest

from support.sample import is_sampled, skip_if_late


def test_each_row_and_each_column_of_a_table_has_cells():
    for of in (2, 3):
        cells = [(row, column) for row in range(6) for column in range(6) if is_sampled(row, column, of)]
        assert {row for row, _ in cells} == {column for _, column in cells} == set(range(6))
        assert len(cells) == 36 // of


@pytest.mark.parametrize(("from_now", "is_late"), [(-1, True), (600, False), (None, False)])
def test_a_long_test_begins_only_in_time(monkeypatch, from_now, is_late):
    monkeypatch.delenv("TESTS_END_AT", raising=False)
    if from_now is not None:
        monkeypatch.setenv("TESTS_END_AT", str(time.time_ns() // 10**9 + from_now))
    if is_late:
        with pytest.raises(pytest.skip.Exception, match="CI's time is used up"):
            skip_if_late()
    else:
        skip_if_late()
