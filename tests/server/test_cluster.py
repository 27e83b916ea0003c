"""Servers and workers on real sockets: what they end with, who is refused, what is lost when somebody goes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from paceline.nouns.errors import LossError, PeerLostError, PlanError, WorkloadError
from paceline.server.node import Server
from paceline.server.protocol.client import Session
from paceline.server.setup import StartServers

from support.cluster import Cluster, alone, gradient, train
from support.jobs import wait_for

pytestmark = pytest.mark.slow
STEPS = 6


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_workers_end_where_one_process_does(workers, servers):
    with Cluster(f"replicate={workers},server={servers}") as cluster:
        ended = [cluster.worker(number, STEPS, train) for number in range(workers)]
        models = [worker.ended().model for worker in ended]
    expected = alone(workers, STEPS, adamw)
    for model in models:
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        (7, "fills 6 segments of 1 MiB: of 7 servers 6 take gradients, 1 keeps a copy"),
        (9, "fills 6 segments of 1 MiB: of 9 servers 6 take gradients, 1 keeps a copy, 2 are spare"),
    ],
)
def test_a_small_model_has_more_servers_than_ranges(servers, says):
    """And one of those that have nothing takes a lost one's place."""

    def work(handle, model):
        while not handle.is_done:
            if handle.clock == 2 and handle.link.name == 0:
                head = cluster.coordination.coordinator.chains[0].configuration.chain[0]
                cluster.kill(next(server for server in cluster.servers if server.node == head))
            gradient(model, handle.link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster(f"replicate=2,server={servers}") as cluster:
        models = [worker.ended().model for worker in [cluster.worker(n, STEPS, work) for n in range(2)]]
        (notice,) = [event["text"] for event in cluster.events if event["event"] == "notice"]
    expected = alone(2, STEPS, adamw)
    assert all(torch.equal(a, b) for m in models for a, b in zip(m.parameters(), expected, strict=True))
    assert says in notice


def test_a_server_may_hear_of_the_start_after_its_first_content(monkeypatch):
    """The worker's bytes and the coordinator's word come on two connections: it turns the first one away, and both
    must find together again."""
    take, late = Server.take, []

    def slowly(self, peer, number, message):
        if isinstance(message, StartServers) and self not in late:
            late.append(self)
            asyncio.get_running_loop().call_later(0.3, take, self, peer, number, message)
        else:
            take(self, peer, number, message)

    monkeypatch.setattr(Server, "take", slowly)
    with Cluster("replicate=2,server=2") as cluster:
        models = [worker.ended(20).model for worker in [cluster.worker(n, STEPS, train) for n in range(2)]]
        assert any("of range 0 of 0" in why for server in cluster.servers for why in server.refused)
    expected = alone(2, STEPS, adamw)
    assert all(torch.equal(a, b) for m in models for a, b in zip(m.parameters(), expected, strict=True))


def test_the_plain_optimizer_is_not_taken_for_the_fused_one():
    """Under `is_deterministic` the servers run what one process runs; otherwise torch's fused kernels, near it."""
    with Cluster("replicate=1,server=1") as cluster:
        model = cluster.worker(0, STEPS, train, is_deterministic=False).ended().model
    expected = alone(1, STEPS, adamw)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_a_killed_server_loses_nothing():
    with Cluster("replicate=2,server=2") as cluster:

        def work(handle, model):
            while not handle.is_done:
                if handle.clock == 2 and handle.link.name == 0:
                    cluster.kill(cluster.servers[1])
                    cluster.start_server()
                gradient(model, handle.link.name, handle.clock)
                handle.push(1.0, 2.0)

        models = [worker.ended().model for worker in [cluster.worker(n, STEPS, work) for n in range(2)]]
        epochs = [event for event in cluster.events if event["event"] == "epoch"]
    expected = alone(2, STEPS, adamw)
    assert all(torch.equal(a, b) for m in models for a, b in zip(m.parameters(), expected, strict=True))
    assert len(epochs) > 2


@pytest.mark.parametrize(
    "mode", ["mode=quorum,quorum=2", "mode=deadline,deadline=0.2", "mode=stale,staleness=1", "mode=async"]
)
def test_the_other_modes_train(mode):
    """Every gradient is that of (w - 1)^2 / 2: all modes end near 1."""

    def work(handle, model):
        while not handle.is_done:
            for parameter in model.parameters():
                parameter.grad = 2 * (parameter.detach() - 1)
            handle.push(1.0, 2.0)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.2)

    with Cluster(f"replicate=3,server=2,{mode}") as cluster:
        ended = [cluster.worker(number, 20, work, optimizer=sgd) for number in range(3)]
        models = [worker.ended().model for worker in ended]
    assert all(float((p.detach() - 1).abs().max()) < 0.05 for model in models for p in model.parameters())


