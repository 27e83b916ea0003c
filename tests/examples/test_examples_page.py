"""docs/examples.md: its table is what was measured, and the plans of a row ended alike."""

from __future__ import annotations

import pytest
import train_examples

# Examples with a page of their own: one says what was measured, the other is about how a job is started.
ELSEWHERE = {"glue", "airflow"}
ROWS = [entry.name for entry in train_examples.ENTRIES]


def test_the_table_is_that_of_the_results():
    assert train_examples.page_with(train_examples.table()) == train_examples.PAGE.read_text()


def test_every_example_of_several_files_is_in_the_table():
    folders = {path.parent.name for path in (train_examples.ROOT / "examples").glob("*/workload.py")}
    assert folders - ELSEWHERE == {entry.example for entry in train_examples.ENTRIES}


def test_a_result_belongs_to_a_row():
    files = {path.stem for path in train_examples.RESULTS.glob("*.json")}
    assert files <= set(ROWS)


@pytest.mark.parametrize("entry", train_examples.ENTRIES, ids=ROWS)
def test_examples_page_rows_have_three_seeds_and_equal_plans(entry):
    runs = train_examples.results_of(entry)
    usual = [run["seed"] for run in runs if run["plan"] == train_examples.USUAL_PLAN]
    others = [run["plan"] for run in runs if run["plan"] != train_examples.USUAL_PLAN]
    assert usual == [*train_examples.SEEDS]
    assert others == [*entry.plans]
    assert "replicate=1" in others
    assert len(others) >= 3
    assert train_examples.differences(entry) == []
