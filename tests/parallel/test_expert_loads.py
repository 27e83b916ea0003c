"""How rows went to experts: as one process counts them, under every mix of axes."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.nouns.step_record import ExpertLoad
from paceline.train.job import Job
from paceline.verify.ranks.keep_float64 import kept_wide

from support import expert_models
from support.ranks import preload, run_ranks

preload("paceline.train.job", "paceline.parallel.graph_adapter", "transformers.models.bert.modeling_bert")
PLANS = {  # and their ranks
    "expert=2": 2,
    "expert=4": 4,
    "replicate=2,expert=2": 4,
    "expert=2,tensor=2": 4,
    "context=2,expert=2": 4,
    "pipeline=2,expert=2,micro_batches=2": 4,
    "shard=2,expert=2": 4,
    "expert=2,checkpointing=full": 2,
}


class Free(expert_models.Mixture):
    """Without a bias for some: different tokens choose different experts."""

    def __init__(self):
        super().__init__()
        self.choice_bias.zero_()


def workload(name):
    if name == "lonely":
        return expert_models.workload(name)
    uneven = {"batch_size": 3} if name == "uneven" else {}  # every rank has the rows of all
    return expert_models.workload("mixture", model=functools.partial(expert_models.Reader, Free), **uneven)


def counted(rank, name):
    """The rows of each call of histc, by which these models count, in two steps."""
    api.init()
    job = Job(workload(name), Plan())
    found = []
    count = torch.histc

    def histc(*arguments, **named):
        found.append(count(*arguments, **named))
        return found[-1]

    torch.histc = histc
    with kept_wide(True):
        for batch in job.batches():
            job.step(batch)
    layers = len(found) // 2
    rows = [torch.stack(found[layer::layers]).sum(0) for layer in range(layers)]
    return [(one / one.sum()).tolist() for one in rows]


def loads(rank, name, line):
    api.init()
    with kept_wide(True):
        job = Job(workload(name), Plan.parse(line))
        before = job.parallel.expert_loads()
        for batch in job.batches():
            job.step(batch)
        job.evaluate(expert_models.rows(4))  # which counts nothing
        found = job.parallel.expert_loads()
        return before, found, job.parallel.expert_loads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [*[("free", line) for line in PLANS], ("lonely", "expert=2"), ("lonely", "expert=4"), ("uneven", "expert=2")],
)
def test_shares_are_those_of_one_process(name, line):
    (expected,) = run_ranks(1, counted, name)
    ranks = run_ranks(PLANS[line], loads, name, line)
    for before, found, after in ranks:
        assert (before, after) == ([], [])
        assert found == ranks[0][1]
    shares = [load.shares for load in ranks[0][1]]
    assert shares == [pytest.approx(one) for one in expected]
    size = 4 if "expert=4" in line else 2
    for load in ranks[0][1]:
        each = len(load.shares) // size
        by_rank = [sum(load.shares[at : at + each]) for at in range(0, len(load.shares), each)]
        assert load.ranks == pytest.approx(by_rank)
    if name != "lonely":
        assert min(shares[0]) > 0
        assert len(set(shares[0])) > 2
    if name == "lonely":  # whose rows all go to two of eight
        assert sum(ranks[0][1][0].shares[2:4]) == pytest.approx(1)
        assert ranks[0][1][0].ranks[0] == pytest.approx(0 if size == 4 else 1)


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        ((3, 1), 2, ((0.75, 0.25), (0.75, 0.25))),
        ((1, 1, 2), 2, ((0.25, 0.25, 0.5), (0.5, 0.5))),  # the first rank has more experts
        ((0, 0), 2, None),
    ],
)
def test_a_record(rows, ranks, expected):
    load = ExpertLoad.of("layer", rows, ranks)
    assert (None if load is None else (load.shares, load.ranks)) == expected
