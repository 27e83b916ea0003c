"""The files of a release: their checksums, the signature of these, and the check of both.

`SHA256SUMS` lists every other file, in the form of sha256sum(1). `SHA256SUMS.sig` is its signature by ssh-keygen(1).
Who may sign is in a file of allowed signers; `scripts/release-signers` in the repository, where a reviewed commit
changes it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from paceline.nouns.errors import PacelineError, UsageError

SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.sig"
NAMESPACE = "paceline-release"  # a signature made for another purpose does not count
SIGNERS = Path(__file__).with_name("release-signers")
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.+-]+)")
_AGAIN = "get the files of the release again; don't install these"


class ReleaseError(PacelineError):
    """The files are not those of the release."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Write the checksums of all files of the folder."""
    paths = sorted(path for path in folder.iterdir() if path.name not in (SUMS, SIGNATURE))
    (folder / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in paths))


def sign(folder: Path, key: Path) -> None:
    """Sign the checksums.

    Args:
        folder: of the release.
        key: an ssh key. The public one is enough where an agent has the private one; ssh-keygen asks for a passphrase.

    Raises:
        UsageError: it can't be signed with this key.
    """
    (folder / SIGNATURE).unlink(missing_ok=True)
    check_program()
    words = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(folder / SUMS)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True)
    if done.returncode or not (folder / SIGNATURE).is_file():
        found = done.stderr.strip() or f"ssh-keygen ended with {done.returncode}"
        raise UsageError(f"can't sign the release with {key}", found, "name your ssh key with --key")


def check_program() -> None:
    """Raise UsageError if there is no ssh-keygen."""
    if shutil.which("ssh-keygen") is None:
        raise UsageError("signatures need ssh-keygen", "it is not on the PATH", "install OpenSSH's client")


def verify(folder: Path, signers: Path) -> str:
    """Check the signature and every file of the folder; return who signed.

    Raises:
        UsageError: the folder or the file of signers is not there.
        ReleaseError: a file is missing, altered or not of the release, or the signature is not of an allowed signer.
    """
    if not (folder / SUMS).is_file():
        raise UsageError(f"{folder} should have the files of a release", f"it has no {SUMS}", "name its folder")
    check_program()
    identity = _signer(folder, signers)
    listed = _listed(folder)
    for path in sorted(folder.iterdir()):
        if path.name not in (SUMS, SIGNATURE, *listed):
            raise ReleaseError(f"{folder} should have the files of a release alone", f"{path.name} is none", _AGAIN)
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise ReleaseError(f"{folder} should have all files of the release", f"{name} is missing", _AGAIN)
        if sha256(path) != digest:
            raise ReleaseError(f"{path} should be as it was released", "it was altered: its SHA-256 is another", _AGAIN)
    return identity


def _listed(folder: Path) -> dict[str, str]:
    listed = {}
    for line in (folder / SUMS).read_text().splitlines():
        if (entry := _LINE.fullmatch(line)) is None:
            raise ReleaseError(f"{folder / SUMS} should have checksums alone", f"it has the line {line!r}", _AGAIN)
        listed[entry[2]] = entry[1]
    return listed


def _signer(folder: Path, signers: Path) -> str:
    """Return who signed the checksums, as the file of signers calls them."""
    if not signers.is_file():
        fix = "name the project's file of signers with --signers"
        raise UsageError(f"can't read who may sign a release in {signers}", "there is no such file", fix)
    asked = f"the signature of {folder / SUMS} should be of a signer in {signers}"
    if not (folder / SIGNATURE).is_file():
        raise ReleaseError(asked, f"{SIGNATURE} is missing", _AGAIN)
    found = _keygen("find-principals", "-s", folder / SIGNATURE, "-f", signers)
    identity = found.stdout.partition("\n")[0].strip()
    if found.returncode or not identity:
        raise ReleaseError(asked, "it is of another key, or no signature", _AGAIN)
    words = ("-f", signers, "-I", identity, "-n", NAMESPACE, "-s", folder / SIGNATURE)
    checked = _keygen("verify", *words, content=(folder / SUMS).read_bytes())
    if checked.returncode:
        raise ReleaseError(asked, f"{SUMS} was altered, or signed for another purpose", _AGAIN)
    return identity


def _keygen(action: str, *words: str | Path, content: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ssh-keygen", "-Y", action, *map(str, words)], input=content, capture_output=True)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def main() -> int:
    """Check the files of a folder."""
    parser = argparse.ArgumentParser(description="Check the signature and the checksums of a release's files.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the files of a release, and nothing else")
    parser.add_argument("--signers", type=Path, default=SIGNERS, metavar="FILE", help="who may sign")
    arguments = parser.parse_args()
    try:
        identity = verify(arguments.folder, arguments.signers)
    except PacelineError as error:
        print(f"verify-release: error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"verify-release: all files are as {identity} signed them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
