"""Who is taken for dead: values in, decisions out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.nouns.errors import CheckpointError, PeerLostError, UsageError
from paceline.nouns.plan import Plan
from paceline.server.coordinator.absences import SILENCE, Absences, silence_s
from paceline.server.coordinator.process import Coordination, _few_ranges, hosts_in_turn
from paceline.server.protocol.coordinator import Coordinator, Settings
from paceline.server.protocol.messages import Heartbeat, WorkerHeartbeat
from paceline.server.settings import JobSettings
from paceline.server.transport.address import Address

SETTINGS = Settings(replicas=2, node_deadline_s=5.0, worker_deadline_s=5.0, worker_return_s=5.0)
WORKERS = [(0, 0), (1, 0)]
STOPPED_S = 8.0


def coordinator():
    return Coordinator.first([(0, 1), (1, 0)], WORKERS, lambda entry: None, SETTINGS)


def hear(one, now_s):
    for node in (0, 1):
        for number in range(2):
            one.on(number, Heartbeat(node, 0, state_config_version=0), now_s)
    for worker in WORKERS:
        one.on(0, WorkerHeartbeat(worker, 0, 0, is_done=False), now_s)


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
                one.on(number, Heartbeat(node, 0, state_config_version=0), now_s)
    for step in range(3):
        one.tick(6.0 + step / 10)
        first = one.chains[0].configuration
        for node in first.chain:
            one.on(0, Heartbeat(node, first.config_version, state_config_version=first.config_version), 6.0 + step / 10)
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
    assert [chain.configuration.config_version for chain in one.chains] == [0, 0]


@pytest.mark.parametrize("ticks", [0, 1])
def test_coordinator_notices_its_own_stop_right_after_the_start(tmp_path, monkeypatch, ticks):
    """Its first turn after the job's start may be the one in which it wakes."""
    clock = [100.0]
    monkeypatch.setattr("paceline.server.coordinator.process.time", SimpleNamespace(monotonic=lambda: clock[0]))
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
    """Where rounds may go on without a worker."""
    one = coordinator()
    one.tick(0.0)
    now_s = SETTINGS.node_deadline_s + 1.0
    one.tick(now_s)
    assert len(one.workers) == 1


def test_coordinator_loses_a_range_if_servers_end_or_stay_silent():
    """A stopped server still has the parameters: it is waited for longer than one whose process has ended."""
    one = coordinator()
    one.tick(0.0)
    hear(one, 0.1)
    assert not any(chain.is_lost(SETTINGS.lost_s) for chain in one.chains)
    assert all(chain.is_lost(SETTINGS.lost_s + 1.0) for chain in one.chains)
    assert not any(chain.has_ended for chain in one.chains)
    for node in (0, 1):
        one.forget(node, 1.0)
    assert not any(chain.is_lost(1.5) for chain in one.chains)
    assert all(chain.is_lost(3.0) and chain.has_ended for chain in one.chains)


@pytest.mark.parametrize(
    ("ranges", "servers", "replicas", "says"),
    [
        (6, 7, 2, "of 7 servers 6 take gradients, 1 keeps a copy"),
        (6, 8, 2, "of 8 servers 6 take gradients, 1 keeps a copy, 1 is spare and takes the place of a lost one"),
        (
            1,
            4,
            2,
            "of 4 servers 1 takes gradients, 1 keeps a copy, 2 are spare and take the place of a lost one",
        ),
        (
            6,
            8,
            1,
            "of 8 servers 6 take gradients, 2 have no use, as replicas=1 keeps no copy to take over: "
            "write server=6, or replicas=2",
        ),
    ],
)
def test_what_servers_that_have_no_range_are_for(ranges, servers, replicas, says):
    assert _few_ranges(ranges, servers, replicas).endswith(f" MiB: {says}")


def test_with_one_replica_a_spare_server_does_not_save_the_job():
    """What the notice says: nobody has the lost range's content."""
    one = Coordinator.first([(0,)], WORKERS, lambda entry: None, replace(SETTINGS, replicas=1))
    one.tick(0.0)
    for now_s in (0.1, 1.0):
        one.on(0, Heartbeat(0, 0, state_config_version=0), now_s)
        one.on(0, Heartbeat(1, 0, state_config_version=-1), now_s)
        one.tick(now_s)
    one.forget(0, 1.1)
    for now_s in (2.0, 10.0, 20.0):
        one.on(0, Heartbeat(1, 0, state_config_version=-1), now_s)
        one.tick(now_s)
    assert one.chains[0].configuration.chain == (0,)
    assert one.chains[0].is_lost(20.0)


