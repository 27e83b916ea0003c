"""Which network interface of this host leads to another, and listening at one address of it (Linux, macOS; IPv4)."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from paceline.nouns.errors import UsageError

BACKLOG = 2048  # connections to a store that may wait
CAN_SHARE = sys.platform.startswith("linux")  # a reserved port, with its reservation
_SIOCGIFADDR = 0x8915 if sys.platform.startswith("linux") else 0xC0206921  # net/if.h


def address_of(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        UsageError: there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(sorted(addresses())) or "none"
            raise UsageError(
                f"the network interface {interface}",
                f"it has no IPv4 address here ({error.strerror})",
                f"name one of: {known}",
            ) from None
    return socket.inet_ntoa(answer[20:24])


def addresses() -> dict[str, str]:
    """Interfaces that have an IPv4 address, and that."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The interface that has this address; None: no interface of this host has."""
    return next((name for name, own in addresses().items() if own == address), None)


def address_towards(host: str, port: int = 9) -> str:
    """This host's address on the way to another: of a socket that the kernel would send from; nothing is sent.

    Raises:
        UsageError: the name has no address, or there is no way to it.
    """
    try:
        known = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(known[0][4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"can't find a route from this host to {host}",
            f"there is none ({error})",
            "see `paceline doctor`, or name an address",
        ) from None


def open_listener(address: str, port: int) -> socket.socket:
    """A socket at one address of this host, for torch's store, which by itself would listen on all.

    Raises:
        UsageError: the port is taken.
    """
    listener = _bound(address, port, BACKLOG)
    listener.set_inheritable(True)
    return listener


def reserve_port(address: str) -> socket.socket:
    """A socket that holds a free port at one address of this host for processes that will listen there.

    As long as it is open, the kernel gives the port to nobody who asks for any, and a listener that names it
    (SO_REUSEADDR) may have it, one after the other: seen with all other ports taken (Linux 6). Where not `CAN_SHARE`
    the socket must be closed before one listens.

    Raises:
        UsageError: there is no such address here, or no port is free.
    """
    return _bound(address, 0, 0)


def _bound(address: str, port: int, backlog: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((address, port))
        if backlog:
            found.listen(backlog)
    except OSError as error:
        found.close()
        raise UsageError(
            f"can't listen at {address}:{port}", f"it can't be had ({error.strerror})", "name another port"
        ) from None
    return found
