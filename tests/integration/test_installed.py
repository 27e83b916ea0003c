"""An installed wheel, and an installed source distribution, do without the clone what its pages show."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.built_packages import build, copy_of_tree, install, new_environment
from support.jobs import leftovers, marked, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The paths of the wheel and the source distribution, by kind."""
    folder = tmp_path_factory.mktemp("packages")
    built = build(copy_of_tree(folder), folder / "dist")
    return {"wheel" if path.suffix == ".whl" else "sdist": path for path in built}


class Installation:
    """An environment with Paceline, and an empty folder to work in."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.python = new_environment(folder / "env")
        install(self.python, package)
        self.here = folder / "here"
        self.here.mkdir()
        self.environment = marked(self.here, {"OMP_NUM_THREADS": "1", "VIRTUAL_ENV": str(folder / "env")})
        self.environment["PATH"] = f"{self.python.parent}{os.pathsep}{self.environment['PATH']}"
        self.environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiler")
        self.environment.pop("PYTHONPATH", None)

    def __call__(self, line: str) -> str:
        """Run lines as a shell does, and return what they print."""
        words = ["bash", "-e", "-c", line]
        done = subprocess.run(words, cwd=self.here, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert wait_for(lambda: not leftovers(self.here)), f"left behind: {leftovers(self.here)}"
        return done.stdout

    def copy(self, words: str) -> str:
        """Copy an example, and return the commands that this prints."""
        printed = self(f"paceline examples copy {words}").partition("\nnext:\n")[2]
        return "\n".join(line.strip() for line in printed.splitlines())


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request, packages, tmp_path_factory):
    return Installation(tmp_path_factory.mktemp(request.param), packages[request.param])


@pytest.fixture(scope="module")
def from_wheel(packages, tmp_path_factory):
    return Installation(tmp_path_factory.mktemp("wheel"), packages["wheel"])


def check_is_whole(installed):
    """Its files are those of the environment, and both ways to the command lead to it."""
    place = Path(installed('python -c "import paceline; print(paceline.__file__)"').strip())
    assert place.is_relative_to(installed.python.parents[1])
    assert (place.parent / "py.typed").is_file()
    assert installed("paceline --help") == installed("python -m paceline --help")
    assert "\n1 host: " in installed("python -m paceline doctor || true")  # it may find this machine unfit


def check_trains_the_classifier(installed):
    commands = installed.copy("classifier")
    assert commands == "paceline run -n 2 classifier.py"
    installed(commands)
    (run,) = (installed.here / "runs").iterdir()
    assert list(run.glob("checkpoints/step-*/manifest.json"))


@pytest.mark.complete  # the wheel does, above; what is in it: tests/test_wheel.py
def test_a_source_distribution_is_whole_and_trains(packages, tmp_path):
    installed = Installation(tmp_path, packages["sdist"])  # it builds the same wheel: tests/test_wheel.py
    check_is_whole(installed)
    check_trains_the_classifier(installed)


def test_a_wheel_is_whole_trains_and_verifies(from_wheel):
    check_is_whole(from_wheel)
    check_trains_the_classifier(from_wheel)
    assert "ok" in from_wheel("paceline verify -n 2 classifier.py")


def test_readmes_example_runs_as_printed(from_wheel):
    assert "step 192  loss" in from_wheel(from_wheel.copy("train readme"))


def test_the_larger_example_runs_as_printed_and_is_exported(from_wheel):
    assert "accuracy" in from_wheel(from_wheel.copy("glue"))
    assert "model.safetensors" in from_wheel("paceline export glue/runs/* --to safetensors exported")


def test_the_demo_needs_no_clone(from_wheel):
    assert "held-out loss, after" in from_wheel("paceline demo --steps 1 --batch-size 2")
