"""Connect a worker to its servers, by a thread that pushes, pulls and sends heartbeats while the worker computes.

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
from paceline.server.protocol.client import Client, Session
from paceline.server.protocol.messages import COORDINATOR, Configuration, Node, Pulled, Pushed, Stale
from paceline.server.range_tensors import FlatTensor, bytes_of, views_of
from paceline.server.server_layout import Segment, ServerLayout, most_state_bytes
from paceline.server.settings import JobSettings
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import HEARTBEAT_S, Peers, addresses_of, every

SOON_S = 0.1
REPEAT_S = (2.0, 60.0)  # what has no answer is said again after so long; each time later, up to
ALONE_S = 60.0  # without coordinator or server before a worker gives up
ASK_S = 2.0  # of silence before it is asked for a sign of life
GOODBYE_S = 5.0  # for the coordinator to hear that a worker leaves
_WAKE_S = 0.1  # so that a signal is seen while the worker waits


@dataclass(frozen=True, slots=True)
class Answer:
    """A step may begin: its number, and what the servers say of the one before.

    Attributes:
        clock: the step that comes next, from 0.
        notes: of the update before it, by range of parameters: `loss` and `weight`, summed over its workers, `norm` of
            its gradient before clipping (None without clipping), and others for Paceline's own use. None before the
            first update.

    Examples:
        The loss over all workers, where each of them knows its own:

        >>> from paceline.server.handle import connect
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = connect("unix:coordinator", 0, model, optimizer, steps=1)
        >>> total, count = loss(model, (x, y))
        >>> total.backward()
        >>> note = handle.push(total.item(), count).notes[0]
        >>> note["weight"], note["loss"] == total.item()
        (64.0, True)
        >>> handle.close()
    """

    clock: int
    notes: list[dict[str, Any] | None]


class Link(Peers):
    """One worker's connection to the coordinator and the servers.

    Args:
        coordinator: the coordinator's address.
        name: the worker's number.
        layout: the layout of the tensors that it trains.
        settings: the worker's part of the job's settings: steps, clip_norm, implementation, is_strict.
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
        self.name = name
        self.incarnation = -1  # until the coordinator gives it one
        self.layout = layout
        self.settings = settings
        self.first = first
        self.session: Session | None = None
        self.ranges: list[list[Segment]] = []
        self.values: list[FlatTensor] = []
        self.gradients: list[FlatTensor] = []
        self.job: JobSettings | None = None
        self.spare: dict[int, torch.Tensor] = {}  # by range, memory for parameters that nobody waits for any more
        self.answer: Answer | None = None  # None while the worker's thread waits
        self.latest: Answer | None = None
        self.waited_answer: Answer | None = None  # the one that the worker's thread computes from
        self.states: dict[int, Any] = {}  # by range, the answers to `read_state`
        self.state_request = 0
        self.configurations: dict[int, Configuration] = {}  # by range, also before the job's start
        self.handed_out: set[tuple[int, int]] = set()  # ranges and servers that it gave their first content
        self.is_here = threading.Event()  # an answer, a state or an error
        self.error: BaseException | None = None
        now = time.monotonic()
        self.progress_s = now  # when the last answer came
        self.repeated_s = now
        self.connected_s = now  # when it was last connected to anybody
        self.repeat_after_s = REPEAT_S[0]
        self.waited_s = {"network": 0.0, "others": 0.0}
        self.pushed_s = 0.0  # when the last push began
        self.sent_s = 0.0  # when all of it had left; 0 before
        self.is_leaving = False
        self.waiting_since_s: float | None = None  # the worker's thread
        self.coordinator_s = 0.0  # when the coordinator was last heard
        self.asked_s = 0.0  # when it was last asked for a sign of life
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
        # Heartbeats must go on while the worker computes, and a backward pass may take minutes: hence a thread.
        self.thread.start()
        return self._wait_for_answer()

    def step(self, notes: Sequence[Sequence[dict[str, Any]]]) -> Answer:
        """Push what stands in `gradients`, and wait for the next parameters in `values`.

        Args:
            notes: by range and segment, what goes with the gradient.

        Raises:
            PeerLostError: the servers have gone.
        """
        # Before the push is handed over: its answer may come at once.
        self.answer = None
        # asyncio's objects are not thread-safe: this thread hands its calls to the loop of the link's.
        self.loop.call_soon_threadsafe(self.call, self._push, notes, self.waited_answer)
        return self._wait_for_answer()

    def read_state(self) -> list[bytes]:
        """Return everything that the servers keep, by range."""
        self.states = {}
        self.loop.call_soon_threadsafe(self.call, self._ask_state)
        self._wait(lambda: len(self.states) == len(self.ranges))
        return [self.states[number] for number in range(len(self.ranges))]

    def end(self) -> None:
        """Tell the coordinator that this worker leaves, and close the connections."""
        if not self.thread.is_alive():
            return
        said_goodbye = threading.Event()
        self.is_leaving = True
        self.loop.call_soon_threadsafe(lambda: self.spawn(self._say_goodbye(said_goodbye)))
        said_goodbye.wait(2 * GOODBYE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(2.0)

    def _wait_for_answer(self) -> Answer:
        self._wait(lambda: self.answer is not None)
        assert self.answer is not None
        self.waited_answer = self.answer
        return self.waited_answer

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self.waiting_since_s = time.monotonic()
        while not is_done():
            if self.error is not None:
                raise self.error
            self.is_here.wait(_WAKE_S)
            # Cleared before `is_done` is looked at again: what comes in between sets it once more.
            self.is_here.clear()
        self.waiting_since_s = None

    # --- the link's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self.open, COORDINATOR)
        self.loop.call_soon(lambda: self.spawn(every(HEARTBEAT_S, self._tick)))
        self.loop.run_forever()
        self.close()
        # asyncio tells protocols that their transports are closed in later turns of the loop.
        self.loop.run_until_complete(asyncio.sleep(0.05))
        self.loop.close()

    def failed(self, error: BaseException | None) -> None:
        """Have the worker's thread raise the error, or the first one if there are several."""
        # The first error is the cause; those that follow come of it.
        self.error = self.error or error
        self.is_here.set()

    def hello(self, to: object) -> setup.Hello:
        """Return the greeting of this worker; for the coordinator with the layout that it trains."""
        # Only the coordinator compares layouts, and only it takes a hello with content.
        content = b""
        if to == COORDINATOR:
            layout = json.loads(self.layout.to_json())
            content = json.dumps({"layout": layout, "settings": self.settings}).encode()
        return setup.Hello("worker", self.name, self.incarnation, "", self.layout.digest, content)

    def connected(self, peer: object) -> None:
        """Send a server again what it may have missed."""
        if peer == COORDINATOR:
            return
        self._repeat()
        # A server that hears of the start after its first content closes the connection: it gets the content again.
        for number, node in sorted(self.handed_out):
            if node == peer and number not in self.configurations:
                self._install(number, [node])

    def lost(self, peer: object) -> None:
        """Connect to the coordinator again; a server that has died is replaced by it."""
        if peer == COORDINATOR:
            self.open(COORDINATOR)

    def take(self, peer: object, number: int, message: object) -> None:
        """Handle a message about range `number`."""
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
            self.failed(_error_of(message))
        elif isinstance(message, setup.StateRead):
            if message.request == self.state_request:
                self.states[number] = bytes(message.content)
                self.is_here.set()
        else:
            self._take_protocol(number, message)

    def _take_protocol(self, number: int, message: object) -> None:
        # Kept also before the job's start: configurations may come before the settings.
        if isinstance(message, Configuration):
            self.configurations[number] = message
        if self.session is None or number >= len(self.session.clients):
            return
        if isinstance(message, Stale):
            # One of the two has not heard of the newest configuration: soon it has.
            self.loop.call_later(SOON_S, self.call, self._repeat)
            return
        if isinstance(message, Pushed | Pulled):
            self.progress_s = time.monotonic()
            self.repeat_after_s = REPEAT_S[0]
        sent, answers = self.session.on(number, message, time.monotonic())
        self.send(sent)
        if self.session.is_out and not self.session.is_done and not self.is_leaving:
            self._rejoin()
        elif answers is not None:
            self._begin_step(self.session.clock, answers)

    def _begin_step(self, clock: int, answers: Sequence[Pulled]) -> None:
        """Hand the answers of all ranges to the worker's thread."""
        self._note_waiting()
        note = answers[0].note or {}  # None before the first update
        self.counted = max(self.counted, note.get("counted", 0))
        self.latest = Answer(clock, [answer.note for answer in answers])
        self.answer = self.latest
        self.is_here.set()

    def _start(self, message: setup.StartServers) -> None:
        if self.session is not None:
            return  # the coordinator began again
        self.job = JobSettings.of_json(message.settings)
        self.ranges = self.layout.ranges(self.job.servers)
        self.values = [FlatTensor(self.layout, segments) for segments in self.ranges]
        self.gradients = [FlatTensor(self.layout, segments) for segments in self.ranges]
        self._new_session()

    def _new_session(self) -> None:
        assert self.job is not None
        worker = (self.name, self.incarnation)
        clients = [Client(worker, len(segments), 0, self.job.steps) for segments in self.ranges]
        self.session = Session(clients, is_exact=self.job.mode == "sync")
        for number, configuration in self.configurations.items():
            self._take_protocol(number, configuration)

    def _rejoin(self) -> None:
        """Come again as another incarnation, after this one was taken for dead."""
        self.incarnation = -1
        # What the old incarnation still gets is dropped: without a session nothing is handled.
        self.session = None
        self.configurations = {}
        for connection in list(self.connections.values()):  # the servers, too, know it by its incarnation
            connection.close("the process ends")
        self.spawn(self._wait_for_name())

    async def _wait_for_name(self) -> None:
        while self.incarnation < 0:
            await asyncio.sleep(0.02)
        self._new_session()

    def _take_addresses(self, servers: dict[Node, Address]) -> None:
        self.addresses = {COORDINATOR: self.addresses[COORDINATOR], **servers}
        for peer in self.addresses:
            self.open(peer)

    def _install(self, number: int, nodes: Sequence[int]) -> None:
        content = self.first(self.ranges[number])
        self.spawn(self._send_content(number, content, nodes))

    async def _send_content(self, number: int, content: bytes, nodes: Sequence[int]) -> None:
        for node in nodes:
            # `send` drops what is for a peer without a connection.
            while node not in self.connections:
                await asyncio.sleep(0.02)
            self.send([(node, number, setup.Install((node,), content))])
            self.handed_out.add((number, node))

    def _push(self, notes: Sequence[Sequence[dict[str, Any]]], computed_from: Answer | None) -> None:
        session = self.session
        if self.latest is not computed_from:
            # Taken for dead while it computed, it has come again: this gradient is too old.
            self.answer = self.latest
            self.is_here.set()
            return
        if session is None or session.is_out or not session.answers:
            return  # it reads what the others have done
        self.pushed_s = time.monotonic()
        # Set by the tick that finds all connections idle.
        self.sent_s = 0.0
        gradients: list[list[tuple[Any, torch.Tensor]]] = []
        for notes_of_range, flat in zip(notes, self.gradients, strict=True):
            gradients.append(list(zip(notes_of_range, flat.whole, strict=True)))
        self.send(session.push(gradients))

    def _ask_state(self) -> None:
        self.state_request += 1
        for number, configuration in self.configurations.items():
            # A tail that is lost or replaced never answers: who has not answered is asked again, at the newest chain.
            if number not in self.states and configuration.chain:
                # The tail's state is what no failure can take back.
                tail = configuration.chain[-1]
                self.send([(tail, number, setup.ReadState(self.state_request))])
        if len(self.states) < len(self.ranges):
            self.loop.call_later(2.0, self.call, self._ask_state_again, self.state_request)

    def _ask_state_again(self, request: int) -> None:
        if request == self.state_request and len(self.states) < len(self.ranges):
            self._ask_state()

    async def _say_goodbye(self, said_goodbye: threading.Event) -> None:
        """Send the last heartbeat and wait until the coordinator has handled it.

        What a process that ends has written may be lost with its connection.
        """
        deadline_s = time.monotonic() + GOODBYE_S
        if self.session is not None:
            self._send_status()
            self.send(self.session.heartbeat(self.is_leaving))
            while not self.session.is_out and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
        said_goodbye.set()

    def _send_status(self) -> None:
        self.send([(COORDINATOR, 0, setup.Status(json.dumps(self.status()).encode()))])

    def _note_waiting(self) -> None:
        """Add a step's wait to `waited_s`: until its bytes had left as "network", after that as "others"."""
        if self.pushed_s:
            now = time.monotonic()
            sent_s = self.sent_s or now
            self.waited_s["network"] += sent_s - self.pushed_s
            self.waited_s["others"] += now - sent_s

    def _tick(self) -> None:
        now = time.monotonic()
        if self.incarnation < 0:  # servers know a worker by its incarnation: the coordinator gives it one first
            self.open(COORDINATOR)
        else:
            for peer in list(self.addresses):
                self.open(peer)
        if not self.connections and now - self.connected_s > ALONE_S:
            self.failed(
                PeerLostError(
                    "the parameter servers should answer",
                    f"none has answered for {ALONE_S:g} s",
                    "see whether they run",
                )
            )
        if self.connections:
            self.connected_s = now
        self._watch_coordinator(now)
        self._watch_ranges(now)
        if self.session is None:
            return
        if not self.sent_s and all(connection.is_idle for connection in self.connections.values()):
            self.sent_s = now
        self.send(self.session.heartbeat(self.is_leaving))  # also here: a later one must not take the last one back
        self._send_status()
        if self.answer is None and now - max(self.progress_s, self.repeated_s) > self.repeat_after_s:
            self.repeated_s = now
            self.repeat_after_s = min(2 * self.repeat_after_s, REPEAT_S[1])
            self._repeat()

    def _watch_ranges(self, now: float) -> None:
        """Fail when some ranges have applied a step that others can't apply any more.

        So it is when a worker and a server were lost before the step was complete: the worker that takes the place of
        the lost one can't compute its gradient, as the step's parameters are gone.
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
        """Fail when the coordinator is silent for long while the worker waits.

        Without it nobody is replaced, and the wait may have no end.
        """
        if self.waiting_since_s is None:
            return
        silent_s = now - max(self.coordinator_s, self.waiting_since_s)
        if silent_s > self.patience_s:
            self.failed(
                PeerLostError(
                    "the coordinator of the parameter servers should answer",
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
        """Return the status that `paceline server top` shows of this worker."""
        connections = self.connections.values()
        return {
            "waited_for_network_s": round(self.waited_s["network"], 3),
            "waited_for_others_s": round(self.waited_s["others"], 3),
            "pid": os.getpid(),
            "counted": self.counted,
            "is_waiting": self.answer is None,
            "bytes_sent": sum(connection.bytes_sent for connection in connections),
            "bytes_received": sum(connection.bytes_received for connection in connections),
        }

    # --- Endpoint

    def destination(self, connection: Connection, number: int, message: object, nbytes: int) -> tuple[Any, memoryview]:
        """Return the memory for a payload: parameters that are waited for go straight to `values`."""
        if isinstance(message, Pulled) and number < len(self.values) and self.session is not None:
            # The worker's thread waits while a pull is open, so it does not read `values` meanwhile.
            flat = self.values[number].memory
            if nbytes != flat.numel():
                raise FrameError(f"parameters of {nbytes} bytes, not {flat.numel()}")
            if self.session.clients[number].expects(message):
                return flat, bytes_of(flat)
            # Received and dropped: the worker may be reading `values` now.
            if number not in self.spare:
                self.spare[number] = torch.empty_like(flat)
            return None, bytes_of(self.spare[number])
        if isinstance(message, setup.StateRead) and number < len(self.ranges):
            if nbytes > most_state_bytes(self.ranges[number]):
                raise FrameError(f"a state of {nbytes} bytes")
            content = bytearray(nbytes)
            return content, memoryview(content)
        return super().destination(connection, number, message, nbytes)

    def views(self, payload: object) -> Sequence[memoryview]:
        """Return the bytes of a payload."""
        return views_of(payload)


def _error_of(message: setup.Refused) -> PacelineError:
    """Return the error that another process has sent, of the same class."""
    # Only of our own errors: a name from the wire must not choose any other class.
    classes = {error_class.__name__: error_class for error_class in PacelineError.__subclasses__()}
    error_class = classes.get(message.kind, PacelineError)
    return error_class(message.asked, message.found, message.fix)
