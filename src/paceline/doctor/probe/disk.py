"""What folders can take, how fast, and what earlier jobs left on this host."""

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
_PART_BYTES = 4 * 2**20
_TEST_S = 4.0  # a slow disk is known by then
_ROOM = 4  # the speed is measured only where the file fits this many times
_READ_ONLY = 1  # ST_RDONLY
_OURS = re.compile(r"paceline-(bench-|verify-|profile-)?[a-z0-9_]{8}")  # as tempfile completes a name
_CLOCK_TICKS = 100  # of /proc/PID/stat, per second, on every Linux that Python runs on (sysconf says so below)


def look_at_folder(asked: str, is_timed: bool, marker: str = "") -> Folder:
    """Whether a folder can be written, how much it takes, and how fast.

    Args:
        asked: the folder; the nearest one that exists is looked at.
        is_timed: whether to measure how fast 64 MiB are written to the medium itself.
        marker: the name of a file to leave there; "" is none.
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
    failed, speed = "", None
    try:
        speed = _write(path, _TEST_BYTES if is_timed and free > _ROOM * _TEST_BYTES else 1)
        if marker:
            _make_marker(path, marker)
    except OSError as failure:
        failed = failure.strerror or str(failure)
    return Folder(
        asked,
        str(path),
        file_system,
        free,
        status.f_files,
        status.f_favail,
        bool(status.f_flag & _READ_ONLY),
        failed,
        speed if is_timed else None,
    )


def _write(folder: Path, num_bytes: int) -> float | None:
    """Write a file of the doctor's own through to the medium and remove it: bytes a second, None for a few bytes."""
    path = folder / f".paceline-doctor-{secrets.token_hex(8)}"
    part = os.urandom(min(num_bytes, _PART_BYTES))  # some file systems compress, and zeros would cost nothing
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began_s, written = time.monotonic(), 0
        while written < num_bytes and time.monotonic() - began_s < _TEST_S:
            written += os.write(descriptor, part)
        os.fsync(descriptor)
        took_s = time.monotonic() - began_s
    finally:
        os.close(descriptor)
        path.unlink()
    return written / max(took_s, 1e-9) if num_bytes > 1 else None


def marker_path(folder: str, marker: str) -> Path:
    """Where a marker lies. Its name is checked: another host sent it.

    Raises:
        ValueError: it is not one of the doctor's markers.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", marker):
        raise ValueError("a marker is 32 hexadecimal digits")
    return Path(folder) / f".paceline-doctor-{marker}"


def _make_marker(folder: Path, marker: str) -> None:
    os.close(os.open(marker_path(str(folder), marker), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def mount_of(path: str, root: Path = Path("/")) -> tuple[str, tuple[str, ...]]:
    """The file system that holds `path`, and the flags it is mounted with; empty where the system does not say."""
    best: tuple[int, str, tuple[str, ...]] = (-1, "", ())
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "", ()
    inside = "/" + os.path.relpath(path, root) if root != Path("/") else os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) < 6 or not kind:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])  # a space is \040 there
        holds = inside == point or inside.startswith(point.rstrip("/") + "/")
        if holds and len(point) >= best[0]:  # a later mount on the same point covers the earlier one
            best = (len(point), kind[0], tuple(words[5].split(",")))
    return best[1], best[2]


def look_for_leftovers(root: Path, temporary: Path) -> tuple[Leftover, ...]:
    """What jobs that are no more left: private folders of `paceline run`, and shared memory of torch's data loaders.

    A folder has no process's name on it. It is left over when no living Paceline process was there when it was made.
    """
    if not sys.platform.startswith("linux"):
        return ()
    oldest = _oldest_paceline_ns(root)
    found = []
    for path in sorted(temporary.glob("paceline-*")):
        with contextlib.suppress(OSError):
            status = path.stat()
            is_ours = _OURS.fullmatch(path.name) and path.is_dir()
            if is_ours and status.st_uid == os.getuid() and (oldest is None or status.st_ctime_ns < oldest):
                found.append(Leftover(str(path), sum(one.stat().st_size for one in path.rglob("*") if one.is_file())))
    for path in sorted((root / "dev/shm").glob("torch_*")):
        owner = re.match(r"torch_(\d+)_", path.name)
        with contextlib.suppress(OSError):
            if owner and not (root / "proc" / owner[1]).exists():
                found.append(Leftover(str(path), path.stat().st_size))
    return tuple(found)


def _oldest_paceline_ns(root: Path) -> int | None:
    """When the oldest living Paceline process was started (ns since 1970), this one left out; None: there is none."""
    starts = []
    boot_s = re.search(r"^btime (\d+)", _read(root / "proc/stat"), re.MULTILINE)
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else _CLOCK_TICKS
    for folder in (root / "proc").glob("[0-9]*"):
        if boot_s is None or folder.name in (str(os.getpid()), str(os.getppid())):
            continue
        if "paceline" not in _read(folder / "cmdline"):
            continue
        rest = _read(folder / "stat").rpartition(")")[2].split()  # the program's name may hold spaces
        since, started = parse_whole(boot_s[1]), parse_whole(rest[19], -LARGEST) if len(rest) > 19 else None
        if since is not None and started is not None:
            starts.append((since * ticks + started) * 10**9 // ticks)
    return min(starts, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
