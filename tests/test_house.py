"""The house rules that no linter knows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.nouns.mesh import AXES

HOUSE = Path(paceline.__file__).parent
ROOT = Path(__file__).parent.parent
FILES = sorted(HOUSE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60  # signs, not goals: density costs a reader more than length
VAGUE = {"utils", "util", "helpers", "common", "misc", "base", "core", "manager", "types"}


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HOUSE)))
def test_a_file_can_be_read_in_one_sitting(file):
    source = file.read_text()
    tree = ast.parse(source)
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not [f.name for f in functions(tree) if f.end_lineno - f.lineno >= MAX_FUNCTION_LINES]
    assert ast.get_docstring(tree), "the first line says what the file is for"
    assert file.stem not in VAGUE, "name the file for what it does"


@pytest.mark.parametrize("room", sorted(p.parent.name for p in HOUSE.glob("*/__init__.py")))
def test_a_room_opens_with_its_purpose_and_no_code(room):
    body = ast.parse((HOUSE / room / "__init__.py").read_text()).body
    assert [type(node) for node in body] == [ast.Expr], "import from the file that defines the thing"
    assert f"`{room}/`" in (ROOT / "ARCHITECTURE.md").read_text(), "every room has its line in ARCHITECTURE.md"


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_planned_run_and_checked(axis):
    assert (HOUSE / "parallel" / f"{axis}.py").is_file()
    assert (ROOT / "tests" / "parallel" / f"test_{axis}.py").is_file()
    assert any(f"def {axis}" in path.read_text() for path in (HOUSE / "plan").glob("*.py"))


@pytest.mark.parametrize("axis", AXES)
def test_a_strategy_says_what_it_needs_promises_and_sends(axis):
    docstring = ast.get_docstring(ast.parse((HOUSE / "parallel" / f"{axis}.py").read_text()))
    assert all(word in docstring for word in ("Needs:", "Promises:", "Traffic"))


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["plan", "--help"],
        ["run", "--help"],
        ["demo", "--help"],
        ["bench", "--help"],
        ["export", "--help"],
        ["doctor", "--help"],
        ["explain", "--help"],
    ],
)
def test_help_starts_without_torch_and_at_once(command):
    code = (
        "import resource, sys\n"
        "from paceline.cli.main import main\n"
        f"try: main({command!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "assert used.ru_utime + used.ru_stime < 0.5, used\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_dependency_has_its_reason():
    declared = re.findall(r'^\s+"([a-z-]+)[\[>=]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    design = (ROOT / "docs" / "design.md").read_text()
    missing = [name for name in {*declared} - {"paceline"} if f"`{name}`" not in design]
    assert not missing, f"docs/design.md gives no reason for {missing}"


def test_nothing_is_unpickled():
    hits = [f for f in FILES if re.search(r"\b(pickle\.|torch\.load\(|cloudpickle|shell=True)", f.read_text())]
    assert not hits
