"""Run a verification from its first process to its verdict. Read this first.

Every verification takes the same way; what its processes run depends on the file, and is in `workloads.py` (a declared
workload) and `loops.py` (a loop of the user's own):

beforehand    what shows without the plan's ranks
reference     one process, the user's plain step, and how far rounding carries in it
ranks         the plan's own processes take the same steps
comparison    every rank's shards with the reference's
culprit       only if something differs: what is the first that does
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.compare import RankResult, read_ranks
from paceline.verify.judge.localize import blame_disorder
from paceline.verify.judge.order_of_collectives import Call, find_disorder, read_trace
from paceline.verify.judge.verdict import Verdict
from paceline.verify.processes import Processes, WorldResult, one_import

ALL_CHECKS = ("order", "step", "traffic", "resume", "reshard")
USUAL = ("order", "step", "traffic")
Says = Callable[[str], None]
Waits = Callable[[int, int], None]
Run = dict[str, Any]  # what a set of ranks does: its name, and how it differs from other runs
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
    kind: type[Proof],
    say: Says = lambda text: None,
    waits: Waits = lambda finished, total: None,
) -> Verdict:
    """Verify a plan on a user's file.

    Args:
        request: the plan, the file and the checks.
        kind: the class of the verification of such a file.
        say: a function that is told what begins.
        waits: a function that is told the number of the ranks' finished runs, and of all.

    Raises:
        WorkloadError, PlanError: it can't be verified, or not trained so.
    """
    began_s = time.monotonic()
    check_plan(request.plan)
    kind.check(request)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children inherit it: CPU arithmetic is compared
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as temporary, one_import(request.preload) as start:
        folder = (request.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WorkloadError(
                f"the folder {folder} for what the processes write", "it is not empty", "name a new one"
            )
        proof = kind(request, Processes(start, folder, request.program(), request.preload), say, waits)
        proof.run()
    proof.verdict.seconds = time.monotonic() - began_s
    return proof.verdict


class Proof:
    """A verification: it starts processes, tells them what to do, and judges what they wrote.

    Attributes:
        explains_failures: True if the order of collectives explains failures, not only hangs.
        all_runs: the names of all runs, where they are taken one by one.
        precision: the precision of the steps, where it is known beforehand.
    """

    explains_failures: ClassVar[bool] = True
    all_runs: ClassVar[Sequence[str]] = ()
    precision: ClassVar[str] = ""

    def __init__(self, request: VerifyRequest, processes: Processes, say: Says, waits: Waits) -> None:
        self.request = request
        self.processes = processes
        self.folder = processes.folder
        self.say = say
        self.waits = waits
        self.plan = request.plan
        self.mesh = Mesh.parse(request.plan.mesh)
        self.verdict = Verdict(request.plan.line(), precision=self.precision)

    @classmethod
    def check(cls, request: VerifyRequest) -> None:
        """Raise WorkloadError for checks that such a file can't have."""

    def runs(self) -> list[Run]:
        """Return the runs of the plan's ranks, in their order."""
        raise NotImplementedError

    def is_wrong_beforehand(self) -> bool:
        """Look for what shows before any rank runs; return True if something is wrong."""
        return False

    def reference(self) -> AbstractContextManager[Callable[[WorldResult], None]]:
        """Begin the steps of one process, beside the plan's ranks.

        What is yielded has them done, and is handed the ranks' end. It raises WorkloadError where one process does not
        take the steps either.
        """
        raise NotImplementedError

    def compare(self) -> None:
        """Compare what the processes wrote, and enter it in the verdict."""
        raise NotImplementedError

    def run(self) -> None:
        """Verify."""
        if self.is_wrong_beforehand():
            return
        self.say(f"{self.plan.line()}: {self.request.steps} steps in one process and on {self.plan.world_size} ranks")
        # At the same time: neither needs anything of the other before the comparison.
        with self.reference() as finish:
            world = self.take("ranks", self.plan, self.runs())
            # Before the ranks' failures are looked at: if one process refuses the file too, that is the reason.
            finish(world)
        if world.is_done:
            self.compare()
        else:
            self._explain(world)

    def take(self, name: str, plan: Plan, runs: list[Run]) -> WorldResult:
        """Let the ranks of a plan take their runs."""
        names = self.all_runs or [run["name"] for run in runs]

        def waits() -> None:
            finished = sum((self.folder / f"{run_name}-0.json").exists() for run_name in names)
            self.waits(finished, len(names))

        common = {"plan": asdict(plan), "steps": self.request.steps, "precision": "float64"}
        return self.processes.run_world(name, plan.world_size, waits, runs=[{**common, **run} for run in runs])

    def results(self, name: str, ranks: int | None = None) -> list[RankResult]:
        """Return the results that the ranks of a run wrote."""
        return read_ranks(self.folder, name, self.plan.world_size if ranks is None else ranks)

    def traces(self, name: str) -> dict[int, list[Call]]:
        """Return a run's calls by rank; ranks that did not begin it are left out."""
        traces = {}
        for rank in range(self.plan.world_size):
            path = self.folder / f"{name}-trace-{rank}.jsonl"
            if path.exists():
                traces[rank] = read_trace(path)
        return traces

    def _explain(self, world: WorldResult) -> None:
        """Explain why the ranks did not come to their end: a refusal, a hang, or a failure that one process has not."""
        # A refusal says what to change, a kill from outside says nothing about the plan. Then the traces, since a rank
        # that left the order explains most hangs and failures. The bare failure comes last.
        world.check()
        has_hung = world.hang.has_hung
        failure = world.first_failure()
        for run in self.runs() if has_hung or self.explains_failures else []:
            traces = self.traces(run["name"])
            disorder = find_disorder(traces, self.mesh) if traces else None
            if disorder is not None:
                symptom = f"the ranks hang ({world.hang.describe()})" if has_hung else f"the ranks failed ({failure})"
                self.verdict.culprit = blame_disorder(disorder, world.hang if has_hung else None)
                self.verdict.add("order", False, f"{symptom}: {disorder.describe()}", disorder=disorder.to_json())
                return
        if has_hung:
            message = f"the ranks hang although they began the same collectives: {world.hang.describe()}"
            self.verdict.add("order", False, message)
            return
        self.verdict.add("run", False, f"one process takes the steps, the ranks fail: {failure}")


