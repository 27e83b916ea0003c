"""Verify a file with a loop of its own (`paceline.prepare`): its steps on several ranks against those in one process.

The file runs in float64 and with dropout by value: as the plan's ranks, as one process, and so once more with every
module's result moved by one rounding, which measures the bound. After each step losses, gradients, buffers, optimizer
states and parameters must agree. What is compared is the loop itself, so there is no dry run and no prediction.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.launch.template import Start
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.check_dropout import check_draws_of_loop
from paceline.verify.judge.checks import check_step
from paceline.verify.judge.compare import (
    Difference,
    RankResult,
    Reference,
    differences,
    largest_finite,
    module_of,
    read_ranks,
    tolerance_of,
    with_changes,
)
from paceline.verify.judge.verdict import FirstDifference, Verdict
from paceline.verify.processes import LOOP_RANK, WorldResult, one_import, run_world, write_settings
from paceline.verify.prove import USUAL, VerifyRequest, Waits, check_plan, check_was_not_killed

# Where rounding can't be measured. Float64 rounds by 2e-16; a step's sums and Adam's division by small roots carry that
# some digits up. A wrong weight of a batch changes the first digits.
BOUND = 1e-8
_CHAOTIC = 1e-6  # what one rounding may change of a loss: a bug could not be told from more
_RUNS = ("ranks", "alone", "noisy", "draws")  # of the file, in this order
_SCALARS = ("losses", "weights", "norms")
_CAUSES = (
    "the loss is no mean over the samples that are its weight, or the loop draws by itself, as torch.randn does, which "
    "differs between ranks: draw in the data set's []"
)


def prove_loop(
    request: VerifyRequest,
    say: Callable[[str], None] = lambda text: None,
    waits: Waits = lambda done, total: None,
) -> Verdict:
    """Verify a loop.

    Args:
        request: the plan, the file and the checks.
        say: told what is begun.
        waits: told meanwhile how many runs of the file are done, and of how many.

    Raises:
        WorkloadError, PlanError: it can't be verified, or not trained so.
    """
    began_s = time.monotonic()
    check_plan(request.plan)
    if set(request.what) - set(USUAL):
        raise WorkloadError(
            f"verify was asked for {', '.join(request.what)}",
            "the file trains by paceline.prepare, of which the steps alone are compared",
            "leave --what out; a run that is killed and resumed shows the rest: paceline run --resume",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children inherit it: CPU arithmetic is compared
    verdict = Verdict(request.plan.line())
    verdict.precision = "float64"
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as temporary, one_import(request.preload) as start:
        folder = (request.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ranks = request.plan.world_size
        say(f"{request.plan.line()}: {request.steps} steps on {ranks} ranks, and in one process")
        world = _run(start, request, folder, "ranks", request.plan, waits)
        alone = _run(start, request, folder, "alone", Plan(mesh="replicate=1"), waits)
        if not alone.is_done:
            if (own := alone.own_failure()) is not None:
                raise own
            raise WorkloadError(
                "the file should train in one process", alone.first_failure(), "see that it does: python FILE"
            )
        if not world.is_done:
            verdict.add("run", False, f"one process takes the steps, the ranks fail: {world.first_failure()}")
        else:
            noisy = _world(
                start, request, folder, "noisy", Plan(mesh="replicate=1"), waits
            )  # may fail: what is measured is missing
            compare(verdict, folder, ranks, noisy.is_done)
            if verdict.is_step_right and read_ranks(folder, "alone", 1)[0].facts["has_draws"]:
                drawing = _run(start, request, folder, "draws", request.plan, waits)
                check_draws(verdict, folder, ranks, "" if drawing.is_done else drawing.first_failure())
    verdict.seconds = time.monotonic() - began_s
    return verdict


def _run(start: Start, request: VerifyRequest, folder: Path, name: str, plan: Plan, waits: Waits) -> WorldResult:
    """Run the file, and raise its refusal if that is how it ends."""
    world = _world(start, request, folder, name, plan, waits)
    refusal = world.refusal()
    if refusal is not None and not world.hang.has_hung:
        raise refusal
    check_was_not_killed(world)
    return world


def options_of(run: str) -> dict[str, Any]:
    """Return in which way a run, by its name, is another than that of the plan's ranks."""
    return {"is_noisy": run == "noisy", "draws": run == "draws"}


