"""Checks of one host: each takes its facts and yields findings. Those of torch and the network have files of their own.

A check is a function of the facts and of whether there are other hosts; it yields rows of level, check, found and fix.
A check that finds nothing wrong yields "ok" with what it saw, so that the report also says what was looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.checks.network_checks import NETWORK_CHECKS
from paceline.doctor.checks.torch_stack import TORCH_CHECKS
from paceline.doctor.facts import Folder, HostFacts
from paceline.doctor.finding import GIB, MIB, Finding, Level, Row, count, size
from paceline.nouns.reading import parse_whole, shown

_DOCKER_SHM = 64 * MIB  # docker's default
# Open files. Each peer of a rank takes several descriptors, each tensor that a data loader hands over one.
_FILES_LOW = 512
_FILES_FEW = 4096
_PROCESSES_FEW = 4096  # threads count as processes
_LOCKED_LOW = GIB  # InfiniBand locks the buffers of every connection
_SWAP_USED = 256 * MIB
_SPEED_LOW = 50 * 10**6  # bytes/s; a checkpoint of 10 GiB takes more than 3 minutes

# Set by torchrun, and by `paceline run`, for the processes that they start.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "PACELINE_RANK", "PACELINE_WORLD_SIZE")


def check_host(facts: HostFacts, host: str, is_fleet: bool = False) -> list[Finding]:
    """Return all findings on one host.

    Args:
        facts: the facts of the host.
        host: the name of the host in the findings.
        is_fleet: True where a job would also run on other hosts.
    """
    findings = []
    for check in (*TORCH_CHECKS, *_CHECKS, *NETWORK_CHECKS):
        for level, name, text, fix in check(facts, is_fleet):
            findings.append(Finding(level, host, name, text, fix))
    return findings


def _cores(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    cores = host.cores
    if not cores.online:
        yield "not checked", "cores", "this system does not say how many there are", ""
        return
    usable = usable_cores(host)
    text = f"{count(cores.online, 'core')}, {usable:g} of them for this process"
    # OpenMP starts a thread for each core of the affinity; the kernel then stops them by the control group's quota.
    if cores.cgroup is not None and cores.cgroup < cores.affinity:
        yield (
            "warning",
            "cores",
            f"{text}: the control group stops it when {cores.cgroup:g} cores' time is used, so that ranks stall",
            f"give the container {cores.affinity} cores, or share {max(1, int(usable))} threads out among the ranks",
        )
    elif cores.affinity == 1 < cores.online:
        yield (
            "warning",
            "cores",
            f"{text}: every rank and data loader started from here shares that one",
            "raise the launcher's cores per task (Slurm: --cpus-per-task; Open MPI: --bind-to none)",
        )
    else:
        yield "ok", "cores", text, ""
    if cores.load is not None and cores.load > 1.5 * usable + 1:
        yield (
            "warning",
            "load",
            f"{cores.load:.1f} processes wanted {usable:g} cores in the last minute: ranks would wait for them",
            "end what else runs here (see `top`), or train on fewer ranks",
        )


def usable_cores(host: HostFacts) -> float:
    """Return the cores that a process gets by its affinity and its control group: the smaller number."""
    cores = host.cores
    affinity = float(cores.affinity or cores.online)
    if not cores.cgroup:  # None: no limit
        return affinity
    return min(affinity, cores.cgroup)


def _threads(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    text = host.environment.get("OMP_NUM_THREADS")
    if text is None:
        return
    # A number of threads for each level of nested parallel regions, the outermost first.
    numbers = [parse_whole(number.strip(), 1) for number in text.split(",")]
    if numbers[0] is None or None in numbers:
        yield (
            "warning",
            "OMP_NUM_THREADS",
            f"it is {shown(text)}, which OpenMP ignores: every rank takes all cores, and they get in each other's way",
            "unset it (`paceline run` shares the cores out), or write cores divided by ranks",
        )
    elif numbers[0] > usable_cores(host) >= 1:
        yield (
            "warning",
            "OMP_NUM_THREADS",
            f"it is {text}, but a process here has {usable_cores(host):g} cores: threads wait for each other",
            "unset it (`paceline run` shares the cores out), or write cores divided by ranks",
        )
    else:
        yield "ok", "OMP_NUM_THREADS", text, ""


def _memory(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    memory = host.memory
    if memory.total_bytes is None or memory.available_bytes is None:
        yield "not checked", "memory", "this system does not say how much there is", ""
        return
    text = f"{size(memory.available_bytes)} of {size(memory.total_bytes)} available"
    if memory.available_bytes < memory.total_bytes // 10:
        yield (
            "warning",
            "memory",
            f"{text}: when it is used up, the kernel kills a rank (exit code 137)",
            "end what else runs here; `paceline plan --explain-memory` says what a rank needs",
        )
    else:
        yield "ok", "memory", text, ""
    yield from _memory_limit(host)
    if memory.swap_used_bytes > _SWAP_USED:
        yield (
            "warning",
            "swap",
            f"{size(memory.swap_used_bytes)} of it are in use: one rank that waits for the disk holds all others up",
            "end what else runs here, then `swapoff -a`, or train on hosts without swap",
        )


def _memory_limit(host: HostFacts) -> Iterator[Row]:
    memory = host.memory
    limit = memory.limit_bytes
    if limit is None:
        return
    if memory.total_bytes is not None and limit >= memory.total_bytes:
        return  # the host's memory ends first
    remaining = limit - memory.used_of_limit_bytes
    text = f"{size(max(0, remaining))} left of the control group's {size(limit)}"
    if remaining < max(2 * GIB, limit // 10):
        fix = "raise the container's or the Slurm job's memory; `paceline plan --explain-memory` says what a rank needs"
        yield "warning", "memory limit", f"{text}: beyond it the kernel kills a rank (exit code 137)", fix
    else:
        yield "ok", "memory limit", text, ""


def _huge_pages(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    if host.memory.huge_pages == "never":
        yield (
            "warning",
            "huge pages",
            "transparent huge pages are off: large tensors on CPUs cost page faults at every step",
            "write madvise to /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif host.memory.huge_pages:
        yield "ok", "huge pages", host.memory.huge_pages, ""


def _shm(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    shm = host.shm
    check = "/dev/shm"
    bigger = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir of medium Memory on /dev/shm"
    if shm.exists is None:
        yield "not checked", check, "this system has none", ""
        return
    if not shm.exists:
        yield "error", check, "there is none: data loaders and NCCL keep their shared memory there", bigger
        return
    # 0o003: others may write and enter; 0o1000: the sticky bit, with which a user removes only files of their own.
    if not shm.is_writable or shm.mode & 0o003 != 0o003:
        problem = f"its mode is {shm.mode:04o}: ranks of other users can't write there, this user's may not either"
        yield "error", check, problem, "chmod 1777 /dev/shm"
    elif not shm.mode & 0o1000:
        problem = f"its mode is {shm.mode:04o}: any user can remove another's segments"
        yield "warning", check, problem, "chmod 1777 /dev/shm"
    if "noexec" in shm.flags:
        problem = "it is mounted noexec: libraries that keep compiled code there fail with `failed to map segment`"
        yield "warning", check, problem, "mount -o remount,exec /dev/shm"
    text = f"{size(shm.free_bytes)} of {size(shm.size_bytes)} free"
    if shm.size_bytes <= _DOCKER_SHM:
        yield "error", check, f"{text} (docker's default): data loaders die of `Bus error`, NCCL can't start", bigger
    elif shm.free_bytes < _DOCKER_SHM:
        fix = "remove what dead jobs left there (`ls -l /dev/shm`), or make it larger"
        yield "error", check, f"{text}: data loaders die of `Bus error`, NCCL can't start", fix
    elif shm.size_bytes < GIB:
        yield "warning", check, f"{text}: little for data loaders of large batches", bigger
    else:
        yield "ok", check, text, ""


def _limits(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    limits = host.limits
    # None is unlimited, -1 is not known.
    if limits.files == -1:
        yield "not checked", "open files", "this system has no such limit to read", ""
    elif limits.files is not None and limits.files < _FILES_FEW:
        hard = "" if limits.files_hard in (None, -1) else f" (up to {limits.files_hard} without root)"
        level: Level = "error" if limits.files <= _FILES_LOW else "warning"
        yield (
            level,
            "open files",
            f"a process may open {limits.files}: sockets and data loaders' tensors end in `Too many open files`",
            f"ulimit -n 65536{hard}; for good, in /etc/security/limits.conf or the service's LimitNOFILE",
        )
    else:
        yield "ok", "open files", str(limits.files or "unlimited"), ""
    if limits.processes is not None and 0 <= limits.processes < _PROCESSES_FEW:
        problem = (
            f"this user may have {limits.processes}: threads count, and a rank has dozens (`can't start new thread`)"
        )
        yield "warning", "processes", problem, "ulimit -u 65536, or the container's --pids-limit"
    locked = limits.locked_bytes
    if host.network.infiniband and locked is not None and 0 <= locked < _LOCKED_LOW:
        problem = f"{size(locked)} may be locked: InfiniBand can't register its buffers (`ibv_reg_mr failed`)"
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), also for sshd or slurmd"
        yield "error", "locked memory", problem, fix
    # A pattern that begins with | hands the memory to a program, such as systemd-coredump, which limits what is kept.
    if limits.core_bytes is None and limits.core_pattern and not limits.core_pattern.startswith("|"):
        problem = "a rank that crashes writes all of its memory to its folder, and the job's end waits for it"
        yield "warning", "core files", problem, "ulimit -c 0, unless you want to look into a crash"


def _runs(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    yield from _folder(host.runs, "run directory", 256 * MIB, 10 * GIB)
    speed = host.runs.bytes_per_s
    if speed is None:
        if not host.runs.error and host.runs.path:  # a folder that can't be written has its own row already
            yield "not checked", "disk speed", f"of {host.runs.path}: left out by --quick, or too little room", ""
    elif speed < _SPEED_LOW:
        problem = (
            f"{host.runs.path} takes {speed / 1e6:.0f} MB/s written through: a checkpoint of 10 GiB holds the job up"
        )
        yield "warning", "disk speed", f"{problem} for {10 * GIB / speed / 60:.0f} min", "name a faster one with --runs"
    else:
        yield "ok", "disk speed", f"{speed / 1e6:.0f} MB/s written through to {host.runs.path}", ""


def _temporary(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    yield from _folder(host.temporary, "temporary folder", 64 * MIB, GIB)


def _folder(folder: Folder, check: str, least: int, little: int) -> Iterator[Row]:
    """Yield one row on a folder.

    Args:
        folder: the facts of the folder.
        check: the name of the check in the report.
        least: the number of free bytes below which the finding is an error.
        little: the number of free bytes below which the finding is a warning.
    """
    location = f"{folder.path} ({folder.file_system})" if folder.file_system else folder.path
    fix = "name another with --runs" if check == "run directory" else "set TMPDIR to a folder that can be written"
    if folder.free_bytes is None:
        yield "not checked", check, folder.error or "not looked at", ""
    elif folder.files and not folder.free_files:
        problem = f"{location} can hold no more files (its inodes are used up)"
        yield "error", check, problem, "remove small files, or " + fix
    elif folder.is_read_only:
        yield "error", check, f"{location} is mounted read-only: no checkpoint can be written", fix
    elif folder.error:
        yield "error", check, f"{location} can't be written: {folder.error}", fix
    elif folder.free_bytes < least:
        problem = f"{location} has {size(folder.free_bytes)} free: a checkpoint would be torn"
        yield "error", check, problem, f"make room, or {fix}"
    elif folder.free_bytes < little:
        yield "warning", check, f"{location} has {size(folder.free_bytes)} free", f"make room, or {fix}"
    else:
        yield "ok", check, f"{location}, {size(folder.free_bytes)} free", ""


def _preload(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    text = host.environment.get("LD_PRELOAD", "")
    if host.missing_preloads:
        problem = (
            f"it names {', '.join(host.missing_preloads)}, which is not there: every process complains, none has it"
        )
        yield "error", "LD_PRELOAD", problem, "unset it, or name the library where it is"
    elif text:
        problem = f"every rank loads {text} before all else: it can replace the allocator, or NCCL"
        yield "warning", "LD_PRELOAD", problem, "unset it, unless that is what you want"


def _leftovers(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    leftovers = host.leftovers
    if leftovers:
        num_bytes = sum(leftover.num_bytes for leftover in leftovers)
        paths = ", ".join(leftover.path for leftover in leftovers[:3])
        if len(leftovers) > 3:
            paths += ", ..."
        problem = f"jobs that are no more left {count(len(leftovers), 'thing')} of {size(num_bytes)}: {paths}"
        yield "warning", "leftovers", problem, "remove them, after `ps` shows that no job of yours runs here"


def _rank_variables(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    names = [name for name in _RANK_VARIABLES if name in host.environment]
    if names:
        problem = (
            f"{', '.join(names)} of some launcher: a program started here takes itself for a rank and waits for others"
        )
        yield "warning", "rank variables", problem, f"unset {' '.join(names)}"


# In the order of the report, between those of torch and those of the network.
_CHECKS = (
    *(_cores, _threads, _memory, _huge_pages, _shm, _limits),
    *(_runs, _temporary, _preload, _leftovers, _rank_variables),
)
