"""The verification from its first process to its verdict. Read this first.

dry run       one process plays every rank: the same collectives everywhere? what should be sent?
reference     one process, the person's plain step, and how far rounding carries in it        } at the same time
ranks         the plan's own processes take the same steps                                    }
comparison    every rank's pieces with the reference's, the ledger with the prediction
culprit       only if something differs: which module is the first, which collective is next to it
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.nouns import module_names
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import too_small_batch
from paceline.verify.judge.check_dropout import check_draws, check_same_draws
from paceline.verify.judge.checks import check_branches, check_order, check_step, check_traffic
from paceline.verify.judge.compare import Reference, differences, read_ranks
from paceline.verify.judge.localize import blame_disorder, blame_loading, find_first_difference, find_in_narrow
from paceline.verify.judge.order import Call, find_disorder, read_trace
from paceline.verify.judge.verdict import Verdict
from paceline.verify.processes import WorldResult, finish_child, run_world, start_child, write_settings

WHAT = ("order", "step", "traffic", "resume", "reshard")
USUAL = ("order", "step", "traffic")
STEPS = 3  # the third is the first that finds the inbox of a sum filled before


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What to verify."""

    script: Path
    arguments: Sequence[str]
    plan: Plan
    steps: int = STEPS
    what: Sequence[str] = USUAL
    preload: Sequence[str] = ()
    keep: Path | None = None  # where the processes' files stay


