"""A network between workers, servers and their coordinator that holds, cuts, doubles, replays and alters frames."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from test_cluster import adamw

from paceline.server.node import Server
from paceline.server.protocol.member import Member
from paceline.server.transport.address import Address

from support.cluster import Cluster, alone, gradient, train
from support.proxy import Proxy

pytestmark = pytest.mark.slow
STEPS = 12


class Behind(Cluster):
    """A cluster whose servers are all reached through proxies."""

    def start_server(self, where=None):
        number = len(self.servers)
        real, shown = self.folder / f"r{number}", self.folder / f"s{number}"
        proxy = Proxy(str(shown), str(real), number)
        asyncio.run_coroutine_threadsafe(proxy.listen(), self.loop).result(5)
        self.proxies = [*getattr(self, "proxies", []), proxy]

        class Shown(Server):
            async def listen(self, address):
                await super().listen(address)
                return f"unix:{shown}"

        def make():
            server = Shown(Address.parse(f"unix:{real}"), Address.parse(self.where))
            self.servers.append(server)
            self.tasks[server] = self.loop.create_task(self._watched(server.run()))
            return server

        return self.call(make)

    def __exit__(self, *error):
        for proxy in self.proxies:
            asyncio.run_coroutine_threadsafe(proxy.close(), self.loop).result(5)
        super().__exit__(*error)


def slowly(handle, model):
    while not handle.is_done:
        time.sleep(0.05)
        gradient(model, handle.link.name, handle.clock)
        handle.push(1.0, 2.0)


def check_equal(workers):
    models = [worker.ended(150).model for worker in workers]
    expected = alone(2, workers[0].steps, adamw)
    assert all(torch.equal(a, b) for model in models for a, b in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("mode", ["double", "replay", "corrupt"])
def test_a_network_that_doubles_replays_and_alters(mode):
    with Behind("replicate=2,server=2") as cluster:
        for proxy in cluster.proxies:
            cluster.call(lambda proxy=proxy: proxy.set(mode))
        workers = [cluster.worker(number, STEPS, train) for number in range(2)]
        check_equal(workers)
        assert sum(proxy.altered for proxy in cluster.proxies) > 1


def test_connections_that_break_again_and_again():
    with Behind("replicate=2,server=2") as cluster:
        workers = [cluster.worker(number, STEPS, slowly) for number in range(2)]
        for at in range(6):
            time.sleep(0.3)
            cluster.call(cluster.proxies[at % 2].cut)
        check_equal(workers)


def test_a_server_that_nobody_reaches_is_fenced_and_comes_back(monkeypatch):
    """Its frames are held beyond the deadline, then all come at once; what it says then is refused."""
    with Behind("replicate=2,server=2") as cluster:
        workers = [cluster.worker(number, 60, slowly) for number in range(2)]
        while not workers[0].handle or workers[0].handle.clock < 3:
            time.sleep(0.05)
        stopped, heartbeat = cluster.servers[1], Member.heartbeat
        monkeypatch.setattr(
            Member, "heartbeat", lambda member: heartbeat(member) if member.node != stopped.node else []
        )
        cluster.call(lambda: cluster.proxies[1].set("hold"))
        cluster.call(stopped.connections["coordinator"].transport.pause_reading)
        time.sleep(8)
        monkeypatch.undo()
        cluster.call(stopped.connections["coordinator"].transport.resume_reading)
        cluster.call(lambda: cluster.proxies[1].set("pass"))
        check_equal(workers)
        chains = [event["chains"] for event in cluster.events if event["event"] == "epoch"]
        assert [[0], [0]] in chains