@pytest.mark.parametrize(
    ("replicas", "is_silent", "says"),
    [
        (1, False, "range 0 of the parameters should be on 1 server\n  found: the server that had it has ended\n"),
        (1, True, "range 0 of the parameters should be on 1 server\n  found: it has not answered for 60 s\n"),
        (2, False, "range 0 of the parameters should be on 2 servers\n  found: all servers that had it have ended\n"),
        (
            2,
            True,
            "range 0 of the parameters should be on 2 servers\n  found: no server that has it has answered for 60 s\n",
        ),
    ],
)
def test_how_a_lost_range_is_named(tmp_path, replicas, is_silent, says):
    job = JobSettings.of(Plan.parse(f"replicate=2,server=2,replicas={replicas}"))
    process = Coordination(Address.parse(f"unix:{tmp_path}/c"), job, tmp_path / "log", lambda event: None)
    process.log.close()
    nodes = tuple(range(replicas))
    process.coordinator = one = Coordinator.first([nodes], WORKERS, lambda entry: None, SETTINGS)
    one.tick(0.0)
    for node in () if is_silent else nodes:
        one.forget(node, 1.0)
    with pytest.raises(CheckpointError) as caught:
        process._check_ranges(100.0)
    assert str(caught.value).startswith(says)
    assert ("replicas=2" in str(caught.value)) == (replicas == 1)


SYNC = replace(SETTINGS, waits_for_replacement=True, needs_all=True, steps=9)


def sync():
    return Coordinator.first([(0, 1), (1, 0)], WORKERS, lambda entry: None, SYNC)


def heartbeat(one, worker, clock, now_s, is_done=False):
    for number in range(2):
        one.on(number, WorkerHeartbeat(worker, 0, clock, is_done), now_s)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        # What workers last said of themselves (incarnation, clock; clocks count from 0), and the step that waits.
        ({0: (0, 11), 1: (0, 11)}, 12),
        ({0: (0, 11), 1: (0, 10)}, 12),  # it pushed step 11, and was lost before it said that it began the next
        ({0: (0, 11), 1: (1, 0)}, 12),  # another in its place, which has not read yet at which step it begins
        ({0: (0, 11)}, 12),  # lost before it said anything, or the coordinator was started again meanwhile
        ({}, 1),
    ],
)
def test_the_step_that_waits_is_the_furthest_of_those_who_speak(tmp_path, monkeypatch, said, step):
    """Under sync nobody begins a step before every gradient of the step before is there."""
    clock, events = [100.0], []
    monkeypatch.setattr("paceline.server.coordinator.process.time", SimpleNamespace(monotonic=lambda: clock[0]))
    job = JobSettings.of(Plan.parse("replicate=2,server=2"))
    process = Coordination(Address.parse(f"unix:{tmp_path}/c"), job, tmp_path / "log", events.append, returns_s=20.0)
    workers = [(name, said.get(name, (0, 0))[0]) for name in (0, 1)]
    sync = replace(SYNC, steps=100)
    process.coordinator = one = Coordinator.first([(0, 1), (1, 0)], workers, lambda entry: None, sync)
    one.tick(clock[0])
    for name, (incarnation, at) in said.items():
        one.on(0, WorkerHeartbeat((name, incarnation), 0, at, is_done=False), clock[0])
    clock[0] += SETTINGS.worker_deadline_s + 1.0
    if 0 in said:
        one.on(0, WorkerHeartbeat(workers[0], 0, said[0][1], is_done=False), clock[0])
    process._look_for_missing(clock[0])
    process.log.close()
    assert {event["step"] for event in events} == {step}
    assert (1, "waiting") in {(event["worker"], event["event"]) for event in events}


@pytest.mark.parametrize("is_gone", [False, True])
def test_under_sync_a_worker_is_waited_for(is_gone):
    one = sync()
    one.tick(0.0)
    hear(one, 0.1)
    if is_gone:
        one.forget((1, 0), 0.2)
    assert one.missing(0.3) == ({(1, 0): pytest.approx(0.2)} if is_gone else {})
    for now_s in (10.0, 100.0, 1000.0):
        heartbeat(one, (0, 0), 3, now_s)
        one.tick(now_s)
        assert set(one.workers) == set(WORKERS)
        assert one.missing(now_s) == {(1, 0): pytest.approx(now_s - 0.1)}
    heartbeat(one, (1, 1), 0, 1000.0)
    one.tick(1000.0)
    assert dict(one.workers) == {(0, 0): 0, (1, 1): 0}  # from the first step on: in rounds under way too
    assert not one.missing(1000.0)


def test_coordinator_sync_worker_that_left_is_missing_until_end():
    one = sync()
    one.tick(0.0)
    heartbeat(one, (1, 0), 4, 0.1, is_done=True)
    heartbeat(one, (0, 0), 4, 0.1)
    one.tick(0.2)
    assert set(one.workers) == set(WORKERS)
    assert one.left_early() == [(1, 0)]
    heartbeat(one, (0, 0), 4, 0.3, is_done=True)
    one.tick(0.4)
    one.tick(0.5)
    assert not one.workers


def test_under_sync_nobody_is_needed_once_a_worker_has_all_steps():
    """One that has ended, and whose last word was lost, holds nobody up."""
    one = sync()
    one.tick(0.0)
    heartbeat(one, (0, 0), SYNC.steps, 100.0)
    assert one.is_finished
    one.tick(100.0)
    assert set(one.workers) == {(0, 0)}


def missing(silent_s, step=4, is_connected=True, worker=(1, 0)):
    return {worker: (silent_s, step, is_connected)}


