"""A few numbers that every rank sends to every other: their sum, and a rank that ends."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import api
from paceline.comm.ledger import Ledger
from paceline.comm.reducer import MAX_EXCHANGING, ExchangeReducer, GroupReducer, message_reducer
from paceline.nouns.errors import PeerLostError
from paceline.nouns.mesh import Mesh
from paceline.parallel.engine.engine import open_comms

from support.ranks import run_ranks

CPU = torch.device("cpu")


def numbers(rank, turn):
    return torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * turn + rank))


def sums(rank, turns):
    api.init()
    comm = api.world().comm
    reducers = [message_reducer(comm, None, 7, CPU), GroupReducer(comm, torch.zeros(7, dtype=torch.float64))]
    found, entered = [], []
    for reducer in reducers:
        comm.ledger = Ledger()
        results = []
        for turn in range(turns):
            reducer.inboxes[reducer.turn].copy_(numbers(rank, turn))
            reducer.begin()
            comm.all_reduce(torch.ones(3))  # something else on its way between the same ranks
            reducer.finish(torch.tensor(0.5, dtype=torch.float64) if turn % 2 else None)
            results.append(reducer.outbox.clone())
        found.append(results)
        entered.append(comm.ledger.rows())
    return type(reducers[0]), found, entered


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_exchange_sums_equal_all_reduce_and_agree_bit_for_bit(ranks):
    turns = 4
    answers = run_ranks(ranks, sums, turns)
    for kind, (exchanged, reduced), entered in answers:
        assert kind is ExchangeReducer
        assert entered[0] == entered[1]
        for turn in range(turns):
            expected = sum(numbers(rank, turn) for rank in range(ranks)) * (0.5 if turn % 2 else 1)
            torch.testing.assert_close(exchanged[turn], expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(exchanged[turn], reduced[turn], rtol=0, atol=1e-14)
            assert torch.equal(exchanged[turn], answers[0][1][0][turn])


def sums_of_axes(rank):
    """The sum of the ranks' numbers over each axis of a mesh, in which a rank's place is not its number."""
    api.init()
    comms = open_comms(Mesh.parse("replicate=2,tensor=2"), rank, Ledger())
    found = []
    for axis in ("replicate", "tensor"):
        reducer = message_reducer(comms.axes[axis], None, 1, CPU)
        assert isinstance(reducer, ExchangeReducer)
        reducer.inboxes[0].fill_(10**rank)
        reducer.begin()
        reducer.finish(None)
        found.append(float(reducer.outbox))
    return found


def test_ranks_of_an_axis_hear_of_each_other_alone():
    assert run_ranks(4, sums_of_axes) == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def ends(rank):
    api.init()
    reducer = message_reducer(api.world().comm, None, 7, CPU)
    reducer.begin()
    reducer.finish(None)
    if rank == 1:
        return None
    try:
        for _ in range(2):  # the first may be sent before the other's end is noticed
            reducer.begin()
            reducer.finish(None)
    except PeerLostError as error:
        return str(error)
    return "no error"


def test_a_rank_that_has_gone_is_said():
    assert "one of them has gone" in run_ranks(2, ends)[0]


def test_many_ranks_reduce():
    class Comm:
        rank, size = 0, MAX_EXCHANGING + 1

        def backend(self):
            return "gloo"

    assert isinstance(message_reducer(Comm(), None, 3, CPU), GroupReducer)
