"""What ranks print reaches the screen whatever its encoding is, and a screen that takes nothing ends no job."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from paceline.run.rank_output import parse_line
from paceline.run.supervise.progress import Screen, WorkProgress, encodable

from support.jobs import LOOP, STEPS, command, leftovers, losses, marked, wait_for, write_workload


def screen_of(out, status=None):
    return Screen(out, status or io.StringIO())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16"])
def test_a_line_is_shown_in_every_encoding(encoding):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding)
    screen_of(out).show_output(1, "loss → \udcff ok")
    assert raw.getvalue().decode(encoding).startswith("[1] loss ")
    assert raw.getvalue().decode(encoding).endswith(" ok\n")


def test_only_what_an_encoding_lacks_is_escaped():
    assert encodable("Zürich →", "latin-1") == "Zürich \\u2192"
    assert encodable("Zürich →", "utf-8") == "Zürich →"
    assert encodable("Zürich →", None) == "Zürich →"


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_takes_nothing_is_given_up_once_and_said():
    status = io.StringIO()
    screen = screen_of(Full(), status)
    for _ in range(3):
        screen.show_output(0, "hello")
    assert status.getvalue().count("standard output can't be written (No space left on device)") == 1
    screen.say("still here")
    assert status.getvalue().endswith("still here\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_most", [False, True])
def test_what_a_command_works_at_how_fast_and_for_how_long_still(monkeypatch, is_most):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    at = [0.0]
    with WorkProgress("steps", lambda: at[0]) as progress:
        progress.total, progress.is_most = 4, is_most
        progress.begins("first", 0)
        at[0] = 8.0
        progress.begins("second", 1)
        at[0] = 20.0
        progress.ends(0)
    lines = sys.stderr.getvalue().splitlines()
    of, most = ("of up to", "at most ") if is_most else ("of", "")
    assert lines == ["first, second: 0:08 so far", f"1 {of} 4 steps, 3.0 a minute, {most}1:00 left: second"]


def test_other_work_is_timed_from_its_own_beginning(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    at = [0.0]
    with WorkProgress("runs", lambda: at[0]) as progress:
        progress.begins("first")
        at[0] = 100.0
        progress.begin_anew("ranks")
        assert progress.line() == "ranks: 0:00 so far"
        at[0] = 130.0
        progress.counts(1, 3)
    assert sys.stderr.getvalue() == "1 of 3 runs, 2.0 a minute, 1:00 left: ranks\n"


def test_short_work_says_nothing_where_a_line_stays(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with WorkProgress("steps", lambda: 0.0) as progress:
        progress.begins("first")
        progress.ends()
    assert sys.stderr.getvalue() == ""


def test_a_terminal_has_one_line_which_goes(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    with WorkProgress("steps", lambda: 0.0) as progress:
        progress.begins("x" * 100)
        progress.begins("second")
    written = sys.stderr.getvalue().split("\r\x1b[K")
    assert written == ["x" * 29, "second: 0:00 so far", ""]


def test_two_streams_that_take_nothing_are_both_given_up():
    screen = Screen(Full(), Full())
    screen.show_output(0, "hello")
    screen.show_progress("step 1/2", 0.0)
    screen.end()
    assert len(screen.given_up) == 2


def test_a_closed_stream_is_given_up():
    closed = io.StringIO()
    closed.close()
    screen_of(closed).show_output(0, "hello")


ODD = """
    if job.rank == 0:
        print("Z\\u00fcrich \\u2192")
        os.write(1, b"bytes \\xff\\n")
        print("surrogate \\udcff")
        print("error \\u2192", file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "encoding", "town"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1", "Zürich \\u2192"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ascii", "Z\\xfcrich \\u2192"),
        ({"PYTHONIOENCODING": "utf-8"}, "utf-8", "Zürich →"),
    ],
)
def test_a_job_prints_anything_in_every_encoding(tmp_path, environment, encoding, town):
    file = write_workload(tmp_path, loop=LOOP + ODD)
    words = command("run", "-n", "2", "--job", "a", file)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, env=marked(tmp_path, environment))
    out = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert f"[0] {town}\n" in out
    assert out.count("[0] ") == 5  # the first step was compared
    assert "[0] surrogate \\udcff" in out
    assert len(losses(tmp_path / "runs" / "a")) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [">/dev/full", ">/dev/full 2>/dev/full", ">&- 2>&- <&-", "| head -1"])
def test_a_job_trains_on_when_nobody_takes_its_output(tmp_path, redirections):
    file = write_workload(tmp_path, loop=LOOP + "        print('step', job.step_number)\n")
    line = f"{' '.join(command('run', '-n', '2', '--job', 'a', file))} {redirections}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=marked(tmp_path, {}))
    assert wait_for((tmp_path / "runs" / "a" / "result.json").exists, 60)
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["status"] == "done"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert redirections == "| head -1" or done.returncode == 0
    assert wait_for(lambda: not leftovers(tmp_path))


def test_commands_print_what_the_terminal_lacks(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = command("plan", "--plan", "Z\u00fcrich=2", "x.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("at", ["1e999", "nan", "-1", "1e300", "x", "", "9" * 500])
def test_a_line_of_no_time_is_torn(at):
    assert parse_line(f"{at} 0\tsaid\n".encode()) is None
    assert parse_line(b"1.5 0\tsaid\n") == (1.5, "0", "said")
