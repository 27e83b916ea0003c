"""Run collectives inside a model, each with the collective that its gradient takes in the backward pass.

                              forward          backward
    copy_to_group             nothing          all_reduce       a replicated value with partial gradients
    reduce_from_group         all_reduce       nothing          partial sums; the gradient is replicated
    gather_from_group         all_gather       own piece        a split value made whole; the gradient is replicated
    gather_with_partial_grad  all_gather       reduce_scatter   a split value made whole; the gradients are partial
    reduce_scatter_to_group   reduce_scatter   all_gather       partial sums, of which each rank gets one piece
    scatter_to_group          own piece        all_gather       a whole value split; the gradient is replicated
    slice_with_partial_grad   own piece        zeros elsewhere  the same where the gradients are partial

*Partial* means what DTensor means by it: the value is the sum over the ranks of what each of them has.
Source: f and g of Shoeybi et al. 2019 (Megatron-LM), and those of sequence parallelism, Korthikanti et al. 2022.
The backward pass of each is another one of them (of `slice_with_partial_grad` it is torch's own), so gradients of
gradients are right as well. All functions work on fake tensors too, where they only compute shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError
from paceline.nouns.shard_spec import block_range, chunk_range, total_of
from paceline.torch_private.operations import FakeTensor

Pieces = tuple[int, tuple[int, ...]]  # the dimension that is split and its blocks


def is_dry(tensor: torch.Tensor) -> bool:
    """Return True if only shapes are wanted. False in a simulation, where the process group is fake too."""
    if not isinstance(tensor, FakeTensor):
        return False
    # torch's fake process group does nothing, so the real code path runs on fake tensors.
    is_simulation = dist.is_initialized() and dist.get_backend() == "fake"
    return not is_simulation


def piece_ranges(blocks: tuple[int, ...], rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return a rank's piece as ranges of the full dimension: (start, stop) per block."""
    ranges = []
    block_start = 0
    for block in blocks:
        start, stop = block_range(block, rank, num_ranks)
        ranges.append((block_start + start, block_start + stop))
        block_start += abs(block)
    return ranges


def take_piece(full: torch.Tensor, pieces: Pieces, rank: int, num_ranks: int) -> torch.Tensor:
    """Return a rank's piece of a full tensor: a view where it is one contiguous block, else a copy."""
    dim, blocks = pieces
    views = [full.narrow(dim, start, stop - start) for start, stop in piece_ranges(blocks, rank, num_ranks)]
    if len(views) == 1:
        return views[0].contiguous()
    return torch.cat(views, dim)


def _all_gather(piece: torch.Tensor, pieces: Pieces, comm: AxisComm) -> torch.Tensor:
    dim, blocks = pieces
    if piece.dtype == torch.bool:  # which Gloo does not send
        return _all_gather(piece.view(torch.uint8), pieces, comm).view(torch.bool)
    shape = list(piece.shape)
    shape[dim] = total_of(blocks)
    if is_dry(piece):
        comm.ledger.add("all_gather", comm.axis, piece.nbytes)
        return piece.new_empty(shape)
    # All ranks know all lengths, from blocks and ranks: they need not be exchanged.
    lengths = [_length(blocks, rank, comm.size) for rank in range(comm.size)]
    gathered = comm.all_gather_along(piece, lengths, dim)
    if len(blocks) == 1 and blocks[0] >= 0:
        return torch.cat(gathered, dim)
    full = piece.new_empty(shape)  # each rank has a piece of every block, so they can't just be joined
    for rank, values in enumerate(gathered):
        offset = 0
        for start, stop in piece_ranges(blocks, rank, comm.size):
            full.narrow(dim, start, stop - start).copy_(values.narrow(dim, offset, stop - start))
            offset += stop - start
    return full


def _reduce_scatter(partial: torch.Tensor, pieces: Pieces, comm: AxisComm) -> torch.Tensor:
    dim, blocks = pieces
    if is_dry(partial):
        comm.ledger.add("reduce_scatter", comm.axis, partial.nbytes)
        shape = list(partial.shape)
        shape[dim] = _length(blocks, comm.rank, comm.size)
        return partial.new_empty(shape)
    pieces_by_rank = [take_piece(partial, pieces, rank, comm.size) for rank in range(comm.size)]
    return comm.reduce_scatter_list(pieces_by_rank)


def _all_reduce(tensor: torch.Tensor, comm: AxisComm) -> torch.Tensor:
    if is_dry(tensor):
        comm.ledger.add("all_reduce", comm.axis, tensor.nbytes)
        return tensor.clone()
    # A copy: autograd may still need the input, and Gloo and NCCL want it contiguous.
    result = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(result)
    return result


