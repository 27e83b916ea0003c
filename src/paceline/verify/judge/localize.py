"""Find the first difference: which module makes it, in which phase, and which collective is next to it.

Forward values are looked at in the order in which they are made, gradients in the opposite order: the first that
differs comes from values that were right, so what went wrong lies between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import AXES, AXIS_TABLE, DATA_AXES, Mesh
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
from paceline.verify.judge.fingerprints import Print, added, differ, times_of
from paceline.verify.judge.order_of_collectives import Disorder, HangWatch
from paceline.verify.judge.verdict import FirstDifference
from paceline.verify.processes import WorldResult

# What the exchanges of a split graph send going forward, and with the gradients going back (comm/differentiable.py,
# graph/context/context_exchanges.py).
_FORWARD = {
    "reduce_from_group": "all_reduce", "gather_from_group": "all_gather", "gather_with_partial_grad": "all_gather",
    "reduce_scatter_to_group": "reduce_scatter", "split_cross_entropy": "all_reduce",
    "sum_with_partial_grad": "all_reduce", "take_at": "all_to_all", "move": "all_to_all", "attention": "attention",
    "convolve": "all_to_all",
}  # fmt: skip
_BACKWARD = {
    "copy_to_group": "all_reduce", "gather_with_partial_grad": "reduce_scatter",
    "reduce_scatter_to_group": "all_gather", "scatter_to_group": "all_gather",
    "sum_with_partial_grad": "all_reduce", "take_at": "all_to_all", "move": "all_to_all", "attention": "attention",
    "convolve": "all_to_all",
}  # fmt: skip
_IS_ONE = 1e-6  # how far a factor may be from one; factors are of float64 values
# The collective that adds up gradients on each axis.
_REDUCES = {axis.name: axis.sums_gradients_by for axis in AXIS_TABLE}

Replay = Mapping[int, Mapping[str, Any]]  # by part of the batch, what one process saw of it (ranks/replay.py)


def blame_disorder(disorder: Disorder, hang: HangWatch | None = None) -> FirstDifference:
    """Name the collective that one rank left out, or began without the others."""
    collective = disorder.expected or disorder.call
    place = ""
    if disorder.call and disorder.call.line:
        place = f"; rank {disorder.rank} at {disorder.call.line}"
    if hang is not None and disorder.rank in hang.standing:
        place = f"; rank {disorder.rank} stands at {hang.standing[disorder.rank]}"
    return FirstDifference("", f"{collective}", "order", disorder.describe() + place)


def blame_loading(found: list[Difference], name: str) -> FirstDifference | None:
    """Name the first tensor that a checkpoint did not bring back, or that the steps after it did not make."""
    if not found:
        return None
    first = found[0]
    detail = f", {first.found}" if first.found else ""
    message = f"{name}: {first.kind} {first.name} is wrong on rank {first.rank} after step {first.step}{detail}"
    return FirstDifference(module_of(first.name), "", "load", message)


def find_in_narrow(folder: Path, plan: Plan, precision: str) -> FirstDifference | None:
    """Find what differs only in the working precision: something is rounded to fewer digits than promised."""
    reference = Reference.read(folder, precision)
    ranks = read_ranks(folder, precision, plan.world_size)
    gradients = before_clipping(reference, ranks)
    first = _from_tensors(differences(reference, ranks), gradients, reference, ranks, Mesh.parse(plan.mesh))
    if first is not None:
        first.message = f"in {precision} alone, so too few digits are kept: {first.message}"
    return first


def find_first_difference(folder: Path, plan: Plan, watch: Callable[[], WorldResult]) -> FirstDifference | None:
    """Run the first step again with every module looked at, and find where it goes wrong.

    Args:
        folder: the folder into which the processes wrote.
        plan: the plan that was verified.
        watch: a function that runs the step on the ranks and in one process, which write `watched-RANK.json` and
            `replay.json`.
    """
    mesh = Mesh.parse(plan.mesh)
    reference = Reference.read(folder, "float64")
    ranks = read_ranks(folder, "float64", plan.world_size)
    all_differences = differences(reference, ranks)
    gradients = before_clipping(reference, ranks)
    # The search follows the step: initial values, samples, forward, loss, backward, sums over ranks, update. The first
    # that is wrong explains all that comes after it.
    for difference in all_differences:
        if difference.step == 0:
            return _at_start(difference, mesh)
    # Without the watched step (it may fail where the plain one did not) only the step's results can be judged.
    if not watch().is_done or not (folder / "replay.json").exists():
        return _from_tensors(all_differences, gradients, reference, ranks, mesh)
    watched = read_ranks(folder, "watched", plan.world_size)
    replay_json = json.loads((folder / "replay.json").read_text())
    replay = {int(part): record for part, record in replay_json.items()}  # JSON made the parts' numbers strings
    # Wrong samples come first: with them the losses don't add up either, and that is not the loss's fault.
    in_data = _in_data(watched, mesh) or _in_samples(watched, replay)
    if in_data is not None:
        return in_data
    check_adds_up(replay, reference)
    return (
        _in_forward(watched, replay, mesh)
        or _in_micro_batches(watched, replay)
        or _in_backward(watched, replay, mesh, gradients)
        or _from_tensors(all_differences, gradients, reference, ranks, mesh)
    )


def check_adds_up(replay: Replay, reference: Reference) -> None:
    """Raise WorkloadError when the parts' losses, each taken in one process, are not the whole batch's."""
    losses = []  # loss sum and weight of each micro-batch
    for record in replay.values():
        losses += record["losses"]
    weight = sum(weight for _, weight in losses)
    # With another weight the parts are not the whole batch, and their losses can't be compared with its loss.
    if not losses or abs(weight - reference.facts["weights"][0]) > 1e-9 * weight:
        return
    of_parts = sum(loss_sum for loss_sum, _ in losses) / weight
    of_batch = reference.facts["losses"][0]
    if abs(of_parts - of_batch) > 1e-8 * abs(of_batch):
        raise WorkloadError(
            "the loss should be the sum of its samples' losses",
            f"in one process the whole batch gives {of_batch!r} and its parts together {of_parts!r}",
            "let no sample's loss depend on the others in its batch, nor on what was computed before (a branch by "
            "a value, a maximum over the batch)",
        )


def _at_start(difference: Difference, mesh: Mesh) -> FirstDifference:
    collective = ""
    if mesh.size("replicate") > 1:  # it should have replaced what other ranks than 0 made (ranks/rank_main.py)
        collective = "broadcast on replicate"
    message = f"rank {difference.rank} begins with another {difference.name} than one process"
    return FirstDifference(module_of(difference.name), collective, "start", message)


def _in_data(watched: list[RankResult], mesh: Mesh) -> FirstDifference | None:
    """Find samples that no rank takes, or two do; or micro-batches that a rank did not run."""
    positions_of_part: dict[
        int, list[int]
    ] = {}  # by part of the batch: ranks of `tensor` and `pipeline` take the same samples
    for result in watched:
        ranges = result.facts["pieces"]
        positions_of_part[result.facts["data_part"]] = _positions_in(ranges)
        run = len({_micro_batch_of(place) for place in result.facts["watch"]["order"]})
        if 0 < run < len(ranges):  # 0: nothing was watched on this rank
            message = f"rank {result.rank} runs {run} of its {len(ranges)} micro-batches"
            return FirstDifference("", "", "data", message)
    positions = sorted(position for part in positions_of_part.values() for position in part)
    start, stop = watched[0].facts["batch"]  # positions in the data order; `stop` is not in the batch
    if positions != list(range(start, stop)):
        message = f"of samples {start} to {stop} of the order the ranks take {positions}: not each once"
        return FirstDifference("", "", "data", message)
    return None


def _positions_in(ranges: list[list[int]]) -> list[int]:
    positions: list[int] = []
    for start, stop in ranges:
        positions += range(start, stop)
    return positions


def _in_samples(watched: list[RankResult], replay: Replay) -> FirstDifference | None:
    """Find samples whose values are others on a rank than in one process."""
    for result in watched:
        expected_samples = replay[result.facts["data_part"]]["samples"]
        ranges = zip(result.facts["pieces"], result.facts["samples"], expected_samples, strict=False)
        for (start, stop), actual, expected in ranges:
            if _batches_differ(actual, expected):
                message = (
                    f"data: rank {result.rank} loads other values for samples {start} to {stop - 1} of the order "
                    "than one process: what the data set draws depends on the rank"
                )
                return FirstDifference("", "", "data", message)
    return None


def _batches_differ(actual: list[Print], expected: list[Print]) -> bool:
    if len(actual) != len(expected):
        return True
    return any(differ(a, b) for a, b in zip(actual, expected, strict=True))


def _in_micro_batches(watched: list[RankResult], replay: Replay) -> FirstDifference | None:
    """Find a micro-batch that counts more or less than others of the same rank, by the gradient of its last value."""
    for result in watched:
        factors = _gradient_factors(result, replay[result.facts["data_part"]])
        wrong = {}
        for micro_batch, factor in factors.items():
            if factor is not None and abs(factor - 1) > _IS_ONE:
                wrong[micro_batch] = factor
        # If all are off, no single micro-batch is at fault.
        if wrong and len(wrong) < len(factors):
            micro_batch, factor = next(iter(wrong.items()))
            message = (
                f"loss: micro-batch {int(micro_batch) + 1} of rank {result.rank} counts {factor:.4g} times "
                "in the gradients"
            )
            return FirstDifference("", "", "loss", message)
    return None


def _gradient_factors(result: RankResult, record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return by micro-batch how many times the right one the gradient of its last value is; None: no multiple."""
    actual, expected = result.facts["watch"]["back"], record["back"]
    last_places: dict[str, str] = {}
    for place in record["order"]:
        if place in expected and place in actual and place not in result.facts["watch"]["splits"]:
            last_places[_micro_batch_of(place)] = place
    return {number: times_of(actual[place], expected[place]) for number, place in last_places.items()}


