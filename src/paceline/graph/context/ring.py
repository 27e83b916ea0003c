"""Attention of each rank's queries to the keys of all ranks, which go round in a ring.

Each rank adds what its queries see of the keys at hand (Liu et al. 2023, "Ring Attention with Blockwise Transformers").
Softmax is merged block by block by its log-sum-exp. With n ranks in the ring and KV the bytes of a rank's keys and
values: n - 1 sends of KV forward; backward as many of KV and as many of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.comm.collectives import AxisComm, Completed, Pending
from paceline.comm.differentiable import is_dry
from paceline.nouns.errors import WorkloadError

aten = torch.ops.aten
_HIDDEN = -1e30  # what a mask adds to hide a key
Range = tuple[int, int]
Ranges = tuple[Range, ...]


def with_even_rows(query: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and mask that weigh all keys alike in rows where the mask hides every key by a large number.

    So does one process, whose scores such a number rounds away. A log-sum-exp of the number would lose how many keys
    it is of, and a row's parts could not be merged.
    """
    most = mask.detach().amax(-1, keepdim=True)
    is_blind = (most <= max(torch.finfo(mask.dtype).min / 2, _HIDDEN)) & (most > -math.inf)
    return query.masked_fill(is_blind, 0.0), torch.where(is_blind, mask - most, mask)


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of one rank's group.

    Attributes:
        comm: the axis's communicator.
        members: the number of ranks of a group; the ring goes through the ranks with the same place in each.
        queries, keys: ranges of positions that each group holds.
        is_causal: whether a query sees no later key.
        scale: the factor of the scores.
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
        """Return the number of keys that a group holds."""
        return sum(stop - start for start, stop in self.keys[group])

    def begin_hop(self, tensor: torch.Tensor, into: torch.Tensor) -> Pending:
        """Start to send a tensor to the next rank of the ring, and to receive one from the rank before."""
        if is_dry(tensor):
            self.comm.ledger.add("send", self.comm.axis, tensor.nbytes)
            return Completed()
        following = (self.comm.rank + self.members) % self.comm.size
        before = (self.comm.rank - self.members) % self.comm.size
        return self.comm.begin_shift(tensor, following, into, before)


class _Block(NamedTuple):
    """A part of attention: which of the queries here, which of the keys at hand, and what they see of each other."""

    queries: Range
    keys: Range
    is_causal: bool
    visible: torch.Tensor | None  # of a mask by positions


def _blocks_of(ring: Ring, source: int, device: torch.device) -> Iterator[_Block]:
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
    joined: list[list[int]] = []
    offset = 0
    for start, stop in rows:
        length = stop - start
        seen_by_first = _count_up_to(columns, start)
        seen_by_last = _count_up_to(columns, stop - 1)
        if seen_by_first == seen_by_last:
            if joined and joined[-1][1] == offset and joined[-1][2] == seen_by_last:
                joined[-1][1] = offset + length
            else:
                joined.append([offset, offset + length, seen_by_last])
        else:
            positions = torch.arange(start, stop, device=device)[:, None]
            visible = positions >= _positions(columns, device)[None, :seen_by_last]
            yield _Block((offset, offset + length), (0, seen_by_last), False, visible)
        offset += length
    for first, last, seen in joined:
        if seen:
            yield _Block((first, last), (0, seen), False, None)


def _count_up_to(ranges: Sequence[Range], position: int) -> int:
    """Return the number of positions of the ranges that are at most `position`."""
    return sum(max(0, min(stop, position + 1) - start) for start, stop in ranges)


def _positions(ranges: Sequence[Range], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, ring: Ring
) -> torch.Tensor:
    """Return the attention of this group's queries, (..., queries, width), to the keys of all groups.

    Args:
        query, key, value: the tensors that this group holds.
        mask: the mask of this group's queries and all keys, added to scores; or None.
        ring: the ring of this rank's group.
    """
    return _RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    """Attention of this group's queries to the keys of all groups, which come one after another."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, ring: Ring
    ) -> torch.Tensor:
        ctx.mask_has_gradient = mask is not None and mask.requires_grad
        so_far = _Merged.nothing(query, value)
        for source, (keys, values) in _going_round(ring, key, value):
            for block in _blocks_of(ring, source, query.device):
                part = _Part(ring, block, source, mask, ctx.mask_has_gradient)
                seen = slice(*block.keys)
                result, sums = part.forward(_rows(query, block.queries), keys[..., seen, :], values[..., seen, :])
                _merge(so_far.result, so_far.sums, block.queries, result, sums)
        # A row that sees nothing is zeros, as in torch's own attention.
        result = so_far.result.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, so_far.sums)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _refuse_second_gradient()
        query, key, value, mask, result, sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        gradient = gradients[0].contiguous()
        sums = sums.masked_fill(sums == -math.inf, 0.0)
        of_query = _wide_zeros(query)
        of_mask = torch.zeros_like(mask) if ctx.mask_has_gradient else None

        def of_keys(source: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Add this rank's queries' part of the gradients; return that of the keys and values at hand."""
            of_key, of_value = _wide_zeros(keys), _wide_zeros(values)
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
                _rows(of_query, block.queries).add_(parts[0])
                _rows(of_key, block.keys).add_(parts[1])
                _rows(of_value, block.keys).add_(parts[2])
                if of_mask is not None:
                    part.add_gradient(of_mask, parts[3])
            return of_key, of_value

        of_key, of_value = _collected(ring, key, value, of_keys)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_mask, None


