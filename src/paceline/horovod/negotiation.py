"""Order the collectives that every rank of a process set has submitted, so that all ranks execute them alike.

Ranks submit collectives by name, in any order. One `Negotiator`, on rank 0, counts them. It answers with batches,
which all ranks execute in the order in which they come. Sums with the same dtype and factors are fused in a batch.
While a process set executes a batch, the collectives that become ready are held back for its next one: so the size of
batches adapts to the speed at which ranks submit. A collective on which ranks disagree becomes an error on each of
them, and the next ones go on.

This is pure state: no thread, no socket, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

ADASUM = "Adasum"
_AN = {"allreduce": "an allreduce", "allgather": "an allgather", "alltoall": "an alltoall"}


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A collective that one rank has submitted.

    Attributes:
        kind: "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set" or
            "remove_set".
        name: the name by which the ranks' calls are matched.
        set_id: the process set.
        dtype, shape, device: of the tensor; device is "cpu" or "cuda".
        op: the name of the reduction, such as Sum.
        prescale, postscale: factors before and after it.
        root: the rank that broadcasts.
        splits: the rows for each rank, of an alltoall.
        group, group_size: the collectives of a group are executed together.
        ranks: the members of a process set that is added.
    """

    kind: str
    name: str
    set_id: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A collective that the ranks execute.

    Attributes:
        request: that of the lowest rank that submitted it.
        rows: the first dims of the ranks' tensors, of an allgather.
        splits: the rows that each rank sends to each, of an alltoall.
        number: the id of an added process set, or the rank that joined last.
    """

    request: Request
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    number: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Collectives that are executed as one, or that have failed.

    Attributes:
        set_id: the process set.
        entries: the collectives, all of one kind.
        error: the reason why they fail; empty: they are executed.
        is_last: the set's batch ends with it: its first rank says when it has been executed.
    """

    set_id: int
    entries: tuple[Entry, ...]
    error: str = ""
    is_last: bool = False


@dataclass(slots=True)
class Waiting:
    """A collective that some ranks have submitted."""

    since_s: float
    requests: dict[int, Request] = field(default_factory=dict)  # by rank
    is_reported: bool = False


@dataclass(slots=True)
class Group:
    """A group of collectives, of which some have been submitted by all ranks."""

    entries: list[Entry] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class Negotiator:
    """The state of the coordinator.

    Args:
        size: the number of ranks.
        fusion_bytes: the most bytes that are summed as one.
    """

    size: int
    fusion_bytes: int
    members: dict[int, tuple[int, ...]] = field(init=False)  # ranks, by process set
    waiting: dict[tuple[int, str], Waiting] = field(default_factory=dict)  # by process set and name
    ready: dict[int, list[Answer]] = field(default_factory=dict)  # by process set
    groups: dict[tuple[int, str], Group] = field(default_factory=dict)  # incomplete ones, by process set and name
    executing: set[int] = field(default_factory=set)  # process sets
    joined: list[int] = field(default_factory=list)  # ranks, in the order in which they joined
    sets_added: int = 0

    def __post_init__(self) -> None:
        self.members = {0: tuple(range(self.size))}

    def submit(self, rank: int, request: Request, now_s: float) -> None:
        """Count a collective that `rank` has submitted, at `now_s`."""
        if request.kind == "join":
            self.joined.append(rank)
            self._count_joined()
            return
        if request.set_id not in self.members:
            self._answer(request.set_id, [Entry(request)], f"there is no process set {request.set_id}")
            return
        key = (request.set_id, request.name)
        waiting = self.waiting.setdefault(key, Waiting(now_s))
        waiting.requests[rank] = request
        self._check(key, waiting)

    def executed(self, set_id: int) -> None:
        """Note that the batch of a process set has been executed."""
        self.executing.discard(set_id)

    def take(self) -> list[Answer]:
        """Return the answers that ranks may execute now, in their order."""
        answers: list[Answer] = []
        for set_id in [set_id for set_id, ready in self.ready.items() if ready and set_id not in self.executing]:
            batch = self._fused(self.ready.pop(set_id))
            batch[-1] = msgspec.structs.replace(batch[-1], is_last=True)
            answers += batch
            if set_id in self.members:  # it may have been removed meanwhile
                self.executing.add(set_id)
        return answers

    def stalled(self, now_s: float, after_s: float) -> list[tuple[str, list[int], Waiting]]:
        """Return each collective that has waited longer than `after_s`: its name, the missing ranks, and since when."""
        late = []
        for (set_id, name), waiting in self.waiting.items():
            if now_s - waiting.since_s > after_s:
                missing = [rank for rank in self.members[set_id] if rank not in waiting.requests]
                late.append((name, [rank for rank in missing if rank not in self.joined], waiting))
        return late

    def _count_joined(self) -> None:
        if len(self.joined) == self.size:
            last = self.joined[-1]
            self.joined.clear()
            self._answer(0, [Entry(Request("join", "join"), number=last)])
            return
        for key, waiting in list(self.waiting.items()):
            self._check(key, waiting)

    def _check(self, key: tuple[int, str], waiting: Waiting) -> None:
        """Answer a collective if no rank is missing."""
        set_id, _ = key
        absent = [rank for rank in self.members[set_id] if rank not in waiting.requests]
        if not all(rank in self.joined for rank in absent):
            return
        del self.waiting[key]
        requests = dict(sorted(waiting.requests.items()))
        first = next(iter(requests.values()))
        error = mismatch(requests)
        if not error and absent and first.kind != "allreduce":
            error = (
                f"{first.kind.capitalize()} is not supported with Join at this time: "
                f"rank {absent[0]} has joined, and has no data for {first.name}"
            )
        self._execute(set_id, first, self._entry(requests), error)

    def _execute(self, set_id: int, first: Request, entry: Entry, error: str) -> None:
        if first.kind == "add_set" and not error:
            self.sets_added += 1
            self.members[self.sets_added] = first.ranks
            entry = msgspec.structs.replace(entry, number=self.sets_added)
        elif first.kind == "remove_set" and not error:
            self.members.pop(first.root, None)
            self.executing.discard(first.root)
        if not first.group:
            self._answer(set_id, [entry], error)
            return
        # All or nothing: the group waits for the last of its collectives, and fails with any of them.
        group = self.groups.setdefault((set_id, first.group), Group())
        group.entries.append(entry)
        group.error = group.error or error
        if len(group.entries) == first.group_size:
            del self.groups[set_id, first.group]
            for entries in _alike(group.entries):
                self._answer(set_id, entries, group.error)

    def _entry(self, requests: dict[int, Request]) -> Entry:
        first = next(iter(requests.values()))
        rows: tuple[int, ...] = ()
        splits: tuple[tuple[int, ...], ...] = ()
        if first.kind == "allgather" and first.shape:
            rows = tuple(request.shape[0] for request in requests.values() if request.shape)
        if first.kind == "alltoall":
            splits = tuple(request.splits for request in requests.values())
        return Entry(first, rows, splits)

    def _answer(self, set_id: int, entries: Iterable[Entry], error: str = "") -> None:
        self.ready.setdefault(set_id, []).append(Answer(set_id, tuple(entries), error))

    def _fused(self, answers: list[Answer]) -> list[Answer]:
        """Join sums that can be one, each at the place of its first."""
        fused: list[Answer] = []
        open_sums: dict[tuple[object, ...], tuple[int, int]] = {}  # by what must be equal: place in `fused`, bytes
        for answer in answers:
            kind = answer.entries[0].request.kind
            if answer.error or kind != "allreduce":
                fused.append(answer)
                continue
            key = _fusion_key(answer.entries[0].request)
            size = sum(nbytes(entry.request) for entry in answer.entries)
            at, before = open_sums.get(key, (-1, 0))
            if at >= 0 and before + size <= self.fusion_bytes:
                entries = (*fused[at].entries, *answer.entries)
                fused[at] = Answer(answer.set_id, entries)
                open_sums[key] = (at, before + size)
            else:
                open_sums[key] = (len(fused), size)
                fused.append(answer)
        return fused