def _in_forward(watched: list[RankResult], replay: Replay, mesh: Mesh) -> FirstDifference | None:
    """Find the first value going forward that is wrong on a rank."""
    for part, record in replay.items():
        ranks = [result for result in watched if result.facts["data_part"] == part]
        for number, place in enumerate(record["order"]):
            wrong_rank = _wrong_rank(ranks, place, "made", record["made"][place])
            if wrong_rank is None:
                continue
            module = record["modules"][place]
            maker = _describe_place(module, place)
            message = f"forward: what {maker} makes on rank {wrong_rank.rank} differs from one process"
            if not module:  # the model's own code between its modules: name the first that takes the value over
                module = _first_wrong_module(ranks, record, number)
            collective = _collective(wrong_rank, place, mesh, _FORWARD, "all_gather")
            return FirstDifference(module, collective, "forward", message)
    return None


def _first_wrong_module(ranks: list[RankResult], record: Mapping[str, Any], number: int) -> str:
    """Return the module of the first wrong value, from place `number` on, that was made in a module."""
    for place in record["order"][number:]:
        module: str = record["modules"][place]
        if module and _wrong_rank(ranks, place, "made", record["made"][place]) is not None:
            return module
    return ""


def _in_backward(
    watched: list[RankResult], replay: Replay, mesh: Mesh, wrong_gradients: list[Difference]
) -> FirstDifference | None:
    """Find the last place going forward whose gradient is wrong, unless a parameter after it is wrong too."""
    for part, record in replay.items():
        ranks = [result for result in watched if result.facts["data_part"] == part]
        largest_norm = max((abs(back[2]) ** 0.5 for back in record["back"].values()), default=0.0)
        floor = 1e-13 * largest_norm  # for sums that cancel, as `compare.py` allows them
        for place in reversed(record["order"]):
            if place not in record["back"]:
                continue
            wrong_rank = _wrong_rank(ranks, place, "back", record["back"][place], floor)
            module = record["modules"][place]
            # The values and gradients of that parameter's module were right, so its sum over ranks is at fault.
            if any(_is_after(module_of(difference.name), module, record) for difference in wrong_gradients):
                return None
            if wrong_rank is not None:
                user, collective = _user_of(wrong_rank, place, module, mesh)
                maker = _describe_place(module, place)
                message = f"backward: the gradient of what {maker} makes is wrong on rank {wrong_rank.rank}"
                if user and user != module:
                    message += f"; it comes back from {user}"
                return FirstDifference(user or module, collective, "backward", message)
    return None


