"""Processes forked from one that has imported torch are as those that are started: descriptors, codes, ends."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from paceline.launch.process_template import Template

SHOW = """
import json, os, sys, torch
state = {"arguments": sys.argv[1:], "name": __name__, "mark": os.environ.get("MARK")}
state["threads"] = torch.get_num_threads()
state["parent"], state["is_leader"] = os.getppid(), os.getsid(0) == os.getpid()
os.write(int(sys.argv[1]), json.dumps(state).encode())
print("said")
print("told", file=sys.stderr)
if sys.argv[2] == "waits":
    import time; time.sleep(60)
if sys.argv[2] == "raises":
    raise KeyError("zeros")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "shown.py").write_text(SHOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        with Template([]) as made:
            yield made


def show(template, tmp_path, word):
    """The process, and what it found."""
    reading, writing = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARK": word}
    with (tmp_path / "out.txt").open("w") as out, (tmp_path / "err.txt").open("w") as err:
        command = [sys.executable, "-m", "shown", str(writing), word]
        process = template.start(command, env=environment, stdout=out.fileno(), stderr=err.fileno(), pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = "{}" if word == "waits" else pipe.read()
    return process, json.loads(found)


def test_it_is_as_one_that_was_started(template, tmp_path):
    process, found = show(template, tmp_path, "3")
    assert process.wait() == 3
    assert process.wait() == 3
    arguments = found.pop("arguments")
    assert arguments[1] == "3"
    expected = {"name": "__main__", "threads": 1, "mark": "3", "parent": os.getpid(), "is_leader": True}
    assert found == expected
    assert (tmp_path / "out.txt").read_text() == "said\n"
    assert (tmp_path / "err.txt").read_text() == "told\n"


def test_an_exception_has_its_traceback(template, tmp_path):
    process, _ = show(template, tmp_path, "raises")
    assert process.wait() == 1
    assert (tmp_path / "err.txt").read_text().rstrip().endswith("KeyError: 'zeros'")


def test_it_can_be_killed(template, tmp_path):
    process, _ = show(template, tmp_path, "waits")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # nothing, once it was waited for
