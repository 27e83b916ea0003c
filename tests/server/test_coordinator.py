"""Who is taken for dead: values in, decisions out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.nouns.plan import Plan
from paceline.server.address import Address
from paceline.server.coordination import Coordination, hosts_in_turn
from paceline.server.coordinator import Coordinator, Settings
from paceline.server.messages import Beat, WorkerBeat
from paceline.server.settings import JobSettings

SETTINGS = Settings(replicas=2, node_deadline_s=5.0, worker_deadline_s=5.0, worker_return_s=5.0)
WORKERS = [(0, 0), (1, 0)]
STOPPED_S = 8.0


def coordinator():
    return Coordinator.first([(0, 1), (1, 0)], WORKERS, lambda entry: None, SETTINGS)


def hear(one, now_s):
    for node in (0, 1):
        for number in range(2):
            one.on(number, Beat(node, 0, state_epoch=0), now_s)
    for worker in WORKERS:
        one.on(0, WorkerBeat(worker, 0, 0, is_done=False), now_s)


def test_neighbours_are_on_different_hosts():
    where = dict(enumerate(["b:1", "b:2", "a:1", "a:2", "c:1"]))
    addresses = {node: Address.parse(at) for node, at in where.items()}
    assert hosts_in_turn([0, 1, 2, 3], addresses) == [2, 0, 3, 1]
    assert hosts_in_turn([0, 1, 2, 3, 4], addresses) == [2, 0, 4, 3, 1]
    assert hosts_in_turn([2, 3], addresses) == [2, 3]
    here = {node: Address.parse(f"unix:/tmp/{9 - node}") for node in range(3)}
    assert hosts_in_turn([0, 1, 2], here) == [0, 1, 2]


@pytest.mark.parametrize(("hosts", "taken"), [({}, 1), ({0: "h1", 1: "h2", 2: "h1", 3: "h2"}, 2)])
def test_a_replica_that_takes_over_is_on_another_host(hosts, taken):
    """Also where one beside the last replica has less to do."""
    chains = [(0, 3), (1, 2), (2, 3)]
    one = Coordinator.first(chains, WORKERS, lambda entry: None, SETTINGS)
    one.hosts = hosts
    one.tick(0.0)
    for now_s in (0.1, 4.0):
        for number in range(len(chains)):
            for node in (0, 1, 2, 3) if now_s < 1 else (1, 2, 3):
                one.on(number, Beat(node, 0, state_epoch=0), now_s)
    for step in range(3):
        one.tick(6.0 + step / 10)
        first = one.chains[0].configuration
        for node in first.chain:
            one.on(0, Beat(node, first.epoch, state_epoch=first.epoch), 6.0 + step / 10)
    assert one.chains[0].configuration.chain == (3, taken)


@pytest.mark.parametrize("is_heard", [True, False])
def test_nobody_was_silent_while_the_coordinator_stood_still(is_heard):
    """Stopped right after the start, before the first sign of life, or later."""
    one = coordinator()
    one.tick(0.0)
    if is_heard:
        hear(one, 0.1)
    one.slept(STOPPED_S)
    now_s = STOPPED_S + 1.0
    one.tick(now_s)
    assert not any(chain.is_lost(now_s) for chain in one.chains)
    assert set(one.workers) == set(WORKERS)
    assert [chain.configuration.epoch for chain in one.chains] == [0, 0]


@pytest.mark.parametrize("ticks", [0, 1])
def test_the_process_notices_that_it_was_stopped_right_after_the_start(tmp_path, monkeypatch, ticks):
    """Its first turn after the job's start may be the one in which it wakes."""
    clock = [100.0]
    monkeypatch.setattr("paceline.server.coordination.time", SimpleNamespace(monotonic=lambda: clock[0]))
    job = JobSettings.of(Plan.parse("replicate=2,server=2"))
    process = Coordination(Address.parse(f"unix:{tmp_path}/c"), job, tmp_path / "log", lambda event: None)
    process._tick()
    process.coordinator = one = coordinator()
    hear(one, clock[0])
    for _ in range(ticks):
        process._tick()
    clock[0] += STOPPED_S
    process._tick()
    assert not any(chain.is_lost(clock[0]) for chain in one.chains)
    assert set(one.workers) == set(WORKERS)
    process.log.close()


def test_who_is_silent_while_it_runs_is_taken_for_dead():
    one = coordinator()
    one.tick(0.0)
    now_s = SETTINGS.node_deadline_s + 1.0
    assert all(chain.is_lost(now_s) for chain in one.chains)
    one.tick(now_s)
    assert len(one.workers) == 1