def _from_tensors(
    found: list[Difference],
    gradients: list[Difference],
    reference: Reference,
    ranks: list[RankResult],
    mesh: Mesh,
) -> FirstDifference | None:
    """Find it in what follows right passes: sums over ranks, clipping, the update; or in a buffer.

    Args:
        found: all differences, sorted.
        gradients: the differences of the first step's gradients with clipping undone.
        reference: the results of the single process.
        ranks: the tensors and facts of the ranks.
        mesh: the mesh of the ranks.
    """
    if not found:
        return None
    # A wrong weight scales every gradient: it comes before them.
    in_weights = _in_weights(reference, ranks, mesh)
    if in_weights is not None:
        return in_weights
    if gradients:
        in_clipping = _in_clipping(gradients, reference, ranks)
        if in_clipping is not None:
            return in_clipping
        # The last module going forward is the first going backward.
        module_order = {name: number for number, name in enumerate(reference.facts["modules"])}
        first_backward = max(gradients, key=lambda gradient: module_order.get(module_of(gradient.name), -1))
        return _in_sums(first_backward, gradients, ranks, mesh)
    if found[0].kind == "gradient" and found[0].step == 1:
        # Right before clipping by each side's own norm, wrong after: the norms differ.
        axes = " and ".join(axis for axis in _REDUCES if mesh.size(axis) > 1)
        message = "clipping: gradients are right before it, and wrong by the factor that a wrong gradient norm gives"
        return FirstDifference(module_of(found[0].name), f"all_reduce on {axes} (of the norm)", "update", message)
    return _in_update(found, mesh)


