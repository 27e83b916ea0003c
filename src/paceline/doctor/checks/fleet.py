"""Judges the hosts of a fleet against each other: their answers in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from paceline.doctor.ask import FleetFacts
from paceline.doctor.checks.host import usable_cores
from paceline.doctor.checks.network import chosen_interface, find_interface, is_loopback
from paceline.doctor.checks.torch_stack import release
from paceline.doctor.facts import HostFacts
from paceline.doctor.finding import FLEET, Finding, Level, count, size

_OFFSET_S = 0.5
_UNEQUAL = 0.8  # of the largest
_SETTINGS = ("NCCL_", "GLOO_", "OMP_NUM_THREADS", "MASTER_", "CUDA_VISIBLE_DEVICES")


def check_fleet(fleet: FleetFacts, slots: Mapping[str, int], has_runs: bool = False) -> list[Finding]:
    """All findings between hosts.

    Args:
        fleet: what they answered.
        slots: how many ranks each is to take.
        has_runs: whether the person named a run directory for all of them.
    """
    findings = [*_silent(fleet)]
    if len(fleet.hosts) > 1:
        for check in (_versions, _devices, _alike, _same_machine, _clocks, _names, _names_back, _interfaces, _settings):
            findings += check(fleet)
        findings += _reached(fleet)
        findings += _shared(fleet) if has_runs else []
    return [*findings, *_slots(fleet, slots)]


def _silent(fleet: FleetFacts) -> Iterator[Finding]:
    for host, error in fleet.silent.items():
        fix = error.fix
        if "host key" in error.found.lower():
            fix += ". `ssh-keyscan` alone would trust whoever answers: hold what it prints against the host's console"
        yield Finding("error", host, "ssh", f"{error.asked}: {error.found}", fix)


def _groups(fleet: FleetFacts, value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """The hosts by what they have, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for host, facts in fleet.hosts.items():
        groups.setdefault(value(facts), []).append(host)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _told(groups: Mapping[str, list[str]]) -> str:
    """ "2.13.0 on h1, h2; 2.11.0 on h3"."""
    return "; ".join(f"{value or 'none'} on {_listed(hosts)}" for value, hosts in groups.items())


