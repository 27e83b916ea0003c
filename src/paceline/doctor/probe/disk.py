"""Look at the folders that a job writes to, and for files that earlier jobs left on this host."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from pathlib import Path

from paceline.doctor.facts import Folder, Leftover
from paceline.nouns.reading import LARGEST, parse_whole

_TEST_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_TEST_S = 4.0  # a slow disk is known by then
_ROOM = 4  # the speed is measured only where the file fits this many times
_READ_ONLY = 1  # ST_RDONLY
_TEMPORARY_NAME = re.compile(r"paceline-(verify-|profile-)?[a-z0-9_]{8}")  # as tempfile completes a name
_CLOCK_TICKS = 100  # of /proc/PID/stat, per second, on every Linux that Python runs on (sysconf says so below)


def look_at_folder(asked: str, is_timed: bool, marker: str = "") -> Folder:
    """Look whether a folder can be written, and measure its free room and its speed.

    Args:
        asked: the path of the folder; the nearest one that exists is looked at.
        is_timed: True to measure the speed at which 64 MiB are written to the medium itself.
        marker: the name of a file to leave there; "": no file.
    """
    path = Path(asked).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        status = os.statvfs(path)
    except (OSError, AttributeError) as error:
        return Folder(asked, str(path), error=str(error))
    free = status.f_bavail * status.f_frsize
    file_system, _ = mount_of(str(path))
    failed = ""
    speed = None
    has_room = free > _ROOM * _TEST_BYTES
    num_bytes = _TEST_BYTES if is_timed and has_room else 1  # one byte shows that the folder can be written
    try:
        speed = _write(path, num_bytes)
        if marker:
            _make_marker(path, marker)
    except OSError as failure:
        failed = failure.strerror or str(failure)
    return Folder(
        asked=asked,
        path=str(path),
        file_system=file_system,
        free_bytes=free,
        files=status.f_files,
        free_files=status.f_favail,
        is_read_only=bool(status.f_flag & _READ_ONLY),
        error=failed,
        bytes_per_s=speed if is_timed else None,
    )


def _write(folder: Path, num_bytes: int) -> float | None:
    """Write a file through to the medium, remove it, and return bytes per second; None for a single byte."""
    path = folder / f".paceline-doctor-{secrets.token_hex(8)}"
    chunk = os.urandom(min(num_bytes, _CHUNK_BYTES))  # some file systems compress, and zeros would cost nothing
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began_s = time.monotonic()
        written = 0
        while written < num_bytes and time.monotonic() - began_s < _TEST_S:
            written += os.write(descriptor, chunk)
        os.fsync(descriptor)  # else the speed would be that of the page cache
        took_s = time.monotonic() - began_s
    finally:
        os.close(descriptor)
        path.unlink()
    if num_bytes == 1:
        return None
    return written / max(took_s, 1e-9)


def marker_path(folder: str, marker: str) -> Path:
    """Return the path of a marker. Its name is checked: another host sent it, and the file is removed later.

    Raises:
        ValueError: it is no marker of the doctor.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", marker):
        raise ValueError("a marker is 32 hexadecimal digits")
    return Path(folder) / f".paceline-doctor-{marker}"


def _make_marker(folder: Path, marker: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never a file of someone else's
    os.close(os.open(marker_path(str(folder), marker), flags, 0o600))


def mount_of(path: str, root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """Return the type of the file system that holds `path`, and its mount flags; empty where the system does not say.

    Source of the format: proc(5), /proc/PID/mountinfo.
    """
    longest = -1  # length of the deepest mount point that holds `path`
    file_system = ""
    flags: tuple[str, ...] = ()
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "", ()
    # Tests give a root of their own; under it no link is followed, for links lead to the real one.
    target = os.path.realpath(path) if root == Path("/") else "/" + os.path.relpath(path, root)
    for line in lines:
        # ID, parent, device, root, mount point, flags, optional fields; " - "; type, source, more.
        mount, _, source = line.partition(" - ")
        mount_fields = mount.split()
        source_fields = source.split()
        if len(mount_fields) < 6 or not source_fields:
            continue
        point = re.sub(r"\\([0-7]{3})", _decode_octal, mount_fields[4])
        is_holder = target == point or target.startswith(point.rstrip("/") + "/")
        if is_holder and len(point) >= longest:  # a later mount on the same point covers the earlier one
            longest = len(point)
            file_system = source_fields[0]
            flags = tuple(mount_fields[5].split(","))
    return file_system, flags


def _decode_octal(code: re.Match[str]) -> str:
    return chr(int(code[1], 8))  # a space in a mount point is written as \040


def look_for_leftovers(root: Path, temporary: Path) -> tuple[Leftover, ...]:
    """Return files that ended jobs left: private folders of `paceline run`, and shared memory of data loaders.

    A folder does not name its process. It is left over if it is older than every living Paceline process.
    """
    if not sys.platform.startswith("linux"):
        return ()
    oldest_ns = _oldest_paceline_ns(root)
    leftovers = []
    for path in sorted(temporary.glob("paceline-*")):
        with contextlib.suppress(OSError):  # it may be removed while it is looked at
            if _is_left_over(path, oldest_ns):
                num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                leftovers.append(Leftover(str(path), num_bytes))
    # torch names shared memory torch_PID_..., after the process that made it.
    for path in sorted((root / "dev/shm").glob("torch_*")):
        owner = re.match(r"torch_(\d+)_", path.name)
        with contextlib.suppress(OSError):
            if owner and not (root / "proc" / owner[1]).exists():
                leftovers.append(Leftover(str(path), path.stat().st_size))
    return tuple(leftovers)


def _is_left_over(path: Path, oldest_ns: int | None) -> bool:
    """Return True if a folder is this user's, was made by Paceline, and is older than `oldest_ns` (ns since 1970)."""
    status = path.stat()
    if not _TEMPORARY_NAME.fullmatch(path.name) or not path.is_dir():
        return False
    if status.st_uid != os.getuid():
        return False
    return oldest_ns is None or status.st_ctime_ns < oldest_ns


def _oldest_paceline_ns(root: Path) -> int | None:
    """Return the start of the oldest living Paceline process but this one (ns since 1970); None where there is none."""
    starts_ns = []
    boot_s = re.search(r"^btime (\d+)", _read(root / "proc/stat"), re.MULTILINE)
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else _CLOCK_TICKS
    for folder in (root / "proc").glob("[0-9]*"):
        # The parent may be a shell or ssh whose command line names this doctor.
        if boot_s is None or folder.name in (str(os.getpid()), str(os.getppid())):
            continue
        if "paceline" not in _read(folder / "cmdline"):
            continue
        # Fields after the program's name, which is in parentheses and may hold spaces. The 20th of them is the start in
        # clock ticks since boot: field 22 of proc(5), starttime.
        fields = _read(folder / "stat").rpartition(")")[2].split()
        if len(fields) < 20:  # the process has ended
            continue
        boot = parse_whole(boot_s[1])
        started = parse_whole(fields[19], -LARGEST)
        if boot is not None and started is not None:
            starts_ns.append((boot * ticks + started) * 10**9 // ticks)
    return min(starts_ns, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
