"""The process that imports torch once and becomes every rank. `python -m paceline.run.rank.forkserver FD`.

It reads its settings from the socket FD, starts the ranks, and reports over the socket each start and each end with its
status. A process that ends with exit code 0 before its file does is reported as EXITED_EARLY.
For a script that makes its process group itself it holds the store of torch's at which the ranks meet, as torchrun's
agent does.
In a job with parameter servers it starts these too, and starts each process again that the supervisor names, until it
hears that no more will be named. When the supervisor goes, the socket closes and every rank is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.checkpoint.owner import DESCRIPTOR
from paceline.launch.local import RankSettings
from paceline.launch.process_exit import die_with_parent, exit_process, kill_group
from paceline.launch.torchrun_variables import AS_TORCHRUN, has_rank, torchrun_variables
from paceline.nouns import module_names
from paceline.run.failures import EXITED_EARLY, SUPERVISED
from paceline.server.transport.credentials import credentials_folder

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Pipes:
    """The descriptors that the fork server uses itself.

    Attributes:
        control: the socket to the supervisor.
        wake_read, wake_write: the pipe to which Python writes at every signal, so that `select` returns.
        finished_read, finished_write: the pipe to which a rank writes its process number at the end of its file.
        finished: the process numbers that were read from that pipe so far.
    """

    control: socket.socket
    wake_read: int
    wake_write: int
    finished_read: int
    finished_write: int
    finished: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, control: socket.socket) -> Pipes:
        """Open the pipes."""
        pipes = cls(control, *os.pipe(), *os.pipe())
        os.set_blocking(pipes.wake_write, False)
        os.set_blocking(pipes.finished_read, False)
        return pipes

    @property
    def not_for_ranks(self) -> list[int]:
        """Return the descriptors that a rank closes after the fork."""
        return [self.control.fileno(), self.wake_read, self.wake_write, self.finished_read]

    def has_finished(self, pid: int) -> bool:
        """Return True if a process that has ended had run its file to the end."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self.finished_read, 2**16):
                for (number,) in _NUMBER.iter_unpack(content):
                    self.finished.add(number)
        return pid in self.finished


_LONGEST_FOLDER = 89  # characters: with a data loader's socket they are 107, the most that Linux takes
_NUMBER = struct.Struct("<q")  # far below PIPE_BUF: each write is whole


def main() -> None:
    """Serve one job."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Settings, imports, ranks, and only then the handler of SIGCHLD and the wakeup descriptor: forks inherit both.
    # Not die_with_parent: when the supervisor is killed, somebody must still clear its private folder.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see launch/local.py
    settings = RankSettings.from_json(control.makefile().readline())
    if settings.is_forking:
        modules = list(settings.preload)
        if settings.servers:
            modules = [module_names.PARALLEL_SERVER, module_names.SERVER_PROCESS, *modules]
        preload(modules)
    if _is_gone(control):
        _clear(settings)
        return
    for lock in settings.locks:
        os.set_inheritable(lock, False)  # for ranks, not for programs that they start
    pipes = Pipes.open(control)
    pids = {}
    for rank in settings.processes:
        pids[_start(rank, settings, pipes)] = rank
    if not settings.servers:  # with servers each may be started again, and needs its output then
        for output in settings.outputs:
            os.close(output)
    store = _open_store(settings)  # held until the ranks have ended
    _send(control, {"started": {rank: pid for pid, rank in pids.items()}})
    signal.set_wakeup_fd(pipes.wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # Python writes to the wakeup pipe only for handled signals
    _watch(pipes, pids, settings)
    del store
    if pids or settings.servers:  # the supervisor may have been killed; one that lives has no more use for it
        _clear(settings)


def _open_store(settings: RankSettings) -> object:
    """Open the store at which ranks meet by torchrun's variables; None: rank 0, or another host, has the ranks' store.

    It has a thread, so it is opened after the forks. Ranks that come before wait in the listener's queue.
    """
    listener = settings.rendezvous.listener
    if listener < 0:
        return None
    if not has_rank(settings.environment):
        os.close(listener)  # rank 0 has it
        return None
    from paceline.comm.process_group import serve_store

    host, _, port = settings.rendezvous.master.rpartition(":")
    return serve_store(host.strip("[]"), int(port), listener)


def preload(modules: list[str]) -> None:
    """Import torch and the workload file's imports; a module that fails here fails, and is reported, in the ranks."""
    gc.disable()  # collections would take a sixth of the time in which torch is imported (measured)
    _import(["torch.utils.data", module_names.JOB, module_names.WORKER])
    # What is imported lives on; frozen, no collection in a rank visits it, which would write to each object's header:
    # the ranks share these objects' pages as long as nobody writes to them. It is frozen with what the imports left
    # behind, 0.7 MB: to find that takes 0.14 s, a tenth of the time of the imports (measured).
    gc.freeze()
    gc.enable()  # before the user's modules, which may have their own wish
    _import(modules)
    gc.collect()
    gc.freeze()


