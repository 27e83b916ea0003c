"""Every rank's pieces against the single process, tensor by tensor, within what rounding was seen to do.

The bound is measured on the person's own model: the reference is run again with the batch's samples in the opposite
order, and with every module's result moved by one rounding. What those change, rounding can change; a bug moves values
by many orders more. In float64 one rounding is 2e-16, so that the two can't be mistaken for each other. In narrower
precisions, what two runs with moved gradients change is allowed too: see `bound_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paceline.nouns.shard_spec import FLAT, ShardSpec

Array = np.ndarray[Any, Any]
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bf16": 2.0**-8}
KINDS = ("gradient", "buffer", "state", "parameter")  # in the order in which a step makes them


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a value may be off: times the measured noise, times the tensor's largest value, and the step's."""

    noise: float
    own: float
    all: float


# float64: 1e-10 of a tensor is a million roundings and far below any mistake; 1e-13 of the largest gradient is what
# stays of sums that cancel. Else a few roundings of one value, and tens of what one rounding everywhere does.
_TOLERANCES = {"float64": Tolerance(200, 1e-10, 1e-13)}


TURNED = 2.0  # times what the runs with moved gradients changed: allowed on top of the rest
_NOISE_AT_MOST = 0.05  # of the largest value of its kind


def tolerance_of(reference: Reference) -> Tolerance:
    """The tolerance in a reference's precision, or in that of the narrowest parameter."""
    epsilon = max(EPSILON[reference.precision], reference.facts.get("epsilon", 0.0))
    return _TOLERANCES.get(reference.precision, Tolerance(30, 16 * epsilon, 2 * epsilon))


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one rank that is not the reference's.

    `found` says how: a factor, NaN, a shape.
    """

    step: int
    kind: str
    name: str
    rank: int
    error: float  # largest difference
    bound: float
    scale: float  # the reference's largest value
    found: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {field: getattr(self, field) for field in self.__dataclass_fields__}


@dataclass(slots=True)
class Reference:
    """The single process's tensors and facts, and how far rounding moves each."""

    tensors: dict[str, Array]
    noise: dict[str, float]
    facts: dict[str, Any]
    precision: str
    turned: dict[str, float] = field(default_factory=dict)  # how far updates by gradients within their bound move each

    @classmethod
    def read(cls, folder: Path, precision: str) -> Reference:
        """What `reference.py` wrote."""
        facts = json.loads((folder / f"reference-{precision}.json").read_text())
        tensors = load_file(folder / f"reference-{precision}.safetensors")
        return cls(tensors, facts.pop("noise"), facts, precision, facts.pop("turned"))


@dataclass(slots=True)
class RankResult:
    """What one rank wrote."""

    rank: int
    tensors: dict[str, Array]
    facts: dict[str, Any]

    def shard_spec(self, name: str) -> ShardSpec | None:
        """Which part of a tensor the rank says it holds; None: all of it."""
        value = self.facts["placements"].get(name)
        return ShardSpec.of_json(value) if value else None


def read_ranks(folder: Path, run: str, ranks: int) -> list[RankResult]:
    """The results of a run's ranks."""
    return [
        RankResult(
            rank,
            load_file(folder / f"{run}-{rank}.safetensors"),
            json.loads((folder / f"{run}-{rank}.json").read_text()),
        )
        for rank in range(ranks)
    ]


def split_key(key: str) -> tuple[int, str, str, str]:
    """Step, kind, the tensor's name, and the optimizer's word for a state."""
    step, kind, rest = key.split("/", 2)
    if kind == "state":
        word, rest = rest.split("/", 1)
        return int(step), kind, rest, word
    return int(step), kind, rest, ""


def take(full: Array, shard_spec: ShardSpec | None) -> Array:
    """The part of a tensor that a placement says."""
    for cut in shard_spec.cuts if shard_spec is not None else ():
        if cut.dim == FLAT:
            flat = full.reshape(-1)
            full = np.concatenate([flat[start:stop] for start, stop in cut.ranges])
        else:
            full = np.concatenate([_rows(full, cut.dim, start, stop) for start, stop in cut.ranges], cut.dim)
    return full


