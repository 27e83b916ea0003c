"""Where the first difference is: which module, in which phase, and which collective is next to it.

Forward values are looked at in the order in which they are made, gradients in the opposite order: the first that
differs comes from values that were right, so what went wrong lies between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.compare import (
    Difference,
    RankResult,
    Reference,
    before_clipping,
    differences,
    module_of,
    read_ranks,
)
from paceline.verify.judge.fingerprints import added, differ, times_of
from paceline.verify.judge.order import Disorder, HangWatch
from paceline.verify.judge.verdict import FirstDifference
from paceline.verify.processes import WorldResult

# What the exchanges of a split graph send going forward, and with the gradients going back (comm/differentiable.py).
_FORWARD = {
    "add_parts": "all_reduce", "gather": "all_gather", "gather_parts": "all_gather",
    "scatter_parts": "reduce_scatter", "split_cross_entropy": "all_reduce",
}  # fmt: skip
_BACKWARD = {
    "share_whole": "all_reduce", "gather_parts": "reduce_scatter", "scatter_parts": "all_gather",
    "keep_piece": "all_gather",
}  # fmt: skip
_IS_ONE = 1e-6  # how far a factor may be from one
_REDUCES = {"pipeline": "send", "shard": "reduce_scatter", "replicate": "all_reduce", "tensor": "all_reduce"}


def blame_disorder(disorder: Disorder, hang: HangWatch | None = None) -> FirstDifference:
    """The collective that one rank left out, or began alone."""
    call = disorder.expected or disorder.call
    at = f"; rank {disorder.rank} at {disorder.call.line}" if disorder.call and disorder.call.line else ""
    if hang is not None and disorder.rank in hang.standing:
        heartbeat = hang.standing[disorder.rank]
        at = f"; rank {disorder.rank} stands at {heartbeat['at'] or heartbeat['line']}"
    return FirstDifference("", f"{call}", "order", disorder.describe() + at)


def blame_loading(found: list[Difference], name: str) -> FirstDifference | None:
    """The first tensor that a checkpoint did not bring back, or that the steps after it did not make."""
    if not found:
        return None
    first = found[0]
    how = f", {first.found}" if first.found else ""
    said = f"{name}: {first.kind} {first.name} is wrong on rank {first.rank} after step {first.step}{how}"
    return FirstDifference(module_of(first.name), "", "load", said)


def find_in_narrow(folder: Path, plan: Plan, precision: str) -> FirstDifference | None:
    """What differs in the working precision alone: something is rounded to fewer digits than promised."""
    reference, ranks = Reference.read(folder, precision), read_ranks(folder, precision, plan.world_size)
    gradients = before_clipping(reference, ranks)
    found = _from_tensors(differences(reference, ranks), gradients, reference, ranks, Mesh.parse(plan.mesh))
    if found is not None:
        found.said = f"in {precision} alone, so too few digits are kept: {found.said}"
    return found


def find_first_difference(folder: Path, plan: Plan, watch: Callable[[], WorldResult]) -> FirstDifference | None:
    """Run the first step again with every module looked at, and find where it goes wrong."""
    mesh = Mesh.parse(plan.mesh)
    reference = Reference.read(folder, "float64")
    ranks = read_ranks(folder, "float64", plan.world_size)
    found, gradients = differences(reference, ranks), before_clipping(reference, ranks)
    start = [one for one in found if one.step == 0]
    if start:
        return _at_start(start[0], mesh)
    if not watch().is_done or not (folder / "replay.json").exists():
        return _from_tensors(found, gradients, reference, ranks, mesh)
    seen = read_ranks(folder, "watched", plan.world_size)
    replay = {int(part): one for part, one in json.loads((folder / "replay.json").read_text()).items()}
    in_data = _in_data(seen, mesh) or _in_samples(seen, replay)
    if in_data is not None:
        return in_data
    check_adds_up(replay, reference)
    return (
        _in_forward(seen, replay, mesh)
        or _in_micro_batches(seen, replay)
        or _in_backward(seen, replay, mesh, gradients)
        or _from_tensors(found, gradients, reference, ranks, mesh)
    )


def check_adds_up(replay: Mapping[int, Mapping[str, Any]], reference: Reference) -> None:
    """Raise WorkloadError when the parts' losses, each taken in one process, are not the whole batch's."""
    losses = [pair for part in replay.values() for pair in part["losses"]]
    weight = sum(pair[1] for pair in losses)
    if not losses or abs(weight - reference.facts["weights"][0]) > 1e-9 * weight:
        return
    mean, whole = sum(pair[0] for pair in losses) / weight, reference.facts["losses"][0]
    if abs(mean - whole) > 1e-8 * abs(whole):
        raise WorkloadError(
            "a loss that is the sum of its samples' losses",
            f"in one process the whole batch gives {whole!r} and its parts together {mean!r}",
            "let no sample's loss depend on the others in its batch, nor on what was computed before (a branch by "
            "a value, a maximum over the batch)",
        )


def _at_start(one: Difference, mesh: Mesh) -> FirstDifference:
    axis = next((a for a in ("replicate", "shard", "tensor", "pipeline") if mesh.size(a) > 1), "")
    collective = "broadcast on replicate" if axis == "replicate" else ""
    return FirstDifference(
        module_of(one.name), collective, "start", f"rank {one.rank} begins with another {one.name} than one process"
    )


def _in_data(seen: list[RankResult], mesh: Mesh) -> FirstDifference | None:
    """Samples that no rank takes, or two do; micro-batches that a rank did not run."""
    taken: dict[int, list[int]] = {}
    for result in seen:
        pieces = result.facts["pieces"]
        taken[result.facts["data_part"]] = [at for start, stop in pieces for at in range(start, stop)]
        ran = len({place.split(":", 1)[0] for place in result.facts["watch"]["order"]})
        if 0 < ran < len(pieces):
            said = f"rank {result.rank} runs {ran} of its {len(pieces)} micro-batches"
            return FirstDifference("", "", "data", said)
    every = sorted(at for positions in taken.values() for at in positions)
    if every != list(range(*seen[0].facts["batch"])):
        whole = "{} to {}".format(*seen[0].facts["batch"])
        return FirstDifference("", "", "data", f"of samples {whole} of the order the ranks take {every}: not each once")
    return None


def _in_samples(seen: list[RankResult], replay: Mapping[int, Mapping[str, Any]]) -> FirstDifference | None:
    """Samples whose values are others on a rank than in one process."""
    for result in seen:
        right = replay[result.facts["data_part"]]["samples"]
        pieces = zip(result.facts["pieces"], result.facts["samples"], right, strict=False)
        for (start, stop), mine, expected in pieces:
            if len(mine) != len(expected) or any(differ(a, b) for a, b in zip(mine, expected, strict=True)):
                said = f"data: rank {result.rank} loads other values for samples {start} to {stop - 1} of the order"
                return FirstDifference(
                    "", "", "data", f"{said} than one process: what the data set draws depends on the rank"
                )
    return None


def _in_micro_batches(seen: list[RankResult], replay: Mapping[int, Mapping[str, Any]]) -> FirstDifference | None:
    """Micro-batches that count more or less than others of the same rank, by the gradient of what is last in each."""
    for result in seen:
        right, mine = replay[result.facts["data_part"]], result.facts["watch"]["back"]
        last: dict[str, str] = {}  # of each micro-batch
        for place in right["order"]:
            if place in right["back"] and place in mine and place not in result.facts["watch"]["splits"]:
                last[place.split(":", 1)[0]] = place
        factors = {number: times_of(mine[place], right["back"][place]) for number, place in last.items()}
        wrong = [number for number, factor in factors.items() if factor is not None and abs(factor - 1) > _IS_ONE]
        if wrong and len(wrong) < len(factors):
            said = f"micro-batch {int(wrong[0]) + 1} of rank {result.rank} counts {factors[wrong[0]]:.4g} times"
            return FirstDifference("", "", "loss", f"loss: {said} in the gradients")
    return None


def _in_forward(seen: list[RankResult], replay: dict[int, dict[str, Any]], mesh: Mesh) -> FirstDifference | None:
    for part, right in replay.items():
        ranks = [result for result in seen if result.facts["data_part"] == part]
        for number, place in enumerate(right["order"]):
            wrong = _wrong_rank(ranks, place, "made", right["made"][place])
            if wrong is not None:
                module = right["modules"][place]
                if not module:  # the model's own code between its modules: name the first that takes it over
                    module = _first_module(ranks, right, number)
                what = _named(right["modules"][place], place)
                said = f"forward: what {what} makes on rank {wrong.rank} differs from one process"
                return FirstDifference(module, _collective(wrong, place, mesh, _FORWARD, "all_gather"), "forward", said)
    return None


def _first_module(ranks: list[RankResult], right: dict[str, Any], number: int) -> str:
    """The module of the first wrong value from a place on that was made in one."""
    for place in right["order"][number:]:
        module: str = right["modules"][place]
        if module and _wrong_rank(ranks, place, "made", right["made"][place]) is not None:
            return module
    return ""


def _in_backward(
    seen: list[RankResult], replay: dict[int, dict[str, Any]], mesh: Mesh, wrong_parameters: list[Difference]
) -> FirstDifference | None:
    """The last place going forward whose gradient is wrong, unless a parameter after it is wrong too."""
    for part, right in replay.items():
        ranks = [result for result in seen if result.facts["data_part"] == part]
        floor = 1e-13 * max((abs(p[2]) ** 0.5 for p in right["back"].values()), default=0.0)
        for place in reversed(right["order"]):
            if place not in right["back"]:
                continue
            wrong = _wrong_rank(ranks, place, "back", right["back"][place], floor)
            module = right["modules"][place]
            later = [one for one in wrong_parameters if _is_after(module_of(one.name), module, right)]
            if wrong is not None and not later:
                user, collective = _user_of(wrong, place, module, mesh)
                said = f"backward: the gradient of what {_named(module, place)} makes is wrong on rank {wrong.rank}"
                said += f"; it comes back from {user}" if user and user != module else ""
                return FirstDifference(user or module, collective, "backward", said)
            if later:
                return None
    return None


def _from_tensors(
    found: list[Difference],
    gradients: list[Difference],
    reference: Reference,
    ranks: list[RankResult],
    mesh: Mesh,
) -> FirstDifference | None:
    """Passes are right, so it is what follows: sums over ranks, clipping, the update; or a buffer."""
    if not found:
        return None
    begins = {name: number for number, name in enumerate(reference.facts["modules"])}
    weighed = _in_weights(reference, ranks, mesh)
    if weighed is not None:
        return weighed
    if gradients:
        scaled = _in_clipping(gradients, reference, ranks)
        if scaled is not None:
            return scaled
        return _in_sums(max(gradients, key=lambda one: begins.get(module_of(one.name), -1)), gradients, ranks, mesh)
    here = [one for one in found if one.step == found[0].step]
    first = here[0]
    if first.kind == "gradient" and first.step == 1:
        axes = " and ".join(axis for axis in _REDUCES if mesh.size(axis) > 1)
        said = "clipping: gradients are right before it, and wrong by the factor that a wrong gradient norm gives"
        return FirstDifference(module_of(first.name), f"all_reduce on {axes} (of the norm)", "update", said)
    first = next((one for one in here if one.kind != "buffer"), first)
    phase = "buffer" if first.kind == "buffer" else "update"
    data = [axis for axis in ("replicate", "shard") if mesh.size(axis) > 1]
    collective = f"all_reduce on {' and '.join(data)} (of buffers)" if phase == "buffer" and data else ""
    before = "gradients are right" if first.step == 1 else "the first step is right"
    if first.step > 1 and first.kind == "gradient":
        phase = "later step"
    said = f"{phase}: {before}, {first.kind} {first.name} of step {first.step} is not on rank {first.rank}"
    return FirstDifference(module_of(first.name), collective, phase, said)


def _in_clipping(gradients: list[Difference], reference: Reference, ranks: list[RankResult]) -> FirstDifference | None:
    """All gradients off by one factor, and their norm, which is taken just before clipping, is right."""
    factors = {factor_of(one) for one in gradients}
    norms = reference.facts["norms"][:1]
    if len(factors) != 1 or None in factors or not norms:
        return None
    if any(abs(result.facts["norms"][0] - norms[0]) > 1e-6 * norms[0] for result in ranks):
        return None
    said = "clipping: the gradient norm is right, but every gradient is"
    return FirstDifference("", "", "update", f"{said} {next(iter(factors)):.6g} times what clipping should leave")


def _in_weights(reference: Reference, ranks: list[RankResult], mesh: Mesh) -> FirstDifference | None:
    """The ranks' weights don't add up to the batch's."""
    for result in ranks:
        for step, (mine, right) in enumerate(zip(result.facts["weights"], reference.facts["weights"], strict=False), 1):
            if abs(mine - right) > 1e-9 * abs(right):
                axes = " and ".join(axis for axis in _REDUCES if mesh.size(axis) > 1)
                said = f"loss: on rank {result.rank} the weights of step {step} add up to {mine:g}, alone to {right:g}"
                return FirstDifference("", f"all_reduce on {axes} (of losses and weights)", "loss", said)
    return None


