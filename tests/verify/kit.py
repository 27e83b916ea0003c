"""The verifier without its processes' starts: the reference once per subject, ranks forked from one server."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify import reference, replay
from paceline.verify.checks import check_draws, check_order, check_step, check_traffic
from paceline.verify.compare import Reference, differences, read_ranks
from paceline.verify.culprit import blame_loading, find_culprit
from paceline.verify.order import read_trace
from paceline.verify.verdict import Verdict

from mutants import MUTANTS
from ranks import run_ranks
from subjects import SUBJECTS

_folders = []  # temporary folders live as long as the tests


@functools.cache
def reference_of(subject: str, precision: str = "float64", steps: int = 2) -> Path:
    """The folder with a subject's reference."""
    _folders.append(tempfile.TemporaryDirectory(prefix="paceline-test-"))
    folder = Path(_folders[-1].name)
    workload = SUBJECTS[subject]()
    reference.write(folder, precision, *reference.with_noise(workload, precision, steps), workload.clip_norm)
    return folder


def run(rank, subject, mutant, runs, folder):
    """The runs of one rank, with a mutant switched on; nothing of the product knows it."""
    from paceline.comm import words
    from paceline.verify.in_rank import _Run
    from paceline.verify.trace import Trace

    words.init()
    if mutant is not None:
        MUTANTS[mutant].switch_on()
    for one in runs:
        with (Path(folder) / f"{one['name']}-trace-{rank}.jsonl").open("w") as file:
            words.world().comm.ledger = trace = Trace(file=file)
            _Run(SUBJECTS[subject](), one, Path(folder), rank).play()
            trace.file = None


def verify(subject: str, plan_text: str, mutant: str | None = None, what=("step",), precision="float64") -> Verdict:
    """A verdict as the command's, without dry run."""
    plan = Plan.parse(plan_text)
    kept = reference_of(subject, precision)
    verdict = Verdict(plan_text)
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as name:
        folder = Path(name)
        for path in kept.iterdir():
            (folder / path.name).symlink_to(path)
        first = {"plan": plan_text, "steps": 2, "name": precision, "precision": precision}
        if "reshard" in what:
            first |= {"save": str(folder / "checkpoint"), "save_at": 1}
        runs = [first]
        if "draws" in what:
            runs.append({**first, "name": "draws", "precision": "float32", "draws": True})
        run_ranks(plan.world_size, run, subject, mutant, runs, name)
        traces = {rank: read_trace(folder / f"{precision}-trace-{rank}.jsonl") for rank in range(plan.world_size)}
        check_order(verdict, {precision: traces}, Mesh.parse(plan.mesh), {"graphs": {}})
        check_step(verdict, Reference.read(folder, precision), read_ranks(folder, precision, plan.world_size))
        if "draws" in what:
            check_draws(verdict, read_ranks(folder, "draws", plan.world_size))
        if verdict.word == "bug" and precision == "float64":
            verdict.culprit = find_culprit(folder, plan, functools.partial(_watch, subject, plan, mutant, folder))
        if "reshard" in what and verdict.word != "bug":
            _go_on(verdict, subject, plan, mutant, folder, what[what.index("reshard") + 1])
    return verdict


def _watch(subject, plan, mutant, folder):
    one = {"plan": plan.line(), "steps": 1, "name": "watched", "precision": "float64", "watch": True}
    run_ranks(plan.world_size, run, subject, mutant, [one], str(folder))
    parts = {}
    for rank in range(plan.world_size):
        facts = json.loads((folder / f"watched-{rank}.json").read_text())
        parts.setdefault(facts["data_part"], facts["pieces"])
    mesh = Mesh.parse(plan.mesh)
    is_graph = mesh.size("tensor") * mesh.size("pipeline") > 1
    answer = {part: replay.replay(SUBJECTS[subject](), rows, parts, is_graph) for part, rows in parts.items()}
    (folder / "replay.json").write_text(json.dumps(answer))
    return _Done()


class _Done:
    is_done = True


def _go_on(verdict, subject, plan, mutant, folder, other):
    one = {"plan": other, "steps": 2, "name": "reshard", "precision": "float64", "load": str(folder / "checkpoint")}
    ranks = Plan.parse(other).world_size
    run_ranks(ranks, run, subject, mutant, [one], str(folder))
    reference_ = Reference.read(folder, "float64")
    results = read_ranks(folder, "reshard", ranks)
    found = differences(reference_, results)
    check_step(verdict, reference_, results, "reshard", found)
    verdict.culprit = blame_loading(found, "reshard")


__all__ = ["check_traffic", "verify"]