def _in_update(found: list[Difference], mesh: Mesh) -> FirstDifference:
    """Name the first tensor that is wrong after right gradients: a parameter, a state, or else a buffer."""
    first = found[0]
    for difference in found:
        if difference.step == found[0].step and difference.kind != "buffer":
            first = difference
            break
    phase = "update"
    collective = ""
    if first.kind == "buffer":
        phase = "buffer"
        axes = " and ".join(mesh.used(DATA_AXES))
        if axes:
            collective = f"all_reduce on {axes} (of buffers)"
    elif first.kind == "gradient" and first.step > 1:
        phase = "later step"
    before = "gradients are right" if first.step == 1 else "the first step is right"
    message = f"{phase}: {before}, {first.kind} {first.name} of step {first.step} is not on rank {first.rank}"
    return FirstDifference(module_of(first.name), collective, phase, message)


def _in_clipping(gradients: list[Difference], reference: Reference, ranks: list[RankResult]) -> FirstDifference | None:
    """Find wrong clipping: all gradients are off by one factor, and their norm, taken just before, is right."""
    factor = _common_factor(gradients)
    norms = reference.facts["norms"][:1]
    if factor is None or not norms:
        return None
    if any(abs(result.facts["norms"][0] - norms[0]) > 1e-6 * norms[0] for result in ranks):
        return None
    message = "clipping: the gradient norm is right, but every gradient is"
    return FirstDifference("", "", "update", f"{message} {factor:.6g} times what clipping should leave")


