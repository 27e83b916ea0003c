"""Run a verification from its first process to its verdict. Read this first.

dry run       one process plays every rank: the same collectives everywhere? what should be sent?
reference     one process, the user's plain step, and how far rounding carries in it        } at the same time
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

from paceline.launch.template import Start
from paceline.nouns import module_names
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import too_small_batch
from paceline.verify.judge.check_dropout import check_draws, check_same_draws
from paceline.verify.judge.checks import check_branches, check_order, check_step, check_traffic
from paceline.verify.judge.compare import RankResult, Reference, differences, read_ranks
from paceline.verify.judge.localize import blame_disorder, blame_loading, find_first_difference, find_in_narrow
from paceline.verify.judge.order import Call, Disorder, find_disorder, read_trace
from paceline.verify.judge.verdict import Verdict
from paceline.verify.processes import WorldResult, finish_child, one_import, run_world, start_child, write_settings

WHAT = ("order", "step", "traffic", "resume", "reshard")
USUAL = ("order", "step", "traffic")
Waits = Callable[[int, int], None]
STEPS = 3  # the third is the first that finds the inbox of a sum filled before


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """The arguments of a verification."""

    script: Path
    arguments: Sequence[str]
    plan: Plan
    steps: int = STEPS
    what: Sequence[str] = USUAL
    preload: Sequence[str] = ()
    keep: Path | None = None  # where the processes' files stay
    module: str = ""  # the name of `script` where it is run as a module

    def program(self) -> dict[str, Any]:
        """Return the user's program, as the settings of every process have it."""
        return {"script": str(self.script), "arguments": list(self.arguments), "module": self.module}


