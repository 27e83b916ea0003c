"""Faults between hosts: each is found with its fix; and two hosts that are really asked, and really meet."""
# ruff: noqa: E501 (a table, a case a line)

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from paceline.doctor.ask import LocalAsker, Offset, _answer_of, answer, ask_fleet, clock_offset
from paceline.doctor.checks.fleet import check_fleet
from paceline.doctor.checks.host_checks import check_host
from paceline.doctor.facts import Interface, Name
from paceline.doctor.findings_report import as_json, summary_line, table
from paceline.doctor.meet import ReachableHost, meet
from paceline.doctor.probe.host_facts import Question
from paceline.launch.ssh import why_lost
from paceline.nouns.errors import UsageError

from support.healthy_hosts import GIB, changed, healthy, healthy_fleet

SLOTS = {"h1": 2, "h2": 2, "h3": 2}
NO_DEVICES = ()


def on(path, value, host="h2"):
    """A change of one host of the fleet."""

    def change(fleet):
        fleet.hosts[host] = changed(fleet.hosts[host], path, value)

    return change


def at(field, value, *keys):
    """A change of what was answered between hosts."""

    def change(fleet):
        inner = getattr(fleet, field)
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def silent(words):
    def change(fleet):
        del fleet.hosts["h2"]
        fleet.silent["h2"] = why_lost("h2", words)

    return change


