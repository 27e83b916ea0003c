"""The checks of a verification: each compares what the processes wrote and adds a line to the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.verify.judge.compare import (
    TURNED,
    Difference,
    RankResult,
    Reference,
    differences,
    largest_difference,
    tolerance_of,
)
from paceline.verify.judge.order_of_collectives import Call, find_disorder
from paceline.verify.judge.verdict import FirstDifference, Verdict

_OUTSIDE = ("world",)  # the axis of what jobs say to each other between steps, which no plan predicts

Operation = tuple[str, str]  # collective and axis


def check_order(
    verdict: Verdict, traces: Mapping[str, dict[int, list[Call]]], mesh: Mesh, dry: Mapping[str, Any]
) -> None:
    """Check that ranks that belong together began the same collectives in the same order.

    Args:
        verdict: the verdict to which a line is added.
        traces: the calls of each rank, by run.
        mesh: the mesh of the ranks.
        dry: the content of dry.json.
    """
    # First the graphs from the dry run, by stage: ranks of `tensor` and `context` must have the same collectives there.
    graphs = dry["graphs"]
    for key, calls in graphs.items():
        stage, number = key.split(",")
        calls_of_first = graphs[f"{stage},0"]
        # All but the line of the source, which is the last.
        if [call[:3] for call in calls] != [call[:3] for call in calls_of_first]:
            verdict.add("order", False, f"before running: rank {number} of stage {stage} has another graph")
            return
    for calls_of_run in traces.values():
        disorder = find_disorder(calls_of_run, mesh)
        if disorder is not None:
            verdict.add("order", False, disorder.describe(), disorder=disorder.to_json())
            return
    count = 0
    for calls_of_run in traces.values():
        count = max([count, *(len(calls) for calls in calls_of_run.values())])
    verdict.add("order", True, f"every rank begins the same collectives in the same order ({count} in all)")


def check_step(
    verdict: Verdict,
    reference: Reference,
    ranks: list[RankResult],
    name: str = "step",
    found: list[Difference] | None = None,
) -> None:
    """Check losses, weights, norms, learning rates and every tensor of every rank.

    Args:
        verdict: the verdict to which a line is added.
        reference: the results of the single process.
        ranks: the ranks' results that are compared with it.
        name: the name of the line.
        found: the differences of tensors, if they are known already.
    """
    if found is None:
        found = differences(reference, ranks)
    scalars = _wrong_scalars(reference, ranks) + _wrong_rates(reference, ranks)
    label = f"{name} {reference.precision}" if name == "step" else name
    if found or scalars:
        messages = scalars[:1]
        if found:
            messages.append(_describe_differences(found))
        json_differences = [difference.to_json() for difference in found[:50]]  # the first say what matters
        verdict.add(label, False, "; ".join(messages), differences=json_differences, scalars=scalars)
        return
    largest = largest_difference(reference, ranks)
    if name == "step":
        verdict.is_compared = True
        verdict.largest = largest
        verdict.is_bitwise = _is_bitwise(reference, ranks)
    steps = len(reference.facts["losses"])
    count = len([key for key in reference.tensors if not key.startswith("0/")])
    message = f"{steps} losses and {count} tensors; parameters off by {largest:.1e} of their norm"
    verdict.add(label, True, message, largest=largest)


def _describe_differences(found: list[Difference]) -> str:
    """Describe the first difference, and say how many there are."""
    first = found[0]
    detail = f"off by {first.error:.2e} where rounding does {first.bound:.1e}"
    if first.found:
        detail = first.found
    holder = f"rank {first.rank}" if first.rank >= 0 else "the ranks"
    count = len({(difference.kind, difference.name) for difference in found})
    return f"step {first.step}: {first.kind} {first.name} of {holder}, {detail} ({count} tensors differ)"


def _wrong_scalars(reference: Reference, ranks: list[RankResult]) -> list[str]:
    """Describe the losses, weights and norms that differ."""
    messages = []
    for key, label in (("losses", "loss"), ("weights", "weight"), ("norms", "gradient norm")):
        tolerance = _scalar_tolerance(reference, key)
        for result in ranks:
            for step, actual, expected in _by_step(reference, result, key):
                # So written, a NaN is a difference. The floor is for an expected 0.
                if not abs(actual - expected) <= tolerance * max(abs(expected), 1e-300):
                    values = f"{actual!r} on rank {result.rank}, {expected!r} in one process"
                    messages.append(f"step {step}: the {label} is {values}")
    return messages


def _scalar_tolerance(reference: Reference, key: str) -> float:
    """Return the relative tolerance of losses, weights or norms."""
    allowed = tolerance_of(reference)
    noise: float = reference.facts["scalar_noise"][key]
    turned: float = reference.facts["scalar_turned"][key]
    return max(allowed.tensor, allowed.noise * noise) + TURNED * turned


def _wrong_rates(reference: Reference, ranks: list[RankResult]) -> list[str]:
    """Describe the learning rates that differ."""
    messages = []
    for result in ranks:
        for step, actual, expected in _by_step(reference, result, "rates"):
            # Rates follow from the same numbers on both sides: only rounding is allowed.
            if any(abs(a - b) > 1e-12 * abs(b) for a, b in zip(actual, expected, strict=True)):
                messages.append(
                    f"after step {step} the learning rates are {actual} on rank {result.rank}, alone {expected}"
                )
    return messages


def _by_step(reference: Reference, result: RankResult, key: str) -> Iterator[tuple[int, Any, Any]]:
    """Yield step, the rank's value and the reference's; a rank that resumed has only the last steps."""
    actual = result.facts[key]
    all_expected = reference.facts[key]
    first = len(all_expected) - len(actual)
    if actual:
        first = max(first, 0)  # a rank with more values than the reference fails in zip, as it should
        for step, pair in enumerate(zip(actual, all_expected[first:], strict=True), first + 1):
            yield step, *pair


def _is_bitwise(reference: Reference, ranks: list[RankResult]) -> bool:
    """True if the losses are the same, and the last step's parameters."""
    if any(result.facts["losses"] != reference.facts["losses"] for result in ranks):
        return False
    return largest_difference(reference, ranks) == 0


