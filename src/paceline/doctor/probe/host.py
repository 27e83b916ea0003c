"""Gathers what this host is, by small functions that never fail: what can't be seen keeps its default.

Nothing is changed on the host: the only files written are the doctor's own, and they are removed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import __version__
from paceline.doctor.facts import Cores, HostFacts, Limits, MemoryFacts, Shm
from paceline.doctor.probe.accelerators import look_at_accelerators
from paceline.doctor.probe.disk import look_at_folder, look_for_leftovers, mount_of
from paceline.doctor.probe.network import is_clock_synchronised, look_at_network
from paceline.launch.command import is_secret
from paceline.nouns.reading import parse_whole

# Variables that change how training runs. Nothing else of the environment is read or sent: it may hold secrets.
_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_NUM", "CUDA_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PACELINE_")
_NAMES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("LD_PRELOAD", "TMPDIR", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_NO_LIMIT = 2**60  # cgroup v1 writes its "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at, beyond the host itself.

    Args:
        names: of other hosts, to resolve.
        runs: the run directory.
        ports: to try to listen on.
        is_quick: whether to leave out what takes seconds (the disk's speed).
        marker: the name of a file to write to the run directory, for other hosts to find; "" is none.
    """

    names: tuple[str, ...] = ()
    runs: str = "runs"
    ports: tuple[int, ...] = ()
    is_quick: bool = False
    marker: str = ""


def look(question: Question, root: Path = Path("/")) -> HostFacts:
    """What this host is. Takes as long as importing torch once, and a second or two for the disk.

    Args:
        question: what to look at.
        root: in place of `/`, for `/proc`, `/sys` and `/dev`.
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
        boot=_text(root / "proc/sys/kernel/random/boot_id"),
        environment=environment,
        missing_preloads=missing_preloads(environment.get("LD_PRELOAD", "")),
        leftovers=look_for_leftovers(root, Path(tempfile.gettempdir())),
    )


def chosen_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables that matter to training, without those whose names speak of secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name)
    }


def look_at_cores(root: Path) -> Cores:
    """Cores, and the limits on them."""
    online = os.cpu_count() or 0
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    load = None
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0]
    return Cores(online, affinity, _cgroup_cores(root), load)


def _cgroup_cores(root: Path) -> float | None:
    limits = []
    for folder in cgroup_folders(root, "cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: "200000 100000" or "max 100000"
        pairs = [words, [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]]  # 1: -1 is no limit
        for pair in pairs:
            numbers = [parse_whole(word, 1) for word in pair]
            if len(numbers) == 2 and numbers[0] and numbers[1]:
                limits.append(numbers[0] / numbers[1])
    return min(limits, default=None)


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's control group and those around it, of versions 1 and 2: a limit of any of them holds."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.count(":") < 2:
            continue
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
        else:
            continue
        group = top / path.lstrip("/")
        found += [group, *(parent for parent in group.parents if parent == top or top in parent.parents)]
    return found


def look_at_memory(root: Path) -> MemoryFacts:
    """Main memory, swap, and the control group's limit."""
    lines = [line.split() for line in _text(root / "proc/meminfo").splitlines()]
    table = {}
    for words in lines:
        kibibytes = parse_whole(words[1]) if len(words) > 1 else None
        if kibibytes is not None:
            table[words[0].rstrip(":")] = kibibytes * 1024
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    limit, used = _cgroup_memory(root)
    swap = table.get("SwapTotal", 0)
    return MemoryFacts(
        table.get("MemTotal"),
        table.get("MemAvailable"),
        limit,
        used,
        swap,
        swap - table.get("SwapFree", 0),
        pages.partition("[")[2].partition("]")[0],
    )


def _cgroup_memory(root: Path) -> tuple[int | None, int]:
    """The tightest limit, and what is used of it; what the kernel can drop (files that were read) is not counted."""
    tightest: tuple[int | None, int] = (None, 0)
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = parse_whole(_text(folder / limit_name)), parse_whole(_text(folder / used_name))
            if limit is None or limit > _NO_LIMIT:
                continue
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
            dropped = parse_whole(stat.get("inactive_file", stat.get("total_inactive_file", ""))) or 0
            if tightest[0] is None or limit < tightest[0]:
                tightest = limit, max(0, (used or 0) - dropped)
    return tightest


def look_at_shm(root: Path) -> Shm:
    """`/dev/shm`: torch's data loaders and NCCL keep their shared memory there."""
    if not sys.platform.startswith("linux"):
        return Shm()
    path = root / "dev/shm"
    try:
        status, mode = os.statvfs(path), path.stat().st_mode & 0o7777
    except OSError:
        return Shm(exists=False)
    _, flags = mount_of(str(path), root)
    size = status.f_blocks * status.f_frsize
    return Shm(True, size, status.f_bavail * status.f_frsize, os.access(path, os.W_OK | os.X_OK), mode, flags)


def look_at_limits(root: Path) -> Limits:
    """What `ulimit` says of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return Limits()

    def limit(name: str, part: int = 0) -> int | None:
        kind = getattr(resource, name, None)
        if kind is None:
            return -1
        value = resource.getrlimit(kind)[part]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        limit("RLIMIT_NOFILE"),
        limit("RLIMIT_NOFILE", 1),
        limit("RLIMIT_NPROC"),
        limit("RLIMIT_MEMLOCK"),
        limit("RLIMIT_CORE"),
        _text(root / "proc/sys/kernel/core_pattern"),
    )


def missing_preloads(preload: str) -> tuple[str, ...]:
    """The files of LD_PRELOAD that are not there; names without a folder are the loader's to find."""
    return tuple(word for word in preload.replace(":", " ").split() if "/" in word and not Path(word).exists())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: the name has a null byte
        return ""
