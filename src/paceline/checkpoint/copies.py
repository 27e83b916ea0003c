"""Copies of checkpoints in an object store, or in any other file system that fsspec has. No torch: commands read them.

URL/JOB/
  plan.json  job.json          of the newest start
  checkpoints/step-00000020/
    rank-00000.safetensors
    manifest.json              put last, and removed first: without it there is no checkpoint

Object stores have no rename and no folders, so a copy is complete when its manifest is there. A copy is made of a
checkpoint on the disk and read back to the disk, where it is checked as any other before it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    NewerCheckpointError,
    check_files,
    folder_name,
    list_checkpoints,
    partial_of,
    put_in_place,
    read_manifest,
    step_name,
    step_of,
    sync_folder,
    write_durably,
)
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.reading import reason_of, regular

WEIGHTS = "model.safetensors"
_LOCK = ".reading-copies"
_RUN_FILES = ("plan.json", "job.json")
_MOST_BYTES = 2**30  # of a manifest or a run's file
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OF_THIS_MACHINE = {"file", "local"}
_HAS_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "arrow_hdfs", "webhdfs"}
SILENT_S = 20.0  # without an answer a store is given up; less than a job that is asked to stop has (GRACE_S)
_SLOWEST = 2**20  # bytes a second; what takes a store longer counts as no answer
_PART_BYTES = 2**29  # bytes between two signs of progress: ten parts of 50 MiB, which s3fs sends at the same time
# What has to be installed for a scheme, where that is not the scheme's own name for fsspec.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def is_url(path: object) -> bool:
    """True if a path names a file system of fsspec's, such as `s3://bucket/folder`."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


class SilentStoreError(CheckpointError):
    """A store does not answer."""


def check_url(url: str, call: str) -> None:
    """Raise UsageError for a URL that no copies can go to.

    Args:
        url: the URL as the user wrote it.
        call: the name of the flag or function, for the error.
    """
    asked = f"{call} takes the URL of a folder"
    if not is_url(url):
        raise UsageError(
            asked, f"it is {url!r:.80}", "write s3://BUCKET/FOLDER; a folder of this machine is file:///FOLDER"
        )
    authority = url.partition("://")[2].partition("/")[0]
    if "@" in authority:
        raise UsageError(
            asked,
            "this one has a user or a password in it, which would stand in logs and in plan.json",
            "leave it out, and give credentials as the store's library takes them, such as AWS_PROFILE",
        )
    if "::" in url or "?" in url or "#" in url:
        raise UsageError(asked, f"it is {url!r:.80}", "write SCHEME://PLACE/FOLDER alone")
    scheme = url.partition("://")[0].lower()
    if scheme == "memory":
        raise UsageError(
            asked,
            f"{url!r:.80} is this process's own memory, which ends with it",
            "write a URL of a store, such as s3://BUCKET/FOLDER or file:///FOLDER",
        )
    if scheme in _OF_THIS_MACHINE and not url.partition("://")[2].startswith("/"):
        raise UsageError(
            asked,
            f"{url!r:.80} is relative to a process's current folder",
            f"write {scheme}:///FOLDER, from the root",
        )


def folder_of(url: str) -> Path | None:
    """Return the folder of this machine that a URL names; None where it names a store."""
    scheme, _, place = url.partition("://")
    return Path(place).resolve() if scheme.lower() in _OF_THIS_MACHINE else None