def check_branches(reference: Reference, ranks: list[RankResult], plan: Plan) -> None:
    """Raise WorkloadError when the user's code went another way for a part of the batch than for all of it."""
    expected = _ways_by_line(reference.facts["branches"])
    ways_of_ranks = [_ways_by_line(result.facts["branches"]) for result in ranks]
    mesh = Mesh.parse(plan.mesh)
    parts = {mesh.data_part(result.rank): ways for result, ways in zip(ranks, ways_of_ranks, strict=True)}
    for result, found in zip(ranks, ways_of_ranks, strict=True):
        for line, ways in found.items():
            if line not in expected or ways == expected[line]:
                continue
            if len(ways) != len(expected[line]) and set(ways) == set(expected[line]):
                continue  # cut into more or fewer micro-batches
            # A loop over samples looks at each: what the ranks have seen adds up to what one process has.
            of_parts = []
            for ways_of_part in parts.values():
                of_parts += ways_of_part.get(line, [])
            if _sum(of_parts) == _sum(expected[line]):
                continue
            different = (pair for pair in zip(expected[line], ways, strict=False) if pair[0] != pair[1])
            in_whole_batch, on_rank = next(different, (expected[line][0], ways[0]))
            raise WorkloadError(
                "the loss should take the same path for a batch and for its parts",
                f"the condition at {line} is {_in_words(in_whole_batch)} for the whole batch and "
                f"{_in_words(on_rank)} on rank {result.rank}",
                "choose by torch.where for each sample, go on for each sample by a mask until it is done, take a fixed "
                "number of rounds, or decide in the loop, outside of the loss",
            )


_Way = tuple[int, int, int]  # how often a line saw True and False in a call of the loss, and read a number


def _ways_by_line(calls: list[list[list[Any]]]) -> dict[str, list[_Way]]:
    """Return the outcomes of each line in each call that came to it."""
    ways: dict[str, list[_Way]] = {}
    for call in calls:
        seen: dict[str, Counter[bool | None]] = {}
        for line, outcome in call:
            seen.setdefault(line, Counter())[outcome] += 1
        for line, counts in seen.items():
            ways.setdefault(line, []).append((counts[True], counts[False], counts[None]))
    return ways


def _sum(ways: Sequence[_Way]) -> list[int]:
    return [sum(counts) for counts in zip(*ways, strict=True)]


def _in_words(way: _Way) -> str:
    words = []
    for count, outcome in zip(way, ("True", "False", "read"), strict=True):
        if count:
            words.append(outcome if sum(way) == 1 else f"{count} times {outcome}")
    return " and ".join(words)


def check_traffic(
    verdict: Verdict, traffic: Sequence[Sequence[Mapping[str, Any]]] | None, ranks: list[RankResult]
) -> None:
    """Check that the ledger of the first step is the prediction: calls and bytes, by collective and axis.

    Args:
        verdict: the verdict to which a line is added.
        traffic: the predicted rows of the ledger, by rank; None where they depend on the data.
        ranks: the ranks' results, with the ledger of each step.
    """
    if traffic is None:
        verdict.add("traffic", True, "depends on the data (sparse gradients): nothing was predicted")
        return
    total = 0
    for result in ranks:
        predicted = _by_operation(traffic[result.rank])
        ledger = _by_operation(result.facts["ledger"][0])
        for operation in sorted(predicted.keys() | ledger.keys()):
            calls, size = ledger.get(operation, (0, 0))
            predicted_calls, predicted_size = predicted.get(operation, (0, 0))
            total += size
            if (calls, size) != (predicted_calls, predicted_size):
                collective, axis = operation
                message = (
                    f"rank {result.rank}: {collective} on {axis}: {calls} calls, {size} bytes; "
                    f"predicted {predicted_calls} calls, {predicted_size} bytes"
                )
                verdict.add("traffic", False, message, collective=collective, axis=axis, rank=result.rank)
                if verdict.culprit is None:
                    verdict.culprit = FirstDifference("", f"{collective} on {axis}", "traffic", message)
                return
    verdict.add(
        "traffic", True, f"as predicted, call by call and byte by byte ({total / 2**20:.3f} MiB from all ranks)"
    )


def _by_operation(rows: Sequence[Mapping[str, Any]]) -> dict[Operation, tuple[int, int]]:
    """Return the calls and bytes of a ledger's rows by collective and axis."""
    found = {}
    for row in rows:
        if row["axis"] not in _OUTSIDE:
            found[row["collective"], row["axis"]] = (row["calls"], row["bytes"])
    return found
