"""Make the files of a release, and its image: check, build twice, install, describe, sum up, sign, verify.

Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import release_files
import release_image
import release_sbom
import release_site
from packaging.version import InvalidVersion, Version

from paceline.nouns.errors import PacelineError, UsageError

ROOT = Path(__file__).parent.parent
_INIT = "src/paceline/__init__.py"
_TRIED = """
import paceline, pathlib, sys
place = pathlib.Path(paceline.__file__)
assert place.is_relative_to(sys.prefix), place
assert (place.parent / "py.typed").is_file()
print(paceline.__version__)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is to be released.

    Args:
        version: as `paceline --version` prints it.
        dry_run: only to try the steps.
        key: an ssh key to sign with; None: a dry run makes one and throws it away.
        signers: who may sign.
        share_packages: install beside the packages of this environment, not into an environment of its own.
        out: gets the files; new or empty.
    """

    version: str
    dry_run: bool
    key: Path | None
    signers: Path
    share_packages: bool
    out: Path


def check_request(release: Release) -> None:
    """Raise UsageError if this can't be a release, before anything is made."""
    try:
        normal = str(Version(release.version))
    except InvalidVersion:
        normal = ""
    if normal != release.version:
        fix = f"write {normal}" if normal else "write one such as 0.2.0 or 0.2.0rc1"
        raise UsageError(f"can't release the version {release.version!r}", "that is no version of a package", fix)
    if release.out.is_file() or (release.out.is_dir() and any(release.out.iterdir())):
        raise UsageError(f"can't write a release to {release.out}", "something is there", "remove it, or name --out")
    if release.dry_run:
        return
    if release.key is None:
        raise UsageError("a release should be signed", "no key is named", "write --key FILE, or try with --dry-run")
    check_key(release.key, release.signers)
    if release.share_packages:
        fix = "leave --share-packages out, or try with --dry-run"
        raise UsageError("a release should be tried as its users install it", "--share-packages is given", fix)


def check_key(key: Path, signers: Path) -> None:
    """Raise PacelineError unless what this key signs is verified: the tests that follow take long."""
    with tempfile.TemporaryDirectory(prefix="paceline-release-") as name:
        folder = Path(name)
        release_files.write_sums(folder)
        release_files.sign(folder, key)
        release_files.verify(folder, signers)


def check_tree(release: Release) -> None:
    """Raise UsageError if the tree is not that of the release: committed, tagged, with its version and its changes."""
    if changed := _git("status", "--porcelain"):
        found = f"{len(changed.splitlines())} files are not committed, such as {changed.split()[1]}"
        raise UsageError("can't release this tree", found, "commit or remove them")
    written = re.search(r'^__version__ = "(.+)"$', (ROOT / _INIT).read_text(), re.MULTILINE)
    if written is None or written[1] != release.version:
        found = f"{_INIT} says {written[1] if written else 'none'}"
        raise UsageError(f"can't release the version {release.version}", found, "write the version there, and commit")
    check_changelog(release.version, (ROOT / "CHANGELOG.md").read_text())
    tag = f"v{release.version}"
    tagged = _git("rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}", may_fail=True)
    if tagged and tagged != _git("rev-parse", "HEAD"):
        raise UsageError(f"the tag {tag} should be this commit", "it is another", "check that commit out")
    if not tagged and not release.dry_run:
        raise UsageError(f"the commit should have the tag {tag}", "there is no such tag", f"git tag -s {tag}")