def _in_weights(reference: Reference, ranks: list[RankResult], mesh: Mesh) -> FirstDifference | None:
    """Find a step in which the ranks' weights don't add up to the batch's."""
    for result in ranks:
        pairs = zip(result.facts["weights"], reference.facts["weights"], strict=False)
        for step, (actual, expected) in enumerate(pairs, 1):
            if abs(actual - expected) > 1e-9 * abs(expected):
                axes = " and ".join(axis for axis in _REDUCES if mesh.size(axis) > 1)
                message = f"loss: on rank {result.rank} the weights of step {step} add up to {actual:g}"
                message += f", alone to {expected:g}"
                return FirstDifference("", f"all_reduce on {axes} (of losses and weights)", "loss", message)
    return None


def _in_sums(first: Difference, gradients: list[Difference], ranks: list[RankResult], mesh: Mesh) -> FirstDifference:
    """Name the collective that adds up gradients that are wrong after right passes."""
    collective = _reduction(first, ranks, mesh)
    factor = _common_factor(gradients)
    if factor is not None and len(gradients) > 1:
        message = f"gradients: every one is {factor:.6g} times what it should be"
    else:
        detail = f", {first.found}" if first.found else ""
        count = len({gradient.name for gradient in gradients})
        message = f"gradients: that of {first.name} is wrong on rank {first.rank}{detail} ({count} gradients are wrong)"
    return FirstDifference(module_of(first.name), collective, "backward", message)


def _common_factor(gradients: list[Difference]) -> float | None:
    """Return the factor by which all gradients are off; None if there is no such factor."""
    factors = {factor_of(gradient) for gradient in gradients}
    return factors.pop() if len(factors) == 1 else None


def factor_of(difference: Difference) -> float | None:
    """Return the factor by which a tensor is too large; None: it is not a plain factor."""
    if not difference.found.endswith("times what it should be"):
        return None
    factor = float(difference.found.split(" ")[0])
    return round(factor, 5) or factor  # rounded, so that the factors of all gradients compare equal


def _reduction(first: Difference, ranks: list[RankResult], mesh: Mesh) -> str:
    """Return the collective that adds up a gradient, on the axis that is likeliest to be at fault.

    That is one along which copies of the gradient differ, else one whose size, or one over it, is the wrong factor.
    """
    axes = [axis for axis in _REDUCES if mesh.size(axis) > 1]
    reduces = dict(_REDUCES)
    if not any(_is_cut(result, first.name) for result in ranks):
        reduces["shard"] = "all_reduce"  # a scalar is not scattered
    # A sum that was left out leaves each rank with its own part: the copies differ. A sum that ran twice, or a mean in
    # its place, leaves equal copies that are off by the axis's size.
    for axis in axes:
        if _copies_differ(first, ranks, axis):
            return f"{reduces[axis]} on {axis}"
    likeliest_first = [axis for axis in dict.fromkeys([*DATA_AXES, *AXES]) if axis in axes]
    factor = factor_of(first)
    if factor is not None:
        for axis in likeliest_first:
            size = mesh.size(axis)
            if abs(factor - size) < 1e-3 * size or abs(factor - 1 / size) < 1e-3 / size:
                return f"{reduces[axis]} on {axis}"
    if not likeliest_first:
        return ""
    return f"{reduces[likeliest_first[0]]} on {likeliest_first[0]}"


def _is_cut(result: RankResult, name: str) -> bool:
    placement = result.facts["placements"].get(name)
    return bool(placement and placement["cuts"])


def _copies_differ(gradient: Difference, ranks: list[RankResult], axis: str) -> bool:
    """True if two ranks that differ only in their place on `axis` hold different values of the same piece."""
    key = f"{gradient.step}/gradient/{gradient.name}"
    copies: dict[Any, Any] = {}
    for result in ranks:
        if key not in result.tensors:
            continue
        other_axes = tuple(index for name, index in result.facts["coordinate"].items() if name != axis)
        shard_spec = str(result.facts["placements"].get(gradient.name, ""))
        values = result.tensors[key]
        copy = copies.setdefault((other_axes, shard_spec), values)
        if copy.shape == values.shape and abs(copy - values).max() > gradient.bound:
            return True
    return False


