"""Wheel and source distribution of this tree, and environments that have them installed."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a build may read; the rest of the clone is left out, so that it can't slip in by itself.
READ = ("src", "examples", "tests", "docs", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "pyproject.toml")


def copy_of_tree(folder: Path) -> Path:
    """The files of this tree, with what a person who works in it leaves behind: caches, runs, a package's metadata."""
    tree = folder / "tree"
    tree.mkdir()
    for name in (*READ, ".gitignore"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    for remainder in (
        "src/paceline/__pycache__/rest.cpython-311.pyc",
        "examples/loops/__pycache__/rest.cpython-311.pyc",
        "src/paceline.egg-info/PKG-INFO",
        ".venv/rest.py",
        "runs/rest/plan.json",
        "build/rest.py",
    ):
        (tree / remainder).parent.mkdir(parents=True, exist_ok=True)
        (tree / remainder).write_text("left behind")
    return tree


def build(tree: Path, folder: Path, *targets: str) -> list[Path]:
    """Build `wheel` and `sdist`, or those of them that are named, with the tools that are installed."""
    words = [word for target in targets or ("wheel", "sdist") for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *words, "-d", str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    return sorted(folder.iterdir())


def new_environment(folder: Path) -> Path:
    """Make an environment without Paceline that shares this one's other packages; return its Python.

    A line of a .pth file is a folder to import from. The .pth files in that folder are not read, so an editable
    Paceline there is not found.
    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "shared.pth").write_text("\n".join([*shared, *site.getsitepackages()]) + "\n")
    return folder / "bin" / "python"


def install(python: Path, package: Path) -> None:
    """Install a wheel or a source distribution, without reaching for anything else."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--force-reinstall", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, str(package)], check=True, capture_output=True)
