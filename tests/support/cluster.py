"""A coordinator and servers in one thread of the test, workers in others: real sockets, real frames, no processes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.nouns.plan import Plan
from paceline.server.coordinator.process import Coordination
from paceline.server.handle import Handle
from paceline.server.node import Server
from paceline.server.settings import JobSettings
from paceline.server.transport.address import Address


class Cluster:
    """Servers for the plan, until the block ends."""

    def __init__(self, plan: str, **more: Any) -> None:
        self.plan, self.more = Plan.parse(plan), more
        self.folder = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.events: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self.servers: list[Server] = []
        self.tasks: dict[Any, Any] = {}

    def __enter__(self) -> Cluster:
        self.thread.start()
        self.coordination = self.call(self._coordinate)
        for _ in range(self.plan.server):
            self.start_server()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.servers, self.coordination):
            self.call(one.close)
        for task in self.tasks.values():
            task.cancel()
        time.sleep(0.1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    @property
    def where(self) -> str:
        """The coordinator's address."""
        return f"unix:{self.folder / 'c'}"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the servers' thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def start_server(self, where: str | None = None) -> Server:
        """One more server."""
        number = len(self.servers)

        def make() -> Server:
            server = Server(Address.parse(where or f"unix:{self.folder / f's{number}'}"), Address.parse(self.where))
            self.servers.append(server)
            self.tasks[server] = self.loop.create_task(self._watched(server.run()))
            return server

        return self.call(make)

    def kill(self, server: Server) -> None:
        """A server is gone without a word."""
        self.call(self.tasks[server].cancel)

    def worker(self, number: int, steps: int, work: Callable[[Handle, torch.nn.Module], None], **options: Any) -> Any:
        """Run `work` in a thread of its own, with a handle that has joined; the thread."""
        return Worker(self.where, number, steps, work, options)

    def _coordinate(self) -> Coordination:
        job = JobSettings.of(self.plan)
        made = Coordination(Address.parse(self.where), job, self.folder / "log", self.events.append, **self.more)
        self.tasks[made] = self.loop.create_task(self._watched(made.run()))
        return made

    async def _watched(self, work: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:
                self.errors.append(error)


class Worker(threading.Thread):
    """One worker of a cluster: its model, and what became of it."""

    def __init__(self, where: str, number: int, steps: int, work: Any, options: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.where, self.number, self.steps, self.work, self.options = where, number, steps, work, options
        self.model = self.options.pop("model", small_model)()
        make = self.options.pop("optimizer", lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
        self.optimizer = make(self.model)
        self.error: BaseException | None = None
        self.handle: Handle | None = None
        self.start()

    def run(self) -> None:
        try:
            self.handle = Handle(self.model, self.optimizer)
            self.handle.join(self.where, self.number, self.steps, {"is_deterministic": True, **self.options})
            self.work(self.handle, self.model)
        except BaseException as error:
            self.error = error
        finally:
            if self.handle is not None:
                self.handle.close()

    def ended(self, timeout_s: float = 60) -> Worker:
        """When it has ended; its error is raised."""
        self.join(timeout_s)
        assert not self.is_alive(), f"worker {self.number} still waits at step {self.handle and self.handle.clock}"
        if self.error is not None:
            raise self.error
        return self


def small_model() -> torch.nn.Module:
    """Some thousand numbers: six segments."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))


def gradient(model: torch.nn.Module, worker: int, clock: int) -> None:
    """Gradients that a worker and a step alone decide."""
    draws = torch.Generator().manual_seed(1000 * clock + worker)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draws) / 100


def train(handle: Handle, model: torch.nn.Module) -> None:
    """All steps."""
    assert handle.link is not None
    while not handle.is_done:
        gradient(model, handle.link.name, handle.clock)
        handle.push(1.0, 2.0)


def alone(workers: int, steps: int, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> list[torch.Tensor]:
    """What one process makes of the same gradients."""
    model = small_model()
    optimizer = make(model)
    for clock in range(steps):
        total: list[torch.Tensor] = []
        for worker in range(workers):
            gradient(model, worker, clock)
            own = [parameter.grad for parameter in model.parameters()]
            total = [a + b for a, b in zip(total, own, strict=True)] if total else own
        for parameter, one in zip(model.parameters(), total, strict=True):
            parameter.grad = one
        torch._foreach_mul_(total, torch.tensor(2.0 * workers, dtype=torch.float64).reciprocal())
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]
