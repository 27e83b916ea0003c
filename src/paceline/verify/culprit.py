"""Where the first difference is: which module, in which phase, and which collective is next to it.

Forward values are looked at in the order in which they are made, gradients in the opposite order: the first that
differs comes from values that were right, so what went wrong lies between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.compare import Difference, RankResult, Reference, differences, read_ranks
from paceline.verify.order import Disorder, HangWatch
from paceline.verify.prints import added, differ
from paceline.verify.verdict import Culprit
from paceline.verify.worlds import World

# What the exchanges of a split graph send going forward, and with the gradients going back (comm/differentiable.py).
_FORWARD = {
    "add_parts": "all_reduce", "gather": "all_gather", "gather_parts": "all_gather",
    "scatter_parts": "reduce_scatter", "split_cross_entropy": "all_reduce",
}  # fmt: skip
_BACKWARD = {
    "share_whole": "all_reduce", "gather_parts": "reduce_scatter", "scatter_parts": "all_gather",
    "keep_piece": "all_gather",
}  # fmt: skip
_REDUCES = {"pipeline": "send", "shard": "reduce_scatter", "replicate": "all_reduce", "tensor": "all_reduce"}


def blame_disorder(disorder: Disorder, hang: HangWatch | None = None) -> Culprit:
    """The collective that one rank left out, or began alone."""
    call = disorder.expected or disorder.call
    at = f"; rank {disorder.rank} at {disorder.call.line}" if disorder.call and disorder.call.line else ""
    if hang is not None and disorder.rank in hang.standing:
        beat = hang.standing[disorder.rank]
        at = f"; rank {disorder.rank} stands at {beat['at'] or beat['line']}"
    return Culprit("", f"{call}", "order", disorder.told() + at)


def find_culprit(folder: Path, plan: Plan, watch: Callable[[], World]) -> Culprit | None:
    """Run the first step again with every module looked at, and find where it goes wrong."""
    mesh = Mesh.parse(plan.mesh)
    reference = Reference.read(folder, "float64")
    ranks = read_ranks(folder, "float64", plan.world_size)
    found = differences(reference, ranks)
    start = [one for one in found if one.step == 0]
    if start:
        return _at_start(start[0], mesh)
    if not watch().is_done or not (folder / "replay.json").exists():
        return _from_tensors(found, reference, ranks, mesh)
    seen = read_ranks(folder, "watched", plan.world_size)
    replay = {int(part): one for part, one in json.loads((folder / "replay.json").read_text()).items()}
    return (
        _in_data(seen, mesh)
        or _in_forward(seen, replay, mesh)
        or _in_backward(seen, replay, mesh, found, reference)
        or _from_tensors(found, reference, ranks, mesh)
    )


def _at_start(one: Difference, mesh: Mesh) -> Culprit:
    axis = next((a for a in ("replicate", "shard", "tensor", "pipeline") if mesh.size(a) > 1), "")
    collective = "broadcast on replicate" if axis == "replicate" else ""
    return Culprit(
        module_of(one.name), collective, "start", f"rank {one.rank} begins with another {one.name} than one process"
    )


def _in_data(seen: list[RankResult], mesh: Mesh) -> Culprit | None:
    """Samples that no rank takes, or two do; micro-batches that a rank did not run."""
    taken: dict[int, list[int]] = {}
    for result in seen:
        pieces = result.facts["pieces"]
        taken[result.facts["data_part"]] = [at for start, stop in pieces for at in range(start, stop)]
        ran = len({place.split(":", 1)[0] for place in result.facts["watch"]["order"]})
        if 0 < ran < len(pieces):
            said = f"rank {result.rank} runs {ran} of its {len(pieces)} micro-batches"
            return Culprit("", "", "data", said)
    every = sorted(at for positions in taken.values() for at in positions)
    if every != sorted(set(every)) or every != list(range(every[0], every[-1] + 1)):
        return Culprit("", "", "data", f"the parts of the batch take samples {every}, not each once")
    return None


def _in_forward(seen: list[RankResult], replay: dict[int, dict[str, Any]], mesh: Mesh) -> Culprit | None:
    for part, right in replay.items():
        ranks = [result for result in seen if result.facts["data_part"] == part]
        for place in right["order"]:
            wrong = _wrong_rank(ranks, place, "made", right["made"][place])
            if wrong is not None:
                module = right["modules"][place]
                said = f"forward: what {_named(module, place)} makes on rank {wrong.rank} differs from one process"
                return Culprit(module, _collective(wrong, place, mesh, _FORWARD, "all_gather"), "forward", said)
    return None


def _in_backward(
    seen: list[RankResult],
    replay: dict[int, dict[str, Any]],
    mesh: Mesh,
    found: Iterable[Difference],
    reference: Reference,
) -> Culprit | None:
    """The last place going forward whose gradient is wrong, unless a parameter after it is wrong too."""
    wrong_parameters = [one for one in found if one.kind == "gradient" and one.step == 1]
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
                return Culprit(user or module, collective, "backward", said)
            if later:
                return None
    return None


def _from_tensors(found: list[Difference], reference: Reference, ranks: list[RankResult], mesh: Mesh) -> Culprit | None:
    """Passes are right, so it is what follows: sums over ranks, clipping, the update; or a buffer."""
    if not found:
        return None
    step = min(one.step for one in found)
    here = [one for one in found if one.step == step]
    gradients = _unclipped(here, reference, ranks)
    order = {name: number for number, name in enumerate(reference.facts["modules"])}
    if gradients:
        first = max(gradients, key=lambda one: order.get(module_of(one.name), -1))
        collective = _reduction(first, gradients, ranks, mesh, reference)
        how = f", {first.found}" if first.found else ""
        many = f" ({len({one.name for one in gradients})} gradients are wrong)"
        said = f"gradients: that of {first.name} is wrong on rank {first.rank}{how}{many}"
        return Culprit(module_of(first.name), collective, "backward", said)
    if any(one.kind == "gradient" for one in here):
        axes = " and ".join(axis for axis in _REDUCES if mesh.size(axis) > 1)
        first = min(
            (one for one in here if one.kind == "gradient"), key=lambda one: order.get(module_of(one.name), 1 << 30)
        )
        said = f"clipping: gradients are right up to a factor, which the gradient's norm gives ({first.found})"
        return Culprit(module_of(first.name), f"all_reduce on {axes} (of the norm)", "update", said)
    first = min(here, key=lambda one: (one.kind == "buffer", order.get(module_of(one.name), 1 << 30)))
    phase = "buffer" if first.kind == "buffer" else "update"
    collective = "all_reduce on the data axes (of buffers)" if phase == "buffer" else ""
    said = f"{phase}: gradients are right, {first.name} is not on rank {first.rank}"
    return Culprit(module_of(first.name), collective, phase, said)


def _unclipped(found: list[Difference], reference: Reference, ranks: list[RankResult]) -> list[Difference]:
    """Gradient differences that a wrong norm alone does not explain."""
    gradients = [one for one in found if one.kind == "gradient"]
    if not gradients or not reference.facts["norms"]:
        return gradients
    step = gradients[0].step
    mine = {result.rank: result.facts["norms"] for result in ranks}
    right = reference.facts["norms"]
    at = 0 if step == 1 else -1
    factors = {one.found.split(" ")[0] for one in gradients if "times" in one.found}
    all_scaled = all("times" in one.found for one in gradients)
    is_norm_off = any(abs(norms[at] - right[at]) > 1e-9 * abs(right[at]) for norms in mine.values() if norms)
    if not (all_scaled and is_norm_off):
        return gradients
    for one in gradients:
        norm = mine[one.rank][at] if one.rank in mine else right[at]
        explained = (right[at] + 1e-6) / (norm + 1e-6)
        if abs(float(one.found.split(" ")[0]) - explained) > 1e-4 * explained and len(factors) > 1:
            return gradients
    ratio = next(iter(mine.values()))[at] / right[at]
    return gradients if len(factors) == 1 and abs(float(next(iter(factors))) - ratio) < 1e-4 * ratio else []


def _reduction(
    first: Difference, gradients: list[Difference], ranks: list[RankResult], mesh: Mesh, reference: Reference
) -> str:
    """The collective that adds up the gradient of a parameter, on the axis where its copies differ or a factor fits."""
    key = f"{first.step}/gradient/{first.name}"
    used = [axis for axis in _REDUCES if mesh.size(axis) > 1]
    for axis in used:
        groups: dict[Any, Any] = {}
        for result in ranks:
            if key not in result.tensors:
                continue
            at = {a: i for a, i in result.facts["coordinate"].items() if a != axis}
            placement = str(result.facts["placements"].get(first.name, ""))
            other = groups.setdefault((*at.values(), placement), result.tensors[key])
            if other.shape == result.tensors[key].shape and abs(other - result.tensors[key]).max() > first.bound:
                return f"{_REDUCES[axis]} on {axis}"
    for axis in ("replicate", "shard", "pipeline", "tensor"):
        if axis in used and "times" in first.found:
            factor = float(first.found.split(" ")[0])
            if any(abs(factor - value) < 1e-3 * value for value in (mesh.size(axis), 1 / mesh.size(axis))):
                return f"{_REDUCES[axis]} on {axis}"
    axis = next((a for a in ("replicate", "shard", "pipeline", "tensor") if a in used), "")
    return f"{_REDUCES[axis]} on {axis}" if axis else ""


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
    return f"{node} in {module}" if module else f"{node} in the loss"


def _is_after(module: str, other: str, right: dict[str, Any]) -> bool:
    """Whether a module ends after another, going forward."""
    last = {name: number for number, name in enumerate(right["modules"][place] for place in right["order"])}
    return last.get(module, -1) > last.get(other, -1)


def module_of(name: str) -> str:
    """The module that a parameter or buffer belongs to."""
    return name.rpartition(" of ")[2].rpartition(".")[0]
