"""What a release must be: an altered file is noticed, and so are a wrong version, changelog, key or requirement."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

import paceline
from paceline.nouns.errors import PacelineError, UsageError

from support.built_packages import ROOT

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))  # as for a script there: they import each other
import release_files  # noqa: E402
import release_image  # noqa: E402
import release_sbom  # noqa: E402
import release_site  # noqa: E402
import release_steps  # noqa: E402

WHO = "a@example.org"


def make_key(folder, name):
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
    subprocess.run(words, check=True)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The key of a signer, that of somebody else, and the file of signers."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen")
    folder = tmp_path_factory.mktemp("keys")
    own, other = make_key(folder, "own"), make_key(folder, "other")
    (folder / "signers").write_text(f"{WHO} {own.with_suffix('.pub').read_text()}")
    return own, other, folder / "signers"


@pytest.fixture
def released(tmp_path, keys):
    folder = tmp_path / "released"
    folder.mkdir()
    for name in ("paceline-1.0-py3-none-any.whl", "paceline-1.0.tar.gz", "paceline-1.0.cdx.json"):
        (folder / name).write_text(f"the content of {name}")
    release_files.write_sums(folder)
    release_files.sign(folder, keys[0])
    return folder


def verify(folder, signers):
    line = [str(SCRIPTS / "verify-release"), str(folder), "--signers", str(signers)]
    return subprocess.run(line, capture_output=True, text=True)


def test_a_release_is_verified_as_it_was_signed(released, keys):
    done = verify(released, keys[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"verify-release: all files are as {WHO} signed them\n"


def test_the_pages_commands_verify_it_without_a_clone(released, keys):
    page = (ROOT / "docs" / "releasing.md").read_text()
    block = page.partition("<!-- test: verify -->\n```\n")[2].partition("```")[0]
    lines = block.replace("release-signers", str(keys[2])).replace("RELEASER", WHO)
    assert "ssh-keygen -Y verify" in lines
    assert "sha256sum" in lines
    done = subprocess.run(["bash", "-e", "-c", lines], cwd=released, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (released / "paceline-1.0.tar.gz").write_text("other")
    done = subprocess.run(["bash", "-e", "-c", lines], cwd=released, capture_output=True, text=True)
    assert done.returncode == 1


def alter_the_wheel(folder, keys):
    path = folder / "paceline-1.0-py3-none-any.whl"
    path.write_text(path.read_text().replace("content", "c0ntent"))


def alter_the_wheel_and_its_sum(folder, keys):
    alter_the_wheel(folder, keys)
    release_files.write_sums(folder)


def sign_with_another_key(folder, keys):
    alter_the_wheel_and_its_sum(folder, keys)
    release_files.sign(folder, keys[1])


def sign_for_another_purpose(folder, keys):
    words = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(keys[0]), "-n", "file", str(folder / "SHA256SUMS")]
    (folder / "SHA256SUMS.sig").unlink()
    subprocess.run(words, check=True)


def add_a_file(folder, keys):
    (folder / "paceline-1.0-py3-none-linux.whl").write_text("more")


def lose_the_bill(folder, keys):
    (folder / "paceline-1.0.cdx.json").unlink()


def lose_the_signature(folder, keys):
    (folder / "SHA256SUMS.sig").unlink()


def lose_the_sums(folder, keys):
    (folder / "SHA256SUMS").unlink()


def list_a_file_elsewhere(folder, keys):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../wheel\n")
    release_files.sign(folder, keys[0])


TAMPERED = {
    alter_the_wheel: "paceline-1.0-py3-none-any.whl should be as it was released\n  found: it was altered",
    alter_the_wheel_and_its_sum: "found: SHA256SUMS was altered, or signed for another purpose",
    sign_with_another_key: "found: it is of another key, or no signature",
    sign_for_another_purpose: "found: SHA256SUMS was altered, or signed for another purpose",
    add_a_file: "found: paceline-1.0-py3-none-linux.whl is none",
    lose_the_bill: "found: paceline-1.0.cdx.json is missing",
    lose_the_signature: "found: SHA256SUMS.sig is missing",
    lose_the_sums: "found: it has no SHA256SUMS",
    list_a_file_elsewhere: "found: it has the line",
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_what_is_altered_is_noticed(tamper, released, keys):
    tamper(released, keys)
    done = verify(released, keys[2])
    assert done.returncode in (1, 2)
    assert TAMPERED[tamper] in done.stderr
    assert "  fix: " in done.stderr


def test_without_a_file_of_signers_nothing_is_verified(released, tmp_path):
    done = verify(released, tmp_path / "none")
    assert done.returncode == 2
    assert "there is no such file" in done.stderr


def test_a_key_that_is_none_is_said(released, tmp_path):
    with pytest.raises(UsageError, match="can't sign the release with"):
        release_files.sign(released, tmp_path / "none")


def test_a_machine_without_ssh_keygen_is_said(tmp_path, monkeypatch):
    (tmp_path / "SHA256SUMS").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    for action in (release_files.sign, release_files.verify):
        with pytest.raises(UsageError, match="it is not on the PATH"):
            action(tmp_path, tmp_path / "key")


def request(tmp_path, keys, **changes):
    standard = {
        "version": "1.0", "dry_run": False, "key": keys[0], "signers": keys[2],
        "share_packages": False, "out": tmp_path / "out",
    }  # fmt: skip
    return release_steps.Release(**{**standard, **changes})


# What differs from a release that may be made, and what is found.
REFUSED = {
    "no version": ({"version": "next"}, "that is no version"),
    "a version in another form": ({"version": "v1.0"}, "that is no version"),
    "not signed": ({"key": None}, "no key is named"),
    "not as users install it": ({"share_packages": True}, "--share-packages is given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_can_not_be_a_release(case, tmp_path, keys):
    changes, found = REFUSED[case]
    release_steps.check_request(request(tmp_path, keys))
    release_steps.check_request(request(tmp_path, keys, dry_run=True, key=None, share_packages=True))
    with pytest.raises(UsageError) as raised:
        release_steps.check_request(request(tmp_path, keys, **changes))
    assert found in raised.value.found


def test_a_key_that_may_not_sign_is_refused_before_the_tests_run(tmp_path, keys):
    with pytest.raises(PacelineError, match="it is of another key"):
        release_steps.check_request(request(tmp_path, keys, key=keys[1]))
    with pytest.raises(UsageError, match="there is no such file"):
        release_steps.check_request(request(tmp_path, keys, signers=tmp_path / "none"))


def test_files_that_are_there_are_not_written_over(tmp_path, keys):
    (tmp_path / "out").mkdir()
    release_steps.check_request(request(tmp_path, keys))
    (tmp_path / "out" / "rest").write_text("")
    with pytest.raises(UsageError, match="something is there"):
        release_steps.check_request(request(tmp_path, keys, dry_run=True))


def test_the_page_names_the_wheel_that_a_build_makes():
    page = (ROOT / "docs" / "releasing.md").read_text()
    assert {*re.findall(r"paceline-([\d.]+\w*)-py3", page)} == {paceline.__version__}


CHANGES = "### Added\n\n- A thing.\n"
CHANGELOGS = {
    "no such version": (f"## Unreleased\n\n{CHANGES}\n## 11.0 - 2026-01-01\n\n{CHANGES}", "no such heading"),
    "no day": (f"## 1.0\n\n{CHANGES}", "its heading ends with ''"),
    "a word for a day": (f"## 1.0 - soon\n\n{CHANGES}", "its heading ends with ' - soon'"),
    "no change": (f"## 1.0 - 2026-01-01\n\n## 0.9 - 2025-01-01\n\n{CHANGES}", "no change is under it"),
}


@pytest.mark.parametrize("heading", ["## 1.0 - 2026-01-01", "## [1.0] - 2026-01-01"])
def test_a_changelog_with_the_version(heading):
    release_steps.check_changelog("1.0", f"# Changelog\n\n## Unreleased\n\n{heading}\n\n{CHANGES}")


@pytest.mark.parametrize("case", CHANGELOGS)
def test_a_changelog_without_the_version(case):
    text, found = CHANGELOGS[case]
    with pytest.raises(UsageError) as raised:
        release_steps.check_changelog("1.0", text)
    assert found in raised.value.found


def package(version, *requires):
    return {"version": version, "requires": list(requires), "license": ("MIT", None)}


PACKAGES = {
    "paceline": package("1.0", "torch>=2.0", "Py_YAML>=6", "tokenizers>=1; extra == 'demo'"),
    "torch": package("2.1+cpu", "filelock", "win-thing; sys_platform == 'win32'", "py-yaml[fast]"),
    "py-yaml": package("6.0", "quick; extra == 'fast'", "slow; extra == 'other'"),
    "quick": package("1", "torch"),  # a circle
    "filelock": package("3"),
    "pytest": package("9"),
}


def test_the_bill_has_what_an_installation_brings_along():
    assert release_sbom.required("paceline", PACKAGES) == {
        "paceline": ["py-yaml", "torch"],
        "torch": ["filelock", "py-yaml"],
        "py-yaml": ["quick"],
        "quick": ["torch"],
        "filelock": [],
    }


@pytest.mark.parametrize(
    ("version", "found"), [("1.9", "1.9 is installed"), (None, "it is not installed")], ids=["old", "missing"]
)
def test_release_sbom_of_an_incomplete_installation_is_refused(version, found):
    packages = {**PACKAGES, "torch": package(version)}
    if version is None:
        del packages["torch"]
    with pytest.raises(PacelineError) as raised:
        release_sbom.required("paceline", packages)
    assert (raised.value.asked, raised.value.found) == ("paceline needs torch>=2.0", found)


def test_the_bill_is_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(release_sbom, "installed", lambda python: PACKAGES)
    for name in ("a", "b"):
        release_sbom.write_sbom(tmp_path / name, "0" * 64, 1_700_000_000, tmp_path)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    bill = json.loads((tmp_path / "a").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {one["purl"] for one in bill["components"]} == {
        "pkg:pypi/torch@2.1%2Bcpu", "pkg:pypi/py-yaml@6.0", "pkg:pypi/quick@1", "pkg:pypi/filelock@3",
    }  # fmt: skip


@pytest.fixture
def context(tmp_path):
    """A folder from which the image is built, and whose Containerfile was checked."""
    wheel = tmp_path / "paceline-1.0-py3-none-any.whl"
    wheel.write_text("")
    return release_image.make_context(tmp_path / "image", ROOT / "Containerfile", ROOT / "constraints.txt", wheel)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("FROM docker", "FORM docker", "this is no instruction: 'FORM docker"),
        ('["paceline"]', "[paceline]", "ENTRYPOINT is no JSON list of words"),
        ("$(ls", "$((ls", "the shell can't read a RUN"),
        ("paceline-*.whl", "paceline-*.zip", "COPY names paceline-*.zip, which is not there"),
        ("USER 1000\n", "", "it has no USER"),
        ("ENTRYPOINT", "LABEL", "or has no ENTRYPOINT"),
    ],
)
def test_a_faulty_containerfile_is_found_without_an_engine(context, old, new, found):
    text = (ROOT / "Containerfile").read_text()
    assert old in text
    with pytest.raises(UsageError) as caught:
        release_image.check_containerfile(text.replace(old, new), context)
    assert found in caught.value.found


def put_engine(folder, monkeypatch, body):
    """A program named docker, the only one on the PATH besides the system's; its calls are in calls.txt."""
    (folder / "docker").write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls.txt\n{body}\n')
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_an_engine_builds_the_image_and_runs_its_demo(context, tmp_path, monkeypatch):
    put_engine(tmp_path, monkeypatch, 'case "$*" in *--version) echo paceline 1.0;; esac')
    assert release_image.find_engine() == "docker"
    assert release_image.build_image("docker", context, "1.0") == "paceline:1.0"
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls == [
        "info",
        f"build --tag paceline:1.0 --file {context}/Containerfile {context}",
        "run --rm paceline:1.0 --version",
        "run --rm paceline:1.0 demo",
    ]


def test_an_image_whose_demo_fails_is_refused(context, tmp_path, monkeypatch):
    put_engine(tmp_path, monkeypatch, 'case "$*" in *--version) echo paceline 1.0;; *demo) exit 3;; esac')
    with pytest.raises(UsageError) as caught:
        release_image.build_image("docker", context, "1.0")
    assert "this ends with 3: docker run --rm paceline:1.0 demo" in caught.value.found


def test_an_engine_that_does_not_answer_is_none(tmp_path, monkeypatch):
    put_engine(tmp_path, monkeypatch, "exit 1")
    monkeypatch.setattr(release_image, "ENGINES", ("docker",))
    assert release_image.find_engine() is None


def test_the_sites_archive_depends_on_its_files_and_time(tmp_path):
    archives = []
    for name in ("first", "second"):
        folder = tmp_path / name
        (folder / "docs").mkdir(parents=True)
        for page in ("docs/a.html", "index.html") if name == "first" else ("index.html", "docs/a.html"):
            (folder / page).write_text(page)
        archives.append(tmp_path / f"{name}.tar.gz")
        release_site.pack(folder, archives[-1], 1_700_000_000)
    assert archives[0].read_bytes() == archives[1].read_bytes()
