"""Merge the notes of all ranks about the parts that they wrote into the manifest's entries of tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.shard_geometry import fault_of_cover
from paceline.nouns.errors import CheckpointError
from paceline.nouns.shard_spec import ShardSpec

Hash = tuple[int, int]  # of a tensor or part: two sums modulo 2^64, as signed numbers


def sum_of(hashes: Iterable[Hash]) -> Hash:
    """Return the hash of a tensor from those of its parts."""
    first_sum = 0
    second_sum = 0
    for first, second in hashes:
        first_sum += first
        second_sum += second
    return signed(first_sum), signed(second_sum)


def as_hex(value: Hash) -> str:
    """Return the hash as 32 digits."""
    first, second = value
    return f"{first % 2**64:016x}{second % 2**64:016x}"


def of_hex(text: str) -> Hash:
    """Read what `as_hex` wrote."""
    return signed(int(text[:16], 16)), signed(int(text[16:], 16))


def signed(number: int) -> int:
    """Return `number` modulo 2^64, in the range of an int64."""
    return (number + 2**63) % 2**64 - 2**63


def merged_tensors(notes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries of tensors, from all ranks' notes.

    A note's tensors have "shape", "dtype", "hash" and "placement"; they are in the file "name" under their
    own names.

    Raises:
        CheckpointError: the parts of some tensor are not each of its elements once, or differ in dtype.
    """
    # The notes come in the order of ranks, and so do a tensor's parts.
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
        # Before it is written: a part that nobody or two ranks had would show only at the next load.
        fault = fault_of_cover(tuple(tensor["shape"]), tuple(shard_specs))
        if fault is not None:
            raise _refused(name, fault)
        tensor["hash"] = as_hex(sum_of(hashes[name]))
    return tensors


def merged_optimizer(optimizer: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the optimizer's entry with its groups' members, its plain numbers and its state's owners of all ranks.

    A rank may know only those of its own pipeline stage, or of the parameters whose state it has.

    Raises:
        CheckpointError: the ranks' optimizers have not equally many groups.
    """
    members: list[dict[str, None]] = [{} for _ in optimizer["groups"]]  # a dict keeps the order
    numbers: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for note in notes:
        if len(note["groups"]) != len(members):
            raise CheckpointError(
                f"the optimizer's parameter groups should be {len(members)} on every rank",
                f"{note['name']} is of a rank with {len(note['groups'])}",
                "make the same groups on every rank, empty ones too",
            )
        for group_members, names in zip(members, note["groups"], strict=True):
            # A dict, as a set has no order: parameters come in the order in which ranks list them, each once.
            group_members.update(dict.fromkeys(names))
        numbers.update(note["numbers"])
        owners.update(note["owners"])
    groups = []
    for group, names in zip(optimizer["groups"], members, strict=True):
        groups.append({**group, "parameters": list(names)})
    merged = {**optimizer, "groups": groups, "numbers": numbers}
    if "owners" in optimizer:  # it is made of several
        merged["owners"] = owners
    return merged


def _refused(name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"the ranks' parts of {name} should be all of it, each element once",
        found,
        "report this: the plan's strategies disagree about who holds what; older checkpoints are untouched",
    )
