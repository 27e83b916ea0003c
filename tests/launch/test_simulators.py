"""Child processes that try out steps: how many there are, what they are handed, and that none is left."""

from __future__ import annotations

import os
import textwrap

import psutil
import pytest

from paceline.launch.simulators import ProfileRequest, Simulators
from paceline.nouns.errors import WorkloadError

CHILD = """
import json, os, sys, time
from pathlib import Path
from paceline.launch.simulators import handed_requests

requests = handed_requests()
folder, file = Path(sys.argv[1]), sys.argv[2]
assert sys.stdin.read() == "", "the user's file finds an empty standard input"
for request in requests:
    name, number = request["name"], request["number"]
    if name == "wait":
        time.sleep(600)
    if name == "die":
        sys.exit("out of luck")
    print("a line of a library")
    if name == "refuse":
        answer = {"number": number, "error": {"asked": "a", "found": "b", "fix": "c"}}
    else:
        path = folder / f"{number}.txt"
        path.write_text(f"{name} {os.getpid()}")
        answer = {"number": number, "path": str(path)}
    time.sleep(0.05)
    print(json.dumps(answer), flush=True)
"""


class Watcher:
    def __init__(self):
        self.told = []

    def begins(self, part, number):
        self.told.append(("begins", part, number))

    def ends(self, number):
        self.told.append(("ends", number))

    def shows(self):
        pass


class Interrupted(Watcher):
    def shows(self):
        raise KeyboardInterrupt


def requests(*names):
    return [ProfileRequest({}, 0, "cpu", name=name) for name in names]


@pytest.fixture
def simulators(tmp_path, monkeypatch):
    """Two of them, also where there is one core."""
    (tmp_path / "child_of_test.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    before = set(psutil.Process().children())
    with Simulators("child_of_test", ["file.py"], lambda path: path.read_text().split()) as made:
        yield made
    assert set(psutil.Process().children()) <= before
    assert not os.path.exists(made.folder.name)


@pytest.mark.slow
def test_simulators_answer_in_order_and_reuse_their_children(simulators):
    watcher = Watcher()
    (alone,) = simulators.ask(requests("a"), watcher)
    assert len(simulators.children) == 1
    answers = simulators.ask(requests(*"abcdef"), watcher, more=True)
    assert [name for name, _ in answers] == list("abcdef")
    processes = {process for _, process in answers}
    assert len(processes) == 2, "each imports torch once, whatever it is asked"
    assert alone[1] in processes
    assert sorted(told[-1] for told in watcher.told if told[0] == "ends") == [0, 0, 1, 2, 3, 4, 5]
    assert simulators.ask([], watcher) == []


@pytest.mark.slow
def test_a_refusal_is_one_answer_and_a_death_ends_all(simulators):
    first, second = simulators.ask(requests("refuse", "a"), Watcher())
    assert (first.asked, first.found, first.fix) == ("a", "b", "c")
    assert second[0] == "a"
    with pytest.raises(WorkloadError, match="out of luck"):
        simulators.ask(requests("a", "die", "b"), Watcher())


@pytest.mark.slow
def test_an_interruption_leaves_no_process(simulators):
    with pytest.raises(KeyboardInterrupt):
        simulators.ask(requests("wait", "wait", "wait"), Interrupted())
