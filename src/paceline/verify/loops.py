"""Verify a file with a loop of its own (`paceline.prepare`): its steps on several ranks against those in one process.

The file runs twice, in float64 and with dropout by value: as one process and as the plan's ranks. After each step the
loss and every parameter must agree. What is compared is the loop itself, so there is no dry run and no prediction.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.verdict import FirstDifference, Verdict
from paceline.verify.processes import LOOP_RANK, WorldResult, run_world, write_settings
from paceline.verify.prove import USUAL, VerifyRequest, check_plan, check_was_not_killed

# Float64 rounds by 2e-16; a step's sums and Adam's division by small roots carry that some digits up. A wrong weight
# of a batch changes the first digits.
BOUND = 1e-8
_CAUSES = (
    "the loss is no mean over the samples that are its weight, or the loop draws by itself, as torch.randn does, which "
    "differs between ranks: draw in the data set's []"
)


def prove_loop(request: VerifyRequest, say: Callable[[str], None] = lambda text: None) -> Verdict:
    """Verify a loop.

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
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as temporary:
        folder = (request.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ranks = request.plan.world_size
        say(f"{request.plan.line()}: {request.steps} steps on {ranks} ranks, and in one process")
        world = _run(request, folder, "ranks", request.plan)
        alone = _run(request, folder, "alone", Plan(mesh="replicate=1"))
        if not alone.is_done:
            raise WorkloadError(
                "the file should train in one process", alone.first_failure(), "see that it does: python FILE"
            )
        if not world.is_done:
            verdict.add("run", False, f"one process takes the steps, the ranks fail: {world.first_failure()}")
        else:
            _compare(verdict, folder, ranks)
    verdict.seconds = time.monotonic() - began_s
    return verdict


def _run(request: VerifyRequest, folder: Path, name: str, plan: Plan) -> WorldResult:
    settings = write_settings(
        folder,
        name,
        script=str(request.script),
        arguments=list(request.arguments),
        steps=request.steps,
        run=name,
        plan=asdict(plan),
        data_parts=Mesh.parse(request.plan.mesh).data_size,  # in one process too: its batches are as large
    )
    world = run_world(folder, settings, plan.world_size, request.preload, LOOP_RANK)
    refusal = world.refusal()
    if refusal is not None and not world.hang.has_hung:
        raise refusal
    check_was_not_killed(world)
    return world


def _compare(verdict: Verdict, folder: Path, ranks: int) -> None:
    """Enter whether each rank's steps are those of one process."""
    # torch is imported here, and not by the command before it is needed.
    from safetensors.torch import load_file

    expected = load_file(folder / "alone-0.safetensors")
    expected_facts = json.loads((folder / "alone-0.json").read_text())
    verdict.is_compared = True
    verdict.is_bitwise = True
    largest = 0.0
    for rank in range(ranks):
        facts = json.loads((folder / f"ranks-{rank}.json").read_text())
        tensors = load_file(folder / f"ranks-{rank}.safetensors")
        for row in _rows(expected, expected_facts, tensors, facts):
            step, name, difference = row
            largest = max(largest, difference)
            verdict.is_bitwise = verdict.is_bitwise and difference == 0
            if not difference <= BOUND:
                verdict.add("step float64", False, f"rank {rank}: {name} differs by {difference:.1e} after step {step}")
                verdict.culprit = _culprit(step, name)
                return
    verdict.largest = largest
    steps = len(expected_facts["losses"])
    parameters = len([name for name in expected if name.startswith("0/")])
    verdict.add(
        "step float64",
        True,
        f"{steps} steps on {ranks} ranks: the loss and {parameters} parameters agree, the largest difference is "
        f"{largest:.1e}",
    )


def _rows(
    expected: dict[str, Any], expected_facts: dict[str, Any], tensors: dict[str, Any], facts: dict[str, Any]
) -> list[tuple[int, str, float]]:
    """Return step, name and relative difference of everything that is compared, in the order of the steps."""
    rows: list[tuple[int, str, float]] = []
    counts = len(expected_facts["losses"]), len(facts["losses"])
    if counts[0] != counts[1] or expected.keys() != tensors.keys():
        return [(min(counts) + 1, "the number of steps", float("inf"))]
    for key, value in expected.items():
        step, _, name = key.partition("/")
        distance = float((tensors[key] - value).norm())
        rows.append((int(step), name, distance / max(float(value.norm()), 1e-6)))
    for number, (loss, other) in enumerate(zip(expected_facts["losses"], facts["losses"], strict=True), 1):
        rows.append((number, "the loss", abs(loss - other) / max(abs(loss), 1e-6)))
    # The loss of a step comes before what the step made of the parameters.
    return sorted(rows, key=lambda row: (row[0], row[1] != "the loss"))


def _culprit(step: int, name: str) -> FirstDifference:
    if name == "the number of steps":
        return FirstDifference("", "", "later step", "the ranks take another number of steps than one process")
    if step == 0:
        return FirstDifference(name.rpartition(".")[0], "", "start", f"{name} is another before the first step")
    if name == "the loss":
        return FirstDifference("", "", "loss", f"the loss of step {step} is another; {_CAUSES}")
    message = f"{name} is another after step {step}, though the loss before it is the same"
    return FirstDifference(name.rpartition(".")[0], "", "update", message)
