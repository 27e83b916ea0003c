"""The wheel and the source distribution have what an installation needs, and nothing else."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

import paceline
from paceline.demo.example_files import find_examples

from support.built_packages import ROOT, build, copy_of_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"paceline-{paceline.__version__}"


def files(folder, *patterns):
    """The files of a folder of this tree, without caches."""
    found = {path for pattern in patterns for path in (ROOT / folder).rglob(pattern) if path.is_file()}
    return {path.relative_to(ROOT / folder).as_posix() for path in found if "__pycache__" not in path.parts}


OF_EXAMPLES = ("*.py", "*.md", "*.ipynb", "*.png", ".airflowignore")
OF_PAGES = ("*.html", "*.css", "*.js")  # of the dashboard


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    tree = copy_of_tree(folder)
    sdist, wheel = sorted(build(tree, folder / "dist"), key=lambda path: path.suffix)
    return wheel, sdist


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        return email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))


def test_the_wheel_has_the_package_and_the_examples_alone(built):
    source = {f"paceline/{name}" for name in files("src/paceline", "*.py", "py.typed", *OF_PAGES)}
    examples = {f"paceline/example_files/{name}" for name in files("examples", *OF_EXAMPLES)}
    about = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    with zipfile.ZipFile(built[0]) as wheel:
        assert set(wheel.namelist()) == {*source, *examples, *about, f"{NAME}.dist-info/licenses/LICENSE"}
    assert "paceline/py.typed" in source
    assert "paceline/example_files/loops/classifier.py" in examples
    assert built[0].name == f"{NAME}-py3-none-any.whl"


def test_the_source_distribution_has_what_a_build_needs(built):
    source = {f"src/paceline/{name}" for name in files("src/paceline", "*.py", "py.typed", *OF_PAGES)}
    examples = {f"examples/{name}" for name in files("examples", *OF_EXAMPLES)}
    about = {"README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
    with tarfile.open(built[1]) as sdist:
        assert set(sdist.getnames()) == {f"{NAME}/{name}" for name in (*source, *examples, *about)}


def test_the_source_distribution_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (wheel,) = build(tmp_path / NAME, tmp_path / "dist", "wheel")
    assert wheel.read_bytes() == built[0].read_bytes()


def test_the_metadata_are_those_of_the_project(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("paceline", paceline.__version__)
    assert metadata["Summary"] == PROJECT["description"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# Paceline\n")
    assert metadata.get_all("Project-URL") is None  # the project has no page yet
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= {*metadata.get_all("Classifier")}


def test_extras_and_dependencies_are_those_of_the_project(metadata):
    assert {*metadata.get_all("Provides-Extra")} == {*PROJECT["optional-dependencies"]}
    required = {Requirement(line) for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert required == set(map(Requirement, PROJECT["dependencies"]))


def test_the_command_is_there(built):
    with zipfile.ZipFile(built[0]) as wheel:
        text = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert text == "[console_scripts]\npaceline = paceline.__main__:main\n"


def test_an_index_would_take_both(built):
    checked = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(checked, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_unpacked_wheel_has_the_examples_of_the_clone(built, tmp_path, monkeypatch):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = [sys.executable, "-m", "paceline", "examples", "--json"]
    listed = json.loads(subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert listed.keys() == find_examples().keys()
    place = "import paceline.demo.example_files as e; print(e.examples_folder())"
    found = subprocess.run([sys.executable, "-c", place], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(tmp_path / "paceline" / "example_files")