@pytest.mark.parametrize("mode", ["mode=quorum,quorum=2", "mode=deadline,deadline=0.3"])
def test_rounds_go_on_without_a_worker_that_has_stopped(mode):
    stopped = threading.Event()

    def work(handle, model):
        while not handle.is_done:
            if handle.link.name == 2 and handle.clock >= 2:
                stopped.wait(20)
                return
            gradient(model, handle.link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster(f"replicate=3,server=1,{mode}") as cluster:
        began = time.monotonic()
        workers = [cluster.worker(number, 15, work) for number in range(3)]
        for worker in workers[:2]:
            worker.ended(40)
        assert time.monotonic() - began < 40  # 13 rounds; not 13 deadlines of 5 s
        stopped.set()


def test_a_worker_that_comes_later_takes_part():
    begun = threading.Event()

    def slow(handle, model):
        while not handle.is_done:
            if handle.clock == 1:
                begun.set()
            time.sleep(0.1)
            gradient(model, handle.link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster("replicate=1,server=1") as cluster:
        first = cluster.worker(0, 20, slow)
        assert begun.wait(20)
        second = cluster.worker(1, 20, slow)
        models = [first.ended().model, second.ended().model]
        clocks = {tuple(worker) for event in cluster.events if event["event"] == "epoch" for worker in event["workers"]}
    assert (1, 0) in clocks
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def other_shape():
    return torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 599))


class Own(torch.optim.SGD):
    """Not torch's own."""


@pytest.mark.parametrize(
    ("plan", "options", "error", "says"),
    [
        ("replicate=1,server=2", {"optimizer": lambda m: Own(m.parameters())}, PlanError, "which they can't run"),
        (
            "replicate=1,server=1",
            {"model": lambda: torch.nn.ParameterList([torch.ones(3, dtype=torch.complex64)])},
            PlanError,
            "0 on a parameter server\n  found: it is of complex64",
        ),
    ],
)
def test_what_servers_refuse(plan, options, error, says):
    with Cluster(plan) as cluster, pytest.raises(error) as raised:
        cluster.worker(0, 2, train, **options).ended()
    assert says in str(raised.value)


def test_a_loss_that_is_no_number_is_no_frame_that_all_wait_for():
    def push(handle, model):
        gradient(model, 0, 0)
        handle.push(float("nan"), 2.0)

    with Cluster("replicate=1,server=1") as cluster, pytest.raises(LossError, match="the loss is nan"):
        cluster.worker(0, 2, push).ended(20)


def test_the_first_differing_parameter_is_named():
    with Cluster("replicate=2,server=1") as cluster:
        first = cluster.worker(0, 2, train)
        time.sleep(0.5)
        with pytest.raises(WorkloadError, match=r"worker 1 has 1.weight \(599, 600\)"):
            cluster.worker(1, 2, train, model=other_shape).ended()
        assert first.is_alive()