FAULTS = {
    "another torch": (on("versions.torch", "2.11.0"), "torch", "error", "2.11.0 on h2", "install 2.13.0"),
    "another Paceline": (on("versions.paceline", "0.0.9"), "paceline", "error", "0.0.9 on h2", "install 0.1.0"),
    "another Python": (on("versions.python", "3.11.2"), "python", "error", "3.11 on h2", "install 3.12"),
    "another NCCL": (on("versions.nccl", "2.21.5"), "NCCL", "error", "2.21.5 on h2", "install 2.27.3"),
    "another CUDA": (on("versions.cuda_build", "12.6"), "CUDA", "error", "12.6 on h2", "install 12.8"),
    "another driver": (on("versions.driver", "550.1"), "driver", "warning", "550.1 on h2", "install 570.86"),
    "another processor": (on("versions.architecture", "aarch64"), "architecture", "warning", "aarch64 on h2", "install"),
    "a clock ahead": (at("offsets", Offset(3.0, 0.4), "h2"), "clock", "error", "3.0 s (give or take 0.4 s) ahead", "chrony"),
    "a clock behind": (at("offsets", Offset(-9.0, 2.0), "h2"), "clock", "error", "9.0 s (give or take 2.0 s) behind", "chrony"),
    "a name that one does not know": (on("network.names.h3", Name(error="unknown")), "names", "error", "h3 does not resolve on h2", "/etc/hosts of h2"),
    "a name of two machines": (on("network.names.h3", Name(("10.7.7.7",))), "names", "error", "10.7.7.7 on h2", "one name server"),
    "a name that leads back": (on("network.names.h3", Name(("127.0.1.1",))), "names", "error", "speak to itself", "/etc/hosts of h2"),
    "another name back": (on("network.names.h3", Name(("10.0.0.3",), ("old.lan",))), "names", "warning", "old.lan", "reverse"),
    "a firewall that drops": (at("reached", "timed out", "h2", "h1"), "reach", "error", "h2 can't reach h1 at 10.0.0.1:40001: timed out", "firewall"),
    "a firewall that refuses": (at("reached", "refused", "h1", "h3"), "reach", "error", "h1 can't reach h3 at 10.0.0.3:40003: refused", "firewall"),
    "another MTU": (on("network.interfaces", (Interface("eth0", ("10.0.0.2",), True, False, False, 9000),)), "MTU", "error", "9000 on h2", "ip link"),
    "another interface": (on("network.interfaces", (Interface("ens5", ("10.0.0.2",), True, False, False, 1500),)), "interface", "warning", "ens5 on h2", "GLOO_SOCKET_IFNAME"),
    "fewer GPUs": (on("accelerators.devices", NO_DEVICES), "accelerators", "warning", "0 on h2", "slots"),
    "other GPUs": (on("accelerators.devices", tuple(replace(one, name="NVIDIA A100") for one in healthy().accelerators.devices)), "accelerators", "warning", "A100 on h2", "equal"),
    "fewer files": (on("limits.files", 4096), "open files", "warning", "4096 on h2", "one limit"),
    "a smaller /dev/shm": (on("shm.size_bytes", 2 * GIB), "/dev/shm", "warning", "2.0 GiB on h2", "largest"),
    "fewer cores": (on("cores.cgroup", 8.0), "cores", "warning", "8 on h2", "slots"),
    "less memory": (on("memory.total_bytes", 16 * GIB), "memory", "warning", "16.0 GiB on h2", "slots"),
    "one machine twice": (lambda fleet: (on("boot", "boot-1")(fleet), on("network.hostname", "h1")(fleet)), "hosts", "error", "h1, h2 are one machine", "once"),
    "other settings": (on("environment", {"NCCL_IB_DISABLE": "1"}), "NCCL_IB_DISABLE", "warning", "1 on h2", "not in one shell"),
    "run directories of their own": (at("marker", False, "h2"), "run directory", "error", "h2 don't see", "NFS"),
    "too many slots": (on("accelerators.devices", healthy().accelerators.devices[:1]), "slots", "error", "2 slots for 1 accelerator", "write h2:1"),
    "an unknown host key": (silent("Host key verification failed."), "ssh", "error", "Host key verification", "ssh-keyscan"),
    "no key for ssh": (silent("h2: Permission denied (publickey)."), "ssh", "error", "Permission denied", "ssh h2 true"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    change, check, level, found, fix = FAULTS[name]
    fleet = healthy_fleet()
    change(fleet)
    hits = [one for one in check_fleet(fleet, SLOTS, has_runs=True) if one.check == check and found in one.found]
    assert [one.level for one in hits] == [level]
    assert fix in hits[0].fix


def test_a_healthy_fleet_has_no_fault():
    findings = check_fleet(healthy_fleet(), SLOTS, has_runs=True)
    assert {one.level for one in findings} == {"ok"}
    assert {"clock", "names", "reach", "run directory", "torch", "NCCL"} <= {one.check for one in findings}


@pytest.mark.parametrize(
    ("seconds", "uncertainty_s", "is_fault"), [(0.9, 0.5, False), (1.1, 0.5, True), (0.4, 0.0, False)]
)
def test_doctor_clock_fault_needs_an_offset_beyond_uncertainty(seconds, uncertainty_s, is_fault):
    for sign in (1, -1):
        fleet = healthy_fleet()
        fleet.offsets["h2"] = Offset(sign * seconds, uncertainty_s)
        assert any(one.check == "clock" and one.level == "error" for one in check_fleet(fleet, SLOTS)) == is_fault


def test_the_offset_of_a_clock():
    """3 s ahead; the question took 0.6 s to get there and 0.2 s back."""
    offset = clock_offset(10 * 10**9, 13_600_000_000, 14_600_000_000, 11_800_000_000)
    assert offset.seconds == pytest.approx(3.2)
    assert offset.uncertainty_s == pytest.approx(0.4)
    assert abs(offset.seconds - 3.0) <= offset.uncertainty_s


class Answers:
    """Hosts whose doctors run here, in this process; what they answer is changed on the way."""

    def __init__(self, change=lambda host, request, answer: answer, skew_ns=None):
        self.change, self.skew_ns = change, skew_ns or {}
        self.asked = []

    def ask(self, host, request):
        request = json.loads(request)
        self.asked.append((host, request["kind"]))
        skew = self.skew_ns.get(host, 0)
        if request["kind"] == "look":
            number = int(host[1:])
            names = [int(name[1:]) for name in request["question"]["names"] if name != host]
            facts = healthy(number, names).to_json()
            facts["network"]["interfaces"][1]["addresses"] = ["127.0.0.1"]
            facts["network"]["free_port"] = self.port(number)
            facts["runs"]["path"] = request["question"]["runs"]
            said = {"facts": facts, "heard_ns": time.time_ns() + skew, "said_ns": time.time_ns() + skew}
            if request["question"]["marker"]:
                with open(f"{request['question']['runs']}/.paceline-doctor-{request['question']['marker']}", "x"):
                    pass
        else:
            said = answer(json.dumps(request).encode(), 0)
        return json.dumps(self.change(host, request, said)).encode()

    def port(self, number):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]


NAMES = ("h1", "h2", "h3")


def errors_of(asker, tmp_path, meet_s=3.0, **more):
    question = Question(NAMES, str(tmp_path), (29400,), True, "a" * 32)
    fleet = ask_fleet(NAMES, question, asker, meet_s=meet_s)
    return fleet, [one for one in check_fleet(fleet, SLOTS, **more) if one.level == "error"]


def test_hosts_meet_and_nothing_is_left(tmp_path):
    asker = Answers()
    fleet, errors = errors_of(asker, tmp_path, has_runs=True)
    assert errors == []
    assert fleet.reached == {a: {b: "" for b in NAMES if a != b} for a in NAMES}
    assert fleet.marker == dict.fromkeys(NAMES, True)
    assert list(tmp_path.iterdir()) == []
    assert [kind for _, kind in asker.asked].count("tidy") == 1


def test_a_fleet_with_a_clock_ahead_and_another_torch(tmp_path):
    def change(host, request, said):
        if host == "h2" and request["kind"] == "look":
            said["facts"]["versions"]["torch"] = "2.11.0"
        return said

    _, errors = errors_of(Answers(change, {"h3": 3 * 10**9}), tmp_path)
    assert {(one.host, one.check) for one in errors} == {("fleet", "torch"), ("h3", "clock")}
    assert "3.0 s" in next(one for one in errors if one.check == "clock").found


def test_a_host_behind_a_firewall(tmp_path):
    """What h2 says of its port is changed on the way, so that nothing listens where the others try."""

    class Elsewhere(Answers):
        def ask(self, host, request):
            changed = json.loads(request)
            if changed["kind"] == "meet" and host == "h2":
                next(seat for seat in changed["seats"] if seat["host"] == "h2")["port"] = self.port(2)
            return super().ask(host, json.dumps(changed).encode())

    _, errors = errors_of(Elsewhere(), tmp_path, meet_s=1.0)
    assert {(one.host, one.check) for one in errors} == {("h1", "reach"), ("h3", "reach")}
    assert all("can't reach h2 at 127.0.0.1:" in one.found and "refused" in one.found for one in errors)


def test_a_host_that_answers_nonsense_or_not_at_all(tmp_path):
    class Broken(Answers):
        def ask(self, host, request):
            if host == "h2":
                return b"Welcome to h2\n"
            if host == "h3":
                raise why_lost("h3", "ssh: connect to host h3 port 22: Connection timed out")
            return super().ask(host, request)

    fleet, errors = errors_of(Broken(), tmp_path)
    assert set(fleet.hosts) == {"h1"}
    assert {one.host for one in errors} == {"h2", "h3"}
    assert list(tmp_path.iterdir()) == []


def test_facts_that_are_no_facts(tmp_path):
    def change(host, request, said):
        if host == "h2" and request["kind"] == "look":
            said["facts"]["cores"] = "many"
        return said

    fleet, errors = errors_of(Answers(change), tmp_path)
    assert "h2" not in fleet.hosts
    assert [(one.host, one.check) for one in errors] == [("h2", "ssh")]
    assert "facts.cores" in errors[0].found


def test_who_has_no_token_learns_nothing():
    port = Answers().port(1)
    seats = [ReachableHost("h1", "127.0.0.1", port, "1" * 32), ReachableHost("h2", "127.0.0.1", 1, "2" * 32)]
    result = {}
    host = threading.Thread(target=lambda: result.update(meet("h1", seats, 2.0)))
    host.start()
    for _ in range(100):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            time.sleep(0.02)
    with stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(100) == b""
    host.join()
    assert result == {"h2": "refused"}


def test_something_else_that_listens_there_is_not_the_host():
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def echo():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = stranger.accept()
                    with connection:
                        connection.sendall(connection.recv(100))

        threading.Thread(target=echo, daemon=True).start()
        there = ReachableHost("h2", "127.0.0.1", stranger.getsockname()[1], "2" * 32)
        here = ReachableHost("h1", "127.0.0.1", Answers().port(1), "1" * 32)
        assert meet("h1", [here, there], 0.5) == {"h2": "something else answered"}


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind": "run"}',
        b'{"kind": "tidy", "folder": "/", "marker": "../etc/passwd"}',
        b'{"kind": "look"}',
    ],
)
def test_a_request_that_is_none(request_):
    with pytest.raises(UsageError, match="can't be read"):
        answer(request_, 0)


