"""The coordinator's log, and what people read of a job."""

from __future__ import annotations

import json

import pytest

from paceline.nouns.errors import CheckpointError
from paceline.server.coordinator.decision_log import Log
from paceline.server.protocol.messages import Configuration
from paceline.server.status_table import table, why_waiting

ONE = Configuration(3, (1, 2), {(0, 0): 4, (1, 2): 0}, (2, 3), 2, (1,))


def test_a_log_is_taken_up_where_it_was(tmp_path):
    log = Log.open(tmp_path / "log")
    assert [log.name_node(), log.name_node()] == [0, 1]
    assert [log.name_worker(5), log.name_worker(5)] == [(5, 0), (5, 1)]
    log.begin("settings", "layout")
    log.decide([ONE, ONE])
    log.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"node": 7')  # cut off by a crash
    again = Log.open(tmp_path / "log")
    assert (again.nodes, again.incarnations, again.job) == (2, {5: 2}, ("settings", "layout"))
    assert again.configurations == [[ONE, ONE]]
    assert again.name_node() == 2
    again.close()
    last = Log.open(tmp_path / "log")
    assert last.nodes == 3
    last.close()


def test_log_writes_the_configuration_version_under_its_old_name(tmp_path):
    log = Log.open(tmp_path / "log")
    log.decide([ONE])
    log.close()
    line = json.loads((tmp_path / "log").read_text())
    keys = ["epoch", "chain", "workers", "joining", "confirmed", "holders"]
    assert [list(value) for value in line["configurations"]] == [keys]
    assert line["configurations"][0]["epoch"] == ONE.config_version


@pytest.mark.parametrize("content", [b"{\n", b'{"worker": 5}\n', b'{"configurations": [{}]}\n', b"[]\n"])
def test_a_damaged_log_is_refused(tmp_path, content):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(CheckpointError, match="paceline run --resume"):
        Log.open(tmp_path / "log")


JOB = {"workers": 3, "servers": 2, "replicas": 2, "mode": "sync", "quorum": 0, "staleness": 0, "deadline": 0.0}


def worker(number, clock, is_waiting=True, **more):
    facts = {"worker": number, "incarnation": 0, "clock": clock, "is_in": True, "is_done": False, "silent_s": 0.2}
    return {**facts, "is_waiting": is_waiting, "waited_for_others_s": 1.5, "bytes_sent": 2**20, **more}


def facts(workers, waits_for=(), is_whole=True, **job):
    row = {"range": 0, "role": "head", "epoch": 4, "updates": 90, "behind": 0, "duplicates": 1, "staleness": {"0": 4}}
    chain = {"range": 0, "epoch": 4, "chain": [0, 1], "is_whole": is_whole}
    nodes = [{"ranges": [{**row, "waits_for": list(waits_for)}]}]
    return {"job": {**JOB, **job}, "state": "training", "workers": workers, "chains": [chain], "nodes": nodes}


def test_who_everybody_waits_for():
    found = facts([worker(0, 7), worker(1, 7, silent_s=6.25, is_waiting=False), worker(2, 7)], waits_for=[1])
    assert why_waiting(found) == "worker 1 is waited for by 0, 2: at step 8, last heard 6.2 s ago"
    ahead = facts([worker(0, 9), worker(1, 6, is_waiting=False)], mode="stale", staleness=2)
    assert why_waiting(ahead).startswith("worker 1 is waited for by 0")
    assert why_waiting(facts([worker(0, 7, is_waiting=False), worker(1, 7)])) == "Nobody waits."
    assert "range 0 is not whole" in why_waiting(facts([worker(0, 7)], is_whole=False))
    gathering = {"job": JOB, "state": "gathering", "here": ["0", "(1, 0)"]}
    assert why_waiting(gathering) == "The job has not begun: 2 servers and 3 workers must come; here: 0, (1, 0)"


def test_the_table_is_aligned():
    text = table(facts([worker(0, 7), worker(10, 105)], waits_for=[1]))
    lines = [line for line in text.splitlines() if line]
    assert "3 workers, 2 servers, 2 replicas, sync: training" in text
    assert len(lines[1]) == len(lines[2]) == len(lines[3])
    assert lines[2].split()[:3] == ["0", "7", "98"]
    assert lines[5].split()[:4] == ["0", "0", ">", "1"]
    assert "0 ######################################## 4" in text