def _listed(hosts: list[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"


def _versions(fleet: FleetFacts) -> Iterator[Finding]:
    checks: tuple[tuple[str, Level, str, Callable[[HostFacts], str]], ...] = (
        ("paceline", "error", "ranks of two versions don't understand each other", lambda f: f.versions.paceline),
        ("torch", "error", "ranks of two versions may hang or give other numbers", lambda f: f.versions.torch),
        ("NCCL", "error", "NCCL refuses or hangs between versions", lambda f: f.versions.nccl),
        ("python", "error", "ranks of two versions may not read each other's data", _python),
        ("CUDA", "error", "kernels round differently", lambda f: f.versions.cuda_build),
        ("driver", "warning", "what one host runs another may not", lambda f: f.versions.driver),
        ("architecture", "warning", "kernels round differently", lambda f: f.versions.architecture),
    )
    for name, level, why, value in checks:
        groups = _groups(fleet, value)
        if len(groups) > 1:
            most = next(iter(groups)) or "one"
            yield Finding(level, FLEET, name, f"it differs: {_told(groups)}; {why}", f"install {most} on all hosts")
        elif next(iter(groups)):
            yield Finding("ok", FLEET, name, f"{next(iter(groups))} on all hosts")


def _python(facts: HostFacts) -> str:
    return ".".join(map(str, release(facts.versions.python)))  # 3.11.7 and 3.11.9 work together


def _devices(fleet: FleetFacts) -> Iterator[Finding]:
    numbers = _groups(fleet, lambda facts: str(len(facts.accelerators.devices)))
    kinds = _groups(fleet, lambda facts: ", ".join(sorted({one.name for one in facts.accelerators.devices})))
    if len(numbers) > 1:
        found = f"their number differs: {_told(numbers)}; a job with the same ranks on each host takes the least"
        fix = "give each host its own slots (h1:8,h2:4), and see with nvidia-smi whether one has fallen off the bus"
        yield Finding("warning", FLEET, "accelerators", found, fix)
    if len(kinds) > 1:
        found = f"their kind differs: {_told(kinds)}; the slowest sets the pace"
        yield Finding("warning", FLEET, "accelerators", found, "train on hosts with equal ones")


def _alike(fleet: FleetFacts) -> Iterator[Finding]:
    texts: tuple[tuple[str, Callable[[HostFacts], str], str], ...] = (
        ("open files", lambda f: str(f.limits.files or "unlimited"), "set one limit for all hosts' sshd or service"),
        ("/dev/shm", lambda f: size(f.shm.size_bytes), "give all hosts the largest of them"),
    )
    for name, value, fix in texts:
        groups = _groups(fleet, value)
        if len(groups) > 1 and not (name == "/dev/shm" and _near(fleet, lambda f: f.shm.size_bytes)):
            yield Finding("warning", FLEET, name, f"it differs: {_told(groups)}; the least decides", fix)
    for name, number in (("cores", usable_cores), ("memory", lambda f: f.memory.total_bytes or 0)):
        if not _near(fleet, number):
            groups = _groups(fleet, lambda f, n=number, k=name: size(n(f)) if k == "memory" else f"{n(f):g}")  # type: ignore[misc]
            fix = "give each host slots by what it has, or train on equal hosts"
            yield Finding("warning", FLEET, name, f"they differ: {_told(groups)}; the least sets the pace", fix)


def _near(fleet: FleetFacts, value: Callable[[HostFacts], float]) -> bool:
    values = [value(facts) for facts in fleet.hosts.values()]
    return min(values) >= _UNEQUAL * max(values)


def _same_machine(fleet: FleetFacts) -> Iterator[Finding]:
    groups = _groups(fleet, lambda facts: f"{facts.network.hostname} {facts.boot}")
    for hosts in groups.values():
        if len(hosts) > 1 and fleet.hosts[hosts[0]].boot:
            found = f"{_listed(hosts)} are one machine: their ranks would share its cores and accelerators"
            fix = "name each host once, and look at /etc/hosts or the name server"
            yield Finding("error", FLEET, "hosts", found, fix)


def _clocks(fleet: FleetFacts) -> Iterator[Finding]:
    is_right = True
    for host, offset in fleet.offsets.items():
        if abs(offset.seconds) > _OFFSET_S + offset.uncertainty_s:
            is_right = False
            word = "ahead of" if offset.seconds > 0 else "behind"
            found = (
                f"it is {abs(offset.seconds):.1f} s (give or take {offset.uncertainty_s:.1f} s) {word} this host's:"
                " who failed first can't be told, certificates may fail"
            )
            fix = "start chrony or systemd-timesyncd there, with the same servers on all hosts"
            yield Finding("error", host, "clock", found, fix)
    if is_right and fleet.offsets:
        widest = max(offset.uncertainty_s for offset in fleet.offsets.values())
        yield Finding("ok", FLEET, "clock", f"no more apart than can be measured ({widest + _OFFSET_S:.1f} s)")


def _names(fleet: FleetFacts) -> Iterator[Finding]:
    is_right = True
    for name in fleet.hosts:
        seen = {host: facts.network.names[name] for host, facts in fleet.hosts.items() if name in facts.network.names}
        lost = [host for host, one in seen.items() if one.error]
        if lost:
            is_right = False
            why = seen[lost[0]].error
            found = f"{name} does not resolve on {_listed(lost)} ({why}): ranks there can't find it"
            yield Finding(
                "error", FLEET, "names", found, f"write {name} in /etc/hosts of {_listed(lost)}, or in the name server"
            )
        for host, one in seen.items():
            if host != name and one.addresses and all(map(is_loopback, one.addresses)) and not is_loopback(name):
                is_right = False
                found = f"{name} is {one.addresses[0]} on {host}: it would speak to itself"
                yield Finding("error", host, "names", found, f"mend /etc/hosts of {host}")
        groups = _groups_of_addresses({host: one.addresses for host, one in seen.items() if host != name})
        if len(groups) > 1:
            is_right = False
            found = f"{name} resolves differently: {_told(groups)}; some hosts would speak to another machine"
            yield Finding("error", FLEET, "names", found, "use one name server or one /etc/hosts for all hosts")
    if is_right:
        yield Finding("ok", FLEET, "names", "every host resolves all others, to the same addresses")


def _groups_of_addresses(seen: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for host, addresses in seen.items():
        if addresses and not all(map(is_loopback, addresses)):
            groups.setdefault(", ".join(sorted(addresses)), []).append(host)
    return groups


def _names_back(fleet: FleetFacts) -> Iterator[Finding]:
    told = set()
    for host, facts in fleet.hosts.items():
        for name, one in facts.network.names.items():
            short = {back.partition(".")[0] for back in one.names_back}
            is_other = name in fleet.hosts and not _is_address(name) and one.names_back
            if is_other and name.partition(".")[0] not in short and (name, one.names_back) not in told:
                told.add((name, one.names_back))
                outer = next(address for address in one.addresses if not is_loopback(address))
                found = f"{name} is {outer} on {host}, and {outer} is {one.names_back[0]} there"
                fix = "mend the reverse entry: schedulers and ssh keys go by the name that comes back"
                yield Finding("warning", host, "names", found, fix)


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdecimal()


def _interfaces(fleet: FleetFacts) -> Iterator[Finding]:
    names = _groups(fleet, chosen_interface)
    mtus = _groups(fleet, _mtu)
    if len(names) > 1:
        found = f"their names differ: {_told(names)}; one GLOO_SOCKET_IFNAME can't fit all hosts"
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each host by itself, or leave them out on all"
        yield Finding("warning", FLEET, "interface", found, fix)
    if len(mtus) > 1:
        found = f"it differs: {_told(mtus)}; small messages pass, large ones hang"
        yield Finding("error", FLEET, "MTU", found, "set one MTU on all hosts and switches: ip link set DEV mtu N")


def _mtu(facts: HostFacts) -> str:
    one = find_interface(facts.network, chosen_interface(facts))
    return str(one.mtu) if one else ""


def _settings(fleet: FleetFacts) -> Iterator[Finding]:
    names = {name for facts in fleet.hosts.values() for name in facts.environment if name.startswith(_SETTINGS)}
    for name in sorted(names):
        groups = _groups(fleet, lambda facts, name=name: facts.environment.get(name, "unset"))  # type: ignore[misc]
        if len(groups) > 1:
            found = f"it differs: {_told(groups)}; ssh does not hand the shell's variables on"
            yield Finding("warning", FLEET, name, found, "set it for the job, not in one shell")


def _reached(fleet: FleetFacts) -> Iterator[Finding]:
    failures = 0
    for host, others in fleet.reached.items():
        for other, why in others.items():
            if why:
                failures += 1
                found = f"{host} can't reach {other} at {fleet.ports.get(other, '?')}: {why}"
                fix = (
                    f"let {other}'s firewall pass all TCP ports from {host} (Gloo and NCCL take any), or set "
                    "GLOO_SOCKET_IFNAME to the interface of their common network"
                )
                yield Finding("error", host, "reach", found, fix)
    pairs = sum(map(len, fleet.reached.values()))
    if pairs and not failures:
        yield Finding("ok", FLEET, "reach", f"all {count(pairs, 'way')} between hosts are open")
    missing = [host for host in fleet.hosts if host not in fleet.reached and host not in fleet.silent]
    if missing:
        found = f"{_listed(missing)} did not say whether the others can be reached"
        yield Finding("not checked", FLEET, "reach", found, "give each host an interface with an address")


def _shared(fleet: FleetFacts) -> Iterator[Finding]:
    without = [host for host, sees in fleet.marker.items() if not sees]
    if without:
        first = next(iter(fleet.hosts))
        path = fleet.hosts[first].runs.path
        found = f"{_listed(without)} don't see in {path} what {first} writes there: checkpoints would be in parts"
        yield Finding(
            "error", FLEET, "run directory", found, "name a folder that all hosts share (NFS, Lustre, ...) with --runs"
        )
    elif fleet.marker:
        yield Finding("ok", FLEET, "run directory", "all hosts see the same")
    else:
        yield Finding(
            "not checked", FLEET, "run directory", "whether all hosts see the same: the first can't write there"
        )


def _slots(fleet: FleetFacts, slots: Mapping[str, int]) -> Iterator[Finding]:
    for host, number in slots.items():
        facts = fleet.hosts.get(host)
        if facts is None:
            continue
        devices, cores = len(facts.accelerators.devices), usable_cores(facts)
        if devices and number > devices:
            found = f"{count(number, 'slot')} for {count(devices, 'accelerator')}: ranks would train on the CPU"
            yield Finding("error", host, "slots", found, f"write {host}:{devices}")
        elif cores and number > cores:
            found = f"{count(number, 'slot')} for {cores:g} cores: ranks wait for each other"
            yield Finding("warning", host, "slots", found, f"write {host}:{max(1, int(cores))}")
