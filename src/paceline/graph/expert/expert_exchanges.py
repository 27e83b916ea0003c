"""Bring rows to the ranks that hold their experts, and back: the exchanges of the `expert` axis.

Rows come sorted by expert, and experts are spread in their order, so what a rank sends to another one lies together.
No row is dropped and none is padded: the ranks first tell each other how many rows come for each expert (GShard,
Lepikhin et al. 2020, has the exchange; MegaBlocks, Gale et al. 2022, has it without a capacity).

How many rows a rank gets depends on the router. The ledger counts both ways the rows of a rank's own tokens, which
don't. On fake tensors, which have no counts, each rank gets as many rows as it sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from paceline.comm.collectives import AxisComm
from paceline.graph.context.context_exchanges import SequenceExchanges
from paceline.nouns.shard_spec import chunk_range
from paceline.torch_private.operations import FakeTensor

Counts = Sequence[Sequence[int]]  # rows by rank and expert


class ExpertLoads:
    """How many rows of this rank's tokens have gone to each expert, by layer, while it counts.

    Where activations are recomputed rows are counted twice, all of them: only their shares have a meaning.
    """

    def __init__(self) -> None:
        self.is_counting = False
        self.rows: dict[tuple[str, str], torch.Tensor] = {}  # by layer and kind of device

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False

    def note(self, layer: str, rows: torch.Tensor) -> None:
        """Add rows, (experts,)."""
        if self.is_counting:
            key = layer, rows.device.type
            self.rows[key] = self.rows[key] + rows if key in self.rows else rows.clone()

    def take(self, layer: str, experts: int) -> torch.Tensor:
        """Return the rows of a layer, (experts,) on the CPU, and count from 0 again."""
        total = torch.zeros(experts, dtype=torch.int64)
        for key in [key for key in self.rows if key[0] == layer]:
            total += self.rows.pop(key).cpu()
        return total


@dataclass(frozen=True, slots=True)
class ExpertExchanges(SequenceExchanges):
    """The exchanges of the `expert` axis, whose gradients are partial; those of an expert's own weights are whole."""

    placement_key: ClassVar[str] = "lies_on_expert"
    loads: ExpertLoads = field(default_factory=ExpertLoads, compare=False)

    def count_rows(self, ends: torch.Tensor, layer: str = "") -> torch.Tensor:
        """Tell the other ranks how many rows go to each of their experts.

        Args:
            ends: (experts,), where the rows of each expert end on this rank.
            layer: whose rows they are.

        Returns:
            (2, ranks, experts of a rank), on the CPU: the rows that this rank sends to each rank's experts, and those
            that its experts get from each rank.
        """
        ranks = self.comm.size
        most = -(-ends.shape[0] // ranks)  # of a rank's experts
        sent = ends.new_zeros(ranks * most, dtype=torch.int64)
        sent[: ends.shape[0]] = torch.diff(ends, prepend=ends.new_zeros(1))
        sent = sent.view(ranks, most)
        if isinstance(ends, FakeTensor):
            self.comm.ledger.add("all_to_all", self.comm.axis, sent.nbytes)
            return torch.stack([sent, sent]).cpu()
        received = self.comm.all_to_all_sized(sent, [1] * ranks, [1] * ranks)
        counts = torch.stack([sent, received]).cpu()
        self.loads.note(layer, counts[0].reshape(-1)[: ends.shape[0]])
        return counts

    def ends_here(self, ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the ends of the rows of each of this rank's experts, once they are here: (experts of this rank,)."""
        first, last = chunk_range(ends.shape[0], self.comm.rank, self.comm.size)
        own_counts = counts[1].sum(0)[: last - first]
        return own_counts.cumsum(0).to(device=ends.device, dtype=ends.dtype)

    def dispatch(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks for this rank's experts, sorted by expert.

        Args:
            rows: (rows, ..), sorted by expert.
            counts: the result of `count_rows`.
        """
        return _Dispatch.apply(rows, counts, self.comm)  # type: ignore[no-any-return, no-untyped-call]

    def combine(self, rows: torch.Tensor, counts: torch.Tensor, count: int) -> torch.Tensor:
        """Return the results of this rank's experts to the ranks that sent rows: (`count`, ..), sorted by expert."""
        return _Combine.apply(rows, counts, count, self.comm)  # type: ignore[no-any-return, no-untyped-call]

    def select(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return of rows that every rank has those of this rank's experts."""
        first, last = self._own_rows(ends, rows.shape[0])
        return rows[first:last]

    def own_ends(self, ends: torch.Tensor, layer: str = "") -> torch.Tensor:
        """Return the ends of the rows of each of this rank's experts after `select`."""
        if self.comm.rank == 0 and not isinstance(ends, FakeTensor):  # all ranks have the rows of all
            self.loads.note(layer, torch.diff(ends.long(), prepend=ends.new_zeros(1).long()))
        first, last = chunk_range(ends.shape[0], self.comm.rank, self.comm.size)
        before = ends[first - 1] if first else 0
        return ends[first:last] - before

    def join(self, rows: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
        """Return on every rank the (`count`, ..) rows of which each has those of its own experts."""
        first, last = self._own_rows(ends, count)
        around = [0, 0] * (rows.dim() - 1) + [first, count - last]  # the last dimension is named first
        return self.sum_with_partial_grad(torch.nn.functional.pad(rows, around))

    def _own_rows(self, ends: torch.Tensor, count: int) -> tuple[int, int]:
        first, last = chunk_range(ends.shape[0], self.comm.rank, self.comm.size)
        if isinstance(ends, FakeTensor):
            return chunk_range(count, self.comm.rank, self.comm.size)
        before, end = torch.stack([ends[first - 1] if first else ends.new_zeros(()), ends[last - 1]]).tolist()
        return before, end


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: torch.Tensor, comm: AxisComm) -> torch.Tensor:
        ctx.counts, ctx.count, ctx.comm = counts, rows.shape[0], comm
        if isinstance(rows, FakeTensor):
            comm.ledger.add("all_to_all", comm.axis, rows.nbytes)
            return torch.empty_like(rows)
        sent, received = counts.tolist()
        splits = _totals(sent)
        # Rows after the last expert's are nobody's: the products leave them out.
        came = comm.all_to_all_sized(rows[: sum(splits)], splits, _totals(received), rows.nbytes)
        return came[_by_expert(received).to(rows.device)]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Combine.apply(gradients[0], ctx.counts, ctx.count, ctx.comm), None, None  # type: ignore[no-untyped-call]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: torch.Tensor, count: int, comm: AxisComm) -> torch.Tensor:
        ctx.counts, ctx.comm = counts, comm
        payload = count * rows[0:0].new_empty((1, *rows.shape[1:])).nbytes
        if isinstance(rows, FakeTensor):
            comm.ledger.add("all_to_all", comm.axis, payload)
            return rows.new_empty((count, *rows.shape[1:]))
        sent, received = counts.tolist()
        back = torch.empty_like(rows)
        back[_by_expert(received).to(rows.device)] = rows
        own_rows = comm.all_to_all_sized(back, _totals(received), _totals(sent), payload)
        if own_rows.shape[0] == count:
            return own_rows
        return torch.cat([own_rows, own_rows.new_zeros((count - own_rows.shape[0], *own_rows.shape[1:]))])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Dispatch.apply(gradients[0], ctx.counts, ctx.comm), None, None, None  # type: ignore[no-untyped-call]


def _totals(counts: Counts) -> list[int]:
    return [sum(of_rank) for of_rank in counts]


def _by_expert(received: Counts) -> torch.Tensor:
    """Return the places of rows that came by rank and then by expert, in the order of experts and then of ranks."""
    flat = list(itertools.chain.from_iterable(received))
    starts = [0, *itertools.accumulate(flat)]
    experts = len(received[0])
    places = []
    for expert in range(experts):
        for rank in range(len(received)):
            number = rank * experts + expert
            places.append(torch.arange(starts[number], starts[number + 1]))
    return torch.cat(places)
