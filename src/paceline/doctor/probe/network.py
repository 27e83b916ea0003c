"""What a host's network is: interfaces, routes, names, ports, the clock."""

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
    """Interfaces, names, ports.

    Args:
        names: of other hosts, to resolve; this host's, localhost and MASTER_ADDR are added.
        ports: to try to listen on.
        environment: the variables that matter to training.
        root: in place of `/`.
    """
    hostname = socket.gethostname()
    wanted = dict.fromkeys([hostname, "localhost", environment.get("MASTER_ADDR") or "localhost", *names])
    resolved = resolve_all(list(wanted))
    routes = {name: address for name in names if (address := _own_address_towards(resolved[name].addresses))}
    return Network(
        hostname,
        look_at_interfaces(root),
        default_interface(root),
        routes,
        resolved,
        {str(port): try_port(port, root) for port in ports},
        tuple(
            port
            for word in _read(root / "proc/sys/net/ipv4/ip_local_port_range").split()
            if (port := parse_whole(word, most=65535)) is not None
        ),
        _free_port(),
        tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        shutil.which("ssh") is not None,
    )


def look_at_interfaces(root: Path) -> tuple[Interface, ...]:
    """Every interface, with the address that Gloo and NCCL would take first."""
    sixes: dict[str, list[str]] = {}
    for line in _read(root / "proc/net/if_inet6").splitlines():
        words = line.split()
        if len(words) == 6 and _HEX_ADDRESS.fullmatch(words[0]):
            sixes.setdefault(words[5], []).append(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    found = []
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else []:
        folder = root / "sys/class/net" / name
        flags = _number(folder / "flags", 16)
        is_loopback = _number(folder / "type") == 772  # ARPHRD_LOOPBACK
        four = _address(name)
        found.append(
            Interface(
                name,
                ((four,) if four else ()) + tuple(sixes.get(name, ())),
                bool(flags & _UP) and (is_loopback or _read(folder / "operstate") != "down"),
                is_loopback,
                name.startswith(_BRIDGES + _TUNNELS),
                _number(folder / "mtu"),
                max(0, _number(folder / "speed")),
            )
        )
    return tuple(found)


def _address(name: str) -> str:
    """The first IPv4 address of an interface; "" is none, or a system that does not say."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def default_interface(root: Path) -> str:
    """The interface of the default route with the lowest metric; "" is none."""
    best: tuple[float, str] = (math.inf, "")
    for line in _read(root / "proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000":
            metric = parse_whole(words[6])
            best = min(best, (math.inf if metric is None else metric, words[0]))
    return best[1]


def resolve_all(names: Sequence[str]) -> dict[str, Name]:
    """What each name resolves to, all asked at once: a name server that is gone costs its wait only once."""
    answers: dict[str, Name] = {}

    def ask(name: str) -> None:
        answers[name] = resolve(name)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + _NAME_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    late = Name(seconds=_NAME_S, error=f"no answer within {_NAME_S:.0f} s")
    return {name: answers.get(name, late) for name in names}


def resolve(name: str) -> Name:
    """A name's addresses, and the names of the first of them that leads to another host or interface."""
    began_s = time.monotonic()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Name(seconds=time.monotonic() - began_s, error=told)
    addresses = tuple(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
    outer = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    back: tuple[str, ...] = ()
    if outer:
        with contextlib.suppress(OSError):
            first, others, _ = socket.gethostbyaddr(outer[0])
            back = (first, *others)
    return Name(addresses, back, time.monotonic() - began_s)


def _own_address_towards(addresses: Sequence[str]) -> str:
    """The address from which this host would speak to the first of `addresses`; nothing is sent."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""


def try_port(port: int, root: Path = Path("/")) -> Port:
    """Whether a rank could listen on a port. Only its number is taken, for a moment: nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            told = "it is taken" if is_taken else f"it can't be taken ({error})"
            return Port(told, _holder(port, root) if is_taken else "")
    return Port()


def _holder(port: int, root: Path) -> str:
    """The process that listens on a port, if it is this user's or one may look."""
    inodes = set()
    for table in ("proc/net/tcp", "proc/net/tcp6"):
        for line in _read(root / table).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[1].endswith(f":{port:04X}"):
                inodes.add(f"socket:[{words[9]}]")
    for link in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                pid = link.parts[-3]
                return f"process {pid} ({_read(root / 'proc' / pid / 'comm')})"
    return ""


def _free_port() -> int:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
    return 0


def is_clock_synchronised() -> bool | None:
    """Whether the kernel's clock is kept by NTP or the like; None where it does not say."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # all zero: only read
        return None if state < 0 else bool(state != _TIME_ERROR)
    return None


def _number(path: Path, base: int = 10) -> int:
    text = _read(path)
    with contextlib.suppress(ValueError):
        return int(text, base) if len(text) <= _MOST_DIGITS else 0
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
