"""Compute with a sequence of which each rank of `context` holds a piece: attention, and exchanges beside it.

    ring      keys and values go round the ranks; each rank adds what its queries see of them (Liu et al. 2023, "Ring
              Attention with Blockwise Transformers"). Softmax is merged block by block by its log-sum-exp
    heads     pieces of the sequence are exchanged for shares of the heads, and back (Jacobs et al. 2023, Ulysses)
    product   groups of ranks exchange heads; between the groups keys and values go round (Fang and Zhao 2024)

Per rank, with n ranks in the ring and KV the bytes of a rank's keys and values: n - 1 sends of KV forward; backward
as many of KV and as many of their gradients. Under a causal mask a rank holds a piece from the sequence's first half
and its mirror image from the second, so that all ranks have as much to compute (Llama 3, Grattafiori et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.comm.collectives import AxisComm, Done, Pending
from paceline.comm.differentiable import Exchanges, Pieces, is_dry, piece_ranges, take_piece
from paceline.nouns.errors import WorkloadError
from paceline.nouns.shard_spec import total_of

aten = torch.ops.aten
_HIDDEN = -1e30  # what a mask adds to hide a key
Blocks = tuple[int, ...]
Range = tuple[int, int]
Ranges = Sequence[Range]


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


class _Place(NamedTuple):
    """A range of positions that a group of ranks holds: whose it is, and where it lies on that rank."""

    start: int
    stop: int
    member: int
    offset: int


@dataclass(frozen=True, slots=True)
class SequenceExchanges(Exchanges):
    """The exchanges of the `context` axis. All gradients are partial: that of a whole value is the sum over the ranks.

    So a value that every rank computes alike needs no exchange in the backward pass, and the gradients of parameters
    are summed once, after it.
    """

    def share_of_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; of its gradient, which all ranks have, each takes an equal share."""
        return tensor if self.comm.size == 1 else _Share.apply(tensor, self.comm.size)  # type: ignore[no-any-return, no-untyped-call]

    def sum_with_partial_grad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; its gradients are summed too."""
        return _Sum.apply(tensor, self.comm)  # type: ignore[no-any-return, no-untyped-call]

    def take_at(self, tensor: torch.Tensor, dim: int, index: int, blocks: Blocks) -> torch.Tensor:
        """Return on every rank the elements at one place of the split dimension, which is dropped."""
        return _TakeAt.apply(tensor, dim, index, blocks, self.comm)  # type: ignore[no-any-return, no-untyped-call]

    def move(self, tensor: torch.Tensor, dim: int, blocks: Blocks, start: int, wanted: Blocks) -> torch.Tensor:
        """Return this rank's piece of the sequence that begins at `start` of this one; zeros beyond its ends.

        Args:
            tensor: this rank's piece.
            dim: the split dimension.
            blocks: how it is split.
            start: may be negative.
            wanted: how the result is split.
        """
        ranks = range(self.comm.size)
        have = [piece_ranges(blocks, rank, self.comm.size) for rank in ranks]
        # In positions of the sequence that is there.
        want = [_shifted(piece_ranges(wanted, rank, self.comm.size), start, start) for rank in ranks]
        return _Move.apply(tensor, dim, have, want, self.comm)  # type: ignore[no-any-return, no-untyped-call]

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
            padding: zeros before the sequence and after it.
            dilation: from one element of the kernel to the next.
            groups: of channels.
            pieces: how the sequence is split, and how the result is.

        Returns:
            (samples, channels out, positions of the result on this rank).
        """
        ranks = range(self.comm.size)
        blocks, wanted = pieces
        reach = dilation * (weight.shape[-1] - 1)
        have = [piece_ranges(blocks, rank, self.comm.size) for rank in ranks]
        made = [
            [(first, last) for first, last in piece_ranges(wanted, rank, self.comm.size) if first < last]
            for rank in ranks
        ]
        want = [_shifted(ranges, -padding, reach - padding) for ranges in made]
        seen = _Move.apply(tensor, 2, have, want, self.comm)  # type: ignore[no-untyped-call]
        # Ranges that don't follow each other are convolved one by one.
        runs = seen.split([last - first for first, last in want[self.comm.rank]], 2)
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
            scale: of scores; None: one over the square root of the width.
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
        queries = _held_by_groups(split.queries, self.comm.size, members)
        keys = _held_by_groups(split.keys, self.comm.size, members)
        group = self.comm.rank // members
        if members > 1:
            query = _exchange_heads(query, queries[group], members, self.comm)
            key = _exchange_heads(key, keys[group], members, self.comm)
            value = _exchange_heads(value, keys[group], members, self.comm)
            if mask is not None:
                mask = _share_of_mask(mask, queries[group], members, self.comm.rank % members)
        if mask is not None and has_numbers:
            query, mask = _with_even_rows(query, mask)
        ring = _Ring(self.comm, members, tuple(map(_merged, queries)), tuple(map(_merged, keys)), is_causal, scale)
        result: torch.Tensor = _RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-untyped-call]
        if members > 1:
            result = _exchange_sequence(result, queries[group], members, self.comm)
        return result


