"""Make a folder for a job that only this user can enter, for the rendezvous, sockets and credentials.

It is removed at the job's end, or by the fork server when the supervisor was killed. When both were killed at once, the
next job removes it: every process of a job holds a lock in its folder, and a lock that nobody holds says that the job
is over. On a file system without such locks the folder has none, and no job removes it but its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "paceline-"
_LOCK = "lock"
_UNFINISHED = f".{PREFIX}"  # the prefix of a folder whose lock is not taken yet


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A job's folder that only its user can enter.

    Attributes:
        path: the path of the folder.
        lock: the descriptor of its lock, which a process that inherits it holds too; -1: there is no lock.
    """

    path: Path
    lock: int

    def remove(self) -> None:
        """Remove the folder; the job is over."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)


def make_private(parent: str | None = None) -> PrivateFolder:
    """Make a folder in `parent`, or where temporary files are kept, and remove those of jobs that were killed.

    Raises:
        OSError: it can't be made.
    """
    parent = parent or tempfile.gettempdir()
    sweep(Path(parent))
    # Under a hidden name until its lock is taken: another job's sweep would take an unlocked folder for a dead job's.
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    try:
        lock = _locked(folder / _LOCK)
        visible = folder.with_name(folder.name.removeprefix("."))
        return PrivateFolder(folder.rename(visible), lock)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _locked(path: Path) -> int:
    """Make a file and lock it. Return its descriptor, or -1 where the file system has no locks, and then no file."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # ENOLCK, ENOTSUP, EINVAL or ENOSYS, as NFS and FUSE have it
        os.close(lock)
        path.unlink()  # a folder with it could be taken for a killed job's
        return -1
    return lock


def sweep(parent: Path) -> None:
    """Remove this user's folders in `parent` whose jobs have no process left."""
    for folder in _folders_of_user(parent):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)  # a folder without one is not of this kind
            try:
                # A lock of flock(2) belongs to the open file: it is held as long as any process has the descriptor
                # that it inherited, and the kernel drops it with the last of them, however they end.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _folders_of_user(parent: Path) -> Iterator[Path]:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                yield folder
