"""Frames: every message comes back as it was sent, and nothing else is let in."""

from __future__ import annotations

import dataclasses
import os
import random
import tracemalloc

import msgpack
import numpy as np
import pytest

from paceline.server import setup
from paceline.server.protocol import messages
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import (
    FORMS,
    KINDS,
    PREFIX,
    FrameError,
    Prefix,
    payload_of,
    read_header,
    read_prefix,
    with_payload,
    write_frame,
)

FUZZED = int(os.environ.get("PACELINE_FRAMES", "100000"))
NOTE = {"loss": 1.5, "weight": 32.0, "flags": 1, "absent": [3], "settings": {"lr": 0.1, "betas": [0.9, 0.999]}}
WORKER, CLOCKS = (3, 1), {(0, 0): 4, (3, 1): 5}
UPDATE = messages.Update(2, ((WORKER, 4), ((0, 0), 4)), NOTE, b"xyz", 0.5, 2.25)
EXAMPLES = [
    messages.Configuration(7, (1, 2), CLOCKS, (2, 6), 5, (1,)),
    messages.Configuration(0, (), {}, None, -1, ()),
    messages.Push(1, WORKER, 4, 2, 60, NOTE, b"xyz"),
    messages.Pushed(1, 4, 2),
    messages.Pull(1, WORKER, 9, 5),
    messages.Pulled(1, 9, 5, 61, NOTE, b"values"),
    messages.Pulled(1, 9, 5, 61, None, b"values"),
    messages.Stale(1),
    messages.Forward(1, 60, UPDATE),
    messages.Forwarded(1, 60),
    messages.Missing(1, 60),
    messages.State(1, 60, {0: CLOCKS, 1: {}}, {0: 5, 1: 4}, {4: 0.5}, NOTE, b"content"),
    messages.Partial(1, 4, 0.25, True),
    messages.Heartbeat(2, 1, -1),
    messages.WorkerHeartbeat(WORKER, 1, 4, False),
    setup.Hello("worker", 3, -1, "", "abc", b"layout"),
    setup.Welcome(3, 1),
    setup.StartServers("{}", b"layout"),
    setup.Addresses("{}"),
    setup.Install((1, 2), b"content"),
    setup.Installed(1),
    setup.ReadState(4),
    setup.StateRead(4, b"content"),
    setup.Refused("PlanError", "a", "b", "c"),
    setup.AskStatus((-1, 0)),
    setup.Status(b"{}"),
]


def encoded(message, number=3):
    payload = payload_of(message) or b""
    return write_frame(number, message, len(payload)) + payload


class End:
    """Takes what a connection hands on."""

    def __init__(self):
        self.came, self.lost, self.largest = [], "", 0

    def check_may_send(self, connection, kind, nbytes):
        """Everything."""

    def destination(self, connection, number, message, nbytes):
        if nbytes > 4096:
            raise FrameError("too long")
        self.largest = max(self.largest, nbytes)
        place = bytearray(nbytes)
        return place, memoryview(place)

    def views(self, payload):
        return [memoryview(payload)]

    def on_open(self, connection):
        """Nothing."""

    def on_message(self, connection, number, message):
        self.came.append((number, message))

    def on_lost(self, connection, why):
        self.lost = why


class Transport:
    """Takes what a connection sends."""

    def __init__(self):
        self.sent, self.is_aborted = bytearray(), False

    def set_write_buffer_limits(self, high):
        """Nothing."""

    def write(self, view):
        self.sent += view

    def abort(self):
        self.is_aborted = True


def opened():
    end, transport = End(), Transport()
    connection = Connection(end)
    connection.connection_made(transport)
    return connection, end, transport


def feed(connection, content):
    """As a socket would: in pieces that the connection has room for."""
    while content and not connection.is_closed:
        room = connection.get_buffer(-1)
        taken = min(len(room), len(content))
        room[:taken] = content[:taken]
        content = content[taken:]
        connection.buffer_updated(taken)


