"""A run directory belongs to one live job: whoever starts one takes it, and another is refused before it writes.

Two files say whose it is. `owner.lock` is locked by flock(2) for as long as a process lives that could still write: the
command, its fork server and its ranks share one open file, and the kernel drops the lock with the last of them, however
they end. Not every shared disk carries such a lock to other hosts. So `owner.json` names the owner, with a random
token, and the owner touches it every HEARTBEAT_S. What a job does to files that another job would need, such as to
publish a checkpoint or to remove one, it does only while the token is its own. A job that has lost the folder ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.nouns.clock import Clock, WallClock
from paceline.nouns.errors import CheckpointError, ReadError, UsageError, how_to_write
from paceline.nouns.reading import Whole, parse_whole, read_json, read_text, regular
from paceline.nouns.table import printable

RECORD = "owner.json"  # files of the run directory
LOCK = "owner.lock"
TOKEN = "PACELINE_RUN_TOKEN"  # of the ranks; a rank without it takes it from the record, once the ranks have met
DESCRIPTOR = "PACELINE_RUN_LOCK"  # of a rank that shares the lock
LAUNCH = "PACELINE_RUN_LAUNCH"  # of ranks that another launcher started: what they have in common
# Seconds.
HEARTBEAT_S = 10.0  # between two touches of a file that says: this process lives
SILENT_S = 60.0  # without a touch, until its process counts as gone
# By the clocks of two hosts, which may differ by minutes: of a file that was touched longer ago nothing is waited for.
_LONG_AGO_S = 600.0
_NAMED_S = 2.0  # until whoever has just taken the lock has written its name
# For what a killed command leaves: ranks end at once, and a fork server that imports torch when it has done so.
_ENDING_S = 30.0
_TAKEN_S = 600.0  # until rank 0 has the folder: as long as ranks wait for each other (comm/process_group.py)
_REPORT_S = 10.0  # of that, until the user is told
_POLL_S = 0.02
_LOOK_S = 1.0  # between two looks at an owner on another host
_MOST_BYTES = 2**14
_LONGEST = 100  # characters of a command line or a name that are shown
_PACKAGE = Path(__file__).absolute().parents[1]
_FORM = {
    **{"token": str, "launch": str, "host": str, "boot": str, "command": str},
    **{"pid": Whole(1, 2**31 - 1), "started": str, "since": Whole(0, 2**33)},
}


class RunTakenError(CheckpointError):
    """Another job has the run directory now: this one may write nothing more there."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What a run directory says of the process that took it.

    Args:
        token: a random token of one start or restart; "": that job has ended.
        launch: an identifier that its ranks have in common where another launcher started them; "" else.
        host: the name of the host.
        boot: the boot identifier of the host's kernel, new at each start of the machine; "" where there is none.
        pid: the process number on the host.
        started: the time when the kernel started it, in ticks since the boot.
        since: the time when it took the folder, in whole seconds since the epoch.
        command: the beginning of its command line.
    """

    token: str
    launch: str
    host: str
    boot: str
    pid: int
    started: str
    since: int
    command: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {_shown(self.host)}, since {when} ({_shown(self.command)})"


def _boot() -> str:
    try:
        return read_text(Path("/proc/sys/kernel/random/boot_id"), 100).strip()
    except ReadError:
        return ""


@dataclass(frozen=True, slots=True)
class ThisHost:
    """This process's host and its time, so that a test can be several hosts.

    Args:
        host: the name of the host.
        boot: the boot identifier of its kernel.
        clock: the clock by which waits are measured.
        sleep: a function that waits for so many seconds.
    """

    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=_boot)
    clock: Clock = field(default_factory=WallClock)
    sleep: Callable[[float], None] = time.sleep

    def has(self, owner: Owner) -> bool:
        """True if the owner's process was started on this machine, since it was started itself."""
        return owner.boot == self.boot and (bool(self.boot) or owner.host == self.host)

    def knows_dead(self, owner: Owner) -> bool:
        """True if the owner's process was one of this machine, and is no more."""
        if self.has(owner):
            return not _is_alive(owner.pid, owner.started)
        return owner.host == self.host  # the machine was started anew


