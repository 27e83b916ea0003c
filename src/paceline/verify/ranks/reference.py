"""Make the reference in a process of its own: `python -m paceline.verify.ranks.reference SETTINGS.json`.

It takes the steps as they are, again in two ways that differ by rounding alone, and in narrow precisions twice more
with all gradients moved by as much as they may be off. It writes the first result and how far the others are from it.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from paceline.launch.process_exit import exit_process
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.own_errors import own_error, own_line
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload
from paceline.train.grouped_float64 import grouped_products_in_float64
from paceline.train.precision import autocast
from paceline.verify.child_setup import read_settings, refuse
from paceline.verify.judge.compare import Reference, bound_of, largest_of_each_kind, split_key
from paceline.verify.ranks.draw_digest import DrawDigest
from paceline.verify.ranks.placed_draws import PLACES
from paceline.verify.ranks.reference_step import (
    ReferenceStep,
    Variation,
    batches_of,
    check_can_verify,
    save_tensors,
    take_steps,
)

# Reversing changes the order of sums over the batch; noise reaches every module.
VARIATIONS = (Variation(is_reversed=True), Variation(noise_seed=1))


def main(path: Path) -> int:
    """Write reference-PRECISION.safetensors and .json for each precision, or refused.json."""
    settings, folder, program = read_settings(path)
    try:
        workload = find_workload(program)
        variations = list(VARIATIONS)
        for precision in settings["precisions"]:  # float64 first: there it shows whether the order of samples matters
            result, noise = with_noise(workload, precision, settings["steps"], variations)
            noise["repeats_draws"] = precision == "float64" and repeats_draws(workload)
            write(folder, precision, result, noise, workload.clip_norm)
    except PacelineError as error:
        refuse(folder, error)
    except Exception as error:
        refuse(folder, as_paceline_error(error))
    return 0


def repeats_draws(workload: Workload) -> bool:
    """True if the plain code draws the same each time, as where a forward pass seeds."""
    is_double = workload.precision == "float64"
    model = workload.model().train()
    model = model.double() if is_double else model
    first = next(batches_of(workload, is_double, False))[0]
    drawn = []
    with autocast(workload.precision, "cpu"), grouped_products_in_float64(), DrawDigest() as digest:
        for _ in range(2):
            workload.loss(model, first)
            drawn.append(digest.take())
    return bool(drawn[0] == drawn[1])


def with_noise(
    workload: Workload, precision: str, steps: int, variations: list[Variation]
) -> tuple[ReferenceStep, dict[str, Any]]:
    """Take the reference's steps, and measure how far rounding moves its tensors and losses.

    Args:
        workload: the user's.
        precision: "float64", or the workload's own.
        steps: optimizer steps.
        variations: ways that differ by rounding alone. The reversed batch is removed from the list where it turns out,
            in float64, to change more than that.

    Returns:
        The reference; and as JSON how far it moves and what was noticed.

    Raises:
        WorkloadError: rounding grows until it can't be told from a bug; or the workload can't be verified.
    """
    check_can_verify(workload)
    reference = take_steps(workload, precision, steps)
    moves = _Moves()
    notices = []
    for variation in list(variations):
        result = take_steps(workload, precision, steps, variation)
        loss_move = _relative(reference.losses, result.losses)
        # In float64 one rounding is 2e-16. If it has grown to 1e-6 within the steps, a bug could not be told from it.
        is_chaotic = precision == "float64" and loss_move > 1e-6
        if is_chaotic and variation.is_reversed:
            # In another order the loss is another function, so the change is no rounding. Removed from the caller's
            # list: narrow precisions, where this could not be seen, must not take it for rounding either.
            variations.remove(variation)
            notices.append(
                "the loss depends on the order of a batch's samples: rounding was measured without reversing it"
            )
            continue
        if is_chaotic:
            raise WorkloadError(
                "rounding should stay small in the model",
                f"one rounding in every module moves the loss by {loss_move:.1g} of it within {steps} steps",
                "lower the learning rate for verifying, or look for a division by something near zero",
            )
        moves.add(reference, result)
    turned = _Moves()
    if precision != "float64":  # see `bound_of`: in float64 nothing is allowed for gradients that turn
        nudges = _allowed_in_gradients(reference, moves.tensors, precision)
        for is_mirrored in (False, True):
            variation = Variation(nudges=nudges, is_mirrored=is_mirrored)
            turned.add(reference, take_steps(workload, precision, steps, variation))
    return reference, {
        "noise": moves.tensors, "scalar_noise": moves.scalars, "turned": turned.tensors,
        "scalar_turned": turned.scalars, "notices": notices,
    }  # fmt: skip


class _Moves:
    """The most by which tensors, by key, and losses, weights and norms (relative) differ in other runs."""

    def __init__(self) -> None:
        self.tensors: dict[str, float] = {}
        self.scalars = dict.fromkeys(("losses", "weights", "norms"), 0.0)

    def add(self, reference: ReferenceStep, result: ReferenceStep) -> None:
        """Count another run."""
        for key, values in reference.tensors.items():
            distance = _distance(values, result.tensors[key])
            self.tensors[key] = max(self.tensors.get(key, 0.0), distance)
        for name in self.scalars:
            distance = _relative(getattr(reference, name), getattr(result, name))
            self.scalars[name] = max(self.scalars[name], distance)


def _allowed_in_gradients(result: ReferenceStep, noise: dict[str, float], precision: str) -> dict[str, float]:
    """Return by parameter how far its gradient may be off and still pass; 0 for one without a gradient."""
    tensors = {key: values.numpy() for key, values in result.tensors.items()}
    reference = Reference(tensors, noise, {"epsilon": result.epsilon}, precision)
    largest = largest_of_each_kind(reference)
    allowed: defaultdict[str, float] = defaultdict(float)
    for key in tensors:
        _, kind, name, _ = split_key(key)
        if kind == "gradient":
            allowed[name] = max(allowed[name], bound_of(reference, key, largest))
    return allowed


def write(
    folder: Path, precision: str, result: ReferenceStep, noise: dict[str, Any], clip_norm: float | None = None
) -> None:
    """Write reference-PRECISION.safetensors and .json."""
    save_tensors(result.tensors, folder / f"reference-{precision}.safetensors")
    json_object = {
        "losses": result.losses, "weights": result.weights, "norms": result.norms, "modules": result.modules,
        "branches": result.branches, "clip_norm": clip_norm, "rates": result.rates,
        "updated": result.updated, "epsilon": result.epsilon, "draws_by_place": PLACES.has_drawn, **noise,
    }  # fmt: skip
    (folder / f"reference-{precision}.json").write_text(json.dumps(json_object))


def as_paceline_error(error: Exception) -> PacelineError:
    """Explain an error in one process on CPU: one of ours, whose traceback is on stderr, or the user's code's."""
    line = own_line(error)
    if not line:
        return as_workload_error(error)
    traceback.print_exception(error)
    return own_error(line, "".join(traceback.format_exception_only(error)).strip())


def as_workload_error(error: Exception) -> WorkloadError:
    """Explain an error of the user's own code, in one process on CPU."""
    # The most particular signs first: an operation without float64 mentions a dtype too.
    lines = str(error).strip().splitlines() or [""]
    found = f"{type(error).__name__}{_innermost_line(error)}: {lines[0]:.300}"
    if "cuda" in str(error).lower() or "cpu' backend" in str(error).lower():
        fix = "verifying runs on CPU processes: take the plain torch form of that operation where CUDA is not at hand"
        return WorkloadError("the model should run on CPUs too", found, fix)
    if _has_no_float64(str(error)):
        fix = "verifying runs in float64: take a form of that operation which has it, such as the plain torch one"
        return WorkloadError("every operation of the model should run in float64 on CPUs", found, fix)
    if "dtype" in str(error) or "Double" in str(error):
        fix = "verifying runs in float64: make tensors as wide as the model's, x.new_zeros(...) or dtype=x.dtype"
        return WorkloadError("the model should run in float64", found, fix)
    fix = (
        "start it alone (python FILE) with precision='float64'; if it trains so, what differs here: the loss is also "
        "called on a few samples of the first batch, and dropout keeps or drops an element by its value"
    )
    return WorkloadError("can't take a step in one process, on CPU and in float64", found, fix)


def _innermost_line(error: Exception) -> str:
    """Return " at FILE:LINE" of the innermost frame that is neither installed, nor the verifier's, nor generated."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "site-packages" not in name and "/paceline/verify/" not in name and not name.startswith("<"):
            line = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _has_no_float64(text: str) -> bool:
    """True if an operation was given float64 alone and can't compute in it: no tensor of another dtype is at fault."""
    lowered = text.lower()
    if "not implemented for 'double'" in lowered:
        return True
    return "double" in lowered and "expected" in lowered and ("bfloat16" in lowered or "bf16" in lowered)


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape:
        return math.inf
    wide = torch.complex128 if first.is_complex() else torch.float64
    distances = (first.to(wide) - second.to(wide)).abs()
    finite = distances[torch.isfinite(distances)]  # a mask's -inf moves nowhere
    return float(finite.max()) if finite.numel() else 0.0


def _relative(first: list[float], second: list[float]) -> float:
    """Return the largest difference of two lists' numbers, relative to the first's."""
    distances = [abs(a - b) / max(abs(a), 1e-300) for a, b in zip(first, second, strict=False)]
    return max(distances, default=0.0)


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