def test_there_is_an_example_of_every_message():
    assert {type(one) for one in EXAMPLES} == KINDS.keys()


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_comes_as_it_was_sent(message):
    ours, _, wire = opened()
    theirs, end, _ = opened()
    ours.send(3, message)
    feed(theirs, bytes(wire.sent))
    assert end.came == [(3, message)]


def test_frames_in_any_pieces():
    ours, _, wire = opened()
    for message in EXAMPLES:
        ours.send(1, message)
    theirs, end, _ = opened()
    content, draws = bytes(wire.sent), random.Random(0)
    while content:
        size = draws.randrange(1, 40)
        feed(theirs, content[:size])
        content = content[size:]
    assert [message for _, message in end.came] == EXAMPLES


PUSH = EXAMPLES[2]
HEADER = [1, [3, 1], 4, 2, 60, NOTE]


def push_with(header, **prefix):
    content = msgpack.packb(header)
    facts = {"magic": b"PCLN", "version": 1, "kind": KINDS[messages.Push], "range": 0, "length": len(content), **prefix}
    return PREFIX.pack(*facts.values(), 3) + content + b"xyz"


@pytest.mark.parametrize(
    "frame",
    [
        push_with(HEADER, magic=b"HTTP"),
        push_with(HEADER, version=2),
        push_with(HEADER, kind=99),
        push_with(HEADER, kind=0),
        push_with(HEADER, length=2**16 + 1),
        PREFIX.pack(b"PCLN", 1, KINDS[messages.Pull], 0, 10, 2**40),
        PREFIX.pack(b"PCLN", 1, KINDS[messages.Push], 0, 0, 0),
        push_with(HEADER[:-1]),
        push_with([*HEADER, 1]),
        push_with({"epoch": 1}),
        push_with([True, *HEADER[1:]]),
        push_with([-2, *HEADER[1:]]),
        push_with([2**60, *HEADER[1:]]),
        push_with([1, [3], *HEADER[2:]]),
        push_with([1, [3, "1"], *HEADER[2:]]),
        push_with([*HEADER[:-1], {**NOTE, "code": "import os"}]),
        push_with([*HEADER[:-1], {name: value for name, value in NOTE.items() if name != "weight"}]),
        push_with([*HEADER[:-1], None]),
        push_with([*HEADER[:-1], {**NOTE, "loss": float("nan")}]),
        push_with([*HEADER[:-1], {**NOTE, "settings": {"lr": "0.1"}}]),
        push_with([*HEADER[:-1], {**NOTE, "settings": {"lr": [[0.1]]}}]),
        push_with([*HEADER[:-1], msgpack.ExtType(5, b"evil")]),
        push_with(HEADER, length=3),
    ],
)
def test_what_is_no_frame_closes_the_connection(frame):
    connection, end, transport = opened()
    feed(connection, frame)
    assert transport.is_aborted
    assert not end.came
    assert connection.reason.startswith("a wrong frame")


@pytest.mark.slow
def test_fuzzed_frames():
    """Frames with bytes changed, cut, put in and doubled: each is a message or the end, and no room beyond the caps."""
    draws = random.Random(1)
    frames = [encoded(message) for message in EXAMPLES]
    longest, refused = 0, 0
    for _ in range(FUZZED):
        content = bytearray(draws.choice(frames))
        for _ in range(draws.choice([1, 1, 2, 8])):
            at = draws.randrange(len(content))
            act = draws.randrange(4)
            if act == 0:
                content[at] = draws.randrange(256)
            elif act == 1:
                content[at] ^= 1 << draws.randrange(8)
            elif act == 2:
                del content[at : at + draws.randrange(1, 9)]
            else:
                content[at:at] = draws.randbytes(draws.randrange(1, 9))
            content = content or bytearray(b"x")
        connection, end, transport = opened()
        feed(connection, bytes(content))
        longest = max(longest, end.largest, len(connection.target))
        refused += transport.is_aborted
        assert all(type(message) in KINDS for _, message in end.came)
    assert longest <= 2**24
    assert refused > FUZZED // 10


