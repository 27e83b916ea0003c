"""A command whose output nobody takes ends as other commands do, without a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.cli.main import main

from support.jobs import command

FILE = "import paceline\n"
COMMANDS = [
    ["run", "--dry-run", "-n", "2", "train.py"],
    ["run", "--json", "--plan", "zero=3", "train.py"],
    ["run", "--help"],
    ["explain"],
    ["explain", "--json"],
    ["doctor", "--quick", "--json"],
    ["server", "credentials", "folder"],
    ["--version"],
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(FILE)
    return tmp_path


def ended(folder, words, out):
    """How a command ends whose output goes to `out`, and what it says on standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command(*words), cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_a_command_quietly(words, folder):
    reader, writer = os.pipe()
    os.close(reader)
    code, said = ended(folder, words, writer)
    os.close(writer)
    assert code == 141
    assert "can't be written" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["explain"], ["explain", "--json"], ["run", "--help"]], ids=" ".join)
def test_a_full_disk_is_told(words, folder):
    with Path("/dev/full").open("w") as full:
        code, said = ended(folder, words, full)
    assert (code, said) == (1, "paceline: standard output can't be written (No space left on device)\n")


def test_no_output_at_all(folder):
    """`>&-`: Python has no stdout then."""
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command("explain")], cwd=folder, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_pipe_in_the_middle_is_no_error_of_the_command(folder, monkeypatch, capsys):
    """Without a buffer the first print fails, not the last."""

    def lost(text):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.chdir(folder)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout.write", lost)
        code = main(["explain"])
    assert code == 141
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_not_taken_for_the_output(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("paceline.cli.explain_command.run", broken)
    with pytest.raises(BrokenPipeError):
        main(["explain"])