def _in_sums(first: Difference, gradients: list[Difference], ranks: list[RankResult], mesh: Mesh) -> FirstDifference:
    """Gradients that are wrong after right passes: where they are added up."""
    factors = {factor_of(one) for one in gradients}
    collective = _reduction(first, ranks, mesh)
    if len(factors) == 1 and None not in factors and len(gradients) > 1:
        said = f"gradients: every one is {next(iter(factors)):.6g} times what it should be"
    else:
        how = f", {first.found}" if first.found else ""
        many = len({one.name for one in gradients})
        said = f"gradients: that of {first.name} is wrong on rank {first.rank}{how} ({many} gradients are wrong)"
    return FirstDifference(module_of(first.name), collective, "backward", said)


def factor_of(one: Difference) -> float | None:
    """How many times too large a tensor is; None: not a plain factor."""
    if not one.found.endswith("times what it should be"):
        return None
    factor = float(one.found.split(" ")[0])
    return round(factor, 5) or factor


def _reduction(first: Difference, ranks: list[RankResult], mesh: Mesh) -> str:
    """The collective that adds up the gradient of a parameter, on the axis where its copies differ or a factor fits."""
    key = f"{first.step}/gradient/{first.name}"
    used = [axis for axis in _REDUCES if mesh.size(axis) > 1]
    is_whole = not any((one.facts["placements"].get(first.name) or {"cuts": []})["cuts"] for one in ranks)
    reduces = {**_REDUCES, **({"shard": "all_reduce"} if is_whole else {})}  # a scalar is not scattered
    for axis in used:
        groups: dict[Any, Any] = {}
        for result in ranks:
            if key not in result.tensors:
                continue
            at = {a: i for a, i in result.facts["coordinate"].items() if a != axis}
            shard_spec = str(result.facts["placements"].get(first.name, ""))
            other = groups.setdefault((*at.values(), shard_spec), result.tensors[key])
            if other.shape == result.tensors[key].shape and abs(other - result.tensors[key]).max() > first.bound:
                return f"{reduces[axis]} on {axis}"
    factor = factor_of(first)
    by_size = [a for a in ("replicate", "shard", "pipeline", "tensor") if a in used]
    for axis in by_size if factor is not None else []:
        if any(abs(factor - value) < 1e-3 * value for value in (mesh.size(axis), 1 / mesh.size(axis))):  # type: ignore[operator]
            return f"{reduces[axis]} on {axis}"
    return f"{reduces[by_size[0]]} on {by_size[0]}" if by_size else ""


