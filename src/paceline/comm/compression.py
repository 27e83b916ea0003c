"""Sum compressed gradients: in half precision, by their largest entries, or as low-rank factors.

They trade exactness for bytes: replicas stay equal bit for bit, but no longer equal one process. What
top-k and PowerSGD leave out is kept and added to the next step's gradient (error feedback). The last
`tail` entries of a reducer's tensor are bookkeeping and always travel exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.reducer import Reducer

TOP_K_FRACTION = 0.01  # of the entries; Lin et al. 2018 (Deep Gradient Compression) go to 0.001
POWER_SGD_RANK = 4  # Vogels et al. 2019, table 3: rank 4 keeps the accuracy of their language model


@dataclass(slots=True)
class CastReducer:
    """Sums in a narrower dtype (bf16, fp16) by the reducer inside; half the bytes of float32."""

    outbox: torch.Tensor
    inside: Reducer  # of the narrow dtype, as long as `outbox`

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """The full-precision tensor."""
        return [self.outbox]

    @property
    def turn(self) -> int:
        """Always the one inbox."""
        return 0

    def begin(self) -> None:
        """Round, then start."""
        self.inside.inboxes[self.inside.turn].copy_(self.outbox)
        self.inside.begin()

    @property
    def is_scaled_first(self) -> bool:
        """True: a sum over a batch can leave float16's range, a mean does not."""
        return True

    def finish(self, scale: torch.Tensor | None) -> None:
        """Wait, then widen. The scale is already in."""
        self.inside.finish(None)
        self.outbox.copy_(self.inside.outbox)

    def state(self) -> dict[str, torch.Tensor]:
        """Return nothing: no sum depends on an earlier one."""
        return {}