def _import(modules: list[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def environment_of(rank: int, settings: RankSettings) -> dict[str, str]:
    """Return the environment variables that tell a rank its place in the job."""
    host_ranks = settings.host_ranks
    environment = {
        **settings.environment,
        "PACELINE_RANK": str(rank),
        "PACELINE_WORLD_SIZE": str(settings.world_size),
        "PACELINE_LOCAL_RANK": str(rank - host_ranks.first),
        "PACELINE_LOCAL_SIZE": str(host_ranks.count),
        "PACELINE_CROSS_RANK": str(host_ranks.cross_rank),
        "PACELINE_CROSS_SIZE": str(host_ranks.cross_size),
        "PACELINE_RUN_DIR": settings.run_dir,
        SUPERVISED: "1",
    }
    environment.update(_meeting(rank, settings))
    rendezvous = settings.rendezvous
    if settings.servers:
        on_this_host = f"unix:{Path(settings.private) / 'coordinator'}"
        environment["PACELINE_COORDINATOR"] = rendezvous.coordinator or on_this_host
        environment["PACELINE_CREDENTIALS"] = ""  # unset, too
        if rendezvous.coordinator:
            environment["PACELINE_CREDENTIALS"] = str(credentials_folder(Path(settings.private), "worker"))
    if settings.resume:
        environment["PACELINE_RESUME"] = settings.resume
    if settings.run_lock >= 0:
        environment[DESCRIPTOR] = str(settings.run_lock)
    return environment


def _meeting(rank: int, settings: RankSettings) -> dict[str, str]:
    """Return the variables that tell a rank where the ranks meet."""
    rendezvous = settings.rendezvous
    # Both are unset where they are "": another launcher around this one may have set them.
    variables = {"PACELINE_RENDEZVOUS": rendezvous.file, "PACELINE_MASTER": rendezvous.master}
    if rendezvous.interface:
        variables["PACELINE_INTERFACE"] = rendezvous.interface
    if has_rank(settings.environment):
        return {**variables, "PACELINE_MASTER": "", **torchrun_variables(rank, settings)}
    if rendezvous.listener >= 0 and rank == 0:
        variables["PACELINE_LISTENER"] = str(rendezvous.listener)
    return variables


def _start(rank: int, settings: RankSettings, pipes: Pipes, more: Mapping[str, str] = _NOTHING) -> int:
    """Start a rank or a server, and return its process number."""
    environment = {**environment_of(rank, settings), **more}
    output = settings.outputs[settings.processes.index(rank)]
    if not settings.is_forking:
        return _start_interpreter(rank, output, environment, settings, pipes)
    # The parent must not report the rank before it has a session: a kill of its process group would miss it. The pipe
    # is closed by the child after `setsid`, or by the kernel if the child dies before.
    has_session, in_session = os.pipe()
    pid = os.fork()
    if pid:
        os.close(in_session)
        os.read(has_session, 1)  # ends when the child has its own process group, which killpg needs, or is gone
        os.close(has_session)
        return pid
    os.close(has_session)
    _become_rank(rank, output, environment, settings, pipes, in_session)
    return 0  # not reached: the rank has ended


def _start_interpreter(
    rank: int, output: int, environment: dict[str, str], settings: RankSettings, pipes: Pipes
) -> int:
    """Start a rank or a server in a new interpreter: where a process that has imported torch can't be forked."""
    passed = []
    if "PACELINE_LISTENER" in environment:
        passed.append(settings.rendezvous.listener)
    if _is_server(rank, settings):
        arguments = _server_arguments(rank, settings)
        command = [sys.executable, "-c", f"import {__spec__.name} as f; exit(f.be_server(*{arguments!r}))"]
    else:
        command = [sys.executable, "-P", "-m", module_names.WORKER, settings.script, *settings.arguments]
        if settings.function >= 0:
            command = [sys.executable, "-P", "-m", module_names.FUNCTION, str(settings.function)]
            passed.append(settings.function)
        passed.append(pipes.finished_write)
        if settings.run_lock >= 0:
            passed.append(settings.run_lock)
        environment["PACELINE_FINISHED"] = str(pipes.finished_write)
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace", **environment},
        stdout=output,
        stderr=output,
        start_new_session=True,  # see _become_rank
        pass_fds=passed,
    )
    return process.pid


def _is_server(rank: int, settings: RankSettings) -> bool:
    return rank in settings.host_ranks.servers


def _server_arguments(number: int, settings: RankSettings) -> tuple[bool, str, str, str]:
    """Return the arguments of `be_server`."""
    is_coordinator = number == settings.world_size + settings.servers
    return is_coordinator, settings.private, settings.rendezvous.coordinator, settings.rendezvous.own


def _become_rank(
    rank: int, output: int, environment: dict[str, str], settings: RankSettings, pipes: Pipes, in_session: int
) -> None:
    code = 1
    close = pipes.not_for_ranks
    try:
        die_with_parent()
        # A session of its own, not only a process group: Linux shares the CPU between sessions (autogroup), so ranks
        # of one session would together get no more time than any one other program. torchrun's ranks have one each.
        os.setsid()
        os.close(in_session)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if settings.rendezvous.listener >= 0 and "PACELINE_LISTENER" not in environment:
            close = [*close, settings.rendezvous.listener]
        for descriptor in {*close, *settings.outputs}:
            os.close(descriptor)
        # The supervisor reads UTF-8, whatever the terminal's encoding is. New objects: those of the fork server
        # remember whether its own output could seek.
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        os.environ.update(environment)
        if _is_server(rank, settings):
            code = be_server(*_server_arguments(rank, settings))
        else:
            keep_temporary_files_in(settings.private)
            code = _be_rank(settings)
        exit_process(code, partial(tell_finished, pipes.finished_write))
    except BaseException:  # such as of an import: what comes later `run_rank` writes down
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _be_rank(settings: RankSettings) -> int:
    """Run the file, or call the function that was sent, and return the exit code."""
    if settings.function >= 0:
        from paceline.run.rank.function import run_function

        return run_function(settings.function)
    from paceline.run.rank.worker import run_rank

    return run_rank(settings.script, settings.arguments)


def tell_finished(finished_write: int) -> None:
    """Write to the pipe that this process has run its file to the end."""
    os.write(finished_write, _NUMBER.pack(os.getpid()))


def keep_temporary_files_in(private: str) -> None:
    """Have data loaders keep their sockets there: in a folder of their own they stay when they are killed."""
    if private and len(private) <= _LONGEST_FOLDER:
        multiprocessing.current_process()._config["tempdir"] = private  # type: ignore[attr-defined]


def be_server(is_coordinator: bool, private: str, coordinator: str, address: str) -> int:
    """Run a parameter server, or their coordinator: see `run/rank/server_process.py`."""
    from paceline.run.rank.server_process import run_coordinator, run_server

    if is_coordinator:
        return run_coordinator(Path(private), coordinator)
    return run_server(Path(private), coordinator, address)


def _clear(settings: RankSettings) -> None:
    """Remove the private folder that a killed supervisor left."""
    if settings.private:
        shutil.rmtree(settings.private, ignore_errors=True)


def _is_gone(control: socket.socket) -> bool:
    """Return True if the supervisor ended while torch was imported: seconds in which nobody reads the socket."""
    readable, _, _ = select.select([control.fileno()], [], [], 0)
    return bool(readable)  # before ranks have been started the supervisor says nothing: it is the socket's end


def _watch(pipes: Pipes, pids: dict[int, int], settings: RankSettings) -> None:
    """Report ranks that end, and start those anew that the supervisor names, until it goes or all ranks have ended."""
    unfinished_line = b""
    control = pipes.control
    wake_read = pipes.wake_read
    while True:
        _reap(pipes, pids, settings)
        if not pids and not settings.servers:  # of a server's job each may be started again
            return
        ready, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        if control.fileno() not in ready:
            continue
        try:
            content = control.recv(4096)
        except ConnectionResetError:  # it was killed before it had read everything
            content = b""
        if not content:  # the supervisor's end; by process groups, so that data loaders' workers end too
            for pid in pids:
                kill_group(pid)
            return
        *lines, unfinished_line = (unfinished_line + content).split(b"\n")
        for line in lines:
            _start_again(json.loads(line)["restart"], pipes, pids, settings)


def _start_again(rank: int, pipes: Pipes, pids: dict[int, int], settings: RankSettings) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # forked processes must not have these
    pid = _start(rank, settings, pipes, {"PACELINE_TAKES_OVER": "1"})
    pids[pid] = rank
    signal.set_wakeup_fd(pipes.wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(pipes.wake_write, b"x")  # one may have ended in between
    _send(pipes.control, {"restarted": rank, "pid": pid})


def _reap(pipes: Pipes, pids: dict[int, int], settings: RankSettings) -> None:
    """Report every rank that has ended by now, and take it out of `pids`."""
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in pids:
            code = os.waitstatus_to_exitcode(status)
            # A server in an interpreter of its own has no pipe to say that it finished.
            can_tell = settings.is_forking or not _is_server(pids[pid], settings)
            is_plain = AS_TORCHRUN in settings.environment  # a script of torch's may end by os._exit(0)
            if code == 0 and can_tell and not is_plain and not pipes.has_finished(pid):
                code = EXITED_EARLY
            if code != 0:
                kill_group(pid)
            _send(pipes.control, {"ended": pids.pop(pid), "status": code})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
    exit_process(0)
