"""The lines of the table: each check reads what the processes wrote and says how it came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.plan.step_traffic import step_traffic
from paceline.verify.judge.compare import (
    TURNED,
    Difference,
    RankResult,
    Reference,
    differences,
    largest_difference,
    tolerance_of,
)
from paceline.verify.judge.order import Call, find_disorder
from paceline.verify.judge.verdict import FirstDifference, Verdict

_OUTSIDE = ("world",)  # what jobs say to each other between steps


def check_order(
    verdict: Verdict, traces: Mapping[str, dict[int, list[Call]]], mesh: Mesh, dry: Mapping[str, Any]
) -> None:
    """All ranks began the same collectives in the same order, as far as they belong together."""
    graphs = dry["graphs"]
    for key, calls in graphs.items():
        stage, tensor = key.split(",")
        if [call[:3] for call in calls] != [call[:3] for call in graphs[f"{stage},0"]]:
            verdict.add("order", False, f"before running: tensor rank {tensor} of stage {stage} has another graph")
            return
    for own in traces.values():
        disorder = find_disorder(own, mesh)
        if disorder is not None:
            verdict.add("order", False, disorder.describe(), disorder=disorder.to_json())
            return
    count = max((len(calls) for own in traces.values() for calls in own.values()), default=0)
    verdict.add("order", True, f"every rank begins the same collectives in the same order ({count} in all)")


def check_step(
    verdict: Verdict,
    reference: Reference,
    ranks: list[RankResult],
    name: str = "step",
    found: list[Difference] | None = None,
) -> None:
    """Losses, norms and every tensor of every rank."""
    found = differences(reference, ranks) if found is None else found
    precision = reference.precision
    numbers = _scalars(reference, ranks)
    label = f"{name} {precision}" if name == "step" else name
    if not found and not numbers:
        largest = largest_difference(reference, ranks)
        if name == "step":
            verdict.is_compared = True
            verdict.largest, verdict.is_bitwise = largest, _is_bitwise(reference, ranks)
        steps = len(reference.facts["losses"])
        count = len({key for key in reference.tensors if not key.startswith("0/")})
        said = f"{steps} losses and {count} tensors; parameters off by {largest:.1e} of their norm"
        verdict.add(label, True, said, largest=largest)
        return
    said = numbers[0] if numbers else ""
    if found:
        worst = found[0]
        how = f", {worst.found}" if worst.found else f", off by {worst.error:.2e} where rounding does {worst.bound:.1e}"
        names = len({(one.kind, one.name) for one in found})
        where = f"rank {worst.rank}" if worst.rank >= 0 else "the ranks"
        said += "; " if said else ""
        said += f"step {worst.step}: {worst.kind} {worst.name} of {where}{how} ({names} tensors differ)"
    verdict.add(label, False, said, differences=[one.to_json() for one in found[:50]], scalars=numbers)


def _scalars(reference: Reference, ranks: list[RankResult]) -> list[str]:
    """Losses, weights and norms that differ, in words."""
    allowed = tolerance_of(reference)
    found = []
    for word in ("losses", "weights", "norms"):
        for result in ranks:
            mine = result.facts[word]
            right = reference.facts[word][-len(mine) :] if mine else []
            first = len(reference.facts[word]) - len(right) + 1
            for step, (own, expected) in enumerate(zip(mine, right, strict=True), first):
                tolerance = max(allowed.own, allowed.noise * reference.facts["scalar_noise"][word])
                tolerance += TURNED * reference.facts["scalar_turned"][word]
                if not abs(own - expected) <= tolerance * max(abs(expected), 1e-300):
                    singular = {"losses": "loss", "weights": "weight", "norms": "gradient norm"}[word]
                    found.append(
                        f"step {step}: the {singular} is {own!r} on rank {result.rank}, {expected!r} in one process"
                    )
    for result in ranks:
        mine = result.facts["rates"]
        right = reference.facts["rates"][-len(mine) :] if mine else []
        first = len(reference.facts["rates"]) - len(right) + 1
        for step, (rates, expected) in enumerate(zip(mine, right, strict=True), first):
            if any(abs(a - b) > 1e-12 * abs(b) for a, b in zip(rates, expected, strict=True)):
                found.append(
                    f"after step {step} the learning rates are {rates} on rank {result.rank}, alone {expected}"
                )
    return found


def _is_bitwise(reference: Reference, ranks: list[RankResult]) -> bool:
    for result in ranks:
        if result.facts["losses"] != reference.facts["losses"]:
            return False
    return largest_difference(reference, ranks) == 0


def check_branches(reference: Reference, ranks: list[RankResult]) -> None:
    """Raise WorkloadError when the person's code went another way for a part of the batch than for all of it."""
    right = _ways(reference.facts["branches"])
    for result in ranks:
        for line, ways in _ways(result.facts["branches"]).items():
            if line in right and ways != right[line]:
                here, there = (" and ".join(sorted(str(way) for way in one)) for one in (ways, right[line]))
                raise WorkloadError(
                    "a loss that goes the same way for a batch and for its parts",
                    f"the condition at {line} is {there} for the whole batch and {here} on rank {result.rank}",
                    "choose by torch.where for each sample, or decide in the loop, outside of the loss",
                )