def _shown(text: str) -> str:
    return printable(text[:_LONGEST])


def _command() -> str:
    """Return this process's command line, without the folder of its program."""
    program = Path(sys.argv[0] if sys.argv else "")
    is_ours = _PACKAGE in program.absolute().parents  # as `python -m paceline` has it
    return shlex.join(["paceline" if is_ours else program.name, *sys.argv[1:]])


def _started(pid: int) -> str:
    """Return when the kernel started a process, in ticks since the boot; "": it has ended, or that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()  # from the third field on; the name before may have brackets itself
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _is_alive(pid: int, started: str) -> bool:
    if started:  # process numbers are used again
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class Ownership:
    """A run directory that this process's job has, until `release`.

    Args:
        folder: the run directory.
        owner: the owner in its record.
        lock: the file descriptor of its lock; -1: the file system has no locks.
        before: the owner that was in its record before; None: there was none.

    Attributes:
        taken: the error of a job that has lost the folder; None as long as it has it.
    """

    def __init__(self, folder: Path, owner: Owner, lock: int, before: Owner | None = None) -> None:
        self.folder = folder
        self.owner = owner
        self.lock = lock
        self.before = before
        self.taken: RunTakenError | None = None
        self._is_over = threading.Event()
        self._changes = threading.Lock()  # of the token, which a thread compares
        self._thread: threading.Thread | None = None

    @classmethod
    def inherited(cls, folder: Path, environment: MutableMapping[str, str]) -> Ownership | None:
        """Return the ownership of the program that this process ran before `exec`; None if that had none."""
        owner = read_owner(folder)
        if owner is None or not owner.token or owner.token != environment.get(TOKEN):
            return None
        lock = parse_whole(environment.get(DESCRIPTOR, ""))
        return cls(folder, owner, -1 if lock is None else lock)

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a rank that shares the lock."""
        lock = {DESCRIPTOR: str(self.lock)} if self.lock >= 0 else {}
        return {TOKEN: self.owner.token, LAUNCH: self.owner.launch, **lock}

    def share(self) -> None:
        """Let the program that this process runs next, by `exec`, go on holding the lock."""
        if self.lock >= 0:
            os.set_inheritable(self.lock, True)

    def start_beating(self) -> None:
        """Touch the record from a thread, so that other hosts see that this job lives."""
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread waits for them
        while not self._is_over.wait(HEARTBEAT_S):
            if self.is_taken():
                return
            with contextlib.suppress(OSError):
                os.utime(self.folder / RECORD)

    def is_taken(self) -> bool:
        """Look whether another job has the folder; from then on `taken` says so."""
        with self._changes:
            try:
                check_owner(self.folder, self.owner.token)
            except RunTakenError as error:
                self.taken = error
        return self.taken is not None

    def check(self) -> None:
        """Raise RunTakenError if another job has the folder."""
        if self.is_taken():
            assert self.taken is not None
            raise self.taken

    def renew(self) -> None:
        """Change the token: what an earlier try has left on another host writes no checkpoint any more.

        Raises:
            RunTakenError: another job has the folder.
            UsageError: it can't be written.
        """
        self.check()
        with self._changes:
            owner = dataclasses.replace(self.owner, token=secrets.token_hex(16))
            try:
                _write(self.folder, owner)
            except OSError as error:
                raise unwritable(self.folder, error) from None
            self.owner = owner

    def release(self, has_begun: bool = True) -> None:
        """Let others have the folder: the job's processes have ended. A folder with nothing else in it goes.

        Args:
            has_begun: True if something was written there; False: the folder stays as it was.
        """
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LOOK_S)  # a file server may hold it
        is_there = self.lock < 0 or _is_at(self.folder / LOCK, self.lock)  # else it was removed, and maybe made anew
        if is_there and not self.is_taken():
            with contextlib.suppress(OSError):
                _leave(self.folder, dataclasses.replace(self.owner, token="") if has_begun else self.before)
        if self.lock >= 0:
            # Not only by `close`: a process that this one has forked, for something else, shares the open file.
            with contextlib.suppress(OSError):
                fcntl.flock(self.lock, fcntl.LOCK_UN)
            os.close(self.lock)
            self.lock = -1


