"""What every rank notes of the parts it wrote, joined to what the manifest says of whole tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.shard_geometry import fault_of_cover
from paceline.nouns.errors import CheckpointError
from paceline.nouns.shard_spec import ShardSpec

Hash = tuple[int, int]  # of a tensor or part: two sums modulo 2^64, as signed numbers


def sum_of(hashes: Iterable[Hash]) -> Hash:
    """The hash of a tensor, of those of its parts."""
    first, second = (signed(sum(lane)) for lane in zip((0, 0), *hashes, strict=True))
    return first, second


def as_hex(value: Hash) -> str:
    """The hash as 32 digits."""
    return "".join(f"{lane % 2**64:016x}" for lane in value)


def of_hex(text: str) -> Hash:
    """Read what `as_hex` wrote."""
    return signed(int(text[:16], 16)), signed(int(text[16:], 16))


def signed(number: int) -> int:
    """`number` modulo 2^64, as an int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def merged_tensors(notes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifest's tensors, of all ranks' notes.

    A note's tensors have "shape", "dtype", "hash" and "placement"; they lie in the file "name" under their
    own names.

    Raises:
        CheckpointError: the parts of some tensor are not each of its elements once, or differ in dtype.
    """
    tensors: dict[str, dict[str, Any]] = {}
    hashes: dict[str, list[Hash]] = {}
    for note in notes:
        for name, part in note["tensors"].items():
            form = {"shape": part["shape"], "dtype": part["dtype"]}
            tensor = tensors.setdefault(name, {**form, "parts": []})
            if form != {key: tensor[key] for key in form}:
                raise _refused(name, f"{note['name']} has it as {form}, another file as {tensor['dtype']}")
            hashes.setdefault(name, []).append(of_hex(part["hash"]))
            tensor["parts"].append({"file": note["name"], "key": name, "placement": part["placement"]})
    for name, tensor in tensors.items():
        shard_specs = [ShardSpec.of_json(part["placement"]) for part in tensor["parts"]]
        fault = fault_of_cover(tuple(tensor["shape"]), tuple(shard_specs))
        if fault is not None:
            raise _refused(name, fault)
        tensor["hash"] = as_hex(sum_of(hashes[name]))
    return tensors


def merged_optimizer(optimizer: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's facts with the members of its groups, and its plain numbers, of all ranks: a rank may know
    only those of its own stage.

    Raises:
        CheckpointError: the ranks' optimizers have not equally many groups.
    """
    members: list[dict[str, None]] = [{} for _ in optimizer["groups"]]  # a dict keeps the order
    numbers: dict[str, Any] = {}
    for note in notes:
        if len(note["groups"]) != len(members):
            raise CheckpointError(
                f"the optimizer's parameter groups should be {len(members)} on every rank",
                f"{note['name']} is of a rank with {len(note['groups'])}",
                "make the same groups on every rank, empty ones too",
            )
        for group, names in zip(members, note["groups"], strict=True):
            group.update(dict.fromkeys(names))
        numbers.update(note["numbers"])
    groups = [{**group, "parameters": list(names)} for group, names in zip(optimizer["groups"], members, strict=True)]
    return {**optimizer, "groups": groups, "numbers": numbers}


def _refused(name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the ranks' parts of {name} should be all of it, each element once",
        found,
        "report this: the plan's strategies disagree about who holds what; older checkpoints are untouched",
    )
