"""Completion at the Tab key, by a real bash: commands, flags, names of runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.completion_command import SHELLS, verb_asked_for
from paceline.cli.main import VERBS, main

# Calls the function that completes, as bash does, and prints what it found.
ASK = """
eval "$(paceline completion bash)"
COMP_LINE="$1"; COMP_POINT=${#1}; read -r -a COMP_WORDS <<< "$1"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_TYPE=9
compopt() { :; }
_python_argcomplete paceline
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder, line):
    """What bash offers after a line."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin/paceline"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", line], cwd=folder, capture_output=True, text=True, env=environment, timeout=60
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.fixture
def runs(tmp_path):
    for name in ("first", "fine-tuned", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").write_text("{}")
    (tmp_path / "elsewhere/far").mkdir(parents=True)
    (tmp_path / "elsewhere/far/job.json").write_text("{}")
    return tmp_path


# A line, and what is offered.
LINES = {
    "a command": ("paceline ti", ["timeline"]),
    "two commands": ("paceline ex", ["examples", "explain", "export"]),
    "a flag": ("paceline top --on", ["--once"]),
    "a flag of run": ("paceline run --max-r", ["--max-restarts"]),
    "a run": ("paceline why fi", ["fine-tuned", "first"]),
    "a run of a command below": ("paceline runs show fi", ["fine-tuned", "first"]),
    "a run elsewhere": ("paceline logs --runs elsewhere f", ["far"]),
    "a choice": ("paceline completion f", ["fish"]),
    "a choice of a flag": ("paceline submit kubernetes --gang k", ["kai", "kueue"]),
    "a choice of a flag of run": ("paceline run --on s", ["ssh"]),
    "nothing": ("paceline zzz", []),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("case", LINES)
def test_bash_is_offered(case, runs):
    line, offered = LINES[case]
    assert sorted(completed(runs, line)) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_its_code(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "paceline" in capsys.readouterr().out


# A line, where the cursor is, and the command that it begins with.
VERBS_OF = {
    "paceline": None,
    "paceline ru": None,
    "paceline run": None,
    "paceline run ": "run",
    "paceline run --n": "run",
    "paceline nothing ": None,
    "paceline run 'a quo": "run",
}


@pytest.mark.parametrize("line", VERBS_OF)
def test_the_command_of_a_line(line, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert verb_asked_for(VERBS) == VERBS_OF[line]


def test_no_shell_is_one_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
    assert not Path("tcsh").exists()