def _leave(folder: Path, record: Owner | None) -> None:
    """Leave a record in the folder; None, or nothing else is there: both files go."""
    other_names = set(os.listdir(folder)) - {RECORD, LOCK}
    if record is None or not other_names:
        for name in (RECORD, LOCK):
            (folder / name).unlink(missing_ok=True)
        if not other_names:
            folder.rmdir()
    elif (folder / RECORD).exists():  # else somebody removes what there is
        _write(folder, record)


def take(
    folder: Path, report: Callable[[str], None], alternative: str, launch: str = "", this_host: ThisHost | None = None
) -> Ownership:
    """Take a run directory for a job, and make it where it is missing.

    Args:
        folder: the run directory.
        report: a function that is told, in a sentence, of waits, and of the owner whose folder is taken over.
        alternative: the advice that names another folder, for an error: "another --job than a".
        launch: an identifier that the job's ranks have in common, where another launcher started them.
        this_host: the host of this process.

    Raises:
        UsageError: another job has it, or it can't be written.
    """
    this_host = this_host or ThisHost()
    try:
        lock = _locked(folder, report, alternative, this_host)
        try:
            before = read_owner(folder)
            if before is not None and before.token:
                _outlast(folder, before, lock >= 0, report, alternative, this_host)
            pid = os.getpid()
            command = _command()[: 2 * _LONGEST]
            since = time.time_ns() // 10**9
            owner = Owner(
                secrets.token_hex(16), launch, this_host.host, this_host.boot, pid, _started(pid), since, command
            )
            _write(folder, owner)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            raise
    except OSError as error:
        raise unwritable(folder, error) from None
    return Ownership(folder, owner, lock, before)


def unwritable(folder: Path, error: OSError) -> UsageError:
    """Return the error for a run directory, or a folder in it, that can't be written."""
    return UsageError(
        f"can't write to {folder}",
        f"it can't be written ({error.strerror})",
        how_to_write(error),
    )


def check_free(folder: Path, asked: str) -> None:
    """Raise UsageError while a job has a run directory.

    Args:
        folder: the run directory.
        asked: the first line of the error.
    """
    try:
        lock = _try_lock(folder / LOCK, 0)
    except OSError:
        return  # it has none, or can't be written at all
    owner = read_owner(folder)
    this_host = ThisHost()
    if lock is not None and lock >= 0:
        os.close(lock)
    is_touched = owner is not None and bool(owner.token) and not this_host.has(owner) and _age_s(folder) < SILENT_S
    if lock is None or is_touched:
        raise _refusal(asked, folder, owner, "", this_host)


def wait_until_taken(
    folder: Path, launch: str, name: str, report: Callable[[str], None], this_host: ThisHost | None = None
) -> None:
    """Wait until the first process of a launch has the run directory: before that others may not write there.

    Args:
        folder: the run directory.
        launch: an identifier that the job's ranks have in common; "": it is not known.
        name: the name of this process, for the user.
        report: a function that is told, in a sentence, if that takes long.
        this_host: the host of this process.

    Raises:
        UsageError: it has it not, after a long time.
    """
    this_host = this_host or ThisHost()
    began_s = this_host.clock.now_s()
    is_reported = False
    while launch:
        owner = read_owner(folder)
        if owner is not None and owner.token and owner.launch == launch:
            return
        waited_s = this_host.clock.now_s() - began_s
        if waited_s > _REPORT_S and not is_reported:
            is_reported = True
            report(f"{name} waits until rank 0 has the run directory {folder}")
        if waited_s > _TAKEN_S:
            found = f"it does not find after {_TAKEN_S:g} s that rank 0 has it"
            if owner is not None and owner.token:
                found = f"another job has it: {owner}"
            raise UsageError(
                f"{name} should write to the run directory {folder} of its job",
                found,
                "see that all hosts share that folder, and whether rank 0 has started",
            )
        this_host.sleep(_POLL_S if waited_s < _LOOK_S else _LOOK_S)


