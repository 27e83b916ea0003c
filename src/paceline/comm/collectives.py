"""Run collectives and point-to-point messages on one mesh axis, and enter each in the ledger.

A rank talks only through an `AxisComm`. An axis of one rank sends nothing and enters nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from paceline.comm.ledger import Ledger
from paceline.comm.step_times import BUBBLE, COMMUNICATION, Timed
from paceline.nouns.errors import CollectiveError, PeerLostError, UsageError
from paceline.nouns.mesh import AXES, Mesh

OPS = ("sum", "mean", "min", "max", "product")
# A mean is a sum that is divided: torch's ReduceOp.AVG is only for NCCL.
_REDUCE = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "product": dist.ReduceOp.PRODUCT}
_SUM = dist.AllreduceOptions()  # the default
_EXCHANGE_TAG = 1 << 21  # above those of a pipeline's messages
# What Gloo and NCCL say when the other end of a connection has gone.
# torch raises RuntimeError, or its DistBackendError, with no code: only the text tells a lost peer from other failures.
_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "remote process exited", "aborted")


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result stands in the tensor."""


class Message(NamedTuple):
    """What tells a message from others on its way: the other rank, and its tag."""

    peer: int
    tag: int


class Completed:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class _Work:
    """A collective of torch that is under way; its errors name the collective and the axis."""

    work: dist.Work
    axis: str
    collective: str = "all_reduce"
    tensor: torch.Tensor | None = None  # kept alive while it is sent
    message: Message | None = None

    def wait(self) -> None:
        with named_failure(self.collective, self.axis, self.message, waits=True):
            self.work.wait()