def _with_even_rows(query: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and mask that weigh all keys alike in rows where the mask hides every key by a large number.

    So does one process, whose scores such a number rounds away. A log-sum-exp of the number would lose how many keys
    it is of, and a row's parts could not be merged.
    """
    most = mask.detach().amax(-1, keepdim=True)
    is_blind = (most <= max(torch.finfo(mask.dtype).min / 2, _HIDDEN)) & (most > -math.inf)
    return query.masked_fill(is_blind, 0.0), torch.where(is_blind, mask - most, mask)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, parts: int) -> torch.Tensor:
        ctx.parts = parts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] / ctx.parts, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: AxisComm) -> torch.Tensor:
        ctx.comm = comm
        return _summed(tensor, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Sum.apply(gradients[0], ctx.comm), None  # type: ignore[no-untyped-call]


def _summed(tensor: torch.Tensor, comm: AxisComm) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    if is_dry(tensor):
        comm.ledger.add("all_reduce", comm.axis, tensor.nbytes)
    else:
        comm.all_reduce(result)
    return result


class _TakeAt(torch.autograd.Function):
    """One place of a split sequence, on all ranks: a sum to which one rank gives its values and the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, index: int, blocks: Blocks, comm: AxisComm) -> torch.Tensor:
        offset = _offset_of(index, piece_ranges(blocks, comm.rank, comm.size))
        ctx.place = (tuple(tensor.shape), dim, offset, comm)
        if offset is None:
            shape = [*tensor.shape]
            del shape[dim]
            return _summed(tensor.new_zeros(shape), comm)
        return _summed(tensor.select(dim, offset), comm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_gradient()
        shape, dim, offset, comm = ctx.place
        total = _summed(gradients[0], comm)
        result = total.new_zeros(shape)
        if offset is not None:
            result.select(dim, offset).copy_(total)
        return result, None, None, None, None


def _offset_of(index: int, ranges: Sequence[Range]) -> int | None:
    """Return where on a rank that holds `ranges` an index of the whole lies; None where it has not got it."""
    offset = 0
    for start, stop in ranges:
        if start <= index < stop:
            return offset + index - start
        offset += stop - start
    return None


class _Move(torch.autograd.Function):
    """Positions to where they are wanted; the backward pass sends their gradients back and adds them up."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, have: Sequence[Ranges], want: Sequence[Ranges], comm: AxisComm
    ) -> torch.Tensor:
        ctx.back = (dim, want, have, comm)
        return _moved(tensor, dim, have, want, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Move.apply(gradients[0], *ctx.back), None, None, None, None  # type: ignore[no-untyped-call]


def _moved(
    tensor: torch.Tensor, dim: int, have: Sequence[Ranges], want: Sequence[Ranges], comm: AxisComm
) -> torch.Tensor:
    """Return this rank's wanted ranges, one after another: what ranks have of them, added up; zeros elsewhere.

    Args:
        tensor: this rank's ranges, one after another along `dim`.
        dim: the split dimension.
        have: ranges of positions of each rank; they may overlap.
        want: ranges that each rank wants.
        comm: the axis.
    """
    ranks = range(comm.size)
    shape = [*tensor.shape]
    shape[dim] = sum(last - first for first, last in want[comm.rank])
    result = tensor.new_zeros(shape)
    sent = [list(_common(have[comm.rank], want[rank])) for rank in ranks]
    received = [list(_common(have[rank], want[comm.rank])) for rank in ranks]
    for source, target, length in sent[comm.rank]:
        result.narrow(dim, target, length).add_(tensor.narrow(dim, source, length))
    pairs = [(first, second) for first in ranks for second in ranks if first != second]
    if not any(True for first, second in pairs for _ in _common(have[first], want[second])):
        return result  # on no rank does anything come from another
    row = math.prod(shape[:dim] + shape[dim + 1 :])
    parts = []
    for rank in ranks:
        if rank != comm.rank:
            parts += [tensor.narrow(dim, source, length).reshape(-1) for source, _, length in sent[rank]]
    send = [0 if rank == comm.rank else row * sum(length for *_, length in sent[rank]) for rank in ranks]
    receive = [0 if rank == comm.rank else row * sum(length for *_, length in received[rank]) for rank in ranks]
    flat = torch.cat(parts) if parts else tensor.new_empty(0)
    if is_dry(tensor):
        comm.ledger.add("all_to_all", comm.axis, flat.nbytes)
        return result
    values = comm.all_to_all_sized(flat, send, receive)
    offset = 0
    for rank in ranks:
        for _, target, length in [] if rank == comm.rank else received[rank]:
            run = result.narrow(dim, target, length)
            run.add_(values[offset : offset + run.numel()].view(run.shape))
            offset += run.numel()
    return result


def _shifted(ranges: Ranges, first: int, last: int) -> Ranges:
    return [(start + first, stop + last) for start, stop in ranges]


def _common(have: Sequence[Range], want: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of `want` that are in `have`: offset there, offset here, length."""
    target = 0
    for first, last in want:
        source = 0
        for start, stop in have:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                yield source + begin - start, target + begin - first, end - begin
            source += stop - start
        target += last - first


def _held_by_groups(blocks: Blocks, ranks: int, members: int) -> list[list[_Place]]:
    """Return for each group of `members` neighbours what it holds of the sequence, by position."""
    groups = []
    for first in range(0, ranks, members):
        places = []
        for member in range(members):
            offset = 0
            for start, stop in piece_ranges(blocks, first + member, ranks):
                places.append(_Place(start, stop, member, offset))
                offset += stop - start
        groups.append(sorted(place for place in places if place.start < place.stop))
    return groups


def _merged(places: Sequence[_Place]) -> tuple[Range, ...]:
    """Return the ranges of positions, neighbours joined."""
    ranges: list[Range] = []
    for start, stop, *_ in places:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return tuple(ranges)


def _length(places: Sequence[_Place], member: int) -> int:
    return sum(place.stop - place.start for place in places if place.member == member)


def _share_of_mask(mask: torch.Tensor, places: Sequence[_Place], members: int, member: int) -> torch.Tensor:
    """Return of a whole mask the rows of a group's positions, and a member's heads if it has heads."""
    if mask.shape[-2] > 1:
        mask = torch.cat([mask.narrow(-2, place.start, place.stop - place.start) for place in places], -2)
    if mask.dim() > 2 and mask.shape[-3] > 1:
        heads = mask.shape[-3] // members
        mask = mask.narrow(-3, member * heads, heads)
    return mask


def _exchange_heads(tensor: torch.Tensor, places: Sequence[_Place], members: int, comm: AxisComm) -> torch.Tensor:
    """Return (..., heads / members, positions of the group, width) of (..., heads, positions of this rank, width)."""
    return _HeadExchange.apply(tensor, tuple(places), members, comm, True)  # type: ignore[no-any-return, no-untyped-call]


def _exchange_sequence(tensor: torch.Tensor, places: Sequence[_Place], members: int, comm: AxisComm) -> torch.Tensor:
    """Undo `_exchange_heads`."""
    return _HeadExchange.apply(tensor, tuple(places), members, comm, False)  # type: ignore[no-any-return, no-untyped-call]


class _HeadExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, places: tuple[_Place, ...], members: int, comm: AxisComm, to_heads: bool
    ) -> torch.Tensor:
        ctx.back = (places, members, comm, not to_heads)
        exchange = _to_heads if to_heads else _to_sequence
        return exchange(tensor, places, members, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _HeadExchange.apply(gradients[0], *ctx.back), None, None, None, None  # type: ignore[no-untyped-call]


def _to_heads(tensor: torch.Tensor, places: Sequence[_Place], members: int, comm: AxisComm) -> torch.Tensor:
    first = comm.rank // members * members
    *outer, heads, _, width = tensor.shape
    share = heads // members
    parts = tensor.unflatten(-3, (members, share)).movedim(-4, 0)  # (members, .., share, positions here, width)
    numel = math.prod(outer) * share * width  # of one position
    counts = [0] * comm.size
    for member in range(members):
        counts[first + member] = numel * _length(places, member)
    sent = [numel * tensor.shape[-2] if first <= rank < first + members else 0 for rank in range(comm.size)]
    values = _all_to_all(parts.reshape(-1), sent, counts, comm)
    result = tensor.new_empty((*outer, share, sum(place.stop - place.start for place in places), width))
    for member, piece in enumerate(values.split(counts[first : first + members])):
        piece = piece.view(*outer, share, _length(places, member), width)
        for source, target, length in _runs(places, member):
            result.narrow(-2, target, length).copy_(piece.narrow(-2, source, length))
    return result


def _to_sequence(tensor: torch.Tensor, places: Sequence[_Place], members: int, comm: AxisComm) -> torch.Tensor:
    first = comm.rank // members * members
    own = comm.rank - first
    *outer, share, _, width = tensor.shape
    numel = math.prod(outer) * share * width
    parts = []
    sent = [0] * comm.size
    for member in range(members):
        # In the order in which the positions lie on that rank.
        runs = sorted(_runs(places, member))
        parts.append(torch.cat([tensor.narrow(-2, target, length) for _, target, length in runs], -2).reshape(-1))
        sent[first + member] = parts[-1].numel()
    here = _length(places, own)
    counts = [numel * here if first <= rank < first + members else 0 for rank in range(comm.size)]
    values = _all_to_all(torch.cat(parts), sent, counts, comm)
    pieces = values.view(members, *outer, share, here, width)
    return pieces.movedim(0, -4).flatten(-4, -3)


def _runs(places: Sequence[_Place], member: int) -> Iterator[tuple[int, int, int]]:
    """Yield what a member holds of its group's positions: offset on that rank, offset in the group, length."""
    target = 0
    for place in places:
        length = place.stop - place.start
        if place.member == member:
            yield place.offset, target, length
        target += length


def _all_to_all(flat: torch.Tensor, send: list[int], receive: list[int], comm: AxisComm) -> torch.Tensor:
    if is_dry(flat):
        comm.ledger.add("all_to_all", comm.axis, flat.nbytes)
        return flat.new_empty(sum(receive))
    return comm.all_to_all_sized(flat.contiguous(), send, receive)


@dataclass(frozen=True, slots=True)
class _Ring:
    """The ring of one rank's group.

    Attributes:
        comm: the axis.
        members: ranks of a group; the ring goes through the ranks with the same place in each.
        queries, keys: ranges of positions that each group holds.
        is_causal: whether a query sees no later key.
        scale: of scores.
    """

    comm: AxisComm
    members: int
    queries: tuple[tuple[Range, ...], ...]
    keys: tuple[tuple[Range, ...], ...]
    is_causal: bool
    scale: float

    @property
    def size(self) -> int:
        """Groups in the ring."""
        return len(self.keys)

    @property
    def place(self) -> int:
        """This group's place in the ring."""
        return self.comm.rank // self.members

    def source(self, hop: int) -> int:
        """Return the group whose keys are here after so many hops."""
        return (self.place - hop) % self.size

    def length(self, group: int) -> int:
        """Return how many keys a group holds."""
        return sum(stop - start for start, stop in self.keys[group])

    def begin_hop(self, tensor: torch.Tensor, into: torch.Tensor) -> Pending:
        """Start to send a tensor to the next rank of the ring, and to receive one from the rank before."""
        if is_dry(tensor):
            self.comm.ledger.add("send", self.comm.axis, tensor.nbytes)
            return Done()
        following = (self.comm.rank + self.members) % self.comm.size
        before = (self.comm.rank - self.members) % self.comm.size
        return self.comm.begin_shift(tensor, following, into, before)


class _Block(NamedTuple):
    """A part of attention: which of the queries here, which of the keys at hand, and what they see of each other."""

    queries: Range
    keys: Range
    is_causal: bool
    visible: torch.Tensor | None  # of a mask by positions


def _blocks_of(ring: _Ring, source: int, device: torch.device) -> Iterator[_Block]:
    """Yield the parts in which this group's queries look at the keys of the group `source`."""
    rows = ring.queries[ring.place]
    columns = ring.keys[source]
    queries = sum(stop - start for start, stop in rows)
    keys = ring.length(source)
    if not queries or not keys:
        return
    if not ring.is_causal:
        yield _Block((0, queries), (0, keys), False, None)
        return
    if rows == columns:
        # Positions rise with their place on the rank, so the mask is the usual one.
        yield _Block((0, queries), (0, keys), True, None)
        return
    # By ranges of queries: (first query, last query, keys seen by all of them).
    whole: list[list[int]] = []
    offset = 0
    for start, stop in rows:
        length = stop - start
        seen_by_first = _count_up_to(columns, start)
        seen_by_last = _count_up_to(columns, stop - 1)
        if seen_by_first == seen_by_last:
            if whole and whole[-1][1] == offset and whole[-1][2] == seen_by_last:
                whole[-1][1] = offset + length
            else:
                whole.append([offset, offset + length, seen_by_last])
        else:
            positions = torch.arange(start, stop, device=device)[:, None]
            visible = positions >= _positions(columns, device)[None, :seen_by_last]
            yield _Block((offset, offset + length), (0, seen_by_last), False, visible)
        offset += length
    for first, last, seen in whole:
        if seen:
            yield _Block((first, last), (0, seen), False, None)


def _count_up_to(ranges: Sequence[Range], position: int) -> int:
    """Return how many positions of the ranges are at most `position`."""
    return sum(max(0, min(stop, position + 1) - start) for start, stop in ranges)


def _positions(ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


class _RingAttention(torch.autograd.Function):
    """Attention of this group's queries to the keys of all groups, which come one after another."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, ring: _Ring
    ) -> torch.Tensor:
        ctx.mask_has_gradient = mask is not None and mask.requires_grad
        so_far: _Merged | None = None
        for source, (keys, values) in _going_round(ring, key, value):
            for block in _blocks_of(ring, source, query.device):
                part = _Part(ring, block, source, mask, ctx.mask_has_gradient)
                seen = slice(*block.keys)
                made, sums = part.forward(_rows(query, block.queries), keys[..., seen, :], values[..., seen, :])
                if so_far is None and block.queries == (0, query.shape[-2]):
                    wide = torch.promote_types(query.dtype, torch.float32)
                    so_far = _Merged(made.to(wide), sums)
                    continue
                if so_far is None:
                    so_far = _Merged.nothing(query, value)
                _merge(so_far.result, so_far.sums, block.queries, made, sums)
        if so_far is None:  # a rank without queries, or without keys to see
            so_far = _Merged.nothing(query, value)
        # A row that sees nothing is zeros, as in torch's own attention.
        result = so_far.result.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, so_far.sums)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_gradient()
        query, key, value, mask, result, sums = ctx.saved_tensors
        ring: _Ring = ctx.ring
        gradient = gradients[0].contiguous()
        sums = sums.masked_fill(sums == -math.inf, 0.0)
        of_query: torch.Tensor | None = None
        of_mask = None
        if ctx.mask_has_gradient:
            of_mask = torch.zeros_like(mask)

        def of_keys(source: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Add this rank's queries' part of the gradients; return that of the keys and values at hand."""
            nonlocal of_query
            totals: list[torch.Tensor | None] = [of_query, None, None]
            for block in _blocks_of(ring, source, query.device):
                part = _Part(ring, block, source, mask, ctx.mask_has_gradient)
                rows, seen = slice(*block.queries), slice(*block.keys)
                parts = part.backward(
                    _rows(gradient, block.queries),
                    _rows(query, block.queries),
                    keys[..., seen, :],
                    values[..., seen, :],
                    _rows(result, block.queries),
                    sums[..., rows],
                )
                places = (block.queries, block.keys, block.keys)
                for number, (of, made, place) in enumerate(zip((query, keys, values), parts[:3], places, strict=True)):
                    totals[number] = _with_part(totals[number], of, made, place)
                if of_mask is not None:
                    part.add_gradient(of_mask, parts[3])
            of_query = totals[0]
            return _or_zeros(totals[1], keys), _or_zeros(totals[2], values)

        of_key, of_value = _collected(ring, key, value, of_keys)
        of_query = _or_zeros(of_query, query)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_mask, None


def _rows(tensor: torch.Tensor, rows: Range) -> torch.Tensor:
    return tensor[..., rows[0] : rows[1], :]


def _with_part(total: torch.Tensor | None, of: torch.Tensor, part: torch.Tensor, rows: Range) -> torch.Tensor:
    """Add a block's part of a gradient to what there is; the first one that covers all of it is taken as it is."""
    if total is None and rows == (0, of.shape[-2]):
        return part.to(torch.promote_types(of.dtype, torch.float32))
    total = _or_zeros(total, of)
    _rows(total, rows).add_(part)
    return total


def _or_zeros(total: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor:
    if total is not None:
        return total
    return torch.zeros(of.shape, dtype=torch.promote_types(of.dtype, torch.float32), device=of.device)


@dataclass(slots=True)
class _Merged:
    """Attention to the keys so far: the result, and the log-sum-exp of each row's scores."""

    result: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def nothing(cls, query: torch.Tensor, value: torch.Tensor) -> _Merged:
        """Return what there is before any key."""
        wide = torch.promote_types(query.dtype, torch.float32)
        result = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=wide, device=query.device)
        return cls(result, torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device))


def _going_round(
    ring: _Ring, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the keys and values of each group, this one's first; the next are on their way meanwhile."""
    packed = _packed(key, value) if ring.size > 1 else None
    at_hand = (key, value)
    for hop in range(ring.size):
        pending: Pending | None = None
        following = None
        if packed is not None and hop < ring.size - 1:
            following = packed.new_empty(_packed_size(ring, key, value, ring.source(hop + 1)))
            pending = ring.begin_hop(packed, following)
        yield ring.source(hop), at_hand
        if pending is not None and following is not None:
            pending.wait()
            packed = following
            at_hand = _unpacked(packed, key, value, ring.length(ring.source(hop + 1)))


def _collected(
    ring: _Ring,
    key: torch.Tensor,
    value: torch.Tensor,
    of_keys: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this group's keys and values, to which every group has added its part.

    They go round behind the keys and values they belong to: begun by the first other group that has these, and home
    after the last.
    """
    own: tuple[torch.Tensor, torch.Tensor] | None = None
    travelling: torch.Tensor | None = None  # gradients on their way here, of the keys at hand
    pending: Pending = Done()
    for source, (keys, values) in _going_round(ring, key, value):
        of_key, of_value = of_keys(source, keys, values)
        if source == ring.place:
            own = (of_key, of_value)
            continue
        gradients = _packed(of_key, of_value)
        pending.wait()
        if travelling is not None:
            gradients += travelling
        # What comes now belongs to the keys of the next hop; after the last hop it is this group's own.
        size = _packed_size(ring, key, value, (source - 1) % ring.size)
        travelling = gradients.new_empty(size)
        pending = ring.begin_hop(gradients, travelling)
    pending.wait()
    assert own is not None
    if travelling is None:
        return own
    of_key, of_value = _unpacked(travelling, key, value, ring.length(ring.place))
    return own[0] + of_key, own[1] + of_value


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _packed_size(ring: _Ring, key: torch.Tensor, value: torch.Tensor, group: int) -> int:
    per_position = math.prod(key.shape[:-2]) * (key.shape[-1] + value.shape[-1])
    return per_position * ring.length(group)


def _unpacked(
    packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    outer = key.shape[:-2]
    numel = math.prod(outer) * length * key.shape[-1]
    keys = packed[:numel].view(*outer, length, key.shape[-1])
    return keys, packed[numel:].view(*outer, length, value.shape[-1])


def _merge(
    result: torch.Tensor, sums: torch.Tensor, queries: Range, made: torch.Tensor, block_sums: torch.Tensor
) -> None:
    """Add a block's part to the result: softmax over both is a mean of the two, weighted by their log-sum-exp."""
    before = sums[..., queries[0] : queries[1]]
    total = torch.logaddexp(before, block_sums)
    weight = torch.exp(block_sums - total.masked_fill(total == -math.inf, 0.0))  # rows that have seen nothing yet
    kept = _rows(result, queries)
    kept.lerp_(made.to(kept.dtype), weight.unsqueeze(-1))
    before.copy_(total)


@dataclass(slots=True)
class _Part:
    """Attention of some queries to some keys of one group.

    Attributes:
        ring, block, source: which.
        mask: of this group's queries and all keys.
        mask_has_gradient: torch's fused attention gives none.
    """

    ring: _Ring
    block: _Block
    source: int
    mask: torch.Tensor | None
    mask_has_gradient: bool

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's attention and the log-sum-exp of its scores, (..., queries)."""
        mask = self._added(query)
        if self._is_fused(query, value):
            made, sums = _fused(query, key, value, mask, self.block.is_causal, self.ring.scale)
        else:
            scores = self._scores(query, key, mask)
            sums = scores.logsumexp(-1)
            weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1))
            made = weights @ _per_head(value, query).to(weights.dtype)
        if mask is not None:
            # Where a row sees no key of the block, torch's fused attention says 0.
            sums = sums.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return made, sums

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients of query, key, value, and of the scores where the mask has one."""
        mask = self._added(query)
        keys, values = _per_head(key, query), _per_head(value, query)
        of_scores = None
        if self._is_fused(query, value):
            of_query, of_key, of_value = _fused_backward(
                gradient, query, keys, values, result, sums, mask, self.block.is_causal, self.ring.scale
            )
        else:
            scores = self._scores(query, key, mask)
            wide = scores.dtype
            weights = torch.exp(scores - sums.unsqueeze(-1))
            of_value = weights.transpose(-2, -1) @ gradient.to(wide)
            of_weights = gradient.to(wide) @ values.to(wide).transpose(-2, -1)
            delta = (gradient.to(wide) * result.to(wide)).sum(-1, keepdim=True)
            of_scores = weights * (of_weights - delta)
            of_query = of_scores @ keys.to(wide) * self.ring.scale
            of_key = of_scores.transpose(-2, -1) @ query.to(wide) * self.ring.scale
        return of_query, _per_group(of_key, key), _per_group(of_value, value), of_scores

    def add_gradient(self, of_mask: torch.Tensor, of_scores: torch.Tensor | None) -> None:
        """Add the scores' gradient to that of the mask, summed where the mask was broadcast."""
        assert of_scores is not None
        rows = slice(*self.block.queries) if of_mask.shape[-2] > 1 else slice(None)
        offset = 0
        column = 0
        for start, stop in self._seen_ranges():
            piece = of_scores[..., column : column + stop - start]
            target = of_mask[..., rows, start:stop] if of_mask.shape[-1] > 1 else of_mask[..., rows, :]
            target += piece.sum_to_size(target.shape).to(of_mask.dtype)
            column += stop - start
            offset += stop - start

    def _seen_ranges(self) -> Iterator[Range]:
        """Yield the ranges of positions of the keys that the block looks at."""
        left = self.block.keys[1]
        for start, stop in self.ring.keys[self.source]:
            taken = min(stop - start, left)
            if taken:
                yield start, start + taken
            left -= taken

    def _added(self, query: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the block's scores, or None: the mask's part, and what positions hide."""
        mask = None
        if self.mask is not None:
            rows = self.mask
            if rows.shape[-2] > 1:
                rows = rows[..., self.block.queries[0] : self.block.queries[1], :]
            mask = rows
            if rows.shape[-1] > 1:
                mask = torch.cat([rows[..., start:stop] for start, stop in self._seen_ranges()], -1)
            mask = mask.detach().to(torch.promote_types(query.dtype, torch.float32))
        visible = self.block.visible
        if self.block.is_causal and mask is not None:
            size = (self.block.queries[1] - self.block.queries[0], self.block.keys[1])
            visible = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        if visible is not None:
            hidden = torch.zeros(visible.shape, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.device)
            hidden = hidden.masked_fill(~visible, -math.inf)
            mask = hidden if mask is None else mask + hidden
        return mask

    def _is_fused(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        if self.mask_has_gradient or not 3 <= query.dim() <= 4 or query.shape[-1] != value.shape[-1]:
            return False
        if query.device.type == "cpu":
            return query.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        # The fused kernel for GPUs takes no mask, and no wide dtype.
        is_narrow = query.dtype in (torch.bfloat16, torch.float16)
        return query.device.type == "cuda" and is_narrow and self.mask is None and self.block.visible is None

    def _scores(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ _per_head(key, query).to(wide).transpose(-2, -1) * self.ring.scale
        if mask is None and self.block.is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            return scores.masked_fill(~visible, -math.inf)
        return scores if mask is None else scores + mask


def _per_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values, (..., groups, keys, width), for each head of their group (grouped-query attention)."""
    if tensor.dim() < 3 or tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


def _per_group(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Undo `_per_head` for a gradient: the sum over each group's heads."""
    if tensor.dim() < 3 or gradient.shape[-3] == tensor.shape[-3]:
        return gradient
    heads_of_groups: torch.Tensor = gradient.unflatten(-3, (tensor.shape[-3], -1))
    return heads_of_groups.sum(-3)


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of (samples, heads, positions, width), which the fused kernels want."""
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(0 if tensor.dim() == 3 else 1)


def _mask_for(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask.to(query.dtype).expand(mask.shape[0], mask.shape[1], query.shape[-2], key.shape[-2]).contiguous()


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    causal = is_causal and mask is None
    shape = query.shape[:-1]
    four = [_four(tensor) for tensor in (query, _per_head(key, query), _per_head(value, query))]
    if query.device.type == "cpu":
        made, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
            *four, 0.0, causal, attn_mask=_mask_for(mask, query, key), scale=scale
        )
    else:
        made, sums, *_ = aten._scaled_dot_product_flash_attention.default(*four, 0.0, causal, False, scale=scale)
    return made.reshape(*shape, value.shape[-1]), sums.reshape(shape)


def _fused_backward(  # noqa: PLR0913
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    causal = is_causal and mask is None
    four = [_four(tensor) for tensor in (gradient, query, key, value, result)]
    four_sums = (sums if sums.dim() == 3 else sums.unsqueeze(0)).contiguous()  # the kernels take no strides of it
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *four, four_sums, 0.0, causal, attn_mask=_mask_for(mask, query, key), scale=scale
        )
    else:
        lengths = query.shape[-2], key.shape[-2]
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
        grads = aten._scaled_dot_product_flash_attention_backward.default(
            *four, four_sums, None, None, *lengths, 0.0, causal, seed, seed[:0], scale=scale
        )
    return tuple(grad.reshape(of.shape) for grad, of in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


def _refuse_second_gradient() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise WorkloadError(
            "can't take the gradient of a gradient",
            "attention over a sequence that is split can be differentiated once only",
            "write replicate, shard or pipeline in place of context",
        )


def positions_of(blocks: Blocks, rank: int, num_ranks: int) -> list[Range]:
    """Return the ranges of positions that a rank holds."""
    return [(start, stop) for start, stop in piece_ranges(blocks, rank, num_ranks) if start < stop]


def pairs_seen(split: AttentionSplit, is_causal: bool, num_ranks: int) -> list[int]:
    """Return how many pairs of a query and a key each rank computes, for each share of heads: its work."""
    queries = _held_by_groups(split.queries, num_ranks, split.heads)
    every = total_of(split.keys)
    work = []
    for rank in range(num_ranks):
        pairs = 0
        for start, stop in _merged(queries[rank // split.heads]):
            pairs += sum(min(at + 1, every) for at in range(start, stop)) if is_causal else every * (stop - start)
        work.append(pairs)
    return work


__all__ = ["AttentionSplit", "Pieces", "SequenceExchanges", "pairs_seen", "positions_of", "take_piece"]