@dataclass(slots=True)
class TopKReducer:
    """Sums the largest entries of each rank, by all_gather of indices and values, with error feedback.

    Source: Stich, Cordonnier and Jaggi 2018, Sparsified SGD with memory.
    """

    comm: AxisComm
    outbox: torch.Tensor
    tail: int
    error: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        # (entries without the tail,). As large as the bucket: the memory that error feedback costs.
        self.error = torch.zeros_like(self.outbox[: self.outbox.numel() - self.tail])

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """The full tensor."""
        return [self.outbox]

    @property
    def turn(self) -> int:
        """Always the one inbox."""
        return 0

    def begin(self) -> None:
        """Nothing can start before all gradients are here."""

    @property
    def is_scaled_first(self) -> bool:
        """True: what one step leaves out is sent in the next, so both must have the same scale."""
        return True

    def finish(self, scale: torch.Tensor | None) -> None:
        """Exchange the largest entries; keep the rest for the next step."""
        body = self.outbox[: self.error.numel()]
        self.error += body
        # At least one of a small tensor, so that its error does not grow for ever.
        count = math.ceil(body.numel() * TOP_K_FRACTION)
        places = self.error.abs().topk(count).indices.sort().values
        values = self.error[places]
        # What is sent is not left: the rest stays for the next step.
        self.error[places] = 0
        # int32: half the bytes of torch's int64 indices. Buckets have far fewer than 2^31 entries.
        places_by_rank = self.comm.all_gather(places.to(torch.int32))
        values_by_rank = self.comm.all_gather(values)
        body.zero_()
        for rank_places, rank_values in zip(places_by_rank, values_by_rank, strict=True):
            # In rank order, so every rank adds up to the same bits and replicas stay equal.
            body.index_add_(0, rank_places.to(torch.int64), rank_values)
        _exact(self.comm, [self.outbox[self.error.numel() :]])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the error that was not sent yet, by entry."""
        return {"error": self.error}


@dataclass(slots=True)
class PowerSGDReducer:
    """Sums each matrix as two thin factors, warm-started, with error feedback; vectors travel exactly.

    Source: Vogels, Karimireddy and Jaggi 2019, PowerSGD: Practical low-rank gradient compression.
    """

    comm: AxisComm
    outbox: torch.Tensor
    shapes: Sequence[torch.Size]
    error: torch.Tensor = field(init=False)
    bases: list[torch.Tensor] = field(init=False)  # Q of each matrix, (columns, rank)
    places: list[tuple[int, torch.Size]] = field(init=False)  # of each matrix: offset, shape as 2-D

    def __post_init__(self) -> None:
        self.error = torch.zeros_like(self.outbox)
        self.bases = []
        self.places = []
        offset = 0
        random = torch.Generator().manual_seed(0)  # the same bases on every rank
        for shape in self.shapes:
            rows, columns = 1, 1  # a vector, which is sent as it is
            if len(shape) > 1:
                rows = shape[0]
                columns = shape.numel() // max(rows, 1)
            # Two factors of this rank must be smaller than the matrix; otherwise it is sent as it is.
            if POWER_SGD_RANK * (rows + columns) < rows * columns:
                self.places.append((offset, torch.Size((rows, columns))))
                # Drawn in float32 and then cast: the same numbers whatever the dtype.
                basis = torch.randn(columns, POWER_SGD_RANK, generator=random, dtype=torch.float32)
                self.bases.append(basis.to(self.outbox.device, self.outbox.dtype))
            offset += shape.numel()

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """The full tensor."""
        return [self.outbox]

    @property
    def turn(self) -> int:
        """Always the one inbox."""
        return 0

    def begin(self) -> None:
        """Nothing can start before all gradients are here."""

    @property
    def is_scaled_first(self) -> bool:
        """True: what one step leaves out is sent in the next, so both must have the same scale."""
        return True

    def finish(self, scale: torch.Tensor | None) -> None:
        """Take one step of subspace iteration on every matrix at once: two all_reduces of thin factors."""
        matrices = self._matrices(self.outbox)
        errors = self._matrices(self.error)
        for matrix, error in zip(matrices, errors, strict=True):
            error += matrix  # from here `error` holds what should be sent
        lefts = [error @ basis for error, basis in zip(errors, self.bases, strict=True)]
        # Vectors and bookkeeping go in the same call: one latency instead of two.
        _exact(self.comm, [*lefts, *self._uncovered()])
        # (rows, rank). The factors are sums, hence equal on all ranks, and so are their bases.
        lefts = [torch.linalg.qr(basis)[0] for basis in lefts]
        # (columns, rank)
        rights = [error.T @ basis for error, basis in zip(errors, lefts, strict=True)]
        local_rights = [right.clone() for right in rights]  # `_exact` sums in place
        _exact(self.comm, rights)
        for number, (matrix, error, basis) in enumerate(zip(matrices, errors, lefts, strict=True)):
            # Minus this rank's own part of the product: what the low rank could not express stays for the next step.
            error -= basis @ local_rights[number].T
            torch.matmul(basis, rights[number].T, out=matrix)
            # Warm start (Vogels et al.): one iteration a step is enough, as it begins with the last step's factor.
            self.bases[number].copy_(rights[number])

    def _matrices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices in a flat tensor, as views."""
        return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in self.places]

    def _uncovered(self) -> list[torch.Tensor]:
        """Return the stretches of the outbox that no matrix covers."""
        stretches = []
        end = 0  # of the matrix before
        for offset, shape in self.places:
            if end < offset:
                stretches.append(self.outbox[end:offset])
            end = offset + shape.numel()
        if end < self.outbox.numel():
            stretches.append(self.outbox[end:])
        return stretches

    def state(self) -> dict[str, torch.Tensor]:
        """Return the error not sent yet and the warm start."""
        state = {"error": self.error}
        for number, basis in enumerate(self.bases):
            state[f"basis{number}"] = basis
        return state


def _exact(comm: AxisComm, tensors: list[torch.Tensor]) -> None:
    """Sum several tensors in place by one all_reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    comm.all_reduce(flat)
    sums = flat.split([tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.view_as(tensor))