@dataclass(slots=True)
class _Works:
    """Several that are under way."""

    works: list[_Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class _Exchange:
    """Messages between each two ranks of an axis, in place of an all_reduce."""

    works: list[dist.Work]
    axis: str

    def wait(self) -> None:
        with named_failure("all_reduce", self.axis, waits=True):
            for work in self.works:
                work.wait()


@dataclass(slots=True)
class AxisComm:
    """This rank's place on one axis, and the process group of its peers there.

    `rank` is the index on the axis, `peers` the world's ranks in axis order; `root` arguments are indices
    on the axis.
    """

    axis: str
    rank: int
    peers: tuple[int, ...]
    group: dist.ProcessGroup | None
    ledger: Ledger
    group_ranks: list[int] = field(default_factory=list)  # of the peers, once they are asked for
    size: int = field(init=False)  # ranks on the axis

    def __post_init__(self) -> None:
        self.size = len(self.peers)

    def aside(self) -> AxisComm:
        """Return the same axis with a ledger of its own, for checks: a plan's predicted traffic is that of training."""
        return replace(self, ledger=Ledger())

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Replace `tensor` (any shape, contiguous) on every rank by its sum, mean, min, max or product."""
        if self.size > 1:
            self._enter("all_reduce", tensor)
            with named_failure("all_reduce", self.axis):
                dist.all_reduce(tensor, _REDUCE.get(op, dist.ReduceOp.SUM), group=self.group)
        if op == "mean":
            tensor /= self.size

    def begin_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place; it may be touched again after `wait`."""
        if self.size == 1:
            return Completed()
        self._enter("all_reduce", tensor)
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        with named_failure("all_reduce", self.axis):
            work = self._opened().allreduce([sent], _SUM)
        return _Work(work, self.axis)

    def begin_exchange(self, rows: Sequence[torch.Tensor]) -> Pending:
        """Start to send `rows[rank]` to every other rank, and to fill the other rows with theirs; all of one shape.

        For a few numbers of the host: a message to each rank arrives in a third of an all_reduce's time, as Gloo takes
        that through threads of its own (measured with 2 and 8 ranks). The ledger counts the all_reduce that it
        stands for.
        """
        if self.size == 1:
            return Completed()
        self._enter("all_reduce", rows[self.rank])
        group = self._opened()
        if not self.group_ranks:
            self.group_ranks = [dist.get_group_rank(group, peer) for peer in self.peers]
        works = []
        with named_failure("all_reduce", self.axis):
            # Receives first: Gloo sends once the other rank receives.
            for index, group_rank in enumerate(self.group_ranks):
                if index != self.rank:
                    works.append(group.recv([rows[index]], group_rank, _EXCHANGE_TAG))
            for index, group_rank in enumerate(self.group_ranks):
                if index != self.rank:
                    works.append(group.send([rows[self.rank]], group_rank, _EXCHANGE_TAG))
        return _Exchange(works, self.axis)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor`, in axis order. First dims may differ, the others must be equal."""
        if self.size == 1:
            return [tensor]
        # Lengths first: how much to receive from each rank is known to nobody else.
        rows = self._gather_even(torch.tensor([tensor.shape[0]], dtype=torch.int64, device=tensor.device))
        lengths = [int(row) for row in rows]  # by rank, in rows
        padded = tensor.contiguous()
        if max(lengths) > tensor.shape[0]:  # torch's all_gather wants equal shapes
            padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
            padded[: tensor.shape[0]] = tensor
        parts = self._gather_even(padded)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in axis order."""
        rows = self.all_gather(torch.tensor(list(text.encode()), dtype=torch.uint8))
        return [bytes(row.tolist()).decode() for row in rows]

    def all_gather_along(self, tensor: torch.Tensor, lengths: Sequence[int], dim: int) -> list[torch.Tensor]:
        """Return every rank's `tensor` by one call, as all ranks know their sizes along `dim`, the `lengths`."""
        longest = max(lengths)
        padded = tensor.contiguous()
        if tensor.shape[dim] < longest:
            shape = list(tensor.shape)
            shape[dim] = longest - tensor.shape[dim]
            padded = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        # Counted without the padding: the plan predicts what a rank has to send.
        self._enter("all_gather", tensor)
        with named_failure("all_gather", self.axis):
            dist.all_gather(parts, padded, group=self.group)
        return [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]

    def reduce_scatter_list(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's piece of the sum, shaped as `parts[rank]`; `parts[i]` is added for rank i."""
        # Pieces in the order of ranks, flat, as all_to_all_single cuts dim 0.
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._enter("reduce_scatter", flat)
        numel = parts[self.rank].numel()
        with named_failure("reduce_scatter", self.axis):
            received = self._exchange(flat, [part.numel() for part in parts], [numel] * self.size)
        # Summed in rank order: the same bits on every run. dtype: torch would widen sums of integers.
        return received.view(self.size, *parts[self.rank].shape).sum(0, dtype=flat.dtype)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace `tensor` by that of the rank with index `root`, in place."""
        if self.size > 1:
            self._enter("broadcast", tensor)
            with named_failure("broadcast", self.axis):
                dist.broadcast(tensor, self.peers[root], group=self.group)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Replace `tensor` by the sum on the rank with index `root`; on the others its values are undefined."""
        if self.size > 1:
            self._enter("reduce", tensor)
            with named_failure("reduce", self.axis):
                dist.reduce(tensor, self.peers[root], group=self.group)

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return this rank's rows of the sum or mean of `tensor`, (rows, ...); the first ranks take the rest."""
        if self.size == 1:
            return tensor.clone()
        rows = split_rows(tensor.shape[0], self.size)
        self._enter("reduce_scatter", tensor)
        with named_failure("reduce_scatter", self.axis):
            parts = self._exchange(tensor, rows, [rows[self.rank]] * self.size)
        total = parts.view(self.size, rows[self.rank], *tensor.shape[1:]).sum(0, dtype=tensor.dtype)
        if op == "mean":
            return total / self.size
        return total

    def all_to_all(self, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Send `splits[i]` rows to rank i; return the rows received, in rank order, and how many from each."""
        if self.size == 1:
            return tensor.clone(), list(splits)
        send_counts = torch.tensor(list(splits), dtype=torch.int64, device=tensor.device)
        self._enter("all_to_all", send_counts)
        self._enter("all_to_all", tensor)
        with named_failure("all_to_all", self.axis):
            # First how many rows come from each rank, then the rows.
            receive_counts = self._exchange(send_counts, [1] * self.size, [1] * self.size).tolist()
            return self._exchange(tensor, list(splits), receive_counts), receive_counts

    def all_to_all_sized(
        self, tensor: torch.Tensor, send: Sequence[int], receive: Sequence[int], payload_bytes: int | None = None
    ) -> torch.Tensor:
        """Send `send[i]` rows to rank i; return the rows received, in rank order: `receive[i]` come from rank i.

        The ledger counts `payload_bytes`, where how much is sent depends on values and can't be predicted.
        """
        self.ledger.add("all_to_all", self.axis, tensor.nbytes if payload_bytes is None else payload_bytes)
        with named_failure("all_to_all", self.axis):
            return self._exchange(tensor, list(send), list(receive))

    def begin_send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        """Start sending `tensor` to the rank with index `to`; it must not change before `wait`."""
        self._enter("send", tensor)
        message = Message(self.peers[to], tag)
        with named_failure("send", self.axis, message):
            work = dist.isend(tensor, self.peers[to], group=self.group, tag=tag)
        # The handle keeps the tensor: nobody else may hold it until it has been sent.
        return _Work(work, self.axis, "send", tensor, message)  # type: ignore[arg-type]

    def begin_shift(self, tensor: torch.Tensor, to: int, into: torch.Tensor, source: int) -> Pending:
        """Start to send `tensor` to the rank with index `to` and to fill `into` with what comes from `source`.

        In one call: of NCCL's sends and receives between the same ranks, those that aren't grouped wait for each other.
        """
        self._enter("send", tensor)
        with named_failure("send", self.axis, Message(self.peers[to], 0)):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, self.peers[to], self.group),
                    dist.P2POp(dist.irecv, into, self.peers[source], self.group),
                ]
            )
        return _Works([_Work(work, self.axis, "send", tensor, Message(self.peers[source], 0)) for work in works])

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fill `tensor` with what the rank with index `source` sent under `tag`."""
        with named_failure("receive", self.axis, Message(self.peers[source], tag), waits=True):
            dist.recv(tensor, self.peers[source], group=self.group, tag=tag)

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start to receive what the rank with index `source` sends under `tag`; it stands in `tensor` after `wait`."""
        message = Message(self.peers[source], tag)
        with named_failure("receive", self.axis):
            work = dist.irecv(tensor, message.peer, group=self.group, tag=tag)
        return _Work(work, self.axis, "receive", tensor, message)  # type: ignore[arg-type]

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            self.ledger.add("barrier", self.axis, 0)
            with named_failure("barrier", self.axis):
                dist.barrier(group=self.group)

    def backend(self) -> str:
        """Return the name of what carries the bytes; "fake" where nothing is sent."""
        return str(dist.get_backend(self.group)) if dist.is_initialized() else "fake"

    def _opened(self) -> dist.ProcessGroup:
        """Return the process group, for calls of a step's hot path.

        A call of its methods takes a third of the host's time of one of `torch.distributed.all_reduce`, which looks the
        group up and checks what is known here (80 against 240 microseconds between two passes of a small model).
        """
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def _enter(self, collective: str, tensor: torch.Tensor) -> None:
        self.ledger.add(collective, self.axis, tensor.nbytes)

    def _gather_even(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._enter("all_gather", tensor)
        with named_failure("all_gather", self.axis):
            dist.all_gather(parts, tensor, group=self.group)
        return parts

    def _exchange(self, tensor: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        dist.all_to_all_single(out, tensor.contiguous(), receive, send, group=self.group)
        return out


def split_rows(rows: int, parts: int) -> list[int]:
    """Split `rows` over `parts`, as evenly as can be; the first parts take the rest (as Horovod splits)."""
    share, remainder = divmod(rows, parts)
    return [share + 1] * remainder + [share] * (parts - remainder)


def check_op(op: str, choices: Sequence[str] = OPS) -> None:
    """Raise UsageError unless `op` is one of `choices`."""
    if op not in choices:
        name = str(op).rpartition(".")[2].lower()  # torch's own are such as ReduceOp.SUM
        synonym = _SYNONYMS.get(name, name)
        fix = f"write {synonym!r}" if synonym in choices else "write one of these"
        raise UsageError(f"the reduction {op!r} is unknown", f"the choices are {', '.join(choices)}", fix)


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise UsageError if `op` is none of this dtype: a mean of integers, or what no transport computes."""
    if dtype not in _REDUCED:
        real = "float" if dtype.is_floating_point or op == "mean" else "int64"
        accepted = "complex64" if dtype.is_complex else real
        raise UsageError(
            "a reduction over ranks needs a dtype that Gloo and NCCL add up",
            f"the dtype is {dtype}",
            f"convert the tensor first, as with tensor.to(torch.{accepted})",
        )
    if dtype.is_complex and op not in ("sum", "mean"):
        raise UsageError(
            f"the reduction {op} over ranks needs real numbers",
            f"the dtype is {dtype}, which has sums and means alone",
            "reduce tensor.abs(), or torch.view_as_real(tensor), or gather: all_gather(tensor.unsqueeze(0)).prod(0)",
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            "a mean over ranks needs a tensor of a floating-point dtype",
            f"the dtype is {dtype}",
            "convert the tensor first, as with tensor.float(), or take the sum",
        )


_REDUCED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
)
# Names of the same in other libraries. What is only spelt alike is not advised: a median is no mean.
_SYNONYMS = {
    "average": "mean", "avg": "mean", "total": "sum", "add": "sum", "minimum": "min", "maximum": "max",
    "prod": "product", "mul": "product",
}  # fmt: skip


def open_axes(mesh: Mesh, rank: int, ledger: Ledger) -> dict[str, AxisComm]:
    """Open the process groups of `mesh` for this rank. Every rank must call this, in the same order."""
    return {axis: _open(axis, [axis], mesh, rank, ledger) for axis in AXES}


def open_product(name: str, axes: Sequence[str], comms: dict[str, AxisComm], mesh: Mesh, rank: int) -> AxisComm:
    """Join the ranks that differ from this one on any of `axes`, by an axis that is open or by a new group.

    Every rank must call this, in the same order.
    """
    split_axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not split_axes:
        return comms[axes[0]]
    if len(split_axes) == 1:
        # The same ranks as on that axis: a second process group would only cost connections.
        return comms[split_axes[0]]
    return _open(name, split_axes, mesh, rank, comms[split_axes[0]].ledger)


def open_subset(world: AxisComm, name: str, ranks: Sequence[int]) -> AxisComm:
    """Join some ranks of `world` by connections of their own, as an axis; it is -1 on the axis that has none there.

    Every rank of `world` must call this, in the same order.
    """
    group = None
    if world.size > 1:
        with named_failure("opening the process groups", name):
            group = dist.new_group(list(ranks))
    index = ranks.index(world.rank) if world.rank in ranks else -1
    return AxisComm(name, index, tuple(ranks), group, world.ledger)


def close_subset(comm: AxisComm) -> None:
    """Close the connections that `open_subset` has opened."""
    if comm.group is not None and comm.rank >= 0 and dist.is_initialized():
        dist.destroy_process_group(comm.group)


def _open(name: str, axes: Sequence[str], mesh: Mesh, rank: int, ledger: Ledger) -> AxisComm:
    peers = mesh.peers_on(rank, axes)
    # All groups of this kind in the world: in a mesh of 2 x 3 the first axis has three, of two ranks each.
    peers_of_groups = {mesh.peers_on(member, axes) for member in range(mesh.world_size)}
    group = None  # the whole world, or only one rank
    if len(peers_of_groups) > 1 and len(peers) > 1:
        # torch wants every rank to open every group, in the same order, also those that it is not in.
        with named_failure("opening the process groups", name):  # a rank may end while the others connect
            groups = {members: dist.new_group(list(members)) for members in sorted(peers_of_groups)}
        group = groups[peers]
    return AxisComm(name, peers.index(rank), peers, group, ledger)


@contextmanager
def named_failure(collective: str, axis: str, message: Message | None = None, waits: bool = False) -> Iterator[None]:
    """Replace the transport's error by one that names the collective and says whether a peer is gone.

    The time inside is that of communication on the axis; where a stage of a pipeline waits, it is the bubble.

    Args:
        collective, axis: what is called, on which axis.
        message: what is sent or received.
        waits: for its end, not its begin.

    Raises:
        PeerLostError: a peer's connection is closed.
        CollectiveError: the transport failed otherwise.
    """
    kind = f"{COMMUNICATION} {axis}"
    if waits and message is not None and axis == "pipeline":
        kind = BUBBLE
    peer, tag = message or (-1, -1)
    try:
        with Timed(kind, collective, peer, tag):
            yield
    except RuntimeError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        # A peer's death is the consequence of another failure; the supervisor looks for the first that is not one.
        if any(mark in text.lower() for mark in _LOST):
            raise PeerLostError(
                f"{collective} on the axis {axis} waits for its peers",
                f"one of them has gone ({text})",
                "look for the rank that failed first; start again with --resume",
            ) from error
        raise CollectiveError(
            f"{collective} on the axis {axis} should run on all its ranks",
            f"the transport failed: {text}",
            "check that every rank makes the same calls with the same shapes and dtypes",
        ) from error
