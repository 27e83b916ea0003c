"""What the doctor reads of a host, from files and programs that the tests write; and of this host, as it is."""
# ruff: noqa: E501 (what the system prints, a line a line)

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.doctor.facts import HostFacts, Interface, MemoryFacts
from paceline.doctor.probe.accelerators import look_at_accelerators, read_devices, read_links
from paceline.doctor.probe.disk import look_at_folder, look_for_leftovers, marker_path, mount_of
from paceline.doctor.probe.host_facts import (
    chosen_environment,
    look_at_cores,
    look_at_limits,
    look_at_memory,
    look_at_shm,
)
from paceline.doctor.probe.network_facts import (
    default_interface,
    look_at_interfaces,
    look_at_network,
    resolve,
    try_port,
)
from paceline.doctor.probe.torch_facts import _runs_on, torch_facts
from paceline.verify.ranks.dry_run import available_bytes

GIB = 2**30
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-63\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t64-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n  NIC0: mlx5_0\n"
)
DEVICES = "NVIDIA H200, 143771, 14, GPU-1e, 570.86\nNVIDIA H200, 143771, 9000, GPU-2e, 570.86\nNVIDIA L4, 23034, 0, GPU-3e, 570.86\n"


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_links_of_a_topology():
    assert read_links(TOPOLOGY) == {"GPU0-GPU1": "NV18", "GPU0-GPU2": "SYS", "GPU1-GPU2": "PHB"}
    assert read_links("") == read_links("Unable to determine the device handle\n") == {}


def test_devices_of_a_driver():
    devices, driver = read_devices(DEVICES)
    assert [one.name for one in devices] == ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    assert devices[0].memory_bytes == 143771 * 2**20
    assert devices[1].used_bytes == 9000 * 2**20
    assert driver == "570.86"
    assert read_devices("NVIDIA GB10, [N/A], [N/A], GPU-1, 580.1\n")[0][0].memory_bytes == 0


def fake_driver(folder, body):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}")
    program.chmod(0o755)


def test_a_driver_earlier_in_the_path(tmp_path, monkeypatch):
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "devices").write_text(DEVICES)
    fake_driver(
        tmp_path,
        f'case "$1" in topo) cat {tmp_path}/topology;; --query*) cat {tmp_path}/devices;; *) echo "CUDA Version: 12.8";; esac\n',
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("paceline.doctor.probe.accelerators._ask_torch", lambda: {"torch": "2.13.0"})
    versions, here = look_at_accelerators()
    assert (versions.driver, versions.cuda_driver, versions.torch) == ("570.86", "12.8", "2.13.0")
    assert len(here.devices) == 3
    assert here.links["GPU1-GPU2"] == "PHB"


def test_a_driver_that_fails(tmp_path, monkeypatch):
    fake_driver(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("paceline.doctor.probe.accelerators._ask_torch", dict)
    assert "version mismatch" in look_at_accelerators()[1].driver_error


def test_code_that_runs_on_a_device():
    assert _runs_on((9, 0), ["sm_80", "sm_90"])
    assert _runs_on((8, 6), ["sm_80"])
    assert not _runs_on((10, 0), ["sm_80", "sm_90"])
    assert _runs_on((12, 0), ["sm_90", "compute_90"])
    assert not _runs_on((7, 0), ["sm_75", "compute_80"])
    assert _runs_on((9, 0), ["sm_90a"])


@pytest.mark.slow
def test_torch_says_what_it_is():
    facts = torch_facts()
    assert facts["torch"]
    assert facts["has_distributed"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
        ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"proc/self/cgroup": "0::/a\x00b\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),  # no file has such a name
        ({}, None),
    ],
)  # fmt: skip
def test_a_limit_on_cores(tmp_path, files, cores):
    assert look_at_cores(tree(tmp_path, files)).cgroup == cores


def test_a_limit_on_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1024000, available=512000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: (100 * 1024, 60 * 1024, 40 * 1024, 60.0, 0, 0))
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.current": str(5 * GIB),
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory.max": "max",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        },
    )
    memory = look_at_memory(root)
    assert (memory.total_bytes, memory.available_bytes, memory.swap_used_bytes) == (1024000, 512000, 60 * 1024)
    assert (memory.limit_bytes, memory.used_of_limit_bytes) == (8 * GIB, 3 * GIB)
    assert memory.huge_pages == "never"
    unlimited = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert look_at_memory(tree(tmp_path / "other", unlimited)).limit_bytes is None


