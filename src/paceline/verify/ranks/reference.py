"""Make the reference in a process of its own: `python -m paceline.verify.ranks.reference SETTINGS.json`.

It takes the steps as they are, again in two ways that differ only by rounding, and in narrow precisions twice more
with all gradients moved by as much as they may be off. It writes the first result and how far the others are from it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from paceline.launch.process_exit import exit_process
from paceline.nouns.errors import WorkloadError
from paceline.nouns.workload import Workload
from paceline.train.plain_step import batches_of
from paceline.train.precision import autocast, grouped_products_in_float64
from paceline.verify.judge.compare import (
    SCALARS,
    Reference,
    bound_of,
    distances,
    largest_of_each_kind,
    relative,
    split_key,
)
from paceline.verify.ranks.child import answer
from paceline.verify.ranks.draw_trace import DrawTrace
from paceline.verify.ranks.placed_draws import PLACES
from paceline.verify.ranks.reference_step import (
    ReferenceStep,
    Variation,
    check_can_verify,
    save_tensors,
    take_steps,
)

# Reversing changes the order of sums over the batch; noise reaches every module.
VARIATIONS = (Variation(is_reversed=True), Variation(noise_seed=1))


def main(workload: Workload, settings: dict[str, Any], folder: Path) -> None:
    """Write reference-PRECISION.safetensors and .json for each precision."""
    variations = list(VARIATIONS)
    for precision in settings["precisions"]:  # float64 first: there it shows whether the order of samples matters
        result, noise = with_noise(workload, precision, settings["steps"], variations)
        noise["repeats_draws"] = precision == "float64" and repeats_draws(workload)
        write(folder, precision, result, noise, workload.clip_norm)


def repeats_draws(workload: Workload) -> bool:
    """True if the plain code draws the same each time, as where a forward pass seeds."""
    is_double = workload.precision == "float64"
    model = workload.model().train()
    model = model.double() if is_double else model
    first = next(batches_of(workload, is_double, False))[0]
    drawn = []
    with autocast(workload.precision, "cpu"), grouped_products_in_float64(), DrawTrace() as trace:
        for _ in range(2):
            workload.loss(model, first)
            drawn.append(trace.take())
    return bool(drawn[0] == drawn[1])


def with_noise(
    workload: Workload, precision: str, steps: int, variations: list[Variation]
) -> tuple[ReferenceStep, dict[str, Any]]:
    """Take the reference's steps, and measure how far rounding moves its tensors and losses.

    Args:
        workload: the user's workload.
        precision: "float64", or the workload's own.
        steps: the number of optimizer steps.
        variations: the variations, which differ only by rounding. The reversed batch is removed from the list where it
            turns out, in float64, to change more than that.

    Returns:
        The reference; and as JSON its movements by rounding and the notices.

    Raises:
        WorkloadError: rounding grows until it can't be told from a bug; or the workload can't be verified.
    """
    check_can_verify(workload)
    reference = take_steps(workload, precision, steps)
    moves = _Moves()
    notices = []
    for variation in list(variations):
        result = take_steps(workload, precision, steps, variation)
        loss_move = relative(reference.losses, result.losses)
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
        self.scalars = dict.fromkeys(SCALARS, 0.0)

    def add(self, reference: ReferenceStep, result: ReferenceStep) -> None:
        """Count another run."""
        for key, distance in distances(reference.arrays(), result.arrays()).items():
            self.tensors[key] = max(self.tensors.get(key, 0.0), distance)
        for name in SCALARS:
            distance = relative(getattr(reference, name), getattr(result, name))
            self.scalars[name] = max(self.scalars[name], distance)


def _allowed_in_gradients(result: ReferenceStep, noise: dict[str, float], precision: str) -> dict[str, float]:
    """Return the error by which each parameter's gradient may be off and still pass; 0 for one without a gradient."""
    tensors = result.arrays()
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


if __name__ == "__main__":
    exit_process(answer(main))
