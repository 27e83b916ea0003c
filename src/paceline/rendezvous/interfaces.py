"""Find addresses of this host's interfaces, and which leads to another host; listen at one (Linux, macOS; IPv4)."""

from __future__ import annotations

import socket
import sys

from paceline.nouns.errors import UsageError

LOOPBACK = "127.0.0.1"

# All ranks of a job may connect at once.
BACKLOG = 2048  # connections to a store that may wait
CAN_SHARE = sys.platform.startswith("linux")  # a reserved port, with its reservation


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
        UsageError: there is no such interface, or it has none.
    """
    by_interface = addresses()
    if interface not in by_interface:
        names = ", ".join(sorted(by_interface)) or "none"
        raise UsageError(f"the network interface {interface}", "it has no IPv4 address here", f"name one of: {names}")
    return by_interface[interface]


def addresses() -> dict[str, str]:
    """Return the first IPv4 addresses of the interfaces that have one, by name."""
    import psutil  # takes a tenth of the time in which a command starts, and most commands don't need it

    by_interface: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                by_interface.setdefault(name, entry.address)
    return by_interface


def interface_of(address: str) -> str | None:
    """Return the interface that has this address; None where no interface of this host has."""
    for name, its_address in addresses().items():
        if its_address == address:
            return name
    return None


def address_towards(host: str, port: int = 9) -> str:
    """Return the address that the kernel would send from to reach a host. Nothing is sent.

    Raises:
        UsageError: the name has no address, or there is no way to it.
    """
    try:
        *_, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # UDP: this only chooses a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"can't find a route from this host to {host}",
            f"there is none ({error})",
            "see `paceline doctor`, or name an address",
        ) from None


def open_listener(address: str, port: int) -> socket.socket:
    """Return a socket at one address of this host, for torch's store, which by itself would listen on all.

    Raises:
        UsageError: the port is taken.
    """
    listener = _bound(address, port, BACKLOG)
    # Python's sockets are closed in programs that it starts (PEP 446); rank 0 may be one.
    listener.set_inheritable(True)
    return listener


def reserve_port(address: str) -> socket.socket:
    """Return a socket that holds a free port at one address of this host for processes that will listen there.

    As long as it is open, the kernel gives the port to nobody who asks for any, and a listener that names it
    (SO_REUSEADDR) may have it, one after the other: seen with all other ports taken (Linux 6). Where not `CAN_SHARE`
    the socket must be closed before one listens.

    Raises:
        UsageError: there is no such address here, or no port is free.
    """
    return _bound(address, 0, 0)


def _bound(address: str, port: int, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Reservation and listener both need it to have the same port one after the other: see `reserve_port`.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        # 0: the socket is bound only, and takes no connections.
        if backlog:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise UsageError(f"can't listen at {address}:{port}", f"{error.strerror}", "name another port") from None
    return listener
