"""Hosts of a fleet try to reach each other: each listens on one port for some seconds and connects to all others.

A port is open only while the doctor asks, on one address, and says nothing to who does not bring a token of this
fleet: 32 hexadecimal digits that the asking host drew and handed to each host on its standard input.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN_BYTES = 32
_TRY_S = 2.0  # one attempt; a firewall that drops is known by then
_PAUSE_S = 0.2
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ReachableHost:
    """Where one host listens, and the token that it answers with."""

    host: str
    address: str
    port: int
    token: str


def meet(own: str, seats: Sequence[ReachableHost], seconds: float) -> dict[str, str]:
    """What happened with each other host: "" is reached, else why not.

    Args:
        own: this host's name in `seats`.
        seats: of all hosts.
        seconds: how long to try; hosts don't start at the same moment, so a refusal is tried again.
    """
    deadline_s = time.monotonic() + seconds
    here = next(seat for seat in seats if seat.host == own)
    others = [seat for seat in seats if seat.host != own]
    listener = threading.Thread(target=_listen, args=(here, others, deadline_s), daemon=True)
    listener.start()
    results: dict[str, str] = {}

    def reach(seat: ReachableHost) -> None:
        results[seat.host] = _reach(here, seat, deadline_s)

    threads = [threading.Thread(target=reach, args=(seat,), daemon=True) for seat in others]
    for thread in threads:
        thread.start()
    for thread in [*threads, listener]:
        thread.join(max(0.0, deadline_s + _TRY_S - time.monotonic()))
    return {seat.host: results.get(seat.host, "no answer") for seat in others}


def _listen(here: ReachableHost, others: Sequence[ReachableHost], deadline_s: float) -> None:
    """Answer each other host that brings its token, until all have come or the time is up."""
    family = socket.AF_INET6 if ":" in here.address else socket.AF_INET
    waiting = {seat.token for seat in others}
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((here.address, here.port))
        listener.listen(_BACKLOG)
        while waiting and time.monotonic() < deadline_s:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_TRY_S)
                said = _read(connection)
                known = {token for token in waiting if hmac.compare_digest(token, said)}
                if known:
                    connection.sendall(here.token.encode())
                waiting -= known


def _reach(here: ReachableHost, seat: ReachableHost, deadline_s: float) -> str:
    """Connect to a host and read its token; "" or the last reason why not."""
    why = "no time"
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((seat.address, seat.port), timeout=_TRY_S) as connection:
                connection.sendall(here.token.encode())
                if hmac.compare_digest(_read(connection), seat.token):
                    return ""
                why = "something else answered"
        except TimeoutError:
            why = "timed out"
        except ConnectionRefusedError:
            why = "refused"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_PAUSE_S)
    return why


def _read(connection: socket.socket) -> str:
    got = b""
    while len(got) < _TOKEN_BYTES and (part := connection.recv(_TOKEN_BYTES - len(got))):
        got += part
    return got.decode("ascii", "replace").replace("�", "?")
