"""Horovod's collectives for PyTorch: matched over ranks by name, in any order."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm import api
from paceline.comm.process_group import find_rank_info
from paceline.horovod.collective_engine import close_engine, engine, has_engine, open_engine
from paceline.horovod.common.exceptions import HorovodInternalError
from paceline.horovod.common.process_sets import (
    DYNAMIC,
    ProcessSet,
    add_at_init,
    enter_global,
    forget_all,
    global_process_set,
    number_of,
)
from paceline.horovod.execute import Task
from paceline.horovod.negotiation import ADASUM, Request
from paceline.horovod.torch.grad_compression import Compression, Compressor

# The numbers of Horovod's own.
Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Average: "Average", Sum: "Sum", Adasum: ADASUM, Min: "Min", Max: "Max", Product: "Product"}
_REDUCED = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_SENT = (*_REDUCED, torch.int16, torch.bool)
_handles: dict[int, _Submitted] = {}
_numbers = itertools.count(1)


# ---- the ranks


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the ranks that the launcher started; calling it again does nothing.

    Args:
        comm: None, or a list of all ranks; a part of the ranks is a process set.
        process_sets: sets to add, or "dynamic": sets may be added later.

    Raises:
        ValueError: `comm` is something else, or a process set does not fit.
        UsageError: the launcher's variables contradict each other.
    """
    if has_engine():
        return
    # Before the ranks meet: one that left then would fail the others while they connect.
    size = find_rank_info(os.environ).size
    if comm is not None and not (isinstance(comm, (list, tuple)) and sorted(comm) in ([], list(range(size)))):
        raise ValueError(
            f"init(comm={comm!r}): comm is None or a list of all {size} ranks here; communicators of mpi4py are not "
            "taken. For a part of the ranks write init(process_sets=[hvd.ProcessSet([0, 1])])"
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'init(process_sets={process_sets!r}): it is a list of ProcessSet, or "dynamic"')
        os.environ[DYNAMIC] = "1"
    api.init()
    forget_all()
    _handles.clear()
    open_engine()
    enter_global()
    if engine().rank == 0:
        engine().timeline.start_from_environment()
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_at_init(process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set))


def shutdown() -> None:
    """Leave, on all ranks: collectives under way fail everywhere. `init` may follow."""
    close_engine()
    forget_all()


def is_initialized() -> bool:
    """Return True between `init` and `shutdown`."""
    return has_engine()


def size() -> int:
    """Return the number of ranks."""
    return engine().size


def rank() -> int:
    """Return this process's number among all ranks, from 0."""
    return engine().rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return engine().world.rank_info.local_size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, from 0."""
    return engine().world.rank_info.local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return len(_hosts_with_local_rank())


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank with this local rank, from 0."""
    return _hosts_with_local_rank().index(engine().world.rank_info.cross_rank)


def _hosts_with_local_rank() -> list[int]:
    local = local_rank()
    return sorted(host for host, count in _local_sizes().items() if count > local)


def _local_sizes() -> dict[int, int]:
    """Return the number of ranks on each host, by its number."""
    opened = engine()
    if not opened.local_sizes:
        info = opened.world.rank_info
        hosts = opened.world.comm.aside().all_gather(torch.tensor([info.cross_rank]))
        for host in hosts:
            opened.local_sizes[int(host)] = opened.local_sizes.get(int(host), 0) + 1
    return opened.local_sizes


def is_homogeneous() -> bool:
    """Return True if all hosts have the same number of ranks."""
    return len(set(_local_sizes().values())) == 1


def mpi_threads_supported() -> bool:
    """Raise ValueError: ranks are not joined by MPI."""
    engine()
    raise ValueError("MPI is not enabled: Paceline's ranks are joined by Gloo or NCCL")


def mpi_enabled() -> bool:
    """Return False: ranks are joined by Gloo or NCCL."""
    return False


def mpi_built() -> bool:
    """Return False: ranks are joined by Gloo or NCCL."""
    return False


