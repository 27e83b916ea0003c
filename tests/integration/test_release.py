"""A release is made whole without a network, and verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
from packaging.requirements import Requirement

import paceline

from support.built_packages import ROOT, copy_of_tree

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen"),
]
VERSION = paceline.__version__
NAMES = {
    f"paceline-{VERSION}-py3-none-any.whl",
    f"paceline-{VERSION}.tar.gz",
    f"paceline-{VERSION}.cdx.json",
    f"paceline-{VERSION}-site.tar.gz",
    "SHA256SUMS",
    "SHA256SUMS.sig",
}


# No dry run, without what takes long or a network: the tests, and an installation with its own torch.
IN_EARNEST = """
import pathlib, sys
scripts, version, key, signers, out = sys.argv[1:]
sys.path.insert(0, scripts)
import release_steps
release = release_steps.Release(
    version=version, dry_run=False, key=pathlib.Path(key), signers=pathlib.Path(signers), share_packages=True,
    out=pathlib.Path(out),
)
release_steps.check_tree(release)
release_steps.make(release)
"""


def git(tree, *words):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


def release(tree, *words):
    line = [sys.executable, str(tree / "scripts" / "release_steps.py"), VERSION, *words]
    return subprocess.run(line, cwd=tree, capture_output=True, text=True, env={**os.environ, "TZ": "Asia/Tokyo"})


def make_key(folder):
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "own", "-f", str(folder / "own")]
    subprocess.run(words, check=True)
    (folder / "signers").write_text(f"a@example.org {(folder / 'own.pub').read_text()}")
    return folder / "own", folder / "signers"


@pytest.fixture
def clone(tmp_path):
    """A repository of this tree, with caches that git ignores, and the version in its changelog."""
    tree = copy_of_tree(tmp_path)
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("__pycache__", "published", "trials")
    )
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "Containerfile"]:
        shutil.copy(path, tree)
    changelog = tree / "CHANGELOG.md"
    heading = f"## Unreleased\n\n## {VERSION} - 2026-11-24\n"
    changelog.write_text(changelog.read_text().replace("## Unreleased\n", heading))
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "All")
    return tree


@pytest.mark.complete
def test_a_dry_run_makes_every_file_the_same_each_time(clone, tmp_path):
    first = release(clone, "--dry-run", "--share-packages")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "signed by dry-run, and verified" in first.stdout
    assert "twine upload" not in first.stdout
    out = clone / "dist" / VERSION
    assert {path.name for path in out.iterdir()} == NAMES

    git(clone, "tag", f"v{VERSION}")
    key, signers = make_key(clone.parent)
    words = [clone / "scripts", VERSION, key, signers, tmp_path / "again"]
    again = subprocess.run([sys.executable, "-c", IN_EARNEST, *map(str, words)], capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "signed by a@example.org, and verified" in again.stdout
    made = f"{tmp_path}/again/paceline-{VERSION}"
    assert again.stdout.splitlines()[-3:] == [
        f"release:   git push origin v{VERSION}",
        f"release:   twine upload {made}.tar.gz {made}-py3-none-any.whl",
        f"release:   unpack {made}-site.tar.gz where the site is served",
    ]
    with tarfile.open(f"{made}-site.tar.gz") as site:
        assert {"index.html", "docs/loops.html", "docs/reference/training.html"} <= set(site.getnames())
    assert (tmp_path / "again" / "SHA256SUMS").read_text() == (out / "SHA256SUMS").read_text()

    bill = json.loads((out / f"paceline-{VERSION}.cdx.json").read_text())
    described = bill["metadata"]["component"]
    assert (described["name"], described["version"]) == ("paceline", VERSION)
    assert described["hashes"][0]["content"] in (out / "SHA256SUMS").read_text()
    named = {component["name"] for component in bill["components"]}
    wanted = {Requirement(line).name for line in paceline_requirements()}
    assert wanted <= named
    assert "pytest" not in named
    edges = {edge["ref"].split("@")[0]: edge.get("dependsOn", []) for edge in bill["dependencies"]}
    assert {ref.split("/")[1].split("@")[0] for ref in edges["pkg:pypi/paceline"]} == wanted


def paceline_requirements():
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("]")[0]
    return [line.strip(' ",') for line in text.strip().splitlines()]


def test_release_of_a_dirty_or_untagged_commit_makes_nothing(clone):
    (clone / "more.txt").write_text("")
    dirty = release(clone, "--dry-run")
    assert dirty.returncode == 2
    assert "1 files are not committed, such as more.txt" in dirty.stderr
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "More")
    key, signers = make_key(clone.parent)
    untagged = release(clone, "--key", str(key), "--signers", str(signers))
    assert f"the commit should have the tag v{VERSION}" in untagged.stderr
    git(clone, "tag", f"v{VERSION}", "HEAD~1")
    elsewhere = release(clone, "--dry-run", "--share-packages")
    assert f"the tag v{VERSION} should be this commit" in elsewhere.stderr
    assert not (clone / "dist").exists()
