"""Starts a job's ranks, shows what they say, ends them all when one fails, and tells the first cause."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.local import RankSettings
from paceline.launch.rank_assignment import HostRanks, Rendezvous, with_servers
from paceline.nouns.clock import Clock, WallClock
from paceline.nouns.errors import UsageError
from paceline.run.failures import first_cause, left_early, read_failures, signal_name, silent_death
from paceline.run.private import PrivateFolder, make_private
from paceline.run.supervise.agent import OUTLIVED_S
from paceline.run.supervise.host_backend import HostBackend, Listening, LocalBackend
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.restart_policy import Replaced
from paceline.run.supervise.server_news import ServerNews
from paceline.run.supervise.stalls import DEFAULT_S, VARIABLE, Stalls, process_state
from paceline.server.coordinator.absences import silence_s

SETTLE_S = 0.5  # after the first death the others may write down what they saw, then they are killed
HELD_S = 3.0  # for output, after the last process has ended
LEFT_BEHIND_S = 5.0  # for a worker that the others went on without, when they have ended
GRACE_S = 30.0  # for a checkpoint after Ctrl-C or SIGTERM
THE_COMMAND = "paceline run"  # as one who was asked to stop
_LOOK_S = 1.0  # between two looks for ranks that make no progress
_TICK_S = 0.1
_LONG = 70  # characters: with the folder's name and a data loader's socket they are 107, the most that Linux takes


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """A host, the ranks that it has, and where they meet."""

    backend: HostBackend
    host_ranks: HostRanks
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to run: its file, its ranks, its folder.

    Args:
        ranks: that are started and supervised from here.
        assignments: the hosts that have them; without any, all are on this one.
        world_size: ranks of the job, where others are started elsewhere; 0: there are no others.
        environment: more of it, for the ranks.
        stall_notice_s: seconds without progress after which people are told where the ranks stand; 0: never.
    """

    script: Path
    arguments: Sequence[str]
    ranks: int
    run_dir: Path
    resume: Path | None = None
    preload: Sequence[str] = ()
    grace_s: float = GRACE_S
    servers: int = 0  # parameter servers; their coordinator comes on top
    assignments: Sequence[HostAssignment] = ()
    world_size: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    stall_notice_s: float = DEFAULT_S


@dataclass(slots=True)
class Ending:
    """How a job ended.

    Attributes:
        status: "done", "stopped" or "failed".
        is_regroup: it was stopped by `should_stop`.
        stop_sent_to: who was asked to stop: the command, or ranks; "": nobody.
        is_of_hosts: the first cause is a host's, or a process that was ended by a signal: no error of the file's.
        lost_hosts: hosts to which the connection ended.
        bad_hosts: these, and hosts on which a rank was ended by a signal.
    """

    status: str
    exit_code: int
    cause: dict[str, Any] | None = None
    others: int = 0
    is_regroup: bool = False
    stop_sent_to: str = ""
    is_of_hosts: bool = False
    lost_hosts: tuple[str, ...] = ()
    bad_hosts: tuple[str, ...] = ()