def _wrong_rank(ranks: list[RankResult], place: str, what: str, right: Any, floor: float = 0.0) -> RankResult | None:
    """A rank whose value is not the right one; split values are put together over `tensor` first."""
    have = [result for result in ranks if place in result.facts["watch"][what]]
    split = [result for result in have if place in result.facts["watch"]["splits"]]
    for result in have:
        if result not in split and differ(result.facts["watch"][what][place], right, floor):
            return result
    groups: dict[Any, list[RankResult]] = {}
    for result in split:
        at = result.facts["coordinate"]
        groups.setdefault((at["replicate"], at["shard"], at["pipeline"]), []).append(result)
    for group in groups.values():
        if differ(added([result.facts["watch"][what][place] for result in group]), right, floor):
            return group[0]
    return None


def _collective(wrong: RankResult, place: str, mesh: Mesh, sends: dict[str, str], otherwise: str) -> str:
    """The collective next to a place: its own operation's, else the last before it."""
    graph = wrong.facts["watch"]["graph"]
    if not graph:
        return f"{otherwise} on shard" if mesh.size("shard") > 1 else ""
    node, last = place.split(":", 1)[1], ""
    for original, _, exchange, made_for in graph:
        if exchange in sends:
            last = f"{sends[exchange]} on tensor"
        if node in (original, made_for) and exchange in sends:
            return f"{sends[exchange]} on tensor ({exchange} in {_place_of(graph, made_for or original)})"
        if original == node:
            break
    if mesh.size("pipeline") > 1 and not last:
        return "send on pipeline"
    return last