def _rows(full: Array, dim: int, start: int, stop: int) -> Array:
    where: list[slice] = [slice(None)] * full.ndim
    where[dim] = slice(start, stop)
    return full[tuple(where)]


def differences(reference: Reference, ranks: list[RankResult]) -> list[Difference]:
    """All tensors that differ by more than rounding, steps in order, and whatever nobody holds."""
    largest = largest_of_each_kind(reference)
    found: list[Difference] = []
    for result in ranks:
        for key, mine in result.tensors.items():
            found += _check(reference, result, key, mine, largest)
        found += _lacking(reference, result)
    found += _uncovered(reference, ranks)
    begins = {name: number for number, name in enumerate(reference.facts["modules"])}
    return sorted(
        found, key=lambda one: (one.step, KINDS.index(one.kind), begins.get(module_of(one.name), len(begins)))
    )


def module_of(name: str) -> str:
    """The module that a parameter or buffer belongs to, or an optimizer's `word of parameter`."""
    return name.rpartition(" of ")[2].rpartition(".")[0]


def before_clipping(reference: Reference, ranks: list[RankResult]) -> list[Difference]:
    """What differs of the first step's gradients once the clipping of each side is undone by its own norm."""
    clip, norms = reference.facts["clip_norm"], reference.facts["norms"]
    updated = set(reference.facts["updated"])

    def grown(tensors: dict[str, Array], its_norms: list[float]) -> tuple[dict[str, Array], float]:
        factor = max(its_norms[0] + 1e-6, clip) / clip if clip and its_norms else 1.0
        kept = {key: values for key, values in tensors.items() if key.startswith("1/gradient/")}
        return {key: v * (factor if split_key(key)[2] in updated else 1.0) for key, v in kept.items()}, factor

    tensors, factor = grown(reference.tensors, norms)
    noise = {key: value * factor for key, value in reference.noise.items()}
    right = Reference(tensors, noise, reference.facts, reference.precision)  # of step 1: no update is before it
    return differences(right, [RankResult(r.rank, grown(r.tensors, r.facts["norms"])[0], r.facts) for r in ranks])


def largest_difference(reference: Reference, ranks: list[RankResult]) -> float:
    """How far the parameters of any rank are off after the last step: the norm of the difference over theirs."""
    last = max(split_key(key)[0] for key in reference.tensors)
    worst = 0.0
    for result in ranks:
        off, size = 0.0, 0.0
        for key, mine in result.tensors.items():
            step, kind, name, _ = split_key(key)
            if kind == "parameter" and step == last and key in reference.tensors:
                right = take(reference.tensors[key], result.shard_spec(name)).astype("f8")
                off += float(((mine.astype("f8") - right) ** 2).sum())
                size += float((right * right).sum())
        worst = max(worst, (off / size) ** 0.5 if size else 0.0)
    return worst


def bound_of(reference: Reference, key: str, largest: Mapping[tuple[int, str], float]) -> float:
    """How far the tensor `key` may be off.

    In float64, which decides what is a bug, no more than a small part is ever put down to rounding. In narrower
    precisions a sign-like optimizer (Adam in its first steps) may make a whole step of the rounding of a gradient near
    zero: what that does was measured by moving all gradients as far as they may be off, in both directions.
    """
    allowed = tolerance_of(reference)
    step, kind, _, word = split_key(key)
    own, most = _size(reference.tensors[key]), largest[step, kind + word]
    noise = allowed.noise * reference.noise.get(key, 0.0)
    if reference.precision == "float64":
        noise = min(noise, _NOISE_AT_MOST * most)
    cancels = allowed.all * most if kind in ("gradient", "state") else 0.0
    return noise + allowed.own * own + cancels + TURNED * reference.turned.get(key, 0.0)


def _size(values: Array) -> float:
    """The largest finite value."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return float(np.abs(finite).max()) if finite.size else 0.0


def largest_of_each_kind(reference: Reference) -> dict[tuple[int, str], float]:
    """The largest value of each step's gradients, parameters, buffers and states."""
    largest: dict[tuple[int, str], float] = {}
    for key, values in reference.tensors.items():
        step, kind, _, word = split_key(key)
        largest[step, kind + word] = max(largest.get((step, kind + word), 0.0), _size(values))
    return largest


