"""Compute with a sequence of which each rank of `context` holds a piece: attention, and exchanges beside it.

    ring      keys and values go round the ranks; each rank adds what its queries see of them (`ring.py`)
    heads     pieces of the sequence are exchanged for shares of the heads, and back (Jacobs et al. 2023, Ulysses)
    product   groups of ranks exchange heads; between the groups keys and values go round (Fang and Zhao 2024)

Under a causal mask a rank holds a piece from the sequence's first half and its mirror image from the second, so that
all ranks have as much to compute (Llama 3, Grattafiori et al. 2024).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.differentiable import Exchanges, is_dry, piece_ranges
from paceline.graph.context.ring import Range, Ranges, Ring, ring_attention, with_even_rows
from paceline.nouns.shard_spec import total_of

aten = torch.ops.aten
Blocks = tuple[int, ...]


class AttentionSplit(NamedTuple):
    """How attention is spread over the ranks.

    Attributes:
        queries: blocks of the queries' sequence.
        keys: blocks of that of keys and values.
        heads: ranks that exchange heads with each other; the others of the axis are in the ring.
    """

    queries: Blocks
    keys: Blocks
    heads: int


class HeldRange(NamedTuple):
    """What a rank has of a sequence.

    Attributes:
        ranges: of positions, one after another along the split dimension; they may overlap.
        heads: the range of attention's heads; (0, 1) of values without heads.
    """

    ranges: Ranges
    heads: Range = (0, 1)


class _Run(NamedTuple):
    """What one rank has of what another wants: from which place there, to which place here, how much."""

    source: Range  # first head, first position
    target: Range
    size: Range


@dataclass(frozen=True, slots=True)
class SequenceExchanges(Exchanges):
    """The exchanges of the `context` axis. All gradients are partial: that of a whole value is the sum over the ranks.

    So a value that every rank computes alike needs no exchange in the backward pass, and the gradients of parameters
    are summed once, after it.
    """

    are_gradients_partial: ClassVar[bool] = True
    placement_key: ClassVar[str] = "lies_on_context"

    def take_at(self, tensor: torch.Tensor, dim: int, index: int, blocks: Blocks) -> torch.Tensor:
        """Return on every rank the elements at one place of the split dimension, which is dropped."""
        have = self._ranges_of_ranks(blocks)
        return self._moved(tensor, dim, have, (HeldRange(((index, index + 1),)),) * self.comm.size).select(dim, 0)

    def move(self, tensor: torch.Tensor, dim: int, blocks: Blocks, start: int, result_blocks: Blocks) -> torch.Tensor:
        """Return this rank's piece of the sequence that begins at `start` of this one; zeros beyond its ends.

        Args:
            tensor: this rank's piece.
            dim: the split dimension.
            blocks: how it is split.
            start: may be negative.
            result_blocks: how the result is split.
        """
        # In positions of the sequence that is there.
        return self._moved(
            tensor, dim, self._ranges_of_ranks(blocks), self._ranges_of_ranks(result_blocks, start, start)
        )

    def _ranges_of_ranks(self, blocks: Blocks, first: int = 0, last: int = 0) -> tuple[HeldRange, ...]:
        """Return each rank's range of a sequence; the ranges begin `first` later than its pieces, and end `last`."""
        ranks = range(self.comm.size)
        return tuple(HeldRange(_shifted(positions_of(blocks, rank, self.comm.size), first, last)) for rank in ranks)

    def _moved(
        self, tensor: torch.Tensor, dim: int, have: tuple[HeldRange, ...], want: tuple[HeldRange, ...]
    ) -> torch.Tensor:
        return self.bring(tensor.unsqueeze(0), (0, dim + 1), have, want).squeeze(0)

    def bring(
        self, tensor: torch.Tensor, dims: tuple[int, int], have: tuple[HeldRange, ...], want: tuple[HeldRange, ...]
    ) -> torch.Tensor:
        """Return the range that this rank asks for: the ranks' values of it, added up; zeros elsewhere.

        The backward pass sends gradients back and adds them up.

        Args:
            tensor: what this rank has.
            dims: of heads and of positions.
            have: of each rank.
            want: of each rank.
        """
        return self._exchange(
            tensor,
            lambda x: _brought(x, dims, have, want, self.comm),
            lambda g: _brought(g, dims, want, have, self.comm),
            lambda g: self.bring(g, dims, want, have),
        )

    def convolve(  # noqa: PLR0913
        self,
        tensor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: int,
        dilation: int,
        groups: int,
        pieces: tuple[Blocks, Blocks],
    ) -> torch.Tensor:
        """Convolve a split sequence by steps of one: each rank gets what its positions see of their neighbours.

        Args:
            tensor: (samples, channels, positions of this rank).
            weight: (channels out, channels of a group, size of the kernel).
            bias: (channels out,), or None.
            padding: the number of zeros before the sequence and after it.
            dilation: from one element of the kernel to the next.
            groups: the number of groups of channels.
            pieces: how the sequence is split, and how the result is.

        Returns:
            (samples, channels out, positions of the result on this rank).
        """
        blocks, result_blocks = pieces
        reach = dilation * (weight.shape[-1] - 1)
        want = self._ranges_of_ranks(result_blocks, -padding, reach - padding)
        seen = self._moved(tensor, 2, self._ranges_of_ranks(blocks), want)
        # Ranges that don't follow each other are convolved one by one.
        runs = seen.split([last - first for first, last in want[self.comm.rank].ranges], 2)
        results = [aten.conv1d.default(run, weight, bias, [1], [0], [dilation], groups) for run in runs]
        return torch.cat(results, 2)

    def attention(  # noqa: PLR0913
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        split: AttentionSplit,
    ) -> torch.Tensor:
        """Compute scaled dot product attention of this rank's queries to the keys of all ranks.

        Args:
            query: (..., heads, queries of this rank, width).
            key, value: (..., heads or groups of them, keys of this rank, width).
            mask: (..., queries of this rank, all keys), added to scores, or False where nothing is seen; where
                heads are exchanged, (..., all queries, all keys).
            is_causal: a query sees the keys up to its own position.
            scale: the factor of the scores; None: one over the square root of the width.
            split: how the work is spread.

        Returns:
            (..., heads, queries of this rank, width).
        """
        if scale is None:
            scale = query.shape[-1] ** -0.5
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as torch's attention does: after rotary angles they may differ
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        has_numbers = mask is not None and mask.dtype != torch.bool
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
        members = split.heads
        queries = held_by_groups(split.queries, self.comm.size, members)
        keys = held_by_groups(split.keys, self.comm.size, members)
        group = self.comm.rank // members
        if members > 1:
            query = self._exchange_heads(query, split.queries, queries, members)
            key = self._exchange_heads(key, split.keys, keys, members)
            value = self._exchange_heads(value, split.keys, keys, members)
            if mask is not None:
                mask = _share_of_mask(mask, queries[group], members, self.comm.rank % members)
        if mask is not None and has_numbers:
            query, mask = with_even_rows(query, mask)
        ring = Ring(self.comm, members, tuple(queries), tuple(keys), is_causal, scale)
        result = ring_attention(query, key, value, mask, ring)
        if members > 1:
            result = self._exchange_heads(result, split.queries, queries, members, to_heads=False)
        return result

    def _exchange_heads(
        self, tensor: torch.Tensor, blocks: Blocks, groups: Sequence[Ranges], members: int, to_heads: bool = True
    ) -> torch.Tensor:
        """Exchange pieces of a sequence for shares of the heads, or back.

        Args:
            tensor: (..., heads, positions of this rank, width), or (..., heads / members, those of its group, width).
            blocks: how the sequence is split.
            groups: the positions of each group.
            members: the number of ranks of a group.
            to_heads: whether heads are exchanged for positions, or the other way round.
        """
        heads = tensor.shape[-3] if to_heads else tensor.shape[-3] * members
        share = heads // members
        pieces, shares = [], []
        for rank in range(self.comm.size):
            group, member = divmod(rank, members)
            pieces.append(HeldRange(positions_of(blocks, rank, self.comm.size), (0, heads)))
            shares.append(HeldRange(groups[group], (member * share, (member + 1) * share)))
        have, want = (pieces, shares) if to_heads else (shares, pieces)
        # Nothing leaves a group: for the other groups' ranks this one has nothing that they want.
        return self.bring(tensor, (-3, -2), tuple(have), tuple(want))


