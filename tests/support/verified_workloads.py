"""The verifier without its processes' starts: the reference once per subject, ranks forked from one server."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.nouns.mesh import GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.profile.describe import describe
from paceline.verify.judge.check_dropout import check_draws
from paceline.verify.judge.checks import check_order, check_step, check_traffic
from paceline.verify.judge.compare import Reference, differences, read_ranks
from paceline.verify.judge.localize import blame_loading, find_first_difference, find_in_narrow
from paceline.verify.judge.order_of_collectives import read_trace
from paceline.verify.judge.verdict import Verdict
from paceline.verify.ranks import reference
from paceline.verify.ranks import replay_step as replay
from paceline.verify.ranks.dry_run import predicted_traffic

from support import attention_models, expert_models, models, random_jobs
from support.mutants import MUTANTS
from support.ranks import preload, run_ranks
from support.unusual_models import REFUSED, UNUSUAL
from support.verifier_models import SUBJECTS

preload("paceline.verify.ranks.rank_main", "paceline.verify.ranks.trace")
_known: dict[Any, Path] = {}
_folders = []  # temporary folders live as long as the tests


def make(subject: Any):
    """A subject's workload: one of `subjects.py`, a model of the twelve, or one built of drawn facts."""
    if isinstance(subject, str) and subject in attention_models.MODELS:
        return attention_models.shallow_workload(subject, precision="float32")
    if isinstance(subject, str) and subject in expert_models.MODELS:
        return expert_models.workload(subject, precision="float32")
    if isinstance(subject, str) and subject in UNUSUAL:
        return UNUSUAL[subject]()
    if isinstance(subject, tuple):
        return REFUSED[subject[0]][0]()
    if isinstance(subject, dict):
        return random_jobs.build(subject)
    return SUBJECTS[subject]() if subject in SUBJECTS else models.workload(subject, clip_norm=0.5, precision="float32")


def reference_of(subject: Any, precision: str = "float64", steps: int = 2) -> Path:
    """The folder with a subject's reference, made once."""
    key = (repr(subject), precision, steps)
    if key not in _known:
        _known[key] = _make_reference(subject, precision, steps)
    return _known[key]


def _make_reference(subject: Any, precision: str, steps: int) -> Path:
    _folders.append(tempfile.TemporaryDirectory(prefix="paceline-test-"))
    folder = Path(_folders[-1].name)
    workload = make(subject)
    reference.write(
        folder,
        precision,
        *reference.with_noise(workload, precision, steps, list(reference.VARIATIONS)),
        workload.clip_norm,
    )
    return folder


def run(rank, subject, mutant, runs, folder):
    """The runs of one rank, with a mutant switched on; nothing of the product knows it."""
    from paceline.comm import api
    from paceline.train.replicas import Replicas
    from paceline.verify.ranks.rank_main import WorkloadRun
    from paceline.verify.ranks.trace import Trace

    api.init()
    if mutant is not None:
        MUTANTS[mutant].switch_on()
        Replicas.is_due = lambda *_: False  # it would stop the run before the verifier has what it judges
    for one in runs:
        with (Path(folder) / f"{one['name']}-trace-{rank}.jsonl").open("w") as file:
            api.world().comm.ledger = trace = Trace(file=file)
            WorkloadRun(make(subject), one).play().write(Path(folder) / f"{one['name']}-{rank}")
            trace.file = None


def verify(
    subject: Any, plan_text: str, mutant: str | None = None, what=("step",), precision="float64", steps=2
) -> Verdict:
    """A verdict as the command's, without dry run."""
    plan = Plan.parse(plan_text)
    kept = reference_of(subject, precision, steps)
    verdict = Verdict(plan_text, precision=precision)
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as name:
        folder = Path(name)
        for path in kept.iterdir():
            (folder / path.name).symlink_to(path)
        first = {"plan": asdict(plan), "steps": steps, "name": precision, "precision": precision}
        if "reshard" in what:
            first |= {"save": str(folder / "checkpoint"), "save_at": 1}
        runs = [first]
        if {"draws", "traffic"} & {*what}:
            runs.append({**first, "name": "draws", "precision": "float32", "draws": True, "steps": 2})
        run_ranks(plan.world_size, run, subject, mutant, runs, name)
        traces = {rank: read_trace(folder / f"{precision}-trace-{rank}.jsonl") for rank in range(plan.world_size)}
        check_order(verdict, {precision: traces}, Mesh.parse(plan.mesh), {"graphs": {}})
        check_step(verdict, Reference.read(folder, precision), read_ranks(folder, precision, plan.world_size))
        if "draws" in what:
            check_draws(verdict, read_ranks(folder, "draws", plan.world_size))
        if "traffic" in what:
            own = dataclasses.replace(make(subject), precision="float32")
            ranks = read_ranks(folder, "draws", plan.world_size)
            check_traffic(verdict, predicted_traffic(own, plan, describe(own, plan)), ranks)
        if any(check.name == f"step {precision}" and not check.passed for check in verdict.checks):
            watch = functools.partial(_watch, subject, plan, mutant, folder)
            is_wide = precision == "float64"
            found = find_first_difference(folder, plan, watch) if is_wide else find_in_narrow(folder, plan, precision)
            verdict.culprit = found or verdict.culprit
        if "reshard" in what and verdict.word != "bug":
            _go_on(verdict, subject, plan, mutant, folder, what[what.index("reshard") + 1])
    return verdict


def _watch(subject, plan, mutant, folder):
    one = {"plan": asdict(plan), "steps": 1, "name": "watched", "precision": "float64", "watch": True}
    run_ranks(plan.world_size, run, subject, mutant, [one], str(folder))
    parts = {}
    for rank in range(plan.world_size):
        facts = json.loads((folder / f"watched-{rank}.json").read_text())
        parts.setdefault(facts["data_part"], facts["pieces"])
        weight = facts["weights"][0]
    mesh = Mesh.parse(plan.mesh)
    is_graph = bool(mesh.used(GRAPH_AXES))
    answer = {part: replay.replay(make(subject), rows, parts, is_graph, weight) for part, rows in parts.items()}
    (folder / "replay.json").write_text(json.dumps(answer))
    return _Done()


class _Done:
    is_done = True


def _go_on(verdict, subject, plan, mutant, folder, other):
    one = {
        "plan": asdict(Plan.parse(other)),
        "steps": 2,
        "name": "reshard",
        "precision": "float64",
        "load": str(folder / "checkpoint"),
    }
    ranks = Plan.parse(other).world_size
    run_ranks(ranks, run, subject, mutant, [one], str(folder))
    reference_ = Reference.read(folder, "float64")
    results = read_ranks(folder, "reshard", ranks)
    found = differences(reference_, results)
    check_step(verdict, reference_, results, "reshard", found)
    verdict.culprit = blame_loading(found, "reshard")