def gloo_enabled() -> bool:
    """Return True."""
    return True


def gloo_built() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22703; 0 where torch has none."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return True if torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch has ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write when collectives are negotiated and executed, on rank 0, as a trace for chrome://tracing.

    Args:
        file_path: the file to write.
        mark_cycles: note the begin of each batch of collectives.

    Raises:
        ValueError: `init` has not been called.
        OSError: the file can't be written.
    """
    if engine().rank == 0:
        engine().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End what `start_timeline` began.

    Raises:
        ValueError: `init` has not been called.
    """
    engine().timeline.stop()


# ---- handles


def poll(handle: int) -> bool:
    """Return True if the collective of a handle has ended, so that `synchronize` does not wait."""
    submitted = _handles.get(handle)
    return submitted is None or all(task.is_done.is_set() for task in submitted.tasks)


def synchronize(handle: Any) -> Any:
    """Wait for the collective of a handle.

    Returns:
        Its result; None for a handle that is unknown, or was synchronized before.

    Raises:
        HorovodInternalError: it has failed.
    """
    if callable(handle):  # of sparse_allreduce_async
        return handle()
    submitted = _handles.pop(handle, None)
    if submitted is None:
        return None
    for task in submitted.tasks:
        finish(task)
    if submitted.is_group:
        return tuple(_result(task) for task in submitted.tasks)
    return _result(submitted.tasks[0])


def finish(task: Task) -> None:
    """Wait for a collective, and raise what has failed."""
    task.is_done.wait()
    if task.error:
        raise HorovodInternalError(task.error)


def _result(task: Task) -> Any:
    if task.request.kind == "alltoall":
        return task.output, task.extra
    return task.output if task.destination is None else task.destination


class _Submitted(NamedTuple):
    """What a handle stands for."""

    tasks: list[Task]
    is_group: bool


def _begin(tasks: Sequence[Task], is_group: bool = False) -> int:
    """Submit collectives; return the handle."""
    for task in tasks:
        if task.tensor is not None and task.tensor.is_cuda:
            task.submitted = torch.cuda.Event()  # type: ignore[no-untyped-call]
            task.submitted.record()  # type: ignore[no-untyped-call]
        engine().submit(task)
    handle = next(_numbers)
    _handles[handle] = _Submitted(list(tasks), is_group)
    return handle