def test_a_number_of_numpy_comes_as_one_of_python():
    sent = dataclasses.replace(PUSH, note={**NOTE, "settings": {"lr": np.float64(0.1), "betas": (np.float64(0.9), 1)}})
    content = encoded(sent)
    prefix = read_prefix(content[: PREFIX.size])
    came = read_header(prefix, content[PREFIX.size : PREFIX.size + prefix.header_bytes])
    assert came.note["settings"] == {"lr": 0.1, "betas": [0.9, 1]}
    assert type(came.note["settings"]["lr"]) is float
    with pytest.raises(TypeError, match="object can't be sent"):
        encoded(dataclasses.replace(PUSH, note={**NOTE, "settings": {"lr": object()}}))


HEADERS = {  # as version 1 has them on the wire
    "Pull": "94019203010905",
    "Heartbeat": "930201ff",
    "WorkerHeartbeat": "949203010104c2",
    "AskStatus": "9192ff00",
    "Missing": "92013c",
    "Forward": (
        "93013c950292930301049300000485a46c6f7373cb3ff8000000000000a6776569676874cb4040000000000000a5666c"
        "61677301a6616273656e749103a873657474696e677382a26c72cb3fb999999999999aa5626574617392cb3feccccccc"
        "cccccdcb3feff7ced916872bcb3fe0000000000000cb4002000000000000"
    ),
    "State": (
        "96013c9292930000049303010590920504919204cb3fe000000000000085a46c6f7373cb3ff8000000000000a6776569"
        "676874cb4040000000000000a5666c61677301a6616273656e749103a873657474696e677382a26c72cb3fb999999999"
        "999aa5626574617392cb3feccccccccccccdcb3feff7ced916872b"
    ),
    "Partial": "940104cb3fd0000000000000c3",
    "Configuration": "9607920102929300000493030105920206059101",
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_wire_format_stays(name):
    message = next(one for one in EXAMPLES if type(one).__name__ == name)
    assert write_frame(3, message, 0)[PREFIX.size :].hex() == HEADERS[name]


LONG = {
    "a chain": (messages.Configuration, b"\x96\x01\xdd\xff\xff\xff\xff"),
    "workers": (messages.Configuration, b"\x96\x01\x90\xdd\xff\xff\xff\xff"),
    "segments": (messages.State, b"\x96\x01\x02\xdd\xff\xff\xff\xff"),
    "clocks": (messages.State, b"\x96\x01\x02\x91\xdd\xff\xff\xff\xff"),
    "a note": (messages.Pulled, b"\x95\x01\x02\x03\x04\xdf\xff\xff\xff\xff"),
    "settings": (messages.Pulled, b"\x95\x01\x02\x03\x04\x81\xa8settings\xdf\xff\xff\xff\xff"),
    "a setting": (messages.Pulled, b"\x95\x01\x02\x03\x04\x81\xa8settings\x81\xa1a\xdd\xff\xff\xff\xff"),
    "a text": (setup.Addresses, b"\x91\xdb\xff\xff\xff\xff"),
    "fields": (setup.Addresses, b"\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("case", LONG)
def test_a_length_that_is_only_claimed_takes_no_memory(case):
    kind, header = LONG[case]
    tracemalloc.start()
    with pytest.raises(FrameError, match="with a wrong header: "):
        read_header(Prefix(KINDS[kind], 0, len(header), 0), header)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20


def test_every_header_has_a_cap():
    for kind, form in FORMS.items():
        prefix = PREFIX.pack(b"PCLN", 1, kind, 0, form.header_bytes + 1, 0)
        with pytest.raises(FrameError):
            read_prefix(prefix)


def test_a_payload_takes_the_place_of_the_last_field():
    prefix = read_prefix(encoded(PUSH)[: PREFIX.size])
    header = encoded(PUSH)[PREFIX.size : PREFIX.size + prefix.header_bytes]
    assert with_payload(read_header(prefix, header), b"xyz") == PUSH
    forward = EXAMPLES[8]
    assert payload_of(dataclasses.replace(forward)) == b"xyz"