class CopyFolder:
    """A folder of an object store.

    Args:
        url: the URL of the folder, which `check_url` has accepted.

    Raises:
        CheckpointError: there is no such file system, or its library is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._failing("can't reach"):
            import fsspec  # here, since few commands need it

            # Listings are not cached: other processes write, too.
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            fsspec.get_filesystem_class(self.url.partition("://")[0])  # imports the library, which may take its time
            files, self.path = _answer_of(fsspec.core.url_to_fs, self.url, **options)
            self.files: Any = _Answering(files)

    def __truediv__(self, name: str) -> CopyFolder:
        """Return a folder inside."""
        inside = object.__new__(CopyFolder)
        inside.url = f"{self.url}/{name}"
        inside.path = f"{self.path.rstrip('/')}/{name}"
        inside.files = self.files
        return inside

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in this folder, the newest first."""
        with self._failing("can't list"):
            try:
                entries = self.files.ls(self.path, detail=False)
            except FileNotFoundError:
                return []
            names = [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
            steps = [step for name in names if (step := step_of(name)) is not None]
            complete = [step for step in steps if self.files.exists(f"{self.path}/{folder_name(step)}/{MANIFEST}")]
        return sorted(complete, reverse=True)

    def has(self, name: str) -> bool:
        """True if a file or a folder of this name is inside."""
        with self._failing("can't look into"):
            return bool(self.files.exists(f"{self.path}/{name}"))

    def is_file(self) -> bool:
        """True if this is a file."""
        with self._failing("can't look at"):
            return bool(self.files.isfile(self.path))

    def is_empty(self) -> bool:
        """True if nothing is there."""
        with self._failing("can't look at"):
            return not self.files.exists(self.path) or not self.files.ls(self.path, detail=False)

    def put_checkpoint(self, folder: Path) -> None:
        """Copy the checkpoint `folder` of the disk to this folder, unless it is there already.

        Raises:
            CheckpointError: it can't be written, or what has arrived is shorter than what was sent.
        """
        with open(folder / MANIFEST, "rb", opener=regular) as file:
            content = file.read()
        with self._failing("can't write"):
            if self._content(MANIFEST) == content:
                return
        self.remove()
        for entry in json.loads(content)["files"]:
            self._put_file(folder / entry["name"], entry["bytes"])
        self.put_bytes(MANIFEST, content)

    def put_run_files(self, run_dir: Path) -> None:
        """Copy what a run needs beside its checkpoints to go on elsewhere."""
        for name in _RUN_FILES:
            if (run_dir / name).is_file():
                with open(run_dir / name, "rb", opener=regular) as file:
                    self.put_bytes(name, file.read())

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""
        with self._failing("can't write"):
            self._make_folder()
            self.files.pipe_file(f"{self.path}/{name}", content)

    def _put_file(self, file: Path, size: int) -> None:
        target = f"{self.path}/{file.name}"
        with self._failing("can't write"):
            self._make_folder()
            self.files.put_file(str(file), target, size=size)
            arrived = self.files.info(target)["size"]
        if arrived != size:
            raise self._error("can't write", f"of {file.name} {arrived} of {size} bytes have arrived")

    def remove(self) -> None:
        """Remove everything in this folder, the manifest first: from then on it is no checkpoint."""
        with self._failing("can't remove"):
            for target in (f"{self.path}/{MANIFEST}", self.path):
                if self.files.exists(target):
                    self.files.rm(target, recursive=True)

    def remove_others(self, newest: int, keep: int) -> None:
        """Remove the checkpoints in this folder of steps after `newest`, which are stale, and all but `keep` others."""
        steps = self.steps()
        staying = [step for step in steps if step <= newest][:keep]
        for step in steps:
            if step not in staying:
                (self / folder_name(step)).remove()

    def fetch_checkpoint(self, folder: Path) -> None:
        """Read the checkpoint in this folder to `folder` of the disk, and check it there.

        Raises:
            NewerCheckpointError: a later Paceline wrote it.
            CheckpointError: it can't be read, or is not whole.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: processes of several nodes may read the same copy to a disk that they share.
        partial = Path(tempfile.mkdtemp(prefix=f"{partial_of(folder).name}-", dir=folder.parent))
        try:
            self._fetch_file(MANIFEST, partial)
            manifest = read_manifest(partial)
            for entry in manifest["files"]:
                self._fetch_file(entry["name"], partial, entry["bytes"])
            check_files(partial, manifest)
            sync_folder(partial)
            put_in_place(partial, folder)
        except SilentStoreError:
            raise
        except CheckpointError as error:
            text = error.found.replace(str(partial), self.url)
            kind = NewerCheckpointError if isinstance(error, NewerCheckpointError) else CheckpointError
            raise kind(f"the checkpoint {self.url} should be whole", text, error.fix) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def fetch_weights(self, folder: Path) -> Path:
        """Read a file of safetensors, this one or the one in this folder, to `folder`; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / WEIGHTS
        source = self.path if self.is_file() else f"{self.path}/{WEIGHTS}"
        with self._failing("can't read"):
            self.files.get_file(source, str(target), size=self.files.info(source)["size"])
        return target

    def fetch_run_files(self, run_dir: Path) -> None:
        """Read what a run needs beside its checkpoints, where `run_dir` lacks it."""
        for name in _RUN_FILES:
            if not (run_dir / name).exists():
                with self._failing("can't read"):
                    content = self._content(name)
                if content is not None:
                    write_durably(run_dir / name, content)

    def _make_folder(self) -> None:
        # An object store has no folders; to make one there could make a bucket.
        if _HAS_FOLDERS.intersection(
            [self.files.protocol] if isinstance(self.files.protocol, str) else self.files.protocol
        ):
            self.files.makedirs(self.path, exist_ok=True)

    def _content(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        try:
            if self.files.info(f"{self.path}/{name}")["size"] > _MOST_BYTES:
                raise self._error("can't read", f"{name} has more than {_MOST_BYTES} bytes")
            return bytes(self.files.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def _fetch_file(self, name: str, folder: Path, size: int | None = None) -> None:
        source = f"{self.path}/{name}"
        with self._failing("can't read"):
            nbytes = self.files.info(source)["size"]
            # Before it is read: a torn or a foreign file need not fill the disk.
            if size is not None and nbytes != size:
                raise self._error("can't read", f"{name} has {nbytes} bytes, not the {size} written")
            if size is None and nbytes > _MOST_BYTES:
                raise self._error("can't read", f"{name} has more than {_MOST_BYTES} bytes")
            self.files.get_file(source, str(folder / name), size=nbytes)

    @contextmanager
    def _failing(self, asked: str) -> Iterator[None]:
        """Turn what the store's library raises into a CheckpointError: libraries have errors of their own."""
        try:
            yield
        except (CheckpointError, UsageError):
            raise
        except _SilentError as error:
            fix = "see that the store can be reached and answers"
            raise SilentStoreError(f"{asked} {self.url}", str(error), fix) from None
        except FileNotFoundError as error:
            raise self._error(asked, f"there is no {Path(str(error)).name or 'such file'}") from None
        except NotImplementedError:
            found = f"fsspec has no such function for {self.url.partition('://')[0]}://"
            raise self._error(asked, found, "write a URL of a store, such as s3://BUCKET/FOLDER") from None
        except (ImportError, ValueError) as error:  # of fsspec, for a scheme
            scheme = self.url.partition("://")[0]
            package = _PACKAGES.get(scheme)
            if package is None or not isinstance(error, ImportError):
                raise self._error(asked, reason_of(error), "write a URL that fsspec has, such as s3://BUCKET") from None
            raise self._error(asked, f"{package} is not installed", f"pip install {package}") from None
        except Exception as error:
            raise self._error(asked, reason_of(error)) from None

    def _error(self, asked: str, found: str, fix: str = "") -> CheckpointError:
        fix = fix or "see that the store can be reached, and that this user may list, read, write and remove there"
        return CheckpointError(f"{asked} {self.url}", found, fix)


class _SilentError(Exception):
    """A call has not come back."""


class _Answering:
    """A file system of fsspec's whose calls end: with an answer, or without one after SILENT_S.

    Libraries wait for a silent server for minutes, or for good.

    Args:
        files: the file system of fsspec.
    """

    def __init__(self, files: Any) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.files, name)
        return partial(_answer_of, found) if callable(found) else found

    def put_file(self, source: str, target: str, size: int) -> None:
        """Send a file of `size` bytes, for as long as parts of it arrive."""
        _answer_of(partial(self._moving("put_file"), source, target), size=size)

    def get_file(self, source: str, target: str, size: int) -> None:
        """Read a file of `size` bytes, for as long as parts of it arrive."""
        _answer_of(partial(self._moving("get_file"), source, target), size=size)

    def _moving(self, name: str) -> Callable[..., Any]:
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        if isinstance(self.files, LocalFileSystem):  # its own moves a file in one call, and tells nothing meanwhile
            return partial(getattr(AbstractFileSystem, name), self.files)
        move: Callable[..., Any] = getattr(self.files, name)
        return move


def _answer_of(call: Callable[..., Any], *arguments: Any, size: int | None = None, **options: Any) -> Any:
    """Return the result of a call, or raise its error. It runs in a thread: nothing else could end its wait.

    Args:
        call: the function of the store's library.
        arguments: the positional arguments of the call.
        size: the bytes that it moves, whose progress it then reports; None: it moves none.
        options: the keyword arguments of the call.

    Raises:
        _SilentError: there was no answer for SILENT_S, and for as long as a slow store takes for a part of the bytes.
    """
    seconds = SILENT_S
    moved_s = [time.monotonic()]
    if size is not None:
        from fsspec.callbacks import Callback

        seconds += min(size, _PART_BYTES) / _SLOWEST
        options["callback"] = Callback(hooks={"moved": lambda *_, **__: moved_s.__setitem__(0, time.monotonic())})
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call(*arguments, **options))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="object store", daemon=True)
    thread.start()
    while thread.is_alive():
        left_s = moved_s[0] + seconds - time.monotonic()
        if left_s <= 0:
            raise _SilentError(f"the store has not answered for {seconds:.0f} s")
        thread.join(left_s)
    if errors:
        raise errors[0]
    return answers[0]