def _name(kind: str, name: str | None) -> str:
    if name is not None:
        return f"{kind}.{name}"
    return engine().unnamed_call(kind)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _checked(kind: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{kind} takes a tensor, not a {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{kind}: tensors of type {tensor.dtype} are not supported; convert it first")
    if not tensor.is_contiguous():
        raise ValueError(f"{kind}: the tensor has to be contiguous; call tensor.contiguous() first")
    return tensor.detach()


def _reduction(op: int | None, average: bool | None) -> str:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated, write op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in _OPS:
        raise ValueError(f"the reduction {op!r} is unknown: write hvd.Average, Sum, Adasum, Min, Max or Product")
    return _OPS[op]


def _check_adasum(op: str, process_set: ProcessSet) -> None:
    if op != ADASUM:
        return
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets yet: use the global one")
    count = engine().size
    if count & (count - 1):
        raise NotImplementedError(f"Adasum needs a power of 2 of ranks, and there are {count}")


# ---- allreduce


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce `tensor` over the ranks; return a handle whose result is a new tensor."""
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    return reduction.begin(tensor, torch.empty_like(tensor), _name("allreduce", name))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce `tensor` over the ranks, in place; return a handle whose result is `tensor`."""
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    return reduction.begin(tensor, tensor, _name("allreduce", name))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average, or another reduction, of the ranks' `tensor`; gradients flow through it.

    Args:
        tensor: any shape, the same on every rank of the set.
        average: True or False; it is deprecated, so write `op`.
        name: the name by which calls are matched; None: unnamed calls are matched by their order.
        compression: how it is sent.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: the factor before the reduction.
        postscale_factor: the factor after it.
        process_set: the process set whose ranks take part.

    Raises:
        ValueError: the tensor or an argument does not fit, or one of this name is under way.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, reduction, _name("allreduce", name))  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` over the ranks, in place, and return it."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


class _Reduction:
    """A checked reduction.

    Args:
        op: the reduction's name.
        prescale: the factor before it.
        postscale: the factor after it.
        process_set: the ranks.
    """

    def __init__(self, op: str, prescale: float, postscale: float, process_set: ProcessSet) -> None:
        self.op, self.prescale, self.postscale, self.process_set = op, float(prescale), float(postscale), process_set

    @classmethod
    def of(
        cls, average: bool | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> _Reduction:
        """Check the arguments of an allreduce."""
        engine()  # the first error of a script that forgot hvd.init()
        name = _reduction(op, average)
        _check_adasum(name, process_set)
        return cls(name, prescale, postscale, process_set)

    def task(self, kind: str, tensor: torch.Tensor, name: str, group: str = "", group_size: int = 0) -> Task:
        """Make the task of a tensor."""
        checked = _checked(kind, tensor, _REDUCED)
        request = Request(
            kind,
            name,
            number_of(self.process_set),
            _dtype(tensor),
            tuple(tensor.shape),
            tensor.device.type,
            self.op,
            self.prescale,
            self.postscale,
            group=group,
            group_size=group_size,
        )
        return Task(request, checked)

    def begin(self, tensor: torch.Tensor, output: torch.Tensor, name: str) -> int:
        """Begin an allreduce."""
        return _begin([self._into(self.task("allreduce", tensor, name), output)])

    def begin_group(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str) -> int:
        """Begin the allreduce of a group; the handle's result is a tuple."""
        tasks = _grouped(self, "allreduce", tensors, name)
        return _begin([self._into(task, output) for task, output in zip(tasks, outputs, strict=True)], is_group=True)

    @staticmethod
    def _into(task: Task, output: torch.Tensor) -> Task:
        task.output = output.detach()
        task.destination = output
        return task


def _grouped(reduction: _Reduction, kind: str, tensors: Sequence[torch.Tensor], name: str) -> list[Task]:
    if not tensors:
        raise ValueError(f"a grouped {kind} needs at least one tensor")
    return [reduction.task(kind, tensor, f"{name}.{index}", name, len(tensors)) for index, tensor in enumerate(tensors)]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, reduction: _Reduction, name: str) -> torch.Tensor:
        ctx.reduction, ctx.name = reduction, name
        result: torch.Tensor = synchronize(reduction.begin(tensor, torch.empty_like(tensor), name))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].contiguous()
        result = _Allreduce.apply(gradient, ctx.reduction, f"{ctx.name}.gradient")  # type: ignore[no-untyped-call]
        return result, None, None


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce tensors, all or none; return a handle whose result is a tuple of new tensors."""
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return reduction.begin_group(tensors, outputs, _name("grouped_allreduce", name))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce tensors in place, all or none; return a handle whose result is a tuple of them."""
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    return reduction.begin_group(tensors, tensors, _name("grouped_allreduce", name))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the ranks' tensors reduced, all or none; gradients flow through it. Arguments: as of `allreduce`."""
    reduction = _Reduction.of(average, op, prescale_factor, postscale_factor, process_set)
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    reduced = _GroupedAllreduce.apply(reduction, _name("grouped_allreduce", name), *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, compressed, strict=True)]


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reduction: _Reduction, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reduction, ctx.name = reduction, name
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        result: tuple[torch.Tensor, ...] = synchronize(reduction.begin_group(tensors, outputs, name))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        contiguous = [gradient.contiguous() for gradient in gradients]
        name = f"{ctx.name}.gradient"
        return None, None, *_GroupedAllreduce.apply(ctx.reduction, name, *contiguous)  # type: ignore[no-untyped-call]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors in place, all or none, and return them."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return list(synchronize(handle))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor, by gathering its indices and values.

    Args:
        tensor: a sparse tensor of torch.sparse_coo layout, of the same shape on every rank.
        name: the name by which calls are matched.
        op: Average (the default) or Sum.
        process_set: the process set whose ranks take part.

    Returns:
        A function that waits, and returns the sparse tensor; equal indices are not added up yet.

    Raises:
        ValueError: `op` is another reduction.
    """
    reduction = _reduction(op, None)
    if reduction not in ("Average", "Sum"):
        raise ValueError(f"sparse_allreduce takes hvd.Average and hvd.Sum, not {reduction}")
    rows = tensor._indices().t().contiguous()
    indices = allgather_async(rows, f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)
    count = len(process_set.ranks or ())

    def result() -> torch.Tensor:
        all_values = synchronize(values)
        if reduction == "Average":
            all_values = all_values / count
        all_rows = synchronize(indices)
        return torch.sparse_coo_tensor(all_rows.t(), all_values, tensor.shape, check_invariants=False)

    return result


# ---- allgather, broadcast


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to join the ranks' tensors on dim 0; return a handle."""
    return _begin([_gather_task(tensor, _name("allgather", name), process_set)])


def _gather_task(
    tensor: torch.Tensor, name: str, process_set: ProcessSet, group: str = "", group_size: int = 0
) -> Task:
    checked = _checked("allgather", tensor, _SENT)
    request = Request(
        "allgather",
        name,
        number_of(process_set),
        _dtype(tensor),
        tuple(tensor.shape),
        tensor.device.type,
        group=group,
        group_size=group_size,
    )
    return Task(request, checked)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors joined on dim 0, whose lengths may differ; gradients flow through it.

    The gradient is the average of the ranks' gradients of this rank's rows, as in Horovod.

    Raises:
        HorovodInternalError: the tensors have no dimensions, or differ in more than dim 0.
    """
    return _Allgather.apply(tensor, _name("allgather", name), process_set)  # type: ignore[no-untyped-call, no-any-return]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
        task = _gather_task(tensor, name, process_set)
        result: torch.Tensor = synchronize(_begin([task]))
        ctx.rows, ctx.name, ctx.process_set = task.extra.tolist(), name, process_set
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = allreduce(gradients[0].contiguous(), name=f"{ctx.name}.gradient", process_set=ctx.process_set)
        index = _index_in(ctx.process_set)
        return reduced.split(ctx.rows)[index], None, None


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather tensors, all or none; return a handle whose result is a tuple."""
    base = _name("grouped_allgather", name)
    if not tensors:
        raise ValueError("a grouped allgather needs at least one tensor")
    count = len(tensors)
    tasks = [_gather_task(tensor, f"{base}.{i}", process_set, base, count) for i, tensor in enumerate(tensors)]
    return _begin(tasks, is_group=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return for each tensor the ranks' tensors joined on dim 0, all or none; gradients flow through it."""
    base = _name("grouped_allgather", name)
    return list(_GroupedAllgather.apply(base, process_set, *tensors))  # type: ignore[no-untyped-call]


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: str, process_set: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(tensors)
        tasks = [_gather_task(tensor, f"{base}.{i}", process_set, base, count) for i, tensor in enumerate(tensors)]
        result: tuple[torch.Tensor, ...] = synchronize(_begin(tasks, is_group=True))
        ctx.rows = [task.extra.tolist() for task in tasks]
        ctx.name, ctx.process_set = base, process_set
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        contiguous = [gradient.contiguous() for gradient in gradients]
        reduced = grouped_allreduce(contiguous, name=f"{ctx.name}.gradient", process_set=ctx.process_set)
        index = _index_in(ctx.process_set)
        return None, None, *[joined.split(rows)[index] for joined, rows in zip(reduced, ctx.rows, strict=True)]


def _index_in(process_set: ProcessSet) -> int:
    index = process_set.rank()
    assert index is not None
    return index


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to send the tensor of rank `root_rank`; return a handle whose result is a new tensor."""
    return _begin_broadcast(tensor, torch.empty_like(tensor), root_rank, _name("broadcast", name), process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to replace `tensor` by that of rank `root_rank`; return a handle whose result is `tensor`."""
    return _begin_broadcast(tensor, tensor, root_rank, _name("broadcast", name), process_set)


def _begin_broadcast(tensor: torch.Tensor, output: torch.Tensor, root: int, name: str, process_set: ProcessSet) -> int:
    checked = _checked("broadcast", tensor, _SENT)
    set_id = number_of(process_set)
    if root not in (process_set.ranks or ()):
        raise ValueError(
            f"broadcast: there is no rank {root} in the process set, whose ranks are {process_set.ranks}; root_rank is "
            "a rank of the job"
        )
    request = Request("broadcast", name, set_id, _dtype(tensor), tuple(tensor.shape), tensor.device.type, root=root)
    task = Task(request, checked)
    # A view that autograd does not follow: the values are written from another thread.
    task.output = output.detach()
    if output is tensor:
        task.tensor = task.output
    task.destination = output
    return _begin([task])


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of rank `root_rank`; gradients flow to it, as their average over the ranks.

    Args:
        tensor: any shape, the same on every rank of the set.
        root_rank: the rank that sends: its number in the job, in a process set too.
        name: the name by which calls are matched; None: unnamed calls are matched by their order.
        process_set: the process set whose ranks take part.

    Raises:
        ValueError: the rank is none of the set, or the tensor does not fit.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    return _Broadcast.apply(tensor, root_rank, _name("broadcast", name), process_set)  # type: ignore[no-untyped-call, no-any-return]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str, process_set: ProcessSet) -> torch.Tensor:
        ctx.root, ctx.name, ctx.process_set = root, name, process_set
        handle = _begin_broadcast(tensor, torch.empty_like(tensor), root, name, process_set)
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = allreduce(gradients[0].contiguous(), name=f"{ctx.name}.gradient", process_set=ctx.process_set)
        if rank() != ctx.root:
            reduced = torch.zeros_like(reduced)
        return reduced, None, None, None


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace `tensor` by that of rank `root_rank`, and return it."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


# ---- alltoall, reducescatter


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an alltoall; return a handle whose result is the pair of output and rows received from each rank."""
    checked = _checked("alltoall", tensor, _SENT)
    set_id = number_of(process_set)
    rows = _splits(checked, splits, len(process_set.ranks or ()))
    request = Request(
        "alltoall",
        _name("alltoall", name),
        set_id,
        _dtype(tensor),
        tuple(tensor.shape),
        tensor.device.type,
        splits=rows,
    )
    return _begin([Task(request, checked)])


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, count: int) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError("alltoall: the tensor has no dimensions; it needs rows to send")
    rows = tensor.shape[0]
    if splits is None:
        if rows % count:
            raise ValueError(f"alltoall: {rows} rows can't be split evenly over {count} ranks; hand in splits")
        return (rows // count,) * count
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            raise ValueError(
                f"alltoall: splits is a list or a tensor of int32 with one dimension, not of {splits.dtype} with "
                f"{splits.dim()}"
            )
        splits = splits.tolist()
    if len(splits) != count:
        raise ValueError(f"alltoall: splits has {len(splits)} numbers, and the process set has {count} ranks")
    if any(count < 0 for count in splits) or sum(splits) > rows:
        raise ValueError(f"alltoall: splits {list(splits)} don't fit a tensor of {rows} rows")
    return tuple(int(count) for count in splits)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, and return those received; gradients flow back to the rows.

    Args:
        tensor: the rows to send, in the order of ranks, (rows, ...).
        splits: the number of rows for each rank of the set, in order; None: the same for each.
        name: the name by which calls are matched; None: unnamed calls are matched by their order.
        process_set: the process set whose ranks take part.

    Returns:
        The rows received, in rank order; with `splits` also how many came from each rank, int32.

    Raises:
        ValueError: `splits` or the tensor does not fit.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    # In full here: the gradient's name must be the same on every rank.
    full_name = name if name is not None else _name("alltoall", None).removeprefix("alltoall.")
    output, received = _Alltoall.apply(tensor, splits, full_name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.rows = tensor.shape[0]
        ctx.received, ctx.name, ctx.process_set = received, name, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name = f"{ctx.name}.gradient"
        back, _ = alltoall(gradients[0].contiguous(), ctx.received, name, ctx.process_set)
        if back.shape[0] < ctx.rows:  # rows that were sent to nobody
            back = torch.cat([back, back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])])
        return back, None, None, None


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a reducescatter; return a handle."""
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor, process_set)
    return _begin([reduction.task("reducescatter", tensor, _name("reducescatter", name))])


def _scatter_reduction(op: int | None, prescale: float, postscale: float, process_set: ProcessSet) -> _Reduction:
    name = _reduction(op, None)
    if name == ADASUM:
        raise RuntimeError("reducescatter does not support Adasum: write op=hvd.Average or op=hvd.Sum")
    if name not in ("Average", "Sum"):
        raise ValueError(f"reducescatter takes hvd.Average and hvd.Sum, not {name}")
    return _Reduction(name, prescale, postscale, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the average or sum of the ranks' tensors; gradients flow through it.

    Args:
        tensor: (rows, ...), the same on every rank; the first ranks get one row more where they can't be split evenly.
        name: the name by which calls are matched; None: unnamed calls are matched by their order.
        compression: how it is sent.
        op: Average (the default) or Sum.
        process_set: the process set whose ranks take part.
        prescale_factor: the factor before the reduction.
        postscale_factor: the factor after it.

    Raises:
        RuntimeError: `op` is Adasum.
        ValueError: `op` or the tensor does not fit.
        HorovodInternalError: the tensor has no dimensions, ranks disagree, or one has gone.
    """
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    base = _name("reducescatter", name)
    (result,) = _Reducescatter.apply(reduction, base, False, compressed)  # type: ignore[no-untyped-call]
    return compression.decompress(result, context)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a reducescatter of tensors, all or none; return a handle whose result is a tuple."""
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor, process_set)
    tasks = _grouped(reduction, "reducescatter", tensors, _name("grouped_reducescatter", name))
    return _begin(tasks, is_group=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each tensor, reduced, all or none. Arguments: as of `reducescatter`."""
    reduction = _scatter_reduction(op, prescale_factor, postscale_factor, process_set)
    base = _name("grouped_reducescatter", name)
    compressed = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in compressed]
    results = _Reducescatter.apply(reduction, base, True, *sent)  # type: ignore[no-untyped-call]
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed, strict=True)]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reduction: _Reduction, name: str, is_group: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.reduction, ctx.name = reduction, name
        if is_group:
            tasks = _grouped(reduction, "reducescatter", tensors, name)
        else:
            tasks = [reduction.task("reducescatter", tensors[0], name)]
        result: tuple[torch.Tensor, ...] = synchronize(_begin(tasks, is_group=True))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduction = ctx.reduction
        # Horovod multiplies the gradient of a sum by the number of ranks.
        factor = reduction.prescale * reduction.postscale
        if reduction.op == "Sum":
            factor *= len(reduction.process_set.ranks)
        contiguous = [gradient.contiguous() * factor for gradient in gradients]
        return None, None, None, *grouped_allgather(contiguous, f"{ctx.name}.gradient", reduction.process_set)


# ---- barrier, join


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set is here; collectives under way may end later."""
    request = Request("barrier", _name("barrier", None), number_of(process_set))
    synchronize(_begin([Task(request)]))


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros, until every rank has joined: this rank has no more data.

    Args:
        device: has no effect, as zeros are made where the tensors of the other ranks are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: a rank has gone.
    """
    task = Task(Request("join", "join"))
    engine().submit(task)
    finish(task)
    assert isinstance(task.extra, int)
    return task.extra