def read_owner(folder: Path) -> Owner | None:
    """Return the last owner of a run directory; None if there was none, or if that can't be read."""
    try:
        record = read_json(folder / RECORD, _FORM, _MOST_BYTES)
    except ReadError:
        return None
    return Owner(**{name: record[name] for name in _FORM})


def check_owner(folder: Path, token: str) -> None:
    """Raise RunTakenError if another job has the run directory, or the job has ended.

    Args:
        folder: the run directory.
        token: the token of this job's start; "": it has none.
    """
    owner = read_owner(folder)
    # Without a record nobody has taken it: whatever removed the record, such as `rm -r`, is told where it matters.
    if owner is None or not token or owner.token == token:
        return
    found, fix = "its job has ended", "nothing: this process should have ended with it"
    if owner.token:
        found = f"another start has taken it: {owner}"
        fix = f"let that one go on, or end it and start again with --resume --job {folder.name}"
    raise RunTakenError(f"the job should have the run directory {folder} to itself", found, fix)


def is_of_launch(folder: Path, launch: str) -> bool:
    """True unless a job of another launch has the run directory."""
    owner = read_owner(folder)
    return owner is None or not owner.token or owner.launch == launch


def keep_lock(environment: MutableMapping[str, str]) -> None:
    """Hold the lock only in this rank, and not in processes that it starts or forks: they may outlive the job."""
    lock = parse_whole(environment.pop(DESCRIPTOR, ""))
    if lock is None:
        return

    def close() -> None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock), opened):  # the rank may have closed it, and have another of its number
                os.close(lock)

    with contextlib.suppress(OSError):  # none was inherited
        opened = os.fstat(lock)
        os.set_inheritable(lock, False)
        os.register_at_fork(after_in_child=close)


def _locked(folder: Path, report: Callable[[str], None], alternative: str, this_host: ThisHost) -> int:
    """Return the descriptor of the lock, once it is this process's; -1 where there are no locks.

    Raises:
        UsageError: a living job has it.
        OSError: it can't be made.
    """
    began_s = this_host.clock.now_s()
    is_reported = False
    while True:
        lock = _try_lock(folder / LOCK, os.O_CREAT)
        if lock is not None:
            return lock
        owner = read_owner(folder)
        patience_s = 0.0
        if owner is None or not owner.token:
            patience_s = _NAMED_S
        elif this_host.has(owner) and this_host.knows_dead(owner):
            patience_s = _ENDING_S
        waited_s = this_host.clock.now_s() - began_s
        if waited_s >= patience_s:
            raise _refusal(f"can't start a job in {folder}", folder, owner, alternative, this_host)
        if waited_s > _LOOK_S and patience_s == _ENDING_S and not is_reported:
            is_reported = True
            report(f"waiting for the last processes of the job that had {folder.name}: its command has ended")
        this_host.sleep(_POLL_S)


