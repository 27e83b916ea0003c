"""`paceline examples`: lists all, copies each as it is, writes over nothing, and says what to type next."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.demo import example_files as examples
from paceline.demo.example_files import find_examples

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = list(find_examples())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_files():
    """Every file of `examples/`, without what running one leaves."""
    found = {path for path in EXAMPLES.rglob("*") if path.is_file()}
    return {path for path in found if not {"__pycache__", "runs"} & {*path.parts}}


def test_every_file_belongs_to_one_example():
    copied = [path for example in find_examples().values() for path in example.files.values()]
    assert {*copied} == in_files()
    assert len(copied) == len({*copied})


def test_the_list_has_names_summaries_and_needs(capsys):
    assert main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES == sorted(NAMES)
    assert {"train", "classifier", "glue"} <= {*NAMES}
    by_name = dict(zip(NAMES, lines, strict=True))
    assert by_name["language_model"].endswith("(needs transformers)")
    assert "needs" not in by_name["classifier"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_described(name):
    example = find_examples()[name]
    assert len(example.summary) > 20
    assert example.commands
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {re.split(r"[>=\[]", line)[0] for lines in extras.values() for line in lines}
    assert {*example.needs} <= known
    named = {word for line in example.commands for word in shlex.split(line) if word.endswith((".py", ".ipynb"))}
    assert named <= {*example.files}
    way = "jupyter lab " if example.files.keys() == {"launch.ipynb"} else "paceline run -n 2 "
    assert any(line.startswith(way) for line in example.commands)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_the_files_and_says_what_is_next(name, here, capsys):
    assert main(["examples", "copy", name]) == 0
    example = find_examples()[name]
    folder = here / name if example.is_folder else here
    copied = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert copied == {inside: path.read_bytes() for inside, path in example.files.items()}
    listed, _, commands = capsys.readouterr().out.partition("\nnext:\n")
    assert {here / line for line in listed.splitlines()} == {folder / inside for inside in example.files}
    assert [line.strip() for line in commands.splitlines()] == [f"cd {name}"] * example.is_folder + [*example.commands]


def test_a_copy_elsewhere_begins_with_the_way_there(here, capsys):
    assert main(["examples", "copy", "gan", "a b/c"]) == 0
    assert (here / "a b" / "c" / "gan.py").read_bytes() == (EXAMPLES / "loops" / "gan.py").read_bytes()
    assert capsys.readouterr().out.splitlines()[-2:] == ["  cd 'a b/c'", "  paceline run -n 2 gan.py"]


@pytest.mark.parametrize("written", ["gan.py", "loops/gan.py", "examples/loops/gan.py", "gan"])
def test_a_name_may_be_that_of_the_file(written, here):
    assert main(["examples", "copy", written]) == 0
    assert (here / "gan.py").is_file()


def test_what_is_missing_is_installed_first(monkeypatch, capsys):
    monkeypatch.setattr(examples.importlib.util, "find_spec", lambda name: None)
    assert main(["examples", "copy", "language_model"]) == 0
    commands = capsys.readouterr().out.splitlines()[-2:]
    assert commands == ["  pip install transformers", "  paceline run -n 2 language_model.py"]


def test_nothing_is_written_over_unless_asked(here, capsys):
    (here / "glue").mkdir()
    (here / "glue" / "tasks.py").write_text("mine")
    assert main(["examples", "copy", "glue"]) == 2
    assert "glue/tasks.py would be written over" in capsys.readouterr().err
    assert [path.name for path in (here / "glue").iterdir()] == ["tasks.py"]
    assert (here / "glue" / "tasks.py").read_text() == "mine"
    assert main(["examples", "copy", "glue", "--force"]) == 0
    assert (here / "glue" / "tasks.py").read_bytes() == (EXAMPLES / "glue" / "tasks.py").read_bytes()


def test_json_says_the_same(capsys):
    assert main(["examples", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [*listed] == NAMES
    assert listed["language_model"]["needs"] == ["transformers"]
    for words in (["copy", "gan", "a", "--json"], ["--json", "copy", "gan", "b"]):
        assert main(["examples", *words]) == 0
        folder = words[-1] if words[-1] != "--json" else words[-2]
        copied = {"files": [f"{folder}/gan.py"], "commands": [f"cd {folder}", "paceline run -n 2 gan.py"]}
        assert json.loads(capsys.readouterr().out) == copied


# The words after `paceline examples`, and what the error's last two lines say.
REFUSED = {
    "a misspelt name": (["copy", "clasifier"], "the examples are ", "did you mean 'classifier'"),
    "no such name": (["copy", "xyz"], "the examples are ", "see `paceline examples`"),
    "a file for a folder": (["copy", "gan", "file"], "that is a file, not a folder", "name another place as DIR"),
    "no name": (["copy"], "NAME", "see `paceline examples copy --help`"),
    "an unknown verb": (
        ["show", "gan"],
        "invalid choice: 'show'",
        "write `paceline examples copy ...`; see `paceline examples --help`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, here, capsys):
    words, found, fix = REFUSED[case]
    (here / "file").write_text("")
    try:
        code = main(["examples", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert found in lines[1]
    assert fix in lines[2]
    assert [path.name for path in here.iterdir()] == ["file"]


def test_an_installation_without_examples_says_so(monkeypatch, here, capsys):
    monkeypatch.setattr(examples, "_PACKAGE", here)
    monkeypatch.setattr(examples, "_CLONE", here)
    assert main(["examples"]) == 2
    assert "should be installed with it\n  found: neither " in capsys.readouterr().err


def test_the_first_is_readmes():
    (code,) = re.findall(r"```python\n# train.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (EXAMPLES / "train.py").read_text().partition('"""\n\n')[2] == code


def test_the_package_runs_as_a_module():
    line = [sys.executable, "-m", "paceline", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", done.stdout)
