"""Look at the network of this host: interfaces, routes, names, ports and the clock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import math
import os
import re
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.doctor.facts import Interface, Name, Network, Port
from paceline.nouns.reading import parse_whole

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, linux/sockios.h
_UP, _RUNNING = 0x1, 0x40  # IFF_*, linux/if.h
_HEX_ADDRESS = re.compile("[0-9a-f]{32}")
_MOST_DIGITS = 20  # of a number of 64 bits
_NAME_S = 10.0  # a name server that is gone is given up by the system after 10 to 30 s
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than struct timex has
_BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "vmnet", "lxc", "podman", "ifb", "dummy")
_TUNNELS = ("tun", "tap", "wg", "zt", "tailscale", "vxlan", "geneve")


def look_at_network(
    names: Sequence[str], ports: Sequence[int], environment: Mapping[str, str], root: Path = Path("/")
) -> Network:
    """Return the facts of interfaces, routes, names and ports.

    Args:
        names: of other hosts, to resolve; this host's, localhost and MASTER_ADDR are added.
        ports: to try to listen on.
        environment: the variables that matter to training.
        root: in place of `/`.
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
        interfaces=look_at_interfaces(root),
        default_interface=default_interface(root),
        routes=routes,
        names=lookups,
        ports={str(port): try_port(port, root) for port in ports},
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


def look_at_interfaces(root: Path) -> tuple[Interface, ...]:
    """Return every interface; of its addresses the first is the one that Gloo and NCCL would take."""
    if not hasattr(socket, "if_nameindex"):
        return ()
    ipv6_addresses = _ipv6_addresses(root)
    interfaces = []
    for _, name in socket.if_nameindex():
        folder = root / "sys/class/net" / name
        flags = _number(folder / "flags", 16)
        is_loopback = _number(folder / "type") == 772  # ARPHRD_LOOPBACK
        # An interface without a carrier, as a bridge without members, keeps its UP flag; operstate then says down.
        has_carrier = is_loopback or _read(folder / "operstate") != "down"
        ipv4_address = _ipv4_address(name)
        addresses = [ipv4_address] if ipv4_address else []
        addresses += ipv6_addresses.get(name, [])
        interface = Interface(
            name=name,
            addresses=tuple(addresses),
            is_up=bool(flags & _UP) and has_carrier,
            is_loopback=is_loopback,
            is_virtual=name.startswith(_BRIDGES + _TUNNELS),
            mtu=_number(folder / "mtu"),
            megabits_per_s=max(0, _number(folder / "speed")),  # -1: the driver does not know it
        )
        interfaces.append(interface)
    return tuple(interfaces)


def _ipv6_addresses(root: Path) -> dict[str, list[str]]:
    """Return the IPv6 addresses by interface, from lines of address, index, prefix, scope, flags and name."""
    addresses: dict[str, list[str]] = {}
    for line in _read(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and _HEX_ADDRESS.fullmatch(fields[0]):
            address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
            addresses.setdefault(fields[5], []).append(str(address))
    return addresses


def _ipv4_address(name: str) -> str:
    """Return the first IPv4 address of an interface; "" where it has none, or the system does not say."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    # struct ifreq (netdevice(7)): a name of 15 characters and a null, then a sockaddr_in whose address is at byte 20.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


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
    """Return a name's addresses, and what the first of them that is not loopback resolves back to."""
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
    back: tuple[str, ...] = ()
    if outer:
        with contextlib.suppress(OSError):
            first, others, _ = socket.gethostbyaddr(outer[0])
            back = (first, *others)
    return Name(addresses, back, time.monotonic() - began_s)


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


def try_port(port: int, root: Path = Path("/")) -> Port:
    """Look whether a rank could listen on a port. It is bound for a moment; nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it, connections of a job that just ended (TIME_WAIT) make the port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if is_taken:
                return Port("it is taken", _holder(port, root))
            return Port(f"it can't be taken ({error})")
    return Port()


def _holder(port: int, root: Path) -> str:
    """Return the process that has a port; "" where it is another user's, whose open files can't be seen."""
    inodes = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        for line in _read(root / table).splitlines()[1:]:
            fields = line.split()  # the second is the local address and port in hexadecimal, the tenth the inode
            if len(fields) > 9 and fields[1].endswith(f":{port:04X}"):
                inodes.add(f"socket:[{fields[9]}]")
    # The process that has a file open which links to that inode.
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                pid = link.parts[-3]
                return f"process {pid} ({_read(root / 'proc' / pid / 'comm')})"
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


def _number(path: Path, base: int = 10) -> int:
    """Return the number in a file of /sys; 0 where there is none."""
    text = _read(path)
    if len(text) > _MOST_DIGITS:
        return 0
    with contextlib.suppress(ValueError):
        return int(text, base)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