def test_a_wait_is_told_once_and_its_end():
    one = Absences(60.0, is_replaced=True)
    assert one.look(missing(4.0), {}, 5.0, 104.0) == []
    (event,) = one.look(missing(6.0), {}, 5.0, 106.0)
    assert (event["event"], event["worker"], event["step"], event["silent_s"]) == ("waiting", 1, 4, 6.0)
    assert one.look(missing(7.0), {}, 5.0, 107.0) == []
    assert one.look({}, {}, 5.0, 108.0) == [{"event": "back", "worker": 1, "waited_s": 8.0}]


def test_coordinator_ends_job_if_a_worker_is_given_up_twice():
    one, pids = Absences(60.0, is_replaced=True), {(1, 0): 77, (1, 1): 78, (1, 2): 79}
    assert [event["event"] for event in one.look(missing(61.0), pids, 5.0, 161.0)] == ["waiting", "given_up"]
    assert one.look(missing(62.0), pids, 5.0, 162.0) == []
    (event,) = one.look(missing(61.0, worker=(1, 1), step=5), pids, 99.0, 300.0)
    assert (event["event"], event["worker"], event["pid"]) == ("given_up", 1, 78)
    with pytest.raises(PeerLostError, match="and so was the one that took its place"):
        one.look(missing(61.0, worker=(1, 2), step=5), pids, 99.0, 400.0)


@pytest.mark.parametrize(
    ("is_connected", "says"), [(True, "it has been silent for"), (False, "none has taken its place for")]
)
def test_where_nobody_starts_another_the_job_ends(is_connected, says):
    one = Absences(600.0, is_replaced=False)
    one.look(missing(599.0, is_connected=is_connected), {}, 5.0, 700.0)
    with pytest.raises(PeerLostError, match=says):
        one.look(missing(601.0, is_connected=is_connected), {}, 5.0, 702.0)


def test_coordinator_leaves_ended_processes_to_their_starter():
    one = Absences(60.0, is_replaced=True)
    events = one.look(missing(1e6, is_connected=False), {(1, 0): 77}, 5.0, 2e6)
    assert [event["event"] for event in events] == ["waiting"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_server_that_is_silent_is_replaced_where_somebody_can(has_begun):
    server = {7: ("the server at unix:/s", 61.0)}
    one = Absences(60.0, is_replaced=True)
    assert one.look_at_others({7: ("the server at unix:/s", 59.0)}, {7: 70}, has_begun) == []
    given_up = {"event": "given_up", "node": 7, "pid": 70, "silent_s": 61.0}
    assert one.look_at_others(server, {7: 70}, has_begun) == [given_up]
    assert one.look_at_others(server, {7: 70}, has_begun) == []


@pytest.mark.parametrize(("is_replaced", "pids"), [(False, {7: 70}), (True, {})])
def test_coordinator_silent_server_ends_the_job_only_at_start(is_replaced, pids):
    """Later its ranges have other replicas."""
    server = {7: ("the server at unix:/s", 61.0)}
    assert Absences(60.0, is_replaced).look_at_others(server, pids, has_begun=True) == []
    with pytest.raises(PeerLostError, match="the server at unix:/s\n  found: it has been silent for 60 s"):
        Absences(60.0, is_replaced).look_at_others(server, pids, has_begun=False)


def test_the_others_do_not_wait_for_one_that_has_left():
    one = Absences(60.0, is_replaced=True)
    one.note_waiting((0, 0), 4, True, 100.0)
    one.check_left({(1, 0): 4}, [(0, 0)], 5.0, 104.0)
    one.note_waiting((0, 0), 4, False, 104.5)  # it saves
    one.check_left({(1, 0): 4}, [(0, 0)], 5.0, 106.0)
    one.note_waiting((0, 0), 4, True, 107.0)
    one.check_left({}, [(0, 0)], 5.0, 200.0)
    with pytest.raises(PeerLostError, match="worker 1 should take step 5\n  found: it has left"):
        one.check_left({(1, 0): 4}, [(0, 0)], 5.0, 113.0)


def test_a_wait_for_an_earlier_step_is_not_for_the_one_that_left():
    """Worker 1 takes step 5 and leaves; worker 0 waited for it, and has not said yet that it goes on."""
    one = Absences(60.0, is_replaced=True)
    one.note_waiting((0, 0), 4, True, 100.0)
    one.check_left({(1, 0): 5}, [(0, 0)], 5.0, 110.0)
    one.note_waiting((0, 0), 5, True, 110.1)
    with pytest.raises(PeerLostError, match="worker 1 should take step 6\n  found: it has left"):
        one.check_left({(1, 0): 5}, [(0, 0)], 5.0, 116.0)


@pytest.mark.parametrize("text", ["x", "0", "-3", "nan", "inf", "1e300"])
def test_a_silence_that_is_no_time(text):
    with pytest.raises(UsageError, match=SILENCE):
        silence_s({SILENCE: text})
    assert silence_s({}) == silence_s({SILENCE: "60"}) == 60.0