def _length(blocks: tuple[int, ...], rank: int, num_ranks: int) -> int:
    return sum(stop - start for start, stop in piece_ranges(blocks, rank, num_ranks))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: Any, back: Any, inverse: Any) -> torch.Tensor:
        ctx.back = back
        ctx.inverse = inverse
        result: torch.Tensor = forth(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # With create_graph=True the backward pass is differentiated itself, and its collective has a gradient too.
        back = ctx.inverse if torch.is_grad_enabled() else ctx.back
        return back(gradients[0]), None, None, None


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The differentiable collectives on one axis.

    Attributes:
        are_gradients_partial: whether gradients of all values are partial; else only those of which an exchange says
            so.
        placement_key: the key in a node's `meta` of its placement on the axis.
    """

    comm: AxisComm
    are_gradients_partial: ClassVar[bool] = False
    placement_key: ClassVar[str] = "lies"

    def copy_to_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; its gradients are added up over the ranks."""
        return self._exchange(
            tensor, lambda x: x.view_as(x), lambda g: _all_reduce(g, self.comm), self.reduce_from_group
        )

    def reduce_from_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        return self._exchange(tensor, lambda x: _all_reduce(x, self.comm), lambda g: g, self.copy_to_group)

    def share_of_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; of its gradient, which all ranks have, each takes an equal share."""
        if self.comm.size == 1:
            return tensor

        def share(gradient: torch.Tensor) -> torch.Tensor:
            return gradient / self.comm.size

        return self._exchange(tensor, lambda x: x.view_as(x), share, share)

    def sum_with_partial_grad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; its gradients are summed too."""
        return self._exchange(
            tensor,
            lambda x: _all_reduce(x, self.comm),
            lambda g: _all_reduce(g, self.comm),
            self.sum_with_partial_grad,
        )

    def gather_from_group(self, tensor: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Return the full tensor of a split one; every rank computes the same from it."""
        return self._exchange(
            tensor,
            lambda x: _all_gather(x, pieces, self.comm),
            lambda g: self.slice_with_partial_grad(g, pieces),
            lambda g: self.scatter_to_group(g, pieces),
        )

    def gather_with_partial_grad(self, tensor: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Return the full tensor of a split one; ranks compute different things from it, so gradients are added up."""
        return self._exchange(
            tensor,
            lambda x: _all_gather(x, pieces, self.comm),
            lambda g: _reduce_scatter(g, pieces, self.comm),
            lambda g: self.reduce_scatter_to_group(g, pieces),
        )

    def reduce_scatter_to_group(self, tensor: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Return this rank's piece of the sum over the ranks."""
        return self._exchange(
            tensor,
            lambda x: _reduce_scatter(x, pieces, self.comm),
            lambda g: _all_gather(g, pieces, self.comm),
            lambda g: self.gather_with_partial_grad(g, pieces),
        )

    def scatter_to_group(self, tensor: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Return this rank's piece of a tensor that all ranks have."""
        return self._exchange(
            tensor,
            lambda x: self.slice_with_partial_grad(x, pieces),
            lambda g: _all_gather(g, pieces, self.comm),
            lambda g: self.gather_from_group(g, pieces),
        )

    def slice_with_partial_grad(self, tensor: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Return this rank's piece of a tensor whose gradients are partial."""
        return take_piece(tensor, pieces, self.comm.rank, self.comm.size)

    @staticmethod
    def _exchange(
        tensor: torch.Tensor, forth: Callable[..., Any], back: Callable[..., object], inverse: Callable[..., object]
    ) -> torch.Tensor:
        """Run `forth`; in the backward pass run `back`, or, where that is differentiated too, `inverse`."""
        if tensor.requires_grad and torch.is_grad_enabled():
            result: torch.Tensor = _Exchange.apply(tensor, forth, back, inverse)  # type: ignore[no-untyped-call]
            return result
        result = forth(tensor)
        return result

    def split_embedding(
        self, weight: torch.Tensor, indices: torch.Tensor, rows: int, padding: int = -1
    ) -> torch.Tensor:
        """Look up rows of a table whose rows are split over the ranks.

        Returns:
            (*indices.shape, columns): this rank's rows, zeros for those of others; the sum over ranks is the result.
        """
        start, stop = chunk_range(rows, self.comm.rank, self.comm.size)
        is_local = (indices >= start) & (indices < stop)
        # Row 0 stands in for other ranks' rows. Its vector is replaced by zeros below, and with it its gradient.
        local_indices = torch.where(is_local, indices - start, 0)
        vectors = torch.nn.functional.embedding(local_indices, weight)
        if 0 <= padding < rows:  # its row gets no gradient
            vectors = torch.where((indices == padding).unsqueeze(-1), vectors.detach(), vectors)
        return torch.where(is_local.unsqueeze(-1), vectors, vectors.new_zeros(()))

    def split_cross_entropy(
        self, scores: torch.Tensor, labels: torch.Tensor, classes: int, reduction: int, ignored: int
    ) -> torch.Tensor:
        """Compute the cross entropy of `scores`, (rows, classes of this rank); the result is the same on every rank.

        Args:
            scores: the scores of this rank's classes, (rows, classes of this rank).
            labels: the labels among all classes, (rows,).
            classes: the number of classes on all ranks.
            reduction: torch's number of the reduction: 0 none, 1 mean, 2 sum.
            ignored: the label whose rows do not count.
        """
        losses: torch.Tensor = _SplitCrossEntropy.apply(scores, labels, classes, ignored, self.comm)  # type: ignore[no-untyped-call]
        if reduction == 0:  # torch's numbers: none, mean, sum
            return losses
        total = losses.sum()
        if reduction == 1:
            # torch's mean is over the labels that are not ignored; NaN where there are none, as in torch.
            return total / (labels != ignored).sum()
        return total


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy over split classes by two small sums instead of all scores (Shoeybi et al. 2019, section 3)."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, labels: torch.Tensor, classes: int, ignored: int, comm: AxisComm
    ) -> torch.Tensor:
        start, stop = chunk_range(classes, comm.rank, comm.size)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if is_dry(scores):
            largest = wide.new_empty(len(labels))  # (rows,)
            sums = wide.new_empty(2, len(labels))
            comm.ledger.add("all_reduce", comm.axis, largest.nbytes)
            comm.ledger.add("all_reduce", comm.axis, sums.nbytes)
            ctx.save_for_backward(wide, labels, labels)
            ctx.dtype, ctx.counts = scores.dtype, labels
            return wide.new_empty(len(labels))
        largest = wide.amax(1) if wide.shape[1] else wide.new_full((len(labels),), -torch.inf)
        # The same shift on all ranks: exponentials of different shifts can't be added.
        comm.all_reduce(largest, "max")
        is_local = (labels >= start) & (labels < stop)
        local_labels = torch.where(is_local, labels - start, 0)
        exponentials = torch.exp(wide - largest[:, None])
        if wide.shape[1]:
            label_scores = wide.gather(1, local_labels[:, None])[:, 0] - largest
        else:  # more ranks than classes: this one has none
            label_scores = torch.zeros_like(largest)
        # (2, rows): the softmax's denominator, and the label's score, which one rank has. One message for both.
        sums = torch.stack([exponentials.sum(1), torch.where(is_local, label_scores, 0.0)])
        comm.all_reduce(sums)
        counts = labels != ignored
        # Saved as this rank's part of the softmax, (rows, classes here): the scores themselves are not needed.
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local_labels, is_local)
        ctx.dtype, ctx.counts = scores.dtype, counts
        return torch.where(counts, sums[0].log() - sums[1], 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise WorkloadError(
                "can't take the gradient of a gradient",
                "the cross entropy inside the model is split over classes, and can be differentiated once only",
                "compute the loss outside of the model, or write replicate or shard in place of tensor",
            )
        probabilities, local_labels, is_local = ctx.saved_tensors
        (gradient,) = gradients
        if is_dry(gradient):
            return probabilities.to(ctx.dtype), None, None, None, None
        result = probabilities.clone()
        if result.shape[1]:
            # softmax - one_hot(label); nothing is subtracted where another rank has the label.
            result.scatter_add_(1, local_labels[:, None], -is_local.to(result.dtype)[:, None])
        result *= (gradient * ctx.counts)[:, None]
        return result.to(ctx.dtype), None, None, None, None


def split_dropout(
    tensor: torch.Tensor, share: float, is_training: bool, shape: tuple[int, ...], *places: tuple[Pieces, int, int]
) -> torch.Tensor:
    """Apply dropout to a split tensor: draw for the full `shape`, as one rank would, and use this rank's piece.

    `places` are of the axes that split it, one after another: each takes its piece of what the one before left.
    """
    if not is_training or share == 0:
        return tensor
    if share == 1:
        return tensor * 0
    # Every rank draws all of it from the same stream, so the stream also stays equal on all ranks.
    noise = torch.empty(shape, dtype=tensor.dtype, device=tensor.device).bernoulli_(1 - share).div_(1 - share)
    for pieces, part, parts in places:
        noise = take_piece(noise, pieces, part, parts)
    return tensor * noise


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Compute the weights of `scaled_dot_product_attention` before dropout: (..., queries, keys).

    torch's fused attention draws its mask inside, where no rank can draw for the heads of others.
    """
    scores = query @ _for_every_head(key, query).transpose(-2, -1)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = scores * scale
    if is_causal:
        causal_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal_mask, float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    # As torch's own attention: rows whose every key is masked become zeros, where a plain softmax gives NaN.
    return torch.ops.aten._safe_softmax.default(scores, -1)  # type: ignore[no-any-return]


def attention_values(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the values weighted by attention weights: (..., queries, width)."""
    return weights.to(value.dtype) @ _for_every_head(value, weights)


def _for_every_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values, (..., groups, keys, width), for each head of their group (grouped-query attention)."""
    if tensor.dim() < 3 or tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)
