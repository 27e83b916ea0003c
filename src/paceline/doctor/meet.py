"""Test whether the hosts of a fleet reach each other: each listens on one port for seconds and connects to all others.

A port is open only while the doctor asks, on one address, and sends nothing to a peer that does not bring a token of
this fleet: 32 hexadecimal digits that the asking host drew and wrote to each host's standard input.
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
_PAUSE_S = 0.2  # the time between attempts
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ReachableHost:
    """The address and port on which one host listens, and the token that it brings and answers with."""

    host: str
    address: str
    port: int
    token: str


def meet(own_name: str, seats: Sequence[ReachableHost], seconds: float) -> dict[str, str]:
    """Try to reach each other host, and return by host "" where it was reached, else the reason.

    Args:
        own_name: the name of this host in `seats`.
        seats: the addresses and tokens of all hosts.
        seconds: the time to try; hosts don't start at the same moment, so a refusal is tried again.
    """
    deadline_s = time.monotonic() + seconds
    own_seat = next(seat for seat in seats if seat.host == own_name)
    peers = [seat for seat in seats if seat.host != own_name]
    listener = threading.Thread(target=_listen, args=(own_seat, peers, deadline_s), daemon=True)
    listener.start()
    results: dict[str, str] = {}

    def reach(seat: ReachableHost) -> None:
        results[seat.host] = _reach(own_seat, seat, deadline_s)

    threads = [threading.Thread(target=reach, args=(seat,), daemon=True) for seat in peers]
    for thread in threads:
        thread.start()
    # The listener is waited for, too: hosts that were reached early must still be answered when others come late.
    for thread in [*threads, listener]:
        thread.join(max(0.0, deadline_s + _TRY_S - time.monotonic()))
    # A thread that is still at it has no result; it is a daemon, and ends with the process.
    return {seat.host: results.get(seat.host, "no answer") for seat in peers}


def _listen(own_seat: ReachableHost, peers: Sequence[ReachableHost], deadline_s: float) -> None:
    """Answer each other host that brings its token, until all have come or the time is up."""
    family = socket.AF_INET6 if ":" in own_seat.address else socket.AF_INET
    waiting = {seat.token for seat in peers}
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((own_seat.address, own_seat.port))
        listener.listen(_BACKLOG)
        # Each token counts once. The port closes as soon as all have come.
        while waiting and time.monotonic() < deadline_s:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            connection, _ = listener.accept()
            # Someone else may connect and leave, or say nothing: the others are still answered.
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_TRY_S)
                token = _read(connection)
                # Compared in constant time, so that the time of a refusal says nothing of the token.
                matches = {expected for expected in waiting if hmac.compare_digest(expected, token)}
                if matches:
                    connection.sendall(own_seat.token.encode())
                waiting -= matches


def _reach(own_seat: ReachableHost, seat: ReachableHost, deadline_s: float) -> str:
    """Connect to a host until it answers with its token; return "", or the last reason why it did not answer."""
    reason = "no time"
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((seat.address, seat.port), timeout=_TRY_S) as connection:
                connection.sendall(own_seat.token.encode())
                if hmac.compare_digest(_read(connection), seat.token):
                    return ""
                reason = "something else answered"
        except TimeoutError:  # a firewall that drops packets
            reason = "timed out"
        except ConnectionRefusedError:  # the host does not listen yet, or a firewall rejects
            reason = "refused"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_PAUSE_S)
    return reason


def _read(connection: socket.socket) -> str:
    """Read a token, or the bytes that come before the other side closes."""
    data = b""
    while len(data) < _TOKEN_BYTES:
        chunk = connection.recv(_TOKEN_BYTES - len(data))
        if not chunk:
            break
        data += chunk
    # `hmac.compare_digest` takes text only if all of it is ASCII.
    return data.decode("ascii", "replace").replace("�", "?")