def _rows(tensor: torch.Tensor, rows: Range) -> torch.Tensor:
    return tensor[..., rows[0] : rows[1], :]


def _wide_zeros(of: torch.Tensor) -> torch.Tensor:
    """Return zeros of a tensor's shape, in float32 or wider."""
    return torch.zeros(of.shape, dtype=torch.promote_types(of.dtype, torch.float32), device=of.device)


@dataclass(slots=True)
class _Merged:
    """Attention to the keys so far: the result, and the log-sum-exp of each row's scores."""

    result: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def nothing(cls, query: torch.Tensor, value: torch.Tensor) -> _Merged:
        """Return the empty result, before any key."""
        wide = torch.promote_types(query.dtype, torch.float32)
        result = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=wide, device=query.device)
        return cls(result, torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device))


def _going_round(
    ring: Ring, key: torch.Tensor, value: torch.Tensor
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
    ring: Ring,
    key: torch.Tensor,
    value: torch.Tensor,
    of_keys: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this group's keys and values, to which every group has added its part.

    They go round behind the keys and values they belong to: begun by the first other group that has these, and home
    after the last.
    """
    own_gradients: tuple[torch.Tensor, torch.Tensor] | None = None
    travelling: torch.Tensor | None = None  # gradients on their way here, of the keys at hand
    pending: Pending = Completed()
    for source, (keys, values) in _going_round(ring, key, value):
        of_key, of_value = of_keys(source, keys, values)
        if source == ring.place:
            own_gradients = (of_key, of_value)
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
    assert own_gradients is not None
    if travelling is None:
        return own_gradients
    of_key, of_value = _unpacked(travelling, key, value, ring.length(ring.place))
    return own_gradients[0] + of_key, own_gradients[1] + of_value


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _packed_size(ring: Ring, key: torch.Tensor, value: torch.Tensor, group: int) -> int:
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
    result: torch.Tensor, sums: torch.Tensor, queries: Range, block_result: torch.Tensor, block_sums: torch.Tensor
) -> None:
    """Add a block's part to the result: softmax over both is a mean of the two, weighted by their log-sum-exp."""
    before = sums[..., queries[0] : queries[1]]
    total = torch.logaddexp(before, block_sums)
    weight = torch.exp(block_sums - total.masked_fill(total == -math.inf, 0.0))  # rows that have seen nothing yet
    rows = _rows(result, queries)
    rows.lerp_(block_result.to(rows.dtype), weight.unsqueeze(-1))
    before.copy_(total)


@dataclass(slots=True)
class _Part:
    """Attention of some queries to some keys of one group.

    Attributes:
        ring, block, source: the ring, the block, and the group that holds the keys.
        mask: the mask of this group's queries and all keys.
        mask_has_gradient: torch's fused attention gives none.
    """

    ring: Ring
    block: _Block
    source: int
    mask: torch.Tensor | None
    mask_has_gradient: bool

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's attention and the log-sum-exp of its scores, (..., queries)."""
        mask = self._added(query)
        if self._is_fused(query, value):
            result, sums = _fused(query, key, value, mask, self.block.is_causal, self.ring.scale)
        else:
            scores = self._scores(query, key, mask)
            sums = scores.logsumexp(-1)
            weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1))
            result = weights @ _per_head(value, query).to(weights.dtype)
        if mask is not None:
            # Where a row sees no key of the block, torch's fused attention says 0.
            sums = sums.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return result, sums

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
        column = 0
        for start, stop in self._seen_ranges():
            piece = of_scores[..., column : column + stop - start]
            target = of_mask[..., rows, start:stop] if of_mask.shape[-1] > 1 else of_mask[..., rows, :]
            target += piece.sum_to_size(target.shape).to(of_mask.dtype)
            column += stop - start

    def _seen_ranges(self) -> Iterator[Range]:
        """Yield the ranges of positions of the keys that the block looks at."""
        remaining = self.block.keys[1]
        for start, stop in self.ring.keys[self.source]:
            length = min(stop - start, remaining)
            if length:
                yield start, start + length
            remaining -= length

    def _added(self, query: torch.Tensor) -> torch.Tensor | None:
        """Return the addend of the block's scores, or None: the mask's part, and minus infinity at hidden positions."""
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
        result, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
            *four, 0.0, causal, attn_mask=_mask_for(mask, query, key), scale=scale
        )
    else:
        result, sums, *_ = aten._scaled_dot_product_flash_attention.default(*four, 0.0, causal, False, scale=scale)
    return result.reshape(*shape, value.shape[-1]), sums.reshape(shape)


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