def find_copy(url: str, report: Callable[[str], None], folder: Path) -> Path:
    """Read the checkpoint at `url`, or the newest whole one there, to the disk.

    Args:
        url: the URL of a checkpoint, of a folder of checkpoints, or of a run's copies.
        report: a function that is told, in a sentence, of every copy that is skipped.
        folder: the folder into which the copy is read.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: there is none that is whole, or the store can't be reached.
    """
    copies = CopyFolder(url)
    if copies.has(MANIFEST):
        # A name of a step's: other names are no checkpoint for the reader of a folder.
        target = folder / (copies.name if step_of(copies.name) is not None else folder_name(0))
        copies.fetch_checkpoint(target)
        return target
    inside = copies / CHECKPOINTS
    steps = copies.steps()
    if not steps:
        copies, steps = inside, inside.steps()
    return _fetch_newest(copies, steps, report, folder)


def _fetch_newest(copies: CopyFolder, steps: Sequence[int], report: Callable[[str], None], folder: Path) -> Path:
    for step in steps:
        target = folder / folder_name(step)
        try:
            (copies / target.name).fetch_checkpoint(target)
        except (NewerCheckpointError, SilentStoreError):
            raise
        except CheckpointError as error:
            report(f"{copies.url}/{target.name} is passed over: {error.found}")
        else:
            return target
    found = f"none of the {len(steps)} there is whole" if steps else "there is none"
    raise CheckpointError(f"a checkpoint in {copies.url}", found, "name another run or checkpoint")


