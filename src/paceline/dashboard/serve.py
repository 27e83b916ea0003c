"""Listen, and answer with the dashboard until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import uvicorn

from paceline.dashboard.access import LOOPBACK, Access, token_of
from paceline.dashboard.app import Dashboard
from paceline.nouns.errors import UsageError

PORT = 8265
_TRIED = 20  # the number of ports to try, where none is asked for


def serve(runs: Path, host: str, port: int | None, report: Callable[[str], None], job: str | None = None) -> None:
    """Serve the dashboard of a folder of runs, until Ctrl-C or SIGTERM.

    Args:
        runs: the folder that has the run directories.
        host: an address or a name of this machine to listen on.
        port: the port to listen on; None: PORT, or the next that is free; 0: any.
        report: a function that is called with the address, which has the token in it.
        job: the run to which the address leads; None: to the list.

    Raises:
        UsageError: the address or port can't be listened on, or the token of the environment is no token.
    """
    token = token_of(os.environ)
    listener = _listener(host, port)
    with listener:
        pages = Dashboard(runs)
        # Reading a thousand runs takes a third of a second: it is done before somebody has opened the address.
        threading.Thread(target=pages.list.runs, daemon=True).start()
        bound = listener.getsockname()[1]
        is_loopback = _is_loopback(listener.getsockname()[0])
        access = Access(token, bound, (*LOOPBACK, host.lower())) if is_loopback else Access(token, bound, hosts=())
        name = f"[{host}]" if ":" in host else host
        path = f"run/{quote(job, safe='')}" if job else ""
        report(f"http://{name}:{bound}/{path}?token={token}")
        if not is_loopback:
            report(f"it listens on {host} without encryption: who reads the network reads the token and the runs")
        # uvicorn's log of requests would have the token.
        settings = uvicorn.Config(
            pages.app(access), log_level=logging.WARNING, access_log=False, lifespan="off",
            server_header=False, timeout_graceful_shutdown=1, ws="none",
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has ended
            uvicorn.Server(settings).run(sockets=[listener])


def _listener(host: str, port: int | None) -> socket.socket:
    tried = range(PORT, PORT + _TRIED) if port is None else [port]
    for number in tried:
        try:
            return _bound(host, number)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            raise _refused(host, port, error) from None
    raise AssertionError("there is a last port")


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _refused(host: str, port: int | None, error: OSError) -> UsageError:
    asked = f"listen on {host}" if port is None else f"listen on {host}, port {port}"
    if isinstance(error, socket.gaierror):
        return UsageError(asked, f"there is no such address ({error.strerror})", "write an address of this machine")
    if error.errno == errno.EADDRINUSE:
        fix = "choose another with --port, or leave --port out: then a free one is taken"
        if port is None:
            fix = "choose a port with --port"
        return UsageError(asked, "another program listens there" if port is not None else "no port is free", fix)
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(asked, "this machine has no such address", "leave --host out to listen on this machine alone")
    if error.errno == errno.EACCES:
        return UsageError(asked, "ports below 1024 need rights that this user lacks", "choose a larger --port")
    return UsageError(asked, f"it can't be listened on ({error.strerror})", "choose another --host or --port")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