def _check(
    reference: Reference, result: RankResult, key: str, mine: Array, largest: Mapping[tuple[int, str], float]
) -> Iterator[Difference]:
    step, kind, name, word = split_key(key)
    label = f"{word} of {name}" if word else name
    full = reference.tensors.get(key)
    if full is None:
        if mine.size and np.abs(mine).max() > 0 and kind != "state":
            yield Difference(step, kind, label, result.rank, float(np.abs(mine).max()), 0, 0, "one process has none")
        return
    right = take(full, result.shard_spec(name))
    scale = _size(full)
    if right.shape != mine.shape:
        found = f"its shape is {mine.shape}, not {right.shape}"
        yield Difference(step, kind, label, result.rank, float("inf"), 0, scale, found)
        return
    if not mine.size:
        return
    if mine.dtype.kind != "f":
        if not np.array_equal(mine, right):
            error = float(np.abs(mine.astype("f8") - right.astype("f8")).max())
            yield Difference(step, kind, label, result.rank, error, 0, scale, "")
        return
    differs = ~((mine == right) | (np.isnan(mine) & np.isnan(right)))  # a mask's -inf is no difference
    wide, expected = mine.astype("f8")[differs], right.astype("f8")[differs]
    if not wide.size:
        return
    error, bound = float(np.abs(wide - expected).max()), bound_of(reference, key, largest)
    if not error <= bound:  # NaN too
        found = relation(mine.astype("f8"), right.astype("f8"))
        yield Difference(step, kind, label, result.rank, error, bound, scale, found)


def relation(mine: Array, right: Array) -> str:
    """How a wrong tensor follows from the right one, where that can be said in a word."""
    if not np.isfinite(mine).all():
        return "it has NaN or infinite values"
    size = float((right * right).sum())
    if not mine.any():
        return "it is zero"
    if not size:
        return ""
    factor = float((mine * right).sum()) / size
    if np.abs(mine - factor * right).max() <= 1e-6 * abs(factor) * np.abs(right).max():
        return f"{factor:.6g} times what it should be"
    return ""


def _lacking(reference: Reference, result: RankResult) -> Iterator[Difference]:
    """Gradients and states of parameters that this rank holds, which one process has and the rank has not."""
    held = {split_key(key)[2] for key in result.tensors if "/parameter/" in key}
    steps = {split_key(key)[0] for key in result.tensors}
    for key, values in reference.tensors.items():
        step, kind, name, word = split_key(key)
        updates = name in held and step in steps and kind in ("gradient", "state")
        if updates and key not in result.tensors and values.size and values.any():
            if step == min(steps) or not result.facts["has_gradient"].get(name, True):
                continue
            if not take(values, result.shard_spec(name)).any():
                continue
            label = f"{word} of {name}" if word else name
            yield Difference(
                step, kind, label, result.rank, float("inf"), 0, float(np.abs(values).max()), "it has none"
            )


def _uncovered(reference: Reference, ranks: list[RankResult]) -> Iterator[Difference]:
    """Parameters of which some element is on no rank."""
    for key, values in reference.tensors.items():
        step, kind, name, _ = split_key(key)
        if kind not in ("parameter", "buffer") or step != max(split_key(k)[0] for k in reference.tensors):
            continue
        holders = [result for result in ranks if key in result.tensors]
        if any(result.shard_spec(name) is None or not result.shard_spec(name).cuts for result in holders):  # type: ignore[union-attr]
            continue
        numbers = np.arange(values.size).reshape(values.shape)
        seen = np.zeros(values.size, bool)
        for result in holders:
            seen[take(numbers, result.shard_spec(name)).reshape(-1)] = True
        if not seen.all():
            missing = int((~seen).sum())
            yield Difference(step, kind, name, -1, float("inf"), 0, 0, f"{missing} of its elements are on no rank")
