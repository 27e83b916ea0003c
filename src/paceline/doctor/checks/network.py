"""Judges one host's interfaces, names, ports and clock: facts in, rows of findings out."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator

from paceline.doctor.facts import HostFacts, Interface, Name, Network
from paceline.doctor.finding import Row

_SLOW_NAME_S = 1.0
_PORTS_NONE, _PORTS_FEW = 1024, 8192
_PRIVILEGED = 1024


def chosen_interface(facts: HostFacts) -> str:
    """The interface over which ranks of this host would speak to others; "" is not known.

    The person's setting, else the way to most other hosts, else the default route.
    """
    set_ = facts.environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if set_:
        return set_
    network = facts.network
    ways = [name for address in network.routes.values() if (name := interface_of(address, network))]
    return max(ways, key=ways.count) if ways else network.default_interface


def interface_of(address: str, network: Network) -> str:
    """The interface that has an address; "" is none."""
    return next((one.name for one in network.interfaces if address in one.addresses), "")


def chosen_address(facts: HostFacts) -> str:
    """The first address of the chosen interface; "" is none."""
    one = find_interface(facts.network, chosen_interface(facts))
    return one.addresses[0] if one and one.addresses else ""


def is_loopback(address: str) -> bool:
    """Whether an address leads back to its own host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return bool(re.fullmatch(r"localhost(\..*)?", address))


def find_interface(network: Network, name: str) -> Interface | None:
    """The interface of that name."""
    return next((one for one in network.interfaces if one.name == name), None)


