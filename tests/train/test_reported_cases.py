"""Small files in the idiom of public reports: one process's number under every plan, or refused before the first step.

The files are beside the project, in ../shared/cases; each prints `RESULT number`, or its steps.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.sample import INTEGRATION

preload("paceline.train.first_step", "paceline.parallel.shard.sharded_loop_models", "paceline.parallel.split_forward")
CASES = Path(__file__).parents[3] / "shared" / "cases"
# What these show takes processes that end: tests/run/test_process_exit.py, tests/train/test_loop_ahead.py.
BY_PROCESSES = {"child_process_hang.py", "accumulate_resume_l.py"}
FILES = sorted(path.name for path in CASES.glob("*.py") if path.name not in BY_PROCESSES) if CASES.is_dir() else []
PLANS = {
    "_l.py": ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2"),
    "_w.py": ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2"),
}
# The advice of a refusal is tried: what it says to write. The others name replicate, or one rank.
LATER = {"reset_units_l.py"}  # what it does comes after an epoch: it is refused there, at its line
needs_cases = pytest.mark.skipif(not FILES, reason=f"the files are not at {CASES}")
pytestmark = [INTEGRATION, needs_cases]


def printed(text):
    """The numbers that a file printed."""
    return [float(number) for number in re.findall(r"^(?:\[\d+\] )?(?:RESULT|step) (\S+)$", text, re.MULTILINE)]


def outcomes(rank, files, plan):
    """For each file the numbers that it printed; or the error, and after which step it came."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    found = {}
    for name in files:
        torch.set_default_dtype(torch.float32)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                runpy.run_path(str(CASES / name), run_name="__main__")
            found[name] = printed(out.getvalue())
        except PacelineError as error:
            found[name] = error.step or 0, error.found, error.fix
        sys.stdout.flush()
    return found


def of_form(form):
    return [name for name in FILES if name.endswith(form)]


@functools.cache
def in_one_process(form):
    (found,) = run_ranks(1, outcomes, of_form(form), "replicate=1", timeout_s=300)
    return found


@pytest.mark.parametrize(("form", "plan"), [(form, plan) for form, plans in PLANS.items() for plan in plans])
def test_a_case_has_its_number_or_is_refused_in_time(form, plan):
    expected = in_one_process(form)
    found = run_ranks(2, outcomes, of_form(form), plan, timeout_s=300)[0]
    wrong = {}
    for name, outcome in found.items():
        if isinstance(outcome, tuple):
            step, what, fix = outcome
            if (step > 1 and name not in LATER) or not fix:
                wrong[name] = f"refused at step {step}: {what}"
            if plan == "replicate=2" and "replicate" in fix.replace("replicate=1", ""):
                wrong[name] = f"advises replicate under replicate: {fix}"
        elif outcome != pytest.approx(expected[name], rel=1e-6 if name.startswith("zeros") else 1e-8, abs=1e-7):
            wrong[name] = f"{outcome} for {expected[name]}"
    assert wrong == {}


@pytest.mark.parametrize("name", of_form("_w.py"))
def test_a_case_under_servers(name, tmp_path):
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", CASES / name)
    if ended.code == 0:
        assert printed(ended.out) == pytest.approx(in_one_process("_w.py")[name], rel=1e-6, abs=1e-6)
        return
    assert "fix: " in ended.out + ended.err
    assert not re.search(r"step [2-9]\]", ended.out + ended.err)
