"""docs/plan-options.md has every option of a plan with its values and default, and its lines do what it says."""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import fields

import pytest

from paceline.nouns import plan as nouns_plan
from paceline.nouns.errors import PacelineError, PlanError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import AXES, SHORT
from paceline.nouns.plan import OPTIONS, Plan
from paceline.verify.prove import check_plan

from support.documented_commands import ROOT
from support.jobs import paceline

PAGE = (ROOT / "docs" / "plan-options.md").read_text()
CHOICES = {
    "zero": ("1", "2", "3"),
    "offload": nouns_plan.SWITCH,
    "sequence": nouns_plan.SWITCH,
    "compile": nouns_plan.COMPILE,
    "float8": nouns_plan.FLOAT8,
    "context_by": nouns_plan.CONTEXT_BY,
    "schedule": nouns_plan.SCHEDULES,
    "checkpointing": nouns_plan.CHECKPOINTING,
    "optimizer_states": nouns_plan.OPTIMIZER_STATES,
    "transport": nouns_plan.TRANSPORTS,
    "compression": nouns_plan.COMPRESSIONS,
    "mode": nouns_plan.MODES,
    "check": nouns_plan.SWITCH,
}


def table(before: str) -> list[list[str]]:
    """The rows of the first table after some words."""
    _, found, after = PAGE.partition(before)
    assert found, before
    lines = re.search(r"\n\n(\|.*?)\n\n", after, re.DOTALL).group(1).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def word(cell: str) -> str:
    return cell.strip("`")


def words(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


OF_A_LINE = {word(row[0]): row for row in table("## Options of a line")}
WITH_FLAGS = {word(row[0]): row for row in table("They are in `plan.json` too")}
REFUSED = {
    "parse": table("Before any process starts:"),
    "loop": table("With a loop of your own"),
    "verify": table("By `paceline verify`"),
    "first step": table("Once the ranks have the model"),
}


def test_the_page_has_every_axis_and_option_and_no_other():
    axes = {word(row[0]): word(row[1]) for row in table("## Axes")}
    assert tuple(axes) == AXES
    assert {short: name for name, short in axes.items()} == SHORT
    assert tuple(OF_A_LINE) == OPTIONS
    assert {*OF_A_LINE, *WITH_FLAGS, "mesh", "version"} == {field.name for field in fields(Plan)}


@pytest.mark.parametrize("name", [*OF_A_LINE, *WITH_FLAGS])
def test_values_and_default_are_the_products(name):
    row = OF_A_LINE.get(name) or [cell for index, cell in enumerate(WITH_FLAGS[name]) if index != 1]
    values, default = row[1], word(row[2])
    assert default == (str(getattr(Plan(), name)) or "none")
    if name in CHOICES:
        assert words(values) == CHOICES[name]
        return
    least = re.fullmatch(r"number from (\d)", values)
    assert least or values in ("seconds", "URL of a folder")
    if least:
        with pytest.raises(PlanError):
            Plan(**{name: int(least[1]) - 1})


def test_flags_are_runs():
    parser = argparse.ArgumentParser()
    importlib.import_module("paceline.cli.run_command").add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {word(row[1]) for row in WITH_FLAGS.values()} <= known


@pytest.mark.parametrize("row", table("## Examples"), ids=lambda row: row[0])
def test_an_example_is_a_plan(row):
    plan = Plan.parse(word(row[0]))
    assert plan.world_size == int(row[1])
    assert Plan.parse(plan.line()) == plan


def test_plan_page_has_an_example_of_each_option_except_compile():
    shown = {item.split("=")[0] for row in table("## Examples") for item in word(row[0]).split(",")}
    assert {*AXES, *OPTIONS} - shown == {"compile"}


@pytest.mark.parametrize("row", REFUSED["parse"], ids=lambda row: row[0])
def test_a_line_is_refused_as_the_page_says(row):
    with pytest.raises(PacelineError) as caught:
        Plan.parse(word(row[0]))
    assert row[1] in caught.value.found


@pytest.mark.parametrize("row", REFUSED["loop"], ids=lambda row: row[0])
def test_a_loop_refuses_a_line_as_the_page_says(row):
    with pytest.raises(PacelineError) as caught:
        check_plan_of_loop(Plan.parse(word(row[0])))
    assert row[1] in caught.value.found


@pytest.mark.parametrize("row", REFUSED["verify"], ids=lambda row: row[0])
def test_verify_refuses_a_line_as_the_page_says(row):
    with pytest.raises(PacelineError) as caught:
        check_plan(Plan.parse(word(row[0])))
    assert row[1] in caught.value.found


@pytest.mark.integration
@pytest.mark.parametrize("row", REFUSED["first step"], ids=lambda row: row[0])
def test_a_job_refuses_a_line_before_its_first_step(row, tmp_path):
    text = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    (tmp_path / "train.py").write_text(text)
    ended = paceline(tmp_path, "run", "--plan", word(row[0]), "train.py")
    assert ended.code != 0
    assert row[1] in ended.err
    assert "step 1/" not in ended.err
