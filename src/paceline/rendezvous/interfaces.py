"""Find addresses of this host's interfaces, and which leads to another host; listen at one (Linux, macOS; IPv4)."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from paceline.nouns.errors import UsageError

# All ranks of a job may connect at once.
BACKLOG = 2048  # connections to a store that may wait
CAN_SHARE = sys.platform.startswith("linux")  # a reserved port, with its reservation
_SIOCGIFADDR = 0x8915 if sys.platform.startswith("linux") else 0xC0206921  # net/if.h


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
        UsageError: there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return _ask_kernel(probe, interface)
        except OSError as error:
            names = ", ".join(sorted(addresses())) or "none"
            raise UsageError(
                f"the network interface {interface}",
                f"it has no IPv4 address here ({error.strerror})",
                f"name one of: {names}",
            ) from None


def addresses() -> dict[str, str]:
    """Return the IPv4 addresses of the interfaces that have one, by name."""
    by_interface: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                by_interface[name] = _ask_kernel(probe, name)
            except OSError:
                continue  # it has none
    return by_interface


def _ask_kernel(probe: socket.socket, interface: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        OSError: there is no such interface, or it has none.
    """
    # struct ifreq of netdevice(7): a name of 15 characters and a zero, then a sockaddr_in, whose bytes 4 to 8 are it.
    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


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
