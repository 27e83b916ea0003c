"""The documentation of a release as one archive: built from the commit, with the same bytes each time."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from paceline.nouns.errors import UsageError


def build_site(tree: Path, archive: Path, commit_s: int, folder: Path) -> None:
    """Build the site, and pack it.

    Args:
        tree: the files of the commit.
        archive: a .tar.gz, which is written.
        commit_s: the time that all files in it get, s since 1970.
        folder: for the site's files; is made.

    Raises:
        UsageError: a page has an error, such as a broken link.
    """
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_s)}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        found = (done.stdout + done.stderr).strip()[-2000:]
        raise UsageError("the site should be built from docs/", found, "mend what scripts/docs reports")
    pack(folder, archive, commit_s)


def pack(folder: Path, archive: Path, commit_s: int) -> None:
    """Write the files of a folder to a .tar.gz whose bytes depend only on the files and the time.

    Args:
        folder: its files are packed by their paths in it.
        archive: is written.
        commit_s: the time of all files, s since 1970.
    """
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=commit_s) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            entry.mtime = commit_s
            with path.open("rb") as file:
                tar.addfile(entry, file)
