"""The container image of a release: check the Containerfile, and build and try the image where there is an engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from paceline.nouns.errors import UsageError

ENGINES = ("docker", "podman")
_INSTRUCTIONS = frozenset(("FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "LABEL"))
_FIX = "mend the Containerfile"


def make_context(folder: Path, containerfile: Path, constraints: Path, wheel: Path) -> Path:
    """Copy what the image is built from into a folder, and check the Containerfile there.

    Args:
        folder: is made, and gets the files.
        containerfile: the description of the image.
        constraints: the versions of dependencies.
        wheel: the release's wheel.

    Raises:
        UsageError: the Containerfile has an error that can be found without an engine.
    """
    folder.mkdir(parents=True)
    for path in (containerfile, constraints, wheel):
        shutil.copy(path, folder)
    check_containerfile((folder / containerfile.name).read_text(), folder)
    return folder


def check_containerfile(text: str, context: Path) -> None:
    """Raise UsageError unless the instructions are well formed, and copy files that the context has."""
    asked = "the image should be built from the Containerfile"
    found = []
    for line in _lines(text):
        name, _, rest = line.partition(" ")
        if name not in _INSTRUCTIONS or not rest.strip():
            raise UsageError(asked, f"this is no instruction: {line!r}", _FIX)
        if name in ("ENTRYPOINT", "CMD") and not _is_list_of_words(rest):
            raise UsageError(asked, f"{name} is no JSON list of words: {rest}", _FIX)
        if name == "RUN":
            _check_shell(rest, asked)
        if name == "COPY":
            _check_sources(rest.split()[:-1], context, asked)
        found.append(name)
    if found[:1] != ["FROM"] or "ENTRYPOINT" not in found:
        raise UsageError(asked, "it does not begin with FROM, or has no ENTRYPOINT", _FIX)
    if "USER" not in found:
        raise UsageError(asked, "it has no USER, so its processes would be root", _FIX)


def _lines(text: str) -> list[str]:
    """Return the instructions, each on one line, without comments."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(kept))
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _is_list_of_words(text: str) -> bool:
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def _check_shell(command: str, asked: str) -> None:
    done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(asked, f"the shell can't read a RUN: {done.stderr.strip()}", _FIX)


def _check_sources(patterns: list[str], context: Path, asked: str) -> None:
    for pattern in patterns:
        if not list(context.glob(pattern)):
            raise UsageError(asked, f"COPY names {pattern}, which is not there", _FIX)


def find_engine() -> str | None:
    """Return the first container engine that answers; None if there is none."""
    for engine in ENGINES:
        if shutil.which(engine) is None:
            continue
        if subprocess.run([engine, "info"], capture_output=True).returncode == 0:
            return engine
    return None


def build_image(engine: str, context: Path, version: str) -> str:
    """Build the image, and run `paceline --version` and `paceline demo` in it; return its tag.

    Args:
        engine: a name of ENGINES that `find_engine` returned.
        context: the folder of `make_context`.
        version: of the release.

    Raises:
        UsageError: the image can't be built, or a command fails in it.
    """
    tag = f"paceline:{version}"
    _run([engine, "build", "--tag", tag, "--file", str(context / "Containerfile"), str(context)])
    printed = _run([engine, "run", "--rm", tag, "--version"])
    if printed.strip() != f"paceline {version}":
        raise UsageError(f"the image should have Paceline {version}", f"it has {printed.strip()}", _FIX)
    _run([engine, "run", "--rm", tag, "demo"])
    return tag


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        end = (done.stdout + done.stderr).strip()[-2000:]
        found = f"this ends with {done.returncode}: {' '.join(words)}\n{end}"
        raise UsageError("the image should be built, and run its demo", found, _FIX)
    return done.stdout