def _world(start: Start, request: VerifyRequest, folder: Path, name: str, plan: Plan, waits: Waits) -> WorldResult:
    settings = write_settings(
        folder,
        name,
        **request.program(),
        steps=request.steps,
        run=name,
        **options_of(name),
        plan=asdict(plan),
        data_parts=Mesh.parse(request.plan.mesh).data_size,  # in one process too: its batches are as large
    )
    done = _RUNS.index(name)
    return run_world(
        start, folder, settings, plan.world_size, request.preload, lambda: waits(done, len(_RUNS)), LOOP_RANK
    )


def _read(folder: Path, run: str, ranks: int) -> list[RankResult]:
    """Read what a run's ranks wrote, and what each step changed of the parameters."""
    results = read_ranks(folder, run, ranks)
    for result in results:
        result.tensors = with_changes(result.tensors)
    return results


def _read_reference(verdict: Verdict, folder: Path, has_noise: bool) -> Reference:
    """Read the steps of one process, and how far one rounding in each module moves them."""
    (alone,) = _read(folder, "alone", 1)
    facts = {**alone.facts, "scalar_noise": {}, "scalar_turned": dict.fromkeys(_SCALARS, 0.0)}
    reference = Reference(alone.tensors, {}, facts, "float64")
    noisy = _read(folder, "noisy", 1)[0] if has_noise else alone
    is_measured = has_noise and noisy.tensors.keys() == alone.tensors.keys()
    for name in _SCALARS:
        pairs = list(zip(alone.facts[name], noisy.facts[name], strict=False))
        facts["scalar_noise"][name] = max((abs(a - b) / max(abs(a), 1e-300) for a, b in pairs), default=0.0)
    if not is_measured or facts["scalar_noise"]["losses"] > _CHAOTIC:
        assumed = BOUND / tolerance_of(reference).noise
        verdict.notices.append(f"rounding could not be measured on this loop: differences up to {BOUND:.0e} pass")
        facts["scalar_noise"] = dict.fromkeys(_SCALARS, assumed)
        reference.noise = {key: assumed * largest_finite(values) for key, values in alone.tensors.items()}
        return reference
    for key, values in alone.tensors.items():
        reference.noise[key] = largest_finite(values.astype("f8") - noisy.tensors[key].astype("f8"))
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


def check_draws(verdict: Verdict, folder: Path, ranks: int, failure: str = "") -> None:
    """Enter whether the ranks' own dropout, in one more run, is right."""
    if failure:
        verdict.add("dropout", False, f"with the model's own dropout the ranks fail: {failure}")
    else:
        check_draws_of_loop(verdict, read_ranks(folder, "draws", ranks))


# What can be said of the first tensor that differs, by its kind.
_WHERE = {
    "gradient": ("backward", "the gradient of {} that the update sees in step {} is another"),
    "buffer": ("buffer", "the buffer {} is another after step {}"),
    "state": ("update", "the optimizer's {} is another after step {}, though its gradient is the same"),
    "change": ("update", "{} is changed otherwise in step {}, though its gradient is the same"),
    "parameter": ("update", "{} is another after step {}"),
}


def _culprit(scalars: Sequence[str], found: Sequence[Difference]) -> FirstDifference:
    """Say which comes first: a loss, a tensor or a learning rate."""
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
    phase, message = _WHERE[first.kind]
    how = f": {first.found}" if first.found else ""
    return FirstDifference(module_of(first.name), "", phase, message.format(first.name, first.step) + how)
