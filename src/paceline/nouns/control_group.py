"""Read the limits that a control group sets for this process: a container has no more than its own.

Source: cgroups(7), of versions 1 and 2.
"""

from __future__ import annotations

import resource
from pathlib import Path

from paceline.nouns.reading import parse_whole

_NO_LIMIT = 2**60  # cgroup v1 writes its "no limit" as a number near 2^63
# Files of the limit and of the used bytes, of cgroup versions 2 and 1.
_CGROUP_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process and others may still take, by the host or by the control group.

    The process's own limits count too (RLIMIT_AS, RLIMIT_DATA).
    """
    import psutil

    found = [int(psutil.virtual_memory().available)]
    limit, used = cgroup_memory(root)
    if limit is not None:
        found.append(limit - used)
    usage = psutil.Process().memory_info()
    for kind, used_bytes in ((resource.RLIMIT_AS, usage.vms), (resource.RLIMIT_DATA, usage.data)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - int(used_bytes))
    return max(0, min(found))


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and of those around it: a limit of any of them applies.

    Source: cgroups(7). A line of /proc/self/cgroup is "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1.
    """
    folders = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
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
        folders.append(group)
        folders += [parent for parent in group.parents if parent.is_relative_to(top)]
    return folders


def cgroup_memory(root: Path) -> tuple[int | None, int]:
    """Return the lowest limit, and the bytes used of it; bytes that the kernel can drop are not counted."""
    lowest: int | None = None
    used_of_lowest = 0
    for folder in cgroup_folders(root, "memory"):
        for limit_name, used_name in _CGROUP_MEMORY:
            limit = parse_whole(text_of(folder / limit_name))
            if limit is None or limit > _NO_LIMIT:
                continue
            if lowest is None or limit < lowest:
                lowest = limit
                used = parse_whole(text_of(folder / used_name)) or 0
                used_of_lowest = max(0, used - _droppable_bytes(folder))
    return lowest, used_of_lowest


def _droppable_bytes(folder: Path) -> int:
    """Return a control group's inactive page cache, which the kernel drops before it kills a process."""
    statistics = {}
    for line in text_of(folder / "memory.stat").splitlines():
        if line.count(" ") == 1:
            name, value = line.split()
            statistics[name] = value
    # total_* is of version 1, and counts the groups below in.
    text = statistics.get("inactive_file", statistics.get("total_inactive_file", ""))
    return parse_whole(text) or 0


def text_of(path: Path) -> str:
    """Return a small file's text; "" where it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: the name has a null byte
        return ""
