"""Verify a declared workload: its loss can be called, so a plain step in one process is the reference.

Beforehand one process plays every rank (`dry_run.py`): the same collectives everywhere? what should be sent? And where
something differs, the first step is taken once more, with every module watched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from paceline.nouns import module_names
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.check_dropout import check_draws, check_same_draws
from paceline.verify.judge.checks import check_branches, check_order, check_step, check_traffic
from paceline.verify.judge.compare import Reference, differences
from paceline.verify.judge.localize import blame_disorder, blame_loading, find_first_difference, find_in_narrow
from paceline.verify.judge.order_of_collectives import Call, find_disorder
from paceline.verify.processes import WorldResult
from paceline.verify.prove import Proof, Run


class WorkloadProof(Proof):
    """A verification of a declared workload."""

    dry: dict[str, Any]  # content of dry.json
    precisions: Sequence[str]

    def is_wrong_beforehand(self) -> bool:
        """Play every rank in one process; return True if something is wrong that would be wrong in the ranks too."""
        self.say("dry run: one process plays every rank")
        plan = asdict(self.plan)
        with self.processes.child(module_names.VERIFY_DRY_RUN, "dry", "a dry run of the workload", plan=plan) as finish:
            finish()
        self.dry = json.loads((self.folder / "dry.json").read_text())
        self.verdict.precision = self.dry["precision"]
        self.precisions = precisions_of(self.dry["precision"])
        # In the ranks a wrong order would be a hang; here it has its line before any rank starts.
        calls_in_loss = {}
        for rank, rows in enumerate(self.dry["calls_in_loss"]):
            calls_in_loss[rank] = [Call(*row) for row in rows]
        # The user's own collectives are on `world`, to which all ranks of any mesh belong.
        disorder = find_disorder(calls_in_loss, Mesh.parse(f"replicate={self.plan.world_size}"))
        if disorder is not None:
            self.verdict.add("order", False, f"before running: {disorder.describe()}", disorder=disorder.to_json())
            self.verdict.culprit = blame_disorder(disorder)
        return disorder is not None

    def runs(self) -> list[Run]:
        """Return the runs of the ranks: one in each precision, and one with the model's own dropout."""
        runs: list[Run] = [{"name": name, "precision": name} for name in self.precisions]
        # The checkpoint is of the float64 run: only there a wrong value after loading can't be taken for rounding.
        if {"resume", "reshard"} & set(self.request.what):
            runs[0] |= {"save": str(self.folder / "checkpoint"), "save_at": 1}
        return [*runs, {"name": "draws", "precision": self.precisions[-1], "draws": True, "steps": 2}]

    @contextmanager
    def reference(self) -> Iterator[Callable[[WorldResult], None]]:
        """Start the process that takes the steps plainly."""
        settings = {"precisions": self.precisions, "steps": self.request.steps}
        task = "the steps in one process"
        with self.processes.child(module_names.VERIFY_REFERENCE, "reference", task, **settings) as finish:
            yield lambda world: finish()

    def compare(self) -> None:
        """Make the checks that were asked for, and look for the first difference where the steps differ."""
        checks = self.request.what
        if "order" in checks:
            check_order(self.verdict, {name: self.traces(name) for name in self.precisions}, self.mesh, self.dry)
        if "step" in checks:
            for precision in self.precisions:
                self._check_steps(Reference.read(self.folder, precision))
            repeats_draws = Reference.read(self.folder, "float64").facts["repeats_draws"]
            check_draws(self.verdict, self.results("draws"), repeats_draws)
        if "traffic" in checks:  # of the model's own graph: dropout by value takes other operations
            check_traffic(self.verdict, self.dry["traffic"], self.results("draws"))
        self._find_culprit()
        for check in ("resume", "reshard"):
            if check in checks and self.verdict.is_step_right:
                self._go_on(check)

    def _check_steps(self, reference: Reference) -> None:
        if self.plan.is_compiled and reference.facts["draws_by_place"]:
            compiled = f"compile={self.plan.compile}"
            raise WorkloadError(
                f"with {compiled}, the model's random numbers can't be made the same under every plan",
                "it draws some that are no dropout (torch.rand in a forward pass)",
                f"verify it without {compiled}, or switch that part off for verifying (drop_path=0)",
            )
        self.verdict.notices += reference.facts["notices"]
        check_step(self.verdict, reference, self.results(reference.precision))

    def _find_culprit(self) -> None:
        """Look for the first difference in the widest precision in which the steps differ."""
        failed = {check.name for check in self.verdict.checks if not check.passed}
        first = None
        if "step float64" in failed:
            # A loss that branches differently on part of a batch is the loss's fault, and would be blamed on a module.
            check_branches(Reference.read(self.folder, "float64"), self.results("float64"), self.plan)
            self.say("something differs: looking for the first module")
            first = find_first_difference(self.folder, self.plan, self._watch)
        else:  # wrong only in a narrow precision: somewhere fewer digits are kept than promised
            narrow = [precision for precision in self.precisions if f"step {precision}" in failed]
            if narrow:
                first = find_in_narrow(self.folder, self.plan, narrow[0])
        self.verdict.culprit = first or self.verdict.culprit

    def _watch(self) -> WorldResult:
        """Take the first step once more, on the ranks and in one process, writing down what modules make."""
        world = self.take("watch", self.plan, [{"steps": 1, "name": "watched", "watch": True}])
        if world.is_done:
            settings = {"plan": asdict(self.plan), "ranks": self.plan.world_size}
            task = "the watched step in one process"
            with self.processes.child(module_names.VERIFY_REPLAY, "replay", task, **settings) as finish:
                finish()
        return world

    def _go_on(self, check: str) -> None:
        """Go from the checkpoint of step 1 to the last step in fresh processes: under the same plan, or others."""
        plans = [self.plan] if check == "resume" else other_plans(self.plan)
        for number, plan in enumerate(plans):
            run = f"{check}{number}"
            name = f"{check} {plan.line()}" if check == "reshard" else check
            world = self.take(run, plan, [{"name": run, "load": str(self.folder / "checkpoint")}])
            if not world.is_done:
                world.check_was_not_killed()
                self.verdict.add(name, False, f"the ranks fail: {world.first_failure()}")
                continue
            reference = Reference.read(self.folder, "float64")
            ranks = self.results(run, plan.world_size)
            found = differences(reference, ranks)
            check_step(self.verdict, reference, ranks, name, found)
            if check == "resume":
                check_same_draws(self.verdict, self.results("float64"), ranks)
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


def other_plans(plan: Plan) -> list[Plan]:
    """Return the plans under which a checkpoint of `plan` is loaded: one rank, and as many on another axis."""
    plans = [Plan(mesh="replicate=1")]
    ranks = plan.world_size
    if ranks > 1:
        axis = "shard" if plan.mesh == f"replicate={ranks}" else "replicate"
        plans.append(Plan(mesh=f"{axis}={ranks}"))
    return plans
