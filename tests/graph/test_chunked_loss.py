"""torch's loss of a large vocabulary by chunks: the same under every plan, and its memory is predicted."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.profile.simulate import simulate
from paceline.train.job import Job

from support.rank_comparisons import compare, train, two_steps
from support.ranks import run_ranks
from support.simulated import check_simulation

VOCABULARY, LENGTH = 96, 8
pytestmark = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no loss by chunks")


class Tokens(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layers = (nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


def loss(model, batch, chunk=None):
    states, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    options = None if chunk is None else nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    weight = model.head.weight
    return F.linear_cross_entropy(states, weight, targets, reduction="sum", options=options), targets.numel()


def workload(name="", vocabulary=VOCABULARY, chunk=6, **parts):
    data = list(torch.randint(0, vocabulary, (16, LENGTH + 1), generator=torch.Generator().manual_seed(0)))
    model = functools.partial(Tokens, vocabulary)
    return two_steps(model=model, loss=functools.partial(loss, chunk=chunk), data=data, batch_size=8, **parts)


def trained(rank, lines, chunk):
    api.init()
    return [train(workload(chunk=chunk), line) for line in lines]


def test_every_plan_has_the_loss_of_one_process():
    alone = run_ranks(1, trained, ["replicate=1"], None)[0][0]  # not by chunks
    lines = ["replicate=2", "shard=2", "tensor=2", "context=2", "pipeline=2"]
    ranks = run_ranks(2, trained, lines, 6)
    verdicts = {line: compare(alone, [each[at] for each in ranks]) for at, line in enumerate(lines)}
    assert verdicts == dict.fromkeys(lines, "equal")


def test_its_memory_is_predicted():
    check_simulation(workload, "", "replicate=1", {"vocabulary": 5000, "chunk": 16, "precision": "float32"})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_operations_are_those_of_the_loss_as_a_whole(device):
    def of(chunk):
        made = workload(vocabulary=5000, chunk=chunk, precision="float32")
        assert isinstance(made, paceline.Workload)
        return simulate(made, Plan(), device=device).flops

    assert of(16) == of(None)


def told(rank, lines, chunk):
    api.init()
    found = []
    for line in lines:
        job = Job(workload(chunk=chunk), Plan.parse(line))
        job.step(next(job.batches()))
        found.append(list(job.parallel.notices))
    return found


def test_it_is_said_where_a_graph_has_it_as_a_whole():
    lines = ["replicate=2", "shard=2", "tensor=2", "pipeline=2"]
    kept, also_kept, split, cut = run_ranks(2, told, lines, 6)[0]
    assert kept == also_kept == []
    assert len(split) == len(cut) == 1
    assert "F.linear_cross_entropy runs without its chunks" in split[0]
    assert run_ranks(2, told, ["tensor=2"], None)[0] == [[]]  # it has no chunks
