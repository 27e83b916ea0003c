"""Compare the hosts of a fleet with each other: take their answers and yield findings.

A check yields the problems, or one "ok" so that the report names what was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter

from paceline.doctor.ask import FleetFacts
from paceline.doctor.checks.host_checks import usable_cores
from paceline.doctor.checks.network_checks import chosen_interface, find_interface, is_loopback
from paceline.doctor.checks.torch_stack import release
from paceline.doctor.facts import HostFacts, Name
from paceline.doctor.finding import FLEET, Finding, Level, count, size

_OFFSET_S = 0.5  # the largest difference of clocks that is right; the error of the measurement is added to it
_NEAR = 0.8  # hosts are alike where the least has this share of the most
# Beginnings of variables that must not differ between ranks.
_SETTINGS = ("NCCL_", "GLOO_", "OMP_NUM_THREADS", "MASTER_", "CUDA_VISIBLE_DEVICES")


def check_fleet(fleet: FleetFacts, slots: Mapping[str, int], has_runs: bool = False) -> list[Finding]:
    """Return all findings between hosts.

    Args:
        fleet: the answers of the hosts.
        slots: the number of ranks of each host.
        has_runs: True where the user named a run directory for all of them.
    """
    findings = list(_silent(fleet))
    if len(fleet.hosts) > 1:
        for check in _CHECKS:
            findings += check(fleet)
        if has_runs:
            findings += _run_directory(fleet)
    return [*findings, *_slots(fleet, slots)]


def _silent(fleet: FleetFacts) -> Iterator[Finding]:
    for host, error in fleet.silent.items():
        fix = error.fix
        if "host key" in error.found.lower():
            fix += ". `ssh-keyscan` alone would trust whoever answers: hold what it prints against the host's console"
        yield Finding("error", host, "ssh", f"{error.asked}: {error.found}", fix)


def _groups(fleet: FleetFacts, value_of: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """Return the names of the hosts by the value that they have, the most frequent value first."""
    groups: dict[str, list[str]] = {}
    for host, host_facts in fleet.hosts.items():
        groups.setdefault(value_of(host_facts), []).append(host)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _describe(groups: Mapping[str, list[str]]) -> str:
    """Return a text such as "2.13.0 on h1, h2; 2.11.0 on h3"."""
    return "; ".join(f"{value or 'none'} on {_listed(hosts)}" for value, hosts in groups.items())


def _listed(hosts: list[str]) -> str:
    if len(hosts) <= 4:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"


def _python(host_facts: HostFacts) -> str:
    return ".".join(map(str, release(host_facts.versions.python)))  # 3.11.7 and 3.11.9 work together


# Name in the report, level where it differs, what follows from a difference, and where the version stands.
_VERSIONS: tuple[tuple[str, Level, str, Callable[[HostFacts], str]], ...] = (
    ("paceline", "error", "ranks of two versions don't understand each other", attrgetter("versions.paceline")),
    ("torch", "error", "ranks of two versions may hang or give other numbers", attrgetter("versions.torch")),
    ("NCCL", "error", "NCCL refuses or hangs between versions", attrgetter("versions.nccl")),
    ("python", "error", "ranks of two versions may not read each other's data", _python),
    ("CUDA", "error", "kernels round differently", attrgetter("versions.cuda_build")),
    ("driver", "warning", "what one host runs another may not", attrgetter("versions.driver")),
    ("architecture", "warning", "kernels round differently", attrgetter("versions.architecture")),
)


def _versions(fleet: FleetFacts) -> Iterator[Finding]:
    for name, level, consequence, version_of in _VERSIONS:
        groups = _groups(fleet, version_of)
        most_frequent = next(iter(groups))
        if len(groups) > 1:
            problem = f"it differs: {_describe(groups)}; {consequence}"
            yield Finding(level, FLEET, name, problem, f"install {most_frequent or 'one'} on all hosts")
        elif most_frequent:  # "" on all hosts: they have none, or nobody knows it
            yield Finding("ok", FLEET, name, f"{most_frequent} on all hosts")


def _device_count(host_facts: HostFacts) -> str:
    return str(len(host_facts.accelerators.devices))


def _device_kinds(host_facts: HostFacts) -> str:
    kinds = {device.name for device in host_facts.accelerators.devices}
    return ", ".join(sorted(kinds))


def _devices(fleet: FleetFacts) -> Iterator[Finding]:
    counts = _groups(fleet, _device_count)
    if len(counts) > 1:
        problem = f"their number differs: {_describe(counts)}; a job with the same ranks on each host takes the least"
        fix = "give each host its own slots (h1:8,h2:4), and see with nvidia-smi whether one has fallen off the bus"
        yield Finding("warning", FLEET, "accelerators", problem, fix)
    kinds = _groups(fleet, _device_kinds)
    if len(kinds) > 1:
        problem = f"their kind differs: {_describe(kinds)}; the slowest sets the pace"
        yield Finding("warning", FLEET, "accelerators", problem, "train on hosts with equal ones")


def _open_files(host_facts: HostFacts) -> str:
    return str(host_facts.limits.files or "unlimited")


def _shm_bytes(host_facts: HostFacts) -> int:
    return host_facts.shm.size_bytes


def _shm_size(host_facts: HostFacts) -> str:
    return size(_shm_bytes(host_facts))


def _core_count(host_facts: HostFacts) -> str:
    return f"{usable_cores(host_facts):g}"


def _memory_bytes(host_facts: HostFacts) -> int:
    return host_facts.memory.total_bytes or 0


def _memory_size(host_facts: HostFacts) -> str:
    return size(_memory_bytes(host_facts))


def _resources(fleet: FleetFacts) -> Iterator[Finding]:
    limits = _groups(fleet, _open_files)
    if len(limits) > 1:
        problem = f"it differs: {_describe(limits)}; the least decides"
        yield Finding("warning", FLEET, "open files", problem, "set one limit for all hosts' sshd or service")
    # By default /dev/shm has half of the memory, which differs a little between equal hosts.
    shm_sizes = _groups(fleet, _shm_size)
    if len(shm_sizes) > 1 and not _are_near(fleet, _shm_bytes):
        problem = f"it differs: {_describe(shm_sizes)}; the least decides"
        yield Finding("warning", FLEET, "/dev/shm", problem, "give all hosts the largest of them")
    fix = "give each host slots by what it has, or train on equal hosts"
    if not _are_near(fleet, usable_cores):
        problem = f"they differ: {_describe(_groups(fleet, _core_count))}; the least sets the pace"
        yield Finding("warning", FLEET, "cores", problem, fix)
    if not _are_near(fleet, _memory_bytes):
        problem = f"they differ: {_describe(_groups(fleet, _memory_size))}; the least sets the pace"
        yield Finding("warning", FLEET, "memory", problem, fix)


def _are_near(fleet: FleetFacts, value_of: Callable[[HostFacts], float]) -> bool:
    values = [value_of(host_facts) for host_facts in fleet.hosts.values()]
    return min(values) >= _NEAR * max(values)


def _machine(host_facts: HostFacts) -> str:
    return f"{host_facts.network.hostname} {host_facts.boot}"


def _same_machine(fleet: FleetFacts) -> Iterator[Finding]:
    # The boot id is the same in all containers of a machine; these are hosts of their own, with other hostnames.
    groups = _groups(fleet, _machine)
    for hosts in groups.values():
        if len(hosts) > 1 and fleet.hosts[hosts[0]].boot:
            problem = f"{_listed(hosts)} are one machine: their ranks would share its cores and accelerators"
            fix = "name each host once, and look at /etc/hosts or the name server"
            yield Finding("error", FLEET, "hosts", problem, fix)


def _clocks(fleet: FleetFacts) -> Iterator[Finding]:
    is_right = True
    for host, offset in fleet.offsets.items():
        # Only what the time of the question and the answer can't explain is a fault (see `ask.clock_offset`).
        if abs(offset.seconds) > _OFFSET_S + offset.uncertainty_s:
            is_right = False
            side = "ahead of" if offset.seconds > 0 else "behind"
            problem = (
                f"it is {abs(offset.seconds):.1f} s (give or take {offset.uncertainty_s:.1f} s) {side} this host's:"
                " who failed first can't be told, certificates may fail"
            )
            fix = "start chrony or systemd-timesyncd there, with the same servers on all hosts"
            yield Finding("error", host, "clock", problem, fix)
    if is_right and fleet.offsets:
        widest = max(offset.uncertainty_s for offset in fleet.offsets.values())
        yield Finding("ok", FLEET, "clock", f"no more apart than can be measured ({widest + _OFFSET_S:.1f} s)")


def _names(fleet: FleetFacts) -> Iterator[Finding]:
    is_right = True
    for name in fleet.hosts:
        for finding in _faults_of_name(fleet, name):
            is_right = False
            yield finding
    if is_right:
        yield Finding("ok", FLEET, "names", "every host resolves all others, to the same addresses")


def _faults_of_name(fleet: FleetFacts, name: str) -> Iterator[Finding]:
    """Yield the problems with the addresses to which the hosts resolve the name of one of them."""
    answers: dict[str, Name] = {}  # the answers by the host that asked
    for host, host_facts in fleet.hosts.items():
        if name in host_facts.network.names:
            answers[host] = host_facts.network.names[name]

    failed = [host for host, answer in answers.items() if answer.error]
    if failed:
        problem = (
            f"{name} does not resolve on {_listed(failed)} ({answers[failed[0]].error}): ranks there can't find it"
        )
        fix = f"write {name} in /etc/hosts of {_listed(failed)}, or in the name server"
        yield Finding("error", FLEET, "names", problem, fix)

    # A host may resolve its own name to loopback (Debian writes 127.0.1.1); the others may not.
    peer_answers = {host: answer for host, answer in answers.items() if host != name}
    for host, answer in peer_answers.items():
        is_local = bool(answer.addresses) and all(map(is_loopback, answer.addresses))
        if is_local and not is_loopback(name):
            problem = f"{name} is {answer.addresses[0]} on {host}: it would speak to itself"
            yield Finding("error", host, "names", problem, f"mend /etc/hosts of {host}")

    groups = _groups_of_addresses(peer_answers)
    if len(groups) > 1:
        problem = f"{name} resolves differently: {_describe(groups)}; some hosts would speak to another machine"
        yield Finding("error", FLEET, "names", problem, "use one name server or one /etc/hosts for all hosts")


def _groups_of_addresses(answers: Mapping[str, Name]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for host, answer in answers.items():
        if answer.addresses and not all(map(is_loopback, answer.addresses)):
            # Sorted: a name server gives the addresses of a name in turn, in another order each time.
            groups.setdefault(", ".join(sorted(answer.addresses)), []).append(host)
    return groups


def _names_back(fleet: FleetFacts) -> Iterator[Finding]:
    reported: set[tuple[str, tuple[str, ...]]] = set()  # all hosts may see the same fault: it is reported once
    for host, host_facts in fleet.hosts.items():
        for name, answer in host_facts.network.names.items():
            if name not in fleet.hosts or _is_address(name) or not answer.names_back:
                continue
            # The domain is left out: hosts files have short names, name servers long ones.
            short_names = {back.partition(".")[0] for back in answer.names_back}
            fault = (name, answer.names_back)
            if name.partition(".")[0] in short_names or fault in reported:
                continue
            reported.add(fault)
            address = next(address for address in answer.addresses if not is_loopback(address))
            problem = f"{name} is {address} on {host}, and {address} is {answer.names_back[0]} there"
            fix = "mend the reverse entry: schedulers and ssh keys go by the name that comes back"
            yield Finding("warning", host, "names", problem, fix)


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdecimal()


def _interfaces(fleet: FleetFacts) -> Iterator[Finding]:
    names = _groups(fleet, chosen_interface)
    if len(names) > 1:
        problem = f"their names differ: {_describe(names)}; one GLOO_SOCKET_IFNAME can't fit all hosts"
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each host by itself, or leave them out on all"
        yield Finding("warning", FLEET, "interface", problem, fix)
    mtus = _groups(fleet, _mtu)
    if len(mtus) > 1:
        problem = f"it differs: {_describe(mtus)}; small messages pass, large ones hang"
        yield Finding("error", FLEET, "MTU", problem, "set one MTU on all hosts and switches: ip link set DEV mtu N")


def _mtu(host_facts: HostFacts) -> str:
    interface = find_interface(host_facts.network, chosen_interface(host_facts))
    return str(interface.mtu) if interface else ""


def _setting(name: str, host_facts: HostFacts) -> str:
    return host_facts.environment.get(name, "unset")


def _settings(fleet: FleetFacts) -> Iterator[Finding]:
    names: set[str] = set()
    for host_facts in fleet.hosts.values():
        names.update(name for name in host_facts.environment if name.startswith(_SETTINGS))
    for name in sorted(names):
        groups = _groups(fleet, partial(_setting, name))
        if len(groups) > 1:
            problem = f"it differs: {_describe(groups)}; ssh does not hand the shell's variables on"
            yield Finding("warning", FLEET, name, problem, "set it for the job, not in one shell")


def _reached(fleet: FleetFacts) -> Iterator[Finding]:
    failures = 0
    for host, outcomes in fleet.reached.items():
        for peer, reason in outcomes.items():
            if not reason:  # "" is reached
                continue
            failures += 1
            problem = f"{host} can't reach {peer} at {fleet.ports.get(peer, '?')}: {reason}"
            fix = (
                f"let {peer}'s firewall pass all TCP ports from {host} (Gloo and NCCL take any), or set "
                "GLOO_SOCKET_IFNAME to the interface of their common network"
            )
            yield Finding("error", host, "reach", problem, fix)
    pairs = sum(map(len, fleet.reached.values()))
    if pairs and not failures:
        yield Finding("ok", FLEET, "reach", f"all {count(pairs, 'way')} between hosts are open")
    # A host without an address has no port to listen on (`ask.ask_fleet`). One that is silent has its own finding.
    missing = [host for host in fleet.hosts if host not in fleet.reached and host not in fleet.silent]
    if missing:
        problem = f"{_listed(missing)} did not say whether the others can be reached"
        yield Finding("not checked", FLEET, "reach", problem, "give each host an interface with an address")


def _run_directory(fleet: FleetFacts) -> Iterator[Finding]:
    # The first host wrote a marker file; each host was asked whether it sees it.
    blind = [host for host, sees in fleet.marker.items() if not sees]
    if blind:
        first = next(iter(fleet.hosts))
        path = fleet.hosts[first].runs.path
        problem = f"{_listed(blind)} don't see in {path} what {first} writes there: checkpoints would be in parts"
        yield Finding(
            "error",
            FLEET,
            "run directory",
            problem,
            "name a folder that all hosts share (NFS, Lustre, ...) with --runs",
        )
    elif fleet.marker:
        yield Finding("ok", FLEET, "run directory", "all hosts see the same")
    else:
        yield Finding(
            "not checked", FLEET, "run directory", "whether all hosts see the same: the first can't write there"
        )


def _slots(fleet: FleetFacts, slots: Mapping[str, int]) -> Iterator[Finding]:
    for host, number in slots.items():
        host_facts = fleet.hosts.get(host)
        if host_facts is None:  # it did not answer: `_silent` says so
            continue
        devices = len(host_facts.accelerators.devices)
        cores = usable_cores(host_facts)
        if devices and number > devices:
            problem = f"{count(number, 'slot')} for {count(devices, 'accelerator')}: ranks would train on the CPU"
            yield Finding("error", host, "slots", problem, f"write {host}:{devices}")
        elif cores and number > cores:
            problem = f"{count(number, 'slot')} for {cores:g} cores: ranks wait for each other"
            yield Finding("warning", host, "slots", problem, f"write {host}:{max(1, int(cores))}")


# In the order of the report.
_CHECKS: tuple[Callable[[FleetFacts], Iterator[Finding]], ...] = (
    *(_versions, _devices, _resources, _same_machine, _clocks),
    *(_names, _names_back, _interfaces, _settings, _reached),
)
