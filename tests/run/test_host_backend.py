"""What comes over a connection: lines, long and torn ones, and a host that speaks of ranks that are not its own."""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile

import pytest

from paceline.launch.local import RankSettings
from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.run.failures import EXITED_EARLY
from paceline.run.supervise.host_backend import MOST_BYTES, Lines, Listening, RemoteBackend


def all_lines(pieces, most=MOST_BYTES):
    reading, writing = os.pipe()
    lines, found = Lines(reading, most), []
    for piece in pieces:
        os.write(writing, piece)
        found += lines.read()
    os.close(writing)
    found += lines.read()
    os.close(reading)
    assert lines.is_over
    return found


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc"], ["ab", "c"]),
        ([b"1%\r2%", b"\r3%", b"\n"], ["3%"]),
        ([b"done\r", b"\n"], ["done\r"]),
        ([b"\xff\n"], ["\ufffd"]),
        ([b"0123456789\n"], ["6789"]),
        ([b"01234567", b"89"], ["6789"]),
    ],
)
def test_lines(pieces, lines):
    assert all_lines(pieces, 4 if b"0123" in pieces[0] else MOST_BYTES) == lines


class HostEvents:
    def __init__(self):
        self.heard = []

    def on_started(self, pids):
        self.heard.append(("started", pids))

    def on_ended(self, rank, status):
        self.heard.append(("ended", rank, status))

    def on_output(self, rank, text):
        self.heard.append(("output", rank, text))

    def on_lost(self, backend):
        self.heard.append(("lost",))


def heard_from(messages):
    """What a supervisor hears of a host with the ranks 2 and 3 that writes this."""
    program = "import sys; sys.stdin.readline(); sys.stdin.readline(); sys.stdout.write(open(sys.argv[1]).read())"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(line + "\n" for line in messages))
        file.flush()
        backend = RemoteBackend("h2", [sys.executable, "-c", program, file.name], {})
        backend.start(_settings())
        listening, events = Listening(), HostEvents()
        backend.listen(listening.register, events)
        while listening.open:
            listening.turn(1.0)
        backend.close()
        listening.close()
    return events.heard


def _settings():
    return RankSettings("f.py", [], 4, HostRanks("h2", 2, 2, 1, 2), Rendezvous(), "/run/job", None, [], 0, "")


def test_a_host_speaks_of_its_own_ranks_alone():
    text = base64.b64encode(b"hello").decode()
    own = [
        {"started": {"2": 7, "3": 8}},
        {"output": 3, "text": text},
        {"ended": 2, "status": 0},
        {"ended": 3, "status": EXITED_EARLY},
    ]
    heard = heard_from(map(json.dumps, own))
    assert heard == [
        ("started", {2: 7, 3: 8}),
        ("output", 3, "hello"),
        ("ended", 2, 0),
        ("ended", 3, EXITED_EARLY),
        ("lost",),
    ]
    for foreign in (
        {"started": {"0": 7}},
        {"output": 1, "text": text},
        {"ended": 4, "status": 0},
        {"ended": "x"},
        [],
        7,
    ):
        heard = heard_from([json.dumps(foreign)])
        assert [kind for kind, *_ in heard] == ["output", "lost"], foreign
        assert heard[0][1] == 2
        assert heard[0][2].startswith("(h2) ")


def test_the_longest_line_of_a_rank_comes_whole():
    text = "x" * MOST_BYTES
    heard = heard_from([json.dumps({"output": 2, "text": base64.b64encode(text.encode()).decode()})])
    assert heard[0] == ("output", 2, text)