def _try_lock(path: Path, flags: int) -> int | None:
    """Return the descriptor of a lock that this process now has; None: another has it; -1: there are no locks here.

    Raises:
        OSError: the file can't be opened.
    """
    while True:
        if flags & os.O_CREAT:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # To write: over NFS only such a file can be locked (flock(2)).
            lock = os.open(path, os.O_RDWR | os.O_NONBLOCK | flags, 0o666)
        except FileNotFoundError:
            if flags & os.O_CREAT:
                continue  # whoever had the folder has just removed it
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            # Others are ENOLCK, ENOTSUP, EINVAL or ENOSYS, as NFS and FUSE have it.
            return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else -1
        if _is_at(path, lock):
            return lock
        os.close(lock)  # the file was removed in between: its lock keeps nobody off


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _outlast(
    folder: Path, owner: Owner, has_lock: bool, report: Callable[[str], None], alternative: str, this_host: ThisHost
) -> None:
    """Return when an owner whose lock is not seen is gone; raise UsageError if it lives.

    Args:
        folder: the run directory.
        owner: the owner in its record, which has it.
        has_lock: True if this process has its lock.
        report, alternative, this_host: the arguments of `take`.
    """
    if (has_lock and this_host.has(owner)) or this_host.knows_dead(owner):
        return
    asked = f"can't start a job in {folder}"
    if this_host.has(owner):  # on a disk without locks
        raise _refusal(asked, folder, owner, alternative, this_host)
    if _age_s(folder) < _LONG_AGO_S:
        report(f"waiting whether {owner} still has {folder.name}: {SILENT_S:g} s without a sign of life")
        if not _falls_silent(folder, owner, this_host):
            raise _refusal(asked, folder, owner, alternative, this_host)
    report(f"{folder.name} is taken over: no sign of life of {owner}")


def _falls_silent(folder: Path, owner: Owner, this_host: ThisHost) -> bool:
    """True if an owner on another host gives the folder up, or does not touch it for SILENT_S."""
    # The file's time is only compared with the one seen before: hosts' clocks differ.
    touched = _touched(folder)
    quiet_s = 0.0
    looked_s = this_host.clock.now_s()
    while quiet_s < SILENT_S:
        this_host.sleep(_LOOK_S)
        now_s = this_host.clock.now_s()
        quiet_s += min(now_s - looked_s, 2 * _LOOK_S)  # this process may have been suspended
        looked_s = now_s
        current = read_owner(folder)
        if current is None or not current.token:
            return True
        if current.token != owner.token or _touched(folder) != touched:
            return False
    return True


def _touched(folder: Path) -> int:
    """Return when the record was touched, in nanoseconds; 0: it can't be read."""
    try:
        with open(folder / RECORD, "rb", opener=regular) as file:  # over NFS, opening it asks the server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _age_s(folder: Path) -> float:
    """Return the seconds since the record was touched, by this host's clock."""
    return (time.time_ns() - _touched(folder)) / 1e9


def _refusal(asked: str, folder: Path, owner: Owner | None, alternative: str, this_host: ThisHost) -> UsageError:
    """Return the error of who may not have a run directory, with whoever has it.

    Args:
        asked: the first line of the error.
        folder: the run directory.
        owner: the owner in its record; None: not known.
        alternative: the advice that names another folder; "": there is no such choice.
        this_host: the host of this process.
    """
    found = "another process has it, and does not say which job it is of"
    pids: tuple[int, ...] = ()
    place = ""
    if owner is not None and owner.token:
        found = f"another job has it: {owner}"
        pids = (owner.pid,)
        place = "" if this_host.has(owner) else f" on {_shown(owner.host)}"
        if not place and this_host.knows_dead(owner):
            found += "; that process has ended, and others of its job have not"
            pids = ()
    pids = pids or _keepers(folder / LOCK)
    end = f"end it (`kill {' '.join(map(str, pids))}`{place})" if pids else "end it"
    fix = f"wait for its end, {end}, or write {alternative}" if alternative else f"wait for its end, or {end}"
    return UsageError(asked, found, fix)


def _keepers(lock: Path) -> tuple[int, ...]:
    """Return this user's processes that have the lock's file open, where the system shows that (Linux)."""
    pids = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), lock.stat()):
                pids.add(int(link.parts[2]))
    return tuple(sorted(pids))


def _write(folder: Path, owner: Owner) -> None:
    """Write the record at once: somebody may be reading it."""
    draft = folder / f".{RECORD}.{secrets.token_hex(4)}"
    try:
        draft.write_text(json.dumps(asdict(owner), indent=1) + "\n")
        draft.replace(folder / RECORD)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
