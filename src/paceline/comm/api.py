"""The functions of MPI on all ranks: `paceline.init`, `paceline.rank`, `paceline.all_reduce` and the others.

They are Horovod's, spelled as torch spells them; the names without underscores are Horovod's and MPI's. Tensors are not
changed in place: each call returns its result. Every rank must make the same calls in the same order, with equal shapes
but for first dims. Gradients flow only through a call with `grad=True`: `comm/api_gradients.py`.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm import api_gradients
from paceline.comm.api_gradients import check_gradient
from paceline.comm.collectives import AxisComm, check_dtype, check_op, split_rows
from paceline.comm.dtypes import fault_of
from paceline.comm.ledger import Ledger
from paceline.comm.process_group import COORDINATOR, RankInfo, close_world, find_rank_info, open_world
from paceline.nouns import arguments
from paceline.nouns.errors import UsageError
from paceline.nouns.parts import shown
from paceline.rendezvous.launcher_env import PROCESS


@dataclass(slots=True)
class World:
    """All ranks as one axis, named "world" in the ledger.

    Attributes:
        rank_info: the numbers of this rank and of its host.
        comm: the axis of all ranks.
        has_servers: whether the ranks are workers of parameter servers: there is nothing between them.
        launcher_info: the place that the environment names, without a computed `cross_rank`.
        process: the id of the process that joined; one that is forked from it has other connections: none.
        has_copies: a loop's ranks of `tensor` see the same samples: sums over all ranks would count these twice.
        closers: functions to call before the process group is closed.
    """

    rank_info: RankInfo
    comm: AxisComm
    has_servers: bool = False
    launcher_info: RankInfo | None = None
    process: int = field(default_factory=os.getpid)
    has_copies: bool = False
    closers: list[Callable[[], None]] = field(default_factory=list)


_world: list[World] = []  # empty before init; a list, so that no function needs `global`


def init() -> None:
    """Join the ranks that the launcher started; without a launcher, be a world of one. Calling it again does nothing.

    The rank and the number of ranks come from the launcher's variables: those of `paceline run`, torchrun, MPI, Slurm
    and others. `paceline.distribute` calls it. At the end of the process `shutdown` is called.

    A process that is forked afterwards joins anew where its environment names another place, as a notebook's
    launcher sets it; with the same environment (a loader's worker) it keeps the place of the process it is forked from.

    Raises:
        UsageError: the launcher's variables contradict each other, or this process is forked from a rank of several.
        PeerLostError: not all ranks came.

    Examples:
        >>> paceline.init()
        >>> if paceline.rank() == 0:
        ...     print("ranks:", paceline.size())
        ranks: 1
    """
    if _world and not _may_join_anew():
        return
    if os.environ.get(PROCESS, str(os.getpid())) != str(os.getpid()):
        raise UsageError(
            "this process can't take part in training",
            f"a rank's file has started it, and it has that rank's variables: there would be two ranks "
            f"{os.environ.get('PACELINE_RANK')}",
            "leave torch.multiprocessing.spawn out: `paceline run -n N` starts the ranks",
        )
    launcher_info = find_rank_info(os.environ)
    rank_info = launcher_info
    has_servers = COORDINATOR in os.environ
    if has_servers:
        # Size 1: workers come and go, so there is no process group of them.
        comm = AxisComm("world", 0, (rank_info.rank,), None, Ledger())
    else:
        open_world(rank_info)
        comm = AxisComm("world", rank_info.rank, tuple(range(rank_info.size)), None, Ledger())
        if rank_info.is_cross_computed:
            rank_info = _with_cross_rank(rank_info, comm)
    _world.append(World(rank_info, comm, has_servers, launcher_info))
    atexit.register(shutdown)


def _is_inherited() -> bool:
    """True if this process is forked from the one that joined."""
    # A process id in the record tells a fork from the process that joined: the record itself is copied by fork.
    return _world[0].process != os.getpid()


def _is_elsewhere() -> bool:
    """True if this process is forked from the one that joined, and its environment names another place."""
    return _is_inherited() and find_rank_info(os.environ) != _world[0].launcher_info


def _may_join_anew() -> bool:
    """Forget the world that this process has from the one it is forked from, if its environment names another place.

    Raises:
        UsageError: that world has several ranks.
    """
    if not _is_elsewhere():
        return False
    check_own_process()
    _world.clear()
    return True


def check_own_process() -> None:
    """Raise UsageError in a process that is forked from a rank of several: the connections are that rank's."""
    if not _world or not _is_inherited():
        return
    rank_info = _world[0].rank_info
    if rank_info.size > 1 or _world[0].has_servers:
        raise UsageError(
            "this process can't take part in training",
            f"it is forked from rank {rank_info.rank} of {rank_info.size}, whose connections can't be shared",
            "make the call in that rank's own process; start other processes before paceline.init() and distribute()",
        )


def _with_cross_rank(rank_info: RankInfo, comm: AxisComm) -> RankInfo:
    """Number the hosts in the order of their lowest ranks. What this sends is no part of a job's ledger."""
    name = hashlib.sha256(socket.gethostname().encode()).digest()
    # A hash of 64 bits, as collectives send numbers and names have different lengths.
    number = int.from_bytes(name[:8], "little", signed=True)
    rows = AxisComm("hosts", comm.rank, comm.peers, None, Ledger()).all_gather(torch.tensor([number]))
    hosts = list(dict.fromkeys(int(row) for row in rows))  # each once, in the order of ranks
    return dataclasses.replace(rank_info, cross_rank=hosts.index(number))


def shutdown() -> None:
    """Leave the ranks. `init` may follow only in a world of one.

    Examples:
        >>> paceline.init()
        >>> paceline.shutdown()
        >>> paceline.is_initialized()
        False
    """
    if _world:
        if _is_inherited():
            _world.clear()
            return
        for close in list(_world[0].closers):
            close()
        _world.clear()
        close_world()


def is_initialized() -> bool:
    """Return True if `init` has been called, and `shutdown` has not.

    Returns:
        True if this process has a rank, so that `rank` and the collectives may be called.

    Examples:
        >>> def mean_over_ranks(value):
        ...     if not paceline.is_initialized():
        ...         return value
        ...     return paceline.all_reduce(value, "mean")
        >>> mean_over_ranks(torch.tensor(2.5))
        tensor(2.5000)
    """
    return bool(_world) and not _is_elsewhere()


def world() -> World:
    """Return the world that `init` joined.

    Raises:
        UsageError: `init` has not been called.
    """
    if not _world:
        raise UsageError(
            "this process has no rank", "paceline.init() has not been called", "call paceline.init() first"
        )
    if _is_elsewhere():
        raise UsageError(
            "this process has no rank",
            "paceline.init() was called before the fork, in a process with another place",
            "call paceline.init() in the forked process too",
        )
    return _world[0]


def rank() -> int:
    """Return this process's number among all ranks, from 0.

    Returns:
        0 to `size() - 1`.

    Raises:
        UsageError: `init` has not been called.

    Examples:
        Each rank takes every `size()`-th file:

        >>> paceline.init()
        >>> files = ["a.txt", "b.txt", "c.txt"]
        >>> files[paceline.rank() :: paceline.size()]
        ['a.txt', 'b.txt', 'c.txt']
    """
    return world().rank_info.rank


def size() -> int:
    """Return the number of ranks.

    Returns:
        At least 1. It does not change while this process lives: an elastic job starts its ranks again.

    Raises:
        UsageError: `init` has not been called.

    Examples:
        >>> paceline.init()
        >>> samples_per_rank = 64 // paceline.size()
        >>> samples_per_rank
        64
    """
    return world().rank_info.size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, from 0.

    Returns:
        0 to `local_size() - 1`.

    Raises:
        UsageError: `init` has not been called.

    Examples:
        One rank of each host prepares what all of them read:

        >>> import pathlib
        >>> paceline.init()
        >>> if paceline.local_rank() == 0:
        ...     _ = pathlib.Path("vocabulary.txt").write_text("the of and")
        >>> paceline.barrier()
        >>> pathlib.Path("vocabulary.txt").read_text().split()
        ['the', 'of', 'and']
    """
    return world().rank_info.local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Returns:
        At least 1. Hosts may have different numbers of ranks.

    Raises:
        UsageError: `init` has not been called.

    Examples:
        The ranks of a host share its cores:

        >>> import os
        >>> paceline.init()
        >>> torch.set_num_threads(max(1, os.cpu_count() // paceline.local_size()))
    """
    return world().rank_info.local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts, from 0.

    Returns:
        What Horovod calls `cross_rank`. Where the launcher does not say it, hosts are numbered in the order of their
        lowest ranks.

    Raises:
        UsageError: `init` has not been called.

    Examples:
        >>> paceline.init()
        >>> print(f"host-{paceline.cross_rank()}-rank-{paceline.local_rank()}.log")
        host-0-rank-0.log
    """
    return world().rank_info.cross_rank


def all_reduce(tensor: torch.Tensor, op: str = "sum", *, grad: bool = False) -> torch.Tensor:
    """Return the sum, mean, min, max or product of every rank's `tensor`, element by element.

    Args:
        tensor: any shape, the same on every rank, with one dtype.
        op: "sum", "mean", "min", "max" or "product". A mean needs a floating-point dtype.
        grad: let gradients flow through a sum or mean, as docs/collectives.md describes. The gradient of `tensor` is
            the sum, or the mean, of the gradients that the result has on each rank. Every rank must run its backward
            pass, in the same order: the others wait for a rank that does not, or take its next collective for it.

    Returns:
        A new tensor of the same shape and dtype, equal on every rank. With `grad` it requires a gradient on every rank,
        without it on none.

    Raises:
        UsageError: `op` is unknown, `op` or `grad` does not fit the dtype, `grad` does not fit `op`, `init` has not
            been called, or the ranks are workers of parameter servers.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        The accuracy over all ranks: add up the counts, then divide.

        >>> paceline.init()
        >>> counts = torch.tensor([41.0, 50.0])  # right answers and answers of this rank
        >>> right, answers = paceline.all_reduce(counts)
        >>> print(f"{right / answers:.2f}")
        0.82
    """
    check_op(op)
    if grad or op in ("sum", "product"):
        _check_copies("all_reduce")
    return reduce_over(_comm(), tensor, op, grad)


def reduce_over(comm: AxisComm, tensor: torch.Tensor, op: str, grad: bool) -> torch.Tensor:
    """Do what `all_reduce` does, over the ranks of `comm`."""
    check_op(op)
    tensor = _checked("all_reduce", tensor, grad)
    check_dtype(op, tensor.dtype)
    if grad:
        check_gradient("all_reduce", tensor, op)
        return api_gradients.all_reduce(comm, tensor, op)
    # Gloo and NCCL take contiguous tensors; the caller's tensor stays as it is.
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    comm.all_reduce(result, op)
    return result


def all_gather(tensor: torch.Tensor, *, grad: bool = False) -> torch.Tensor:
    """Return every rank's rows, joined on dim 0 in rank order; ranks may hold different numbers of rows.

    Args:
        tensor: (rows, ...), on every rank with the same dtype and the same shape but for the rows. It may have no rows.
        grad: let gradients flow, as docs/collectives.md describes. The gradient of `tensor` is the sum of the gradients
            that its rows have on each rank. Every rank must run its backward pass, in the same order: the others wait
            for a rank that does not, or take its next collective for it.

    Returns:
        A new tensor, (rows of all ranks, ...), equal on every rank. With `grad` it requires a gradient on every rank,
        without it on none.

    Raises:
        UsageError: `tensor` is a scalar, it has a dtype without gradients and `grad` is set, `init` has not been
            called, or the ranks are workers of parameter servers.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        Put predictions that each rank made for a part of the samples back in order:

        >>> paceline.init()
        >>> samples = torch.arange(5)[paceline.rank() :: paceline.size()]
        >>> predictions = samples * 10
        >>> order = paceline.all_gather(samples).argsort()
        >>> paceline.all_gather(predictions)[order].tolist()
        [0, 10, 20, 30, 40]

        Compare each sample with those of all ranks, in a loss whose gradient reaches those too:

        >>> embeddings = torch.nn.functional.normalize(torch.nn.Linear(4, 8)(x[:4]))
        >>> candidates = paceline.all_gather(embeddings, grad=True)
        >>> (embeddings @ candidates.T).logsumexp(1).sum().backward()
    """
    _check_copies("all_gather")
    return gather_over(_comm(), tensor, grad)


def gather_over(comm: AxisComm, tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    """Do what `all_gather` does, over the ranks of `comm`."""
    tensor = _checked_rows("all_gather", tensor, grad)
    if grad:
        check_gradient("all_gather", tensor)
        return api_gradients.all_gather(comm, tensor)
    return torch.cat(comm.all_gather(_carried(tensor))).view(tensor.dtype)


def broadcast(tensor: torch.Tensor, root: int = 0, *, grad: bool = False) -> torch.Tensor:
    """Return the `tensor` of rank `root`, on every rank.

    Args:
        tensor: any shape, with the same shape and dtype on every rank. Only the values of rank `root` matter.
        root: the rank that sends, 0 to `size() - 1`.
        grad: let gradients flow, as docs/collectives.md describes. The gradient of `tensor` on rank `root` is the sum
            of the gradients that the result has on each rank, and zero on the other ranks. Every rank must run its
            backward pass, in the same order: the others wait for a rank that does not, or take its next collective for
            it.

    Returns:
        A new tensor with the values of rank `root`. With `grad` it requires a gradient on every rank, without it on
        none.

    Raises:
        UsageError: there is no rank `root`, the dtype has no gradients and `grad` is set, `init` has not been called,
            or the ranks are workers of parameter servers.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        All ranks use the learning rate that rank 0 found:

        >>> paceline.init()
        >>> rate = torch.zeros(1)
        >>> if paceline.rank() == 0:
        ...     rate[0] = 0.25
        >>> paceline.broadcast(rate).item()
        0.25
    """
    tensor = _checked("broadcast", tensor, grad)
    root = arguments.whole_number("broadcast", "root", root)
    if root >= size():
        raise UsageError(f"can't broadcast from rank {root}", f"the ranks are 0 to {size() - 1}", "name one of them")
    if grad:
        _check_copies("broadcast")
        check_gradient("broadcast", tensor)
        return api_gradients.broadcast(_comm(), tensor, root)
    result = _carried(tensor).clone(memory_format=torch.contiguous_format)
    _comm().broadcast(result, root)
    return result.view(tensor.dtype)


def reduce_scatter(tensor: torch.Tensor, op: str = "sum", *, grad: bool = False) -> torch.Tensor:
    """Return this rank's rows of the sum or mean over ranks; the first `rows % size` ranks get one row more.

    Args:
        tensor: (rows, ...), the same shape and dtype on every rank.
        op: "sum" or "mean". A mean needs a floating-point dtype.
        grad: let gradients flow, as docs/collectives.md describes. The gradient of each row of `tensor` is that of its
            row in the result, which one rank has; divided by the number of ranks for a mean. Every rank must run its
            backward pass, in the same order: the others wait for a rank that does not, or take its next collective for
            it.

    Returns:
        A new tensor, (this rank's rows, ...): `rows / size` rows, rounded up on the first ranks and down on the others.
        With `grad` it requires a gradient on every rank, without it on none.

    Raises:
        UsageError: `op` is unknown, `op` or `grad` does not fit the dtype, `tensor` is a scalar, `init` has not been
            called, or the ranks are workers of parameter servers.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        Each rank updates its part of a table, with the gradient of all of them:

        >>> paceline.init()
        >>> gradient = torch.ones(6, 2)
        >>> part = paceline.reduce_scatter(gradient, "mean")
        >>> paceline.all_gather(-0.1 * part).shape
        torch.Size([6, 2])
    """
    check_op(op, ("sum", "mean"))
    tensor = _checked_rows("reduce_scatter", tensor, grad)
    check_dtype(op, tensor.dtype)
    _check_copies("reduce_scatter")
    if grad:
        check_gradient("reduce_scatter", tensor)
        return api_gradients.reduce_scatter(_comm(), tensor, op)
    return _comm().reduce_scatter(tensor.detach(), op)


def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int] | None = None, *, grad: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Send `splits[i]` rows of `tensor` to rank i, in order.

    Args:
        tensor: (rows, ...), on every rank with the same dtype and the same shape but for the rows.
        splits: one count of rows for each rank; they add up to the rows. None: every rank gets the same number.
        grad: let gradients flow, as docs/collectives.md describes. The gradient of a row of `tensor` is that of the row
            on the rank that received it. Every rank must run its backward pass, in the same order: the others wait for
            a rank that does not, or take its next collective for it.

    Returns:
        The rows received, in rank order, and how many came from each rank. With `grad` the rows require a gradient on
        every rank, without it on none.

    Raises:
        UsageError: `splits` has not one count per rank or does not add up to the rows, `tensor` is a scalar, it has a
            dtype without gradients and `grad` is set, `init` has not been called, or the ranks are workers of parameter
            servers.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        Bring each token to the rank that has its expert:

        >>> paceline.init()
        >>> experts = torch.tensor([3, 0, 2, 1])  # of this rank's tokens; expert e is on rank e % size
        >>> owners = experts % paceline.size()
        >>> splits = torch.bincount(owners, minlength=paceline.size()).tolist()
        >>> received, counts = paceline.all_to_all(experts[owners.argsort(stable=True)], splits)
        >>> bool((received % paceline.size() == paceline.rank()).all())
        True
        >>> sum(counts) == len(received)
        True
    """
    tensor = _checked_rows("all_to_all", tensor, grad)
    rows = tensor.shape[0]
    if splits is None:
        counts = split_rows(rows, size())
        is_valid = rows % size() == 0
    else:
        if isinstance(splits, str) or not isinstance(splits, Iterable):
            splits = [splits]  # the first that is no count
        counts = [arguments.whole_number("all_to_all", "splits", count) for count in splits]
        is_valid = len(counts) == size() and sum(counts) == rows and min(counts) >= 0
    if not is_valid:
        raise UsageError(
            f"all_to_all of {rows} rows over {size()} ranks needs a count of rows for each rank",
            f"splits is {splits}",
            "give one count per rank that add up to the rows",
        )
    if grad:
        _check_copies("all_to_all")
        check_gradient("all_to_all", tensor)
        return api_gradients.all_to_all(_comm(), tensor, counts)
    received, counts = _comm().all_to_all(_carried(tensor), counts)
    return received.view(tensor.dtype), counts


def barrier() -> None:
    """Wait until every rank is here.

    Raises:
        UsageError: `init` has not been called, or the ranks are workers of parameter servers.
        PeerLostError: a rank has gone.
        CollectiveError: the transport failed.

    Examples:
        Rank 0 writes a file that all ranks read:

        >>> import pathlib
        >>> paceline.init()
        >>> if paceline.rank() == 0:
        ...     _ = pathlib.Path("labels.txt").write_text("cat dog")
        >>> paceline.barrier()
        >>> pathlib.Path("labels.txt").read_text().split()
        ['cat', 'dog']
    """
    _comm().barrier()


def _comm() -> AxisComm:
    check_own_process()
    if world().has_servers and size() > 1:
        raise UsageError(
            "workers of parameter servers can't run collectives",
            "they come and go, and speak to the servers alone",
            "use a plan without server, or leave the call out",
        )
    return world().comm


def _check_copies(collective: str) -> None:
    if world().has_copies:
        raise UsageError(
            f"paceline.{collective} would count samples more than once",
            "the plan has tensor, along which ranks see the same samples",
            "write job.all_reduce or job.all_gather, over the ranks that see different ones",
        )


def _checked(collective: str, tensor: object, grad: object) -> torch.Tensor:
    """Return a tensor whose values a collective can send, from where this rank computes.

    Raises:
        UsageError: it is none.
    """
    arguments.flag(collective, "grad", grad)
    asked = f"{collective} takes a dense tensor"
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(asked, f"it is {shown(tensor)}", "write torch.tensor(...) around it")
    fault = fault_of(tensor)
    if fault is None and not tensor.is_cpu and tensor.device != (device := world().rank_info.device):
        fault = f"it is on {tensor.device}, and this rank computes on {device}", f"hand in tensor.to('{device}')"
    if fault is not None:
        raise UsageError(asked, *fault)
    return tensor.resolve_conj().resolve_neg()  # a view that conjugates has no numbers of its own


def _checked_rows(collective: str, tensor: object, grad: object) -> torch.Tensor:
    checked = _checked(collective, tensor, grad)
    if checked.dim() == 0:
        raise UsageError(
            f"{collective} needs a tensor with rows", "the tensor is a scalar", "hand in tensor.reshape(1)"
        )
    return checked


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, without gradients, as numbers that Gloo and NCCL carry: of the same size and bits."""
    return tensor.detach().view(_CARRIERS.get(tensor.dtype, tensor.dtype))


_CARRIERS = {
    **dict.fromkeys((torch.int16, torch.uint16), torch.float16),
    **{torch.uint32: torch.int32, torch.uint64: torch.int64},
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.uint8),
    **dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.uint8),
}


# Horovod's and MPI's names of the same functions. Two of them mean a sum in MPI and a mean in Horovod, so that only
# these have no default. The documentation shows each of the others with the string below it.
def allreduce(tensor: torch.Tensor, op: str | None = None, *, grad: bool = False) -> torch.Tensor:
    """Do what `all_reduce` does, with an `op` that is always written: MPI's adds up, Horovod's averages by default.

    Args:
        tensor: as `all_reduce` takes it.
        op: "sum", "mean", "min", "max" or "product".
        grad: as `all_reduce` takes it.

    Returns:
        What `all_reduce` returns.

    Raises:
        UsageError: `op` is left out, or what `all_reduce` raises it for.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        >>> paceline.init()
        >>> paceline.allreduce(torch.tensor(2.5), "mean")
        tensor(2.5000)
    """
    return all_reduce(tensor, _written("allreduce", op), grad=grad)


def reducescatter(tensor: torch.Tensor, op: str | None = None, *, grad: bool = False) -> torch.Tensor:
    """Do what `reduce_scatter` does, with an `op` that is always written: MPI's adds up, Horovod's averages by default.

    Args:
        tensor: as `reduce_scatter` takes it.
        op: "sum" or "mean".
        grad: as `reduce_scatter` takes it.

    Returns:
        What `reduce_scatter` returns.

    Raises:
        UsageError: `op` is left out, or what `reduce_scatter` raises it for.
        PeerLostError: a rank has gone.
        CollectiveError: the ranks' shapes or dtypes differ, where the transport can tell.

    Examples:
        >>> paceline.init()
        >>> paceline.reducescatter(torch.ones(6, 2), "sum").shape
        torch.Size([6, 2])
    """
    return reduce_scatter(tensor, _written("reducescatter", op), grad=grad)


def _written(collective: str, op: str | None) -> str:
    if op is None:
        raise UsageError(
            f"paceline.{collective} should say whether it adds up or averages",
            "op is left out: MPI would add up, and Horovod would average",
            f'write {collective}(tensor, "mean") for what Horovod does by default, {collective}(tensor, "sum") for MPI',
        )
    return op


allgather = all_gather
"""Another name of `all_gather`."""

alltoall = all_to_all
"""Another name of `all_to_all`. Unlike Horovod's, it always returns the counts of rows too."""
