"""Rows that go to their experts and come back: values and gradients, with experts that get none."""

from __future__ import annotations

import pytest
import torch

from paceline.graph.expert.expert_exchanges import ExpertExchanges

from support.ranks import preload, run_ranks

pytestmark = pytest.mark.slow
preload("paceline.graph.expert.expert_exchanges")

EXPERTS, WIDTH = 5, 3
COUNTS = {
    "uneven": [[1, 2, 0, 3, 1], [4, 0, 0, 1, 2], [0, 0, 0, 0, 0]],
    "all to one": [[0, 0, 6, 0, 0], [0, 0, 2, 0, 0], [0, 0, 5, 0, 0]],
}


def rows_of(counts, rank):
    return torch.arange(sum(counts) * WIDTH, dtype=torch.float64).view(-1, WIDTH) + 100 * rank


def ends_of(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def go_and_return(rank, kinds):
    import paceline
    from paceline.comm import api

    paceline.init()
    exchanges = ExpertExchanges(api.world().comm)
    made = {}
    for kind in kinds:
        own = COUNTS[kind][rank]
        ends = ends_of(own)
        counts = exchanges.count_rows(ends)
        rows = rows_of(own, rank).requires_grad_()
        here = exchanges.dispatch(rows, counts)
        back = exchanges.combine(here * (rank + 2), counts, len(rows))
        (gradient,) = torch.autograd.grad(back.square().sum(), rows, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), rows)
        made[kind] = [tensor.detach() for tensor in (here, back, gradient, second)]
        made[kind].append(exchanges.ends_here(ends, counts))
    return made


def factors(counts):
    """What the rank of each row's expert multiplies by: two experts a rank."""
    return torch.cat([torch.full((count, 1), expert // 2 + 2.0) for expert, count in enumerate(counts)]).double()


def test_rows_go_to_their_experts_and_come_back():
    ranks = run_ranks(3, go_and_return, list(COUNTS))
    for kind, counts in COUNTS.items():
        for rank, answer in enumerate(ranks):
            here, back, gradient, second, ends = answer[kind]
            own = range(2 * rank, min(2 * rank + 2, EXPERTS))
            expected = []
            for expert in own:
                for source, of_source in enumerate(counts):
                    first = sum(of_source[:expert])
                    expected.append(rows_of(of_source, source)[first : first + of_source[expert]])
            assert torch.equal(here, torch.cat(expected))
            assert ends.tolist() == [sum(of[e] for of in counts for e in own if e <= last) for last in own]
            factor = factors(counts[rank])
            assert torch.equal(back, rows_of(counts[rank], rank) * factor)
            assert torch.equal(gradient, 2 * rows_of(counts[rank], rank) * factor**2)
            assert torch.equal(second, (2 * factor**2).expand(-1, WIDTH))


def select_and_join(rank):
    import paceline
    from paceline.comm import api

    paceline.init()
    exchanges = ExpertExchanges(api.world().comm)
    counts = COUNTS["uneven"][0]
    ends = ends_of(counts)
    rows = rows_of(counts, 0).requires_grad_()
    mine = exchanges.select(rows, ends)
    joined = exchanges.join(mine * (rank + 2), ends, len(rows))
    # Each rank has a share of what the whole result is used for.
    (gradient,) = torch.autograd.grad(joined.square().sum() / 3, rows)
    return mine.detach(), joined.detach(), gradient, exchanges.own_ends(ends).tolist()


def test_experts_compute_replicated_rows_on_the_experts_rank():
    counts = COUNTS["uneven"][0]
    rows, factor = rows_of(counts, 0), factors(counts)
    answers = run_ranks(3, select_and_join)
    for _, joined, _, _ in answers:
        assert torch.equal(joined, rows * factor)
    assert torch.equal(torch.cat([mine for mine, *_ in answers]), rows)
    assert torch.allclose(sum(gradient for _, _, gradient, _ in answers), 2 * rows * factor**2)
    assert [ends for *_, ends in answers] == [[1, 3], [0, 3], [1]]
