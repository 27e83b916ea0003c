"""The process of the reference: `python -m paceline.verify.ranks.reference SETTINGS.json`.

It takes the steps as they are, again in two ways that differ by rounding alone, and in narrow precisions twice more
with all gradients moved by as much as they may be off. It writes the first result and how far the others are from it.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload
from paceline.verify.child_setup import read_settings, refuse
from paceline.verify.judge.compare import Reference, bound_of, largest_of_each_kind, split_key
from paceline.verify.ranks.reference_step import ReferenceStep, Variation, check_can_verify, take_steps

VARIATIONS = (Variation(is_reversed=True), Variation(noise_seed=1))


def main(path: Path) -> int:
    """Write reference-PRECISION.safetensors and .json for each precision, or refused.json."""
    settings, folder = read_settings(path)
    try:
        workload = find_workload(settings["script"])
        variations = list(VARIATIONS)
        for precision in settings["precisions"]:  # float64 first: there it shows whether the order of samples matters
            taken = with_noise(workload, precision, settings["steps"], variations)
            write(folder, precision, *taken, workload.clip_norm)
    except PacelineError as error:
        refuse(folder, error)
    except Exception as error:
        refuse(folder, as_workload_error(error))
    return 0


def with_noise(
    workload: Workload, precision: str, steps: int, variations: list[Variation]
) -> tuple[ReferenceStep, dict[str, Any]]:
    """The reference; how far each of its tensors and its losses move by rounding, and what was noticed.

    Args:
        workload: the person's.
        precision: "float64", or the workload's own.
        steps: optimizer steps.
        variations: ways that differ by rounding alone. The reversed batch is removed from the list where it turns out,
            in float64, to change more than that.

    Raises:
        WorkloadError: rounding grows until it can't be told from a bug; or the workload can't be verified.
    """
    check_can_verify(workload)
    taken = take_steps(workload, precision, steps)
    moves, notices = _Moves(), []
    for variation in list(variations):
        other = take_steps(workload, precision, steps, variation)
        is_chaotic = precision == "float64" and _relative(taken.losses, other.losses) > 1e-6
        if is_chaotic and variation.is_reversed:
            variations.remove(variation)
            notices.append(
                "the loss depends on the order of a batch's samples: rounding was measured without reversing it"
            )
            continue
        if is_chaotic:
            raise WorkloadError(
                "a model in which rounding stays small",
                f"one rounding in every module moves the loss by {_relative(taken.losses, other.losses):.1g} of it "
                f"within {steps} steps",
                "lower the learning rate for verifying, or look for a division by something near zero",
            )
        moves.add(taken, other)
    turned = _Moves()
    if precision != "float64":
        nudges = _allowed_in_gradients(taken, moves.tensors, precision)
        for is_mirrored in (False, True):
            turned.add(taken, take_steps(workload, precision, steps, Variation(nudges=nudges, is_mirrored=is_mirrored)))
    return taken, {
        "noise": moves.tensors, "scalar_noise": moves.scalars, "turned": turned.tensors,
        "scalar_turned": turned.scalars, "notices": notices,
    }  # fmt: skip


class _Moves:
    """How far tensors, by key, and losses, weights and norms (relative) come out elsewhere, at most."""

    def __init__(self) -> None:
        self.tensors: dict[str, float] = {}
        self.scalars = dict.fromkeys(("losses", "weights", "norms"), 0.0)

    def add(self, taken: ReferenceStep, other: ReferenceStep) -> None:
        """Count another run."""
        for key, values in taken.tensors.items():
            self.tensors[key] = max(self.tensors.get(key, 0.0), _distance(values, other.tensors[key]))
        for word in self.scalars:
            self.scalars[word] = max(self.scalars[word], _relative(getattr(taken, word), getattr(other, word)))


def _allowed_in_gradients(taken: ReferenceStep, noise: dict[str, float], precision: str) -> dict[str, float]:
    """By parameter, how far its gradient may be off and still pass."""
    tensors = {key: values.numpy() for key, values in taken.tensors.items()}
    reference = Reference(tensors, noise, {"epsilon": taken.epsilon}, precision)
    largest = largest_of_each_kind(reference)
    allowed: dict[str, float] = {}
    for key in tensors:
        _, kind, name, _ = split_key(key)
        if kind == "gradient":
            allowed[name] = max(allowed.get(name, 0.0), bound_of(reference, key, largest))
    return defaultdict(float, allowed)


def write(
    folder: Path, precision: str, taken: ReferenceStep, more: dict[str, Any], clip_norm: float | None = None
) -> None:
    """The reference as files."""
    save_file(taken.tensors, folder / f"reference-{precision}.safetensors")
    facts = {
        "losses": taken.losses, "weights": taken.weights, "norms": taken.norms, "modules": taken.modules,
        "branches": taken.branches, "clip_norm": clip_norm, "rates": taken.rates,
        "updated": taken.updated, "epsilon": taken.epsilon, **more,
    }  # fmt: skip
    (folder / f"reference-{precision}.json").write_text(json.dumps(facts))


def as_workload_error(error: Exception) -> WorkloadError:
    """An error of the person's own code, in one process on CPU."""
    lines = str(error).strip().splitlines() or [""]
    trace, where = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "site-packages" not in name and "/paceline/verify/" not in name and not name.startswith("<"):
            where = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    found = f"{type(error).__name__}{where}: {lines[0]:.300}"
    if "cuda" in str(error).lower() or "cpu' backend" in str(error).lower():
        fix = "verifying runs on CPU processes: take the plain torch form of that operation where CUDA is not at hand"
        return WorkloadError("a model that runs on CPUs too", found, fix)
    if _has_no_float64(str(error)):
        fix = (
            "verifying runs in float64: take a form of that operation which has it, such as the plain torch one "
            '(for experts of transformers: config._experts_implementation = "batched_mm")'
        )
        return WorkloadError("a model whose every operation runs in float64 on CPUs", found, fix)
    if "dtype" in str(error) or "Double" in str(error):
        fix = "verifying runs in float64: make tensors as wide as the model's, x.new_zeros(...) or dtype=x.dtype"
        return WorkloadError("a model that runs in float64", found, fix)
    fix = (
        "start it alone (python FILE) with precision='float64'; if it trains so, what differs here: the loss is also "
        "called on a few samples of the first batch, and dropout keeps or drops an element by its value"
    )
    return WorkloadError("a step in one process, on CPU and in float64", found, fix)


def _has_no_float64(text: str) -> bool:
    """Whether an operation was given float64 alone and can't compute in it: no tensor of another dtype is at fault."""
    lowered = text.lower()
    if "not implemented for 'double'" in lowered:
        return True
    return "double" in lowered and "expected" in lowered and ("bfloat16" in lowered or "bf16" in lowered)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    off = (one.double() - other.double()).abs()
    off = off[torch.isfinite(off)]  # a mask's -inf moves nowhere
    return float(off.max()) if off.numel() else 0.0


def _relative(ones: list[float], others: list[float]) -> float:
    pairs: Any = zip(ones, others, strict=False)
    return max((abs(a - b) / max(abs(a), 1e-300) for a, b in pairs), default=0.0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
