"""Execute the collectives that ranks submit by name: a thread on each rank, and the coordinator's thread on rank 0.

The thread that submits sends a small message to the coordinator and goes on. The coordinator answers once all ranks
have submitted (`negotiation.py`), and each rank's thread executes what it answers, in the order of the answers. A call
that was submitted before is sent as a number.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from multiprocessing.connection import Connection, wait

import msgspec

from paceline.comm import api
from paceline.horovod.collective_timeline import Timeline
from paceline.horovod.common.exceptions import HorovodInternalError
from paceline.horovod.control import MOST_BYTES, connect
from paceline.horovod.execute import SetComm, Task, execute, open_set
from paceline.horovod.negotiation import Answer, Entry, Negotiator, Request

SHUT_DOWN = (
    "Horovod has been shut down: a rank has called shutdown(), has ended or has failed, while this collective was "
    "waiting. The cause is in the output of the rank that ended first."
)
# First bytes of messages to the coordinator: a request that will be known by a number, one that will not, and others.
_NEW, _ONCE, _KNOWN, _EXECUTED, _END = b"n", b"o", b"k", b"d", b"s"
_MOST_KNOWN = 4096  # requests; Horovod's cache has 1024
_FORKED = (
    "this process was forked from a rank, whose connections it does not share: call Horovod's collectives in that "
    "rank's own process"
)
_UNNAMED = ".noname."
_FUSION_BYTES = 2**27  # Horovod's own default
_STALL_S = 60  # Horovod's own default
_CLOSE_S = 30  # for the threads to end
_answers = msgspec.msgpack.Decoder(list[Answer])
_requests = msgspec.msgpack.Decoder(Request)


class Engine:
    """This rank's part of the collectives by name. Collective: every rank makes one."""

    def __init__(self) -> None:
        self.world = api.world()
        info = self.world.rank_info
        self.rank, self.size = info.rank, info.size
        aside = self.world.comm.aside()
        self.connection, coordinator_ends = connect(info, self._all_gather_text)
        self.sets: dict[int, SetComm] = {0: open_set(aside, tuple(range(self.size)))}
        self.tasks: dict[tuple[int, str], Task] = {}
        self.known: dict[Request, bytes] = {}
        self.lock = threading.Lock()
        self.failure = ""
        self.unnamed: dict[str, int] = {}  # calls without a name, by kind
        self.local_sizes: dict[int, int] = {}  # ranks of each host, by its number; once they are asked for
        self.timeline = Timeline()
        self.threads = [threading.Thread(target=self._execute_all, name="horovod", daemon=True)]
        self.descriptors = [end.fileno() for end in (self.connection, *coordinator_ends)]
        if coordinator_ends:
            coordinator = Coordinator(coordinator_ends, self.timeline)
            self.threads.append(threading.Thread(target=coordinator.run, name="horovod-coordinator", daemon=True))
        for thread in self.threads:
            thread.start()
        self.world.closers.append(self.close)

    def _all_gather_text(self, text: str) -> list[str]:
        return self.world.comm.aside().all_gather_text(text) if self.size > 1 else [text]

    def submit(self, task: Task) -> None:
        """Send a collective to the coordinator; `task.is_done` is set once it has been executed or has failed.

        Raises:
            ValueError: one of the same name is under way.
        """
        request = task.request
        key = (request.set_id, request.name)
        with self.lock:
            if self.failure:
                raise HorovodInternalError(self.failure)
            if key in self.tasks:
                raise ValueError(
                    f"Duplicate tensor name {request.name}: a collective of this name is under way on rank "
                    f"{self.rank}. Give each tensor a name of its own, or synchronize the earlier one first."
                )
            self.tasks[key] = task
            message = self.known.get(request)
            if message is None:
                # Names of unnamed calls are numbered, and come once.
                is_kept = len(self.known) < _MOST_KNOWN and not is_unnamed(request.name)
                message = (_NEW if is_kept else _ONCE) + msgspec.msgpack.encode(request)
                if is_kept:
                    self.known[request] = _KNOWN + len(self.known).to_bytes(4, "little")
            self._send(message)

    def close(self) -> None:
        """End the threads, on all ranks: what is under way fails everywhere."""
        with self.lock:
            self._send(_END)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        for opened in self.sets.values():
            opened.close()
        self.sets.clear()
        self.timeline.stop()
        if self.close in self.world.closers:
            self.world.closers.remove(self.close)

    def unnamed_call(self, kind: str) -> str:
        """Return the name of a call without one: ranks that make such calls in the same order match."""
        self.unnamed[kind] = self.unnamed.get(kind, 0) + 1
        return f"{kind}{_UNNAMED}{self.unnamed[kind]}"

    def _send(self, message: bytes) -> None:
        # Where the coordinator has gone, the thread that reads from it sees it too, and says so.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def _execute_all(self) -> None:
        """Execute the coordinator's answers until its end."""
        reason = SHUT_DOWN
        try:
            while (answers := self._receive()) is not None:
                for answer in answers:
                    self._execute(answer)
        except BaseException as error:  # a transport that has failed fails for all later collectives too
            reason = f"a collective has failed on rank {self.rank}: {error}"
        with self.lock:
            self.failure = reason
            tasks = list(self.tasks.values())
            self.tasks.clear()
            self.connection.close()
        for task in tasks:
            task.fail(reason)

    def _receive(self) -> list[Answer] | None:
        """Return the coordinator's next answers; None at its end."""
        try:
            return _answers.decode(self.connection.recv_bytes(MOST_BYTES))
        except (EOFError, OSError):
            return None

    def _execute(self, answer: Answer) -> None:
        with self.lock:
            tasks = [self.tasks.pop((answer.set_id, entry.request.name), None) for entry in answer.entries]
        if answer.error:
            _fail(tasks, answer.error)
        elif answer.entries[0].request.kind in ("add_set", "remove_set"):
            self._change_sets(answer.entries[0], tasks[0])
        else:
            self._execute_tasks(answer, tasks)
        if answer.is_last and self._is_first_of(answer.set_id):
            with self.lock:
                self._send(_EXECUTED + answer.set_id.to_bytes(4, "little"))

    def _execute_tasks(self, answer: Answer, tasks: list[Task | None]) -> None:
        try:
            with self.timeline.executing(answer):
                execute(self.sets[answer.set_id], answer, tasks)
        except BaseException as error:
            _fail(tasks, f"{answer.entries[0].request.kind} has failed on rank {self.rank}: {error}")
            raise
        for task in tasks:
            if task is not None:
                task.is_done.set()

    def _is_first_of(self, set_id: int) -> bool:
        opened = self.sets.get(set_id)
        return opened is None or opened.comm.peers[0] == self.rank

    def _change_sets(self, entry: Entry, task: Task | None) -> None:
        """Open or close a process set; every rank does so at the same place of the answers."""
        request = entry.request
        if request.kind == "add_set":
            opened = open_set(self.world.comm.aside(), request.ranks)
            self.sets[entry.number] = opened
        else:
            removed = self.sets.pop(request.root, None)
            if removed is not None:
                removed.close()
        if task is not None:
            task.extra = entry.number
            task.is_done.set()