def test_memory_of_this_host():
    memory = look_at_memory(Path("/"))
    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 0 <= memory.swap_used_bytes <= memory.swap_bytes


def test_memory_that_a_container_hides(tmp_path, monkeypatch):
    def hidden():
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", hidden)
    assert look_at_memory(tmp_path) == MemoryFacts()
    assert available_bytes() is None


def test_memory_of_macos(tmp_path, monkeypatch):
    """There is no /proc, and swap grows as it is needed."""
    answer = SimpleNamespace(total=16 * GIB, available=6 * GIB, percent=62.5, used=9 * GIB, free=GIB, wired=2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: answer)
    monkeypatch.setattr(psutil, "swap_memory", lambda: (2 * GIB, GIB, GIB, 50.0, 0, 0))
    assert look_at_memory(tmp_path) == MemoryFacts(16 * GIB, 6 * GIB, swap_bytes=2 * GIB, swap_used_bytes=GIB)
    assert available_bytes() == 6 * GIB


def address(family, text):
    return SimpleNamespace(family=family, address=text, netmask=None, broadcast=None, ptp=None)


def card(flags, mtu, speed=0):
    return SimpleNamespace(isup="running" in flags, duplex=2, speed=speed, mtu=mtu, flags=flags)


MACOS_ADDRESSES = {
    "lo0": [address(socket.AF_INET, "127.0.0.1"), address(socket.AF_INET6, "::1"), address(socket.AF_INET6, "fe80::1%lo0")],
    "en0": [address(18, "3c:22:fb:00:00:01"), address(socket.AF_INET6, "fe80::1c%en0"), address(socket.AF_INET, "192.0.2.7"), address(socket.AF_INET, "192.0.2.8")],
    "utun3": [address(socket.AF_INET6, "fe80::2%utun3")],
}  # fmt: skip
MACOS_CARDS = {
    "lo0": card("up,loopback,running,multicast", 16384),
    "en0": card("up,broadcast,smart,running,simplex,multicast", 1500, 1000),
    "en1": card("up,broadcast,smart,simplex,multicast", 1500),
    "utun3": card("up,pointopoint,running,multicast", 1380),
}


def test_interfaces_of_macos(monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: MACOS_ADDRESSES)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: MACOS_CARDS)
    assert look_at_interfaces() == (
        Interface("lo0", ("127.0.0.1", "::1", "fe80::1"), is_up=True, is_loopback=True, mtu=16384),
        Interface("en0", ("192.0.2.7", "fe80::1c"), is_up=True, mtu=1500, megabits_per_s=1000),
        Interface("en1", (), is_up=False, mtu=1500),
        Interface("utun3", ("fe80::2",), is_up=True, is_virtual=True, mtu=1380),
    )


def test_interfaces_that_a_container_hides(monkeypatch):
    def hidden():
        raise PermissionError(13, "Permission denied", "/proc/net/dev")

    monkeypatch.setattr(psutil, "net_if_stats", hidden)
    assert look_at_interfaces() == ()


@linux
def test_interfaces_of_this_host():
    interfaces = {one.name: one for one in look_at_interfaces()}
    assert interfaces.keys() == {name for _, name in socket.if_nameindex()}
    assert interfaces["lo"].is_loopback
    assert interfaces["lo"].is_up
    assert "127.0.0.1" in interfaces["lo"].addresses
    for name, found in interfaces.items():
        assert found.mtu == int(Path(f"/sys/class/net/{name}/mtu").read_text())


def test_a_port_of_macos_whose_holder_is_hidden(monkeypatch):
    def hidden(kind):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", hidden)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert try_port(taken.getsockname()[1]).holder == ""


@linux
def test_a_mount_and_its_flags(tmp_path):
    lines = "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /dev/shm rw,noexec - tmpfs t rw\n3 1 0:3 / /my\\040data ro - nfs4 s:/ ro\n"
    root = tree(tmp_path, {"proc/self/mountinfo": lines, "dev/shm/x": "", "my data/runs/x": ""})
    assert mount_of(str(root / "dev/shm"), root) == ("tmpfs", ("rw", "noexec"))
    assert mount_of(str(root / "my data/runs"), root) == ("nfs4", ("ro",))
    assert mount_of(str(root / "elsewhere"), root)[0] == "ext4"
    assert look_at_shm(root).flags == ("rw", "noexec")
    assert look_at_shm(root / "elsewhere").exists is False


