"""Collect the facts of this host, by functions that never fail: a fact that can't be seen keeps its default.

Nothing is changed on the host: the only files written are the doctor's own, and they are removed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from paceline import __version__
from paceline.doctor.facts import Cores, HostFacts, Limits, MemoryFacts, Shm
from paceline.doctor.probe.accelerators import look_at_accelerators
from paceline.doctor.probe.disk import look_at_folder, look_for_leftovers, mount_of
from paceline.doctor.probe.network_facts import is_clock_synchronised, look_at_network
from paceline.launch.rank_command import is_secret
from paceline.nouns.control_group import cgroup_folders, cgroup_memory, text_of
from paceline.nouns.reading import parse_whole

# Variables that change how training runs. Nothing else of the environment is read or sent: it may hold secrets.
_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_NUM", "CUDA_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PACELINE_")
_NAMES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("LD_PRELOAD", "TMPDIR", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """The names, ports and folders to look at, beyond the host itself.

    Args:
        names: the names of other hosts, to resolve.
        runs: the path of the run directory.
        ports: the ports to try to listen on.
        is_quick: True to leave out the disk's speed, which takes seconds.
        marker: the name of a file to write to the run directory, for other hosts to find; "": no file.
    """

    names: tuple[str, ...] = ()
    runs: str = "runs"
    ports: tuple[int, ...] = ()
    is_quick: bool = False
    marker: str = ""


def look(question: Question, root: Path = Path("/")) -> HostFacts:
    """Return the facts of this host. Takes as long as importing torch once, and a second or two for the disk.

    Args:
        question: the names, ports and folders to look at.
        root: the folder in place of `/`, for `/proc`, `/sys` and `/dev`.
    """
    environment = chosen_environment(dict(os.environ))
    versions, accelerators = look_at_accelerators()
    versions = replace(
        versions,
        python=platform.python_version(),
        executable=sys.executable,
        paceline=__version__,
        architecture=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
    )
    return HostFacts(
        versions=versions,
        cores=look_at_cores(root),
        memory=look_at_memory(root),
        accelerators=accelerators,
        network=look_at_network(question.names, question.ports, environment, root),
        shm=look_at_shm(root),
        runs=look_at_folder(question.runs, is_timed=not question.is_quick, marker=question.marker),
        temporary=look_at_folder(tempfile.gettempdir(), is_timed=False),
        limits=look_at_limits(root),
        is_clock_synchronised=is_clock_synchronised(),
        boot=text_of(root / "proc/sys/kernel/random/boot_id"),
        environment=environment,
        missing_preloads=missing_preloads(environment.get("LD_PRELOAD", "")),
        leftovers=look_for_leftovers(root, Path(tempfile.gettempdir())),
    )


def chosen_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that matter to training, without those whose names speak of secrets."""
    chosen = {}
    for name, value in sorted(environment.items()):
        matters = name in _NAMES or name.startswith(_PREFIXES)
        if matters and not is_secret(name):
            chosen[name] = value
    return chosen


def look_at_cores(root: Path) -> Cores:
    """Return the number of cores, and the limits on them."""
    online = os.cpu_count() or 0
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    load = None
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0]  # the mean of the last minute
    return Cores(online, affinity, _cgroup_cores(root), load)


def _cgroup_cores(root: Path) -> float | None:
    """Return the lowest limit on this process's time, in cores: microseconds of a quota over those of its period."""
    limits = []
    for folder in cgroup_folders(root, "cpu"):
        version_2 = text_of(folder / "cpu.max").split()  # "200000 100000", or "max 100000" without a limit
        version_1 = [text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")]  # -1: no limit
        for texts in (version_2, version_1):
            numbers = [parse_whole(text, 1) for text in texts]  # None for what is no number of 1 or more
            if len(numbers) == 2 and numbers[0] and numbers[1]:
                limits.append(numbers[0] / numbers[1])
    return min(limits, default=None)


def look_at_memory(root: Path) -> MemoryFacts:
    """Return main memory, swap, and the control group's limit, in bytes."""
    total = available = None
    swap = swap_used = 0
    # Of /proc as a container shows it, psutil warns of what is missing, and raises errors of any class.
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        memory = psutil.virtual_memory()
        total, available = memory.total, memory.available
        swap, swap_used = psutil.swap_memory()[:2]  # total and used
    # Such as "always [madvise] never": the brackets show the setting.
    pages = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    limit, used = cgroup_memory(root)
    return MemoryFacts(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit,
        used_of_limit_bytes=used,
        swap_bytes=swap,
        swap_used_bytes=swap_used,
        huge_pages=pages.partition("[")[2].partition("]")[0],
    )


def look_at_shm(root: Path) -> Shm:
    """Look at `/dev/shm`, where torch's data loaders and NCCL keep their shared memory."""
    if not sys.platform.startswith("linux"):
        return Shm()
    path = root / "dev/shm"
    try:
        status = os.statvfs(path)
        mode = path.stat().st_mode & 0o7777
    except OSError:
        return Shm(exists=False)
    _, flags = mount_of(str(path), root)
    return Shm(
        exists=True,
        size_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        is_writable=os.access(path, os.W_OK | os.X_OK),
        mode=mode,
        flags=flags,
    )


def look_at_limits(root: Path) -> Limits:
    """Return the limits of this process, as `ulimit` shows them."""
    try:
        import resource
    except ImportError:  # Windows
        return Limits()

    def limit(name: str, index: int = 0) -> int | None:
        """Return the soft limit (index 0) or the hard one (1)."""
        kind = getattr(resource, name, None)
        if kind is None:
            return -1
        value = resource.getrlimit(kind)[index]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        files=limit("RLIMIT_NOFILE"),
        files_hard=limit("RLIMIT_NOFILE", 1),
        processes=limit("RLIMIT_NPROC"),
        locked_bytes=limit("RLIMIT_MEMLOCK"),
        core_bytes=limit("RLIMIT_CORE"),
        core_pattern=text_of(root / "proc/sys/kernel/core_pattern"),
    )


def missing_preloads(preload: str) -> tuple[str, ...]:
    """Return the files of LD_PRELOAD that don't exist; names without a folder are left to the loader's search."""
    names = preload.replace(":", " ").split()  # ld.so(8) takes both separators
    return tuple(name for name in names if "/" in name and not Path(name).exists())
