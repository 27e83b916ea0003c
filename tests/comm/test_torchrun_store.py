"""Under torchrun, ranks that were started again don't meet in what the ranks before them left in its store."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist

from paceline.comm import process_group
from paceline.comm.process_group import RankInfo, open_world


@pytest.fixture
def store_of(monkeypatch):
    """Returns the store in which a rank meets the others, by the number of restarts; torchrun has one for all."""
    kept = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=datetime.timedelta(seconds=5))
    monkeypatch.setattr(process_group.dist, "rendezvous", lambda *_, **more: iter([(kept, 0, 2)]))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")

    def open_for(restart, local_size):
        found = []
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **more: found.append(more["store"]))
        open_world(RankInfo(rank=0, size=2, local_size=local_size))
        return found[0]

    return open_for


def test_each_restart_has_its_part_of_the_store(store_of):
    store_of(0, 2).set("address of rank 1", "gone")
    assert store_of(0, 2).check(["address of rank 1"])
    assert not store_of(1, 2).check(["address of rank 1"])
    store_of(1, 2).set("address of rank 1", "gone too")
    assert store_of(1, 2).get("address of rank 1") == b"gone too"
    assert not store_of(2, 2).check(["address of rank 1"])


def test_on_several_hosts_all_agents_share_one_store(store_of):
    # One of them may count fewer restarts than the others.
    store_of(0, 1).set("address of rank 0", "there")
    assert store_of(2, 1).get("address of rank 0") == b"there"
