"""Elastic training by Horovod's names: states, samplers, a kill -9 under `paceline horovodrun`, a stop."""

from __future__ import annotations

import signal

import pytest
import torch

from paceline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.torch import elastic
from paceline.horovod.torch.elastic import ElasticSampler, ObjectState, TorchState, run_again
from paceline.horovod.torch.elastic import sampler as sampler_module
from paceline.run.plain_values import read_value

from support.jobs import paceline, start, wait_for

JOB = """
import horovod.torch as hvd
import os, signal, time, torch
torch.set_default_dtype(torch.float64)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
x = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(hvd.rank()))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, losses=[])

@hvd.elastic.run
def train(state):
    print("begins at", state.batch, flush=True)
    while state.batch < 20:
        optimizer.zero_grad()
        loss = (model(x[state.batch]) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        state.batch += 1
        state.losses = [*state.losses, loss.item()]
        if state.batch == 9 and hvd.rank() == 1 and "KILL" in os.environ and "PACELINE_RESTART" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("PAUSE", 0)))
        if state.batch % 4 == 0:
            state.commit()

train(state)
total = sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())
print("ends", state.batch, len(state.losses), repr(total))
"""


def run_job(folder, *flags, **variables):
    (folder / "train.py").write_text(JOB)
    done = paceline(folder, "horovodrun", "-np", "2", *flags, "python", "train.py", **variables)
    assert done.code == 0, done.err
    return done, sorted(line[4:] for line in done.out.splitlines() if "ends" in line)


@pytest.mark.long
def test_a_killed_rank_ends_where_the_undisturbed_job_does(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, ends = run_job(tmp_path / "a")
    killed, killed_ends = run_job(tmp_path / "b", "--reset-limit", "3", KILL="1")
    assert killed_ends == ends
    assert len(ends) == 2
    assert "[0] begins at 8" in killed.out
    assert "restart 1 of 3, from its last commit" in killed.err
    assert "begins at 8" not in plain.out


@pytest.mark.long
def test_a_stop_writes_the_state_of_the_next_commit(tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    words = ["-np", "2", "--reset-limit", "1", "python", "train.py"]
    job = start(tmp_path, "horovodrun", *words, PAUSE="0.2")
    assert wait_for(lambda: any(tmp_path.glob("runs/*/horovod/committed.safetensors")), 60)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert "stopped" in errors
    committed = read_value(next(tmp_path.glob("runs/*/horovod/committed.safetensors")))
    assert 4 < committed["attributes"]["batch"] < 20


def same(value):
    return value


def test_attributes_go_back_to_what_was_saved():
    state = ObjectState(same, lambda: 0, epoch=1, batch=2)
    state.epoch = 5
    state.restore()
    assert state.epoch == 1
    state.epoch = 6
    state.commit()
    state.epoch = 7
    state.restore()
    assert (state.epoch, state.batch) == (6, 2)


def test_hosts_that_have_gone_skip_the_sync():
    state = ObjectState(same, lambda: 0, epoch=1)
    state.on_hosts_updated(1.0, 2)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.commit()
    assert raised.value.skip_sync
    state.check_host_updates()  # told once
    state.on_hosts_updated(2.0, 1)
    state.on_hosts_updated(3.0, 2)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert not raised.value.skip_sync


def test_a_models_state_goes_back_too():
    model = torch.nn.Linear(2, 1)
    state = TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()))
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    assert not torch.equal(model.weight, before)
    state.restore()
    assert torch.equal(model.weight, before)
    assert state.optimizer.state_dict()["state"] == {}


def test_run_restores_after_an_error_and_not_after_new_hosts(monkeypatch):
    calls = []
    monkeypatch.setattr(run_again, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(run_again, "init", lambda: calls.append("init"))
    state = ObjectState(same, lambda: 0, number=0)
    state.register_reset_callbacks([lambda: calls.append("reset")])
    monkeypatch.setattr(state, "sync", lambda: calls.append("sync"))
    ends = iter([HorovodInternalError("lost"), HostsUpdatedInterrupt(True), HostsUpdatedInterrupt(False), None])

    @elastic.run
    def train(state, offset):
        state.number += 1
        end = next(ends)
        if end is not None:
            raise end
        return state.number + offset

    assert train(state, 10) == 13  # the first one was undone
    again = ["shutdown", "init", "reset"]
    assert calls == ["sync", *again, "sync", *again, *again, "sync"]


@pytest.fixture
def place(monkeypatch):
    """A function that sets the rank and the number of ranks of samplers."""

    def be(rank, size):
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)

    return be


def test_a_sampler_shares_out_what_is_left(place):
    place(0, 2)
    first = ElasticSampler(range(10), shuffle=False)
    place(1, 2)
    second = ElasticSampler(range(10), shuffle=False)
    assert (list(first), list(second)) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    first.record_batch(0, 2)
    second.record_batch(0, 2)
    processed = sorted(first.processed_indices | second.processed_indices)
    assert processed == [0, 1, 2, 3]
    place(2, 3)
    third = ElasticSampler(range(10), shuffle=False)
    third.load_state_dict({"epoch": 4, "processed_indices": processed})
    assert list(third) == [6, 9]
    assert third.epoch == 4
    third.set_epoch(5)
    assert len(third) == 4


def test_a_shuffled_sampler_has_every_sample(place):
    seen = []
    for rank in range(3):
        place(rank, 3)
        sampler = ElasticSampler(range(11))
        sampler.set_epoch(2)
        assert len(sampler) == 4
        seen += sampler
    assert set(seen) == set(range(11))