@dataclass(slots=True)
class Supervisor:
    """One job, from its start to its end."""

    request: JobRequest
    screen: Screen
    clock: Clock = field(default_factory=WallClock)
    is_hung: Callable[[], bool] = bool  # asked at every turn; all ranks are killed where it says so
    should_stop: Callable[[], bool] = bool  # the same; all ranks save and end
    is_regroup: bool = False
    alive: dict[int, int] = field(default_factory=dict)  # rank: process
    ended: dict[int, int] = field(default_factory=dict)  # rank: exit code or LEFT, below 0 the signal
    ended_at: dict[int, float] = field(default_factory=dict)  # seconds since the epoch
    killed: set[int] = field(default_factory=set)  # ranks that the supervisor killed itself
    deaths: dict[int, dict[str, Any]] = field(default_factory=dict)
    kill_at_s: float | None = None
    asked_to_stop: list[int] = field(default_factory=list)
    has_told_ranks: bool = False
    lost: list[tuple[HostBackend, float]] = field(default_factory=list)  # hosts with ranks; seconds since the epoch
    replaced: Replaced = field(init=False)
    backends: dict[int, HostBackend] = field(default_factory=dict)  # by rank
    gone: set[int] = field(default_factory=set)  # processes of lost hosts
    left_out: set[int] = field(default_factory=set)  # those of them without which the others went on
    survived: set[HostBackend] = field(default_factory=set)  # where they were
    is_over: bool = False  # the servers' coordinator says that the training has ended
    listening: Listening = field(default_factory=Listening)
    all_ended_s: float | None = None
    progress: Progress = field(init=False)
    news: ServerNews | None = None  # of parameter servers
    stalls: Stalls = field(init=False)
    looked_s: float = float("-inf")  # for stalls
    stopped_s: dict[int, float] = field(default_factory=dict)  # by rank, since when its process has been stopped
    signals_before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = Progress(self.request.run_dir)
        if self.request.servers:
            self.news = ServerNews(self.request.run_dir, self.screen.say, self._end_silent)
        self.replaced = Replaced(self.request.ranks, self.request.servers)
        ranks = self.request.world_size or self.request.ranks
        self.stalls = Stalls(self.request.run_dir, self.request.stall_notice_s, ranks)

    def run(self) -> tuple[Ending, Progress]:
        """Run the job to its end. Nothing is left behind: no process, no file outside the run directory.

        Until `restore_signals`, signals that ask for a stop are noted, and after the job's end change nothing.
        """
        private = None if self.request.assignments else _private_folder()
        progress = self.progress
        assignments = [self._here(private)] if private else self.request.assignments
        self._catch_signals()
        statuses: dict[HostBackend, int] = {}
        try:
            for assignment in assignments:
                self._start(assignment, private)
            while self.listening.open and not self._is_held_open():
                self._turn(progress)
        finally:
            self._kill()
            statuses = {assignment.backend: assignment.backend.close() for assignment in assignments}
            self._outwait_lost_coordinator()
            if private:
                private.remove()
            self.listening.close()
            self.stalls.clear()
        progress.read()
        if progress.last is not None:
            self.screen.show_progress(progress.line(), float("inf"))
        self.screen.end()
        ending = self._with_hosts(self._ending(progress, statuses))
        if self.news is not None and ending.status in ("done", "stopped"):
            self.news.read()
            self.news.tell_end()
            progress.left_out = self.news.left_out
        return ending, progress

    def _here(self, private: PrivateFolder) -> HostAssignment:
        (host_ranks,) = with_servers([HostRanks("", 0, self.request.ranks)], self.request.servers)
        return HostAssignment(LocalBackend(), host_ranks, Rendezvous(str(private.path / "rendezvous")))

    def _start(self, assignment: HostAssignment, private: PrivateFolder | None) -> None:
        request = self.request
        settings = RankSettings(
            str(request.script.resolve()),
            list(request.arguments),
            request.world_size or request.ranks,
            assignment.host_ranks,
            assignment.rendezvous,
            str(request.run_dir.resolve()),
            str(request.resume.resolve()) if request.resume else None,
            list(request.preload),
            request.servers,
            str(private.path) if private else "",
            private.lock if private else -1,
            environment={VARIABLE: str(request.stall_notice_s), **request.environment},
        )
        assignment.backend.start(settings)
        self.backends.update(dict.fromkeys(settings.processes, assignment.backend))
        assignment.backend.listen(self.listening.register, self)

    def _turn(self, progress: Progress) -> None:
        self.listening.turn(_TICK_S)
        now_s = self.clock.now_s()
        for backend in set(self.backends.values()):
            backend.heartbeat(now_s)
        self.is_regroup = self.is_regroup or (not self.asked_to_stop and self.should_stop())
        self._pass_on_stop(now_s)
        if (self.kill_at_s is not None and now_s >= self.kill_at_s) or self.is_hung():
            self._kill()
        if progress.read():
            self.screen.show_progress(progress.line(), now_s)
        if self.news is not None:
            self.news.read()
        if now_s - self.looked_s >= _LOOK_S:
            self.looked_s = now_s
            self._look_for_stalls()

    def _look_for_stalls(self) -> None:
        here = {rank: pid for rank, pid in self.alive.items() if isinstance(self.backends[rank], LocalBackend)}
        if self.news is not None and not self.news.mode:
            self._end_stopped(here)
        for line in self.stalls.look(_time_stamp(), here):
            self.screen.say(line)
        left = None if self.request.servers else self.stalls.who_left()
        if left is not None and self.kill_at_s is None:
            self.deaths[left] = left_early(left, _time_stamp(), "it left its loop and closed the job")
            self._kill()

    def _is_held_open(self) -> bool:
        """Whether all processes have ended, and only something that one of them has left behind holds its output."""
        if len(self.ended.keys() | self.gone) < len(self.backends):
            self.all_ended_s = None
        elif self.all_ended_s is None:
            self.all_ended_s = self.clock.now_s()
            for backend in set(self.backends.values()):
                backend.finish()
        return self.all_ended_s is not None and self.clock.now_s() - self.all_ended_s > HELD_S

    # --- HostEvents

    def on_output(self, rank: int, text: str) -> None:
        """A rank has written a line."""
        self.screen.show_output(rank if self._is_worker(rank) else self.replaced.name(rank), text)

    def on_lost(self, backend: HostBackend) -> None:
        """A fork server or a connection has ended: its ranks end with it, and then the others."""
        left = {rank for rank, own in self.backends.items() if own is backend} - self.ended.keys()
        self.gone |= left
        for rank in left:
            self.alive.pop(rank, None)
        if self._have_workers_ended() or not left:
            return  # it has done its part; others may still be saving
        self.lost.append((backend, _time_stamp()))
        if self._goes_on_without(left):
            self._leave_out(backend, left)
            return
        self.kill_at_s = self.clock.now_s()  # also those that are only about to start
        self._kill()

    def _goes_on_without(self, lost: set[int]) -> bool:
        """Whether a host's processes may be missing: training is under way, and servers have the parameters.

        Neither the coordinator's, nor rank 0's, which saves; under sync no worker's. When a stop has been asked for,
        others may be saving, whoever died.
        """
        request = self.request
        others = set(range(request.ranks)) - lost
        is_useful = any(self.ended.get(rank, 0) == 0 for rank in others)
        self.progress.read()
        if self.news is not None:
            self.news.read()
        needs_all = self.news is not None and self.news.mode == "sync" and min(lost) < request.ranks
        has_begun = bool(request.servers) and not needs_all and self.progress.last is not None
        is_failing = bool(self.deaths) and not self.asked_to_stop
        return has_begun and is_useful and not is_failing and not {0, request.ranks + request.servers} & lost

    def _leave_out(self, backend: HostBackend, lost: set[int]) -> None:
        self.survived.add(backend)
        self.left_out |= lost
        self.ended.update(dict.fromkeys(lost, -signal.SIGKILL))
        names = ", ".join(self.replaced.name(rank) for rank in sorted(lost))
        self.screen.say(f"paceline: {backend.host} is lost; the others go on without {names}")
        self._end_if_all_workers_have()

    def _outwait_lost_coordinator(self) -> None:
        """Lost with the coordinator, a host may train on until its agent knows: none may take its place before."""
        coordinator = self.request.ranks + self.request.servers
        if not (self.request.assignments and self.request.servers and coordinator in self.gone):
            return
        times = [at for backend, at in self.lost if backend is self.backends[coordinator]]
        if not times:
            return
        until = times[0] + OUTLIVED_S
        self.screen.say(
            f"paceline: waiting {OUTLIVED_S:g} s: a lost host that still runs ends its processes in that time"
        )
        before = len(self.asked_to_stop)
        while _time_stamp() < until and len(self.asked_to_stop) == before:
            time.sleep(_TICK_S)

    def _have_workers_ended(self) -> bool:
        return len(self._ended_workers()) == self.request.ranks

    def _end_if_all_workers_have(self) -> None:
        """Servers end when they have nobody left to serve."""
        if self._have_workers_ended():
            self._kill()

    def on_started(self, pids: dict[int, int]) -> None:
        """Ranks have been started."""
        self.alive.update(pids)
        self.replaced.started(pids, self.clock.now_s())
        if self.has_told_ranks:  # the others were told before these were there
            self._tell_ranks(pids)
        self._end_if_all_workers_have()  # a server that comes back only now

    def on_ended(self, rank: int, status: int) -> None:
        """A rank has ended."""
        self.alive.pop(rank, None)
        if self._is_replaced(rank, status):
            return
        self.ended[rank], self.ended_at[rank] = status, _time_stamp()
        self._end_servers(rank, status)
        if self._is_own_doing(rank, status) and status == -signal.SIGTERM:
            if not self.request.servers:  # without it the others can't save; workers of servers can
                self.kill_at_s = min(self.kill_at_s or float("inf"), self.clock.now_s() + SETTLE_S)
        elif status != 0 and not self._is_own_doing(rank, status):
            name = f"rank {rank}" if self._is_worker(rank) else self.replaced.name(rank)
            self.deaths.setdefault(rank, silent_death(rank, status, _time_stamp(), name))
            if self.kill_at_s is None or not self.asked_to_stop:
                self.kill_at_s = min(self.kill_at_s or float("inf"), self.clock.now_s() + SETTLE_S)

    def _end_silent(self, rank: int | None, pid: int, silent_s: float) -> None:
        """Kill a process that the coordinator has given up, unless it has already ended; another takes its place.

        Two hosts may have processes of the same number: where the rank is unknown too, and both run, none is killed.
        """
        found = [one for one, own in self.alive.items() if own == pid and rank in (None, one)]
        if len(found) == 1:
            rank = found[0]
            self.screen.say(f"paceline: {self.replaced.name(rank)} has been silent for {silent_s:.0f} s: killing it")
            self.backends[rank].signal([rank], signal.SIGKILL)

    def _end_stopped(self, here: dict[int, int]) -> None:
        """Kill what has long been stopped (SIGSTOP) before the servers start.

        Afterwards the coordinator gives up who is silent; before, it may not have heard of a process at all. One that
        runs, and takes long to load its data, is left alone.
        """
        now_s = self.clock.now_s()
        stopped = [rank for rank, pid in here.items() if process_state(pid) == "T"]
        self.stopped_s = {rank: self.stopped_s.get(rank, now_s) for rank in stopped}
        for rank, since_s in self.stopped_s.items():
            if now_s - since_s > silence_s(os.environ):
                self._end_silent(rank, here[rank], now_s - since_s)

    def _is_worker(self, rank: int) -> bool:
        """Whether it is a rank, and no server."""
        return not self.request.servers or rank < self.request.ranks

    def _end_servers(self, rank: int, status: int) -> None:
        """A worker that was left behind ends with the servers."""
        request = self.request
        if self._have_workers_ended():
            self._kill()
        elif request.servers and rank == request.ranks + request.servers and status == 0:
            self.is_over = True
            self.kill_at_s = self.clock.now_s() + LEFT_BEHIND_S

    def _is_replaced(self, rank: int, status: int) -> bool:
        """Whether another process takes this one's place."""
        is_ending = bool(self.asked_to_stop) or self.is_regroup or self.kill_at_s is not None or rank in self.killed
        if is_ending or not self.replaced.should(rank, status, self.clock.now_s()):
            return False
        name = self.replaced.name(rank)
        self.screen.say(f"paceline: {name} was ended by {signal_name(-status)}; another takes its place")
        self.backends[rank].restart(rank)
        return True

    def _ended_workers(self) -> dict[int, int]:
        return {rank: status for rank, status in self.ended.items() if self._is_worker(rank)}

    def _is_own_doing(self, rank: int, status: int) -> bool:
        """Whether the supervisor's signal ended the rank: the kill, or the stop before the rank could catch it."""
        was_asked = self.has_told_ranks and status == -signal.SIGTERM
        return was_asked or (rank in self.killed and status == -signal.SIGKILL)

    def _catch_signals(self) -> None:
        def note(number: int, _: object) -> None:
            self.asked_to_stop.append(number)

        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            caught.append(signal.SIGHUP)
        self.signals_before = {number: signal.signal(number, note) for number in caught}

    def restore_signals(self) -> None:
        """Let signals do what they did before `run`."""
        for number, handler in self.signals_before.items():
            signal.signal(number, handler)
        self.signals_before = {}

    def _pass_on_stop(self, now_s: float) -> None:
        if not (self.asked_to_stop or self.is_regroup) or not self.alive:
            return
        if len(self.asked_to_stop) >= 2:
            self._kill()
        elif not self.has_told_ranks:
            self.has_told_ranks = True
            self.kill_at_s = now_s + self.request.grace_s
            why = "stopping: " if self.asked_to_stop else "other hosts: "
            self.screen.say(why + "finishing the step and saving" + ("; once more to kill" * bool(self.asked_to_stop)))
            self._tell_ranks(self.alive)

    def _tell_ranks(self, ranks: Iterable[int]) -> None:
        """Ask them to save and stop."""
        for backend in set(self.backends.values()):
            own = [rank for rank in ranks if self.backends[rank] is backend and self._is_worker(rank)]
            if own:
                backend.signal(own, signal.SIGTERM)

    def _kill(self) -> None:
        self.killed |= self.alive.keys()
        for backend in {self.backends[rank] for rank in self.alive}:
            backend.kill()

    def _with_hosts(self, ending: Ending) -> Ending:
        ending.is_regroup = self.is_regroup and not self.asked_to_stop and ending.status == "stopped"
        ending.lost_hosts = tuple(sorted({backend.host for backend, _ in self.lost}))
        signalled = {self.backends[rank].host for rank, death in self.deaths.items() if self.ended.get(rank, 0) < 0}
        ending.bad_hosts = tuple(sorted({*ending.lost_hosts, *signalled}))
        cause = ending.cause or {}
        is_signalled = cause.get("rank") is not None and self.ended.get(cause["rank"], 0) < 0
        is_of_hosts = not cause or "host" in cause or is_signalled or bool(cause["is_peer_loss"])
        ending.is_of_hosts = is_of_hosts and not self.asked_to_stop
        return ending

    def _ending(self, progress: Progress, statuses: dict[HostBackend, int]) -> Ending:
        stop = self.asked_to_stop[0] if self.asked_to_stop else signal.SIGTERM if self.is_regroup else None
        if stop and progress.has_stopped:
            is_saved = progress.saved_step == progress.stopped_step
            code = 0 if is_saved and stop == signal.SIGTERM else 128 + stop
            return Ending("stopped", code, stop_sent_to=THE_COMMAND if self.asked_to_stop else "")
        ended = self._ended_workers()
        left_behind = (self.killed if self.is_over else set()) | self.left_out
        if self._have_workers_ended() and not any(ended[rank] for rank in ended.keys() - left_behind):
            if progress.has_stopped:
                return Ending("stopped", 128 + signal.SIGTERM, stop_sent_to=_named(progress.asked_to_stop))
            return Ending("done", 0)  # also when the signal came too late to stop anything
        failures = [*{**self.deaths, **read_failures(self.request.run_dir)}.values()]
        told = {backend: backend.failure(statuses[backend], at) for backend, at in self.lost}
        failures += [failure for backend, failure in told.items() if backend not in self.survived]
        # A stop before the first step, or one that had to be forced, kills ranks on purpose.
        if stop and all(failure["is_peer_loss"] for failure in failures):
            return Ending("stopped", 128 + stop, stop_sent_to=THE_COMMAND if self.asked_to_stop else "")
        failures += self._left_early(failures)
        for failure in failures:
            if failure["type"] == "ProcessDied" and progress.last is not None:
                failure["step"] = progress.last["step"] + 1
        failures = failures or [*told.values()]  # those that were survived: nothing else explains the end
        if not failures:  # all were killed on purpose: they hung
            return Ending("failed", 1, None, self.request.ranks)
        cause = first_cause(failures)
        return Ending("failed", cause["exit_code"], cause, self.request.ranks - (cause["rank"] is not None))

    def _left_early(self, failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first rank that ended well, where all failures are of ranks that lost a peer: it is the peer."""
        ended_well = [rank for rank, status in self._ended_workers().items() if status == 0]
        is_explained = bool(self.lost) or not all(failure["is_peer_loss"] for failure in failures)
        if self.request.servers or not failures or is_explained or not ended_well:
            return []
        return [left_early(ended_well[0], self.ended_at[ended_well[0]])]


def _named(ranks: Sequence[int]) -> str:
    """Ranks, as a sentence has them."""
    if not ranks:
        return "a rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _private_folder() -> PrivateFolder:
    """A folder that only this user can enter, with a path short enough for the sockets in it.

    Raises:
        UsageError: it can't be made.
    """
    try:
        folder = tempfile.gettempdir()
        return make_private("/tmp" if len(folder) > _LONG else folder)
    except OSError as error:
        raise UsageError(
            "to make a folder for the job's sockets among temporary files",
            f"it can't be made ({error.strerror})",
            "free space there, or name another place with the variable TMPDIR",
        ) from None


def _time_stamp() -> float:
    return time.time_ns() / 1e9