def nbytes(request: Request) -> int:
    """Return the bytes of a request's tensor."""
    count = 1
    for length in request.shape:
        count *= length
    return count * _ITEM_BYTES.get(request.dtype, 8)


_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "bool": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4,
}  # fmt: skip


def _fusion_key(request: Request) -> tuple[object, ...]:
    return request.dtype, request.op, request.prescale, request.postscale, request.device


def _alike(entries: list[Entry]) -> list[list[Entry]]:
    """Split the entries of a group into lists that can be executed as one."""
    lists: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        key: tuple[object, ...] = _fusion_key(entry.request)
        if entry.request.kind != "allreduce":
            key = (entry.request.name,)
        lists.setdefault(key, []).append(entry)
    return list(lists.values())


def mismatch(requests: dict[int, Request]) -> str:
    """Say in what the ranks' calls of one name differ; empty where they agree.

    Args:
        requests: by rank, in rank order.
    """
    (first_rank, first), *remaining = requests.items()
    for rank, request in remaining:
        if request is first or request == first:
            continue
        text = _difference(first_rank, first, rank, request)
        if text:
            return f"{text} (tensor name: {first.name})"
    if first.kind in ("allgather", "reducescatter") and not first.shape:
        return f"rank {first_rank} tried to {first.kind} a tensor without dimensions: {first.name}"
    return ""


def _difference(a_rank: int, a: Request, b_rank: int, b: Request) -> str:
    if a.kind != b.kind:
        a_text, b_text = _AN.get(a.kind, f"a {a.kind}"), _AN.get(b.kind, f"a {b.kind}")
        return f"Mismatched collective operations: rank {a_rank} did {a_text}, but rank {b_rank} did {b_text}."
    if a.dtype != b.dtype:
        return f"Mismatched data types: rank {a_rank} had type {a.dtype}, but rank {b_rank} had type {b.dtype}."
    if a.device != b.device:
        return (
            f"Mismatched {a.kind} CPU/GPU device selection: rank {a_rank} specified device {a.device}, "
            f"but rank {b_rank} specified device {b.device}."
        )
    if a.op != b.op:
        return f"Mismatched reduction operations: rank {a_rank} requested {a.op}, but rank {b_rank} requested {b.op}."
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return (
            f"Mismatched prescale and/or postscale factors: rank {a_rank} has {a.prescale:g} and {a.postscale:g}, "
            f"but rank {b_rank} has {b.prescale:g} and {b.postscale:g}."
        )
    if a.root != b.root:
        return (
            f"Mismatched {a.kind} root ranks: rank {a_rank} specified root rank {a.root}, "
            f"but rank {b_rank} specified root rank {b.root}."
        )
    if a.ranks != b.ranks:
        return f"Mismatched process sets: rank {a_rank} adds {list(a.ranks)}, but rank {b_rank} adds {list(b.ranks)}."
    if (a.group, a.group_size) != (b.group, b.group_size):
        return f"Mismatched groups: rank {a_rank} and rank {b_rank} submitted it in different groups of tensors."
    # The first dims of these may differ.
    free = 1 if a.kind in ("allgather", "alltoall") else 0
    if len(a.shape) != len(b.shape) or a.shape[free:] != b.shape[free:]:
        return (
            f"Mismatched {a.kind} tensor shapes: rank {a_rank} sent a tensor of shape {list(a.shape)}, "
            f"but rank {b_rank} sent a tensor of shape {list(b.shape)}."
        )
    return ""
