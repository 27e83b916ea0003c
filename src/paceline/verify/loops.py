"""Verify a file with a loop of its own (`paceline.prepare`): its steps on several ranks against those in one process.

The file runs in float64 and with dropout by value: as the plan's ranks, as one process, and so once more with every
module's result moved by one rounding, which measures the bound. After each step losses, gradients, buffers, optimizer
states and parameters must agree. What is compared is the loop itself, so there is no dry run and no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.verify.judge.check_dropout import check_draws
from paceline.verify.judge.checks import check_step
from paceline.verify.judge.compare import (
    SCALARS,
    Difference,
    RankResult,
    Reference,
    differences,
    distances,
    largest_finite,
    module_of,
    read_ranks,
    relative,
    tolerance_of,
    with_changes,
)
from paceline.verify.judge.verdict import FirstDifference, Verdict
from paceline.verify.processes import WorldResult
from paceline.verify.prove import USUAL, Proof, Run, VerifyRequest

# Where rounding can't be measured. Float64 rounds by 2e-16; a step's sums and Adam's division by small roots carry that
# some digits up. A wrong weight of a batch changes the first digits.
BOUND = 1e-8
ONE_PROCESS = Plan(mesh="replicate=1")
_CHAOTIC = 1e-6  # what one rounding may change of a loss: a bug could not be told from more
_CAUSES = (
    "the loss is no mean over the samples that are its weight, or the loop draws by itself, as torch.randn does, which "
    "differs between ranks: draw in the data set's []"
)


class LoopProof(Proof):
    """A verification of a loop: all its processes are ranks that run the file."""

    explains_failures = False  # a rank that fails leaves the order of collectives by that
    all_runs = ("ranks", "alone", "noisy", "draws")  # of the file, in this order
    precision = "float64"

    @classmethod
    def check(cls, request: VerifyRequest) -> None:
        """Raise WorkloadError for checks that need a declared workload."""
        if set(request.what) - set(USUAL):
            raise WorkloadError(
                f"verify was asked for {', '.join(request.what)}",
                "the file trains by paceline.prepare, of which the steps alone are compared",
                "leave --what out; a run that is killed and resumed shows the rest: paceline run --resume",
            )

    def runs(self) -> list[Run]:
        """Return the run of the file."""
        return [self._run("ranks")]

    def _run(self, name: str) -> Run:
        # In one process too: its batches are as large.
        return {"name": name, "is_loop": True, "data_parts": self.mesh.data_size, **options_of(name)}

    def _take_once(self, name: str, plan: Plan) -> WorldResult:
        return self.take(name, plan, [self._run(name)])

    @contextmanager
    def reference(self) -> Iterator[Callable[[WorldResult], None]]:
        """Run the file in one process after the ranks: it takes all cores."""
        yield self._run_alone

    def _run_alone(self, world: WorldResult) -> None:
        world.check()  # then one process need not run it
        alone = self._take_once("alone", ONE_PROCESS)
        alone.check()
        if alone.is_done:
            return
        if (failure := alone.own_failure()) is not None:
            raise failure
        raise WorkloadError(
            "the file should train in one process", alone.first_failure(), "see that it does: python FILE"
        )

    def compare(self) -> None:
        """Measure rounding, compare the steps, and look at what the ranks draw by themselves."""
        ranks = self.plan.world_size
        noisy = self._take_once("noisy", ONE_PROCESS)  # it may fail: then what is measured is missing
        compare(self.verdict, self.folder, ranks, noisy.is_done)
        if self.verdict.is_step_right and self.results("alone", 1)[0].facts["has_draws"]:
            drawing = self._take_once("draws", self.plan)
            drawing.check()
            if not drawing.is_done:
                failure = drawing.first_failure()
                self.verdict.add("dropout", False, f"with the model's own dropout the ranks fail: {failure}")
                return
            check_draws(self.verdict, self.results("draws"), is_loop=True)


def options_of(name: str) -> dict[str, bool]:
    """Return the options in which a run, by its name, differs from that of the plan's ranks."""
    return {"is_noisy": name == "noisy", "draws": name == "draws"}


def _read(folder: Path, name: str, ranks: int) -> list[RankResult]:
    """Read what a run's ranks wrote, and what each step changed of the parameters."""
    results = read_ranks(folder, name, ranks)
    for result in results:
        result.tensors = with_changes(result.tensors)
    return results


def _read_reference(verdict: Verdict, folder: Path, has_noise: bool) -> Reference:
    """Read the steps of one process, and how far one rounding in each module moves them."""
    (alone,) = _read(folder, "alone", 1)
    noisy = _read(folder, "noisy", 1)[0] if has_noise else alone
    noise = {name: relative(alone.facts[name], noisy.facts[name]) for name in SCALARS}
    facts = {**alone.facts, "scalar_noise": noise, "scalar_turned": dict.fromkeys(SCALARS, 0.0)}
    reference = Reference(alone.tensors, {}, facts, "float64")
    if has_noise and noisy.tensors.keys() == alone.tensors.keys() and noise["losses"] <= _CHAOTIC:
        reference.noise = distances(alone.tensors, noisy.tensors)
        return reference
    assumed = BOUND / tolerance_of(reference).noise
    verdict.notices.append(f"rounding could not be measured on this loop: differences up to {BOUND:.0e} pass")
    facts["scalar_noise"] = dict.fromkeys(SCALARS, assumed)
    reference.noise = {key: assumed * largest_finite(values) for key, values in alone.tensors.items()}
    return reference


def compare(verdict: Verdict, folder: Path, ranks: int, has_noise: bool) -> None:
    """Enter whether each rank's steps are those of one process."""
    reference = _read_reference(verdict, folder, has_noise)
    results = _read(folder, "ranks", ranks)
    expected = len(reference.facts["losses"])
    for result in results:
        steps = len(result.facts["losses"])
        if steps != expected:
            verdict.add("step float64", False, f"rank {result.rank} takes {steps} steps, one process {expected}")
            message = "the ranks take another number of steps than one process"
            verdict.culprit = FirstDifference("", "", "later step", message)
            return
    found = differences(reference, results)
    check_step(verdict, reference, results, found=found)
    if not verdict.checks[-1].passed:
        verdict.culprit = _culprit(verdict.checks[-1].details["scalars"], found)


# What can be said of the first tensor that differs, by its kind.
_MESSAGES = {
    "gradient": ("backward", "the gradient of {} that the update sees in step {} is another"),
    "buffer": ("buffer", "the buffer {} is another after step {}"),
    "state": ("update", "the optimizer's {} is another after step {}, though its gradient is the same"),
    "change": ("update", "{} is changed otherwise in step {}, though its gradient is the same"),
    "parameter": ("update", "{} is another after step {}"),
}


def _culprit(scalars: Sequence[str], found: Sequence[Difference]) -> FirstDifference:
    """Name the first difference: of a loss, a tensor or a learning rate."""
    first = found[0] if found else None
    if first is not None and not first.step:
        message = f"{first.name} is another before the first step"
        return FirstDifference(module_of(first.name), "", "start", message)
    is_loss = scalars and scalars[0].startswith("step ") and ": the loss " in scalars[0]
    step = int(scalars[0].split()[1].rstrip(":")) if is_loss else 0
    if is_loss and (first is None or step <= first.step):
        return FirstDifference("", "", "loss", f"the loss of step {step} is another; {_CAUSES}")
    if first is None:
        return FirstDifference("", "", "update", scalars[0])
    phase, message = _MESSAGES[first.kind]
    detail = f": {first.found}" if first.found else ""
    return FirstDifference(module_of(first.name), "", phase, message.format(first.name, first.step) + detail)
