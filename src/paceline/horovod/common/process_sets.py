"""Process sets: some of the ranks, among which collectives run."""

from __future__ import annotations

import os
from collections.abc import Iterable

from paceline.horovod.collective_engine import engine, has_engine
from paceline.horovod.execute import Task
from paceline.horovod.negotiation import Request

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_FIX_DYNAMIC = f"set {DYNAMIC}=1 before hvd.init(), or hand the sets to hvd.init(process_sets=[...])"


class ProcessSet:
    """Some of the ranks.

    Args:
        ranks_or_comm: the numbers of the ranks in the job; a communicator of mpi4py is refused.

    Attributes:
        process_set_id: the number that the coordinator gives it; None until it is added.
        ranks: the ranks, in ascending order; None of the global set before `init`.

    Raises:
        ValueError: ranks are missing, doubled or negative.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, (list, tuple, range, set)):
            raise ValueError(
                f"a ProcessSet takes a list of ranks, not a {type(ranks_or_comm).__name__}: communicators of mpi4py "
                "are not taken"
            )
        ranks = sorted(ranks_or_comm)
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0:
            raise ValueError(f"a ProcessSet needs ranks, each once and none negative; it got {list(ranks_or_comm)}")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = ranks

    def size(self) -> int | None:
        """Return the number of ranks; None until the set is added."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's number in the set; None until the set is added.

        Raises:
            ValueError: this process is no member.
        """
        if self.process_set_id is None:
            return None
        rank = engine().rank
        if self.ranks is None or rank not in self.ranks:
            raise ValueError(f"rank {rank} is no member of the process set {self.process_set_id}, {self.ranks}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Return True if this process is a member; None until the set is added."""
        if self.process_set_id is None:
            return None
        return self.ranks is not None and engine().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0
        self.ranks = None


global_process_set = _GlobalProcessSet()
_added: list[ProcessSet] = []


def enter_global() -> None:
    """Give the global set its ranks, after `init`."""
    global_process_set.ranks = list(range(engine().size))


def forget_all() -> None:
    """Take the numbers of all sets away, after `shutdown`."""
    for process_set in _added:
        process_set.process_set_id = None
    _added.clear()
    global_process_set.ranks = None


def is_dynamic() -> bool:
    """Return True if sets may be added after `init`."""
    return os.environ.get(DYNAMIC, "0") not in ("", "0")


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set. Every rank calls it, members and others, in the same order.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, which has its number now.

    Raises:
        ValueError: sets can't be added after `init`, the set was added, or a rank is none of the job's.
        HorovodInternalError: ranks add different sets.
    """
    if not is_dynamic():
        raise ValueError(f"add_process_set: process sets can't be added after init; {_FIX_DYNAMIC}")
    return add_at_init(process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set))


def add_at_init(process_set: ProcessSet) -> ProcessSet:
    """Add a set, whether or not sets may be added after `init`."""
    from paceline.horovod.torch.mpi_ops import finish

    opened = engine()
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} was added before")
    ranks = tuple(process_set.ranks or ())
    if ranks and ranks[-1] >= opened.size:
        raise ValueError(f"{process_set} has the rank {ranks[-1]}, but there are {opened.size} ranks")
    if ranks == tuple(range(opened.size)) or any(tuple(added.ranks or ()) == ranks for added in _added):
        raise ValueError(f"a process set with the ranks {list(ranks)} was added before")
    # Numbered, so that ranks that add different sets are found out.
    name = f"add_process_set.{len(_added)}"
    task = Task(Request("add_set", name, ranks=ranks))
    opened.submit(task)
    finish(task)
    assert isinstance(task.extra, int)
    process_set.process_set_id = task.extra
    _added.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Every rank calls it.

    Returns:
        True if it was removed, False if it is not there, or the global one.

    Raises:
        ValueError: sets can't be removed after `init`.
    """
    from paceline.horovod.torch.mpi_ops import finish

    if not is_dynamic():
        raise ValueError(f"remove_process_set: process sets can't be removed after init; {_FIX_DYNAMIC}")
    if process_set.process_set_id in (None, 0) or process_set not in _added:
        return False
    number = process_set.process_set_id
    assert number is not None
    task = Task(Request("remove_set", f"remove_process_set.{number}", root=number))
    engine().submit(task)
    finish(task)
    process_set.process_set_id = None
    _added.remove(process_set)
    return True


def number_of(process_set: ProcessSet) -> int:
    """Return the number of a set that collectives may use on this rank.

    Raises:
        ValueError: it was not added, or this rank is no member.
    """
    opened = engine()
    if process_set is global_process_set:
        return 0
    if process_set.process_set_id is None or not has_engine():
        raise ValueError(f"{process_set} was not added: call hvd.add_process_set, or hand it to hvd.init")
    if opened.rank not in (process_set.ranks or ()):
        raise ValueError(f"rank {opened.rank} is no member of {process_set}")
    return process_set.process_set_id
