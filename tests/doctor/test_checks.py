"""Faults of one host: each is found, by its check, at its level, with its fix; a healthy host has none."""
# ruff: noqa: E501 (a table, a case a line)

from __future__ import annotations

import json

import pytest

from paceline.doctor.checks.host_checks import check_host
from paceline.doctor.facts import (
    Accelerator,
    Folder,
    HostFacts,
    Interface,
    Leftover,
    Name,
    Port,
)

from support.healthy_hosts import GIB, LO, changed, healthy

MIB = 2**20
H200, H100 = Accelerator("NVIDIA H200", 139 * GIB, 0, "GPU-10"), Accelerator("NVIDIA H100", 80 * GIB, 0, "GPU-11")
ETH0 = Interface("eth0", ("10.0.0.1",), True, False, False, 1500, 10000)
DOCKER = Interface("docker0", ("172.17.0.1",), True, False, True, 1500)
BIG = Folder("runs", "/data", "ext4", 900 * GIB, 10**7, 10**6, False, "", 5e8)


def folder(**change):
    return changed_many(BIG, change)


def changed_many(thing, change):
    for name, value in change.items():
        thing = changed(thing, name, value)
    return thing


# What is wrong: (a change or several, in a fleet or alone, check, level, a word of what is found, a word of the fix).
FAULTS = {
    "an old python": ({"versions.python": "3.10.12"}, False, "python", "error", "3.11", "newer Python"),
    "no torch": ({"versions.torch": "", "versions.torch_error": "ModuleNotFoundError: No module named 'torch'"}, False, "torch", "error", "No module", "pip install"),
    "an old torch": ({"versions.torch": "2.9.1"}, False, "torch", "error", "2.11", "--upgrade"),
    "a newer torch": ({"versions.torch": "2.14.1"}, False, "torch", "warning", "2.11 to 2.13", "<2.14"),
    "torch from a slow disk": ({"versions.torch_import_s": 45.0}, False, "torch", "warning", "45 s", "local disk"),
    "torch without distributed": ({"versions.has_distributed": False}, False, "torch", "error", "can't meet", "pytorch.org"),
    "torch without CUDA": ({"versions.cuda_build": "", "versions.nccl": ""}, False, "driver", "error", "without CUDA", "for CUDA"),
    "no NCCL": ({"versions.nccl": ""}, False, "NCCL", "error", "no NCCL", "Linux"),
    "an old driver": ({"versions.cuda_driver": "11.8"}, False, "driver", "error", "11.8", "update the driver"),
    "a broken driver": ({"accelerators.driver_error": "Failed to initialize NVML: Driver/library version mismatch"}, False, "driver", "error", "mismatch", "reboot"),
    "torch does not see the GPUs": ({"accelerators.seen_by_torch": ()}, False, "accelerators", "error", "0 of 2", "--gpus all"),
    "a GPU without code": ({"accelerators.unsupported": ("NVIDIA B200",)}, False, "accelerators", "error", "B200", "build of torch"),
    "mixed GPUs": ({"accelerators.devices": (H200, H100)}, False, "accelerators", "warning", "1x NVIDIA H100", "CUDA_VISIBLE_DEVICES"),
    "GPU memory in use": ({"accelerators.devices": (H200, changed(H200, "used_bytes", 30 * GIB))}, False, "accelerator memory", "warning", "GPU 1", "dead jobs"),
    "GPUs across sockets": ({"accelerators.links": {"GPU0-GPU1": "SYS"}}, False, "links", "warning", "sockets", "one socket"),
    "NVLink between some": ({"accelerators.links": {"GPU0-GPU1": "NV4", "GPU0-GPU2": "PHB"}}, False, "links", "warning", "1 of 2 pairs", "tensor"),
    "GPUs hidden": ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, False, "CUDA_VISIBLE_DEVICES", "warning", "hides all 2", "unset"),
    "a GPU that is not there": ({"environment": {"CUDA_VISIBLE_DEVICES": "0,9"}}, False, "CUDA_VISIBLE_DEVICES", "error", "names 9", "0 to 1"),
    "a GPU named by another's number": ({"environment": {"CUDA_VISIBLE_DEVICES": "GPU-99"}}, False, "CUDA_VISIBLE_DEVICES", "error", "GPU-99", "0 to 1"),
    "a GPU named twice": ({"environment": {"CUDA_VISIBLE_DEVICES": "1,1"}}, False, "CUDA_VISIBLE_DEVICES", "error", "twice", "once"),
    "P2P switched off": ({"environment": {"NCCL_P2P_DISABLE": "1"}}, False, "NCCL_P2P_DISABLE", "warning", "NVLink", "unset"),
    "InfiniBand switched off": ({"environment": {"NCCL_IB_DISABLE": "1"}, "network.infiniband": ("mlx5_0",)}, False, "NCCL_IB_DISABLE", "warning", "TCP", "unset"),
    "NCCL talks": ({"environment": {"NCCL_DEBUG": "INFO"}}, False, "NCCL_DEBUG", "warning", "INFO", "WARN"),
    "distributed debugging": ({"environment": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, False, "TORCH_DISTRIBUTED_DEBUG", "warning", "DETAIL", "unset"),
    "blocking launches": ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, False, "CUDA_LAUNCH_BLOCKING", "warning", "kernel", "unset"),
    "a limit on cores": ({"cores.cgroup": 2.0}, False, "cores", "warning", "2 cores' time", "16 cores"),
    "bound to one core": ({"cores.affinity": 1}, False, "cores", "warning", "shares that one", "--cpus-per-task"),
    "a loaded host": ({"cores.load": 60.0}, False, "load", "warning", "60.0", "top"),
    "threads of zero": ({"environment": {"OMP_NUM_THREADS": "0"}}, False, "OMP_NUM_THREADS", "warning", "ignores", "unset"),
    "threads of 5,000 digits": ({"environment": {"OMP_NUM_THREADS": "9" * 5000}}, False, "OMP_NUM_THREADS", "warning", "ignores", "unset"),
    "too many threads": ({"environment": {"OMP_NUM_THREADS": "128"}}, False, "OMP_NUM_THREADS", "warning", "16 cores", "divided"),
    "memory in use": ({"memory.available_bytes": 2 * GIB}, False, "memory", "warning", "137", "--explain-memory"),
    "a limit on memory": ({"memory.limit_bytes": 4 * GIB, "memory.used_of_limit_bytes": 3 * GIB}, False, "memory limit", "warning", "1.0 GiB left", "raise"),
    "swap in use": ({"memory.swap_used_bytes": 3 * GIB}, False, "swap", "warning", "3.0 GiB", "swapoff"),
    "no huge pages": ({"memory.huge_pages": "never"}, False, "huge pages", "warning", "off", "madvise"),
    "docker's /dev/shm": ({"shm.size_bytes": 64 * MIB, "shm.free_bytes": 64 * MIB}, False, "/dev/shm", "error", "Bus error", "--shm-size"),
    "a small /dev/shm": ({"shm.size_bytes": 256 * MIB, "shm.free_bytes": 256 * MIB}, False, "/dev/shm", "warning", "256 MiB", "--shm-size"),
    "a full /dev/shm": ({"shm.free_bytes": 3 * MIB}, False, "/dev/shm", "error", "3 MiB", "remove"),
    "no /dev/shm": ({"shm.exists": False}, False, "/dev/shm", "error", "none", "mount"),
    "/dev/shm noexec": ({"shm.flags": ("rw", "noexec")}, False, "/dev/shm", "warning", "noexec", "remount"),
    "/dev/shm of root's": ({"shm.mode": 0o755}, False, "/dev/shm", "error", "0755", "1777"),
    "/dev/shm without the sticky bit": ({"shm.mode": 0o777}, False, "/dev/shm", "warning", "remove another's", "1777"),
    "very few files": ({"limits.files": 256}, False, "open files", "error", "256", "ulimit -n"),
    "few files": ({"limits.files": 1024}, False, "open files", "warning", "1024", "LimitNOFILE"),
    "few processes": ({"limits.processes": 512}, False, "processes", "warning", "512", "pids-limit"),
    "little locked memory": ({"limits.locked_bytes": 65536, "network.infiniband": ("mlx5_0",)}, False, "locked memory", "error", "ibv_reg_mr", "memlock"),
    "core files": ({"limits.core_bytes": None}, False, "core files", "warning", "memory", "ulimit -c 0"),
    "a read-only run directory": ({"runs": folder(is_read_only=True)}, False, "run directory", "error", "read-only", "--runs"),
    "a run directory of others": ({"runs": folder(error="Permission denied")}, False, "run directory", "error", "Permission denied", "--runs"),
    "a full run directory": ({"runs": folder(free_bytes=MIB)}, False, "run directory", "error", "1 MiB free", "make room"),
    "a nearly full run directory": ({"runs": folder(free_bytes=GIB)}, False, "run directory", "warning", "1.0 GiB free", "make room"),
    "no more files": ({"runs": folder(free_files=0)}, False, "run directory", "error", "inodes", "small files"),
    "a slow disk": ({"runs": folder(bytes_per_s=5e6)}, False, "disk speed", "warning", "5 MB/s", "faster"),
    "/tmp can't be written": ({"temporary": folder(path="/tmp", error="Read-only file system")}, False, "temporary folder", "error", "/tmp", "TMPDIR"),
    "a preload that is not there": ({"missing_preloads": ("/opt/lib.so",)}, False, "LD_PRELOAD", "error", "/opt/lib.so", "unset"),
    "a preload": ({"environment": {"LD_PRELOAD": "libx.so"}}, False, "LD_PRELOAD", "warning", "libx.so", "unset"),
    "leftovers": ({"leftovers": (Leftover("/tmp/paceline-abcdefgh", 5 * MIB),)}, False, "leftovers", "warning", "5 MiB", "remove"),
    "a launcher's variables": ({"environment": {"RANK": "0", "WORLD_SIZE": "4"}}, False, "rank variables", "warning", "waits for others", "unset RANK WORLD_SIZE"),
    "an interface that is down": ({"network.interfaces": (LO, changed(ETH0, "is_up", False))}, False, "interface", "error", "down", "ip link set eth0 up"),
    "an interface without address": ({"network.interfaces": (LO, changed(ETH0, "addresses", ()))}, False, "interface", "error", "without an address", "GLOO_SOCKET_IFNAME"),
    "docker's bridge is taken": ({"network.interfaces": (LO, DOCKER), "network.default_interface": "docker0"}, True, "interface", "error", "bridge", "GLOO_SOCKET_IFNAME"),
    "loopback though there are others": ({"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, True, "interface", "error", "no other host", "GLOO_SOCKET_IFNAME"),
    "no way out": ({"network.default_interface": ""}, True, "interface", "error", "no route", "ip route"),
    "several ways": ({"network.interfaces": (LO, ETH0, DOCKER)}, True, "interfaces", "warning", "docker0 could be taken", "=eth0"),
    "the slower way": ({"network.interfaces": (LO, ETH0, Interface("ib0", ("10.1.0.1",), True, False, False, 2044, 200000))}, False, "interfaces", "warning", "ib0 has 200000", "=ib0"),
    "ways of other MTU": ({"network.interfaces": (LO, ETH0, Interface("eth1", ("10.1.0.1",), True, False, False, 9000))}, True, "MTU", "warning", "9000", "one MTU"),
    "Gloo on no interface": ({"environment": {"GLOO_SOCKET_IFNAME": "nope0"}}, False, "GLOO_SOCKET_IFNAME", "error", "nope0", "eth0"),
    "Gloo's names are whole": ({"environment": {"GLOO_SOCKET_IFNAME": "eth"}}, False, "GLOO_SOCKET_IFNAME", "error", "'eth'", "eth0"),
    "NCCL on no interface": ({"environment": {"NCCL_SOCKET_IFNAME": "ib"}}, False, "NCCL_SOCKET_IFNAME", "error", "'ib'", "eth0"),
    "NCCL leaves all out": ({"environment": {"NCCL_SOCKET_IFNAME": "^eth,lo"}}, False, "NCCL_SOCKET_IFNAME", "error", "does not have", "unset"),
    "NCCL on loopback": ({"environment": {"NCCL_SOCKET_IFNAME": "lo"}}, True, "NCCL_SOCKET_IFNAME", "error", "no other host", "eth0"),
    "own name unknown": ({"network.names": {"h1": Name(error="Name or service not known")}}, True, "own name", "error", "does not resolve", "/etc/hosts"),
    "own name unknown, alone": ({"network.names": {"h1": Name(error="Name or service not known")}}, False, "own name", "warning", "does not resolve", "/etc/hosts"),
    "own name is loopback": ({"network.names": {"h1": Name(("127.0.1.1",))}}, True, "own name", "error", "127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
    "own name is loopback, alone": ({"network.names": {"h1": Name(("127.0.1.1",))}}, False, "own name", "warning", "127.0.1.1", "/etc/hosts"),
    "own name is another's": ({"network.names": {"h1": Name(("10.9.9.9",))}}, False, "own name", "error", "no address of this host", "/etc/hosts"),
    "localhost is not loopback": ({"network.names": {"localhost": Name(("10.9.9.9",))}}, False, "localhost", "error", "10.9.9.9", "127.0.0.1 localhost"),
    "a slow name server": ({"network.names": {"h1": Name(("10.0.0.1",), (), 5.0)}}, False, "name service", "warning", "5.0 s", "resolv.conf"),
    "an unknown master": ({"environment": {"MASTER_ADDR": "m"}, "network.names": {"m": Name(error="unknown")}}, False, "MASTER_ADDR", "error", "does not resolve", "first host"),
    "a master of each host's own": ({"environment": {"MASTER_ADDR": "m"}, "network.names": {"m": Name(("127.0.0.1",))}}, True, "MASTER_ADDR", "error", "world of one", "first host"),
    "the port is taken": ({"network.ports": {"29400": Port("it is taken", "process 7 (python)")}}, False, "port", "warning", "29400", "end process 7"),
    "MASTER_PORT is taken": ({"network.ports": {"29500": Port("it is taken")}, "environment": {"MASTER_PORT": "29500"}}, False, "port", "error", "29500", "ss -ltnp"),
    "MASTER_PORT is no port": ({"environment": {"MASTER_PORT": "http"}}, False, "MASTER_PORT", "error", "no port", "1024"),
    "MASTER_PORT of 5,000 digits": ({"environment": {"MASTER_PORT": "9" * 5000}}, False, "MASTER_PORT", "error", "no port", "1024"),
    "few ports": ({"network.ephemeral_ports": (60000, 60099)}, False, "ephemeral ports", "error", "100 (60000", "sysctl"),
    "a clock on its own": ({"is_clock_synchronised": False}, True, "clock", "warning", "not synchronised", "chrony"),
    "a clock on its own, of one host": ({"is_clock_synchronised": False}, False, "clock", "warning", "object stores", "chrony"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    change, is_fleet, check, level, found, fix = FAULTS[name]
    base = {(one.check, one.level) for one in check_host(healthy(), "h1", is_fleet)}
    assert (check, level) not in base, "the healthy host must not have it"
    hits = [one for one in check_host(changed_many(healthy(), change), "h1", is_fleet) if one.check == check]
    assert [one.level for one in hits if one.level != "ok"] == [level]
    (hit,) = (one for one in hits if one.level == level)
    assert found in hit.found
    assert fix in hit.fix
    assert hit.host == "h1"
    for one in hits:
        # A finding that has something to mend is no "ok", and one that asks for nothing is no fault.
        assert bool(one.fix) == (one.level in ("error", "warning"))


def test_one_host_needs_no_way_to_others():
    alone = changed(healthy(), "network.default_interface", "")
    (row,) = (one for one in check_host(alone, "h1") if one.check == "interface")
    assert (row.level, row.fix) == ("ok", "")
    assert "none leads to other hosts" in row.found


@pytest.mark.parametrize("is_fleet", [False, True])
def test_a_healthy_host_has_no_fault(is_fleet):
    findings = check_host(healthy(), "h1", is_fleet)
    assert {one.level for one in findings} == {"ok"}
    assert len(findings) > 15


def test_what_is_right_is_not_a_fault():
    """Settings that look odd and are not."""
    for environment in (
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_IB_DISABLE": "1"},  # there is none
        {"OMP_NUM_THREADS": "4,2"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-1"},
        {"NCCL_DEBUG": "WARN"},
    ):
        findings = check_host(changed(healthy(), "environment", environment), "h1", True)
        assert {one.level for one in findings} == {"ok"}, environment


def test_what_is_unknown_is_not_checked_and_no_error():
    """A host whose system says nothing: only torch, which trains, has to be there."""
    findings = check_host(HostFacts(), "h1")
    assert {one.check for one in findings if one.level == "error"} == {"torch"}
    unknown = {one.check for one in findings if one.level == "not checked"}
    assert {"python", "cores", "memory", "/dev/shm", "open files", "interface", "clock", "run directory"} <= unknown


def test_facts_travel_as_json():
    facts = changed(healthy(1, [2]), "leftovers", (Leftover("/tmp/x", 3),))
    assert HostFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_facts_of_another_version_or_of_a_hostile_host():
    value = healthy().to_json()
    value["news"] = 1
    value["cores"]["kinds"] = []
    del value["limits"]
    assert HostFacts.from_json(value).cores == healthy().cores
    for path, wrong in (("cores", 3), ("environment", {"A": []}), ("leftovers", [3]), ("boot", None)):
        with pytest.raises(ValueError, match=path):
            HostFacts.from_json({path: wrong})
    with pytest.raises(ValueError, match=r"cores\.online"):
        HostFacts.from_json({"cores": {"online": True}})
    with pytest.raises(ValueError, match=r"runs\.bytes_per_s"):
        HostFacts.from_json({"runs": {"bytes_per_s": True}})
