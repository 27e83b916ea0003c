"""The example trainings for tests: their files imported, run as ranks of any plan, and killed in the middle."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np

from support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

# The file that a test writes and runs in place of an example's: it ends as kill -9 does after step KILL_AT, and prints
# the parameters at the end, squared and added up.
KILLED = """
import os, runpy, signal, sys
import torch
from paceline.train.loop_job import LoopJob
plain_end_step = LoopJob.end_step
def end_step(job):
    plain_end_step(job)
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
LoopJob.end_step = end_step
import paceline
jobs, prepare = [], paceline.prepare
def watched(*objects, **options):
    prepared = prepare(*objects, **options)
    jobs.append(prepared[0])
    return prepared
paceline.prepare = watched
sys.path.insert(0, {folder!r})
runpy.run_path({file!r}, run_name="__main__")
total = sum(float(parameter.detach().pow(2).sum()) for parameter in jobs[0].model.parameters())
print("ends with", repr(total))
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
    return [job.parallel.whole(parameter).detach().numpy().copy() for parameter in job.model.parameters()]


def train(folder: Path, example: str, words: Sequence[object], plan: str) -> tuple[list[np.ndarray], dict]:
    """Return the parameters that all ranks of a plan end with, and what the example wrote as its result."""
    from paceline.nouns.plan import Plan

    output = folder / f"{plan}.json"
    by_rank = run_ranks(Plan.parse(plan).world_size, play, example, [*map(str, words), "--output", str(output)], plan)
    for other in by_rank[1:]:
        assert all(np.array_equal(*pair) for pair in zip(by_rank[0], other, strict=True))
    return by_rank[0], json.loads(output.read_text())


def check_plans(
    folder: Path, example: str, words: Sequence[object], plans: Sequence[str], within: float = 1e-9
) -> dict:
    """Assert that each plan ends with the parameters and scores of one rank; return the result of that one."""
    alone, result = train(folder, example, words, "replicate=1")
    for plan in plans:
        parameters, other = train(folder, example, words, plan)
        for here, there in zip(parameters, alone, strict=True):
            np.testing.assert_allclose(here, there, rtol=0, atol=within, err_msg=plan)
        assert other["scores"] == result["scores"], plan
    return result


def with_words(folder: Path, example: str, words: Sequence[object]) -> Path:
    """Write the example as a file with arguments of its own: `paceline verify` hands none on."""
    path = EXAMPLES / example
    file = folder / "small.py"
    first, line, rest = (path / "workload.py").read_text().partition("from __future__ import annotations\n")
    set_up = f"import sys\nsys.argv[1:] = {[*map(str, words)]!r}\nsys.path.insert(0, {str(path)!r})\n"
    file.write_text(f"{first}{line}{set_up}{rest}")
    return file


def to_be_killed(folder: Path, example: str) -> Path:
    """Write a file that runs the example, and ends as kill -9 does after step KILL_AT (of the environment)."""
    file = folder / "killed.py"
    path = EXAMPLES / example
    file.write_text(KILLED.format(folder=str(path), file=str(path / "workload.py")))
    return file
