"""What a compressed wire leaves out in one step it sends later: nothing is lost."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import api
from paceline.comm.compression import PowerSGDReducer, TopKReducer

from support.ranks import run_ranks

ROWS, COLUMNS, TAIL, TURNS = 40, 30, 2, 6


def send(rank, kind):
    api.init()
    comm = api.world().comm
    flat = torch.zeros(ROWS * COLUMNS + TAIL, dtype=torch.float64)
    reducer = (
        TopKReducer(comm, flat, TAIL) if kind == "topk" else PowerSGDReducer(comm, flat, [torch.Size((ROWS, COLUMNS))])
    )
    random = torch.Generator().manual_seed(rank)
    given, received, tails = torch.zeros_like(flat), torch.zeros_like(flat), []
    for _ in range(TURNS):
        flat.copy_(torch.randn(flat.shape, generator=random, dtype=torch.float64))
        flat[-TAIL:] = 1.0
        given += flat
        reducer.begin()
        reducer.finish(torch.ones((), dtype=torch.float64))
        received += flat
        tails.append(flat[-TAIL:].tolist())
    error = reducer.state()["error"]
    return given[:-TAIL], received[:-TAIL], error[: ROWS * COLUMNS], tails


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_received_plus_kept_back_is_given(kind):
    ranks = run_ranks(2, send, kind)
    given = sum(rank[0] for rank in ranks)
    kept_back = sum(rank[2] for rank in ranks)
    for _, received, _, tails in ranks:
        torch.testing.assert_close(received + kept_back, given, rtol=0, atol=1e-9)
        assert not torch.allclose(received, given), "nothing was left out: the test is void"
        assert tails == [[2.0, 2.0]] * TURNS
    assert torch.equal(ranks[0][1], ranks[1][1])
