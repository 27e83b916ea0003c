"""The process that imports torch once and becomes every rank. `python -m paceline.run.forkserver FD`.

It reads its settings from the socket FD, starts the ranks, and says over the socket who has started and
who has ended and how. With parameter servers it starts these too, and again whom it is told to. When the supervisor
goes, the socket closes and every rank is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.launch.orphans import die_with_parent


def main() -> None:
    """Serve one job."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Not die_with_parent: when the supervisor is killed, somebody must still clear its private folder.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(control.makefile().readline())
    if settings["is_forking"]:
        servers = ["paceline.parallel.server", "paceline.run.server_process"] if settings["servers"] else []
        preload([*servers, *settings["preload"]])
    if _is_gone(control):
        _clear(settings)
        return
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    pids = {}
    wake = (wake_read, wake_write)
    for rank in range(len(settings["outputs"])):
        pids[_start(rank, settings, control, wake)] = rank
    if not settings["servers"]:
        for output in settings["outputs"]:
            os.close(output)
    _send(control, {"started": {rank: pid for pid, rank in pids.items()}})
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _watch(control, wake, pids, settings)
    if pids:  # the supervisor was killed
        _clear(settings)


def preload(modules: list[str]) -> None:
    """Import torch and what the workload file imports; a module that fails will fail, and be told, in the ranks."""
    for name in ["torch.utils.data", "paceline.train.job", "paceline.run.worker", *modules]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks share these objects' pages as long as nobody writes to them


def _start(rank: int, settings: dict[str, Any], control: socket.socket, wake: tuple[int, int]) -> int:
    environment = {
        "PACELINE_RANK": str(rank),
        "PACELINE_WORLD_SIZE": str(settings["ranks"]),
        "PACELINE_LOCAL_RANK": str(rank),
        "PACELINE_LOCAL_SIZE": str(settings["ranks"]),
        "PACELINE_RENDEZVOUS": settings["rendezvous"],
        "PACELINE_RUN_DIR": settings["run_dir"],
    }
    if settings["servers"]:
        private = Path(settings["rendezvous"]).parent
        environment["PACELINE_COORDINATOR"] = f"unix:{private / 'coordinator'}"
    if settings["resume"]:
        environment["PACELINE_RESUME"] = settings["resume"]
    output = settings["outputs"][rank]
    if not settings["is_forking"]:
        command = [sys.executable, "-m", "paceline.run.worker", settings["script"], *settings["arguments"]]
        if rank >= settings["ranks"]:
            command = [sys.executable, "-c", f"import {__name__} as f; exit(f.be_server({rank}, {settings!r}))"]
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, process_group=0
        )
        return process.pid
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    _become_rank(rank, output, environment, settings, [control.fileno(), *wake])
    return 0  # not reached: the rank has ended


def _become_rank(
    rank: int, output: int, environment: dict[str, str], settings: dict[str, Any], close: list[int]
) -> None:
    code = 1
    try:
        die_with_parent()
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in {*close, *settings["outputs"]}:
            os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update(environment)
        if rank >= settings["ranks"]:
            code = be_server(rank, settings)
        else:
            from paceline.run.worker import run_rank

            code = run_rank(settings["script"], settings["arguments"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def be_server(rank: int, settings: dict[str, Any]) -> int:
    """Be a parameter server or, the last of all, their coordinator."""
    from paceline.run.server_process import run_coordinator, run_server

    private = Path(settings["rendezvous"]).parent
    return run_server(private) if rank < settings["ranks"] + settings["servers"] else run_coordinator(private)


def _clear(settings: dict[str, Any]) -> None:
    """Remove the private folder that a killed supervisor left."""
    shutil.rmtree(Path(settings["rendezvous"]).parent, ignore_errors=True)


def _is_gone(control: socket.socket) -> bool:
    """Whether the supervisor ended while torch was being imported."""
    return bool(select.select([control.fileno()], [], [], 0)[0])


def _watch(control: socket.socket, wake: tuple[int, int], pids: dict[int, int], settings: dict[str, Any]) -> None:
    rest = b""
    while True:
        _reap(control, pids)
        if not pids:
            return
        ready, _, _ = select.select([control.fileno(), wake[0]], [], [])
        if wake[0] in ready:
            os.read(wake[0], 4096)
        if control.fileno() not in ready:
            continue
        content = control.recv(4096)
        if not content:  # the supervisor's end
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            _start_again(json.loads(line)["restart"], control, wake, pids, settings)


def _start_again(
    rank: int, control: socket.socket, wake: tuple[int, int], pids: dict[int, int], settings: dict[str, Any]
) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what is forked must not have these
    pid = _start(rank, settings, control, wake)
    pids[pid] = rank
    signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(wake[1], b"x")  # one may have ended in between
    _send(control, {"restarted": rank, "pid": pid})


def _reap(control: socket.socket, pids: dict[int, int]) -> None:
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in pids:
            _send(control, {"ended": pids.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
