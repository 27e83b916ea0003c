"""Look at the network of this host: interfaces, routes, names, ports and the clock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import math
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.doctor.facts import Interface, Name, Network, Port
from paceline.nouns.reading import parse_whole

_NAME_S = 10.0  # a name server that is gone is given up by the system after 10 to 30 s
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than struct timex has
_BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "vmnet", "lxc", "podman", "ifb", "dummy")
_TUNNELS = ("tun", "tap", "wg", "zt", "tailscale", "vxlan", "geneve", "utun", "awdl", "llw")  # the last three: macOS


def look_at_network(
    names: Sequence[str], ports: Sequence[int], environment: Mapping[str, str], root: Path = Path("/")
) -> Network:
    """Return the facts of interfaces, routes, names and ports.

    Args:
        names: the names of other hosts, to resolve; this host's, localhost and MASTER_ADDR are added.
        ports: the ports to try to listen on.
        environment: the variables that matter to training.
        root: the folder in place of `/`.
    """
    hostname = socket.gethostname()
    master = environment.get("MASTER_ADDR") or "localhost"
    every_name = dict.fromkeys([hostname, "localhost", master, *names])  # each once, in this order
    lookups = resolve_all(list(every_name))
    routes = {}
    for name in names:
        address = _own_address_towards(lookups[name].addresses)
        if address:
            routes[name] = address
    return Network(
        hostname=hostname,
        interfaces=look_at_interfaces(),
        default_interface=default_interface(root),
        routes=routes,
        names=lookups,
        ports={str(port): try_port(port) for port in ports},
        ephemeral_ports=_ephemeral_ports(root),
        free_port=_free_port(),
        infiniband=tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        has_ssh=shutil.which("ssh") is not None,
    )


def _ephemeral_ports(root: Path) -> tuple[int, ...]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    ports = []
    for text in _read(root / "proc/sys/net/ipv4/ip_local_port_range").split():
        port = parse_whole(text, most=65535)
        if port is not None:
            ports.append(port)
    return tuple(ports)


def look_at_interfaces() -> tuple[Interface, ...]:
    """Return every interface; its first address is the one that Gloo and NCCL would take."""
    interfaces: list[Interface] = []
    with contextlib.suppress(Exception):  # psutil raises errors of any class where a container hides parts of /proc
        addresses = psutil.net_if_addrs()
        for name, facts in psutil.net_if_stats().items():
            interface = Interface(
                name=name,
                addresses=tuple(_addresses(addresses.get(name, []))),
                is_up=facts.isup,  # and has a carrier
                is_loopback="loopback" in facts.flags.split(","),
                is_virtual=name.startswith(_BRIDGES + _TUNNELS),
                mtu=facts.mtu,
                megabits_per_s=facts.speed,
            )
            interfaces.append(interface)
    return tuple(interfaces)


def _addresses(entries: Sequence[Any]) -> list[str]:
    """Return the first IPv4 address among those of an interface, and then all of IPv6."""
    ipv4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
    # "%" begins the interface of a link-local address.
    ipv6 = [entry.address.partition("%")[0] for entry in entries if entry.family == socket.AF_INET6]
    return [*ipv4[:1], *ipv6]


def default_interface(root: Path) -> str:
    """Return the interface of the default route with the lowest metric; "" where there is none."""
    lowest: tuple[float, str] = (math.inf, "")
    for line in _read(root / "proc/net/route").splitlines()[1:]:  # the first line is the heading
        # Interface, destination, gateway, flags, references, use, metric, mask, ...
        fields = line.split()
        is_default = len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000"
        if is_default:
            metric = parse_whole(fields[6])
            lowest = min(lowest, (math.inf if metric is None else metric, fields[0]))
    return lowest[1]


def resolve_all(names: Sequence[str]) -> dict[str, Name]:
    """Resolve all names at once, so that a name server that is gone costs its wait only once."""
    answers: dict[str, Name] = {}

    def ask(name: str) -> None:
        answers[name] = resolve(name)

    # Daemons: getaddrinfo can't be stopped, and must not keep this process alive.
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + _NAME_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    late = Name(seconds=_NAME_S, error=f"no answer within {_NAME_S:.0f} s")
    return {name: answers.get(name, late) for name in names}


def resolve(name: str) -> Name:
    """Return a name's addresses, and the names to which the first that is not loopback resolves back."""
    began_s = time.monotonic()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror
        return Name(seconds=time.monotonic() - began_s, error=message)
    # "%" begins the interface of a link-local address.
    addresses = tuple(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
    outer = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    names_back: tuple[str, ...] = ()
    if outer:
        with contextlib.suppress(OSError):
            first, aliases, _ = socket.gethostbyaddr(outer[0])
            names_back = (first, *aliases)
    return Name(addresses, names_back, time.monotonic() - began_s)


def _own_address_towards(addresses: Sequence[str]) -> str:
    """Return the address from which this host would speak to the first of `addresses` that it has a route to.

    To connect a datagram socket only chooses the route and the local address: nothing is sent.
    """
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # any port does
            return str(probe.getsockname()[0])
    return ""


def try_port(port: int) -> Port:
    """Look whether a rank could listen on a port. It is bound for a moment; nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it, connections of a job that just ended (TIME_WAIT) make the port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if is_taken:
                return Port("it is taken", _holder(port))
            return Port(f"it can't be taken ({error})")
    return Port()


def _holder(port: int) -> str:
    """Return the process that has a port; "" where it is another user's, whose open files can't be seen."""
    with contextlib.suppress(OSError, psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.pid is not None and connection.laddr and connection.laddr.port == port:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def _free_port() -> int:
    """Return a port that is free now, for the hosts' second round; 0 where there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
    return 0


def is_clock_synchronised() -> bool | None:
    """Return True if the kernel's clock is kept by NTP or the like; None where it does not say."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # all zero: only read
        if state < 0:
            return None
        return bool(state != _TIME_ERROR)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