def check_changelog(version: str, text: str) -> None:
    """Raise UsageError unless the changelog has the version, with its day and at least one change."""
    asked = f"CHANGELOG.md should have the version {version}"
    section = re.search(rf"^## \[?{re.escape(version)}\]?(.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    heading = f"## {version} - YYYY-MM-DD"
    if section is None:
        raise UsageError(asked, "it has no such heading", f"move what is under Unreleased to `{heading}`")
    if not re.fullmatch(r" - \d{4}-\d\d-\d\d", section[1]):
        raise UsageError(asked, f"its heading ends with {section[1]!r}", f"write `{heading}`")
    if not re.search(r"^- ", section[2], re.MULTILINE):
        raise UsageError(asked, "no change is under it", "write what changed")


def check_tests() -> None:
    """Run the project's checks and all of its tests, also those that CI leaves out.

    Raises:
        UsageError: one fails.
    """
    for words in (["scripts/check"], *(["scripts/test", *part] for part in ([], ["--long"], ["--complete"]))):
        if subprocess.run([str(ROOT / words[0]), *words[1:]], cwd=ROOT).returncode:
            raise UsageError("can't release this tree", f"{' '.join(words)} fails", "mend it")


def build(release: Release, commit_s: int, folder: Path) -> list[Path]:
    """Build wheel and source distribution twice, at different places, and put them into the release's folder.

    Args:
        release: what to build.
        commit_s: the time that all files in them get, s since 1970.
        folder: for temporary files.

    Returns:
        The source distribution and the wheel that was built from it.

    Raises:
        UsageError: they can't be built, or not twice in the same way.
    """
    built = []
    for name in ("first", "the/second"):
        tree = folder / name
        tree.mkdir(parents=True)
        # From the commit, not from the folder: what git ignores is not there.
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=tree, check=True, input=archive.stdout)
        out = folder / f"{name}-dist"
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_s)}
        words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
        _run(words, f"can't build the version {release.version}", environment)
        built.append(sorted(out.iterdir(), key=lambda path: path.suffix))
    for first, second in zip(*built, strict=True):
        if first.name != second.name or release_files.sha256(first) != release_files.sha256(second):
            found = f"{first.name} has other bytes when it is built again"
            raise UsageError("a build should be reproducible", found, "find what differs with diffoscope")
    sdist, wheel = built[0]
    named = f"paceline-{release.version}"
    if (sdist.name, wheel.name) != (f"{named}.tar.gz", f"{named}-py3-none-any.whl"):
        raise UsageError("a build should have the version's name", f"it made {sdist.name}", "see pyproject.toml")
    release.out.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(path, release.out)) for path in (sdist, wheel)]


def try_install(release: Release, package: Path, folder: Path) -> Path:
    """Install a package into a new environment and train with it; return the environment's Python.

    Raises:
        UsageError: it can't be installed, or does not work.
    """
    asked = f"{package.name} should work where it is installed"
    venv.create(folder, with_pip=not release.share_packages)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    options = ["-c", str(ROOT / "constraints.txt")]
    if release.share_packages:
        _share(folder)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall"]
    _run([*pip, "install", "--quiet", "--disable-pip-version-check", *options, str(package)], asked)
    version = _run([str(python), "-c", _TRIED], asked, _clean(folder)).strip()
    if version != release.version:
        raise UsageError(asked, f"it says that its version is {version}", f"see {_INIT}")
    here = folder / "here"
    here.mkdir()
    for words in (["examples", "copy", "classifier"], ["run", "-n", "2", "classifier.py"]):
        _run([str(python), "-m", "paceline", *words], asked, _clean(folder), here)
    return python


def try_image(release: Release, wheel: Path, folder: Path) -> tuple[str, str] | None:
    """Check the Containerfile, and build the image and run its demo if there is a container engine.

    Args:
        release: what the image has.
        wheel: is installed in the image.
        folder: gets the build context.

    Returns:
        The engine and the image's tag; None if the image was not built.

    Raises:
        UsageError: the image can't be built, or does not work.
    """
    context = release_image.make_context(folder, ROOT / "Containerfile", ROOT / "constraints.txt", wheel)
    if release.share_packages:
        say("no image is built with --share-packages; the syntax of the Containerfile is checked")
        return None
    engine = release_image.find_engine()
    if engine is None:
        say(f"no image is built: no engine ({', '.join(release_image.ENGINES)}) answers; only the syntax is checked")
        return None
    say(f"building the image with {engine}, and running the demo in it")
    return engine, release_image.build_image(engine, context, release.version)


