"""Verify a loop's file without its processes' starts: one process once per file, ranks forked from one server."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify import loops
from paceline.verify.judge.check_dropout import check_draws
from paceline.verify.judge.compare import read_ranks
from paceline.verify.judge.verdict import Verdict

from support.ranks import preload, run_ranks

preload("paceline.verify.ranks.rank_main")
STEPS = 3
ALONE = Plan(mesh="replicate=1")
Mutant = Callable[[], None]
_folders = []  # temporary folders live as long as the tests


def be_rank(rank: int, settings: str, mutant: Mutant | None):
    """Run the file on one rank, with a mutant switched on; nothing of the product knows it."""
    from paceline.verify.ranks.rank_main import main

    os.environ["PACELINE_RUN_DIR"] = str(Path(settings).parent)
    if mutant is not None:
        mutant()
    main(Path(settings))


def _run(folder: Path, name: str, plan: Plan, parts: int, mutant: Mutant | None = None):
    parts_of_run = {"name": name, "steps": STEPS, "plan": asdict(plan), "data_parts": parts}
    run = {**parts_of_run, "is_loop": True, **loops.options_of(name)}
    settings = {"script": str(folder / "loop.py"), "arguments": [], "runs": [run], "folder": str(folder)}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(settings))
    run_ranks(plan.world_size, be_rank, str(path), mutant)


@functools.cache
def _alone(text: str, parts: int) -> Path:
    """The folder with the steps of one process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="paceline-test-"))
    folder = Path(_folders[-1].name)
    (folder / "loop.py").write_text(text)
    for name in ("alone", "noisy"):
        _run(folder, name, ALONE, parts)
    return folder


def verify_loop(text: str, plan_text: str, mutant: Mutant | None = None, with_draws: bool = False) -> Verdict:
    """A verdict as the command's."""
    plan = Plan.parse(plan_text)
    parts = Mesh.parse(plan.mesh).data_size
    kept = _alone(text, parts)
    verdict = Verdict(plan_text, precision="float64")
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as name:
        folder = Path(name)
        for path in kept.iterdir():
            (folder / path.name).symlink_to(path)
        _run(folder, "ranks", plan, parts, mutant)
        loops.compare(verdict, folder, plan.world_size, has_noise=True)
        if with_draws:
            _run(folder, "draws", plan, parts, mutant)
            check_draws(verdict, read_ranks(folder, "draws", plan.world_size), is_loop=True)
    return verdict