def _wrong_rank(
    ranks: list[RankResult], place: str, direction: str, expected: Print, floor: float = 0.0
) -> RankResult | None:
    """Return a rank whose value is not the right one; split values are added up over `tensor` and `context` first.

    Args:
        ranks: the ranks with the same part of the batch.
        place: the place of the value.
        direction: "made" for the value, "back" for its gradient.
        expected: the fingerprint in one process.
        floor: the absolute tolerance of the sums, on top of the relative one.
    """
    groups: dict[Any, list[RankResult]] = {}  # ranks whose pieces make up one value
    for result in ranks:
        watch = result.facts["watch"]
        if place not in watch[direction]:
            continue
        if place in watch["splits"]:
            at = result.facts["coordinate"]
            groups.setdefault((at["replicate"], at["shard"], at["pipeline"]), []).append(result)
        elif differ(watch[direction][place], expected, floor):
            return result
    for group in groups.values():
        pieces = [result.facts["watch"][direction][place] for result in group]
        if differ(added(pieces), expected, floor):
            return group[0]
    return None


def _collective(wrong_rank: RankResult, place: str, mesh: Mesh, sends: dict[str, str], otherwise: str) -> str:
    """Return the collective next to a place: its own operation's, else the last before it.

    Args:
        wrong_rank: the rank whose graph is searched.
        place: the place of the wrong value.
        mesh: the mesh of the ranks.
        sends: the collective of each exchange in the direction that is searched.
        otherwise: the collective of `shard`, where ranks run no graph.
    """
    graph = wrong_rank.facts["watch"]["graph"]
    if not graph:
        return f"{otherwise} on shard" if mesh.size("shard") > 1 else ""
    node = _node_of(place)
    last = ""
    for original, _, exchange, made_for, axis in graph:
        if exchange in sends:
            last = f"{sends[exchange]} on {axis}"
            if node in (original, made_for):
                return f"{last} ({exchange} in {_module_of_node(graph, made_for or original)})"
        if original == node:
            break
    if mesh.size("pipeline") > 1 and not last:
        return "send on pipeline"
    return last


def _user_of(wrong_rank: RankResult, place: str, module: str, mesh: Mesh) -> tuple[str, str]:
    """Return the module from which a gradient comes back to a place, and the collective on the way."""
    graph = wrong_rank.facts["watch"]["graph"]
    node = _node_of(place)
    is_after_node = False
    for original, user, exchange, made_for, axis in graph:
        if original == node:
            is_after_node = True
        elif is_after_node and exchange in _BACKWARD:
            return user, f"{_BACKWARD[exchange]} on {axis} ({exchange} for {made_for})"
    if mesh.size("pipeline") > 1:
        return module, "send on pipeline"
    if mesh.size("shard") > 1 and not graph:
        return module, "reduce_scatter on shard"
    return module, ""


def _module_of_node(graph: list[list[str]], node: str) -> str:
    for original, module, *_ in graph:
        if original == node:
            return module or "the loss"
    return "the loss"


def _micro_batch_of(place: str) -> str:
    return place.split(":", 1)[0]


def _node_of(place: str) -> str:
    return place.split(":", 1)[1]


def _describe_place(module: str, place: str) -> str:
    node = _node_of(place)
    if "#" in node:  # a module's call, and no node of a graph: see `watch.py`
        return f"the module {module}" if module else "the model"
    return f"{node} in {module}" if module else f"{node} in the model's own code or the loss"


def _is_after(module: str, earlier: str, record: Mapping[str, Any]) -> bool:
    """True if a module ends after the earlier one, going forward."""
    last: dict[str, int] = {}
    for number, place in enumerate(record["order"]):
        last[record["modules"][place]] = number
    return last.get(module, -1) > last.get(earlier, -1)