def _fail(tasks: list[Task | None], error: str) -> None:
    for task in tasks:
        if task is not None:
            task.fail(error)


def is_unnamed(name: str) -> bool:
    """Return True for a name that `unnamed_call` has made, or one derived from it."""
    return _UNNAMED in name


class Coordinator:
    """The thread on rank 0 that counts what ranks submit.

    Args:
        ends: the connections to the ranks, by rank.
        timeline: where rank 0 notes how long ranks waited for each other.
    """

    def __init__(self, ends: list[Connection], timeline: Timeline) -> None:
        self.ends = ends
        self.timeline = timeline
        fusion = int(os.environ.get("HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES))
        self.negotiator = Negotiator(len(ends), fusion)
        self.known: list[list[Request]] = [[] for _ in ends]  # by rank, in the order in which they were sent
        self.is_ended = False
        self.stall_s = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", _STALL_S))
        self.stall_end_s = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            self.stall_s = float("inf")

    def run(self) -> None:
        """Count and answer until a rank ends."""
        rank_of = {end: rank for rank, end in enumerate(self.ends)}
        look_s = min(self.stall_s, self.stall_end_s or self.stall_s) / 4
        while not self.is_ended:
            readable = wait(self.ends, None if look_s == float("inf") else look_s)
            for end in readable:
                self._read(rank_of[end], end)  # type: ignore[index, arg-type]
            self._report_stalls()
            answers = self.negotiator.take()
            if answers:
                self._send(answers)
        for end in self.ends:
            end.close()

    def _read(self, rank: int, end: Connection) -> None:
        """Read all that a rank has sent."""
        try:
            while True:
                self._count(rank, end.recv_bytes(MOST_BYTES))
                if self.is_ended or not end.poll():
                    return
        except (EOFError, OSError):
            self.is_ended = True  # the rank has gone, or its process is ending

    def _count(self, rank: int, message: bytes) -> None:
        kind, content = message[:1], message[1:]
        if kind == _END:
            self.is_ended = True
        elif kind == _EXECUTED:
            self.negotiator.executed(int.from_bytes(content, "little"))
        else:
            if kind == _KNOWN:
                request = self.known[rank][int.from_bytes(content, "little")]
            else:
                request = _requests.decode(content)
            if kind == _NEW:
                self.known[rank].append(request)
            self.timeline.submitted(rank, request)
            self.negotiator.submit(rank, request, time.monotonic())

    def _send(self, answers: list[Answer]) -> None:
        by_rank: dict[int, list[Answer]] = {}
        for answer in answers:
            self.timeline.negotiated(answer)
            ranks = self.negotiator.members.get(answer.set_id, range(len(self.ends)))
            if answer.entries[0].request.kind in ("add_set", "remove_set"):
                ranks = range(len(self.ends))
            for rank in ranks:
                by_rank.setdefault(rank, []).append(answer)
        texts: dict[int, bytes] = {}  # by the list's contents: the ranks of a set get the same bytes
        # Rank 0 last: its process may end once it has its answer.
        for rank, selected in sorted(by_rank.items(), reverse=True):
            key = hash(tuple(map(id, selected)))
            if key not in texts:
                texts[key] = msgspec.msgpack.encode(selected)
            try:
                self.ends[rank].send_bytes(texts[key])
            except OSError:
                self.is_ended = True

    def _report_stalls(self) -> None:
        now_s = time.monotonic()
        for name, missing, waiting in self.negotiator.stalled(now_s, self.stall_s):
            if not waiting.is_reported:
                waiting.is_reported = True
                ranks = ", ".join(map(str, missing))
                print(
                    f"horovod: one or more tensors were submitted to be reduced, gathered or broadcast by a part of "
                    f"the ranks, and wait for the others for over {self.stall_s:g} s.\n"
                    f"  found: {name} was not submitted by rank {ranks}\n"
                    f"  fix: let every rank submit it, or see whether that rank has stopped",
                    file=sys.stderr,
                    flush=True,
                )
            if self.stall_end_s and now_s - waiting.since_s > self.stall_end_s:
                self.is_ended = True


_engine: list[Engine] = []  # empty before init; a list, so that no function needs `global`


def open_engine() -> Engine:
    """Return the engine, made by the first call. Collective."""
    if not _engine:
        _engine.append(Engine())
    return _engine[0]


def close_engine() -> None:
    """End the engine, if there is one."""
    while _engine:
        _engine.pop().close()


def engine() -> Engine:
    """Return the engine.

    Raises:
        ValueError: `init` has not been called.
    """
    if not _engine or api.world() is not _engine[0].world:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _engine[0]


def _leave_after_fork() -> None:
    """Close the connections in a process that was forked from a rank, as the rank's end would not be noticed."""
    for opened in _engine:
        if not opened.failure:
            opened.lock = threading.Lock()  # another thread may have held it
            opened.failure = _FORKED
            for descriptor in opened.descriptors:
                os.close(descriptor)


os.register_at_fork(after_in_child=_leave_after_fork)


def has_engine() -> bool:
    """Return True between `init` and `shutdown`."""
    return bool(_engine) and api.is_initialized() and api.world() is _engine[0].world