def _brought(
    tensor: torch.Tensor,
    dims: tuple[int, int],
    have: tuple[HeldRange, ...],
    want: tuple[HeldRange, ...],
    comm: AxisComm,
) -> torch.Tensor:
    """Return the range that this rank asks for; see `SequenceExchanges.bring`."""
    runs = _runs_between(have, want)
    ranks = range(comm.size)
    own_range = want[comm.rank]
    shape = list(tensor.shape)
    shape[dims[0]] = own_range.heads[1] - own_range.heads[0]
    shape[dims[1]] = sum(stop - start for start, stop in own_range.ranges)
    result = tensor.new_zeros(shape)

    def part(of: torch.Tensor, place: Range, size: Range) -> torch.Tensor:
        return of.narrow(dims[0], place[0], size[0]).narrow(dims[1], place[1], size[1])

    for run in runs[comm.rank, comm.rank]:
        part(result, run.target, run.size).add_(part(tensor, run.source, run.size))
    if not any(runs[pair] for pair in runs if pair[0] != pair[1]):
        return result  # on no rank does anything come from another
    moved_dims = {dim % tensor.dim() for dim in dims}
    row = math.prod(size for dim, size in enumerate(shape) if dim not in moved_dims)
    other_ranks = [rank for rank in ranks if rank != comm.rank]
    parts = []
    for rank in other_ranks:
        parts += [part(tensor, run.source, run.size).reshape(-1) for run in runs[comm.rank, rank]]
    flat = torch.cat(parts) if parts else tensor.new_empty(0)
    if is_dry(tensor):
        comm.ledger.add("all_to_all", comm.axis, flat.nbytes)
        return result
    send, receive = [0] * comm.size, [0] * comm.size
    for rank in other_ranks:
        send[rank] = row * sum(math.prod(run.size) for run in runs[comm.rank, rank])
        receive[rank] = row * sum(math.prod(run.size) for run in runs[rank, comm.rank])
    values = comm.all_to_all_sized(flat, send, receive)
    offset = 0
    for rank in other_ranks:
        for run in runs[rank, comm.rank]:
            place = part(result, run.target, run.size)
            place.add_(values[offset : offset + place.numel()].view(place.shape))
            offset += place.numel()
    return result


