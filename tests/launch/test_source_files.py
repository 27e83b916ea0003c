"""What a program is made of, and by which form it trains, is found in its sources; nothing of it is run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline
from paceline.launch.source_files import find_module, sources
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import PlanError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram

LOOP = "import paceline\n\ndef main():\n    return paceline.prepare()\n"
IN_FUNCTION = "def main():\n    from paceline import prepare\n    prepare()\n"
UNDER_IF = "import sys\nif sys.argv:\n    import paceline as p\n    p.prepare()\n"
DECLARED = "from paceline import Workload, distribute\n\ndef main():\n    distribute(Workload(**parts))\n"
TRAINER = "def main():\n    from paceline.integrations.lightning import Strategy\n    Strategy()\n"
PACKAGE = {"pkg/__init__.py": "", "pkg/train.py": LOOP}
DEEP = {"pkg/__init__.py": "from . import a\n", "pkg/a.py": "from .sub.b import x\n", "pkg/sub/b.py": IN_FUNCTION}
CIRCLE = {"a.py": "import b\n", "b.py": f"import a, main\n{LOOP}"}
BOTH = {"first.py": LOOP, "second.py": DECLARED}
# By name: the file that is run, the others, and whether the program names Paceline and trains by a loop.
PROGRAMS = {
    "a loop": (LOOP, {}, True, True),
    "an import inside a function": (IN_FUNCTION, {}, True, True),
    "an import under if, by another name": (UNDER_IF, {}, True, True),
    "a Trainer inside a function": (TRAINER, {}, True, True),
    "a workload made inside a function": (DECLARED, {}, True, False),
    "a package beside it": ("from pkg.train import main\nmain()\n", PACKAGE, True, True),
    "a package that imports within itself": ("import pkg\n", DEEP, True, True),
    "a module beside it that declares": ("import other\nother.main()\n", {"other.py": DECLARED}, True, False),
    "the nearest file decides": ("import first, second\n", BOTH, True, True),
    "a circle of imports": ("import a\n", CIRCLE, True, True),
    "an installed package's workload": ("from elsewhere import workload\n", {}, False, False),
    "an installed package's loop": ("from elsewhere import main\nmain()\n", {}, False, True),
    "an import that is no Python": (f"import broken\n{LOOP}", {"broken.py": "def ("}, True, True),
    "a name that only begins so": ("import paceline_tools\n", {}, False, True),
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(("main", "others", "names_paceline", "is_loop"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_is_known_by_its_sources(tmp_path, main, others, names_paceline, is_loop):
    write(tmp_path, {"main.py": main, **others})
    found = read_workload_file(str(tmp_path / "main.py"), 1)
    assert (found.names_paceline, found.is_loop) == (names_paceline, is_loop)


def test_a_plan_is_refused_only_for_a_loop_that_is_seen(tmp_path):
    write(tmp_path, {"seen.py": "import pkg\n", "pkg.py": LOOP, "unseen.py": "from elsewhere import main\n"})
    plan = Plan(mesh="pipeline=2")
    read_workload_file(str(tmp_path / "unseen.py"), 1, plan)
    with pytest.raises(PlanError, match="pipeline"):
        read_workload_file(str(tmp_path / "seen.py"), 1, plan)


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    files = {"pkg/__init__.py": "raise SystemExit('imported')", "pkg/sub/train.py": LOOP, "pkg/tool/__main__.py": LOOP}
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    for name, path in (("pkg.sub.train", "pkg/sub/train.py"), ("pkg.tool", "pkg/tool/__main__.py")):
        found = find_module(name)
        assert found == tmp_path / path
        assert UserProgram(str(found), name).root == tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pkg.trainn", "did you mean 'train'"),
        ("nowhere.train", "no nowhere is in this folder"),
        ("pkg", "it is a package, and has no __main__"),
        ("pkg.train.more", "pkg.train has no more"),
        ("pkg/train.py", "that is no module's name"),
        ("pkg.train.py", "pkg.train has no py"),
        ("", "that is no module's name"),
        ("..train", "that is no module's name"),
        ("math", "it is no Python source"),
    ],
)
def test_a_module_that_is_not_there_is_one_error(tmp_path, monkeypatch, name, says):
    write(tmp_path, {"pkg/__init__.py": "", "pkg/train.py": LOOP})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        find_module(name)
    assert says in str(raised.value)


def test_pacelines_own_files_are_none_of_a_program(tmp_path, monkeypatch):
    """Where PYTHONPATH names its sources: 200 of them, read before any rank starts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    write(tmp_path, {"main.py": LOOP, "other.py": "import paceline.train.job\n"})
    for name in ("main.py", "other.py"):
        path = tmp_path / name
        assert len(list(sources(path, ast.parse(path.read_text()), tmp_path))) == 1
