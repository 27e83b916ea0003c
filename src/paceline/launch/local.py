"""Starts the ranks of a job on this host, through a fork server that imports torch once.

The supervisor does not import torch; the fork server does, and each rank is a copy of it, ready in some
milliseconds. Where forking is not safe (macOS, Windows) the same server starts fresh interpreters.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The C library maps and unmaps large tensors at every step unless told otherwise; with huge pages most page
# faults go (570,000 to 71,000 in 12 steps of a small BERT): 12 % of a step with large tensors, less with small.
_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What the fork server must know to start ranks."""

    script: str
    arguments: list[str]
    ranks: int
    run_dir: str
    rendezvous: str
    resume: str | None
    outputs: list[int]  # the writing ends of the ranks' output pipes
    preload: list[str]  # modules to import before the fork
    is_forking: bool
    servers: int  # parameter servers, and a coordinator: numbered after the ranks


@dataclass(slots=True)
class ForkServer:
    """The running fork server: its process, the control socket, and the reading ends of the ranks' output."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    outputs: list[int]


def can_fork() -> bool:
    """Whether a rank may be a fork of a process that has imported torch."""
    return sys.platform.startswith("linux")


def start_ranks(
    script: Path,
    arguments: Sequence[str],
    counts: tuple[int, int],
    folders: tuple[Path, Path],
    resume: Path | None,
    preload: Sequence[str],
) -> ForkServer:
    """Start the fork server and tell it to start the ranks of `script`.

    Args:
        script: the workload file.
        arguments: its arguments.
        counts: of ranks, and of parameter servers beside them.
        folders: the run directory, and the private folder where the ranks meet.
        resume: the checkpoint to go on from.
        preload: modules to import once, before the fork.
    """
    run_dir, private = folders
    ranks, servers = counts
    pipes = [os.pipe() for _ in range(ranks + (servers + 1 if servers else 0))]
    ours, theirs = socket.socketpair()
    writing = [pipe[1] for pipe in pipes]
    command = [sys.executable, "-m", "paceline.run.forkserver", str(theirs.fileno())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), *writing],
        env=rank_environment(ranks),
        start_new_session=True,  # Ctrl-C reaches the supervisor alone, which lets the ranks save
    )
    theirs.close()
    for end in writing:
        os.close(end)
    settings = RankSettings(
        str(script.resolve()),
        list(arguments),
        ranks,
        str(run_dir.resolve()),
        str(private / "rendezvous"),
        str(resume.resolve()) if resume else None,
        writing,
        list(preload),
        can_fork(),
        servers,
    )
    ours.sendall(json.dumps(asdict(settings)).encode() + b"\n")
    return ForkServer(process, ours, [pipe[0] for pipe in pipes])


def rank_environment(ranks: int) -> dict[str, str]:
    """The environment of the ranks: this one's, with the cores shared out and the allocator set, unless they are."""
    environment = dict(os.environ)
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment.setdefault("OMP_NUM_THREADS", threads)
    for name, value in _ALLOCATOR.items():
        environment.setdefault(name, value)
    return environment
