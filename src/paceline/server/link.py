"""A worker's connection to its servers: a thread of its own pushes, pulls and says that the worker lives.

The worker's own thread calls `begin`, `step`, `read_state` and `end`, and waits in them.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.nouns.errors import PacelineError, PeerLostError
from paceline.server import setup
from paceline.server.coordinator.absences import silence_s
from paceline.server.layout import Segment, ServerLayout, most_state_bytes
from paceline.server.protocol.client import Client, Session
from paceline.server.protocol.messages import COORDINATOR, Configuration, Node, Pulled, Pushed, Stale
from paceline.server.settings import JobSettings
from paceline.server.tensors import FlatTensor, bytes_of, views_of
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import HEARTBEAT_S, Peers, addresses_of, every

SOON_S = 0.1
REPEAT_S = (2.0, 60.0)  # what has no answer is said again after so long; each time later, up to
ALONE_S = 60.0  # without coordinator or server before a worker gives up
ASK_S = 2.0  # of silence before it is asked for a sign of life
GOODBYE_S = 5.0  # for the coordinator to take a worker's last word
_WAKE_S = 0.1  # so that a signal is seen while the worker waits


@dataclass(frozen=True, slots=True)
class Answer:
    """A step may begin: its number, and what the servers say of the one before."""

    clock: int
    notes: list[dict[str, Any] | None]  # by range


class Link(Peers):
    """One worker's.

    Args:
        coordinator: where it is.
        name: the worker's number.
        layout: of what it trains.
        settings: its part of the job's: steps, clip_norm, implementation, is_strict.
        first: makes a range's first content, called if this worker is to hand it out.
    """

    def __init__(
        self,
        coordinator: Address,
        name: int,
        layout: ServerLayout,
        settings: dict[str, Any],
        first: Callable[[Sequence[Segment]], bytes],
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(credentials)
        self.addresses[COORDINATOR] = coordinator
        self.name, self.incarnation = name, -1
        self.layout, self.settings, self.first = layout, settings, first
        self.session: Session | None = None
        self.ranges: list[list[Segment]] = []
        self.values: list[FlatTensor] = []
        self.gradients: list[FlatTensor] = []
        self.job: JobSettings | None = None
        self.spare: dict[int, torch.Tensor] = {}
        self.answer: Answer | None = None  # None while the worker's thread waits
        self.latest: Answer | None = None
        self.taken: Answer | None = None  # what the worker's thread computes from
        self.states: dict[int, Any] = {}
        self.state_request = 0
        self.known: dict[int, Configuration] = {}  # by range, also before the job's start
        self.handed_out: set[tuple[int, int]] = set()  # ranges and servers that it gave their first content
        self.is_here = threading.Event()  # an answer, a state or an error
        self.error: BaseException | None = None
        self.progress_s = self.repeated_s = self.seen_s = time.monotonic()
        self.repeat_after_s = REPEAT_S[0]
        self.waited_s = {"network": 0.0, "others": 0.0}
        self.sent_s = self.pushed_s = 0.0
        self.is_leaving = False
        self.waiting_since_s: float | None = None  # the worker's thread
        self.coordinator_s = self.asked_s = 0.0  # when the coordinator was heard, and asked
        self.patience_s = 2 * silence_s(os.environ)  # twice: a coordinator that is back after long is not given up
        self.counted = 0  # gradients of all workers that have counted
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="paceline-link", daemon=True)

    # --- the worker's thread

    def begin(self) -> Answer:
        """Join the job, and read its parameters.

        Raises:
            PacelineError: the servers refuse this worker, or are not there.
        """
        self.thread.start()
        return self._wait_for_answer()

    def step(self, notes: Sequence[Sequence[dict[str, Any]]]) -> Answer:
        """Push what stands in `gradients`, and wait for the next parameters in `values`.

        Args:
            notes: by range and segment, what goes with the gradient.

        Raises:
            PeerLostError: the servers have gone.
        """
        self.answer = None
        self.loop.call_soon_threadsafe(self.call, self._push, notes, self.taken)
        return self._wait_for_answer()

    def read_state(self) -> list[bytes]:
        """Everything that the servers keep, by range."""
        self.states = {}
        self.loop.call_soon_threadsafe(self.call, self._ask_state)
        self._wait(lambda: len(self.states) == len(self.ranges))
        return [self.states[number] for number in range(len(self.ranges))]

    def end(self) -> None:
        """Leave: say that all is done, and close."""
        if not self.thread.is_alive():
            return
        done, self.is_leaving = threading.Event(), True
        self.loop.call_soon_threadsafe(lambda: self.spawn(self._say_goodbye(done)))
        done.wait(2 * GOODBYE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(2.0)

    def _wait_for_answer(self) -> Answer:
        self._wait(lambda: self.answer is not None)
        assert self.answer is not None
        self.taken = self.answer
        return self.taken

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self.waiting_since_s = time.monotonic()
        while not is_done():
            if self.error is not None:
                raise self.error
            self.is_here.wait(_WAKE_S)
            self.is_here.clear()
        self.waiting_since_s = None

    # --- the link's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self.open, COORDINATOR)
        self.loop.call_soon(lambda: self.spawn(every(HEARTBEAT_S, self._tick)))
        self.loop.run_forever()
        self.close()
        self.loop.run_until_complete(asyncio.sleep(0.05))
        self.loop.close()

    def failed(self, error: BaseException | None) -> None:
        """Tell the worker's thread."""
        self.error = self.error or error
        self.is_here.set()

    def hello(self, to: Any) -> setup.Hello:
        """Who this is; the coordinator also hears what it trains."""
        text = b""
        if to == COORDINATOR:
            text = json.dumps({"layout": json.loads(self.layout.to_json()), "settings": self.settings}).encode()
        return setup.Hello("worker", self.name, self.incarnation, "", self.layout.digest, text)

    def connected(self, peer: Any) -> None:
        """To a server: say again what it may have missed."""
        if peer != COORDINATOR:
            self._repeat()
            for number, node in sorted(self.handed_out):
                if node == peer and number not in self.known:
                    self._install(number, [node])

    def lost(self, peer: Any) -> None:
        """Try again; a server that has died is replaced by the coordinator."""
        if peer == COORDINATOR:
            self.open(COORDINATOR)

    def take(self, peer: Any, number: int, message: Any) -> None:
        """A message about range `number`."""
        if peer == COORDINATOR:
            self.coordinator_s = time.monotonic()
        if isinstance(message, setup.Status):
            return  # a sign of life, as asked for
        if isinstance(message, setup.Welcome):
            self.incarnation = message.incarnation
        elif isinstance(message, setup.StartServers):
            self._start(message)
        elif isinstance(message, setup.Addresses):
            self._take_addresses(addresses_of(message.servers))
        elif isinstance(message, setup.Install):
            self._install(number, message.nodes)
        elif isinstance(message, setup.Refused):
            kinds = {kind.__name__: kind for kind in PacelineError.__subclasses__()}
            self.failed(kinds.get(message.kind, PacelineError)(message.asked, message.found, message.fix))
        elif isinstance(message, setup.StateRead):
            if message.request == self.state_request:
                self.states[number] = bytes(message.content)
                self.is_here.set()
        else:
            self._take_protocol(number, message)

    def _take_protocol(self, number: int, message: Any) -> None:
        if isinstance(message, Configuration):
            self.known[number] = message
        if self.session is None or number >= len(self.session.clients):
            return
        if isinstance(message, Stale):
            self.loop.call_later(SOON_S, self.call, self._repeat)  # that server has not heard what this worker has
            return
        if isinstance(message, Pushed | Pulled):
            self.progress_s, self.repeat_after_s = time.monotonic(), REPEAT_S[0]
        sent, answers = self.session.on(number, message, time.monotonic())
        self.send(sent)
        if self.session.is_out and not self.session.is_done and not self.is_leaving:
            self._rejoin()
        elif answers is not None:
            self._note_waiting(answers)
            self.counted = max(self.counted, (answers[0].note or {}).get("counted", 0))
            self.latest = self.answer = Answer(self.session.clock, [answer.note for answer in answers])
            self.is_here.set()

    def _start(self, message: setup.StartServers) -> None:
        if self.session is not None:
            return  # the coordinator began again
        self.job = JobSettings.of_json(message.settings)
        self.ranges = self.layout.ranges(self.job.servers)
        self.values = [FlatTensor(self.layout, own) for own in self.ranges]
        self.gradients = [FlatTensor(self.layout, own) for own in self.ranges]
        self._new_session()

    def _new_session(self) -> None:
        assert self.job is not None
        worker = (self.name, self.incarnation)
        clients = [Client(worker, len(own), 0, self.job.steps) for own in self.ranges]
        self.session = Session(clients, is_exact=self.job.mode == "sync")
        for number, known in self.known.items():
            self._take_protocol(number, known)

    def _rejoin(self) -> None:
        """It was taken for dead: come again as another."""
        self.incarnation = -1
        self.session, self.known = None, {}
        for connection in list(self.connections.values()):  # the servers too know it by its name
            connection.close("the process ends")
        self.spawn(self._wait_for_name())

    async def _wait_for_name(self) -> None:
        while self.incarnation < 0:
            await asyncio.sleep(0.02)
        self._new_session()

    def _take_addresses(self, known: dict[Node, Address]) -> None:
        self.addresses = {COORDINATOR: self.addresses[COORDINATOR], **known}
        for peer in self.addresses:
            self.open(peer)

    def _install(self, number: int, nodes: Sequence[int]) -> None:
        content = self.first(self.ranges[number])
        self.spawn(self._send_content(number, content, nodes))

    async def _send_content(self, number: int, content: bytes, nodes: Sequence[int]) -> None:
        for node in nodes:
            while node not in self.connections:
                await asyncio.sleep(0.02)
            self.send([(node, number, setup.Install((node,), content))])
            self.handed_out.add((number, node))

    def _push(self, notes: Sequence[Sequence[dict[str, Any]]], seen: Answer | None) -> None:
        session = self.session
        if self.latest is not seen:  # taken for dead while it computed, it has come again: this gradient is too old
            self.answer = self.latest
            self.is_here.set()
            return
        if session is None or session.is_out or not session.answers:
            return  # it reads what the others have done
        self.pushed_s, self.sent_s = time.monotonic(), 0.0
        gradients = [list(zip(own, flat.whole, strict=True)) for own, flat in zip(notes, self.gradients, strict=True)]
        self.send(session.push(gradients))

    def _ask_state(self) -> None:
        self.state_request += 1
        for number, known in self.known.items():
            if number not in self.states and known.chain:
                self.send([(known.chain[-1], number, setup.ReadState(self.state_request))])
        if len(self.states) < len(self.ranges):
            self.loop.call_later(2.0, self.call, self._ask_state_again, self.state_request)

    def _ask_state_again(self, request: int) -> None:
        if request == self.state_request and len(self.states) < len(self.ranges):
            self._ask_state()

    async def _say_goodbye(self, done: threading.Event) -> None:
        """Until the coordinator has taken it: what a process that ends has written may be lost with its connection."""
        deadline_s = time.monotonic() + GOODBYE_S
        if self.session is not None:
            self.send([(COORDINATOR, 0, setup.Status(json.dumps(self.status()).encode()))])
            self.send(self.session.heartbeat(self.is_leaving))
            while not self.session.is_out and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
        done.set()

    def _note_waiting(self, answers: Sequence[Pulled]) -> None:
        """What a step waited for: its own bytes on the wire, or other workers."""
        if self.pushed_s:
            now = time.monotonic()
            sent = self.sent_s or now
            self.waited_s["network"] += sent - self.pushed_s
            self.waited_s["others"] += now - sent

    def _tick(self) -> None:
        now = time.monotonic()
        for peer in [COORDINATOR] if self.incarnation < 0 else list(self.addresses):
            self.open(peer)
        if not self.connections and now - self.seen_s > ALONE_S:
            self.failed(
                PeerLostError(
                    "the parameter servers",
                    f"none has answered for {ALONE_S:g} s",
                    "see whether they run",
                )
            )
        if self.connections:
            self.seen_s = now
        self._watch_coordinator(now)
        self._watch_ranges(now)
        if self.session is None:
            return
        if not self.sent_s and all(connection.is_idle for connection in self.connections.values()):
            self.sent_s = now
        self.send(self.session.heartbeat(self.is_leaving))
        self.send([(COORDINATOR, 0, setup.Status(json.dumps(self.status()).encode()))])
        if self.answer is None and now - max(self.progress_s, self.repeated_s) > self.repeat_after_s:
            self.repeated_s = now
            self.repeat_after_s = min(2 * self.repeat_after_s, REPEAT_S[1])
            self._repeat()

    def _watch_ranges(self, now: float) -> None:
        """A worker and a server were lost before a step was complete: some ranges have applied it, others can't.

        The worker that takes the place of the lost one can't compute the gradient: the step's parameters are gone.
        """
        session = self.session
        if session is None or not session.is_exact or session.differ_since_s is None:
            return
        if now - session.differ_since_s > self.patience_s:
            self.failed(
                PeerLostError(
                    f"worker {self.name} should compute the step that a lost process left unfinished",
                    "some servers have already applied that step: a worker and a server were lost in it",
                    "--resume goes on from the last checkpoint, where there is one",
                )
            )

    def _watch_coordinator(self, now: float) -> None:
        """While the worker waits: without the coordinator nobody is replaced, and the wait may have no end."""
        if self.waiting_since_s is None:
            return
        silent_s = now - max(self.coordinator_s, self.waiting_since_s)
        if silent_s > self.patience_s:
            self.failed(
                PeerLostError(
                    "the coordinator of the parameter servers",
                    f"it has not answered for {self.patience_s:g} s, in which this worker waited",
                    "see whether its process is stopped; --resume goes on from the last checkpoint, where there is one",
                )
            )
        elif silent_s > ASK_S and now - self.asked_s > ASK_S:
            self.asked_s = now
            self.send([(COORDINATOR, 0, setup.AskStatus())])

    def _repeat(self) -> None:
        if self.session is not None:
            self.send(self.session.repeat(time.monotonic()))

    def status(self) -> dict[str, Any]:
        """What a person may want to know of this worker."""
        known = self.connections.values()
        waited = {f"waited_for_{cause}_s": round(seconds, 3) for cause, seconds in self.waited_s.items()}
        is_waiting = self.answer is None
        return {
            **waited,
            "pid": os.getpid(),
            "counted": self.counted,
            "is_waiting": is_waiting,
            "bytes_sent": sum(connection.bytes_sent for connection in known),
            "bytes_received": sum(connection.bytes_received for connection in known),
        }

    # --- Endpoint

    def destination(self, connection: Connection, number: int, message: Any, nbytes: int) -> tuple[Any, memoryview]:
        """Where a payload goes: parameters that are waited for, to their place."""
        if isinstance(message, Pulled) and number < len(self.values) and self.session is not None:
            flat = self.values[number].memory
            if nbytes != flat.numel():
                raise FrameError(f"parameters of {nbytes} bytes, not {flat.numel()}")
            if self.session.clients[number].expects(message):
                return flat, bytes_of(flat)
            spare = self.spare.setdefault(number, torch.empty_like(flat))
            return None, bytes_of(spare)
        if isinstance(message, setup.StateRead) and number < len(self.ranges):
            if nbytes > most_state_bytes(self.ranges[number]):
                raise FrameError(f"a state of {nbytes} bytes")
            content = bytearray(nbytes)
            return content, memoryview(content)
        return super().destination(connection, number, message, nbytes)

    def views(self, payload: Any) -> Sequence[memoryview]:
        """The bytes of a payload."""
        return views_of(payload)