def fetch_run(url: str, run_dir: Path, report: Callable[[str], None]) -> Path | None:
    """Read the newest whole checkpoint of a run's copies to its run directory, if it is newer than those there.

    Several processes may do so at the same time; where the file system has locks, one reads for all.

    Args:
        url: the URL of the run's copies.
        run_dir: the run directory, which is made where it is missing.
        report: a function that is told of copies that are skipped.

    Returns:
        The folder of the checkpoint; None if there is none that is newer.

    Raises:
        CheckpointError: the store can't be reached, or all newer copies are damaged and there is no checkpoint.
    """
    copies = CopyFolder(url)
    steps = (copies / CHECKPOINTS).steps()
    checkpoints = run_dir / CHECKPOINTS
    if not steps or steps[0] <= _newest_step(checkpoints):
        return None
    checkpoints.mkdir(parents=True, exist_ok=True)
    with _locked(run_dir / _LOCK):
        newest = _newest_step(checkpoints)  # another process may have read it meanwhile
        newer = [step for step in steps if step > newest]
        if not newer:
            return None
        try:
            fetched = _fetch_newest(copies / CHECKPOINTS, newer, report, checkpoints)
        except (NewerCheckpointError, SilentStoreError):
            raise
        except CheckpointError:
            if newest < 0:
                raise
            return None
        copies.fetch_run_files(run_dir)
    report(f"{fetched.name} was read from {copies.url}")
    return fetched


def _newest_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint on the disk; -1 if there is none."""
    return max((step_of(step_name(path)) or 0 for path in list_checkpoints(checkpoints)), default=-1)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time has; go on without it where the file system has none."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    with contextlib.suppress(OSError):
        path.unlink()


def check_place(url: str, job: str | None) -> None:
    """Raise CheckpointError unless files can be written at `url`; UsageError where it has checkpoints of the job.

    Args:
        url: the URL of the folder of all runs' copies.
        job: the name of a run that begins anew; None if no run has its name.
    """
    copies = CopyFolder(url)
    if job is not None and (copies / job / CHECKPOINTS).steps():
        raise UsageError(
            f"can't make a new job {job!r} that copies its checkpoints to {url}",
            "checkpoints of such a job are there",
            f"write --resume to go on with it, or another --job than {job}",
        )
    probe = f".probe-{os.urandom(8).hex()}"
    copies.put_bytes(probe, b"paceline")
    (copies / probe).remove()
