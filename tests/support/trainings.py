"""The example trainings for tests: their files imported, run as ranks of any plan, and killed in the middle."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.jobs import paceline
from support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

# Code before an example's own: it ends as kill -9 does after step KILL_AT (of the environment).
KILL = """
import os, signal
from paceline.train.loop_job import LoopJob
plain_end_step = LoopJob.end_step
def end_step(job, goes_on=False):
    plain_end_step(job, goes_on)
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
LoopJob.end_step = end_step
"""
# Code before it that prints the parameters at the end, squared and added up: one number, in all of its digits.
SUM = """
plain_close = LoopJob.close
def close(job, *words, **options):
    if job.closed_step is None:
        print("ends with", repr(sum(float(each.detach().pow(2).sum()) for each in job.model.parameters())), flush=True)
    plain_close(job, *words, **options)
LoopJob.close = close
"""


@contextmanager
def on_path(example: str) -> Iterator[None]:
    """Make the files of an example importable under their own names, which other examples use too."""
    folder = EXAMPLES / example
    names = [path.stem for path in folder.glob("*.py")]
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def load(example: str, *names: str) -> tuple[ModuleType, ...]:
    """Import files of an example."""
    with on_path(example):
        return tuple(importlib.import_module(name) for name in names)


def run_main(example: str, words: Sequence[object]) -> None:
    """Run the example's workload.py in this process, as `python workload.py WORDS` does."""
    before = sys.argv
    sys.argv = ["workload.py", *map(str, words)]
    try:
        with on_path(example):
            runpy.run_path(str(EXAMPLES / example / "workload.py"), run_name="__main__")
    finally:
        sys.argv = before


def play(rank: int, example: str, words: list[str], plan: str) -> list[np.ndarray]:
    """Run the example as one rank; return the parameters at the end."""
    import paceline
    from paceline.nouns.plan import Plan

    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    jobs, prepare = [], paceline.prepare

    def watched(*objects, **options):
        prepared = prepare(*objects, **options)
        jobs.append(prepared[0])
        return prepared

    paceline.prepare = watched
    run_main(example, words)
    (job,) = jobs
    return [job.parallel.models.full_tensor(parameter).detach().numpy().copy() for parameter in job.model.parameters()]


def train(folder: Path, example: str, words: Sequence[object], plan: str) -> tuple[list[np.ndarray], dict]:
    """Return the parameters that all ranks of a plan end with, and what the example wrote as its result.

    In a word PLAN stands for the plan, as in the name of a file.
    """
    from paceline.nouns.plan import Plan

    output = folder / f"{plan}.json"
    own = [str(word).replace("PLAN", plan) for word in words]
    by_rank = run_ranks(Plan.parse(plan).world_size, play, example, [*own, "--output", str(output)], plan)
    for other in by_rank[1:]:
        assert all(np.array_equal(*pair) for pair in zip(by_rank[0], other, strict=True))
    return by_rank[0], json.loads(output.read_text())


def check_plans(
    folder: Path, example: str, words: Sequence[object], plans: Sequence[str], scores_within: float = 0.0
) -> dict:
    """Assert that each plan ends with the parameters (to 1e-9) and scores of one rank; return the result of one."""
    alone, result = train(folder, example, words, "replicate=1")
    for plan in plans:
        parameters, other = train(folder, example, words, plan)
        for here, there in zip(parameters, alone, strict=True):
            np.testing.assert_allclose(here, there, rtol=0, atol=1e-9, err_msg=plan)
        assert other["scores"] == pytest.approx(result["scores"], rel=0, abs=scores_within), plan
    return result


def with_words(folder: Path, example: str, words: Sequence[object], before: str = "") -> Path:
    """Write the example as a file with arguments of its own, before those that it is started with.

    `paceline verify` takes arguments after `--` alone, and code in `before` runs before the example's.
    """
    path = EXAMPLES / example
    file = folder / "small.py"
    first, line, rest = (path / "workload.py").read_text().partition("from __future__ import annotations\n")
    own = [*map(str, words)]
    set_up = f"import sys\nsys.argv[1:] = {own!r} + sys.argv[1:]\nsys.path.insert(0, {str(path)!r})\n"
    file.write_text(f"{first}{line}{set_up}{before}{rest}")
    return file


def check_verified(folder: Path, example: str, words: Sequence[object], plan: str) -> None:
    """Assert that `paceline verify` finds the steps of a plan those of one process, in float64."""
    ended = paceline(folder, "verify", "--plan", plan, with_words(folder, example, words))
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"^step float64 +ok ", ended.out, re.MULTILINE), ended.out


def check_killed(folder: Path, example: str, words: Sequence[object], every: int, kill_at: int) -> tuple[dict, dict]:
    """Assert that a job of two ranks, killed and resumed, ends as one that ran undisturbed, bit for bit.

    Args:
        folder: gets the files.
        example: its folder in examples/.
        words: its arguments.
        every: steps between checkpoints.
        kill_at: the step after which every rank kills itself.

    Returns:
        What the undisturbed job and the other wrote as their results.
    """
    file = with_words(folder, example, words, KILL + SUM)
    whole = paceline(folder, "run", "-n", "2", "--job", "whole", file, "--output", folder / "whole.json")
    assert whole.code == 0, whole.err
    flags = ("-n", "2", "--job", "killed")
    killed = paceline(folder, "run", *flags, "--checkpoint-every", str(every), file, KILL_AT=str(kill_at))
    assert killed.code == 1, killed.err
    ended = paceline(folder, "run", *flags, "--resume", file, "--output", folder / "killed.json")
    assert ended.code == 0, ended.err
    (step,) = re.findall(r"goes on at step-(\d+)", ended.err)
    assert 0 < int(step) < kill_at
    (total,) = {*re.findall(r"ends with (\S+)", whole.out)}
    assert re.findall(r"ends with (\S+)", ended.out) == [total, total]
    results = tuple(json.loads((folder / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert results[0]["scores"] == results[1]["scores"]
    return results
