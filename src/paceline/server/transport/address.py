"""Addresses and how to connect to them: unix sockets of this user on one host, mutual TLS 1.3 between hosts."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.errors import PeerLostError, UsageError
from paceline.nouns.reading import parse_whole, shown
from paceline.server.transport.accept import Acceptor, bound, bound_unix
from paceline.server.transport.connection import Connection
from paceline.server.transport.credentials import AUTHORITY, CERTIFICATE, KEY

UNIX = "unix:"
CONNECT_S = 20.0


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen at or connect to: `unix:PATH` or `HOST:PORT`."""

    host: str
    port: int = -1

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises:
            UsageError: it is none.
        """
        if text.startswith(UNIX) and len(text) > len(UNIX):
            path = text.removeprefix(UNIX)
            # sun_path of unix(7) has 108 bytes with the zero at its end.
            if len(path.encode(errors="surrogatepass")) > 107 or "\0" in path:
                raise UsageError(
                    f"can't open a socket at {shown(path)}",
                    f"the path has {len(path)} characters of 107",
                    "name a shorter one",
                )
            return cls(path)
        host, _, port = text.rpartition(":")
        number = parse_whole(port, most=65535)
        if not host or number is None or "\0" in text:
            raise UsageError(
                f"can't read the address {shown(text)}", "it is neither unix:PATH nor HOST:PORT", "write one of these"
            )
        return cls(host, number)

    @property
    def is_unix(self) -> bool:
        """True if it is a socket in the file system."""
        return self.port < 0

    def __str__(self) -> str:
        return f"{UNIX}{self.host}" if self.is_unix else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A folder with the job's authority, and a certificate and key of this process's role."""

    folder: Path

    def context(self, is_server: bool) -> ssl.SSLContext:
        """Return a context of TLS 1.3 in which each side shows a certificate of the job's authority.

        Raises:
            UsageError: a file is missing, or is no certificate or key.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        # All ends are of this package, so nobody needs an older version.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a job's hosts have no names of their own: its authority vouches for them
        # Of the server's context, too: by default only the client checks the other end.
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.folder / AUTHORITY)
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{AUTHORITY}, {CERTIFICATE} and {KEY} in {self.folder}",
                f"they can't be used ({error})",
                "make them with `paceline server credentials FOLDER`, and copy them to each host",
            ) from None
        return context


async def listen(
    address: Address, make: Callable[[], Connection], credentials: Credentials | None
) -> tuple[Acceptor, str]:
    """Accept connections; return the acceptor and its address (port 0 becomes a free one).

    Raises:
        UsageError: the address is in use, can't be had, or leaves the host without credentials.
    """
    try:
        if address.is_unix:
            return Acceptor([bound_unix(address.host)], make, None, process_of), str(address)
        if credentials is None:
            raise _wants_credentials(address)
        context = credentials.context(is_server=True)
        listeners = await bound(address.host, address.port)
        bound_address = f"{address.host}:{listeners[0].getsockname()[1]}"
        return Acceptor(listeners, make, context, _host_of), bound_address
    except OSError as error:
        raise UsageError(
            f"can't listen at {address}",
            f"{error.strerror or error}",
            "free it, or name another with --listen; `paceline run`, started again, takes another port",
        ) from None


def _host_of(end: socket.socket) -> str | None:
    try:
        return str(end.getpeername()[0])
    except OSError:  # it has gone
        return None


async def connect(address: Address, make: Callable[[], Connection], credentials: Credentials | None) -> Connection:
    """Open a connection.

    Raises:
        PeerLostError: nobody answers, or the other is not of this job.
        UsageError: it leaves the host, and there are no credentials.
    """
    loop = asyncio.get_running_loop()
    try:
        # Name look-up and TLS handshake included: a host that drops packets would hold it for minutes.
        async with asyncio.timeout(CONNECT_S):
            if address.is_unix:
                _, protocol = await loop.create_unix_connection(make, address.host)
                return protocol
            if credentials is None:
                raise _wants_credentials(address)
            context = credentials.context(is_server=False)
            _, protocol = await loop.create_connection(make, address.host, address.port, ssl=context)
            return protocol
    except (OSError, TimeoutError) as error:
        fix = "see whether it runs, and whether its credentials are of the same job"
        raise PeerLostError(f"can't connect to {address}", str(error) or "no answer", fix) from None


def role_of(transport: Any) -> str | None:
    """Return the role that the other's certificate names; None on a unix socket, where only this user can connect."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    names: dict[str, str] = {}
    for attributes in certificate.get("subject", ()):  # as SSLSocket.getpeercert gives it: tuples of pairs
        names.update(attributes)
    return str(names.get("commonName", ""))


def user_of(end: socket.socket) -> int | None:
    """Return the user at the other end of a unix socket; None where the system can't say."""
    credentials = _credentials_of(end)
    if credentials is None:
        return None
    _, user = credentials
    return user


def process_of(end: socket.socket) -> int | None:
    """Return the process at the other end of a unix socket; None where the system can't say."""
    if end.family != socket.AF_UNIX:
        return None
    credentials = _credentials_of(end)
    if credentials is None:
        return None
    process, _ = credentials
    return process


def _credentials_of(end: socket.socket) -> tuple[int, int] | None:
    """Return process and user at the other end of a unix socket; None where the system can't say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    ucred = struct.Struct("3i")  # struct ucred of socket(7): process, user, group
    process, user, _ = ucred.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))
    return int(process), int(user)


def _wants_credentials(address: Address) -> UsageError:
    return UsageError(
        f"a connection at {address}, which can leave this host, needs credentials",
        "there are no credentials",
        "write --credentials FOLDER (`paceline server credentials FOLDER` makes them), or use unix:PATH",
    )