def _interface(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    name = chosen_interface(facts)
    one = find_interface(facts.network, name)
    if not facts.network.interfaces:
        yield "not checked", "interface", "this system does not list its network interfaces", ""
        return
    if one is None:
        if "GLOO_SOCKET_IFNAME" not in facts.environment:  # that is told by its own check
            level = "error" if is_fleet else "not checked"
            yield (
                level,
                "interface",
                "no route leads to other hosts",
                "bring the network up: `ip route` shows no default",
            )  # type: ignore[misc]
        return
    text = f"{name} {one.addresses[0] if one.addresses else 'without an address'}, MTU {one.mtu}"
    force = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that leads to the other hosts"
    if one.is_loopback and is_fleet:
        yield "error", "interface", f"{text}: loopback leads to no other host", force
    elif not one.is_up:
        yield "error", "interface", f"{text}: it is down", f"`ip link set {name} up`, or {force}"
    elif not one.addresses:
        yield "error", "interface", f"{text}: ranks have nothing to listen on", force
    elif one.is_virtual:
        found = f"{text}: a bridge or tunnel of this host; other hosts can't reach it, or only slowly"
        yield "error" if is_fleet else "warning", "interface", found, force
    else:
        yield "ok", "interface", text, ""
        yield from _others(facts, one, is_fleet)


def _others(facts: HostFacts, chosen: Interface, is_fleet: bool) -> Iterator[Row]:
    """Other interfaces that Gloo or NCCL could take instead."""
    is_set = "GLOO_SOCKET_IFNAME" in facts.environment and "NCCL_SOCKET_IFNAME" in facts.environment
    others = [
        one
        for one in facts.network.interfaces
        if one.is_up and not one.is_loopback and one is not chosen and any("." in text for text in one.addresses)
    ]
    if not others or is_set:
        return
    names = ", ".join(one.name for one in others)
    fix = f"export GLOO_SOCKET_IFNAME={chosen.name} NCCL_SOCKET_IFNAME={chosen.name} on every host"
    faster = next((one for one in others if one.megabits_per_s > chosen.megabits_per_s > 0), None)
    if faster:
        found = (
            f"{chosen.name} ({chosen.megabits_per_s} Mb/s) is taken, but {faster.name} has {faster.megabits_per_s} Mb/s"
        )
        yield "warning", "interfaces", found, fix.replace(f"={chosen.name}", f"={faster.name}")
    elif is_fleet:
        found = f"{names} could be taken as well as {chosen.name}: Gloo goes by the host's name, NCCL by its own order"
        yield "warning", "interfaces", found, fix
    else:
        yield "ok", "interfaces", f"also {names}; matters with several hosts", ""
    mtus = {one.mtu for one in others if not one.is_virtual} - {chosen.mtu}
    if mtus and is_fleet:
        texts = ", ".join(map(str, sorted(mtus)))
        found = f"{chosen.name} has {chosen.mtu}, others {texts}: large messages can hang on the way"
        yield "warning", "MTU", found, "give the interfaces that ranks use one MTU, on all hosts and switches"


def _interface_settings(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    known = [one.name for one in facts.network.interfaces]
    if not known:
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = facts.environment.get(variable)
        if text is None:
            continue
        named = _selected(text, known, is_exact=variable.startswith("GLOO"))
        fix = f"write one of {', '.join(known)}, or unset it"
        if not named:
            found = f"it is {text!r}, which this host does not have: ranks fail as they meet"
            yield "error", variable, found, fix
        elif is_fleet and all((one := find_interface(facts.network, name)) and one.is_loopback for name in named):
            yield "error", variable, f"it is {text}: loopback leads to no other host", fix
        else:
            yield "ok", variable, text, ""


def _selected(text: str, known: list[str], is_exact: bool) -> list[str]:
    """The interfaces that a setting takes. NCCL's are beginnings of names; `=` says whole names, `^` all but these."""
    marks = re.match(r"[\^=]*", text)
    mark = marks[0] if marks and not is_exact else ""
    words = [word.strip() for word in text[len(mark) :].split(",") if word.strip()]
    if is_exact or "=" in mark:
        matched = [name for name in known if name in words]
    else:
        matched = [name for name in known if name.startswith(tuple(words))] if words else []
    return [name for name in known if name not in matched] if "^" in mark else matched


def _own_name(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    network = facts.network
    name = network.names.get(network.hostname)
    if name is None:
        yield "not checked", "own name", "not looked up", ""
        return
    fix = f"write this host's address and {network.hostname} in /etc/hosts or the name server"
    bound = "GLOO_SOCKET_IFNAME" in facts.environment
    own = {address for one in network.interfaces for address in one.addresses}
    if name.error:
        found = f"{network.hostname} does not resolve here ({name.error}): Gloo then listens on loopback only"
        yield "warning" if bound else "error", "own name", found, fix
    elif all(is_loopback(address) for address in name.addresses):
        found = (
            f"{network.hostname} resolves to {name.addresses[0]}: Gloo listens there, and no other host can reach it"
        )
        fix = f"{fix}, instead of 127.0.1.1; or set GLOO_SOCKET_IFNAME={network.default_interface or 'eth0'}"
        yield "error" if is_fleet and not bound else "warning", "own name", found, fix
    elif own and not any(address in own or is_loopback(address) for address in name.addresses):
        found = f"{network.hostname} resolves to {', '.join(name.addresses)}, which is no address of this host"
        yield "error", "own name", f"{found}: ranks can't listen on it", fix
    else:
        yield "ok", "own name", f"{network.hostname} is {', '.join(name.addresses)}", ""


def _names(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    network = facts.network
    local = network.names.get("localhost")
    if local is not None and (local.error or not all(is_loopback(address) for address in local.addresses)):
        told = local.error or ", ".join(local.addresses)
        found = f"localhost should be 127.0.0.1 or ::1, but: {told}. Ranks of one host meet there"
        yield "error", "localhost", found, "write `127.0.0.1 localhost` in /etc/hosts"
    slow = {name: one for name, one in network.names.items() if one.seconds > _SLOW_NAME_S and not one.error}
    for name, one in slow.items():
        found = f"{name} took {one.seconds:.1f} s to resolve, and every rank does that as it starts"
        yield "warning", "name service", found, "write the hosts in /etc/hosts, or mend /etc/resolv.conf"
    yield from _master(facts, network.names, is_fleet)


def _master(facts: HostFacts, names: dict[str, Name], is_fleet: bool) -> Iterator[Row]:
    address = facts.environment.get("MASTER_ADDR")
    if not address or address not in names:
        return
    one = names[address]
    if one.error:
        found = f"{address} does not resolve here ({one.error}): ranks wait for it until their time is up"
        yield "error", "MASTER_ADDR", found, "write the first host's address, or mend its name"
    elif is_fleet and all(is_loopback(text) for text in one.addresses):
        found = f"{address} is loopback: every host would wait for ranks of its own, or become a world of one"
        yield "error", "MASTER_ADDR", found, "write the first host's address that the others reach"


def _ports(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    asked = facts.environment.get("MASTER_PORT", "")
    if asked and not (asked.isdecimal() and 0 < int(asked) < 65536):
        found = f"it is {asked!r}, which is no port"
        yield "error", "MASTER_PORT", found, "write a number from 1024 to 65535"
    for text, port in facts.network.ports.items():
        if not port.error:
            yield "ok", "port", f"{text} is free", ""
            continue
        by = f" by {port.holder}" if port.holder else ""
        fix = (
            f"end {port.holder}, or name another port"
            if port.holder
            else "name another port; `ss -ltnp` shows who has it"
        )
        if int(text) < _PRIVILEGED and not by:
            fix = "name a port of 1024 or more: those below are root's"
        found = f"{text}: {port.error}{by}, and ranks meet there"
        yield "error" if text == asked else "warning", "port", found, fix
    span = facts.network.ephemeral_ports
    if len(span) != 2:
        yield "not checked", "ephemeral ports", "this system does not say which they are", ""
        return
    number = span[1] - span[0] + 1
    if number < _PORTS_FEW:
        found = (
            f"{number} ({span[0]} to {span[1]}): each pair of ranks takes several (`Cannot assign requested address`)"
        )
        fix = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        yield "error" if number < _PORTS_NONE else "warning", "ephemeral ports", found, fix
    else:
        yield "ok", "ephemeral ports", f"{span[0]} to {span[1]}", ""


def _clock(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    if facts.is_clock_synchronised is None:
        yield "not checked", "clock", "this system does not say whether its clock is kept right", ""
    elif facts.is_clock_synchronised:
        yield "ok", "clock", "kept by NTP or the like", ""
    elif is_fleet:
        found = "not synchronised as far as the kernel knows: times of ranks can't be compared, certificates may fail"
        yield (
            "warning",
            "clock",
            found,
            "start chrony or systemd-timesyncd; what the hosts are apart is measured as well",
        )
    else:
        found = "not synchronised as far as the kernel knows, which matters with several hosts"
        yield "ok", "clock", found, ""


NETWORK_CHECKS = (_interface, _interface_settings, _own_name, _names, _ports, _clock)