def prove(
    request: VerifyRequest,
    say: Callable[[str], None] = lambda text: None,
    waits: Waits = lambda done, total: None,
) -> Verdict:
    """Verify a plan on a user's workload.

    Args:
        request: the plan, the workload file and the checks.
        say: told what is begun.
        waits: told meanwhile how many of the ranks' runs are done, and of how many.

    Raises:
        WorkloadError, PlanError: it can't be verified, or not trained so.
    """
    began_s = time.monotonic()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children inherit it: CPU arithmetic is compared
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as temporary, one_import(request.preload) as start:
        folder = (request.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WorkloadError(
                f"the folder {folder} for what the processes write", "it is not empty", "name a new one"
            )
        verdict = _Proof(request, folder, say, waits, start).run()
    verdict.seconds = time.monotonic() - began_s
    return verdict


class _Proof:
    def __init__(
        self, request: VerifyRequest, folder: Path, say: Callable[[str], None], waits: Waits, start: Start
    ) -> None:
        self.request = request
        self.start = start
        self.folder = folder
        self.say = say
        self.waits = waits
        self.plan = request.plan
        self.mesh = Mesh.parse(request.plan.mesh)
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
        """Play every rank in one process; return True if nothing is wrong that would be wrong in the ranks too."""
        settings = self._settings("dry", plan=asdict(self.plan))
        child = start_child(self.start, module_names.VERIFY_DRY_RUN, settings)
        finish_child(child, self.folder, "a dry run of the workload")
        self.dry = json.loads((self.folder / "dry.json").read_text())
        self.verdict.precision = self.dry["precision"]
        batch_size = self.dry["models"][0][0]["batch_size"]
        if batch_size < self.mesh.data_size:
            raise too_small_batch(batch_size, self.mesh.data_size)
        # In the ranks a wrong order would be a hang; here it has its line before any rank starts.
        calls_in_loss = {}
        for rank, rows in enumerate(self.dry["persons"]):
            calls_in_loss[rank] = [Call(*row) for row in rows]
        # The user's own collectives are on `world`, to which all ranks of any mesh belong.
        disorder = find_disorder(calls_in_loss, Mesh.parse(f"replicate={self.plan.world_size}"))
        if disorder is not None:
            self.verdict.add("order", False, f"before running: {disorder.describe()}", disorder=disorder.to_json())
            self.verdict.culprit = blame_disorder(disorder)
        return disorder is None

    def _reference_and_ranks(self) -> None:
        precisions = precisions_of(self.dry["precision"])
        self.say(f"{self.plan.line()}: {self.request.steps} steps in one process and on {self.plan.world_size} ranks")
        # At the same time: neither needs anything of the other before the comparison.
        reference = start_child(
            self.start,
            module_names.VERIFY_REFERENCE,
            self._settings("reference", precisions=precisions, steps=self.request.steps),
        )
        try:
            world = self._ranks("ranks", self.plan, self._runs(precisions))
            # Before the ranks' failures are looked at: if one process refuses the workload too, that is the reason.
            finish_child(reference, self.folder, "the steps in one process")
        finally:  # also when the ranks raise: no child outlives the command
            reference.end()
        if not world.is_done:
            self._explain(world, precisions)
            return
        self._compare(precisions)
        for what in ("resume", "reshard"):
            if what in self.request.what and self.verdict.is_step_right:
                self._go_on(what)

    def _runs(self, precisions: Sequence[str]) -> list[dict[str, Any]]:
        """Return the runs of the ranks: one in each precision, and one with the model's own dropout."""
        common = {"plan": asdict(self.plan), "steps": self.request.steps}
        runs: list[dict[str, Any]] = [{**common, "name": name, "precision": name} for name in precisions]
        # The checkpoint is of the float64 run: only there a wrong value after loading can't be taken for rounding.
        if {"resume", "reshard"} & set(self.request.what):
            runs[0] |= {"save": str(self.folder / "checkpoint"), "save_at": 1}
        runs.append({**common, "name": "draws", "precision": precisions[-1], "draws": True, "steps": 2})
        return runs

    def _ranks(self, name: str, plan: Plan, runs: list[dict[str, Any]]) -> WorldResult:
        settings = self._settings(name, runs=runs)

        def waits() -> None:
            done = sum((self.folder / f"{run['name']}-0.json").exists() for run in runs)
            self.waits(done, len(runs))

        return run_world(self.start, self.folder, settings, plan.world_size, self.request.preload, waits)

    def _settings(self, name: str, **more: Any) -> Path:
        return write_settings(self.folder, name, **self.request.program(), **more)

    def _explain(self, world: WorldResult, precisions: Sequence[str]) -> None:
        """Say why the ranks did not come to their end: a refusal, a hang, or a failure that one process has not."""
        # A refusal says what to change, a kill from outside says nothing about the plan. Then the traces, since a rank
        # that left the order explains most hangs and failures. The bare failure comes last.
        refusal = world.refusal()
        if refusal is not None and not world.hang.has_hung:
            raise refusal
        check_was_not_killed(world)
        for run in [*precisions, "draws"]:
            traces = self._traces(run)
            disorder = find_disorder(traces, self.mesh) if traces else None
            if disorder is not None:
                self._blame(disorder, world)
                return
        if world.hang.has_hung:
            message = f"the ranks hang although they began the same collectives: {world.hang.describe()}"
            self.verdict.add("order", False, message)
            return
        self.verdict.add("run", False, f"one process takes the steps, the ranks fail: {world.first_failure()}")

    def _blame(self, disorder: Disorder, world: WorldResult) -> None:
        """Enter that the ranks hang or fail because one left the order of collectives."""
        if world.hang.has_hung:
            how = f"the ranks hang ({world.hang.describe()})"
            self.verdict.culprit = blame_disorder(disorder, world.hang)
        else:
            how = f"the ranks failed ({world.first_failure()})"
            self.verdict.culprit = blame_disorder(disorder)
        self.verdict.add("order", False, f"{how}: {disorder.describe()}", disorder=disorder.to_json())

    def _traces(self, run: str) -> dict[int, list[Call]]:
        """Return a run's calls by rank; ranks that did not begin it are left out."""
        traces = {}
        for rank in range(self.plan.world_size):
            path = self.folder / f"{run}-trace-{rank}.jsonl"
            if path.exists():
                traces[rank] = read_trace(path)
        return traces

    def _compare(self, precisions: Sequence[str]) -> None:
        """Make the checks that were asked for, and look for the first difference where the steps differ."""
        what = self.request.what
        if "order" in what:
            check_order(self.verdict, {name: self._traces(name) for name in precisions}, self.mesh, self.dry)
        if "step" in what:
            for precision in precisions:
                reference = Reference.read(self.folder, precision)
                if self.plan.is_compiled and reference.facts["draws_by_place"]:
                    compiled = f"compile={self.plan.compile}"
                    raise WorkloadError(
                        f"with {compiled}, the model's random numbers can't be made the same under every plan",
                        "it draws some that are no dropout (torch.rand in a forward pass)",
                        f"verify it without {compiled}, or switch that part off for verifying (drop_path=0)",
                    )
                self.verdict.notices += reference.facts["notices"]
                check_step(self.verdict, reference, self._results(precision))
            facts = json.loads((self.folder / "reference-float64.json").read_text())
            check_draws(self.verdict, self._results("draws"), facts["repeats_draws"])
        if "traffic" in what:  # of the model's own graph: dropout by value takes other operations
            check_traffic(self.verdict, self.plan, self.dry["models"], self._results("draws"))
        self._find_culprit(precisions)

    def _find_culprit(self, precisions: Sequence[str]) -> None:
        """Look for the first difference in the widest precision in which the steps differ."""
        failed = {check.name for check in self.verdict.checks if not check.passed}
        if "step float64" in failed:
            # A loss that branches differently on part of a batch is the loss's fault, and would be blamed on a module.
            check_branches(Reference.read(self.folder, "float64"), self._results("float64"), self.plan)
            self.say("something differs: looking for the first module")
            first = find_first_difference(self.folder, self.plan, self._watch)
            self.verdict.culprit = first or self.verdict.culprit
            return
        # Wrong only in a narrow precision: somewhere fewer digits are kept than promised.
        for precision in precisions[1:]:
            if f"step {precision}" in failed:
                first = find_in_narrow(self.folder, self.plan, precision)
                self.verdict.culprit = first or self.verdict.culprit
                return

    def _results(self, run: str) -> list[RankResult]:
        return read_ranks(self.folder, run, self.plan.world_size)

    def _watch(self) -> WorldResult:
        """Take the first step once more, on the ranks and in one process, writing down what modules make."""
        run = {"plan": asdict(self.plan), "steps": 1, "name": "watched", "precision": "float64", "watch": True}
        world = self._ranks("watch", self.plan, [run])
        if world.is_done:
            settings = self._settings("replay", plan=asdict(self.plan), ranks=self.plan.world_size)
            child = start_child(self.start, module_names.VERIFY_REPLAY, settings)
            finish_child(child, self.folder, "the watched step in one process")
        return world

    def _go_on(self, what: str) -> None:
        """Go from the checkpoint of step 1 to the last step in fresh processes: under the same plan, or others."""
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
                check_same_draws(self.verdict, self._results("float64"), ranks)
            # Wrong traffic or dropout is less than a wrong checkpoint, whose place is named instead.
            culprit = self.verdict.culprit
            if culprit is None or culprit.phase in ("traffic", "dropout"):
                self.verdict.culprit = blame_loading(found, name) or culprit


def precisions_of(precision: str) -> list[str]:
    """Return the precisions in which steps are taken, widest first, for a workload of `precision`.

    Under bf16 and fp16 rounding is so large that gradients narrowed by mistake would hide in it. In float32 they do
    not.
    """
    if precision in ("bf16", "fp16"):
        return ["float64", "float32", precision]
    if precision == "float64":
        return ["float64"]
    return ["float64", precision]


def check_was_not_killed(world: WorldResult) -> None:
    """Raise WorkloadError when a rank was ended from outside, which says nothing about the plan."""
    if world.hang.has_hung:
        return
    if world.ending.status == "stopped":
        raise WorkloadError("the ranks should take their steps", "they were stopped", "start the command again")
    if any(f"was ended by {name}" in world.first_failure() for name in ("SIGKILL", "SIGTERM")):
        fix = "see `dmesg` whether memory ran out; verify a smaller batch or a shallower model"
        raise WorkloadError("the ranks should take their steps", world.first_failure(), fix)


def other_plans(plan: Plan) -> list[Plan]:
    """Return the plans under which a checkpoint of `plan` is loaded: one rank, and as many on another axis."""
    plans = [Plan(mesh="replicate=1")]
    ranks = plan.world_size
    if ranks > 1:
        axis = "shard" if plan.mesh == f"replicate={ranks}" else "replicate"
        plans.append(Plan(mesh=f"{axis}={ranks}"))
    return plans


# By `Plan.strategy`.
_NOT_VERIFIED = {
    "servers": (
        "its workers need servers, and verify does not start any yet",
        "verify the workload with replicate; under mode=sync servers end with the same bits as one process",
    ),
}


def check_plan(plan: Plan) -> None:
    """Raise PlanError for a plan that promises no equality, or is no mesh of ranks."""
    if plan.strategy in _NOT_VERIFIED:
        raise PlanError(f"can't verify {plan.line()}", *_NOT_VERIFIED[plan.strategy])
    if plan.compression != "none":
        raise PlanError(
            f"can't verify compression={plan.compression}",
            "compressed gradients differ from those of one process by design",
            "verify the same plan with compression=none",
        )
    if plan.float8 != "off":
        raise PlanError(
            f"can't verify float8={plan.float8}",
            "verify computes in float64, and float8 rounds what is multiplied",
            "verify the same plan without float8",
        )
    if plan.optimizer_states != "full":
        raise PlanError(
            f"can't verify optimizer_states={plan.optimizer_states}",
            "it compares in float64, and what keeps states in few bits updates in float32",
            "verify the same plan without optimizer_states",
        )


def as_json(verdict: Verdict, request: VerifyRequest) -> dict[str, Any]:
    """Return the verdict with what was asked, as a JSON object."""
    return {**verdict.to_json(), "script": str(request.script), "steps": request.steps, "options": asdict(request.plan)}


def check_what(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the checks that were asked for.

    Raises:
        WorkloadError: one is unknown.
    """
    unknown = [word for word in words if word not in (*WHAT, "all")]
    if unknown:
        raise WorkloadError(
            f"can't verify {unknown[0]!r}", f"the choices are {', '.join(WHAT)}, all", "write one of these"
        )
    return WHAT if "all" in words else tuple(words)