def _ways(branches: list[list[Any]]) -> dict[str, set[bool]]:
    ways: dict[str, set[bool]] = {}
    for line, outcome in branches:
        ways.setdefault(line, set()).add(outcome)
    return ways


def check_traffic(
    verdict: Verdict, plan: Plan, models: Sequence[Sequence[Mapping[str, Any]]], ranks: list[RankResult]
) -> None:
    """The ledger of the first step is the prediction: calls and bytes, by collective and axis.

    Args:
        verdict: gets a line.
        plan: what was planned.
        models: for each part of the batch what each rank of `tensor` holds, as `profile/describe.py` has it.
        ranks: what they did.
    """
    total = 0
    for result in ranks:
        at = result.facts["coordinate"]
        own = models[result.facts["data_part"]]
        model = own[at["tensor"] % len(own)]
        predicted = step_traffic(plan, model, at["shard"])
        if predicted is None:
            verdict.add("traffic", True, "depends on the data (sparse gradients): nothing was predicted")
            return
        rows = predicted[at["pipeline"] if len(predicted) > 1 else 0]
        promised = Counter({(row.collective, row.axis): row.calls for row in rows})
        sent = Counter({(row.collective, row.axis): row.payload_bytes for row in rows})
        for key, size in [*_batch_norms(plan, model, result), *_changed_buffers(plan, result)]:
            promised[key] += 1
            sent[key] += size
        ledger = [row for row in result.facts["ledger"][0] if row["axis"] not in _OUTSIDE]
        counted = {(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in ledger}
        for key in sorted(promised.keys() | counted.keys()):
            calls, size = counted.get(key, (0, 0))
            total += size
            if (calls, size) != (promised[key], sent[key]):
                said = (
                    f"rank {result.rank}: {key[0]} on {key[1]}: {calls} calls, {size} bytes; "
                    f"predicted {promised[key]} calls, {sent[key]} bytes"
                )
                verdict.add("traffic", False, said, collective=key[0], axis=key[1], rank=result.rank)
                verdict.culprit = verdict.culprit or FirstDifference("", f"{key[0]} on {key[1]}", "traffic", said)
                return
    verdict.add(
        "traffic", True, f"as predicted, call by call and byte by byte ({total / 2**20:.3f} MiB from all ranks)"
    )


def _batch_norms(plan: Plan, model: Mapping[str, Any], result: RankResult) -> Iterator[tuple[tuple[str, str], int]]:
    """What batch norms with shared statistics send, each once per micro-batch (comm/batch_norm.py)."""
    mesh = Mesh.parse(plan.mesh)
    if mesh.data_size == 1 or model["micro_batch_size"] is not None:
        return
    micro_batches = model.get("split", {}).get("micro_batches", 1)
    for name, channels in model["batch_norms"].items():
        own = {key.split("/", 2)[2]: values for key, values in result.tensors.items() if key.startswith("0/")}
        held = [values for key, values in own.items() if key.rpartition(".")[0] == name and values.ndim]
        if not held and mesh.size("pipeline") > 1:
            continue  # on another stage; one without any tensor can't be told apart, and sends the same
        size = (held[0].size if held else channels) * (8 if held and held[0].dtype == np.float64 else 4)
        for _ in range(micro_batches):
            yield ("all_gather", _data_axis(mesh)), 3 * size
            yield ("all_reduce", _data_axis(mesh)), 2 * size


def _changed_buffers(plan: Plan, result: RankResult) -> Iterator[tuple[tuple[str, str], int]]:
    """Buffers that the first step wrote to, with all of their modules: a message per dtype, as replicate sends them."""
    mesh = Mesh.parse(plan.mesh)
    if mesh.data_size == 1:
        return
    sizes: Counter[str] = Counter()
    for name in result.facts["changed_buffers"]:
        values = result.tensors[f"1/buffer/{name}"]
        sizes[result.facts["dtypes"][name]] += values.size * 8  # means are taken in float64, the largest in int64
    for size in sizes.values():
        yield ("all_reduce", _data_axis(mesh)), size


def _data_axis(mesh: Mesh) -> str:
    used = [axis for axis in ("replicate", "shard") if mesh.size(axis) > 1]
    return used[0] if len(used) == 1 else "data"