def _user_of(wrong: RankResult, place: str, module: str, mesh: Mesh) -> tuple[str, str]:
    """The module from which a gradient comes back to a place, and the collective on the way."""
    graph, node = wrong.facts["watch"]["graph"], place.split(":", 1)[1]
    begun = False
    for original, its_module, exchange, made_for in graph:
        if original == node:
            begun = True
        elif begun and exchange in _BACKWARD:
            return its_module, f"{_BACKWARD[exchange]} on tensor ({exchange} for {made_for})"
    if mesh.size("pipeline") > 1:
        return module, "send on pipeline"
    return module, "reduce_scatter on shard" if mesh.size("shard") > 1 and not graph else ""


def _place_of(graph: list[list[str]], node: str) -> str:
    return next((module for original, module, _, _ in graph if original == node), "") or "the loss"


def _named(module: str, place: str) -> str:
    node = place.split(":", 1)[1]
    if "#" in node:
        return f"the module {module}" if module else "the model"
    return f"{node} in {module}" if module else f"{node} in the model's own code or the loss"


def _is_after(module: str, other: str, right: dict[str, Any]) -> bool:
    """Whether a module ends after another, going forward."""
    last = {name: number for number, name in enumerate(right["modules"][place] for place in right["order"])}
    return last.get(module, -1) > last.get(other, -1)
