"""Checks of one host's interfaces, names, ports and clock: each takes the host's facts and yields rows of findings."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator

from paceline.doctor.facts import HostFacts, Interface, Name, Network
from paceline.doctor.finding import Level, Row
from paceline.nouns.reading import parse_whole, shown

_SLOW_NAME_S = 1.0  # a name of a hosts file takes milliseconds
_PORTS_NONE, _PORTS_FEW = 1024, 8192  # ephemeral ports; Linux has 28,232 by default
_PRIVILEGED = 1024  # ports below are root's


def chosen_interface(host: HostFacts) -> str:
    """Return the interface over which ranks of this host would speak to others; "" where it is not known.

    It is the user's setting, else the interface towards most other hosts, else that of the default route.
    """
    setting = host.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if setting:
        return setting
    network = host.network
    interfaces = []
    for address in network.routes.values():
        name = interface_of(address, network)
        if name:
            interfaces.append(name)
    if not interfaces:
        return network.default_interface
    return max(interfaces, key=interfaces.count)


def interface_of(address: str, network: Network) -> str:
    """Return the name of the interface that has an address; "" where none has it."""
    for interface in network.interfaces:
        if address in interface.addresses:
            return interface.name
    return ""


def chosen_address(host: HostFacts) -> str:
    """Return the first address of the chosen interface; "" where it has none."""
    interface = find_interface(host.network, chosen_interface(host))
    if interface is None or not interface.addresses:
        return ""
    return interface.addresses[0]


def is_loopback(address: str) -> bool:
    """Return True if an address or a name leads back to its own host."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(address).is_loopback
    return bool(re.fullmatch(r"localhost(\..*)?", address))


def find_interface(network: Network, name: str) -> Interface | None:
    """Return the interface of that name, or None."""
    for interface in network.interfaces:
        if interface.name == name:
            return interface
    return None


