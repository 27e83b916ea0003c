"""Start a host's ranks of a job, through a fork server that imports torch once.

The supervising process does not import torch; the fork server does, and each rank is a copy of it, ready in some
milliseconds. Where forking is not safe (macOS, Windows) the same server starts fresh interpreters.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from paceline.checkpoint.owner import DESCRIPTOR, TOKEN
from paceline.launch.process_template import Process, Start
from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.nouns import module_names
from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import parse_json

# The C library maps and unmaps large tensors at every step unless told otherwise; with huge pages most page
# faults go (570,000 to 71,000 in 12 steps of a small BERT): 12 % of a step with large tensors, less with small.
_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Pipes, sockets and libraries: measured, two ranks end at a limit of 16 files and train at 20, without data loaders.
_FILES = 64
_FILES_OF_RANK = 8


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings with which the fork server starts ranks; they travel as one line of JSON.

    Args:
        script, arguments: the path of the user's file, and its arguments.
        world_size: the number of ranks of the job, on all hosts.
        host_ranks: the ranks of this host.
        rendezvous: the place where all ranks of the job meet.
        run_dir: the run directory of the job.
        resume: the checkpoint to go on from; None: the job begins at step 0.
        preload: the modules to import before the fork.
        servers: the number of parameter servers of the job, on all hosts.
        private: the path of a folder that only this user can enter, gone after the job.
        lock: the descriptor that every process of the job keeps open, for as long as the folder is in use; -1: none.
        outputs: the descriptors of the write ends of the processes' output pipes.
        environment: further variables, only for the ranks.
        is_forking: True where each rank is a fork of the fork server; False: a new interpreter.
        function: the descriptor of the function that every rank calls, in place of the file; -1: there is none.
        run_lock: the descriptor of the run directory's lock, which the fork server and the ranks of this host hold too;
            -1: there is none.
    """

    script: str
    arguments: list[str]
    world_size: int
    host_ranks: HostRanks
    rendezvous: Rendezvous
    run_dir: str
    resume: str | None
    preload: list[str]
    servers: int
    private: str
    lock: int = -1
    outputs: list[int] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    is_forking: bool = False
    function: int = -1
    run_lock: int = -1

    @property
    def processes(self) -> tuple[int, ...]:
        """Return the ranks of this host, and the servers and coordinator with their numbers after all ranks."""
        return self.host_ranks.processes

    @property
    def locks(self) -> list[int]:
        """Return the descriptors of the locks that every process of this host holds."""
        return [lock for lock in (self.lock, self.run_lock) if lock >= 0]

    def to_json(self) -> str:
        """Return the settings as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Read the line that `to_json` wrote.

        Raises:
            ReadError: the text is no such line.
        """
        values = parse_json(text, "a rank's settings", {"host_ranks": {"servers": [int]}, "rendezvous": dict})
        try:
            rendezvous = Rendezvous(**values.pop("rendezvous"))
            fields = values.pop("host_ranks")
            host_ranks = HostRanks(**{**fields, "servers": tuple(fields["servers"])})  # JSON has no tuples
            return cls(host_ranks=host_ranks, rendezvous=rendezvous, **values)
        except TypeError as error:
            fix = "use one version of Paceline on all hosts"
            raise ReadError("can't read a rank's settings", f"they have other parts ({error})", fix) from None


@dataclass(slots=True)
class ForkServer:
    """The running fork server: its process, the control socket, and the read ends of the ranks' output."""

    process: Process
    control: socket.socket
    outputs: dict[int, int]  # the read ends of the output pipes, by rank


def can_fork() -> bool:
    """Return True if a rank may be a fork of a process that has imported torch."""
    return sys.platform.startswith("linux")


def start_ranks(settings: RankSettings, start: Start = subprocess.Popen) -> ForkServer:
    """Start the fork server, by `start`, and tell it to start this host's ranks.

    Raises:
        UsageError: a process may not open as many files as it will need.
    """
    allow_open_files(_FILES + _FILES_OF_RANK * len(settings.processes))  # before: limits are inherited
    # A pipe for each process: whose line it is follows from the pipe.
    outputs: dict[int, int] = {}
    writing = []
    for rank in settings.processes:
        outputs[rank], write_end = os.pipe()
        writing.append(write_end)
    # Both ways: settings and restarts go down, starts and ends come up. Whoever dies first, the other reads its end.
    control, server_end = socket.socketpair()
    listener = [settings.rendezvous.listener] if settings.rendezvous.listener >= 0 else []
    function = [settings.function] if settings.function >= 0 else []
    command = [sys.executable, "-P", "-m", module_names.FORKSERVER, str(server_end.fileno())]
    # Blocked, and inherited so: until the fork server ignores it, SIGINT would be a KeyboardInterrupt in its imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # an agent's standard output is its connection
            pass_fds=[server_end.fileno(), *writing, *listener, *settings.locks, *function],
            env=_environment(settings),
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which lets the ranks save
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    server_end.close()
    for descriptor in [*writing, *listener]:  # the fork server has them now; an output ends when its rank does
        os.close(descriptor)
    # Numbers of descriptors stay the same in the child: `pass_fds` inherits them as they are.
    complete = dataclasses.replace(settings, outputs=writing, is_forking=can_fork())
    control.sendall(complete.to_json().encode() + b"\n")
    return ForkServer(process, control, outputs)


def allow_open_files(needed: int) -> None:
    """Raise this process's limit on open files to `needed`, for the ranks too, where that is allowed.

    Raises:
        UsageError: it is not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"each process of the job should be able to open {needed} files",
            f"the limit on open files is {hard}",
            f"raise it: `ulimit -n {max(needed, 1024)}`",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _environment(settings: RankSettings) -> dict[str, str]:
    environment = rank_environment(settings.host_ranks.count)
    if settings.rendezvous.master:  # torch's store warns of every address that has no name
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environment


def rank_environment(ranks: int) -> dict[str, str]:
    """Return this process's environment for ranks, with the cores shared out and the allocator set, unless they are."""
    environment = dict(os.environ)
    for name in ("PACELINE_PLAN", TOKEN, DESCRIPTOR):  # of a job around this one; the ranks' plan is in a file
        environment.pop(name, None)
    # torch takes a thread per core in every process: with several ranks they would be more than the cores.
    cores = os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    for name, value in _ALLOCATOR.items():
        environment.setdefault(name, value)
    return environment