def test_a_process_that_fails_is_told():
    with pytest.raises(UsageError, match="No module named"):
        _answer_of(["sh", "-c", "echo No module named paceline >&2; exit 1"], "h9", b"{}", is_ssh=False)
    with pytest.raises(UsageError, match="can't be started"):
        _answer_of(["/nowhere/python"], "h9", b"{}", is_ssh=False)


@pytest.mark.slow
def test_a_child_answers_as_ssh_would_start_it(tmp_path):
    question = {"names": [], "runs": str(tmp_path), "ports": [], "is_quick": True, "marker": ""}
    request = json.dumps({"kind": "look", "question": question}).encode()
    said = json.loads(LocalAsker().ask("any", request))
    assert said["facts"]["runs"]["path"] == str(tmp_path)
    assert said["heard_ns"] <= said["said_ns"]


def test_the_table_is_worst_first_and_folds_hosts():
    fleet = healthy_fleet()
    fleet.reached["h2"]["h1"] = "timed out"
    findings = check_fleet(fleet, SLOTS)
    for host in fleet.hosts:
        findings += check_host_of(fleet, host)
    lines = table(findings)
    assert lines[0].startswith("error")
    assert "fix: " in "".join(lines[:4])
    assert sum("h1 and 2 more" in line and "open files" in line for line in lines) == 1
    assert all(len(line) <= 120 for line in lines)
    assert summary_line(findings, 3).startswith("3 hosts: 1 error, 0 warnings")
    value = json.loads(json.dumps(as_json(fleet.hosts, findings)))
    assert value["summary"]["error"] == 1
    assert value["summary"]["hosts"] == 3
    assert value["findings"][0]["check"] == "reach"


def check_host_of(fleet, host):
    return check_host(fleet.hosts[host], host, is_fleet=True)