def make(release: Release) -> None:
    """Make the release's files, and verify them."""
    commit_s = int(_git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="paceline-release-") as name:
        folder = Path(name)
        say("building wheel and source distribution, twice")
        sdist, wheel = build(release, commit_s, folder)
        _run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], "an index should take them")
        say("installing each into a new environment, and training with it")
        try_install(release, sdist, folder / "of-sdist")
        python = try_install(release, wheel, folder / "of-wheel")
        sbom = release.out / f"paceline-{release.version}.cdx.json"
        release_sbom.write_sbom(sbom, release_files.sha256(wheel), commit_s, python)
        say("building the site")
        site = release.out / f"paceline-{release.version}-site.tar.gz"
        release_site.build_site(folder / "first", site, commit_s, folder / "site")
        image = try_image(release, wheel, folder / "image")
        release_files.write_sums(release.out)
        key, signers = (release.key, release.signers) if release.key else _throwaway_key(folder)
        release_files.sign(release.out, key)
        identity = release_files.verify(release.out, signers)
    for path in sorted(release.out.iterdir()):
        say(f"  {path}")
    say(f"signed by {identity}, and verified")
    if release.dry_run:
        say("a dry run: nothing of this is meant to be uploaded")
        return
    say("nothing is uploaded yet; to do so:")
    say(f"  git push origin v{release.version}")
    say(f"  twine upload {sdist} {wheel}")
    if image:
        say(f"  {image[0]} tag {image[1]} REGISTRY/{image[1]} && {image[0]} push REGISTRY/{image[1]}")
    say(f"  unpack {site} where the site is served")


def _throwaway_key(folder: Path) -> tuple[Path, Path]:
    """Make a key that is gone when the dry run ends, and a file of signers that has it."""
    key = folder / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dry-run", "-f", str(key)]
    subprocess.run(words, check=True)
    signers = folder / "signers"
    signers.write_text(f"dry-run {key.with_suffix('.pub').read_text()}")
    return key, signers


def _share(folder: Path) -> None:
    """Let an environment import this one's packages; an editable Paceline among them is not found that way."""
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")


def _clean(folder: Path) -> dict[str, str]:
    """Return an environment in which nothing but `folder` says where Paceline is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE"))}
    return {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}{kept.get('PATH', '')}", "OMP_NUM_THREADS": "1"}


def _run(words: list[str], asked: str, environment: dict[str, str] | None = None, here: Path | None = None) -> str:
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True)
    if done.returncode:
        end = (done.stdout + done.stderr).strip()[-2000:]
        raise UsageError(asked, f"this ends with {done.returncode}: {' '.join(words)}\n{end}", "mend it")
    return done.stdout


def _git(*words: str, may_fail: bool = False) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise UsageError("a release is made in a clone of the repository", done.stderr.strip(), "make one")
    return done.stdout.strip()


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"release: {text}", flush=True)


def main() -> int:
    """Make a release's files."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("version", metavar="VERSION", help="such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="try it: needs no tag, no key and runs no tests")
    parser.add_argument("--key", type=Path, metavar="FILE", help="an ssh key to sign with")
    parser.add_argument("--signers", type=Path, default=release_files.SIGNERS, metavar="FILE", help="who may sign")
    parser.add_argument("--share-packages", action="store_true", help="a dry run: install without reaching an index")
    parser.add_argument("--out", type=Path, metavar="DIR", help="gets the files (default dist/VERSION)")
    arguments = parser.parse_args()
    release = Release(
        version=arguments.version,
        dry_run=arguments.dry_run,
        key=arguments.key,
        signers=arguments.signers,
        share_packages=arguments.share_packages,
        out=arguments.out or ROOT / "dist" / arguments.version,
    )
    try:
        check_request(release)
        check_tree(release)
        if not release.dry_run:
            check_tests()
        make(release)
    except PacelineError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