def prove(request: VerifyRequest, say: Callable[[str], None] = lambda text: None) -> Verdict:
    """Verify a plan on a person's workload.

    Args:
        request: what.
        say: shows progress.

    Raises:
        WorkloadError, PlanError: it can't be verified, or not trained so.
    """
    began_s = time.monotonic()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the children: the arithmetic that is compared is the CPU's
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as temporary:
        folder = (request.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WorkloadError(
                f"the folder {folder} for what the processes write", "it is not empty", "name a new one"
            )
        verdict = _Proof(request, folder, say).run()
    verdict.seconds = time.monotonic() - began_s
    return verdict


class _Proof:
    def __init__(self, request: VerifyRequest, folder: Path, say: Callable[[str], None]) -> None:
        self.request, self.folder, self.say = request, folder, say
        self.plan, self.mesh = request.plan, Mesh.parse(request.plan.mesh)
        self.verdict = Verdict(request.plan.line())
        self.dry: dict[str, Any] = {}

    def run(self) -> Verdict:
        check_plan(self.plan)
        self.say("dry run: one process plays every rank")
        if not self._dry_run():
            return self.verdict
        self._reference_and_ranks()
        return self.verdict

    def _dry_run(self) -> bool:
        """Whether there is reason to go on."""
        settings = self._settings("dry", plan=asdict(self.plan))
        finish_child(start_child(module_names.VERIFY_DRY_RUN, settings), self.folder, "a dry run of the workload")
        self.dry = json.loads((self.folder / "dry.json").read_text())
        self.verdict.precision = self.dry["precision"]
        batch_size = self.dry["models"][0][0]["batch_size"]
        if batch_size < self.mesh.data_size:
            raise too_small_batch(batch_size, self.mesh.data_size)
        persons = {rank: [Call(*one) for one in calls] for rank, calls in enumerate(self.dry["persons"])}
        disorder = find_disorder(persons, Mesh.parse(f"replicate={self.plan.world_size}"))
        if disorder is not None:
            self.verdict.add("order", False, f"before running: {disorder.describe()}", disorder=disorder.to_json())
            self.verdict.culprit = blame_disorder(disorder)
        return disorder is None

    def _reference_and_ranks(self) -> None:
        own = self.dry["precision"]
        precisions = precisions_of(own)
        self.say(f"{self.plan.line()}: {self.request.steps} steps in one process and on {self.plan.world_size} ranks")
        reference = start_child(
            module_names.VERIFY_REFERENCE,
            self._settings("reference", precisions=precisions, steps=self.request.steps),
        )
        try:
            world = self._ranks("ranks", self.plan, self._runs(precisions))
            finish_child(reference, self.folder, "the steps in one process")
        finally:
            reference.kill()
            reference.wait()
        if not world.is_done:
            self._explain(world, precisions)
            return
        self._compare(precisions)
        for what in ("resume", "reshard"):
            if what in self.request.what and self.verdict.is_step_right:
                self._go_on(what)

    def _runs(self, precisions: Sequence[str]) -> list[dict[str, Any]]:
        common = {"plan": asdict(self.plan), "steps": self.request.steps}
        runs: list[dict[str, Any]] = [{**common, "name": name, "precision": name} for name in precisions]
        if {"resume", "reshard"} & set(self.request.what):
            runs[0] |= {"save": str(self.folder / "checkpoint"), "save_at": 1}
        return [*runs, {**common, "name": "draws", "precision": precisions[-1], "draws": True, "steps": 2}]

    def _ranks(self, name: str, plan: Plan, runs: list[dict[str, Any]]) -> WorldResult:
        settings = self._settings(name, runs=runs)
        return run_world(self.folder, settings, plan.world_size, self.request.preload)

    def _settings(self, name: str, **more: Any) -> Path:
        script = {"script": str(self.request.script), "arguments": list(self.request.arguments)}
        return write_settings(self.folder, name, **script, **more)

    def _explain(self, world: WorldResult, precisions: Sequence[str]) -> None:
        """The ranks did not come to their end: a refusal, a hang, or a failure that one process has not."""
        refusal = world.refusal()
        if refusal is not None and not world.hang.has_hung:
            raise refusal
        check_was_not_killed(world)
        for name in [*precisions, "draws"]:
            traces = self._traces(name)
            disorder = find_disorder(traces, self.mesh) if traces else None
            if disorder is not None:
                how = (
                    f"the ranks hang ({world.hang.describe()})"
                    if world.hang.has_hung
                    else f"the ranks failed ({world.first_failure()})"
                )
                self.verdict.add("order", False, f"{how}: {disorder.describe()}", disorder=disorder.to_json())
                self.verdict.culprit = blame_disorder(disorder, world.hang if world.hang.has_hung else None)
                return
        if world.hang.has_hung:
            said = f"the ranks hang although they began the same collectives: {world.hang.describe()}"
            self.verdict.add("order", False, said)
            return
        self.verdict.add("run", False, f"one process takes the steps, the ranks fail: {world.first_failure()}")

    def _traces(self, run: str) -> dict[int, list[Call]]:
        paths = {rank: self.folder / f"{run}-trace-{rank}.jsonl" for rank in range(self.plan.world_size)}
        return {rank: read_trace(path) for rank, path in paths.items() if path.exists()}

    def _compare(self, precisions: Sequence[str]) -> None:
        what = self.request.what
        if "order" in what:
            check_order(self.verdict, {name: self._traces(name) for name in precisions}, self.mesh, self.dry)
        if "step" in what:
            for precision in precisions:
                reference = Reference.read(self.folder, precision)
                self.verdict.notices += reference.facts["notices"]
                ranks = read_ranks(self.folder, precision, self.plan.world_size)
                check_step(self.verdict, reference, ranks)
            draws = read_ranks(self.folder, "draws", self.plan.world_size)
            check_draws(self.verdict, draws)
        if "traffic" in what:  # of the model's own graph: dropout by value takes other operations
            ranks = read_ranks(self.folder, "draws", self.plan.world_size)
            check_traffic(self.verdict, self.plan, self.dry["models"], ranks)
        failed = {check.name for check in self.verdict.checks if not check.passed}
        if "step float64" in failed:
            ranks = read_ranks(self.folder, "float64", self.plan.world_size)
            check_branches(Reference.read(self.folder, "float64"), ranks)
            self.say("something differs: looking for the first module")
            found = find_first_difference(self.folder, self.plan, self._watch)
            self.verdict.culprit = found or self.verdict.culprit
            return
        for precision in precisions[1:]:
            if f"step {precision}" in failed:
                found = find_in_narrow(self.folder, self.plan, precision)
                self.verdict.culprit = found or self.verdict.culprit
                return

    def _watch(self) -> WorldResult:
        """The first step once more, every rank writing down what its modules make."""
        run = {"plan": asdict(self.plan), "steps": 1, "name": "watched", "precision": "float64", "watch": True}
        world = self._ranks("watch", self.plan, [run])
        if world.is_done:
            settings = self._settings("replay", plan=asdict(self.plan), ranks=self.plan.world_size)
            finish_child(
                start_child(module_names.VERIFY_REPLAY, settings), self.folder, "the watched step in one process"
            )
        return world

    def _go_on(self, what: str) -> None:
        """From the checkpoint of step 1 to the last step, in fresh processes: under the same plan, or others."""
        plans = [self.plan] if what == "resume" else other_plans(self.plan)
        for number, plan in enumerate(plans):
            run: dict[str, Any] = {
                "plan": asdict(plan), "steps": self.request.steps, "name": f"{what}{number}", "precision": "float64",
                "load": str(self.folder / "checkpoint"),
            }  # fmt: skip
            name = f"{what} {plan.line()}" if what == "reshard" else what
            world = self._ranks(f"{what}{number}", plan, [run])
            if not world.is_done:
                check_was_not_killed(world)
                self.verdict.add(name, False, f"the ranks fail: {world.first_failure()}")
                continue
            reference = Reference.read(self.folder, "float64")
            ranks = read_ranks(self.folder, run["name"], plan.world_size)
            found = differences(reference, ranks)
            check_step(self.verdict, reference, ranks, name, found)
            if what == "resume":
                check_same_draws(self.verdict, read_ranks(self.folder, "float64", plan.world_size), ranks)
            has_worse = self.verdict.culprit is not None and self.verdict.culprit.phase not in ("traffic", "dropout")
            self.verdict.culprit = (
                self.verdict.culprit if has_worse else blame_loading(found, name) or self.verdict.culprit
            )


def precisions_of(own: str) -> list[str]:
    """What the steps are taken in: exactly, then narrower.

    Under bf16 rounding is so large that gradients narrowed by mistake would hide in it; in float32 they do not.
    """
    return list(dict.fromkeys(["float64", "float32", own])) if own == "bf16" else list(dict.fromkeys(["float64", own]))


def check_was_not_killed(world: WorldResult) -> None:
    """Raise WorkloadError when a rank was ended from outside: that says nothing of the plan."""
    if world.hang.has_hung:
        return
    if world.ending.status == "stopped":
        raise WorkloadError("the ranks to take their steps", "they were stopped", "start the command again")
    if any(f"was ended by {name}" in world.first_failure() for name in ("SIGKILL", "SIGTERM")):
        fix = "see `dmesg` whether memory ran out; verify a smaller batch or a shallower model"
        raise WorkloadError("the ranks to take their steps", world.first_failure(), fix)


def other_plans(plan: Plan) -> list[Plan]:
    """One rank, and as many on another axis: what a checkpoint of `plan` is loaded under."""
    ranks = plan.world_size
    other = f"shard={ranks}" if plan.mesh == f"replicate={ranks}" else f"replicate={ranks}"
    return [Plan(mesh="replicate=1"), *([Plan(mesh=other)] if ranks > 1 else [])]


def check_plan(plan: Plan) -> None:
    """Raise PlanError for what promises no equality, or is no mesh of ranks."""
    if plan.server:
        raise PlanError(
            f"to verify server={plan.server}",
            "its workers need servers, and verify does not start any yet",
            "verify the workload with replicate; under mode=sync servers end with the same bits as one process",
        )
    if plan.compression != "none":
        raise PlanError(
            f"to verify compression={plan.compression}",
            "compressed gradients differ from those of one process by design",
            "verify the same plan with compression=none",
        )


def as_json(verdict: Verdict, request: VerifyRequest) -> dict[str, Any]:
    """The verdict with what was asked."""
    return {**verdict.to_json(), "script": str(request.script), "steps": request.steps, "options": asdict(request.plan)}


def check_what(words: Sequence[str]) -> tuple[str, ...]:
    """The checks that were asked for.

    Raises:
        WorkloadError: one is unknown.
    """
    unknown = [word for word in words if word not in (*WHAT, "all")]
    if unknown:
        raise WorkloadError(f"to verify {unknown[0]!r}", f"there are {', '.join(WHAT)}, all", "write one of these")
    return WHAT if "all" in words else tuple(words)
