"""The API reference has every public name, each docstring has its parts, and every example works."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from dataclasses import asdict

import pytest
import torch

import paceline
from paceline.nouns.errors import PlanError, UsageError
from paceline.nouns.plan import Plan
from paceline.train import open_jobs as jobs

from support.cluster import Cluster
from support.ranks import run_ranks
from support.reference import INTERNAL, PAGES, Public, documented, gaps, public, run_example, undocumented_members

PUBLIC = public()
DOCUMENTED = documented()
# Their examples print the same on any number of ranks.
ON_TWO_RANKS = [
    *(f"paceline.{name}" for name in ("is_initialized", "local_rank", "all_reduce", "all_gather", "broadcast")),
    *(f"paceline.{name}" for name in ("reduce_scatter", "all_to_all", "barrier", "Workload")),
    *(f"paceline.Job.{name}" for name in ("batches", "evaluate", "save", "load", "close")),
]
INDEX = (PAGES / "README.md").read_text()


def test_every_name_of_the_package_is_on_one_page():
    names = [one.path.removeprefix("paceline.") for one in PUBLIC if one.path.count(".") == 1]
    names.append("launch")  # `paceline.launch` is a package, too: the function stands under the module that has it
    assert "paceline.run.notebook.launch" in {one.path for one in PUBLIC}
    assert sorted(names) == sorted(paceline.__all__)


def test_the_index_has_every_name_beside_its_page():
    listed = re.findall(r"\[`(\w+)`\]\(([\w-]+\.md)#([\w.]+)\)", INDEX)
    assert sorted(listed) == sorted((one.name, one.page, one.path) for one in PUBLIC)


def test_every_error_is_on_a_page():
    known = {paceline.PacelineError, *paceline.PacelineError.__subclasses__()}
    errors = {error for error in known if error.__module__.startswith("paceline.")}  # not a script's
    assert errors <= {one.what for one in PUBLIC}


@pytest.mark.parametrize("one", PUBLIC, ids=lambda one: one.path)
def test_reference_class_shows_methods_or_calls_them_internal(one):
    assert undocumented_members(one) == [], "name them on the page, or in INTERNAL"


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_docstring_has_its_parts(path):
    assert gaps(path, DOCUMENTED[path]) == []


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to write to; what the examples change in this process is put back."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    before = jobs.newest()  # another test's
    with torch.random.fork_rng():
        yield tmp_path
    torch.set_num_threads(threads)
    newest = jobs.newest()
    if newest is not None and newest is not before:
        newest.close()
    paceline.shutdown()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # of TRL's own arguments
@pytest.mark.parametrize("path", [path for path, what in DOCUMENTED.items() if not isinstance(what, property)])
def test_an_example_works(path, place):
    shown = io.StringIO()
    with contextlib.ExitStack() as stack:
        if path.startswith("paceline.server."):
            cluster = stack.enter_context(Cluster("replicate=1,server=1"))
            (place / "coordinator").symlink_to(cluster.folder / "c")
        failed, run = run_example(path, DOCUMENTED[path].__doc__, shown)
    assert run > 0
    assert failed == 0, shown.getvalue()


def test_the_example_of_the_package_works(place):
    shown = io.StringIO()
    failed, run = run_example("paceline", paceline.__doc__, shown)
    assert run > 4
    assert failed == 0, shown.getvalue()


def test_the_loop_of_the_guide_to_parameter_servers_works():
    (loop,) = re.findall(r"```python\n(.*?)```", (PAGES.parent / "parameter-server.md").read_text(), re.DOTALL)
    model = torch.nn.Linear(4, 1)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, batch: (model(batch).square().sum(), len(batch)),
        "batches": iter([torch.ones(2, 4)] * 3),
    }
    for change in ("unix:/run/job/coordinator", "steps=1000"):
        assert change in loop
    with Cluster("replicate=1,server=1") as cluster:
        exec(loop.replace("unix:/run/job/coordinator", cluster.where).replace("steps=1000", "steps=3"), names)
    assert names["handle"].clock == 3


def examples_of_a_rank(rank, paths, folder):
    """What fails in the examples, one after another, on this rank."""
    os.chdir(folder)
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse("replicate=2,check=off")))  # it would print a line
    shown = io.StringIO()
    for path in paths:
        run_example(path, DOCUMENTED[path].__doc__, shown)
    return shown.getvalue()


def test_examples_work_on_two_ranks(tmp_path):
    assert run_ranks(2, examples_of_a_rank, ON_TWO_RANKS, tmp_path) == ["", ""]


# The checks themselves: each of these lacks one part.


def whole(rate: float) -> float:
    """Return half of it.

    Args:
        rate: steps per second.

    Returns:
        Steps per second.

    Raises:
        UsageError: it is negative.

    Examples:
        >>> paceline.size
        <function size at ...>
    """
    if rate < 0:
        raise UsageError("a rate should be positive", f"it is {rate}", "write another").at(rank=0)
    return rate / 2


LACKS = {
    "does not explain the argument rate": ("rate: steps per second.", "other words"),
    "explains the argument pace, which it does not have": ("rate: steps", "pace: steps"),
    "has no Returns": ("Returns:", "Note:"),
    "raises UsageError, which it does not say": ("UsageError: it", "PlanError: it"),
    "has no example": (">>> ", ""),
}


def made_of(docstring):
    def other(rate: float) -> float:
        if rate < 0:
            raise UsageError("a rate should be positive", f"it is {rate}", "write another").at(rank=0)
        return rate / 2

    other.__doc__ = docstring
    return other


def test_a_whole_docstring_lacks_nothing():
    assert gaps("whole", whole) == []
    assert gaps("made", made_of(whole.__doc__)) == []


@pytest.mark.parametrize("gap", LACKS)
def test_a_part_that_is_missing_is_named(gap):
    before, after = LACKS[gap]
    assert before in whole.__doc__
    assert f"made {gap}" in gaps("made", made_of(whole.__doc__.replace(before, after)))


def test_reference_finds_undocumented_errors_and_arguments():
    class Rate:
        """A rate.

        Attributes:
            per_second: steps.
            per_minute: steps.
        """

        def __init__(self, per_second: float) -> None:
            if per_second < 0:
                raise PlanError("a rate should be positive", f"it is {per_second}", "write another")
            self.per_second = per_second

        def stop(self) -> None:
            """Stop."""

    assert gaps("Rate", Rate) == [
        "Rate has no example",
        "Rate documents the attribute per_minute, which is not there",
        "Rate raises PlanError, which it does not say",
    ]
    assert undocumented_members(Public("", "paceline.Rate", Rate)) == ["stop"]


def test_an_example_that_prints_something_else_fails(place):
    shown = io.StringIO()
    assert run_example("half", ">>> 1 / 2\n0.5\n>>> 1 / 4\n0.5\n", shown) == (1, 2)
    assert "Got:\n    0.25" in shown.getvalue()
    assert run_example("lost", ">>> paceline.no_such_name\n", shown).failed == 1


def test_what_is_internal_is_there():
    classes = {name: one.what for one in PUBLIC for name in (one.name, one.path)}
    for name, members in INTERNAL.items():
        assert [member for member in members if not hasattr(classes[name], member)] == []
