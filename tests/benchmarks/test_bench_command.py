"""`scripts/bench`: how it reads its command line, what it refuses, and that each command of a page is one of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from compare import command
from compare.command import main
from compare.startup import alone
from paceline.cli.flags import written_flags

from support.benchmarks import BENCHMARKS, SCRIPT
from support.documented_commands import shown

SHOWN = [one for one in shown() if one.text.startswith("scripts/bench ")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["planner", "--rounds", "5"], "--rounds is for bench step and jobs and strategies"),
        (["strategies", "--startup-rounds", "3"], "--startup-rounds is for bench step"),
        (["step", "--steps", "300"], "write jobs"),
        (["planner", "--busy", "3"], "write jobs"),
        (["step", "--device", "cpu"], "write planner"),
        (["step", "--published", "none"], "write planner"),
    ],
)
def test_a_flag_of_another_subject_is_refused(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert re.search(r"\n  found: .+\n  fix: .+\n", error), error


def test_a_refusal_is_json_for_a_program(capsys):
    assert main(["step", "--steps", "3", "--json"]) == 2
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["status"] == "refused"
    assert refusal["error"]["asked"] == "the flag --steps"


def test_the_command_alone_prints_its_help(capsys):
    assert main([]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("usage: scripts/bench")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out == error


def test_an_unknown_subject_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["steps"])
    assert end.value.code == 2
    assert "fix: see `scripts/bench --help`" in capsys.readouterr().err


def test_ctrl_c_ends_it_in_a_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert main(["step"]) == 130
    assert capsys.readouterr().err == "scripts/bench: interrupted\n"


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.text)
def test_every_command_that_a_page_shows_is_read(shown):
    words = shown.words[1:]
    arguments = command.make_parser().parse_args(words)
    command.check_flags(arguments.subject, written_flags(command.make_parser(), words))


def test_the_pages_show_commands():
    assert {one.words[1] for one in SHOWN} == set(command.SUBJECTS) - {"jobs"}


def test_the_script_runs_where_it_is_called_and_without_torch(tmp_path):
    """The processes that are measured import torch; the one that measures must not slow them down."""
    done = subprocess.run([SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: scripts/bench")
    (tmp_path / "rows.csv").write_text("city,people\nBerne,1\n")
    done = subprocess.run([SCRIPT, "planner", "--published", "rows.csv"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "it lacks act_ckpt" in done.stderr
    code = "import sys, compare.command; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_that_failed_can_be_started_alone_as_told():
    words = alone([sys.executable, "-c", "import compare.startup; print(compare.startup.__file__)"])
    done = subprocess.run(words.removeprefix("run it alone: "), shell=True, capture_output=True, text=True, env={})
    assert done.stdout.strip() == str(BENCHMARKS / "compare" / "startup.py")