def test_cluster_worker_that_rejoins_pushes_no_earlier_gradient(monkeypatch):
    """It comes again, and reads where the others are; what it computed meanwhile is of older parameters."""
    pushed, counts, plain = [], [], Session.push

    def push(session, gradients):
        pushed.append(session.worker)
        return plain(session, gradients)

    monkeypatch.setattr(Session, "push", push)

    def work(handle, model):
        link = handle.link
        while not handle.is_done:
            if link.name == 1 and handle.clock == 2 and not counts:
                before = link.latest
                link.loop.call_soon_threadsafe(link._rejoin)
                while link.latest is before:
                    time.sleep(0.01)
                gradient(model, 1, handle.clock)
                handle.push(1.0, 2.0)
                counts.append(sum(name == 1 for name, _ in pushed))
                continue
            gradient(model, link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster("replicate=2,server=1") as cluster:
        workers = [cluster.worker(number, STEPS, work) for number in range(2)]
        models = [worker.ended().model for worker in workers]
    assert counts == [2]  # of its steps 0 and 1
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_cluster_repeated_messages_are_answered_only_once():
    """The coordinator answers a beat with the configuration, and a server a configuration with a beat: only once."""

    def slowly(handle, model):
        time.sleep(2.0)
        train(handle, model)

    with Cluster("replicate=2,server=2") as cluster:
        workers = [cluster.worker(number, 5, slowly, optimizer=adamw) for number in range(2)]
        for worker in workers:
            worker.ended(60)
        counted = [server.counts["Configuration"] for server in cluster.servers]
    assert all(2 <= count < 200 for count in counted), counted  # each range's, with every beat of 0.5 s


def test_the_last_word_is_heard(monkeypatch):
    """However soon a sign of life follows it: else the coordinator would wait for one to take the worker's place."""
    monkeypatch.setattr("paceline.server.link.HEARTBEAT_S", 0.01)  # a sign of life follows the last word at once
    with Cluster("replicate=2,server=1", returns_s=60.0) as cluster:
        workers = [cluster.worker(number, 5, train, optimizer=adamw) for number in range(2)]
        for worker in workers:
            worker.ended(60)
        decided = cluster.coordination.coordinator
        assert not decided.workers
        assert all(heartbeat.is_done for _, heartbeat in decided.heard.values())
        assert wait_for(cluster.coordination.ending.done, 5)


def test_under_sync_a_worker_that_leaves_early_ends_the_job():
    """The others would train on without its samples."""

    def some(handle, model):
        while handle.clock < (2 if handle.link.name else STEPS):
            gradient(model, handle.link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster("replicate=2,server=2") as cluster:
        first, second = (cluster.worker(number, STEPS, some) for number in range(2))
        second.ended(60)
        with pytest.raises(
            PeerLostError, match="worker 1 should take step 3\n  found: it has left, and the others wait"
        ):
            first.ended(60)
        assert first.handle.clock == 2


@pytest.mark.parametrize("mode", ["mode=quorum,quorum=1", "mode=async"])
def test_what_other_modes_leave_out_is_counted(mode):
    """A worker that leaves after two of six steps leaves out the rest."""

    def work(handle, model):
        while handle.clock < (2 if handle.link.name else STEPS):
            time.sleep(0 if handle.link.name else 0.2)
            gradient(model, handle.link.name, handle.clock)
            handle.push(1.0, 2.0)

    with Cluster(f"replicate=2,server=2,{mode}") as cluster:
        workers = [cluster.worker(number, STEPS, work) for number in range(2)]
        for worker in workers:
            worker.ended(60)
        assert wait_for(lambda: any(event["event"] == "servers_ended" for event in cluster.events))
        (end,) = [event for event in cluster.events if event["event"] == "servers_ended"]
        pushed = sum(server.counts["Push"] for server in cluster.servers)
    assert pushed
    if mode == "mode=async":
        assert (end["counted"], end["gradients"]) == (STEPS + 2, STEPS + 2)  # it asked for no more
    else:
        assert end["gradients"] == 2 * STEPS
        assert STEPS <= end["counted"] <= STEPS + 2


def test_a_worker_that_leaves_early_does_not_come_again():
    def some(handle, model):
        gradient(model, handle.link.name, handle.clock)
        handle.push(1.0, 2.0)

    with Cluster("replicate=1,server=1") as cluster:
        cluster.worker(0, 5, some, optimizer=adamw).ended(60)
        known = cluster.coordination.coordinator.ever_active
        time.sleep(0.5)
        assert known == {(0, 0)}