@functools.lru_cache(maxsize=4096)
def _runs_between(have: tuple[HeldRange, ...], want: tuple[HeldRange, ...]) -> dict[tuple[int, int], list[_Run]]:
    """Return for each two ranks what the first has of what the second wants."""
    pairs = itertools.product(range(len(have)), range(len(want)))
    return {(first, second): list(_common(have[first], want[second])) for first, second in pairs}


def _common(have: HeldRange, want: HeldRange) -> Iterator[_Run]:
    """Yield the runs of `want` that are in `have`."""
    first_head, last_head = max(have.heads[0], want.heads[0]), min(have.heads[1], want.heads[1])
    if first_head >= last_head:
        return
    heads = first_head - have.heads[0], first_head - want.heads[0], last_head - first_head
    target = 0
    for first, last in want.ranges:
        source = 0
        for start, stop in have.ranges:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                places = source + begin - start, target + begin - first, end - begin
                yield _Run(*zip(heads, places, strict=True))
            source += stop - start
        target += last - first


def _shifted(ranges: Ranges, first: int, last: int) -> tuple[Range, ...]:
    return tuple((start + first, stop + last) for start, stop in ranges)


def held_by_groups(blocks: Blocks, ranks: int, members: int) -> list[tuple[Range, ...]]:
    """Return for each group of `members` neighbours the ranges of positions that it holds, neighbours joined."""
    groups = []
    for first in range(0, ranks, members):
        ranges: list[Range] = []
        for start, stop in sorted(
            place for rank in range(first, first + members) for place in positions_of(blocks, rank, ranks)
        ):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        groups.append(tuple(ranges))
    return groups


def _share_of_mask(mask: torch.Tensor, rows: Ranges, members: int, member: int) -> torch.Tensor:
    """Return of a whole mask the rows of a group's positions, and a member's heads if it has heads."""
    if mask.shape[-2] > 1:
        mask = torch.cat([mask.narrow(-2, start, stop - start) for start, stop in rows], -2)
    if mask.dim() > 2 and mask.shape[-3] > 1:
        heads = mask.shape[-3] // members
        mask = mask.narrow(-3, member * heads, heads)
    return mask


def positions_of(blocks: Blocks, rank: int, num_ranks: int) -> tuple[Range, ...]:
    """Return the ranges of positions that a rank holds."""
    return tuple((start, stop) for start, stop in piece_ranges(blocks, rank, num_ranks) if start < stop)


def pairs_seen(split: AttentionSplit, is_causal: bool, num_ranks: int) -> list[int]:
    """Return the number of pairs of a query and a key that each rank computes, for each share of heads: its work."""
    queries = held_by_groups(split.queries, num_ranks, split.heads)
    every = total_of(split.keys)
    work = []
    for rank in range(num_ranks):
        pairs = 0
        for start, stop in queries[rank // split.heads]:
            pairs += sum(min(at + 1, every) for at in range(start, stop)) if is_causal else every * (stop - start)
        work.append(pairs)
    return work
