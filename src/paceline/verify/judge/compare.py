"""Compare every rank's shards with the tensors of the single process, within what rounding was measured to do.

The bound is measured on the user's own model: the reference is run again with the batch's samples in the opposite
order, and with every module's result moved by one rounding. What those change, rounding can change; a bug moves values
by many orders more. In float64 one rounding is 2e-16, so that the two can't be mistaken for each other. In narrower
precisions, what two runs with moved gradients change is allowed too: see `bound_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from paceline.nouns.shard_spec import FLAT, ShardSpec

Array = np.ndarray[Any, Any]
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-10}
_STATE_OF = "optimizer/"  # before a parameter's name: where the optimizer's state of it is placed
SCALARS = ("losses", "weights", "norms")  # of each step, relative to which they are compared
KINDS = ("gradient", "buffer", "state", "change", "parameter")  # in the order in which a step makes them


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Factors of the measured noise and of two largest values; a value may be off by the sum of the three products."""

    noise: float
    tensor: float  # of the tensor's largest value
    kind: float  # of the largest value of all tensors of its kind in that step


# float64: 1e-10 of a tensor is a million roundings and far below any mistake; 1e-13 of the largest gradient is what
# stays of sums that cancel. Else a few roundings of one value, and tens of what one rounding everywhere does.
_TOLERANCES = {"float64": Tolerance(200, 1e-10, 1e-13)}

TURNED = 2.0  # times what the runs with moved gradients changed: allowed on top of the rest
_CHANGE = 1e-8  # of a step's largest change of a parameter: Adam divides by small roots, which carries rounding up
_NOISE_AT_MOST = 0.05  # of the largest value of its kind, in float64: noise must not hide a value that is simply wrong


def tolerance_of(reference: Reference) -> Tolerance:
    """Return the tolerance in a reference's precision, or in that of the narrowest parameter."""
    epsilon = max(EPSILON[reference.precision], reference.facts.get("epsilon", 0.0))
    return _TOLERANCES.get(reference.precision, Tolerance(30, 16 * epsilon, 2 * epsilon))


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one rank that differs from the reference's by more than rounding.

    `found` says how it differs: by a factor, by NaN, by its shape.
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
        """Return the fields as a JSON object."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
        """Read what `reference.py` wrote."""
        facts = json.loads((folder / f"reference-{precision}.json").read_text())
        tensors = read_arrays(folder / f"reference-{precision}.safetensors")
        return cls(tensors, facts.pop("noise"), facts, precision, facts.pop("turned"))


@dataclass(slots=True)
class RankResult:
    """The tensors and facts that one rank wrote."""

    rank: int
    tensors: dict[str, Array]
    facts: dict[str, Any]

    def shard_spec(self, name: str, kind: str = "parameter") -> ShardSpec | None:
        """Return the part of a tensor that the rank says it holds; None: all of it."""
        placement = self.facts["placements"].get(name)
        if kind == "state" and name in self.whole_states:
            placement = self.facts["placements"].get(_STATE_OF + name)
        return ShardSpec.of_json(placement) if placement else None

    @property
    def whole_states(self) -> dict[str, bool]:
        """By parameter whose optimizer state one rank has for all others, whether this one says that it has it."""
        states: dict[str, bool] = self.facts.get("whole_states", {})
        return states


def read_ranks(folder: Path, name: str, ranks: int) -> list[RankResult]:
    """Read what the ranks of a run, by its name, have written."""
    results = []
    for rank in range(ranks):
        tensors = read_arrays(folder / f"{name}-{rank}.safetensors")
        facts = json.loads((folder / f"{name}-{rank}.json").read_text())
        results.append(RankResult(rank, tensors, facts))
    return results


def read_arrays(path: Path) -> dict[str, Array]:
    """Read the tensors of a file that `reference_step.save_tensors` wrote."""
    with safe_open(path, "numpy") as file:
        pairs = json.loads((file.metadata() or {}).get("complex128", "[]"))
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    for key in pairs:
        arrays[key] = arrays[key].view("c16")[..., 0]
    return arrays


def split_key(key: str) -> tuple[int, str, str, str]:
    """Split STEP/KIND/NAME or STEP/state/STATE/NAME into step, kind, name and the state's name ("" if it is none)."""
    step, kind, name = key.split("/", 2)
    if kind == "state":
        state, name = name.split("/", 1)
        return int(step), kind, name, state
    return int(step), kind, name, ""


