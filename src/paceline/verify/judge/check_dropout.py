"""Dropout of the ranks: masks of their own where they must be, the same ones where they must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.verify.judge.compare import RankResult
from paceline.verify.judge.verdict import FirstDifference, Verdict

Stream = tuple[int, int]  # part of the batch, pipeline stage's rank: who draws numbers of their own


def check_draws(verdict: Verdict, ranks: list[RankResult]) -> None:
    """Compare what ranks draw and keep; then the copies of every parameter after steps with dropout."""
    said = _wrong_streams(ranks) or _wrong_masks(ranks)
    if said:
        verdict.add("dropout", False, said)
        return
    wrong_piece = _wrong_pieces(ranks)
    if wrong_piece is not None:
        verdict.add("dropout", False, wrong_piece.said)
        verdict.culprit = verdict.culprit or wrong_piece
        return
    unequal = _unequal_copies(ranks)
    if unequal:
        verdict.add("dropout", False, f"with the model's own dropout, copies of {unequal} drift apart between ranks")
        return
    verdict.add("dropout", True, "parts of the batch and pipeline stages draw their own masks; copies stay equal")


def check_same_draws(verdict: Verdict, saved: list[RankResult], loaded: list[RankResult]) -> None:
    """Under the same plan every rank goes on with the random numbers that it had."""
    for before, after in zip(saved, loaded, strict=True):
        if before.facts["state_of_draws"] != after.facts["state_of_draws"]:
            said = f"rank {after.rank} goes on with other random numbers than it had when it saved"
            verdict.add("resume draws", False, said)
            return


def _stream(result: RankResult) -> Stream:
    return result.facts["data_part"], result.facts["coordinate"]["pipeline"]


def _named(stream: Stream, ranks: list[RankResult]) -> str:
    part, stage = stream
    has_stages = any(result.facts["coordinate"]["pipeline"] for result in ranks)
    return f"part {part} of the batch on pipeline rank {stage}" if has_stages else f"part {part} of the batch"


def _wrong_streams(ranks: list[RankResult]) -> str:
    """The random numbers with which each step begins."""
    for step in range(len(ranks[0].facts["draws"])):
        states: dict[Stream, int] = {}
        for result in ranks:
            stream, state = _stream(result), result.facts["draws"][step]
            if states.setdefault(stream, state) != state:
                where = _named(stream, ranks)
                return f"step {step + 1}: ranks with the same samples ({where}) draw different random numbers"
        owners: dict[int, Stream] = {}
        for stream, state in states.items():
            other = owners.setdefault(state, stream)
            if other != stream:
                both = f"{_named(other, ranks)} and {_named(stream, ranks)}"
                return f"step {step + 1}: {both} draw the same random numbers: their dropout is equal"
    return ""


def _wrong_masks(ranks: list[RankResult]) -> str:
    """Masks that a backward pass did not draw again as they were, or that two draws have in common."""
    steps = min(len(result.facts["masks"]) for result in ranks)
    for step in range(steps):
        owners: dict[int, Stream] = {}
        for result in ranks:
            forward, again = result.facts["masks"][step]
            if set(again) - set(forward):
                return (
                    f"step {step + 1}: rank {result.rank} computes activations again in the backward pass with other "
                    "dropout than going forward"
                )
            if len(set(forward)) < len(forward):
                return f"step {step + 1}: two draws of rank {result.rank} give the same mask: its dropout repeats"
            for mask in forward:
                stream = _stream(result)
                other = owners.setdefault(mask, stream)
                if other != stream:
                    both = f"{_named(other, ranks)} and {_named(stream, ranks)}"
                    return f"step {step + 1}: {both} have the same dropout mask"
    return ""


def _wrong_pieces(ranks: list[RankResult]) -> FirstDifference | None:
    """Pieces of a mask on the ranks of `tensor` that are not the mask that one rank draws."""
    groups: dict[Stream, list[RankResult]] = {}
    for result in ranks:
        groups.setdefault(_stream(result), []).append(result)
    for group in groups.values():
        for step, first in enumerate(group[0].facts["kept"]):
            for number, (module, _, whole) in enumerate(first):
                pieces = [result.facts["kept"][step][number][1] for result in group]
                if sum(pieces) != whole:
                    said = (
                        f"step {step + 1}: the ranks of tensor keep other elements than one rank would in "
                        f"{module or 'the loss'}: their pieces of a dropout mask don't make up the whole mask"
                    )
                    return FirstDifference(module, "", "dropout", said)
    return None


def _unequal_copies(ranks: list[RankResult]) -> str:
    """A tensor whose same piece differs on two ranks."""
    first: dict[tuple[str, str], Any] = {}
    for result in ranks:
        for key, values in result.tensors.items():
            if "/parameter/" not in key:
                continue
            piece = str(result.facts["placements"].get(key.split("/", 2)[2], ""))
            other = first.setdefault((key, piece), values)
            if other.shape != values.shape or not np.allclose(other, values, rtol=1e-4, atol=1e-6, equal_nan=True):
                return key.split("/", 2)[2]
    return ""