def _interface(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    name = chosen_interface(host)
    interface = find_interface(host.network, name)
    if not host.network.interfaces:
        yield "not checked", "interface", "this system does not list its network interfaces", ""
        return
    if interface is None:
        if "GLOO_SOCKET_IFNAME" not in host.environment:  # a setting that names none has a check of its own
            if is_fleet:
                fix = "bring the network up: `ip route` shows no default"
                yield "error", "interface", "no route leads to other hosts", fix
            else:
                yield "ok", "interface", "none leads to other hosts, and ranks of one host meet on loopback", ""
        return
    address = interface.addresses[0] if interface.addresses else "without an address"
    text = f"{name} {address}, MTU {interface.mtu}"
    force = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that leads to the other hosts"
    if interface.is_loopback and is_fleet:
        yield "error", "interface", f"{text}: loopback leads to no other host", force
    elif not interface.is_up:
        yield "error", "interface", f"{text}: it is down", f"`ip link set {name} up`, or {force}"
    elif not interface.addresses:
        yield "error", "interface", f"{text}: ranks have nothing to listen on", force
    elif interface.is_virtual:
        problem = f"{text}: a bridge or tunnel of this host; other hosts can't reach it, or only slowly"
        level: Level = "error" if is_fleet else "warning"
        yield level, "interface", problem, force
    else:
        yield "ok", "interface", text, ""
        yield from _other_interfaces(host, interface, is_fleet)


def _is_usable(interface: Interface) -> bool:
    """Return True if Gloo or NCCL could choose an interface: it is up and has an IPv4 address."""
    has_ipv4 = any("." in address for address in interface.addresses)
    return interface.is_up and not interface.is_loopback and has_ipv4


def _other_interfaces(host: HostFacts, chosen: Interface, is_fleet: bool) -> Iterator[Row]:
    """Yield rows on the interfaces that Gloo or NCCL could choose instead of `chosen`."""
    is_set = "GLOO_SOCKET_IFNAME" in host.environment and "NCCL_SOCKET_IFNAME" in host.environment
    alternatives = [
        interface for interface in host.network.interfaces if interface is not chosen and _is_usable(interface)
    ]
    if not alternatives or is_set:
        return
    names = ", ".join(interface.name for interface in alternatives)
    fix = f"export GLOO_SOCKET_IFNAME={chosen.name} NCCL_SOCKET_IFNAME={chosen.name} on every host"
    # 0 is a driver that does not say its speed: then nothing is compared.
    faster = [interface for interface in alternatives if interface.megabits_per_s > chosen.megabits_per_s > 0]
    if faster:
        better = faster[0]
        problem = (
            f"{chosen.name} ({chosen.megabits_per_s} Mb/s) is taken, but {better.name} has {better.megabits_per_s} Mb/s"
        )
        yield "warning", "interfaces", problem, fix.replace(f"={chosen.name}", f"={better.name}")
    elif is_fleet:
        problem = (
            f"{names} could be taken as well as {chosen.name}: Gloo goes by the host's name, NCCL by its own order"
        )
        yield "warning", "interfaces", problem, fix
    else:
        yield "ok", "interfaces", f"also {names}; matters with several hosts", ""
    # Bridges and tunnels have MTUs of their own, and don't lead to the other hosts.
    mtus = {interface.mtu for interface in alternatives if not interface.is_virtual} - {chosen.mtu}
    if mtus and is_fleet:
        texts = ", ".join(map(str, sorted(mtus)))
        problem = f"{chosen.name} has {chosen.mtu}, others {texts}: large messages can hang on the way"
        yield "warning", "MTU", problem, "give the interfaces that ranks use one MTU, on all hosts and switches"


def _interface_settings(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    existing = [interface.name for interface in host.network.interfaces]
    if not existing:
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = host.environment.get(variable)
        if text is None:
            continue
        selected = _selected(text, existing, is_exact=variable.startswith("GLOO"))
        fix = f"write one of {', '.join(existing)}, or unset it"
        if not selected:
            problem = f"it is {text!r}, which this host does not have: ranks fail as they meet"
            yield "error", variable, problem, fix
        elif is_fleet and all(_is_loopback_interface(host.network, name) for name in selected):
            yield "error", variable, f"it is {text}: loopback leads to no other host", fix
        else:
            yield "ok", variable, text, ""


def _is_loopback_interface(network: Network, name: str) -> bool:
    interface = find_interface(network, name)
    return interface is not None and interface.is_loopback


def _selected(text: str, existing: list[str], is_exact: bool) -> list[str]:
    """Return the interfaces that a setting selects.

    Gloo takes exact names. NCCL takes prefixes of names; with `=` before them exact names, with `^` all but these.

    Args:
        text: the value of the setting.
        existing: the names of the host's interfaces.
        is_exact: True for Gloo's setting.

    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.
    """
    match = re.match(r"[\^=]*", text)
    mark = match[0] if match and not is_exact else ""
    names = [name.strip() for name in text[len(mark) :].split(",") if name.strip()]
    if is_exact or "=" in mark:
        matched = [name for name in existing if name in names]
    else:
        matched = [name for name in existing if name.startswith(tuple(names))]
    if "^" in mark:
        return [name for name in existing if name not in matched]
    return matched


def _own_name(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    network = host.network
    name = network.names.get(network.hostname)
    if name is None:
        yield "not checked", "own name", "not looked up", ""
        return
    fix = f"write this host's address and {network.hostname} in /etc/hosts or the name server"
    # With this setting Gloo listens on the interface, and never asks what the host's name is.
    is_bound = "GLOO_SOCKET_IFNAME" in host.environment
    addresses: set[str] = set()
    for interface in network.interfaces:
        addresses.update(interface.addresses)
    if name.error:
        problem = f"{network.hostname} does not resolve here ({name.error}): Gloo then listens on loopback only"
        yield "error" if is_fleet and not is_bound else "warning", "own name", problem, fix
    elif all(is_loopback(address) for address in name.addresses):
        problem = (
            f"{network.hostname} resolves to {name.addresses[0]}: Gloo listens there, and no other host can reach it"
        )
        fix = f"{fix}, instead of 127.0.1.1; or set GLOO_SOCKET_IFNAME={network.default_interface or 'eth0'}"
        yield "error" if is_fleet and not is_bound else "warning", "own name", problem, fix
    elif addresses and not any(address in addresses or is_loopback(address) for address in name.addresses):
        problem = f"{network.hostname} resolves to {', '.join(name.addresses)}, which is no address of this host"
        yield "error", "own name", f"{problem}: ranks can't listen on it", fix
    else:
        yield "ok", "own name", f"{network.hostname} is {', '.join(name.addresses)}", ""


def _names(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    network = host.network
    local = network.names.get("localhost")
    if local is not None and (local.error or not all(is_loopback(address) for address in local.addresses)):
        answer = local.error or ", ".join(local.addresses)
        problem = f"localhost should be 127.0.0.1 or ::1, but: {answer}. Ranks of one host meet there"
        yield "error", "localhost", problem, "write `127.0.0.1 localhost` in /etc/hosts"
    for name, lookup in network.names.items():
        if lookup.error or lookup.seconds <= _SLOW_NAME_S:
            continue
        problem = f"{name} took {lookup.seconds:.1f} s to resolve, and every rank does that as it starts"
        yield "warning", "name service", problem, "write the hosts in /etc/hosts, or mend /etc/resolv.conf"
    yield from _master(host, network.names, is_fleet)


def _master(host: HostFacts, names: dict[str, Name], is_fleet: bool) -> Iterator[Row]:
    address = host.environment.get("MASTER_ADDR")
    if not address or address not in names:
        return
    lookup = names[address]
    if lookup.error:
        problem = f"{address} does not resolve here ({lookup.error}): ranks wait for it until their time is up"
        yield "error", "MASTER_ADDR", problem, "write the first host's address, or mend its name"
    elif is_fleet and all(is_loopback(text) for text in lookup.addresses):
        problem = f"{address} is loopback: every host would wait for ranks of its own, or become a world of one"
        yield "error", "MASTER_ADDR", problem, "write the first host's address that the others reach"


def _is_port(text: str) -> bool:
    return parse_whole(text, 1, 65535) is not None


def _ports(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    master_port = host.environment.get("MASTER_PORT", "")
    if master_port and not _is_port(master_port):
        problem = f"it is {shown(master_port)}, which is no port"
        yield "error", "MASTER_PORT", problem, "write a number from 1024 to 65535"
    for text, port in host.network.ports.items():
        if not port.error:
            yield "ok", "port", f"{text} is free", ""
            continue
        holder = ""
        if port.holder:
            holder = f" by {port.holder}"
            fix = f"end {port.holder}, or name another port"
        elif int(text) < _PRIVILEGED:
            fix = "name a port of 1024 or more: those below are root's"
        else:
            fix = "name another port; `ss -ltnp` shows who has it"
        problem = f"{text}: {port.error}{holder}, and ranks meet there"
        yield "error" if text == master_port else "warning", "port", problem, fix
    yield from _ephemeral_ports(host)


def _ephemeral_ports(host: HostFacts) -> Iterator[Row]:
    span = host.network.ephemeral_ports
    if len(span) != 2:
        yield "not checked", "ephemeral ports", "this system does not say which they are", ""
        return
    number = span[1] - span[0] + 1
    if number < _PORTS_FEW:
        problem = (
            f"{number} ({span[0]} to {span[1]}): each pair of ranks takes several (`Cannot assign requested address`)"
        )
        fix = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        yield "error" if number < _PORTS_NONE else "warning", "ephemeral ports", problem, fix
    else:
        yield "ok", "ephemeral ports", f"{span[0]} to {span[1]}", ""


def _clock(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    if host.is_clock_synchronised is None:
        yield "not checked", "clock", "this system does not say whether its clock is kept right", ""
    elif host.is_clock_synchronised:
        yield "ok", "clock", "kept by NTP or the like", ""
    else:
        problem = "not synchronised as far as the kernel knows: certificates and object stores refuse a wrong time"
        fix = "start chrony or systemd-timesyncd"
        if is_fleet:
            problem += ", and times of ranks can't be compared"
            fix += "; what the hosts are apart is measured as well"
        yield "warning", "clock", problem, fix


NETWORK_CHECKS = (_interface, _interface_settings, _own_name, _names, _ports, _clock)