def with_changes(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors and, under STEP/change/NAME, what each step changed of a parameter that comes twice.

    With a small learning rate an update that is wrong by half is nothing beside the parameter.
    """
    changes = {}
    for key, values in tensors.items():
        step, kind, name, _ = split_key(key)
        before = tensors.get(f"{step - 1}/parameter/{name}")
        if kind == "parameter" and before is not None and before.shape == values.shape:
            changes[f"{step}/change/{name}"] = values - before
    return {**tensors, **changes}


def take(full: Array, shard_spec: ShardSpec | None) -> Array:
    """Return the part of a full tensor that a placement describes; all of it for None.

    It follows what the rank itself says that it holds. Whether all ranks together hold everything is checked apart, in
    `_uncovered`.
    """
    if shard_spec is None:
        return full
    for cut in shard_spec.cuts:
        if cut.dim == FLAT:
            flat = full.reshape(-1)
            full = np.concatenate([flat[start:stop] for start, stop in cut.ranges])
        else:
            full = np.concatenate([_rows(full, cut.dim, start, stop) for start, stop in cut.ranges], cut.dim)
    return full


def _rows(full: Array, dim: int, start: int, stop: int) -> Array:
    index: list[slice] = [slice(None)] * full.ndim
    index[dim] = slice(start, stop)
    return full[tuple(index)]


def differences(reference: Reference, ranks: list[RankResult]) -> list[Difference]:
    """Return all tensors that differ by more than rounding, and those that no rank holds.

    Sorted by step, then in the order in which a step makes them, then in the order in which modules begin.
    """
    # Three ways to be wrong: a value differs, a tensor is not there, an element is on no rank.
    largest = largest_of_each_kind(reference)
    unsorted: list[Difference] = []
    for result in ranks:
        for key, actual in result.tensors.items():
            unsorted += _check(reference, result, key, actual, largest)
        unsorted += _missing(reference, result)
    unsorted += _uncovered(reference, ranks)

    module_order = {name: number for number, name in enumerate(reference.facts["modules"])}

    def in_order_of_making(difference: Difference) -> tuple[int, int, int]:
        module = module_of(difference.name)
        return difference.step, KINDS.index(difference.kind), module_order.get(module, len(module_order))

    return sorted(unsorted, key=in_order_of_making)


def module_of(name: str) -> str:
    """Return the module of a parameter or buffer, or of an optimizer state `STATE of PARAMETER`."""
    return name.rpartition(" of ")[2].rpartition(".")[0]


def before_clipping(reference: Reference, ranks: list[RankResult]) -> list[Difference]:
    """Compare the first step's gradients with the clipping of each side undone by that side's own norm.

    A single wrong gradient changes the norm, and by it every clipped gradient: before clipping only that one differs.
    """
    tensors, factor = _unclipped(reference.tensors, reference.facts["norms"], reference)
    noise = {key: value * factor for key, value in reference.noise.items()}
    # Without `turned`, the effect of moved gradients on updates: no update comes before the gradients of step 1.
    unclipped_reference = Reference(tensors, noise, reference.facts, reference.precision)
    unclipped_ranks = []
    for result in ranks:
        rank_tensors, _ = _unclipped(result.tensors, result.facts["norms"], reference)
        unclipped_ranks.append(RankResult(result.rank, rank_tensors, result.facts))
    return differences(unclipped_reference, unclipped_ranks)


def _unclipped(
    tensors: Mapping[str, Array], norms: list[float], reference: Reference
) -> tuple[dict[str, Array], float]:
    """Return the gradients of step 1 as they were before clipping, and the factor by which they were larger."""
    clip_norm = reference.facts["clip_norm"]
    factor = 1.0
    if clip_norm and norms:
        # The inverse of `clip_gradients` in train/plain_step.py, with its 1e-6.
        factor = max(norms[0] + 1e-6, clip_norm) / clip_norm
    updated = set(reference.facts["updated"])
    gradients = {}
    for key, values in tensors.items():
        if not key.startswith("1/gradient/"):
            continue
        _, _, name, _ = split_key(key)
        gradients[key] = values * (factor if name in updated else 1.0)
    return gradients, factor


def largest_difference(reference: Reference, ranks: list[RankResult]) -> float:
    """Return the largest error of a rank's parameters after the last step: the norm of the difference over theirs."""
    last_step = max(split_key(key)[0] for key in reference.tensors)
    worst = 0.0
    for result in ranks:
        squared_error = 0.0
        squared_norm = 0.0
        for key, actual in result.tensors.items():
            step, kind, name, _ = split_key(key)
            if kind == "parameter" and step == last_step and key in reference.tensors:
                # In float64, whatever the tensors' dtype: sums of many float32 squares lose digits.
                expected = take(reference.tensors[key], result.shard_spec(name)).astype(_wide(actual))
                squared_error += float((np.abs(actual.astype(_wide(actual)) - expected) ** 2).sum())
                squared_norm += float((np.abs(expected) ** 2).sum())
        if squared_norm:
            worst = max(worst, (squared_error / squared_norm) ** 0.5)
    return worst


def bound_of(reference: Reference, key: str, largest: Mapping[tuple[int, str], float]) -> float:
    """Return the bound on the error of the tensor `key`.

    In float64, which decides what is a bug, no more than a small part is ever put down to rounding. In narrower
    precisions a sign-like optimizer (Adam in its first steps) may make a whole step of the rounding of a gradient near
    zero: what that does was measured by moving all gradients as far as they may be off, in both directions.
    """
    tolerance = tolerance_of(reference)
    step, kind, name, state = split_key(key)
    largest_of_kind = largest[step, kind + state]
    noise = tolerance.noise * reference.noise.get(key, 0.0)
    if kind == "change":
        # The noise may be all of it, where a sign-like optimizer makes a whole step of a gradient that is rounding.
        rounding = 4 * EPSILON[reference.precision] * largest_finite(reference.tensors[f"{step}/parameter/{name}"])
        return noise + rounding + _CHANGE * largest_finite(reference.tensors[key])
    if reference.precision == "float64" and not (kind == "state" and _is_of_rounding(reference, step, name, largest)):
        noise = min(noise, _NOISE_AT_MOST * largest_of_kind)
    # Sums that cancel (the gradient of a key's bias) keep the rounding of the large values that they were made of.
    cancellation = 0.0
    if kind in ("gradient", "state"):
        cancellation = tolerance.kind * largest_of_kind
    rounding = tolerance.tensor * largest_finite(reference.tensors[key])
    return noise + rounding + cancellation + TURNED * reference.turned.get(key, 0.0)


def _is_of_rounding(reference: Reference, step: int, name: str, largest: Mapping[tuple[int, str], float]) -> bool:
    """True if a parameter's gradient is nothing but rounding, as of a bias before batch norm: Rprop keeps its signs."""
    gradient = f"{step}/gradient/{name}"
    if gradient not in reference.tensors:
        return False
    return largest_finite(reference.tensors[gradient]) <= bound_of(reference, gradient, largest)


def largest_finite(values: Array) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    finite = values
    if values.dtype.kind in "fc":
        finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0
    return float(np.abs(finite).max())


def distances(tensors: Mapping[str, Array], other_tensors: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest difference of two runs' tensors, by key; a mask's -inf moves nowhere."""
    found = {}
    for key, values in tensors.items():
        if other_tensors[key].shape != values.shape:
            found[key] = float("inf")
            continue
        first, second = values.astype(_wide(values)), other_tensors[key].astype(_wide(values))
        are_finite = np.isfinite(first) & np.isfinite(second)
        found[key] = largest_finite(first[are_finite] - second[are_finite])
    return found


def relative(numbers: Sequence[float], other_numbers: Sequence[float]) -> float:
    """Return the largest difference of two runs' numbers, relative to the first's."""
    pairs = zip(numbers, other_numbers, strict=False)
    return max((abs(a - b) / max(abs(a), 1e-300) for a, b in pairs), default=0.0)


def largest_of_each_kind(reference: Reference) -> dict[tuple[int, str], float]:
    """Return the largest value of each step's gradients, parameters, buffers and of each optimizer state."""
    largest: dict[tuple[int, str], float] = {}
    for key, values in reference.tensors.items():
        step, kind, _, state = split_key(key)
        before = largest.get((step, kind + state), 0.0)
        largest[step, kind + state] = max(before, largest_finite(values))
    return largest


def _check(
    reference: Reference, result: RankResult, key: str, actual: Array, largest: Mapping[tuple[int, str], float]
) -> Iterator[Difference]:
    """Yield the difference of one tensor of a rank, if there is one."""
    step, kind, name, state = split_key(key)
    label = _label(name, state)
    full = reference.tensors.get(key)
    if full is None:
        # Zeros are as good as none: a rank may have a gradient of zeros where one process has None.
        if actual.size and np.abs(actual).max() > 0 and kind != "state":
            error = float(np.abs(actual).max())
            yield Difference(step, kind, label, result.rank, error, 0, 0, "one process has none")
        return
    shard_spec = result.shard_spec(name, kind)
    if shard_spec is not None and shard_spec.shape != full.shape:  # a state that counts steps
        shard_spec = None
    expected = take(full, shard_spec)
    scale = largest_finite(full)
    if expected.shape != actual.shape:
        found = f"its shape is {actual.shape}, not {expected.shape}"
        yield Difference(step, kind, label, result.rank, float("inf"), 0, scale, found)
        return
    if not actual.size:  # a rank beyond the last row
        return
    if actual.dtype.kind not in "fc":  # integers and bools have no rounding
        if not np.array_equal(actual, expected):
            error = float(np.abs(actual.astype("f8") - expected.astype("f8")).max())
            yield Difference(step, kind, label, result.rank, error, 0, scale, "")
        return
    is_equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if is_equal.all():
        return
    # Equal elements are left out first: the difference of a mask's two -inf would be NaN.
    actual_wide, expected_wide = actual.astype(_wide(actual)), expected.astype(_wide(actual))
    error = float(np.abs(actual_wide[~is_equal] - expected_wide[~is_equal]).max())
    bound = bound_of(reference, key, largest)
    if not error <= bound:  # so written, a NaN is a difference
        found = relation(actual_wide, expected_wide)
        yield Difference(step, kind, label, result.rank, error, bound, scale, found)


def _wide(values: Array) -> str:
    """Return the dtype with float64's digits in which values are compared."""
    return "c16" if values.dtype.kind == "c" else "f8"


def _label(name: str, state: str) -> str:
    return f"{state} of {name}" if state else name


def relation(actual: Array, expected: Array) -> str:
    """Describe a wrong tensor as a function of the right one; "" if there is no simple one."""
    if not np.isfinite(actual).all():
        return "it has NaN or infinite values"
    squared_norm = float((np.abs(expected) ** 2).sum())
    if not actual.any():
        return "it is zero"
    if not squared_norm:
        return ""
    factor = float((actual * expected.conj()).sum().real) / squared_norm  # the factor of the least-squares fit
    # 1e-6 is far above float64's rounding and far below any factor that a bug gives, such as 2 or 1/2.
    if np.abs(actual - factor * expected).max() <= 1e-6 * abs(factor) * np.abs(expected).max():
        return f"{factor:.6g} times what it should be"
    return ""


def _missing(reference: Reference, result: RankResult) -> Iterator[Difference]:
    """Yield gradients and states which one process has, and the rank has not although it holds the parameter."""
    parameters = {split_key(key)[2] for key in result.tensors if "/parameter/" in key}
    steps = {split_key(key)[0] for key in result.tensors}
    for key, values in reference.tensors.items():
        step, kind, name, state = split_key(key)
        is_expected = name in parameters and step in steps and kind in ("gradient", "state")
        if not is_expected or key in result.tensors or not values.any():
            continue
        # The first step that a rank writes down is what it began with: no gradients are made there.
        if step == min(steps) or not result.facts["has_gradient"].get(name, True):
            continue
        if kind == "state" and not result.whole_states.get(name, True):
            continue
        if not take(values, result.shard_spec(name, kind)).any():
            continue
        scale = float(np.abs(values).max())
        yield Difference(step, kind, _label(name, state), result.rank, float("inf"), 0, scale, "it has none")


def _uncovered(reference: Reference, ranks: list[RankResult]) -> Iterator[Difference]:
    """Yield parameters and buffers of which some element is on no rank, and whole states that no rank has."""
    last_step = max((split_key(key)[0] for key in reference.tensors), default=0)
    for key, values in reference.tensors.items():
        step, kind, name, state = split_key(key)
        if step != last_step:
            continue
        holders = [result for result in ranks if key in result.tensors]
        if kind == "state" and not holders and any(name in result.whole_states for result in ranks):
            yield Difference(step, kind, _label(name, state), -1, float("inf"), 0, 0, "it is on no rank")
        if kind not in ("parameter", "buffer"):
            continue
        if any(_holds_all(result, name) for result in holders):
            continue
        indices = np.arange(values.size).reshape(values.shape)
        is_covered = np.zeros(values.size, bool)
        for result in holders:
            shard_indices = take(indices, result.shard_spec(name))
            is_covered[shard_indices.reshape(-1)] = True
        if not is_covered.all():
            count = int((~is_covered).sum())
            yield Difference(step, kind, name, -1, float("inf"), 0, 0, f"{count} of its elements are on no rank")


def _holds_all(result: RankResult, name: str) -> bool:
    shard_spec = result.shard_spec(name)
    return shard_spec is None or not shard_spec.cuts