# By a plan's option: its value that is verified, what is found of others, and what to verify in their place.
_VERIFIED = {
    "compression": (
        "none",
        "compressed gradients differ from those of one process by design",
        "verify the same plan with compression=none",
    ),
    "float8": (
        "off",
        "verify computes in float64, and float8 rounds what is multiplied",
        "verify the same plan without float8",
    ),
    "optimizer_states": (
        "full",
        "it compares in float64, and what keeps states in few bits updates in float32",
        "verify the same plan without optimizer_states",
    ),
}


def check_plan(plan: Plan) -> None:
    """Raise PlanError for a plan that promises no equality, or is no mesh of ranks."""
    if plan.strategy == "servers":
        raise PlanError(
            f"can't verify {plan.line()}",
            "its workers need servers, and verify does not start any yet",
            "verify the workload with replicate; under mode=sync servers end with the same bits as one process",
        )
    for option, (verified, found, fix) in _VERIFIED.items():
        value = getattr(plan, option)
        if value != verified:
            raise PlanError(f"can't verify {option}={value}", found, fix)


def as_json(verdict: Verdict, request: VerifyRequest) -> dict[str, Any]:
    """Return the verdict with what was asked, as a JSON object."""
    return {**verdict.to_json(), "script": str(request.script), "steps": request.steps, "options": asdict(request.plan)}


def check_what(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the checks that were asked for.

    Raises:
        WorkloadError: one is unknown.
    """
    unknown = [word for word in words if word not in (*ALL_CHECKS, "all")]
    if unknown:
        raise WorkloadError(
            f"can't verify {unknown[0]!r}", f"the choices are {', '.join(ALL_CHECKS)}, all", "write one of these"
        )
    return ALL_CHECKS if "all" in words else tuple(words)
