"""What another process of a job says is held against its form before anything is done with it."""

from __future__ import annotations

import asyncio
import json

import pytest

from paceline.nouns.errors import PacelineError, PeerLostError, PlanError
from paceline.server import setup
from paceline.server.server_layout import Entry, ServerLayout
from paceline.server.settings import JobSettings
from paceline.server.status import look
from paceline.server.transport.address import Address
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import Peers, addresses_of, facts_of

JOB = json.loads(JobSettings(2, 2).to_json())
GATHERING = {"job": JOB, "state": "gathering", "servers": {}, "here": []}
WORKER = {"worker": 0, "incarnation": 0, "clock": 3, "is_in": True, "is_done": False, "silent_s": 0.5}
TRAINING = {**GATHERING, "state": "training", "workers": [WORKER], "chains": []}


class Coordinator(Peers):
    """Says whatever it is told to."""

    def __init__(self, answer):
        super().__init__(None)
        self.answer = answer

    def check_may_send(self, connection, kind, nbytes):
        """Whoever asks is answered."""

    def on_message(self, connection, number, message):
        if isinstance(message, setup.AskStatus):
            connection.send(0, setup.Status(self.answer))


def looked_at(answer, tmp_path):
    async def ask():
        coordinator = Coordinator(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
        address = Address.parse(f"unix:{tmp_path}/c")
        await coordinator.listen(address)
        try:
            return await look(address)
        finally:
            coordinator.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("answer", [GATHERING, TRAINING])
def test_a_coordinators_answer_is_taken(answer, tmp_path):
    assert looked_at(answer, tmp_path) == {**answer, "nodes": []}


ODD = {
    "nothing": {},
    "no state": {**GATHERING, "state": None},
    "no job": {**GATHERING, "job": {}},
    "a job of text": {**GATHERING, "job": {**JOB, "workers": "2"}},
    "servers as a list": {**GATHERING, "servers": []},
    "a server that is no number": {**GATHERING, "servers": {"x": "unix:/tmp/a"}},
    "a server of 5,000 digits": {**GATHERING, "servers": {"9" * 5000: "unix:/tmp/a"}},
    "a server that is nowhere": {**GATHERING, "servers": {"0": "a:b:c"}},
    "nobody": {**GATHERING, "here": None},
    "workers without clocks": {**TRAINING, "workers": [{"worker": 0}]},
    "no chains": {**TRAINING, "chains": None},
}


@pytest.mark.parametrize("case", ODD)
def test_a_coordinators_answer_of_another_form_is_one_error(case, tmp_path):
    with pytest.raises(PeerLostError, match="it says something else") as caught:
        looked_at(ODD[case], tmp_path)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[]", b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_is_no_object_ends_the_connection(content):
    with pytest.raises(FrameError):
        facts_of(content)


@pytest.mark.parametrize(
    "content", ['{"x": "unix:/a"}', '{"1": 5}', '{"-1": "unix:/a"}', '{"1": "h:99999999"}', "[" * 10**5]
)
def test_what_are_no_addresses_ends_the_connection(content):
    with pytest.raises(FrameError):
        addresses_of(content)


SETTINGS = {
    "servers": [0, -1, "2", 10**9, None],
    "workers": [0, True, 10**9],
    "deadline": ["x", None],
    "steps": [-1, 1.5, 10**30],
    "clip_norm": ["1"],
    "implementation": [[], None],
    "is_strict": [1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values])
def test_a_jobs_settings_of_other_kinds_are_refused(name, value):
    with pytest.raises(PlanError, match=name):
        JobSettings.of_json(json.dumps({**JOB, name: value}))


LAYOUT = json.loads(ServerLayout((Entry("w", (8,), "float32", 0),), "SGD", ({"lr": 0.1},), 24).to_json())
ENTRY = LAYOUT["entries"][0]
LAYOUTS = [
    {},
    {**LAYOUT, "entries": {}},
    {**LAYOUT, "entries": [{**ENTRY, "shape": [10**15]}]},
    {**LAYOUT, "entries": [{**ENTRY, "shape": [10**15] * 1000}]},
    {**LAYOUT, "entries": [{**ENTRY, "shape": [-1]}]},
    {**LAYOUT, "entries": [{**ENTRY, "shape": [True]}]},
    {**LAYOUT, "entries": [{**ENTRY, "dtype": "int8"}]},
    {**LAYOUT, "entries": [{**ENTRY, "group": 1}]},
    {**LAYOUT, "entries": [ENTRY, {**ENTRY, "shape": [2**38]}]},
    {**LAYOUT, "samples": "24"},
    {**LAYOUT, "groups": [3]},
]


@pytest.mark.parametrize("value", LAYOUTS, ids=range(len(LAYOUTS)))
def test_a_layout_that_no_model_has_is_refused(value):
    with pytest.raises(ValueError, match="layout") as caught:
        ServerLayout.of_json(json.dumps(value))
    assert isinstance(caught.value, PacelineError)


@pytest.mark.parametrize(
    "text", ["h:" + "9" * 5000, "h:\u0661", "h:-1", ":5", "unix:", "unix:a\0b", "unix:" + "x" * 10**5]
)
def test_what_is_no_address_is_one_error(text):
    with pytest.raises(PacelineError) as caught:
        Address.parse(text)
    assert len(str(caught.value)) < 600
