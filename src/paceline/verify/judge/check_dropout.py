"""Check the ranks' dropout: masks of their own where they must differ, the same masks where they must be equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.verify.judge.compare import RankResult
from paceline.verify.judge.verdict import FirstDifference, Verdict

# Part of the batch and pipeline rank: each pair draws random numbers of its own, and ranks of one pair the same. See
# `Mesh.random_stream`.
Stream = tuple[int, int]
_ENOUGH = 20  # bits of chance: two steps draw that much alike once in a million


def check_draws(verdict: Verdict, ranks: list[RankResult], may_repeat: bool = False, is_loop: bool = False) -> None:
    """Compare what ranks draw and keep; then the copies of every parameter after steps with dropout.

    Args:
        verdict: the verdict to which a line is added.
        ranks: the ranks' results of steps with the model's own dropout.
        may_repeat: True if the model draws the same in each step in one process, too.
        is_loop: True for a loop, of which no single masks are recorded.
    """
    # From causes to effects: random states, masks, pieces of masks, parameters.
    message = _wrong_streams(ranks) or ("" if may_repeat else _repeated_draws(ranks)) or _wrong_masks(ranks)
    if message:
        verdict.add("dropout", False, message)
        return
    wrong_piece = _wrong_pieces(ranks)
    if wrong_piece is not None:
        verdict.add("dropout", False, wrong_piece.message)
        verdict.culprit = verdict.culprit or wrong_piece
        return
    unequal = _unequal_copies(ranks)
    if unequal:
        verdict.add("dropout", False, f"with the model's own dropout, copies of {unequal} drift apart between ranks")
        return
    right = (
        "each step draws its own masks" if is_loop else "parts of the batch and pipeline stages draw their own masks"
    )
    verdict.add("dropout", True, f"{right}; copies stay equal")


def _note_equal_draws(verdict: Verdict, ranks: list[RankResult]) -> None:
    """Add a notice where parts of the batch draw alike in a loop. It is no bug: the loop may have seeded by itself."""
    for step, drawn in enumerate(zip(*(result.facts["drawn"] for result in ranks), strict=True), 1):
        owners: dict[float, Stream] = {}
        for result, (digest, bits) in zip(ranks, drawn, strict=True):
            if bits >= _ENOUGH and owners.setdefault(digest, _stream(result)) != _stream(result):
                verdict.notices.append(
                    f"in step {step} parts of the batch draw the same dropout: seed before paceline.prepare, not after"
                )
                return


def check_same_draws(verdict: Verdict, saved: list[RankResult], loaded: list[RankResult]) -> None:
    """Check that under the same plan every rank goes on with the random numbers that it had."""
    for before, after in zip(saved, loaded, strict=True):
        if before.facts["state_of_draws"] != after.facts["state_of_draws"]:
            message = f"rank {after.rank} goes on with other random numbers than it had when it saved"
            verdict.add("resume draws", False, message)
            return


def _stream(result: RankResult) -> Stream:
    return result.facts["data_part"], result.facts["coordinate"]["pipeline"]


def _stream_name(stream: Stream, ranks: list[RankResult]) -> str:
    part, stage = stream
    has_stages = any(result.facts["coordinate"]["pipeline"] for result in ranks)
    return f"part {part} of the batch on pipeline rank {stage}" if has_stages else f"part {part} of the batch"


def _wrong_streams(ranks: list[RankResult]) -> str:
    """Describe the streams that begin a step with wrong random numbers; "" if none does."""
    for step in range(len(ranks[0].facts["draws"])):
        # Both ways: ranks of one stream must have one state, and no two streams the same.
        states: dict[Stream, int] = {}
        for result in ranks:
            stream = _stream(result)
            state = result.facts["draws"][step]
            if states.setdefault(stream, state) != state:
                part = _stream_name(stream, ranks)
                return f"step {step + 1}: ranks with the same samples ({part}) draw different random numbers"
        owners: dict[int, Stream] = {}
        for stream, state in states.items():
            owner = owners.setdefault(state, stream)
            if owner != stream:
                streams = f"{_stream_name(owner, ranks)} and {_stream_name(stream, ranks)}"
                return f"step {step + 1}: {streams} draw the same random numbers: their dropout is equal"
    return ""


def _repeated_draws(ranks: list[RankResult]) -> str:
    """Describe a step that repeats the draws of an earlier one, as where the seed omits the step; "" if none."""
    for result in ranks:
        seen: dict[float, int] = {}
        for step, (digest, bits) in enumerate(result.facts["drawn"], 1):
            earlier = seen.setdefault(digest, step)
            if bits >= _ENOUGH and earlier != step:
                return f"step {step}: rank {result.rank} draws the dropout masks of step {earlier} once more"
    return ""


def _wrong_masks(ranks: list[RankResult]) -> str:
    """Describe a mask that differs in the backward pass, or that was drawn twice; "" if none."""
    steps = min(len(result.facts["masks"]) for result in ranks)
    for step in range(steps):
        owners: dict[int, Stream] = {}
        for result in ranks:
            forward, again = result.facts["masks"][step]
            # A block that is recomputed draws masks again, from the state that the forward pass had kept for it.
            if set(again) - set(forward):
                return (
                    f"step {step + 1}: rank {result.rank} computes activations again in the backward pass with other "
                    "dropout than going forward"
                )
            if len(set(forward)) < len(forward):
                return f"step {step + 1}: two draws of rank {result.rank} give the same mask: its dropout repeats"
            stream = _stream(result)
            for mask in forward:
                owner = owners.setdefault(mask, stream)
                if owner != stream:
                    streams = f"{_stream_name(owner, ranks)} and {_stream_name(stream, ranks)}"
                    return f"step {step + 1}: {streams} have the same dropout mask"
    return ""


def _wrong_pieces(ranks: list[RankResult]) -> FirstDifference | None:
    """Find a mask whose pieces on the ranks of `tensor` don't make up the mask that one rank draws."""
    groups: dict[Stream, list[RankResult]] = {}
    for result in ranks:
        groups.setdefault(_stream(result), []).append(result)
    for group in groups.values():
        for step, dropouts in enumerate(group[0].facts["kept"]):
            for number, (module, _, full_mask) in enumerate(dropouts):
                pieces = [result.facts["kept"][step][number][1] for result in group]
                if sum(pieces) != full_mask:  # the hashes add up: see `_sum_of_places` in `dropout_pieces.py`
                    message = (
                        f"step {step + 1}: the ranks of tensor keep other elements than one rank would in "
                        f"{module or 'the loss'}: their pieces of a dropout mask don't make up the whole mask"
                    )
                    return FirstDifference(module, "", "dropout", message)
    return None


def _unequal_copies(ranks: list[RankResult]) -> str:
    """Return the name of a parameter of which two ranks hold the same piece with other values; "" if none."""
    first_copies: dict[tuple[str, str], Any] = {}
    for result in ranks:
        for key, values in result.tensors.items():
            if "/parameter/" not in key:
                continue
            name = key.split("/", 2)[2]
            shard_spec = str(result.facts["placements"].get(name, ""))
            copy = first_copies.setdefault((key, shard_spec), values)
            if copy.shape != values.shape or not np.allclose(copy, values, rtol=1e-4, atol=1e-6, equal_nan=True):
                return name
    return ""