def test_the_default_route(tmp_path):
    heading = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    lines = "wlan0 00000000 0100000A 3 0 0 600 00000000 0 0 0\neth1 00000000 0100000A 3 0 0 100 00000000 0 0 0\neth0 0000000A 0 1 0 0 0 00FFFFFF 0 0 0\n"  # fmt: skip
    assert default_interface(tree(tmp_path, {"proc/net/route": heading + lines})) == "eth1"
    assert default_interface(tmp_path / "nothing") == ""


@linux
def test_a_port_that_is_taken_and_by_whom():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = try_port(port)
        assert found.error == "it is taken"
        assert f"process {os.getpid()} (" in found.holder
    assert try_port(port).error == ""
    assert "can't be taken" in try_port(70000).error


def test_names_that_resolve_and_one_that_does_not():
    assert set(resolve("localhost").addresses) <= {"127.0.0.1", "::1"}
    assert resolve("no-such-host.invalid").error
    assert resolve("x" * 300).error
    network = look_at_network(["127.0.0.1"], [], {"MASTER_ADDR": "no-such-host.invalid"})
    assert network.names["no-such-host.invalid"].error
    assert network.routes == {"127.0.0.1": "127.0.0.1"}


def test_a_folder_is_left_as_it_was(tmp_path):
    facts = look_at_folder(str(tmp_path / "not" / "yet"), is_timed=True)
    assert facts.path == str(tmp_path)
    assert facts.error == ""
    assert facts.bytes_per_s is None or facts.bytes_per_s > 1e5
    assert list(tmp_path.iterdir()) == []
    assert look_at_folder(str(tmp_path), is_timed=False, marker="b" * 32).error == ""
    assert [path.name for path in tmp_path.iterdir()] == [".paceline-doctor-" + "b" * 32]
    with pytest.raises(ValueError, match="32"):
        marker_path(str(tmp_path), "../" + "b" * 29)


@linux
def test_what_dead_jobs_left(tmp_path, monkeypatch):
    """A folder that was made before every living Paceline process is nobody's any more."""
    for name in ("paceline-abcd1234", "paceline-verify-abcd1234", "paceline-of-mine", "other-abcd1234"):
        tree(tmp_path, {f"tmp/{name}/rendezvous": "12345"})
    tree(
        tmp_path, {"dev/shm/torch_77_1_0": "abc", "dev/shm/torch_88_1_0": "abc", "proc/88/cmdline": "python\0train.py"}
    )
    names = [Path(one.path).name for one in look_for_leftovers(tmp_path, tmp_path / "tmp")]
    assert names == ["paceline-abcd1234", "paceline-verify-abcd1234", "torch_77_1_0"]
    stat = "88 (python x) S " + "1 " * 18 + "{} 0 0"
    for started_s, count in ((time.monotonic() - 3600, 1), (time.monotonic() + 3600, 3)):
        ticks = int(started_s * os.sysconf("SC_CLK_TCK"))
        boot_s = time.time_ns() // 10**9 - int(time.monotonic())
        tree(tmp_path, {"proc/stat": f"cpu 1\nbtime {boot_s}\n", "proc/88/cmdline": "python\0paceline\0run", "proc/88/stat": stat.format(ticks)})  # fmt: skip
        assert len(look_for_leftovers(tmp_path, tmp_path / "tmp")) == count, "a process that was there may own it"


def test_secrets_stay_where_they_are():
    given = {"NCCL_DEBUG": "INFO", "HOME": "/root", "PACELINE_SECRET": "x", "AWS_TOKEN": "x", "PACELINE_JOB_KEY": "x"}
    assert chosen_environment(given) == {"NCCL_DEBUG": "INFO"}


@linux
def test_limits_of_a_process():
    code = "from paceline.doctor.probe.host_facts import *; print(look_at_limits(Path('/')).files)"
    done = subprocess.run(["sh", "-c", f'ulimit -n 256; {sys.executable} -c "{code}"'], capture_output=True, text=True)
    assert done.stdout.strip() == "256"
    assert look_at_limits(Path("/")) != HostFacts().limits
