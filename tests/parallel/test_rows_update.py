"""The promise: an update of rows ends, bit for bit, where torch's own on DTensors does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.comm import api
from paceline.comm.collectives import open_axes
from paceline.comm.ledger import Ledger
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.parallel.shard.local_optimizer_step import step_on_rows
from paceline.parallel.shard.shard_strategy import Shard, local

from support.ranks import run_ranks

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def train(rank, kind, on_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))
    model[3].requires_grad_(False)
    api.init()
    comm = open_axes(Mesh.parse("shard=2"), rank, Ledger())["shard"]
    shard = Shard(model, comm, Plan(mesh="shard=2"), torch.device("cpu"))
    first, *others = model.parameters()
    optimizer = OPTIMIZERS[kind]([{"params": [first]}, {"params": others, "lr": 0.01}])
    for _ in range(3):
        optimizer.zero_grad()
        shard.begin_step()
        total = shard.forward(lambda model, x: (model(x) ** 2).sum(), torch.arange(10.0).view(2, 5) / 10)
        shard.begin_backward(is_last=True)
        total.backward()
        shard.finish_backward()
        step_on_rows(optimizer) if on_rows else optimizer.step()
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    assert optimizer.state.keys() <= set(model.parameters()), "between steps it knows the model's own alone"
    state = [local(value).clone() for one in optimizer.state.values() for value in one.values()]
    return [local(p).detach().clone() for p in model.parameters()], state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_end_where_dtensors_do(kind):
    for (ours, our_state), (theirs, their_state) in zip(
        run_ranks(2, train, kind, True), run_ranks(2, train, kind, False), strict=True
    ):
        assert all(map(torch.equal, ours, theirs))
        assert our_state
        assert all(map(torch.equal, our_state, their_state))


def fail(rank):
    api.init()
    comm = open_axes(Mesh.parse("shard=2"), rank, Ledger())["shard"]
    model = nn.Linear(4, 4)
    Shard(model, comm, Plan(mesh="shard=2"), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_on_rows(optimizer)
    return [a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)]


def test_an_update_that_fails_leaves_the_optimizer_as_it_was():
    assert run_ranks(2, fail) == [[True, True]] * 2
